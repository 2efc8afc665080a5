"""The parts of a `PartitionSpec`, and its projection on a mesh and a shape.

Only this module looks inside a spec: a `PartitionSpec` is not a tuple, `P("a", None)` does not
equal `P("a")`, and a spec with `unreduced` axes can neither be iterated over nor rebuilt from its
entries. JAX checks specs one leaf at a time, and its errors have no path. `project` does not raise:
it reports for every axis why it was dropped.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from treeshard._core.mesh import (
    AnyMesh,
    MeshLike,
    as_mesh,
    axes_of_type,
    axis_sizes,
    unknown_axis,
)
from treeshard.errors import counted

Entry = Any  # the entry of a spec for one dim: None, a name, a tuple of names, UNCONSTRAINED
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


class Adjustment(NamedTuple):
    """A difference between the spec that a rule requests and the spec that a leaf gets.

    Attributes:
        kind: `"axis-not-in-mesh"`, `"axis-already-used"`, `"axis-is-manual"`,
            `"already-sharded"`, `"indivisible"`, `"rank"`, `"trimmed"`, `"reduced-type"`,
            `"too-small"`, `"explicit-spec-too-small"`, `"no-dim"`, `"no-logical-rule"`,
            `"logical-axis-not-in-mesh"` or `"unmatched"`.
        why: The reason and the fix, in words.
        axes: The dropped mesh axes.
        dim: The dim from which the axes were dropped, or `None` if there is no single dim.
    """

    kind: str
    why: str
    axes: tuple[str, ...] = ()
    dim: int | None = None


# The kinds that are mistakes in a spec, as opposed to decisions, such as a leaf that stays
# replicated because it is small.
MISFITS = frozenset(
    {
        "axis-not-in-mesh",
        "axis-already-used",
        "already-sharded",
        "indivisible",
        "rank",
        "reduced-type",
    }
)


# ------------------------------------------------------------------ one spec


def is_spec(x: Any) -> bool:
    """Whether `x` is the spec of one leaf: a `PartitionSpec` or a `NamedSharding`."""
    return isinstance(x, PartitionSpec | NamedSharding)


def is_logical(x: Any) -> bool:
    """Whether `x` is a plain tuple of logical names, which is one spec and not a tree."""
    # `type(x) is tuple`: a `NamedTuple` is a node of a tree. `(None, None)` may be a tree, too.
    if type(x) is not tuple or not any(isinstance(entry, str) for entry in x):
        return False
    return all(
        entry is None
        or isinstance(entry, str)
        or (type(entry) is tuple and all(isinstance(name, str) for name in entry))
        for entry in x
    )


def entries(spec: PartitionSpec | NamedSharding) -> tuple[Entry, ...]:
    """The entries of a spec, one per dim. (JAX cannot iterate over an `unreduced` spec.)"""
    return (spec.spec if isinstance(spec, NamedSharding) else spec).partitions


def dim_entries(spec: PartitionSpec, rank: int) -> list[Entry]:
    """The entries of a spec, one for each of `rank` dims."""
    given = entries(spec)
    return [*given, *[None] * (rank - len(given))]


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one entry; empty for `None` and `UNCONSTRAINED`."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple) else ()


def all_axes(of_dims: Iterable[Entry]) -> list[str]:
    """The mesh axes of several entries, one after the other."""
    return list(chain.from_iterable(map(axes_of, of_dims)))


def dims_over(spec: PartitionSpec, axes: Sequence[str]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The dims that some of `axes` shard, each with these axes, outermost first."""
    pairs = []
    for dim, entry in enumerate(entries(spec)):
        if over := tuple(axis for axis in axes_of(entry) if axis in axes):
            pairs.append((dim, over))
    return tuple(pairs)


def part_count(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of parts into which axes of these sizes split a dim."""
    return math.prod(map(sizes.__getitem__, axes))


def entry_of(axes: Sequence[str]) -> Entry:
    """One entry from its axes: `None`, the name, or a tuple of names."""
    # `P(("data",))` and `P("data")` mean the same but are not equal, so only one form is used.
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else tuple(axes)


def with_entries(spec: PartitionSpec, new: Sequence[Entry]) -> PartitionSpec:
    """`spec` with new entries and its `unreduced` and `reduced` axes; trailing `None`s are
    dropped."""
    kept = list(new)
    while kept and kept[-1] is None:
        kept.pop()
    # `update` keeps the axes over which values are unreduced; `PartitionSpec(*kept)` would not.
    return spec.update(partitions=tuple(kept))


def cut_to_rank(spec: PartitionSpec, rank: int) -> PartitionSpec:
    """`spec` without the entries beyond a rank; `spec` itself if it has none."""
    given = entries(spec)
    return spec if len(given) <= rank else with_entries(spec, given[:rank])


def trim_spec(spec: PartitionSpec) -> PartitionSpec:
    """`P("data")` for `P("data", None)`, which means the same but is not equal."""
    return with_entries(spec, entries(spec))


def with_types(
    spec: PartitionSpec, unreduced: Collection[str], reduced: Collection[str]
) -> PartitionSpec:
    """`spec` with other `unreduced` and `reduced` axes."""
    if unreduced:
        return spec.update(unreduced=frozenset(unreduced), reduced=frozenset(reduced))
    # JAX 0.12 rejects dropping the axes of a spec with `reduced`.
    return PartitionSpec(*entries(spec), reduced=frozenset(reduced))


def drop_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """`spec` without some axes, in every dim."""
    kept: list[Entry] = []
    for entry in entries(spec):
        of_entry = axes_of(entry)
        # An entry without axes may be `UNCONSTRAINED`.
        kept.append(entry_of([a for a in of_entry if a not in axes]) if of_entry else entry)
    return with_entries(spec, kept)


def fill_unconstrained(spec: PartitionSpec, now: PartitionSpec) -> PartitionSpec:
    """`spec` with `UNCONSTRAINED` entries replaced from `now`, less axes used elsewhere."""
    requested = entries(spec)
    if UNCONSTRAINED not in requested:
        return spec
    current = dim_entries(drop_axes(now, all_axes(requested)), len(requested))
    both = zip(requested, current, strict=False)
    filled = [current if entry is UNCONSTRAINED else entry for entry, current in both]
    return with_entries(spec, filled)


def project(
    spec: PartitionSpec,
    mesh: MeshLike | None,
    shape: tuple[int, ...] | None,
    *,
    manual: frozenset[str] = frozenset(),
    keep_uneven: bool = False,
    typed: bool = False,
    for_any_rank: bool = False,
) -> tuple[PartitionSpec, tuple[Adjustment, ...]]:
    """Projects a spec on a mesh and a shape: returns the part that fits, and the adjustments.

    1. Drops axes that the mesh lacks, Manual axes, and repeated axes: an axis goes to the first
       dim that names it.
    2. Keeps, per dim, the longest prefix of the axes left that divides it.
    3. Drops entries beyond the rank.
    4. Drops `unreduced` and `reduced` axes where values have no such types.

    No axis moves to another dim. If the spec fits, returns `spec` itself.

    Args:
        spec: The requested spec.
        mesh: The mesh. Without a mesh, only the rank is checked.
        shape: The shape of the array. Without it, neither rank nor divisibility is checked.
        manual: Axes along which the code already runs once per device, so that specs must not
            name them.
        keep_uneven: Whether to keep Auto axes that do not divide their dim, which the partitioner
            pads.
        typed: Whether the spec is of a value that is traced, which may be `unreduced` or `reduced`
            over Explicit axes. Arrays are placed by specs that name no such axes.
        for_any_rank: Whether the spec serves arrays of several ranks, so that entries beyond the
            rank are not a misfit.
    """
    requested = entries(spec)
    rank = len(requested) if shape is None else len(shape)
    sizes = None if mesh is None else axis_sizes(mesh)
    padded = {*axes_of_type(as_mesh(mesh), AxisType.Auto)} if mesh and keep_uneven else set[str]()
    given: list[Entry] = []
    adjustments: list[Adjustment] = []
    used: set[str] = set()
    for dim, entry in enumerate(requested[:rank]):
        axes = axes_of(entry)
        # An entry without axes is `None` or `UNCONSTRAINED`, and stays.
        if sizes is None or not axes:
            given.append(entry)
            continue
        free, notes = _free_axes(spec, dim, axes, sizes, manual, used)
        adjustments += notes
        used.update(free)
        kept = free if shape is None else _dividing_axes(free, sizes, shape[dim])
        if padded.issuperset(free[len(kept) :]):
            kept = free
        elif shape is not None:
            adjustments.append(_indivisible(spec, dim, shape, free, kept, sizes))
        given.append(entry if len(kept) == len(axes) else entry_of(kept))
    adjustments += _beyond_rank(spec, shape, sizes, "trimmed" if for_any_rank else "rank")
    lost = _lost_types(spec, mesh, manual, typed)
    adjustments += lost
    # The same object: callers compare by identity, and JAX caches by it.
    if not adjustments and len(requested) <= rank:
        return spec, ()
    if lost:
        gone = {axis for note in lost for axis in note.axes}
        spec = with_types(spec, spec.unreduced - gone, spec.reduced - gone)
    return with_entries(spec, given), tuple(adjustments)


def _free_axes(
    spec: PartitionSpec,
    dim: int,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    manual: frozenset[str],
    used: Collection[str],
) -> tuple[list[str], list[Adjustment]]:
    """The axes of one dim that a spec can name here, and why it cannot name the others."""
    free: list[str] = []
    notes: list[Adjustment] = []
    for axis in axes:
        note = _absent(axis, sizes, manual, dim)
        # One entry may name an axis twice, too.
        if note is None and (axis in used or axis in free):
            why = f"{spec} names the axis {axis!r} twice. An axis can split one dim only."
            note = Adjustment("axis-already-used", why, (axis,), dim)
        if note is None:
            free.append(axis)
        else:
            notes.append(note)
    return free, notes


def _beyond_rank(
    spec: PartitionSpec, shape: tuple[int, ...] | None, sizes: Mapping[str, int] | None, kind: str
) -> list[Adjustment]:
    """Why a spec is too long for a shape. Entries of `None` beyond the rank do no harm."""
    requested = entries(spec)
    if shape is None or not (beyond := all_axes(requested[len(shape) :])):
        return []
    extra = len(requested) - len(shape)
    last = "the last entry" if extra == 1 else f"the last {extra} entries"
    advice = f"Drop {last}." if kind == "rank" else f"It is applied without {last}."
    why = (
        f"{spec} has {counted(len(requested), 'entry')}, but shape {shape} has"
        f" {counted(len(shape), 'dim')}. {advice}"
    )
    notes = [Adjustment(kind, why, tuple(beyond))]
    # An unknown axis is a mistake in the spec, for arrays of any rank.
    for axis in beyond:
        if sizes is not None and axis not in sizes:
            why = unknown_axis(axis, sizes)
            notes.append(Adjustment("axis-not-in-mesh", why, (axis,)))
    return notes


def _absent(
    axis: str, sizes: Mapping[str, int], manual: frozenset[str], dim: int | None = None
) -> Adjustment | None:
    """Why a spec cannot name an axis here; `None` if it can."""
    if axis not in sizes:
        return Adjustment("axis-not-in-mesh", unknown_axis(axis, sizes), (axis,), dim)
    if axis in manual:
        why = f"{axis!r} is Manual here: the code already runs once per device along it."
        return Adjustment("axis-is-manual", why, (axis,), dim)
    return None


def _dividing_axes(axes: list[str], sizes: Mapping[str, int], length: int) -> list[str]:
    """The longest prefix of the axes that divides a dim."""
    # A prefix, because the axes are outermost first: without inner axes, the shards along outer
    # axes stay on their devices.
    end = len(axes)
    while length % part_count(axes[:end], sizes):
        end -= 1
    return axes[:end]


def _indivisible(
    spec: PartitionSpec,
    dim: int,
    shape: tuple[int, ...],
    axes: list[str],
    kept: list[str],
    sizes: Mapping[str, int],
) -> Adjustment:
    length = shape[dim]
    parts = part_count(axes, sizes)
    padded = -(-length // parts) * parts
    why = (
        f"{spec} splits dim {dim} of shape {shape} into {parts} parts, and {length} is not"
        f" divisible by {parts}. Pad it to {padded}, or use another dim or axis."
    )
    return Adjustment("indivisible", why, tuple(axes[len(kept) :]), dim)


def _lost_types(
    spec: PartitionSpec, mesh: MeshLike | None, manual: frozenset[str], typed: bool
) -> list[Adjustment]:
    """Why values cannot have some of the `unreduced` and `reduced` axes of a spec here."""
    axes = sorted(spec.unreduced | spec.reduced)
    if not axes:
        return []
    # On Auto axes, the compiler decides what is reduced, and types do not show it.
    auto = () if mesh is None else axes_of_type(as_mesh(mesh), AxisType.Auto)
    if typed and not auto:
        if mesh is None:
            return []
        notes = (_absent(axis, axis_sizes(mesh), manual) for axis in axes)
        return [note for note in notes if note is not None]
    names = [f"`{name}` axes" for name in ("unreduced", "reduced") if getattr(spec, name)]
    auto_here = f" Auto here: {', '.join(map(repr, auto))}." if auto else ""
    why = (
        f"{' and '.join(names)} are part of a type, which values have inside jit, under"
        f" `jax.set_mesh` of a mesh of Explicit axes alone.{auto_here} Elsewhere, write"
        f" {with_types(spec, (), ())}."
    )
    return [Adjustment("reduced-type", why, tuple(axes))]


def shard_size(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> int:
    """The number of elements of the largest shard of an array of `shape`."""
    sizes = axis_sizes(mesh)
    # JAX rounds up: all shards but the last ones are of this size.
    elements = 1
    for length, entry in zip(shape, dim_entries(spec, len(shape)), strict=False):
        elements *= -(-length // part_count(axes_of(entry), sizes))
    return elements


def items_per_device(shape: tuple[int, ...], sharding: Sharding | None) -> int:
    """The number of elements of the largest shard of an array with any sharding, or without one."""
    if isinstance(sharding, NamedSharding):
        # `shard_shape` of JAX raises where the axes do not divide a dim.
        return shard_size(shape, sharding.spec, sharding.mesh)
    return math.prod(shape if sharding is None else sharding.shard_shape(shape))


def is_mesh_axes(value: Any) -> bool:
    """Whether `value` can be the entry of one dim: `None`, a name, or several distinct ones."""
    if isinstance(value, tuple | list):
        return all(isinstance(name, str) for name in value) and len(set(value)) == len(value)
    return value is None or isinstance(value, str)

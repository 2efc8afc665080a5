"""The parts of a `PartitionSpec`, and its projection on a mesh and a shape.

The only module that looks inside a spec: a `PartitionSpec` is not a tuple, `P("a", None)` is not
equal to `P("a")`, and one with `unreduced` axes can neither be iterated over nor built again from
its entries. JAX checks specs one leaf at a time and raises without a path; `project` raises
nothing, and says for every axis why it was dropped.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from treeshard._core.jax_private import spec_entries
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
    """One difference between the spec that was requested and the spec that was given.

    Attributes:
        kind: `"axis-not-in-mesh"`, `"axis-already-used"`, `"axis-is-manual"`,
            `"already-sharded"`, `"indivisible"`, `"rank"`, `"reduced-type"`, `"too-small"`,
            `"explicit-spec-too-small"`, `"no-dim"`,
            `"no-base"`, `"cuts-block"` or `"unmatched"`.
        why: The reason in words, and the fix.
        axes: The mesh axes that were dropped, if any.
        dim: The dim from which they were dropped, if it is one dim; of `"no-dim"`, that which
            needs the least padding.
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
    return spec_entries(spec.spec if isinstance(spec, NamedSharding) else spec)


def dim_entries(spec: PartitionSpec, rank: int) -> list[Entry]:
    """The entries of a spec, one for each of `rank` dims."""
    given = entries(spec)
    return [*given, *[None] * (rank - len(given))]


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one entry; none for `None` and `UNCONSTRAINED`."""
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
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else tuple(axes)


def with_entries(spec: PartitionSpec, new: Sequence[Entry]) -> PartitionSpec:
    """`spec` with new entries and its `unreduced` and `reduced` axes; trailing `None`s are
    dropped."""
    trimmed = list(new)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    return spec.update(partitions=tuple(trimmed))


def trimmed(spec: PartitionSpec) -> PartitionSpec:
    """`P("data")` for `P("data", None)`, which is not equal to it and means the same."""
    return with_entries(spec, entries(spec))


def with_types(
    spec: PartitionSpec, unreduced: Collection[str], reduced: Collection[str]
) -> PartitionSpec:
    """`spec` with other `unreduced` and `reduced` axes."""
    if unreduced:
        return spec.update(unreduced=frozenset(unreduced), reduced=frozenset(reduced))
    # JAX 0.12 refuses to drop the axes of a spec that says how they are reduced.
    return PartitionSpec(*entries(spec), reduced=frozenset(reduced))


def without_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """`spec` without some axes, in every dim."""
    kept: list[Entry] = []
    for entry in entries(spec):
        of_entry = axes_of(entry)
        # An entry without axes may be `UNCONSTRAINED`.
        kept.append(entry_of([a for a in of_entry if a not in axes]) if of_entry else entry)
    return with_entries(spec, kept)


def fill_unconstrained(spec: PartitionSpec, now: PartitionSpec) -> PartitionSpec:
    """`spec` with `UNCONSTRAINED` entries replaced by those of `now`, less axes used elsewhere."""
    requested = entries(spec)
    if UNCONSTRAINED not in requested:
        return spec
    current = dim_entries(without_axes(now, all_axes(requested)), len(requested))
    both = zip(requested, current, strict=False)
    filled = [current if entry is UNCONSTRAINED else entry for entry, current in both]
    return with_entries(spec, filled)


def project(
    spec: PartitionSpec,
    mesh: MeshLike | None,
    shape: tuple[int, ...] | None,
    *,
    manual: frozenset[str] = frozenset(),
    divisible: bool = True,
    typed: bool = False,
) -> tuple[PartitionSpec, tuple[Adjustment, ...]]:
    """Projects a spec on a mesh and a shape: returns the part that is possible there, and what is
    not.

    Drops axes that the mesh lacks, Manual axes and repeated axes (an axis goes to the first dim
    that names it). Per dim, keeps the longest prefix of axes that divides it. Drops entries beyond
    the rank, and `unreduced` and `reduced` axes where values have no such types. No axis moves to
    another dim. If nothing has to change, returns `spec` itself.

    Args:
        spec: The requested spec.
        mesh: The mesh; without one only the rank is checked.
        shape: The shape of the array; without one, neither the rank nor divisibility is checked.
        manual: Axes along which the code already runs once per device, so that specs must not
            name them.
        divisible: Whether axes must divide their dim. If not, the spec may be uneven.
        typed: Whether the spec is of a value that is traced, which may be `unreduced` or `reduced`
            over Explicit axes. Arrays are placed by specs that name no such axes.
    """
    requested = entries(spec)
    rank = len(requested) if shape is None else len(shape)
    sizes = None if mesh is None else axis_sizes(mesh)
    given: list[Entry] = []
    adjustments: list[Adjustment] = []
    used: set[str] = set()
    for dim, entry in enumerate(requested[:rank]):
        axes = axes_of(entry)
        if sizes is None or not axes:
            given.append(entry)
            continue
        free, dropped = _free_axes(spec, dim, sizes, manual, used)
        used.update(free)
        kept = free
        if divisible and shape is not None:
            kept, uneven = _dividing_axes(spec, dim, free, sizes, shape)
            dropped += uneven
        adjustments += dropped
        given.append(entry if len(kept) == len(axes) else entry_of(kept))
    if shape is not None:
        adjustments += _beyond_rank(spec, shape)
    result, dropped = spec, []
    if spec.unreduced or spec.reduced:
        has_types = typed and (mesh is None or not axes_of_type(as_mesh(mesh), AxisType.Auto))
        if not has_types:
            result, dropped = _untyped(spec, mesh)
        elif mesh is not None:
            result, dropped = _typed(spec, mesh, manual)
    adjustments += dropped
    if not adjustments and len(requested) <= rank:
        return spec, ()
    return with_entries(result, given), tuple(adjustments)


# Why an adjustment was made, and the fix, by its kind.
_WHY = {
    "axis-is-manual": "{axis!r} is Manual here: the code already runs once per device along it.",
    "axis-already-used": "{spec} names the axis {axis!r} twice. An axis can split one dim only.",
    "indivisible": (
        "{spec} splits dim {dim} of shape {shape} into {parts} parts, and {length} is not divisible"
        " by {parts}. Pad it to {padded}, or use another dim or axis."
    ),
    "rank": "{spec} has {entries}, but shape {shape} has {dims}. Drop {last}.",
    "reduced-type": (
        "{names} are part of a type, which values have inside jit, under `jax.set_mesh` of a mesh"
        " of Explicit axes alone.{auto} Elsewhere, write {plain}."
    ),
}


def _untyped(spec: PartitionSpec, mesh: MeshLike | None) -> tuple[PartitionSpec, list[Adjustment]]:
    """A spec without its `unreduced` and `reduced` axes."""
    names = [f"`{name}` axes" for name in ("unreduced", "reduced") if getattr(spec, name)]
    auto = () if mesh is None else axes_of_type(as_mesh(mesh), AxisType.Auto)
    plain = with_types(spec, (), ())
    why = _WHY["reduced-type"].format(
        names=" and ".join(names),
        auto=f" Auto here: {', '.join(map(repr, auto))}." if auto else "",
        plain=plain,
    )
    axes = tuple(sorted(spec.unreduced | spec.reduced))
    return plain, [Adjustment("reduced-type", why, axes)]


def _typed(
    spec: PartitionSpec, mesh: MeshLike, manual: frozenset[str]
) -> tuple[PartitionSpec, list[Adjustment]]:
    """A spec with those of its `unreduced` and `reduced` axes that values can have on a mesh."""
    sizes = axis_sizes(mesh)
    dropped: list[Adjustment] = []
    for axis in sorted(spec.unreduced | spec.reduced):
        if note := _absent(axis, sizes, manual):
            dropped.append(note)
    gone = {axis for note in dropped for axis in note.axes}
    return with_types(spec, spec.unreduced - gone, spec.reduced - gone), dropped


def _free_axes(
    spec: PartitionSpec,
    dim: int,
    sizes: Mapping[str, int],
    manual: frozenset[str],
    used: set[str],
) -> tuple[list[str], list[Adjustment]]:
    """The axes of a dim that may shard it: in the mesh, not Manual, and not used before."""
    free: list[str] = []
    dropped: list[Adjustment] = []
    for axis in axes_of(entries(spec)[dim]):
        if note := _absent(axis, sizes, manual, dim):
            dropped.append(note)
        elif axis in used or axis in free:
            why = _WHY["axis-already-used"].format(spec=spec, axis=axis)
            dropped.append(Adjustment("axis-already-used", why, (axis,), dim))
        else:
            free.append(axis)
    return free, dropped


def _absent(
    axis: str, sizes: Mapping[str, int], manual: frozenset[str], dim: int | None = None
) -> Adjustment | None:
    """Why a spec cannot name an axis here; `None` if it can."""
    if axis not in sizes:
        return Adjustment("axis-not-in-mesh", unknown_axis(axis, sizes), (axis,), dim)
    if axis in manual:
        return Adjustment("axis-is-manual", _WHY["axis-is-manual"].format(axis=axis), (axis,), dim)
    return None


def _dividing_axes(
    spec: PartitionSpec,
    dim: int,
    axes: list[str],
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
) -> tuple[list[str], list[Adjustment]]:
    """The longest prefix of the axes that divides the dim."""
    length = shape[dim]
    end = len(axes)
    while length % part_count(axes[:end], sizes):
        end -= 1
    if end == len(axes):
        return axes, []
    parts = part_count(axes, sizes)
    padded = -(-length // parts) * parts
    why = _WHY["indivisible"].format(
        spec=spec, dim=dim, shape=shape, length=length, parts=parts, padded=padded
    )
    return axes[:end], [Adjustment("indivisible", why, tuple(axes[end:]), dim)]


def _beyond_rank(spec: PartitionSpec, shape: tuple[int, ...]) -> list[Adjustment]:
    """The axes in entries beyond the rank."""
    requested = entries(spec)
    extra = requested[len(shape) :]
    axes = tuple(all_axes(extra))
    if not axes:
        return []
    why = _WHY["rank"].format(
        spec=spec,
        entries=counted(len(requested), "entry"),
        shape=shape,
        dims=counted(len(shape), "dim"),
        last="the last entry" if len(extra) == 1 else f"the last {len(extra)} entries",
    )
    return [Adjustment("rank", why, axes)]


def shard_size(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> int:
    """The number of elements of the largest shard of an array of `shape`."""
    sizes = axis_sizes(mesh)
    elements = 1
    for length, entry in zip(shape, dim_entries(spec, len(shape)), strict=False):
        elements *= -(-length // part_count(axes_of(entry), sizes))
    return elements


def is_mesh_axes(value: Any) -> bool:
    """Whether `value` can be the entry of one dim: `None`, a name, or several distinct ones."""
    if isinstance(value, tuple | list):
        return all(isinstance(name, str) for name in value) and len(set(value)) == len(value)
    return value is None or isinstance(value, str)

"""What a `PartitionSpec` is made of, and how one lies on a mesh and a shape.

The only module that looks inside a spec.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from treeshard._mesh import AnyMesh, axis_sizes, unknown_axis

Entry = Any  # what stands at one dim of a spec: None, a name, a tuple of names, UNCONSTRAINED
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
# JAX 0.10.0 has no `partitions`; there every spec may be iterated.
_partitions: Callable[[PartitionSpec], tuple[Entry, ...]] = (
    attrgetter("partitions") if hasattr(PartitionSpec, "partitions") else tuple
)


class Adjustment(NamedTuple):
    """One thing that was not done as asked.

    Attributes:
        kind: `"axis-not-in-mesh"`, `"axis-already-used"`, `"axis-is-manual"`,
            `"already-sharded"`, `"indivisible"`, `"rank"`, `"too-small"`, `"no-dim"` or
            `"unmatched"`.
        why: The fact, in words, with the way out.
        axes: The mesh axes that were taken out, if any.
        dim: The dim they were taken from, if it is one.
    """

    kind: str
    why: str
    axes: tuple[str, ...] = ()
    dim: int | None = None


# What a spec that was written down for a leaf may get wrong, as opposed to decisions (a
# leaf kept whole for its size) that are nobody's mistake.
MISFITS = frozenset(
    {"axis-not-in-mesh", "axis-already-used", "already-sharded", "indivisible", "rank"}
)


# ------------------------------------------------------------------ one spec


def is_spec(x: Any) -> bool:
    """Whether `x` says where one leaf lies: a `PartitionSpec` or a `NamedSharding`."""
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
    """The entries of a spec, one a dim. (Iterating it fails once it is `unreduced`.)"""
    return _partitions(spec.spec if isinstance(spec, NamedSharding) else spec)


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one entry; none for `None` and `UNCONSTRAINED`."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple) else ()


def entry_of(axes: Sequence[str]) -> Entry:
    """One entry from its axes: `None`, the name, or a tuple of names."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def with_entries(spec: PartitionSpec, new: Sequence[Entry]) -> PartitionSpec:
    """`spec` with other entries, keeping what else it carries (`unreduced`, `reduced`).

    Trailing `None`s go, so that equal placements are equal specs.
    """
    kept = list(new)
    while kept and kept[-1] is None:
        kept.pop()
    return spec.update(partitions=tuple(kept))


def without_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`spec` with some axes taken out of every dim."""
    gone = frozenset(axes)
    return with_entries(
        spec,
        [
            entry_of([a for a in axes_of(entry) if a not in gone]) if axes_of(entry) else entry
            for entry in entries(spec)
        ],
    )


def settled(spec: PartitionSpec, now: PartitionSpec) -> PartitionSpec:
    """`spec` with each `UNCONSTRAINED` dim as it lies now, less the axes used elsewhere."""
    asked = entries(spec)
    if UNCONSTRAINED not in asked:
        return spec
    used = [axis for entry in asked for axis in axes_of(entry)]
    there = entries(without_axes(now, used)) + (None,) * len(asked)
    return with_entries(
        spec,
        [
            lies if entry is UNCONSTRAINED else entry
            for entry, lies in zip(asked, there, strict=False)
        ],
    )


def project(
    spec: PartitionSpec,
    mesh: AnyMesh | None,
    shape: tuple[int, ...],
    *,
    manual: frozenset[str] = frozenset(),
) -> tuple[PartitionSpec, tuple[Adjustment, ...]]:
    """Projects a spec on a mesh and a shape: what of it can be had, and what was taken.

    Axes that the mesh lacks, Manual ones and repeated ones drop out (an axis goes to the
    first dim that names it). Per dim, the longest prefix of axes that divides it stays.
    Entries beyond the rank go. Nothing ever moves to another dim.

    Args:
        spec: What was asked for.
        mesh: What for. Without one only the rank is looked at.
        shape: The shape of the array.
        manual: Axes that no spec may name here: those over which the code runs once per
            device already.

    Returns:
        The spec that can be had (`spec` itself if that is all of it), and the adjustments
        in the order of dims.
    """
    asked = entries(spec)
    sizes = None if mesh is None else axis_sizes(mesh)
    given: list[Entry] = []
    lost: list[Adjustment] = []
    used: set[str] = set()
    for dim, entry in enumerate(asked[: len(shape)]):
        axes = axes_of(entry)
        if sizes is None or not axes:
            given.append(entry)
            continue
        free = _available(spec, dim, axes, sizes, used, manual, lost)
        kept = _divisible_prefix(spec, dim, free, sizes, shape, lost)
        used.update(free)
        given.append(entry if kept == list(axes) else entry_of(kept))
    if extra := [axis for entry in asked[len(shape) :] for axis in axes_of(entry)]:
        lost.append(_beyond_rank(spec, shape, extra))
    if not lost and len(asked) <= len(shape):
        return spec, ()
    return with_entries(spec, given), tuple(lost)


def _available(
    spec: PartitionSpec,
    dim: int,
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
    used: set[str],
    manual: frozenset[str],
    lost: list[Adjustment],
) -> list[str]:
    free: list[str] = []
    for axis in axes:
        if axis not in sizes:
            lost.append(Adjustment("axis-not-in-mesh", unknown_axis(axis, sizes), (axis,), dim))
        elif axis in manual:
            why = f"{axis!r} is Manual here: the code already runs once per device along it."
            lost.append(Adjustment("axis-is-manual", why, (axis,), dim))
        elif axis in used or axis in free:
            why = f"{spec} names the axis {axis!r} twice. An axis can split one dim only."
            lost.append(Adjustment("axis-already-used", why, (axis,), dim))
        else:
            free.append(axis)
    return free


def _divisible_prefix(
    spec: PartitionSpec,
    dim: int,
    free: list[str],
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    lost: list[Adjustment],
) -> list[str]:
    end = len(free)
    while shape[dim] % math.prod(sizes[axis] for axis in free[:end]):
        end -= 1
    if end < len(free):
        wanted = math.prod(sizes[axis] for axis in free)
        why = (
            f"{spec} splits dim {dim} of shape {shape} in {wanted}, which does not divide"
            f" {shape[dim]}. Pad it to {-(-shape[dim] // wanted) * wanted}, or use another dim"
            " or axis."
        )
        lost.append(Adjustment("indivisible", why, tuple(free[end:]), dim))
    return free[:end]


def _beyond_rank(spec: PartitionSpec, shape: tuple[int, ...], extra: list[str]) -> Adjustment:
    count, rank = len(entries(spec)), len(shape)
    drop = "the last entry" if count - rank == 1 else f"the last {count - rank} entries"
    why = (
        f"{spec} has {count} {'entry' if count == 1 else 'entries'}, but shape {shape} has"
        f" {rank} dim{'' if rank == 1 else 's'}. Drop {drop}."
    )
    return Adjustment("rank", why, tuple(extra))


def shard_size(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> int:
    """How many elements of an array of `shape` the fullest device holds."""
    sizes = axis_sizes(mesh)
    held = 1
    for dim, length in enumerate(shape):
        axes = axes_of(entries(spec)[dim]) if dim < len(entries(spec)) else ()
        held *= -(-length // math.prod(sizes[axis] for axis in axes))
    return held


# ------------------------------------------------------------------ what a spec is for


def array_text(x: Any) -> str:
    """`float32[8,4]`"""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def is_array(x: Any) -> bool:
    """Whether `x` holds numbers (or keys) that can lie on devices.

    Functions, strings, Python scalars and numpy's object arrays do not: they pass through
    every function untouched.
    """
    if isinstance(x, jax.Array):
        return True
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufcV"


def has_shape(x: Any) -> bool:
    """Whether `x` is an array or stands for one, as a `ShapeDtypeStruct` does."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)

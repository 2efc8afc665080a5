"""The steps that tactics are made of."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import PartitionSpec

from treeshard._errors import SpecError
from treeshard._mesh import AnyMesh, axis_sizes, unknown_axis
from treeshard._partition_axis import is_mesh_axes
from treeshard._specs import (
    UNCONSTRAINED,
    Adjustment,
    Entry,
    axes_of,
    entries,
    entry_of,
    project,
    with_entries,
)

Refined = tuple[PartitionSpec, tuple[Adjustment, ...]]
Update = Callable[[PartitionSpec, Any, str, Any], Any]  # (spec, mesh, path, leaf) -> spec
LooksAt = Literal["shape", "bytes", "leaf"]


class Refinement:
    """One step of a tactic: refines the spec that the previous steps returned.

    Attributes:
        min_size: The step's own threshold in elements; `None` uses the call's.
        looks_at: What its result depends on: the leaf's shape, its shape and itemsize, or
            the leaf itself. Results are shared between leaves for which these are equal.
        reads_boxes: Whether it needs the box around a leaf, if there is one.
        fsdp_axes: The axes over which it shards parameters that are gathered for use.
    """

    min_size: int | None = None
    looks_at: LooksAt = "leaf"
    reads_boxes: bool = False
    fsdp_axes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The step as it is written in strategy strings."""
        return repr(self)

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        """Returns the refined spec, and what could not be done.

        Raises `SpecError` if a user's update did not return a spec.
        """
        raise NotImplementedError


def padded(spec: PartitionSpec, rank: int) -> list[Entry]:
    """The entries of a spec, one for each of `rank` dims."""
    return [*entries(spec), *[None] * (rank - len(entries(spec)))]


def is_free(entry: Entry) -> bool:
    """Whether a dim with this entry is not sharded."""
    return entry is None or entry == ()


def _axis_conflicts(
    spec: PartitionSpec, axes: tuple[str, ...], mesh: AnyMesh
) -> tuple[Adjustment, ...]:
    """Why axes cannot be added to a spec: the mesh lacks them, or the spec uses them already."""
    sizes = axis_sizes(mesh)
    if absent := [axis for axis in axes if axis not in sizes]:
        return tuple(
            Adjustment("axis-not-in-mesh", unknown_axis(axis, sizes), (axis,)) for axis in absent
        )
    if used := tuple(a for entry in entries(spec) for a in axes_of(entry) if a in axes):
        why = f"{spec} uses {', '.join(map(repr, used))} already. An axis can split only one dim."
        return (Adjustment("axis-already-used", why, used),)
    return ()


# ------------------------------------------------------------------ the steps


@dataclass(frozen=True, repr=False)
class Replicate(Refinement):
    """Replicates a leaf."""

    min_size = 0  # applies to leaves of every size
    looks_at = "shape"

    def __repr__(self) -> str:
        return "replicate()"

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        if all(map(is_free, entries(spec))):
            return with_entries(spec, ()), ()
        why = f"an earlier tactic sharded it as {spec}, so it cannot be replicated. Drop either."
        return spec, (Adjustment("already-sharded", why),)


@dataclass(frozen=True, repr=False)
class Fsdp(Refinement):
    """Shards the largest free dim that the axes divide."""

    axes: tuple[str, ...]
    min_size: int | None = None
    skip: tuple[int, ...] = ()
    looks_at = "shape"

    def _call(self, *options: str) -> str:
        skip = [f"skip={self.skip}"] if self.skip else []
        return f"fsdp({', '.join([repr(entry_of(self.axes)), *options, *skip])})"

    def __repr__(self) -> str:
        return self.text if self.min_size is not None else self._call()

    @property
    def text(self) -> str:
        # In a string, `fsdp` without `min_size` has big_vision's threshold in MiB.
        return self._call(f"min_size={self.min_size}")

    @property
    def fsdp_axes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.axes

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        if conflicts := _axis_conflicts(spec, self.axes, mesh):
            return spec, conflicts
        count = math.prod(axis_sizes(mesh)[axis] for axis in self.axes)
        dim = self._largest_dim(spec, tuple(leaf.shape), count)
        if dim is None:
            why = f"no free dim of shape {tuple(leaf.shape)} is divisible by {count}."
            return spec, (Adjustment("no-dim", why, self.axes),)
        new = padded(spec, len(leaf.shape))
        new[dim] = entry_of(self.axes)
        return with_entries(spec, new), ()

    def _largest_dim(self, spec: PartitionSpec, shape: tuple[int, ...], count: int) -> int | None:
        skipped = {dim + len(shape) if dim < 0 else dim for dim in self.skip}
        sharded = {dim for dim, entry in enumerate(entries(spec)) if not is_free(entry)}
        candidates = [
            (length, dim)
            for dim, length in enumerate(shape)
            if length and length % count == 0 and dim not in skipped | sharded
        ]
        return max(candidates)[1] if candidates else None


@dataclass(frozen=True, repr=False)
class FsdpByBytes(Fsdp):
    """`Fsdp` with big_vision's threshold: leaves of so many MiB or fewer are replicated."""

    min_size: int | None = 0
    min_size_to_shard_mb: int | float = 4
    looks_at = "bytes"

    def __repr__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        return self._call(f"min_size_to_shard_mb={self.min_size_to_shard_mb}")

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if size <= self.min_size_to_shard_mb * 2**20:
            why = (
                f"{size} bytes are not more than min_size_to_shard_mb={self.min_size_to_shard_mb}."
            )
            return spec, (Adjustment("too-small", why),)
        return super().refine(spec, mesh, path, leaf)


@dataclass(frozen=True, repr=False)
class ShardDim(Refinement):
    """Shards one given dim."""

    axes: tuple[str, ...]
    dim: int
    ignore_ndim_error: bool = False
    looks_at = "shape"

    def __repr__(self) -> str:
        ignore = ", ignore_ndim_error=True" if self.ignore_ndim_error else ""
        return f"shard_dim({entry_of(self.axes)!r}, {self.dim}{ignore})"

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        shape = tuple(leaf.shape)
        if not -len(shape) <= self.dim < len(shape):
            return spec, () if self.ignore_ndim_error else (self._beyond(shape),)
        new = padded(spec, len(shape))
        if not is_free(new[self.dim]):
            why = (
                f"an earlier tactic already sharded dim {self.dim}: {spec}. Give all its axes to"
                " one tactic, outermost first, or choose another dim."
            )
            return spec, (Adjustment("already-sharded", why, self.axes, self.dim % len(shape)),)
        if conflicts := _axis_conflicts(spec, self.axes, mesh):
            return spec, conflicts
        new[self.dim] = entry_of(self.axes)
        return project(with_entries(spec, new), mesh, shape)

    def _beyond(self, shape: tuple[int, ...]) -> Adjustment:
        why = (
            f"shape {shape} has no dim {self.dim}. Make the pattern match fewer leaves, or pass"
            " `ignore_ndim_error=True` to keep the spec of such leaves."
        )
        return Adjustment("rank", why, self.axes)


@dataclass(frozen=True, repr=False)
class Own(Refinement):
    """A user's update. `call` is the name and the arguments that made it."""

    call: str
    update: Update = field(compare=False)

    def __repr__(self) -> str:
        return self.call

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        shape = tuple(leaf.shape)
        full_rank = spec.update(partitions=tuple(padded(spec, len(shape))))
        returned = self.update(full_rank, mesh, path, leaf)
        return project(self._checked(returned, shape, spec), mesh, shape)

    def _checked(self, returned: Any, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        if isinstance(returned, PartitionSpec):
            if len(entries(with_entries(returned, entries(returned)))) <= len(shape):
                return returned
        elif not isinstance(returned, tuple | list):
            raise SpecError(
                f"the tactic {self.call} returned {returned!r} ({type(returned).__name__}), which"
                " is not a spec. Return the spec that it was called with, or a changed one."
            )
        elif bad := [e for e in returned if not (e is UNCONSTRAINED or is_mesh_axes(e))]:
            raise SpecError(
                f"the tactic {self.call} returned {returned!r}, and {bad[0]!r} is not an entry of a"
                " spec. An entry is a mesh axis, a tuple of them, or None."
            )
        elif len(returned) == len(shape):
            return with_entries(spec, [tuple(e) if isinstance(e, list) else e for e in returned])
        raise SpecError(
            f"the tactic {self.call} returned {returned!r}, which has {len(returned)} entries, for"
            f" shape {shape}. Return one entry per dim."
        )

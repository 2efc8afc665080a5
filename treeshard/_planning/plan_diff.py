"""The difference between two plans: the leaves that change, and the bytes that a device receives.

The bytes follow from the regions of each device before and after, not from the transfers of
`reshard`. Without devices, regions are unknown, and the bytes are an upper bound.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from jax.sharding import Mesh, NamedSharding

from treeshard._core.arrays import array_text, intersect, region_of, region_shape
from treeshard._core.mesh import AnyMesh, axis_sizes, describe_mesh, same_axes
from treeshard._core.paths import pair
from treeshard._core.specs import axes_of, dim_entries, part_count
from treeshard._core.text import columns, fold, human_bytes
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.planned import PlannedTree
from treeshard.errors import counted


class LeafChange(NamedTuple):
    """A leaf that two plans shard differently, or that only one of them has.

    Attributes:
        path: The leaf's path.
        before: The leaf in the first plan; `None` if only the second has it.
        after: The leaf in the second plan; `None` if only the first has it.
        bytes: The bytes of the leaf that a device receives, for the device that receives the most.
            With an abstract mesh, an upper bound.
    """

    path: str
    before: PlannedLeaf | None
    after: PlannedLeaf | None
    bytes: int


class PlanDiff(NamedTuple):
    """The differences between two plans, from `Plan.diff`. It is false if the plans agree.

    Attributes:
        changes: The leaves that are sharded differently, or that only one plan has.
        bytes: The sum of `LeafChange.bytes` over all changes.
        meshes: The mesh of the first plan, and the mesh of the second plan.
        bytes_per_device: For each plan, the bytes on the device that holds the most.
    """

    changes: tuple[LeafChange, ...]
    bytes: int
    meshes: tuple[AnyMesh, AnyMesh]
    bytes_per_device: tuple[int, int]

    def __bool__(self) -> bool:
        return bool(self.changes) or not same_axes(*self.meshes)

    def __str__(self) -> str:
        """One line per change, with repeated layers folded, then the total."""
        rows = [("path", "array", "before", "after", "received")]
        for path, alike in fold((x.path, (*_cells(x), x.bytes), x) for x in self.changes):
            received = human_bytes(sum(change.bytes for change in alike))
            rows.append((path or "(the tree)", *_cells(alike[0]), received))
        lines = [columns(rows, right=4)] if self.changes else []
        before, after = map(describe_mesh, self.meshes)
        if before != after:
            lines.append(f"The mesh changes from {before} to {after}.")
        sizes = " to ".join(map(human_bytes, self.bytes_per_device))
        count = len(self.changes)
        lines.append(
            f"{counted(count, 'leaf')} {'changes' if count == 1 else 'change'}; a device receives"
            f" at most {human_bytes(self.bytes)}. The fullest device goes from {sizes}."
        )
        return "\n".join(lines)


def _cells(change: LeafChange) -> tuple[str, str, str]:
    """The array, and its spec before and after."""
    both = (change.before, change.after)
    arrays = [array_text(x) for x in both if x is not None]
    before, after = ("-" if x is None else x.placement_text() for x in both)
    return " to ".join(dict.fromkeys(arrays)), before, after


def diff_plans(before: PlannedTree, after: PlannedTree) -> PlanDiff:
    """Compares the leaves of two plans, matched by path."""
    meshes = before.mesh, after.mesh
    changes: list[LeafChange] = []
    by_path = [[(leaf.path, leaf) for leaf in plan.leaves] for plan in (before, after)]
    for path, old, new in pair(*by_path):
        cost = 0 if new is None else _received_bytes(old, new, meshes)
        # If a replicated leaf is split, the change is 0 bytes.
        kept = {None if x is None else (x.shape, x.dtype, x.memory, *_axes(x)) for x in (old, new)}
        if cost or len(kept) > 1:
            changes.append(LeafChange(path, old, new, cost))
    # Leaves in any memory count, unlike in `Plan.bytes_per_device`.
    sizes = [
        sum(leaf.bytes_per_device(plan.mesh) for leaf in plan.leaves) for plan in (before, after)
    ]
    received = sum(change.bytes for change in changes)
    return PlanDiff(tuple(changes), received, meshes, (sizes[0], sizes[1]))


def _axes(leaf: PlannedLeaf) -> list[tuple[str, ...]]:
    """The axes that shard each dim."""
    return [axes_of(entry) for entry in dim_entries(leaf.given, len(leaf.shape))]


def _received_bytes(
    old: PlannedLeaf | None, new: PlannedLeaf, meshes: tuple[AnyMesh, AnyMesh]
) -> int:
    """The most bytes of a leaf that a device receives.

    1. The full new shard counts if the leaf is new, or moves to another memory.
    2. With devices, the part of the new shard that the device does not have yet counts.
    3. Without devices, on meshes of different axes, the full shard counts.
    4. Without devices, on meshes of the same axes, each device is assumed to keep its position.
    """
    before, after = meshes
    shard = new.bytes_per_device(after)
    if old is None or (old.shape, old.dtype) != (new.shape, new.dtype) or old.memory != new.memory:
        return shard
    if isinstance(before, Mesh) and isinstance(after, Mesh):
        shardings = NamedSharding(before, old.given), NamedSharding(after, new.given)
        return _received_elements(*shardings, new.shape) * new.dtype.itemsize
    if not same_axes(before, after):
        return shard
    return shard - _certain_overlap(old, new, after) * new.dtype.itemsize


def _certain_overlap(old: PlannedLeaf, new: PlannedLeaf, mesh: AnyMesh) -> int:
    """The number of elements of its new shard that any device has already."""
    sizes = axis_sizes(mesh)
    # Along one dim, the old and the new shard of a device certainly overlap only if the axes of one
    # spec begin with the axes of the other. On a mesh (a=2, b=2), a device has a half by P("a"), a
    # quarter in the same half by P(("a", "b")), and a half that may be the other one by P("b").
    overlap = 1
    for length, *both in zip(new.shape, _axes(old), _axes(new), strict=True):
        splitting = [[axis for axis in axes if sizes[axis] > 1] for axes in both]
        short, long = sorted(splitting, key=len)
        overlap *= -(-length // part_count(long, sizes)) if long[: len(short)] == short else 0
    return overlap


# The leaves of a model have few shapes and specs.
@lru_cache(4096)
def _received_elements(before: NamedSharding, after: NamedSharding, shape: tuple[int, ...]) -> int:
    """The most elements that a device receives."""
    held = {d: region_of(i, shape) for d, i in before.devices_indices_map(shape).items()}
    received = 0
    for device, index in after.devices_indices_map(shape).items():
        region = region_of(index, shape)
        kept = intersect(region, held[device]) if device in held else None
        missing = math.prod(region_shape(region))
        if kept is not None:
            missing -= math.prod(region_shape(kept))
        received = max(received, missing)
    return received

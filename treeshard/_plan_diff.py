"""The difference between two plans, and the bytes that each device would receive."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treeshard._decision import PlannedLeaf
from treeshard._describe import columns, fold, human_bytes
from treeshard._mesh import AnyMesh, axis_sizes, describe_mesh, same_axes
from treeshard._specs import array_text, axes_of, entries


class LeafChange(NamedTuple):
    """A leaf that two plans shard differently, or that only one of them has.

    Attributes:
        path: The leaf's path.
        before: The leaf in the first plan; `None` if only the second has it.
        after: The leaf in the second plan; `None` if only the first has it.
        bytes: An upper bound on what a device receives of it.
    """

    path: str
    before: PlannedLeaf | None
    after: PlannedLeaf | None
    bytes: int


class PlanDiff(NamedTuple):
    """The difference between two plans: see `Plan.diff`. It is false if there is none.

    Attributes:
        changes: The leaves that are sharded differently, or that only one plan has.
        bytes: An upper bound on what a device receives to change from one to the other.
        meshes: The meshes of both plans.
        bytes_per_device: For both plans, the bytes on the device that holds the most.
    """

    changes: tuple[LeafChange, ...]
    bytes: int
    meshes: tuple[AnyMesh, AnyMesh]
    bytes_per_device: tuple[int, int]

    def __bool__(self) -> bool:
        return bool(self.changes) or not same_axes(*self.meshes)

    def __str__(self) -> str:
        """One line per change, repeated layers folded, then the total."""
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
            f"{count:,} {'leaf changes' if count == 1 else 'leaves change'}; a device receives at"
            f" most {human_bytes(self.bytes)}. The fullest device goes from {sizes}."
        )
        return "\n".join(lines)


def _cells(change: LeafChange) -> tuple[str, str, str]:
    """The array, and its spec before and after."""
    both = (change.before, change.after)
    arrays = [array_text(x) for x in both if x is not None]
    before, after = ("-" if x is None else str(x.given) for x in both)
    return " to ".join(dict.fromkeys(arrays)), before, after


def diff(
    before: Sequence[PlannedLeaf],
    after: Sequence[PlannedLeaf],
    meshes: tuple[AnyMesh, AnyMesh],
) -> PlanDiff:
    """Compares the leaves of two plans, matched by path."""
    olds, news = _numbered(before), _numbered(after)
    changes: list[LeafChange] = []
    received = 0
    for key in dict.fromkeys((*olds, *news)):
        old, new = olds.get(key), news.get(key)
        cost = 0 if new is None else _received(old, new, meshes)
        received += cost
        if cost or not _same(old, new):
            changes.append(LeafChange(key[0], old, new, cost))
    sizes = [
        sum(leaf.bytes_per_device(mesh) for leaf in leaves)
        for leaves, mesh in zip((before, after), meshes, strict=True)
    ]
    return PlanDiff(tuple(changes), received, meshes, (sizes[0], sizes[1]))


def _numbered(leaves: Iterable[PlannedLeaf]) -> dict[tuple[str, int], PlannedLeaf]:
    """Leaves by path. Those that share a path are numbered in their order."""
    counts: dict[str, int] = {}
    numbered: dict[tuple[str, int], PlannedLeaf] = {}
    for leaf in leaves:
        count = counts[leaf.path] = counts.get(leaf.path, -1) + 1
        numbered[leaf.path, count] = leaf
    return numbered


def _same(old: PlannedLeaf | None, new: PlannedLeaf | None) -> bool:
    if old is None or new is None:
        return False
    return (old.shape, old.dtype, _axes(old)) == (new.shape, new.dtype, _axes(new))


def _axes(leaf: PlannedLeaf) -> list[tuple[str, ...]]:
    """The axes that shard each dim."""
    given = [axes_of(entry) for entry in entries(leaf.given)]
    return given + [()] * (len(leaf.shape) - len(given))


def _received(old: PlannedLeaf | None, new: PlannedLeaf, meshes: tuple[AnyMesh, AnyMesh]) -> int:
    """An upper bound on the bytes of the new shard that a device does not hold yet.

    If both meshes have the same axes, each device is assumed to keep its position;
    otherwise all of the shard counts. Along one dim, the old and the new shard of a device
    overlap for certain only if the axes of one spec begin with those of the other.
    """
    shard = new.bytes_per_device(meshes[1])
    alike = old is not None and (old.shape, old.dtype) == (new.shape, new.dtype)
    if old is None or not alike or not same_axes(*meshes):
        return shard
    sizes = axis_sizes(meshes[1])
    overlap = new.dtype.itemsize
    for length, *both in zip(new.shape, _axes(old), _axes(new), strict=True):
        splitting = [[axis for axis in axes if sizes[axis] > 1] for axes in both]
        short, long = sorted(splitting, key=len)
        parts = math.prod(sizes[axis] for axis in long)
        overlap *= -(-length // parts) if long[: len(short)] == short else 0
    return shard - overlap

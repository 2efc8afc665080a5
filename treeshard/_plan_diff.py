"""What differs between two plans, and what devices would have to receive."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treeshard._decision import PlannedLeaf
from treeshard._describe import columns, fold, human_bytes
from treeshard._mesh import AnyMesh, axis_sizes, describe_mesh, same_axes
from treeshard._specs import array_text, axes_of, entries


class LeafChange(NamedTuple):
    """A leaf that two plans place differently, or that only one of them has.

    Attributes:
        path: Its name.
        before: What the first plan says of it; `None` if it is new.
        after: What the second says; `None` if it is gone.
        bytes: What a device must receive of it, at most.
    """

    path: str
    before: PlannedLeaf | None
    after: PlannedLeaf | None
    bytes: int


class PlanDiff(NamedTuple):
    """What differs between two plans: see `Plan.diff`. It is false if nothing does.

    Attributes:
        changes: The leaves that are placed differently, new, or gone.
        bytes: What a device must receive to get from one to the other, at most.
        meshes: The mesh of each.
        bytes_per_device: What the fullest device holds under each.
    """

    changes: tuple[LeafChange, ...]
    bytes: int
    meshes: tuple[AnyMesh, AnyMesh]
    bytes_per_device: tuple[int, int]

    def __bool__(self) -> bool:
        return bool(self.changes) or not same_axes(*self.meshes)

    def __str__(self) -> str:
        """A line a change, repeated layers folded, and what it costs."""
        rows = [("path", "array", "before", "after", "received")]
        for path, alike in fold((x.path, (*_say(x), x.bytes), x) for x in self.changes):
            moved = human_bytes(sum(change.bytes for change in alike))
            rows.append((path or "(the tree)", *_say(alike[0]), moved))
        lines = [columns(rows, right=4)] if self.changes else []
        before, after = map(describe_mesh, self.meshes)
        if before != after:
            lines.append(f"The mesh was {before} and is {after}.")
        held = " to ".join(map(human_bytes, self.bytes_per_device))
        count = len(self.changes)
        lines.append(
            f"{count:,} {'leaf' if count == 1 else 'leaves'} placed differently; a device receives"
            f" {human_bytes(self.bytes)} at most. The fullest goes from {held}."
        )
        return "\n".join(lines)


def _say(change: LeafChange) -> tuple[str, str, str]:
    both = (change.before, change.after)
    arrays = [array_text(x) for x in both if x is not None]
    before, after = ("-" if x is None else str(x.given) for x in both)
    return " to ".join(dict.fromkeys(arrays)), before, after


def diff(
    before: Sequence[PlannedLeaf],
    after: Sequence[PlannedLeaf],
    meshes: tuple[AnyMesh, AnyMesh],
) -> PlanDiff:
    """What changes from the leaves of one plan to those of another, matched by path."""
    # Leaves that share a path go with each other in their order.
    olds, news = _numbered(before), _numbered(after)
    changes: list[LeafChange] = []
    received = 0
    for key in dict.fromkeys((*olds, *news)):
        old, new = olds.get(key), news.get(key)
        cost = 0 if new is None else _received(old, new, meshes)
        received += cost
        if cost or not _same(old, new):
            changes.append(LeafChange(key[0], old, new, cost))
    held = tuple(
        sum(leaf.bytes_per_device(mesh) for leaf in leaves)
        for leaves, mesh in zip((before, after), meshes, strict=True)
    )
    return PlanDiff(tuple(changes), received, meshes, (held[0], held[1]))


def _numbered(leaves: Iterable[PlannedLeaf]) -> dict[tuple[str, int], PlannedLeaf]:
    seen: dict[str, int] = {}
    found: dict[tuple[str, int], PlannedLeaf] = {}
    for leaf in leaves:
        count = seen[leaf.path] = seen.get(leaf.path, -1) + 1
        found[leaf.path, count] = leaf
    return found


def _same(old: PlannedLeaf | None, new: PlannedLeaf | None) -> bool:
    if old is None or new is None:
        return False
    return (old.shape, old.dtype, _axes(old)) == (new.shape, new.dtype, _axes(new))


def _axes(leaf: PlannedLeaf) -> list[tuple[str, ...]]:
    """The axes of every dim."""
    given = [axes_of(entry) for entry in entries(leaf.given)]
    return given + [()] * (len(leaf.shape) - len(given))


def _received(old: PlannedLeaf | None, new: PlannedLeaf, meshes: tuple[AnyMesh, AnyMesh]) -> int:
    """The bytes of the new shard that a device does not hold, at most.

    Devices are taken to keep their place in a mesh of the same axes; in another mesh
    nothing is known of them, and all of a shard counts. Per dim, a device holds what it
    needs of it if one of both sets of axes begins with the other; else nothing is sure.
    """
    shard = new.bytes_per_device(meshes[1])
    alike = old is not None and (old.shape, old.dtype) == (new.shape, new.dtype)
    if old is None or not alike or not same_axes(*meshes):
        return shard
    sizes = axis_sizes(meshes[1])
    shared = new.dtype.itemsize
    for length, *both in zip(new.shape, _axes(old), _axes(new), strict=True):
        real = [[axis for axis in axes if sizes[axis] > 1] for axes in both]
        short, long = sorted(real, key=len)
        parts = math.prod(sizes[axis] for axis in long)
        shared *= -(-length // parts) if long[: len(short)] == short else 0
    return shard - shared

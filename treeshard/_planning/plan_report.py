"""Shows a plan as text, and the difference between two plans.

Repeated layers are one line: a model of 80 layers has thousands of leaves and some ten decisions.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.sharding import AxisType, Mesh, NamedSharding

from treeshard._core.arrays import (
    array_text,
    intersect,
    processes_by_shard,
    region_of,
    region_shape,
)
from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes, describe_mesh, same_axes
from treeshard._core.paths import pair
from treeshard._core.specs import Adjustment, all_axes, axes_of, dim_entries, entries, part_count
from treeshard._core.text import columns, fold, human_bytes
from treeshard._planning.matching import SMALL, PlannedLeaf
from treeshard._planning.rules import kind_of
from treeshard.errors import counted

if TYPE_CHECKING:
    from treeshard._planning.plan import Plan

Rules = Sequence[tuple[Any, Any]]


_HEADS = ("path", "array", "spec", "per device", "why")
_WITH_ROLES = (*_HEADS[:-1], "in the step", "why")
_BYTES = 3  # the right-aligned column


def describe(plan: "Plan") -> str:
    """A plan as aligned columns, followed by its totals."""
    return f"{columns(_rows(plan), right=_BYTES)}\n{_totals(plan)}"


def _rows(plan: "Plan") -> list[tuple[str, ...]]:
    has_roles = any(leaf.role for leaf in plan.leaves)
    rows: list[tuple[str, ...]] = [_WITH_ROLES if has_roles else _HEADS]
    alike = fold(
        (x.path, (x.shape, x.unpadded, x.dtype, x.decision, x.role), x) for x in plan.leaves
    )
    for path, members in alike:
        leaf = members[0]
        size = human_bytes(leaf.bytes_per_device(plan.mesh) * len(members))
        role = [] if leaf.role is None else [leaf.role]
        array = type_text(leaf, plan.mesh)
        rows.append(
            (path or "(the tree)", array, _where(leaf), size, *role, _reason(leaf, plan.rules))
        )
    return rows


def type_text(leaf: PlannedLeaf, mesh: AnyMesh) -> str:
    """`float32[512,64]`; on Explicit axes the type that JAX prints, `float32[512@fsdp,64]`."""
    explicit = axes_of_type(mesh, AxisType.Explicit)
    dims: list[str] = []
    for length, entry in zip(leaf.shape, dim_entries(leaf.given, len(leaf.shape)), strict=True):
        axes = [axis for axis in axes_of(entry) if axis in explicit]
        together = ",".join(axes) if len(axes) < 2 else f"({','.join(axes)})"
        dims.append(f"{length}@{together}" if axes else str(length))
    return f"{leaf.dtype}[{','.join(dims)}]"


def _where(leaf: PlannedLeaf) -> str:
    return str(leaf.given) if leaf.memory is None else f"{leaf.given} in {leaf.memory}"


def _reason(leaf: PlannedLeaf, rules: Rules) -> str:
    if not leaf.shape and leaf.rule is None:
        why = "scalar"
    elif leaf.rule is None:
        # Unmatched leaves have an adjustment; others are in a plan that follows another one.
        why = "" if leaf.adjustments else "no counterpart"
    else:
        action = rules[leaf.rule][1]
        kind = kind_of(action)
        why = f"rule {leaf.rule} {leaf.pattern!r}"
        if kind == "tactic":
            why += f" {action!r}"
        elif kind != "function" and leaf.asked != leaf.given:
            why += f" {leaf.asked}"
    padded = [] if leaf.unpadded is None else [f"padded from {leaf.unpadded}"]
    notes = "; ".join([*map(_note, leaf.adjustments), *padded])
    return ": ".join(part for part in (why, notes) if part)


def _note(adjustment: Adjustment) -> str:
    kind, _, axes, dim = adjustment
    where = "" if dim is None or kind == "no-dim" else f" on dim {dim}"
    return f"{kind} {', '.join(axes)}{where}" if axes else kind


def _totals(plan: "Plan") -> str:
    leaves, mesh = plan.leaves, plan.mesh
    devices = math.prod(axis_sizes(mesh).values())
    total = sum(leaf.bytes for leaf in leaves)
    of_memory: Counter[str | None] = Counter()
    for leaf in leaves:
        of_memory[leaf.memory] += leaf.bytes_per_device(mesh)
    per_device = of_memory.total()
    on_device = human_bytes(of_memory.pop(None, 0))
    sizes = [on_device, *(f"{human_bytes(size)} in {kind}" for kind, size in of_memory.items())]
    replicated = sum(not all_axes(entries(leaf.given)) for leaf in leaves)
    small = sum(any(note.kind in SMALL for note in leaf.adjustments) for leaf in leaves)
    unused = f"\n{small:,} of them have a spec that `min_size` leaves unused." if small else ""
    ratio = f", {per_device * devices / total:.2f}x an even split" if total else ""
    return (
        f"{counted(len(leaves), 'leaf')}, {counted(sum(leaf.size for leaf in leaves), 'element')},"
        f" {human_bytes(total)} in all; {counted(replicated, 'leaf')}"
        f" {'is' if replicated == 1 else 'are'} replicated.{unused}\n"
        f"{' and '.join(sizes)} on the fullest of"
        f" {counted(devices, 'device')} ({describe_mesh(mesh)}){ratio}."
    )


# ------------------------------------------------------------------ differences


class LeafChange(NamedTuple):
    """A leaf that two plans shard differently, or that only one of them has.

    Attributes:
        path: The leaf's path.
        before: The leaf in the first plan; `None` if only the second has it.
        after: The leaf in the second plan; `None` if only the first has it.
        bytes: The most bytes of it that a device receives; an upper bound if a mesh is abstract.
        sent: The bytes of it that processes send to others; `None` if a mesh is abstract.
    """

    path: str
    before: PlannedLeaf | None
    after: PlannedLeaf | None
    bytes: int
    sent: int | None = None


class PlanDiff(NamedTuple):
    """The difference between two plans: see `Plan.diff`. It is false if there is none.

    Attributes:
        changes: The leaves that are sharded differently, or that only one plan has.
        bytes: The sum of the most bytes that a device receives of each leaf.
        meshes: The meshes of both plans.
        bytes_per_device: For both plans, the bytes on the device that holds the most.
    """

    changes: tuple[LeafChange, ...]
    bytes: int
    meshes: tuple[AnyMesh, AnyMesh]
    bytes_per_device: tuple[int, int]

    @property
    def sent(self) -> int | None:
        """The bytes that processes send to others; `None` if a mesh is abstract."""
        sent = [change.sent for change in self.changes]
        return None if None in sent else sum(x or 0 for x in sent)

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
        if self.sent:
            lines.append(f"Processes send {human_bytes(self.sent)} to others.")
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
    before, after = ("-" if x is None else _where(x) for x in both)
    return " to ".join(dict.fromkeys(arrays)), before, after


def diff(before: "Plan", after: "Plan") -> PlanDiff:
    """Compares the leaves of two plans, matched by path."""
    meshes = before.mesh, after.mesh
    changes: list[LeafChange] = []
    by_path = [[(leaf.path, leaf) for leaf in plan.leaves] for plan in (before, after)]
    for path, old, new in pair(*by_path):
        cost, sent = (0, 0) if new is None else _received(old, new, meshes)
        # A device may receive nothing: a replicated leaf that is then split.
        kept = {None if x is None else (x.shape, x.dtype, x.memory, *_axes(x)) for x in (old, new)}
        if cost or len(kept) > 1:
            changes.append(LeafChange(path, old, new, cost, sent))
    # Leaves in any memory count: what is on the devices alone is `Plan.bytes_per_device`.
    sizes = [
        sum(leaf.bytes_per_device(plan.mesh) for leaf in plan.leaves) for plan in (before, after)
    ]
    received = sum(change.bytes for change in changes)
    return PlanDiff(tuple(changes), received, meshes, (sizes[0], sizes[1]))


def _axes(leaf: PlannedLeaf) -> list[tuple[str, ...]]:
    """The axes that shard each dim."""
    return [axes_of(entry) for entry in dim_entries(leaf.given, len(leaf.shape))]


def _received(
    old: PlannedLeaf | None, new: PlannedLeaf, meshes: tuple[AnyMesh, AnyMesh]
) -> tuple[int, int | None]:
    """The most bytes of a leaf that a device receives, and what processes send of it.

    Without devices, an upper bound: if both meshes have the same axes, each device is assumed to
    keep its position; otherwise all of the shard counts. Into another memory goes all of it too.
    """
    before, after = meshes
    shard, itemsize = new.bytes_per_device(after), new.dtype.itemsize
    if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        return shard, None
    if isinstance(before, Mesh) and isinstance(after, Mesh):
        shardings = NamedSharding(before, old.given), NamedSharding(after, new.given)
        received, sent = (count * itemsize for count in _elements_moved(*shardings, new.shape))
        return (received if old.memory == new.memory else shard), sent
    if old.memory != new.memory or not same_axes(before, after):
        return shard, None
    sizes = axis_sizes(after)
    # Along one dim, the old and the new shard of a device overlap for certain only if the axes of
    # one spec begin with those of the other. By P("a") a device of mesh (a=2, b=2) has a half, and
    # by P(("a", "b")) a quarter of that half; by P("b") it has a half that may be the other one.
    overlap = itemsize
    for length, *both in zip(new.shape, _axes(old), _axes(new), strict=True):
        splitting = [[axis for axis in axes if sizes[axis] > 1] for axes in both]
        short, long = sorted(splitting, key=len)
        overlap *= -(-length // part_count(long, sizes)) if long[: len(short)] == short else 0
    return shard - overlap, None


@lru_cache(4096)
def _elements_moved(
    before: NamedSharding, after: NamedSharding, shape: tuple[int, ...]
) -> tuple[int, int]:
    """The most elements that a device receives, and all that processes send to others."""
    held = {d: region_of(i, shape) for d, i in before.devices_indices_map(shape).items()}
    received = 0
    for device, index in after.devices_indices_map(shape).items():
        region = region_of(index, shape)
        kept = intersect(region, held[device]) if device in held else None
        missing = math.prod(region_shape(region)) - (
            math.prod(region_shape(kept)) if kept is not None else 0
        )
        received = max(received, missing)
    shards = processes_by_shard(before, shape)
    sent = 0
    for region, receivers in processes_by_shard(after, shape).items():
        for shard, senders in shards.items():
            part = intersect(shard, region)
            if part is not None:
                sent += math.prod(region_shape(part)) * len(receivers.keys() - senders)
    return received, sent

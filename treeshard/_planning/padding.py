"""Pads dims of planned leaves, so that the axes that are to shard them divide them.

JAX accepts an uneven sharding of intermediates only: arguments and results of `jit` must be
divisible. So padding is a second plan, with longer shapes, and programs see ordinary arrays.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jax import ShapeDtypeStruct

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import (
    all_axes,
    axes_of,
    dim_entries,
    entry_of,
    part_count,
    project,
    with_entries,
)
from treeshard._planning.copies import histories
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.tactics import Fsdp

# The adjustments that padding makes unnecessary.
_BY_PADDING = ("indivisible", "no-dim")


def padded_leaves(
    leaves: Sequence[PlannedLeaf], rules: Sequence[tuple[Any, Any]], mesh: AnyMesh
) -> tuple[PlannedLeaf, ...]:
    """The leaves of `Plan.padded`."""
    pad = partial(padded_leaf, mesh=mesh)
    decided = list(leaves)
    for i, decision in histories(decided).items():
        decided[i] = decided[i]._replace(decision=decision)
    return tuple(map(pad, decided))


def padded_leaf(leaf: PlannedLeaf, mesh: AnyMesh) -> PlannedLeaf:
    """The leaf with dims padded, and sharded over the axes that did not divide them."""
    sizes, shape = axis_sizes(mesh), list(leaf.shape)
    new = dim_entries(leaf.given, len(shape))
    others = []
    for note in leaf.adjustments:
        is_free = set(all_axes(new)).isdisjoint(note.axes)
        if note.kind not in _BY_PADDING or note.dim is None or not is_free:
            others.append(note)
            continue
        axes = (*axes_of(new[note.dim]), *note.axes)
        parts = part_count(axes, sizes)
        new[note.dim] = entry_of(axes)
        shape[note.dim] = -(-shape[note.dim] // parts) * parts
    if tuple(shape) == leaf.shape:
        return leaf
    given = with_entries(leaf.given, new)
    decision = leaf.decision._replace(given=given, adjustments=tuple(others))
    return leaf._replace(shape=tuple(shape), decision=decision, unpadded=leaf.shape)


def unpadded_leaf(leaf: PlannedLeaf, mesh: AnyMesh) -> PlannedLeaf:
    """The leaf with its true shape. The axes of a padded dim shard another one that they divide,
    if there is one."""
    if leaf.unpadded is None:
        return leaf
    given, notes = project(leaf.given, mesh, leaf.unpadded)
    struct = ShapeDtypeStruct(leaf.unpadded, leaf.dtype)
    for note in notes:
        given, _ = Fsdp(note.axes).refine(given, mesh, leaf.path, struct)
    decision = leaf.decision._replace(given=given)
    return leaf._replace(shape=leaf.unpadded, decision=decision, unpadded=None)

"""Decides the leaves of a tree that holds copies of a planned one: optimizer state, averages.

Rules cannot decide them: a pattern that begins with `^` misses a copy, and the path of a factored
moment ends in that of its parameter, which has another shape. So each leaf takes the decision of
the leaf that it was made from, dim by dim; `mirrors` says which leaf and which dims.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax import ShapeDtypeStruct
from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import has_shape
from treeshard._core.mesh import AnyMesh, axis_sizes, axis_tuple, check_axes
from treeshard._core.paths import PyTree
from treeshard._core.specs import all_axes, entries
from treeshard._planning.matching import Decision, PlannedLeaf
from treeshard._planning.mirrors import Followed, Original, follow
from treeshard._planning.tactics import fsdp
from treeshard._planning.tree_walk import Shape, name_leaves
from treeshard.errors import SpecError

_ALONE = Decision(PartitionSpec(), PartitionSpec())


def copied_leaves(tree: PyTree, original: Original) -> list[PlannedLeaf]:
    """The plan of every array of a tree that holds copies."""
    leaves, treedef = tree_flatten(tree)
    rows = zip(name_leaves(tree, treedef).paths, leaves, follow(tree, original), strict=True)
    decisions: dict[tuple[Any, ...], Decision] = {}  # equal ones are one object, as in `plan`
    copies: list[PlannedLeaf] = []
    for path, leaf, followed in rows:
        if not has_shape(leaf):
            continue
        shape = tuple(leaf.shape)
        counterpart = original.counterpart(followed)
        if counterpart is None:
            copies.append(PlannedLeaf(path, shape, leaf.dtype, _ALONE))
            continue
        decision = counterpart.decision
        if shape != counterpart.shape:
            key = followed.spec, decision.rule, decision.memory
            decision = decisions.setdefault(key, _decision(decision, followed.spec))
        true = _lengths(shape, followed, counterpart.unpadded)
        unpadded = None if true == shape else true
        copies.append(PlannedLeaf(path, shape, leaf.dtype, decision, unpadded))
    return copies


def _decision(of_counterpart: Decision, spec: PartitionSpec) -> Decision:
    rule, pattern, memory = of_counterpart.rule, of_counterpart.pattern, of_counterpart.memory
    return Decision(spec, spec, rule, pattern, memory=memory)


def resized(tree: PyTree, before: Original, after: Original) -> list[Any]:
    """The structs of a tree of copies, with the dims as long as those of `after`.

    `before` and `after` are the same tree, planned with padding or without, or for two meshes.
    """
    structs: list[Any] = []
    for leaf, followed in zip(tree_leaves(tree), follow(tree, before), strict=True):
        counterpart = after.counterpart(followed)
        if counterpart is not None:
            leaf = ShapeDtypeStruct(_lengths(leaf.shape, followed, counterpart.shape), leaf.dtype)
        structs.append(leaf)
    return structs


def _lengths(shape: Shape, followed: Followed, of_counterpart: Shape | None) -> Shape | None:
    """`shape`, with the dims that the counterpart has as long as there."""
    if of_counterpart is None:
        return None
    dims = zip(shape, followed.dims, strict=True)
    return tuple(length if dim is None else of_counterpart[dim] for length, dim in dims)


def sharded_further(
    leaves: Iterable[PlannedLeaf], extra_axis: str | Sequence[str], mesh: AnyMesh, min_size: int
) -> list[PlannedLeaf]:
    """The leaves with `extra_axis` added where the tactic `fsdp` would add it."""
    where = "Plan.follow(extra_axis=...)"
    axes = axis_tuple(extra_axis, where)
    check_axes(axes, axis_sizes(mesh), where)
    if len(set(axes)) < len(axes):
        raise SpecError(f"{where}: {extra_axis!r} has a name twice. An axis can split one dim.")
    refined: dict[tuple[Decision, Shape], Decision] = {}
    further: list[PlannedLeaf] = []
    for leaf in leaves:
        key = leaf.decision, leaf.shape
        if key not in refined:
            refined[key] = _further(leaf, axes, mesh, min_size)
        further.append(leaf._replace(decision=refined[key]))
    return further


def _further(leaf: PlannedLeaf, axes: tuple[str, ...], mesh: AnyMesh, min_size: int) -> Decision:
    used = all_axes(entries(leaf.given))
    free = [axis for axis in axes if axis not in used]
    if not free:
        return leaf.decision
    spec, _ = fsdp(free).refine(leaf.given, mesh, leaf.path, leaf, min_size)
    return leaf.decision._replace(asked=spec, given=spec)

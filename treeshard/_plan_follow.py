"""The leaves of a plan for a tree that holds copies of a planned one."""

from typing import Any

from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves

from treeshard._decision import Decision, PlannedLeaf
from treeshard._following import Followed, Original, follow
from treeshard._paths import leaf_paths
from treeshard._planned_tree import PlannedTree
from treeshard._specs import has_shape


def followed_leaves(plan: PlannedTree, tree: Any) -> tuple[tuple[PlannedLeaf, ...], dict[int, Any]]:
    """A `PlannedLeaf` for every array of `tree`, and its non-array leaves by index."""
    planned = plan.leaf_at_each_place()
    original = Original(
        plan.treedef,
        [None if leaf is None else leaf.shape for leaf in planned],
        [None if leaf is None else leaf.given for leaf in planned],
        lambda: leaf_paths(plan.specs),
    )
    leaves: list[PlannedLeaf] = []
    others: dict[int, Any] = {}
    shared: dict[Decision, Decision] = {}
    rows = zip(leaf_paths(tree), tree_leaves(tree), follow(tree, original), strict=True)
    for index, (path, leaf, followed) in enumerate(rows):
        if not has_shape(leaf):
            others[index] = leaf
            continue
        shape = tuple(leaf.shape)
        like = None if followed.like is None else planned[followed.like]
        decision = _decision(shape, followed, like)
        leaves.append(PlannedLeaf(path, shape, leaf.dtype, shared.setdefault(decision, decision)))
    return tuple(leaves), others


def _decision(shape: tuple[int, ...], followed: Followed, like: PlannedLeaf | None) -> Decision:
    if like is None:
        return Decision(PartitionSpec(), PartitionSpec())
    if shape == like.shape:
        return like.decision
    return Decision(followed.spec, followed.spec, like.rule, like.pattern)

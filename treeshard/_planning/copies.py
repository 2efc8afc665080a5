"""Decides the leaves of a tree that holds copies of a planned one: optimizer state, averages.

Rules cannot decide them: a pattern that begins with `^` misses a copy, and the path of a factored
moment ends in that of its parameter, which has another shape. So each leaf takes the decision of
the leaf that it was made from, dim by dim; `mirrors` says which leaf and which dims.

Of a state that rules decide together with its parameters, this holds for one kind of leaf:
`histories`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._core.arrays import device_dtype, has_shape
from treeshard._core.mesh import AnyMesh, axis_sizes, axis_tuple, check_axes
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import ResolvedSpec
from treeshard._core.specs import all_axes, entries, with_entries
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.mirrors import Original, follow
from treeshard._planning.tactics import fsdp
from treeshard._planning.tree_walk import Shape, name_leaves
from treeshard.errors import SpecError

_ALONE = ResolvedSpec(PartitionSpec(), PartitionSpec())


def copied_leaves(tree: PyTree, original: Original) -> list[PlannedLeaf]:
    """The plan of every array of a tree that holds copies."""
    leaves, treedef = tree_flatten(tree)
    rows = zip(name_leaves(tree, treedef), leaves, follow(tree, original), strict=True)
    decisions: dict[ResolvedSpec, ResolvedSpec] = {}  # equal ones are one object, as in `plan`
    copies: list[PlannedLeaf] = []
    for path, leaf, followed in rows:
        if not has_shape(leaf):
            continue
        shape = tuple(leaf.shape)
        counterpart = original.counterpart(followed)
        if counterpart is None:
            copies.append(PlannedLeaf(path, shape, device_dtype(leaf.dtype), _ALONE))
            continue
        decision = counterpart.decision
        # A factored moment or a history has some of the dims, and notes about the parameter's dims
        # would be wrong for it.
        if shape != counterpart.shape:
            of_dims = replace(decision, requested=followed.spec, spec=followed.spec, adjustments=())
            decision = decisions.setdefault(of_dims, of_dims)
        copies.append(PlannedLeaf(path, shape, device_dtype(leaf.dtype), decision))
    return copies


# ------------------------------------------------------------------ among the leaves of one tree


# The fields of optax's state of L-BFGS that hold stacks of the tree in its field `params`.
_MEMORY = re.compile("(?:^|(?<=/))diff_(?:params|updates)_memory(?=/|$)")


def histories(leaves: Sequence[PlannedLeaf]) -> dict[int, ResolvedSpec]:
    """The decisions of stacked copies of parameters, by index.

    L-BFGS keeps the last updates of each parameter, `(memory_size, *shape)`. Its rule was written
    for the parameter: by `P("fsdp")` it would split the memory.
    """
    # By name: a shape says little. The `q/weight` of a layer has that of a stack of `norm/weight`.
    stacks = {i: x for i, x in enumerate(leaves) if _MEMORY.search(x.path)}
    if not stacks:
        return {}
    by_path = {leaf.path: leaf for leaf in leaves}
    histories: dict[int, ResolvedSpec] = {}
    for i, stack in stacks.items():
        copy = by_path.get(_MEMORY.sub("params", stack.path))
        if copy is None or copy.shape != stack.shape[1:]:
            continue
        if copy.rule == stack.rule and copy.rule is not None:
            histories[i] = _stacked(copy.decision)
    return histories


def _stacked(decision: ResolvedSpec) -> ResolvedSpec:
    """The decision of a parameter, for a stack of its copies."""
    requested, spec = (
        with_entries(of_copy, (None, *entries(of_copy)))
        for of_copy in (decision.requested, decision.spec)
    )
    adjustments = tuple(
        note if note.dim is None else note._replace(dim=note.dim + 1)
        for note in decision.adjustments
    )
    return replace(decision, requested=requested, spec=spec, adjustments=adjustments)


# ------------------------------------------------------------------ further, and elsewhere


def sharded_further(
    leaves: Iterable[PlannedLeaf], extra_axis: str | Sequence[str], mesh: AnyMesh, min_size: int
) -> list[PlannedLeaf]:
    """The leaves with `extra_axis` added where the tactic `fsdp` would add it."""
    where = "Plan.follow(extra_axis=...)"
    axes = axis_tuple(extra_axis, where)
    check_axes(axes, axis_sizes(mesh), where)
    if len(set(axes)) < len(axes):
        raise SpecError(f"{where}: {extra_axis!r} has a name twice. An axis can split one dim.")
    refined: dict[tuple[ResolvedSpec, Shape], ResolvedSpec] = {}
    further: list[PlannedLeaf] = []
    for leaf in leaves:
        key = leaf.decision, leaf.shape
        if key not in refined:
            refined[key] = _further(leaf, axes, mesh, min_size)
        further.append(leaf._replace(decision=refined[key]))
    return further


def in_memory(leaves: Iterable[PlannedLeaf], memory: str) -> list[PlannedLeaf]:
    """The leaves in a kind of memory; scalars stay where they are, as with tactics."""
    decisions: dict[ResolvedSpec, ResolvedSpec] = {}
    moved: list[PlannedLeaf] = []
    for leaf in leaves:
        decision = leaf.decision
        if leaf.shape:
            decision = decisions.setdefault(decision, replace(decision, memory_kind=memory))
        moved.append(leaf._replace(decision=decision))
    return moved


def _further(
    leaf: PlannedLeaf, axes: tuple[str, ...], mesh: AnyMesh, min_size: int
) -> ResolvedSpec:
    # An axis that shards the parameter already is left out, and ZeRO-1 adds the others.
    used = all_axes(entries(leaf.given))
    free = [axis for axis in axes if axis not in used]
    if not free:
        return leaf.decision
    spec, _ = fsdp(free).refine(leaf.given, mesh, leaf.path, leaf, min_size)
    return replace(leaf.decision, requested=spec, spec=spec)

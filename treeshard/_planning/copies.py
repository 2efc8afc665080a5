"""Plans trees that contain copies of a planned tree: optimizer state, averages.

Rules cannot plan copies. A pattern that begins with `^` misses a copy, and the path of a factored
moment ends in the path of its parameter, which has another shape. Each copy therefore follows the
leaf that it was made from, dim by dim; `mirrors` finds the leaf and the dims.

If rules plan a state together with its parameters, only `histories` are planned here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from treeshard._core.mesh import axis_sizes, axis_tuple, check_axes
from treeshard._core.paths import Flat, PyTree
from treeshard._core.spec_trees import ResolvedSpec
from treeshard._core.specs import all_axes, entries, project, with_entries
from treeshard._planning.matching import Decided, PlannedLeaf, Shape, split_arrays
from treeshard._planning.mirrors import Original, follow
from treeshard._planning.named_dims import has_variables, optimizer_states
from treeshard._planning.planned import PlannedTree
from treeshard._planning.tactics import Tactic, logical_partitioning, shard_largest
from treeshard.errors import SpecError


def plan_copies(
    tree: PyTree,
    flat: Flat,
    plan: PlannedTree,
    extra_axis: str | Sequence[str],
    memory: str | None,
) -> Decided:
    """Decides every array of a tree that holds copies of a planned one; see `Plan.follow`."""
    axes = _read_axes(extra_axis, plan)
    split, arrays, shapes = split_arrays(flat)
    original = Original(plan._split.treedef, _originals(plan))
    paths, decisions = follow(tree, split.treedef, split.fill_leaves(shapes), original)
    decisions = split.dynamic(decisions)
    if axes or memory is not None:
        rows = list(zip(decisions, shapes, strict=True))
        kinds = {(id(x), shape): (x, shape) for x, shape in rows}  # few, as in `plan`
        changed = {key: _change(x, axes, memory, shape, plan) for key, (x, shape) in kinds.items()}
        decisions = [changed[id(x), shape] for x, shape in rows]
    return Decided(split, arrays, split.dynamic(paths), shapes, decisions)


def _originals(plan: PlannedTree) -> list[PlannedLeaf | None]:
    """The leaves that copies follow: the plan's leaves, changed by `optimizer_sharding` of nnx."""
    originals = plan.leaf_at_each_index()
    # The search for variables takes long.
    may_read_names = not plan.rules or any(_reads_names(action) for _, action in plan.rules)
    if not may_read_names or not has_variables(plan._split.treedef):
        return originals
    for i, state in optimizer_states(plan._bare_structs()).items():
        leaf = originals[i]
        tactic = None if leaf is None else _reader_of_names(leaf, plan)
        # Rules that do not read the metadata of a variable decide its copies too.
        if leaf is None or tactic is None:
            continue
        # A tree of specs shards leaves of any size.
        least = 0 if leaf.decision.by_spec else plan.min_size
        spec, notes = tactic.refine(PartitionSpec(), plan.mesh, leaf.path, state, least)
        spec, misfits = project(spec, plan.mesh, leaf.shape)
        decision = ResolvedSpec(spec, spec, adjustments=(*notes, *misfits), by_spec=True)
        originals[i] = leaf._replace(decision=decision)
    return originals


def _reader_of_names(leaf: PlannedLeaf, plan: PlannedTree) -> Tactic | None:
    """The tactic that reads the names of a leaf's dims, if names or a tree of specs decided it."""
    if leaf.decision.by_spec:
        return logical_partitioning()
    action = None if leaf.rule is None else plan.rules[leaf.rule][1]
    return action if _reads_names(action) else None


def _reads_names(action: Any) -> bool:
    return isinstance(action, Tactic) and not action.by_shape


def _read_axes(extra_axis: str | Sequence[str], plan: PlannedTree) -> tuple[str, ...]:
    where = "Plan.follow(extra_axis=...)"
    axes = axis_tuple(extra_axis, where)
    check_axes(axes, axis_sizes(plan.mesh), where)
    if len(set(axes)) < len(axes):
        raise SpecError(f"{where}: {extra_axis!r} has a name twice. An axis can split one dim.")
    return axes


def _change(
    decision: ResolvedSpec,
    axes: Sequence[str],
    memory: str | None,
    shape: Shape,
    plan: PlannedTree,
) -> ResolvedSpec:
    """The decision for a copy of this shape, with more axes and in another memory."""
    spec = _add_axes(decision.spec, shape, axes, plan)
    if spec is not decision.spec:
        decision = replace(decision, requested=spec, spec=spec)
    # Scalars stay on the devices, as with tactics.
    return decision if memory is None or not shape else replace(decision, memory_kind=memory)


def _add_axes(
    spec: PartitionSpec, shape: Shape, axes: Sequence[str], plan: PlannedTree
) -> PartitionSpec:
    """The spec with axes added where the tactic `fsdp` would add them."""
    # An axis that shards the parameter already is left out, and ZeRO-1 adds the others.
    used = all_axes(entries(spec))
    free = [axis for axis in axes if axis not in used]
    if not free or math.prod(shape) < plan.min_size:
        return spec
    return shard_largest(spec, plan.mesh, shape, tuple(free))[0]


# ------------------------------------------------------------------ among the leaves of one tree


# The fields of optax's state of L-BFGS that hold stacks of the tree in its field `params`.
_MEMORY = re.compile("(?:^|(?<=/))diff_(?:params|updates)_memory(?=/|$)")


def histories(leaves: Sequence[PlannedLeaf]) -> dict[int, ResolvedSpec]:
    """The decisions of stacked copies of parameters, by index.

    L-BFGS keeps the last updates of each parameter, `(memory_size, *shape)`. Its rule was written
    for the parameter: by `P("fsdp")` it would split the memory.
    """
    # By name, because shapes are ambiguous: a `q/weight` may have the shape of a stack of
    # `norm/weight`s.
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
            histories[i] = _stack_decision(copy.decision)
    return histories


def _stack_decision(decision: ResolvedSpec) -> ResolvedSpec:
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

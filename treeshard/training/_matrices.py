"""Optimizers that multiply matrices (Muon, Shampoo, SOAP), each matrix on one device.

FSDP splits the dims that such an optimizer contracts: on the parameters as they are sharded, every
product gathers or reduces. One all-to-all gives each device full matrices, and another one takes
their updates back. Both are written by hand, in `shard_map`, where no product can gather. What the
optimizer remembers stays with the matrices: moved along, it would double the bytes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from treeshard._core.arguments import check_no_refs, described
from treeshard._core.arrays import array_text
from treeshard._core.mesh import axis_sizes, context_mesh
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.specs import all_axes, axes_of, dim_entries, entry_of, part_count
from treeshard._placement.constraint import with_sharding_constraint
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import BY_MATRIX
from treeshard.errors import ArgumentError, SpecError, listed


class ByMatrixState(NamedTuple):
    """The state of an optimizer by matrix.

    Attributes:
        matrices: What is kept of each matrix, stacked on dim 0, by `"512x2048_float32"`.
        shared: What all matrices of one shape share, such as the count of steps, likewise.
        rest: The state of the leaves that are not matrices.
    """

    matrices: dict[str, PyTree]
    shared: dict[str, PyTree]
    rest: PyTree


def by_matrix(
    optimizer: Any, plan: Plan, *, is_matrix: Callable[[str, Any], bool] | None = None
) -> Any:
    """Runs a matrix optimizer on full matrices, evenly spread over devices: Muon, Shampoo, SOAP.

    Matrices of one shape and dtype are stacked to `(n, rows, columns)`, those of stacked layers
    too, and the stack is split on dim 0 over the axes that shard the matrices. An update moves each
    shard twice: gradients to the device that has the matrix, and updates back. In between nothing
    is moved. Parameters move as well if the optimizer reads them, as for weight decay. Without a
    sharded dim, nothing moves.

    The optimizer is called for one matrix at a time, with `jax.vmap`. What belongs to all
    parameters goes outside, such as `optax.chain(optax.clip_by_global_norm(1.0), by_matrix(...))`.
    Leaves that are not matrices go to `optimizer` in one tree, which has `None` for the matrices.

    In the state, the moments of matrices are stacked under `matrices`. A rule splits their dim 0,
    `("opt/matrices/", P("fsdp"))`, and `init_sharded(..., pad=True)` pads it if the axes do not
    divide it: padding is a matrix of its own, and changes no other.

    Args:
        optimizer: An `optax.GradientTransformation`. `update` is called with gradients, state
            and parameters.
        plan: The plan of the parameters, whose paths are those of the gradients.
        is_matrix: Whether a leaf of two dims or more is a matrix, or several stacked ones, by its
            path and its `jax.ShapeDtypeStruct`. By default all of them are; say which are not,
            such as an embedding, or the biases of stacked layers.

    Returns:
        An object like `optimizer`, with `init(params)` and `update(grads, state, params)`.

    Raises:
        ArgumentError: If `optimizer` has no `init` and `update`, or `plan` is not a plan.
        SpecError: When called, if leaves are not in the plan, or stacked dims that are sharded
            cannot be split further. Lists all of them.
        ShardingRuleError: If the plan has errors, as `Plan.check_before_use`, whose warnings apply
            too.
        LeafError: When called, if a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> params = {"w": jnp.ones((2, 128, 128))}
        >>> plan = ts.plan(params, [("w", P(None, "fsdp"))], ts.make_mesh("fsdp=8"))
        >>> optimizer = ts.training.by_matrix(optax.sgd(0.1, momentum=0.9), plan)
        >>> optimizer.init(params).matrices["128x128_float32"][0].trace.shape
        (2, 128, 128)

    Source:
        Muon: https://kellerjordan.github.io/posts/muon; whole matrices for each device as in
        Distributed Shampoo, arXiv:2309.06497.
    """
    if not all(hasattr(optimizer, name) for name in ("init", "update", "_replace")):
        raise ArgumentError(
            f"by_matrix: the optimizer is {described(optimizer)}, and not an optax"
            " GradientTransformation. Call `by_matrix(optimizer, plan)`."
        )
    if not isinstance(plan, Plan):
        raise ArgumentError(
            f"by_matrix: the plan is {described(plan)}. Plan the parameters first:"
            " `by_matrix(optimizer, plan(params, rules, mesh))`."
        )
    plan.check_before_use()
    made = _ByMatrix(optimizer, plan, is_matrix or (lambda _path, _leaf: True))
    return optimizer._replace(init=made.init, update=made.update)


@dataclass(frozen=True)
class _ByMatrix:
    optimizer: Any
    plan: Plan
    is_matrix: Callable[[str, Any], bool]

    def init(self, params: PyTree) -> ByMatrixState:
        check_no_refs(params, "by_matrix")
        leaves, treedef = tree_flatten(params)
        groups = _groups(params, self.plan, self.is_matrix)
        matrices: dict[str, PyTree] = {}
        shared: dict[str, PyTree] = {}
        for group in groups:
            run = _init_of_one(self.optimizer, group.matrix)
            stack = group.stacked([leaves[i] for i in group.members])
            new = _mapped(run, group.rank, (0, None))(stack)
            matrices[group.name], shared[group.name] = new
        return ByMatrixState(matrices, shared, self.optimizer.init(_rest(treedef, leaves, groups)))

    def update(
        self, updates: PyTree, state: ByMatrixState, params: PyTree = None, **_: Any
    ) -> tuple[PyTree, ByMatrixState]:
        leaves, treedef = tree_flatten(updates)
        groups = _groups(updates, self.plan, self.is_matrix)
        others = _rest(treedef, leaves, groups)
        weights, other_weights = None, None
        if params is not None:
            weights = treedef.flatten_up_to(params)
            other_weights = _rest(treedef, weights, groups)
        moved, matrices, shared = self._of_matrices(groups, leaves, weights, state)
        others, of_rest = self.optimizer.update(others, state.rest, other_weights)
        results = treedef.flatten_up_to(others)
        for group, of_group in zip(groups, moved, strict=True):
            for i, x in zip(group.members, of_group, strict=True):
                results[i] = x
        return treedef.unflatten(results), ByMatrixState(matrices, shared, of_rest)

    def _of_matrices(
        self,
        groups: list["_Group"],
        leaves: list[Any],
        weights: list[Any] | None,
        state: ByMatrixState,
    ) -> tuple[list[list[Any]], dict[str, PyTree], dict[str, PyTree]]:
        """The updates of each group's leaves, and the new states."""
        specs = [[group.spec_of(leaves[i]) for i in group.members] for group in groups]

        def members(values: list[Any] | None) -> list[list[Any]] | None:
            if values is None:
                return None
            own = [[values[i] for i in group.members] for group in groups]
            return with_sharding_constraint(own, specs, self.plan.mesh)

        def of_this_device(gradients: Any, weights: Any, matrices: Any, shared: Any) -> Any:
            returned, kept, common = [], {}, {}
            for i, group in enumerate(groups):
                stack = group.sent(gradients[i])
                of_weights = None if weights is None else group.sent(weights[i])
                run = _update_of_one(self.optimizer, shared[group.name])
                mapped = _mapped(run, group.rank, (0, 0, None))
                moved, *new = mapped(stack, matrices[group.name], of_weights)
                returned.append(group.returned(moved, gradients[i]))
                kept[group.name], common[group.name] = new
            return returned, kept, common

        of_stacks = {group.name: group.spec for group in groups}
        run = jax.shard_map(
            of_this_device,
            # `shard_map` refuses any other mesh than the one in force.
            mesh=None if context_mesh() is not None else self.plan.mesh,
            in_specs=(specs, None if weights is None else specs, of_stacks, PartitionSpec()),
            out_specs=(specs, of_stacks, PartitionSpec()),
            # Loops of an optimizer may start from constants.
            check_vma=False,
        )
        return run(members(leaves), members(weights), state.matrices, state.shared)


def _rest(treedef: Any, leaves: Sequence[Any], groups: Sequence["_Group"]) -> PyTree:
    """The tree without matrices."""
    taken = {i for group in groups for i in group.members}
    return treedef.unflatten([None if i in taken else x for i, x in enumerate(leaves)])


# ------------------------------------------------------------------ one matrix


def _mapped(run: Callable[..., Any], rank: int, out_axes: Any) -> Callable[..., Any]:
    """`run`, of one matrix, for a stack of them, with `rank` dims before those of a matrix."""
    for _ in range(rank):
        run = jax.vmap(run, out_axes=out_axes)
    return run


def _init_of_one(optimizer: Any, matrix: jax.ShapeDtypeStruct) -> Callable[[Any], Any]:
    """The state of one matrix: without and with what all matrices share."""
    differs = _differs_by_matrix(optimizer, matrix)
    return lambda matrix: eqx.partition(optimizer.init(matrix), differs)


def _update_of_one(optimizer: Any, shared: PyTree) -> Callable[..., Any]:
    """Updates one matrix: its update, and its state without and with what all matrices share."""

    def run(gradient: Any, own: PyTree, weight: Any) -> Any:
        update, new = optimizer.update(gradient, eqx.combine(own, shared), weight)
        is_own = tree_map(lambda x: x is not None, own, is_leaf=lambda x: x is None)
        return update, *eqx.partition(new, is_own)

    return run


def _differs_by_matrix(optimizer: Any, matrix: jax.ShapeDtypeStruct) -> PyTree:
    """Which leaves of the state of a matrix depend on it; all matrices share the others."""
    state = jax.eval_shape(optimizer.init, matrix)
    leaves, treedef = tree_flatten(state)
    stack = jax.ShapeDtypeStruct((2, *matrix.shape), matrix.dtype)
    differs = _batched(lambda x: optimizer.init(x), (0,), stack)
    while True:
        states = [
            jax.ShapeDtypeStruct((2, *x.shape), x.dtype) if is_own else x
            for x, is_own in zip(leaves, differs, strict=True)
        ]
        axes = [0 if is_own else None for is_own in differs]
        new = _batched(
            lambda x, state: optimizer.update(x, treedef.unflatten(state), x)[1],
            (0, axes),
            stack,
            states,
        )
        new = [a or b for a, b in zip(differs, new, strict=True)]
        if new == differs:
            return treedef.unflatten(differs)
        differs = new


def _batched(run: Callable[..., Any], in_axes: Any, *args: Any) -> list[bool]:
    """Which leaves of the result of `run` depend on what it is mapped over."""
    seen: list[bool] = []

    @custom_vmap
    def probe(leaves: list[Any]) -> list[Any]:
        return leaves

    # JAX calls it with what is mapped.
    @probe.def_vmap
    def _(_size: int, is_mapped: Any, leaves: list[Any]) -> Any:
        seen.extend(is_mapped[0])
        return leaves, is_mapped[0]

    mapped = jax.vmap(lambda *args: probe(tree_leaves(run(*args))), in_axes)
    count = len(jax.eval_shape(mapped, *args))
    return seen or [False] * count


# ------------------------------------------------------------------ stacks


class _Group(NamedTuple):
    """Matrices that are stacked.

    Attributes:
        name: By which the state has them.
        members: The indices of the leaves.
        matrix: The shape and dtype of one matrix.
        lead: How the dims of the stack before those of a matrix are split where the leaves are.
        rows: The axes that split the rows.
        columns: The axes that split the columns.
        parts: The number of devices along both.
    """

    name: str
    members: list[int]
    matrix: jax.ShapeDtypeStruct
    lead: tuple[Any, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    parts: int

    @property
    def rank(self) -> int:
        return len(self.lead)

    @property
    def spec(self) -> PartitionSpec:
        """How the stack is split where each device has full matrices."""
        first = (*axes_of(self.lead[0]), *self.rows, *self.columns)
        return PartitionSpec(entry_of(first) if first else None, *self.lead[1:])

    def spec_of(self, leaf: Any) -> PartitionSpec:
        """How a leaf is split where it is sent from, and where it returns to."""
        lead = self.lead if any(self.lead) else (None,) * (leaf.ndim - 2)
        return PartitionSpec(*lead, entry_of(self.rows), entry_of(self.columns))

    def stacked(self, leaves: Sequence[Any]) -> Any:
        if any(self.lead):
            return leaves[0]
        return jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in leaves])

    def sent(self, leaves: Sequence[Any]) -> Any:
        """The stack with full matrices, of which this device has some; of the shards of leaves."""
        with jax.named_scope(BY_MATRIX):  # by which reports know it
            stack = self.stacked(leaves)
            padding = -len(stack) % self.parts
            stack = jnp.pad(stack, [(0, padding)] + [(0, 0)] * (stack.ndim - 1))
            for dim, axes in ((-2, self.rows), (-1, self.columns)):
                if axes:
                    stack = jax.lax.all_to_all(stack, axes, 0, stack.ndim + dim, tiled=True)
            return stack

    def returned(self, stack: Any, like: Sequence[Any]) -> list[Any]:
        """The shards of leaves, of the stack with full matrices."""
        with jax.named_scope(BY_MATRIX):
            for dim, axes in ((-1, self.columns), (-2, self.rows)):
                if axes:
                    stack = jax.lax.all_to_all(stack, axes, stack.ndim + dim, 0, tiled=True)
            if any(self.lead):
                return [stack]
            leaves, start = [], 0
            for x in like:
                end = start + math.prod(x.shape[:-2])
                leaves.append(stack[start:end].reshape(x.shape))
                start = end
            return leaves


def _groups(tree: PyTree, plan: Plan, is_matrix: Callable[[str, Any], bool]) -> list[_Group]:
    """The matrices of a tree by shape and dtype alone, so that the state fits every mesh.

    Leaves whose stacked dims are sharded, as those of experts, are stacks as they are.
    """
    planned = {leaf.path: leaf for leaf in plan.leaves}
    sizes = axis_sizes(plan.mesh)
    groups: dict[str, _Group] = {}
    facts: list[str] = []
    for i, (path, x) in enumerate(zip(leaf_paths(tree), tree_leaves(tree), strict=True)):
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if x.ndim < 2 or not is_matrix(path, struct):
            continue
        leaf = planned.get(path)
        if leaf is None or leaf.shape != x.shape:
            facts.append(f"{path}: {array_text(struct)} is not in the plan.")
            continue
        *lead, rows, columns = dim_entries(leaf.given, x.ndim)
        parts = part_count(all_axes([rows, columns]), sizes)
        matrix = jax.ShapeDtypeStruct(x.shape[-2:], x.dtype)
        name = f"{x.shape[-2]}x{x.shape[-1]}_{x.dtype}"
        if any(lead):
            here = x.shape[0] // part_count(axes_of(lead[0]), sizes)
            if here % parts:
                facts.append(
                    f"{path}: {leaf.given} leaves {here} of dim 0 on a device, and {parts} devices"
                    " cannot share them."
                )
            name = path.replace("/", ".")
        first = (*lead,) if any(lead) else (None,)
        group = _Group(name, [], matrix, first, axes_of(rows), axes_of(columns), parts)
        before = groups.setdefault(name, group)
        if before.parts < parts:
            groups[name] = group._replace(members=before.members)
        before.members.append(i)
    if facts:
        raise SpecError(
            f"by_matrix: {listed('leaves cannot be stacked:', facts)}"
            " `is_matrix=` can leave them to the optimizer as they are."
        )
    return list(groups.values())

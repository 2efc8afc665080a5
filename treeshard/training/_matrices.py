"""Optimizers that multiply matrices (Muon, Shampoo, SOAP), each matrix on one device.

FSDP shards the dims that such an optimizer contracts, so every product would gather or reduce.
Instead, matrices are stacked on a new dim 0, and a sharding constraint moves the shards from the
matrices' own dims to dim 0, by one all-to-all. `vmap` then runs the optimizer on full matrices,
without communication, and a second constraint moves the updates back.

1. Matrices are stacked if their shape, dtype and spec are equal. With several specs in a stack, the
   compiler would move parts twice.
2. A leaf with sharded leading dims, such as experts, is its own stack: a common stack would need
   communication.
3. All other leaves go to the optimizer as one tree.

The optimizer's state stays stacked between steps. Unstacked, it would move in every step too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from treeshard._core.arguments import check_no_refs, describe_argument
from treeshard._core.arrays import array_text
from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.specs import (
    Entry,
    all_axes,
    axes_of,
    dim_entries,
    drop_axes,
    entries,
    entry_of,
    part_count,
    trim_spec,
)
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import BY_MATRIX
from treeshard._planning.wrong_arguments import check_plan
from treeshard.errors import ArgumentError, SpecError, listed


class ByMatrixState(NamedTuple):
    """The state of an optimizer by matrix.

    Attributes:
        matrices: The state of each stack, by a name such as `"512x2048_float32_9ae0daaf"`: shape,
            dtype, and a checksum of the paths. Every array has the matrices on dim 0, padded to a
            multiple of the devices that share them.
        rest: The state of the leaves that are not matrices.
    """

    matrices: dict[str, PyTree]
    rest: PyTree


def by_matrix(
    optimizer: Any, plan: Plan, *, is_matrix: Callable[[str, Any], bool] | None = None
) -> Any:
    """Runs a matrix optimizer on full matrices, evenly spread over devices: Muon, Shampoo, SOAP.

    Matrices of one shape, dtype and spec are stacked to `(n, rows, columns)`, including the layers
    of stacked leaves, and the stack is sharded on dim 0 over the axes that shard the matrices. An
    update moves each shard twice: gradients to the device that has the full matrix, and updates
    back. Parameters move as well if the optimizer reads them, as for weight decay. Matrices that
    are not sharded do not move.

    The optimizer is called for one matrix at a time, with `jax.vmap`. What belongs to all
    parameters goes outside, such as `optax.chain(optax.clip_by_global_norm(1.0), by_matrix(...))`.
    Leaves that are not matrices go to `optimizer` in one tree, which has `None` for the matrices.

    In the state, all that belongs to a matrix is stacked under `matrices`, also its count of steps.
    A rule shards dim 0, `("opt/matrices/", P("fsdp"))`, with `min_size=0` for the counts. Stacks
    have copies of the last matrix at the end if the axes do not divide `n`; these are matrices of
    their own, and change no other.

    Args:
        optimizer: An `optax.GradientTransformation`. `update` is called with gradients, state
            and parameters.
        plan: The plan of the parameters. The gradients have the same paths.
        is_matrix: Whether a leaf of two dims or more is a matrix, or several stacked ones, by its
            path and its `jax.ShapeDtypeStruct`. By default all of them are; say which are not,
            such as an embedding, or the biases of stacked layers.

    Returns:
        An object like `optimizer`, with `init(params)` and `update(grads, state, params)`; further
        arguments by name, such as `value=loss`, must be numbers, and each matrix gets them.

    Raises:
        ArgumentError: If `optimizer` has no `init` and `update`, or `plan` is not a plan. When
            called, if a further argument is not a number.
        SpecError: When called, if leaves are not in the plan. Lists all of them.
        ShardingRuleError: If the plan has errors, as `Plan.check_before_use`, whose warnings apply
            too.
        LeafError: When called, if a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> params = {"w": jnp.ones((2, 128, 128))}
        >>> plan = ts.plan(params, [("w", P(None, "fsdp"))], ts.make_mesh("fsdp=8"))
        >>> optimizer = ts.training.by_matrix(optax.sgd(0.1, momentum=0.9), plan)
        >>> [stack] = optimizer.init(params).matrices.values()
        >>> stack[0].trace.shape
        (8, 128, 128)

    Source:
        Muon: https://kellerjordan.github.io/posts/muon. Distributed Shampoo, arXiv:2309.06497, also
        assigns full matrices to devices.
    """
    if not all(hasattr(optimizer, name) for name in ("init", "update", "_replace")):
        raise ArgumentError(
            f"by_matrix: the optimizer is {describe_argument(optimizer)}, and not an optax"
            " GradientTransformation. Call `by_matrix(optimizer, plan)`."
        )
    check_plan(plan, "by_matrix(optimizer, plan(params, rules, mesh))")
    plan.check_before_use()
    made = _ByMatrix(optimizer, plan, is_matrix or (lambda _path, _leaf: True))
    return optimizer._replace(init=made.init, update=made.update)


class _Stack(NamedTuple):
    """Matrices that are stacked, with their leaves and shardings."""

    name: str  # the key of the state
    members: list[int]  # the indices of the leaves in the tree
    specs: list[PartitionSpec]  # how each leaf is sharded
    layouts: list[PartitionSpec]  # of the stack, from the shards of its leaves to full matrices

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the stack of full matrices, and of its optimizer state."""
        return trim_spec(self.layouts[-1])


@dataclass(frozen=True)
class _ByMatrix:
    optimizer: Any  # an `optax.GradientTransformation` for full matrices
    plan: Plan  # of the parameters
    is_matrix: Callable[[str, Any], bool]  # by the path of a leaf and its struct

    def init(self, params: PyTree) -> ByMatrixState:
        check_no_refs(params, "by_matrix")
        leaves, treedef = tree_flatten(params)
        stacks = self._find_stacks(params)
        states: dict[str, PyTree] = {}
        for stack in stacks:
            run = self._on_auto_axes(partial(self._init_stack, stack), stack.spec)
            states[stack.name] = run(_select(leaves, stack))
        rest = self.optimizer.init(_without(stacks, leaves, treedef))
        return ByMatrixState(states, rest)

    def update(
        self, updates: PyTree, state: ByMatrixState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ByMatrixState]:
        _check_numbers(extra_args)
        leaves, treedef = tree_flatten(updates)
        stacks = self._find_stacks(updates)
        weights, other_weights = None, None
        if params is not None:
            weights = treedef.flatten_up_to(params)
            other_weights = _without(stacks, weights, treedef)
        others = _without(stacks, leaves, treedef)
        others, rest = self.optimizer.update(others, state.rest, other_weights, **extra_args)
        # The optimizer returns the `None`s that it got for matrices. Their updates replace these.
        results = treedef.flatten_up_to(others)
        states: dict[str, PyTree] = {}
        for stack in stacks:
            run = self._on_auto_axes(partial(self._update_stack, stack), (stack.specs, stack.spec))
            old_state = state.matrices[stack.name]
            own_weights = None if weights is None else _select(weights, stack)
            new, new_state = run(_select(leaves, stack), old_state, own_weights, extra_args)
            states[stack.name] = new_state
            for i, x in zip(stack.members, new, strict=True):
                results[i] = x
        return treedef.unflatten(results), ByMatrixState(states, rest)

    def _init_stack(self, stack: _Stack, params: list[Any]) -> PyTree:
        # No constraints: outside `jit`, they would need arrays on the devices of the mesh.
        return jax.vmap(self.optimizer.init)(self._concatenate(stack, params))

    def _update_stack(
        self,
        stack: _Stack,
        updates: list[Any],
        state: PyTree,
        params: list[Any] | None,
        extra_args: Mapping[str, Any],
    ) -> tuple[list[Any], PyTree]:
        of_params = None if params is None else self._stack(stack, params)
        of_updates = self._stack(stack, updates)
        new, state = jax.vmap(partial(self.optimizer.update, **extra_args))(
            of_updates, state, of_params
        )
        return self._unstack(stack, new, updates), state

    # ---------------------------------------------------------------- stacks

    def _find_stacks(self, tree: PyTree) -> list[_Stack]:
        """The stacks of a tree, with its matrices in the order of leaves."""
        planned = {leaf.path: leaf for leaf in self.plan.leaves}
        paths = leaf_paths(tree)
        members: dict[Any, list[int]] = {}
        facts: list[str] = []
        for i, (path, x) in enumerate(zip(paths, tree_leaves(tree), strict=True)):
            struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
            if x.ndim < 2 or not self.is_matrix(path, struct):
                continue
            leaf = planned.get(path)
            if leaf is None or leaf.shape != x.shape:
                facts.append(f"{path}: {array_text(struct)} is not in the plan.")
                continue
            *leading, rows, columns = dim_entries(leaf.given, x.ndim)
            # Reshaping joins the leading dims. If one is sharded, data would move, so such a leaf
            # is its own stack.
            own = (path, leaf.given) if any(leading) else (None, (rows, columns))
            members.setdefault((x.shape[-2:], leaf.dtype, own), []).append(i)
        if facts:
            raise SpecError(
                f"by_matrix: {listed('leaves are not in the plan:', facts)}"
                " To leave them to the optimizer itself, pass `is_matrix=`."
            )
        return [self._describe_stack(paths, indices, planned) for indices in members.values()]

    def _describe_stack(
        self, paths: Sequence[str], members: list[int], planned: Mapping[str, PlannedLeaf]
    ) -> _Stack:
        leaves = [planned[paths[i]] for i in members]
        # Two sets of matrices may have stacks of one shape: on another mesh, or after a change of a
        # rule. The checksum in the name keeps states of other matrices apart.
        checksum = crc32("\n".join(leaf.path for leaf in leaves).encode())
        first = leaves[0]
        rows, columns = first.shape[-2:]
        name = f"{rows}x{columns}_{first.dtype}_{checksum:08x}"
        layouts = _find_layouts(dim_entries(first.given, len(first.shape)), self.plan.mesh)
        return _Stack(name, members, [leaf.given for leaf in leaves], layouts)

    def _stack(self, stack: _Stack, leaves: Sequence[Any]) -> Any:
        """Full matrices, `(n, rows, columns)`. Each device has some of them."""
        with jax.named_scope(BY_MATRIX):  # reports recognise the communication by this name
            matrices = self._concatenate(stack, leaves)
            for layout in stack.layouts:
                matrices = self._constrain(matrices, layout)
            return matrices

    def _concatenate(self, stack: _Stack, leaves: Sequence[Any]) -> Any:
        matrices = jnp.concatenate(
            [x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in leaves]
        )
        devices = part_count(all_axes(entries(stack.spec)), axis_sizes(self.plan.mesh))
        # `vmap` treats the copies of the last matrix as further matrices, so other updates stay
        # the same. The update of zeros might be NaN, and `jax_debug_nans` would raise.
        padding = -len(matrices) % devices
        if not padding:
            return matrices
        copies = jnp.broadcast_to(matrices[-1:], (padding, *matrices.shape[1:]))
        return jnp.concatenate([matrices, copies])

    def _unstack(self, stack: _Stack, matrices: Any, like: Sequence[Any]) -> list[Any]:
        """The leaves of a stack, sharded as planned."""
        with jax.named_scope(BY_MATRIX):
            for layout in reversed(stack.layouts):
                matrices = self._constrain(matrices, layout)
            ends = [*accumulate(math.prod(x.shape[:-2]) for x in like)]
            # The part after the last matrix is padding.
            parts = jnp.split(matrices, ends)[: len(like)]
            return [
                self._constrain(part.reshape(x.shape), spec)
                for part, x, spec in zip(parts, like, stack.specs, strict=True)
            ]

    # ---------------------------------------------------------------- Auto and Explicit axes

    @property
    def _explicit(self) -> tuple[str, ...]:
        return axes_of_type(self.plan.mesh, AxisType.Explicit)

    def _constrain(self, x: Any, spec: PartitionSpec) -> Any:
        # In `auto_axes` all axes are Auto, unlike in the plan's mesh.
        sharding = spec if self._explicit else NamedSharding(self.plan.mesh, spec)
        return jax.lax.with_sharding_constraint(x, sharding)

    def _on_auto_axes(self, run: Callable[..., Any], out_specs: PyTree) -> Callable[..., Any]:
        """Wraps `run` in Auto axes. On Explicit axes, JAX has no type for a `vmap` over a sharded
        dim, unless the function was written for it."""
        if not self._explicit:
            return run
        # The types of arrays have no Auto axes, and the constraints in `run` shard over these.
        auto = axes_of_type(self.plan.mesh, AxisType.Auto)
        out = tree_map(
            lambda spec: NamedSharding(self.plan.mesh, drop_axes(spec, auto)),
            out_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        return auto_axes(run, axes=self._explicit, out_sharding=out)


def _find_layouts(of_dims: Sequence[Entry], mesh: AnyMesh) -> list[PartitionSpec]:
    """`P(None, 'fsdp', 'tensor')`, `P('fsdp', None, 'tensor')`, `P(('fsdp', 'tensor'))`: one dim at
    a time. XLA moves one dim by an all-to-all, but gathers everything to move two dims."""
    *leading, rows, columns = of_dims
    first, others = all_axes(leading), [axes_of(rows), axes_of(columns)]
    layouts = [(first, others)]
    # In the order of the mesh's axes, so that one rule for the state fits all stacks.
    positions = [[mesh.axis_names.index(axis) for axis in axes] for axes in others]
    for dim in sorted((0, 1), key=positions.__getitem__):
        if not others[dim]:
            continue
        first = [*first, *others[dim]]
        others = [() if i == dim else axes for i, axes in enumerate(others)]
        layouts.append((first, others))
    return [PartitionSpec(*map(entry_of, (first, *others))) for first, others in layouts]


def _select(values: Sequence[Any], stack: _Stack) -> list[Any]:
    return [values[i] for i in stack.members]


def _without(stacks: Sequence[_Stack], leaves: Sequence[Any], treedef: Any) -> PyTree:
    """The tree with `None` instead of matrices."""
    stacked = {i for stack in stacks for i in stack.members}
    return treedef.unflatten([None if i in stacked else x for i, x in enumerate(leaves)])


def _check_numbers(extra_args: Mapping[str, Any]) -> None:
    """Raises `ArgumentError` for arguments that matrices cannot share, such as trees."""
    for name, x in extra_args.items():
        if getattr(x, "shape", None) != () and not isinstance(x, int | float):
            raise ArgumentError(
                f"by_matrix: update got {name}, {describe_argument(x)}. Each matrix is updated"
                " alone, and all of them can only share numbers. Pass it to an optimizer outside:"
                " `optax.chain(by_matrix(optimizer, plan), other)`."
            )

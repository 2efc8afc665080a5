"""Gradients that are sharded and reduced as the plan says."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.sharding import AxisType
from jax.tree_util import tree_flatten

from treeshard._core.arguments import check_function, check_no_refs
from treeshard._core.arrays import StaticSplit, has_gradient, is_array
from treeshard._core.contexts import deferred_axes
from treeshard._core.jax_private import is_tracing, show_as, varying_axes, vmapped_axes
from treeshard._core.mesh import (
    axes_of_type,
    axis_sizes,
    axis_tuple,
    can_wait,
    check_axes,
    context_mesh,
    get_incontext_mesh,
    manual_axes,
)
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec, specs_of_leaves
from treeshard._placement.constraint import with_sharding_constraint
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce, current_plan, default_batch, row_axes
from treeshard._planning.wrong_arguments import check_specs
from treeshard.errors import SpecError
from treeshard.training._type_errors import sharding_type_errors


def value_and_grad(
    loss: Callable[..., Any],
    specs: SpecTree = None,
    *,
    has_aux: bool = False,
    axis_names: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Makes a gradient function for `jit`; the one for `shard_map` is `manual.value_and_grad`.

    Examples:
        >>> mesh = ts.make_mesh("data=2,fsdp=4")
        >>> state = {"w": jnp.zeros(8)}
        >>> plan = ts.plan(state, [("w", ts.fsdp("fsdp", min_size=0))], mesh)
        >>> @jit_step(plan=plan)
        ... def step(state, batch):
        ...     loss = lambda p, x: jnp.mean((x @ ts.unshard(p)["w"] - 1) ** 2)
        ...     value, grads = ts.training.value_and_grad(loss)(state, batch)
        ...     return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value
        >>> state, value = step(ts.shard(state, plan), np.ones((16, 8), "float32"))
        >>> float(value)
        1.0

    The value and the gradients equal the results of `jax.value_and_grad` for any loss: a
    constraint shards gradients, and changes no number.

    - On Auto axes, they are constrained to the specs of their parameters, or of the optimizer state
      if it alone is sharded (ZeRO-1), so that compilers can scatter them.
    - On Explicit axes, JAX's types shard them as their parameters, and each product ends in an
      all-reduce of a full gradient. With `axis_names`, gradients of weights in products wait for
      one sum after all loops of the loss, and gradients of weights that `unshard` gathers
      are scattered. Other gradients are summed where the weight is used.

    For one reduction of several minibatches, see `axis_names` of `accumulate_gradients`.

    Without a mesh, it is `jax.value_and_grad`.

    Args:
        loss: `loss(params, *args)` returns a scalar; with `has_aux`, a scalar and anything.
        specs: Specs of `params`, a prefix of them, or a `Plan` that contains `params`. By default
            the plan of the step.
        has_aux: Whether `loss` returns `(value, aux)`.
        axis_names: On Explicit axes, those that shard the batch, over which gradients wait (in a
            step, over the others that shard it too); the loss is then traced twice. No effect on a
            mesh with Auto axes, where compilers choose.

    Returns:
        `f(params, *args) -> (value, grads)`, or `((value, aux), grads)`. Gradients of leaves that
        are not floating are `None`.

    Raises:
        SpecError: When called on a mesh, if no plan is in force and `specs` is not given, or the
            plan has no subtree like `params`, or several that differ; inside `shard_map_step`, and
            in another `shard_map` if `params` are shards.
        ShardingRuleError: If `specs` is a `Plan` with errors, as `Plan.check_before_use`, whose
            warnings apply too.
        ArgumentError: If `loss` is not a function; if `specs` is a mesh, a list of rules or text.
        LeafError: When called, if a leaf of `params` is a mutable reference (`jax.Ref`).
        UnknownAxisError: When called, if the mesh lacks one of `axis_names`.
        ShardingTypeError: When called with `axis_names`, if `unshard` gathers a matrix for anything
            but products, and JAX has no type for that.

    Source:
        The twin of `treeshard.manual.value_and_grad`, for code that the compiler partitions.
    """
    check_function(loss, "value_and_grad(loss, plan)")
    check_specs(specs, "value_and_grad(loss, {})")
    named = axis_tuple(axis_names, "value_and_grad")
    given = None
    if isinstance(specs, Plan):
        specs.check_before_use()
        given = PlanInForce(specs, row_axes(default_batch(specs)))

    def value_and_grad_of_loss(params: PyTree, *args: Any) -> tuple[Any, PyTree]:
        check_no_refs(params, "value_and_grad")
        step = current_plan()
        # A passed plan is in force inside the loss, like the plan of a step.
        if given is not None and (step is None or step.plan is not given.plan):
            return given.inside(value_and_grad_of_loss)(params, *args)
        if step is not None and step.is_by_hand:
            raise SpecError(_ONCE_PER_DEVICE.format("inside `shard_map_step`"))
        mesh = get_incontext_mesh(raise_error=False) if step is None else step.plan.mesh
        own = None if mesh is None else _specs_of_gradients(params, specs, step)
        leaves, treedef = tree_flatten(params)
        _check_no_shards(leaves, specs_of_leaves(own, params), is_planned=own is not specs)
        # JAX differentiates only floating-point arrays. The loss gets all leaves.
        split = StaticSplit(leaves, treedef, has_gradient)
        arrays = split.dynamic(leaves)
        grad_specs = split.dynamic(specs_of_leaves(own, params))
        if mesh is not None:
            check_axes(named, axis_sizes(mesh), "value_and_grad")
        waiting = _deferred_axes(named, step)

        def run(arrays: list[Any]) -> tuple[Any, Any]:
            out = loss(split.combine(arrays), *args)
            return out if has_aux else (out, None)

        differentiate = jax.value_and_grad(show_as(run, loss), has_aux=True)
        gathered = () if step is None else step.gathered_axes
        types = nullcontext()
        if mesh is not None:
            types = sharding_type_errors(mesh, gathered, is_waiting=bool(waiting))
        with types:
            if waiting:
                # Types shard these gradients, and a constraint would end the wait.
                from treeshard.training._waiting import grads_with_deferred_sum

                value, aux, grads = grads_with_deferred_sum(differentiate, arrays, waiting)
            else:
                # The partitioner shards a gradient like its operands, which may be full. The
                # constraint turns the all-reduce into a reduce-scatter.
                (value, aux), grads = differentiate(arrays)
                grads = with_sharding_constraint(grads, grad_specs, mesh)
        return ((value, aux) if has_aux else value), split.fill_static(grads)

    return value_and_grad_of_loss


_ONCE_PER_DEVICE = (
    "value_and_grad: this runs once per device, {}. Use `treeshard.manual.value_and_grad` there."
)


def _deferred_axes(named: tuple[str, ...], step: PlanInForce | None) -> tuple[str, ...]:
    """The axes over which gradients wait for one sum, on Explicit axes.

    The caller names them, or a function that accumulates gradients.
    """
    axes = named or deferred_axes.value
    if not axes or not is_tracing() or not can_wait(context_mesh()):
        return ()
    # In JAX, all axes of a product wait together.
    rows = () if step is None else step.rows
    return tuple(dict.fromkeys([*axes, *rows]))


def _check_no_shards(leaves: list[Any], specs: list[Any], *, is_planned: bool) -> None:
    """Raises if parameters are shards over Manual axes, whose gradients would not be reduced.

    With a plan, shapes show whether code by hand has gathered a leaf. Passed specs say only how to
    shard gradients, so types decide, if JAX checks them.
    """
    here = manual_axes()
    for x, spec in zip(leaves, specs, strict=True):
        axes = here.intersection(get_names_from_partition_spec(spec)) if here else ()
        if axes and (is_planned or (is_array(x) and not varying_axes(x).isdisjoint(axes))):
            where = f"inside `jax.shard_map`, on shards of the parameters over {sorted(axes)}"
            raise SpecError(_ONCE_PER_DEVICE.format(where))


def _specs_of_gradients(params: PyTree, specs: SpecTree, step: PlanInForce | None) -> SpecTree:
    """The specs of the parameters, or of the optimizer state if it alone is sharded (ZeRO-1):
    each device then needs its shards of gradients, and not all of them."""
    own = _specs_of(params, specs, step)
    is_given = not isinstance(specs, Plan | None)
    if step is None or is_given or get_names_from_partition_spec(own):
        return own
    is_auto = not axes_of_type(step.plan.mesh, AxisType.Explicit)
    is_global = not manual_axes() and not vmapped_axes()
    of_state = step.specs_of_state(params) if is_auto and is_global else None
    return own if of_state is None else of_state


def _specs_of(params: PyTree, specs: SpecTree, step: PlanInForce | None) -> SpecTree:
    if specs is not None and not isinstance(specs, Plan):
        return specs
    if step is None:
        raise SpecError(
            "value_and_grad: no plan is in force here. Pass the plan, `value_and_grad(loss, plan)`,"
            " or call it inside a `jit_step`."
        )
    return step.specs_of(params, "value_and_grad(loss, {})")

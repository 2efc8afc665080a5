"""Gradients that are sharded and reduced as the plan says, in one pass or in several."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from treeshard._core.arrays import StaticSplit, array_text, has_gradient, is_array
from treeshard._core.jax_private import is_tracing, vmapped_axes
from treeshard._core.mesh import (
    AnyMesh,
    axes_of_type,
    axis_sizes,
    axis_tuple,
    can_wait,
    check_axes,
    context_mesh,
    get_axes_size_in_mesh,
    get_incontext_mesh,
    is_all_explicit,
    manual_axes,
)
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec, specs_of_leaves
from treeshard._core.specs import entry_of
from treeshard._placement.constraint import with_sharding_constraint
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce, current_plan, default_batch, row_axes
from treeshard.errors import LeafError, SpecError, listed
from treeshard.training._metrics import Metrics
from treeshard.training._type_errors import explaining_types

GradFn = Callable[[PyTree, Any], tuple[PyTree, PyTree]]


def value_and_grad(
    loss: Callable[..., Any],
    specs: SpecTree = None,
    *,
    axis_names: str | Sequence[str] | None = None,
    has_aux: bool = False,
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

    Like `jax.value_and_grad`, with less communication and memory:

    - Gradients are constrained to the specs of their parameters, or of the optimizer state if it
      alone is sharded (ZeRO-1), so that they can be scattered.
    - Along an axis that splits the batch and shards no parameter, such as `data` of a mesh
      `data=2,fsdp=4` (HSDP), each part of the batch is differentiated separately, and the shards
      of the gradients are averaged.
    - Where an axis covers a TPU's torus, they are scattered dim by dim, if the loss is seen to be a
      mean over rows, and uses weights through `unshard` alone.

    In the second case `loss` gets the rows of one part, so it must be a mean over the rows of
    `args`. For a mean with weights, divide by `jax.lax.pmean(weights.sum(), axis)`, or pass
    `axis_names=()`. Arrays in `args` are split on dim 0.

    Without a mesh, it is `jax.value_and_grad`.

    Args:
        loss: `loss(params, *args)` returns a scalar; with `has_aux`, a scalar and anything.
        specs: Specs of `params`, a prefix of them, or a `Plan` that contains `params`. By default
            the plan of the step.
        axis_names: The axes of the second case. By default those that split the step's batch and
            shard no parameter.
        has_aux: Over `axis_names`, arrays in `aux` are joined on dim 0, floating-point scalars
            are averaged, and `Metrics` are summed.

    Returns:
        `f(params, *args) -> (value, grads)`, or `((value, aux), grads)`. Gradients of leaves that
        are not floating are `None`.

    Raises:
        SpecError: When called on a mesh, if no plan is in force and `specs` is not given, or the
            plan has no subtree like `params`, or several that differ; if the axes do not divide the
            rows of `args`; inside `shard_map_step`.
        LeafError: When called, if `aux` has scalars that have no mean. Lists all of them.
        UnknownAxisError: When called, if the mesh lacks one of `axis_names`.

    Source:
        The twin of `treeshard.manual.value_and_grad`, for code that the compiler partitions.
    """
    with_aux = _with_aux(loss, has_aux=has_aux)
    given = None
    if isinstance(specs, Plan):
        given = PlanInForce(specs, row_axes(default_batch(specs)))

    def value_and_grad_of_loss(params: PyTree, *args: Any) -> tuple[Any, PyTree]:
        step = current_plan()
        if given is not None and (step is None or step.plan is not given.plan):
            return given.inside(value_and_grad_of_loss)(params, *args)
        if step is not None and step.gather is not None:
            raise SpecError(
                "value_and_grad: this runs once per device, inside `shard_map_step`. Use"
                " `treeshard.manual.value_and_grad` there."
            )
        mesh = get_incontext_mesh(raise_error=False) if step is None else step.plan.mesh
        own = None if mesh is None else _specs_of_gradients(params, specs, step, axis_names)
        leaves, treedef = tree_flatten(params)
        split = StaticSplit(leaves, treedef, has_gradient)
        grad_specs = split.dynamic(specs_of_leaves(own, params))
        axes = () if mesh is None else _separate_axes(mesh, grad_specs, axis_names, step)
        rows = _explicit_rows(axis_names, step)

        def of_arrays(arrays: list[Any], args: Any) -> tuple[Any, Any]:
            return with_aux(split.combine(arrays), *args)

        def local(arrays: list[Any], args: Any) -> tuple[Any, Any, list[Any]]:
            def run(arrays: list[Any]) -> tuple[Any, Any]:
                return of_arrays(arrays, args)

            # The partitioner shards a gradient like what it is computed from, which may be full:
            # the constraint is what turns its all-reduce into a reduce-scatter.
            differentiate = jax.value_and_grad(run, has_aux=True)
            if rows:
                from treeshard.training._waiting import by_waiting

                return by_waiting(differentiate, arrays, split.dynamic(leaf_paths(params)), rows)
            (value, aux), grads = differentiate(arrays)
            return value, aux, with_sharding_constraint(grads, grad_specs, mesh)

        run = over_parts(axes, local, mesh) if mesh is not None and axes else local
        # A step explains errors itself, after it tried all that it can.
        is_in_step = step is not None and step is not given
        with nullcontext() if mesh is None or is_in_step else explaining_types(mesh, step):
            results = _by_dims(of_arrays, split.dynamic(leaves), grad_specs, args, step, axis_names)
            value, aux, grads = results or run(split.dynamic(leaves), args)
        return ((value, aux) if has_aux else value), split.without_static(grads)

    return value_and_grad_of_loss


def _with_aux(loss: Callable[..., Any], *, has_aux: bool) -> Callable[..., tuple[Any, Any]]:
    return loss if has_aux else lambda *args: (loss(*args), None)


def _specs_of(params: PyTree, specs: SpecTree, step: PlanInForce | None) -> SpecTree:
    if specs is not None and not isinstance(specs, Plan):
        return specs
    if step is None:
        raise SpecError(
            "value_and_grad: no plan is in force here. Pass the plan, `value_and_grad(loss, plan)`,"
            " or call it inside a `jit_step`."
        )
    try:
        return step.specs_of(params)
    except SpecError as error:
        raise SpecError(
            f"value_and_grad: {error} Pass the specs of the parameters:"
            " `value_and_grad(loss, specs)`."
        ) from None


def _specs_of_gradients(
    params: PyTree,
    specs: SpecTree,
    step: PlanInForce | None,
    axis_names: str | Sequence[str] | None,
) -> SpecTree:
    """Those of the parameters; or those of the optimizer state, if it alone is sharded (ZeRO-1):
    each device then needs its shards of gradients, and not all of them."""
    own = _specs_of(params, specs, step)
    is_chosen = axis_names is not None or not isinstance(specs, Plan | None)
    if step is None or is_chosen or get_names_from_partition_spec(own):
        return own
    is_auto = not axes_of_type(step.plan.mesh, AxisType.Explicit)
    is_global = not manual_axes() and not vmapped_axes()
    of_state = step.specs_of_state(params) if is_auto and is_global else None
    return own if of_state is None else of_state


# ------------------------------------------------------------------ parts of the batch


def _separate_axes(
    mesh: AnyMesh,
    grad_specs: Sequence[Any],
    axis_names: str | Sequence[str] | None,
    step: PlanInForce | None,
) -> tuple[str, ...]:
    """The axes over whose parts of the batch gradients are averaged by hand."""
    sizes = axis_sizes(mesh)
    if axis_names is None:
        sharded = get_names_from_partition_spec(list(grad_specs))
        named = [axis for axis in (step.rows if step else ()) if axis not in sharded]
    else:
        named = axis_tuple(axis_names, "value_and_grad")
        check_axes(named, sizes, "value_and_grad: axis_names")
    # `accumulate_gradients` maps over parts itself.
    done = {*manual_axes(), *vmapped_axes()}
    # On Explicit axes types say what is reduced. By hand, only Auto axes may be left.
    here = context_mesh() or mesh
    others = set(axes_of_type(here, AxisType.Explicit)).difference(named)
    if others or is_all_explicit(here):
        return ()
    return tuple(a for a in sizes if a in named and sizes[a] > 1 and a not in done)


def _has_explicit(mesh: AnyMesh | None) -> bool:
    return mesh is not None and bool(axes_of_type(mesh, AxisType.Explicit))


def _explicit_rows(
    axis_names: str | Sequence[str] | None, step: PlanInForce | None
) -> tuple[str, ...]:
    """The axes over which gradients wait for one sum, where types say what waits."""
    if not is_tracing() or not can_wait(context_mesh()):
        return ()
    if axis_names is not None:
        return axis_tuple(axis_names, "value_and_grad")
    return step.rows if step else ()


def _by_dims(
    loss: Callable[..., Any],
    arrays: list[Any],
    specs: Sequence[Any],
    args: Any,
    step: PlanInForce | None,
    axis_names: str | Sequence[str] | None,
) -> tuple[Any, Any, list[Any]] | None:
    """The value, `aux` and gradients, scattered over one dim of a TPU's torus after the other;
    `None` where no axis of the rows covers a torus, or that cannot be done."""
    if step is None or axis_names is not None or vmapped_axes():
        return None
    mesh = step.plan.mesh
    # Along Manual axes the code runs once per device already.
    free = [] if axes_of_type(mesh, AxisType.Explicit) else {*step.rows} - manual_axes()
    from treeshard._core.torus import covers_torus

    if not covers_torus(mesh, free):
        return None
    from treeshard.training._by_torus import by_torus

    return by_torus(loss, arrays, specs, args, step, over_parts)


def over_parts(
    axes: tuple[str, ...],
    local: Callable[..., Any],
    mesh: AnyMesh,
    specs: Sequence[PartitionSpec] | None = None,
) -> Callable[..., Any]:
    """Calls `local` for each part of the rows along `axes`, and averages what it returns.

    With `specs`, it gets this device's shards of arrays, and returns gradients of these, which are
    averaged over the other axes only.
    """
    each = PartitionSpec(entry_of(axes))
    whole = PartitionSpec()

    def mean(x: Any, over: tuple[str, ...] = axes) -> Any:
        return jax.lax.pmean(x.astype(wire_dtype(x, mesh)), over).astype(x.dtype)

    def mean_of_gradient(x: Any, spec: PartitionSpec) -> Any:
        split = get_names_from_partition_spec(spec)
        rest = tuple(axis for axis in axes if axis not in split)
        return mean(x, rest) if rest else x

    def run(arrays: list[Any], args: Any) -> tuple[Any, Any, list[Any]]:
        _check_rows(args, axes, mesh)
        leaves, treedef = tree_flatten(args)
        split = StaticSplit(leaves, treedef)
        aux_treedef: Any = None

        def part(arrays: list[Any], data: list[Any]) -> tuple[Any, Any, list[Any]]:
            nonlocal aux_treedef
            value, aux, grads = local(arrays, split.combine(data))
            value = mean(value)
            of_grads = [whole] * len(grads) if specs is None else specs
            grads = [mean_of_gradient(*pair) for pair in zip(grads, of_grads, strict=True)]
            aux, aux_treedef = tree_flatten(_reduced(aux, axes, mean))
            scalars = {i: x for i, x in enumerate(aux) if not jnp.ndim(x)}
            joined = {i: x for i, x in enumerate(aux) if jnp.ndim(x)}
            return value, (scalars, joined), grads

        data = split.dynamic(leaves)
        of_arrays = whole if specs is None else list(specs)
        # `out_specs` are given before `part` runs and tells how many arrays `aux` has: each spec
        # is for a dict of them. The compiler partitions along the axes that are not named. With
        # `check_vma`, the backward pass would add a psum for each parameter, before the mean.
        value, (scalars, joined), grads = jax.shard_map(
            part,
            # `shard_map` refuses any other mesh than the one in force.
            mesh=None if context_mesh() is not None else mesh,
            in_specs=(of_arrays, [each if x.ndim else whole for x in data]),
            out_specs=(whole, (whole, each), of_arrays),
            axis_names=set(axes),
            check_vma=False,
        )(arrays, data)
        both = scalars | joined
        return value, aux_treedef.unflatten([both[i] for i in range(len(both))]), grads

    return run


def _check_rows(args: Any, axes: tuple[str, ...], mesh: AnyMesh) -> None:
    parts = get_axes_size_in_mesh(axes, mesh)
    facts = [
        f"{path_under('args', path)}: the {len(x)} rows of {array_text(x)} are not divisible by"
        f" {parts}, the size of {', '.join(map(repr, axes))}. What is not split by rows can be"
        " closed over; or pass `axis_names=()`."
        for path, x in zip(leaf_paths(args), tree_leaves(args), strict=True)
        if is_array(x) and x.ndim and len(x) % parts
    ]
    if facts:
        raise SpecError(f"value_and_grad: {listed('arrays cannot be split:', facts)}")


def _reduced(aux: Any, axes: tuple[str, ...], mean: Callable[[Any], Any]) -> Any:
    """`aux` of one part: `Metrics` and scalars reduced over all parts, arrays as they are."""
    is_metrics = lambda x: isinstance(x, Metrics)  # noqa: E731
    rest = tree_map(lambda x: None if is_metrics(x) else x, aux, is_leaf=is_metrics)
    facts = [
        f"{path_under('aux', path)}: {array_text(x)} has no mean."
        for path, x in zip(leaf_paths(rest), tree_leaves(rest), strict=True)
        if is_array(x) and not x.ndim and not has_gradient(x)
    ]
    if facts:
        raise LeafError(
            f"value_and_grad: {listed('scalars cannot be averaged:', facts)} Return it as a"
            " floating-point mean, or as a sum in `training.Metrics`."
        )

    def reduce(x: Any) -> Any:
        if is_metrics(x):
            return x.reduce(axes)
        return x if jnp.ndim(x) else mean(jnp.asarray(x))

    return tree_map(reduce, aux, is_leaf=is_metrics)


def wire_dtype(x: Any, mesh: AnyMesh) -> Any:
    """The dtype in which an array is reduced: XLA for CPUs aborts if 16-bit floats are reduced over
    some axes by hand, and over others by the compiler."""
    on_cpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return "float32" if on_cpus and x.dtype.itemsize < 4 else x.dtype

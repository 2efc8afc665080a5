"""FSDP inside `shard_map`: keeps shards of parameters, gathers them, and averages their gradients.

JAX differentiates `jax.lax.all_gather` and `pmean`, but the numbers depend on the mode of
`shard_map`. With `check_vma=True`, JAX also sums the gradients of values that do not vary. With
`check_vma=False`, the transpose of a `psum` is another `psum`. Adam hides such factors. These
functions therefore mark all values as varying first. Each device then has its own gradients, which
are averaged once and explicitly. The program is the same in both modes.
"""

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.dtypes import float0
from jax.sharding import AbstractMesh, PartitionSpec
from jax.tree_util import tree_flatten
from jax.typing import DTypeLike

from treeshard._core.arguments import check_function
from treeshard._core.arrays import StaticSplit, has_gradient, is_array
from treeshard._core.jax_private import varying_axes
from treeshard._core.mean_gather import Reduced, explain_not_innermost, gather_shard
from treeshard._core.mesh import (
    abstract_mesh,
    axis_sizes,
    axis_tuple,
    check_bound,
    context_mesh,
    manual_axes,
    still_differs,
)
from treeshard._core.origins import note_origin, origin_of
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecTree
from treeshard._core.specs import dims_over, drop_axes, project
from treeshard._planning.plan_in_force import current_plan, mesh_in_force
from treeshard._planning.tactics import fsdp
from treeshard.errors import LeafError, SpecError, UnknownAxisError, listed, warn
from treeshard.manual._boxes import (
    Leaf,
    find_specs,
    leaves_with_specs,
    make_box,
    specs_in_boxes,
)
from treeshard.manual._mean_gather import (
    INSTEAD_OF_GATHER,
    AxisNames,
    bound_axes,
    vary,
)

# The tutorials' threshold, in elements.
MIN_WEIGHT_SIZE = 2**18


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Makes a key that differs on each device along an axis, for example for dropout.

    Args:
        rng: A key, the same on these devices.
        axis_name: The axes along which the key differs: all axes that shard the batch.

    Returns:
        `rng` with this device's row-major index along the axes folded in.

    Raises:
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> def draw(key):
        ...     return jax.random.uniform(fold_rng_over_axis(key, "data"), (1,))
        >>> mesh = make_mesh("data=8")
        >>> noise = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P("data"))
        >>> len(set(noise(jax.random.key(0)).tolist()))
        8

    Source:
        The function of this name in the UvA deep-learning tutorials.
    """
    axes = bound_axes(axis_name, "fold_rng_over_axis", "use one key for the full batch")
    return jax.random.fold_in(rng, lax.axis_index(axes)) if axes else rng


# ------------------------------------------------------------------ keep


@jax.named_scope("shard_params")
def shard_params(
    params: PyTree,
    axis_name: AxisNames,
    min_weight_size: int = MIN_WEIGHT_SIZE,
    *,
    specs: SpecTree = None,
) -> PyTree:
    """Returns this device's shards of parameters that every device has in full.

    Axes that already shard a leaf are kept, so a tree can be sharded over one axis after another.

    Args:
        params: Any pytree. Leaves that are not arrays pass through.
        axis_name: The axis to shard over, or several, whose sizes multiply.
        min_weight_size: Without specs, leaves with fewer elements are not sharded.
        specs: How to shard each leaf: a tree of specs, a prefix of one, or a `Plan`. Axes in
            them outside of `axis_name` must shard the leaf already. Without specs, the
            largest dim that is free and divisible is sharded (among equals the last), and the
            leaf is put into a `Partitioned` box with its spec.

    Returns:
        The same tree, with a box around each leaf that was sharded without specs.

    Raises:
        SpecError: If `specs` does not fit the tree, or a spec does not fit its leaf.
        UnknownAxisError: If an axis is not bound here, or a spec has an axis that the mesh
            lacks.
        ShardingRuleError: If `specs` is a `Plan` with errors, as `Plan.check_before_use`, whose
            warnings apply too.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).
        TypeError: If `min_weight_size` is not a number.

    Warns:
        ShardingWarning: If leaves are sharded over the axis already, or have no dim that is
            free and divisible. Such leaves stay unchanged. With specs, leaves that are sharded
            already are only found under `check_vma=True`, by the axes along which they vary.

    Examples:
        >>> def init(key):
        ...     return shard_params(jax.random.normal(key, (16, 8)), "fsdp", specs=P("fsdp"))
        >>> mesh = make_mesh("fsdp=8")
        >>> init = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P("fsdp"))
        >>> init(jax.random.key(0)).shape
        (16, 8)

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP.
    """
    axes = bound_axes(
        axis_name,
        "shard_params(params, axis_name, specs=specs)",
        "`treeshard.shard` places full trees",
    )
    check_is_size(min_weight_size, "shard_params(params, axis_name, specs={})")
    leaves, treedef = leaves_with_specs(
        params, specs_in_boxes(params) if specs is None else specs, "shard_params"
    )
    # All leaves are decided first, so that one message lists all that cannot be sharded.
    mesh = _current_mesh(axes)
    if specs is None:
        decisions = [_decide_by_size(leaf, axes, mesh, min_weight_size) for leaf in leaves]
    else:
        decisions = [_decide_by_spec(leaf, axes, mesh) for leaf in leaves]
    if facts := _facts(leaves, [decision.error for decision in decisions]):
        raise SpecError(f"shard_params: {listed('these leaves cannot be sharded:', facts)}")
    if facts := _facts(leaves, [decision.warning for decision in decisions]):
        warn(f"shard_params: {listed('these leaves stay as they are:', facts)}")
    in_boxes = specs is None
    rows = zip(leaves, decisions, strict=True)
    return treedef.unflatten(
        [_shard_leaf(leaf, decision, axes, in_boxes) for leaf, decision in rows]
    )


def check_is_size(min_weight_size: Any, call: str) -> None:
    """Raises if the threshold is not a number, such as specs in its position."""
    if not isinstance(min_weight_size, Real):
        kind = type(min_weight_size).__name__
        raise TypeError(
            f"{call.partition('(')[0]}: min_weight_size is {kind}, but it is a number of elements."
            f" Pass specs by name: `{call.format('specs')}`."
        )


class Decision(NamedTuple):
    """What `shard_params` does with one leaf.

    Attributes:
        spec: How the leaf is sharded afterwards; `None` if it stays unchanged.
        warning: Why it stays unchanged, if the caller may have expected a shard.
        error: Why it cannot be sharded as requested.
    """

    spec: PartitionSpec | None = None
    warning: str = ""
    error: str = ""


def _facts(leaves: Sequence[Leaf], whys: Iterable[str]) -> list[str]:
    """The lines of a message, for the leaves with a reason in `whys`."""
    rows = zip(leaves, whys, strict=True)
    return [f"{leaf.path or 'the array'}: {why}" for leaf, why in rows if why]


def _current_mesh(axes: Sequence[str]) -> AbstractMesh:
    mesh = context_mesh()
    sizes = dict(axis_sizes(mesh)) if mesh is not None else {}
    # `jax.vmap(axis_name=)` also binds axes, which meshes do not have.
    sizes |= {axis: lax.axis_size(axis) for axis in axes}
    return abstract_mesh(sizes)


def _decide_by_size(
    leaf: Leaf, axes: tuple[str, ...], mesh: AbstractMesh, min_weight_size: int
) -> Decision:
    """Adds `axes` to the largest free dim of a leaf with at least `min_weight_size` elements."""
    if not axes or leaf.passes_through or leaf.value.ndim == 0:
        return Decision()
    if set(axes) & set(leaf.axes):
        return Decision(warning=f"it is sharded as {leaf.spec} already.")
    # Rules and `min_weight_size` apply to full arrays. Other axes may have split this one already.
    shape = list(leaf.value.shape)
    for dim, others in dims_over(leaf.spec, mesh.axis_names):
        shape[dim] *= lax.axis_size(others)
    full = jax.ShapeDtypeStruct(shape, leaf.value.dtype)
    spec, notes = fsdp(axes).refine(leaf.spec, mesh, leaf.path, full, min_weight_size)
    if spec != leaf.spec:
        return Decision(spec)
    # Small leaves are not reported. If no dim can be split, a shape may be wrong.
    is_indivisible = bool(notes) and notes[0].kind == "no-dim"
    return Decision(warning=notes[0].why) if is_indivisible else Decision()


def _decide_by_spec(leaf: Leaf, axes: tuple[str, ...], mesh: AbstractMesh) -> Decision:
    """Shards a leaf over the axes of `axes` that its spec has."""
    requested = set(axes) & set(leaf.axes)
    if leaf.passes_through or not requested:
        return Decision()
    # Under `check_vma=False`, types do not show what varies, so the check passes.
    if varying_axes(leaf.value) & requested:
        why = f"it varies over the axes of {leaf.spec}, so it is sharded already."
        return Decision(warning=why)
    # The other axes must shard the leaf already, so its shape here is a shard's shape.
    new = drop_axes(leaf.spec, [axis for axis in leaf.axes if axis not in axes])
    _, losses = project(new, mesh, leaf.value.shape)
    reasons = [explain_not_innermost(leaf.spec, axes), *(loss.why for loss in losses)]
    return Decision(leaf.spec, error=" ".join(filter(None, reasons)))


def _shard_leaf(leaf: Leaf, decision: Decision, axes: tuple[str, ...], in_boxes: bool) -> Any:
    """The leaf of the resulting tree. With `in_boxes`, leaves without a box get one."""
    spec = decision.spec
    if spec is None:
        return leaf.node
    shard = _slice_own_shard(leaf.value, dims_over(spec, axes))
    # Without specs, only the box records the chosen dim.
    if in_boxes and not leaf.is_boxed:
        return make_box(shard, spec)
    return leaf.rebox(shard, spec)


def _slice_own_shard(x: Any, dims: Sequence[tuple[int, tuple[str, ...]]]) -> Any:
    """This device's shard of a full array."""
    for dim, axes in dims:
        length = x.shape[dim] // lax.axis_size(axes)
        # The index along several axes is row-major, as `P(("a", "b"))` orders shards.
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * length, length, dim)
    return x


# ------------------------------------------------------------------ gather


def gather_params(
    params: PyTree,
    axis_name: AxisNames | None = None,
    specs: SpecTree = None,
    *,
    dtype: DTypeLike | None = None,
) -> PyTree:
    """Gathers parameters from the shards of all devices, and averages their gradients.

    Examples:
        >>> def loss(params, x):
        ...     return jnp.mean(x @ gather_params(params, "fsdp", P("fsdp")))
        >>> def step(params, x):
        ...     return sync_gradients(jax.grad(loss)(params, x), "fsdp", P("fsdp"))
        >>> mesh, w, x = make_mesh("fsdp=8"), jnp.ones((8, 2)), jnp.ones((16, 8))
        >>> f = jax.shard_map(step, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
        >>> f(w, x)[0]
        Array([0.5, 0.5], dtype=float32)

    The forward pass all-gathers each leaf over the axes of `axis_name` that shard it. The backward
    pass reduce-scatters its gradient, and divides it by the number of devices.

    Call `sync_gradients` on the gradients, with the same axes: all axes that shard the batch, or
    shard parameters to save memory. If the loss is the mean over *this device's* batch, the result
    is the gradient of the mean loss over all devices. If the loss was already reduced by
    `jax.lax.pmean` with `check_vma=True`, return `vary(loss, axis_names)`, or use
    `value_and_grad`, which is right for every loss. Take the gradient inside `shard_map` and in
    reverse mode. `jax.jvp` does not work.

    In a scan over layers, put `jax.checkpoint` around the layer. Without it, all gathered weights
    are kept for the backward pass. Call `vary` on the parameters before the scan, to average
    gradients of replicated leaves once, and not once per layer.

    Args:
        params: Any pytree. Leaves that are not arrays pass through.
        axis_name: The axes to gather over, and to average gradients over; by default all
            Manual axes.
        specs: How `params` is sharded: a tree of specs, a prefix of one, or a `Plan`; `None`
            in it leaves a subtree unchanged. By default, the specs are looked up in the plan in
            force, as `treeshard.unshard` does. Without a plan, boxes (`Partitioned`, Flax's) give
            the specs, and leaves without a box are replicated.
        dtype: The dtype in which floating leaves and their gradients are sent, such as
            `jnp.bfloat16`. Gradients are converted back afterwards.

    Returns:
        The same tree. Leaves that another axis still shards stay in their boxes, and nnx variables
        stay variables; other boxes are removed.

    Raises:
        SpecError: If `specs` does not fit the tree or a leaf, or a dim cannot be gathered
            over an axis because an axis further in still shards it. Without `specs`: if the plan in
            force has no subtree like `params`, or several with different specs; if a box names
            other axes than the plan; or, without a plan and boxes and under `check_vma=True`, if
            leaves differ along the axes, as shards do.
        UnknownAxisError: If an axis is not bound here, or a spec has an axis that the mesh
            lacks.
        ShardingRuleError: If `specs` is a `Plan` with errors, as `Plan.check_before_use`, whose
            warnings apply too.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP; ZeRO stage 3,
        Rajbhandari et al. 2020, arXiv:1910.02054.
    """
    axes = _axes_or_all(axis_name)
    check_bound(axes, "gather_params", INSTEAD_OF_GATHER)
    if specs is None:
        specs = find_specs(params, axes, "gather_params(params, axis_name, {})")
    leaves, treedef = leaves_with_specs(params, specs, "gather_params")
    if facts := _facts(leaves, [explain_not_innermost(leaf.spec, axes) for leaf in leaves]):
        raise SpecError(f"gather_params: {listed('these leaves cannot be gathered:', facts)}")
    return treedef.unflatten([_gather_leaf(leaf, axes, dtype) for leaf in leaves])


def _axes_or_all(axis_names: AxisNames | None) -> tuple[str, ...]:
    if axis_names is not None:
        return axis_tuple(axis_names, "gather_params(params, axis_name, specs)")
    # In the order of the mesh, so that every process traces the same program.
    mesh, bound = context_mesh(), manual_axes()
    if mesh is None or not bound:
        raise UnknownAxisError(
            "gather_params: no axis is bound here. Axes are bound inside `jax.shard_map`; outside,"
            f" {INSTEAD_OF_GATHER}."
        )
    return tuple(axis for axis in mesh.axis_names if axis in bound)


def _gather_leaf(leaf: Leaf, axes: tuple[str, ...], dtype: DTypeLike | None) -> Any:
    if leaf.passes_through:
        return leaf.node
    x = leaf.value
    # Integers, such as quantised weights, are not converted.
    converts = dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    full = gather_shard(x, leaf.spec, axes, mesh_in_force(), dtype if converts else None)
    rest = drop_axes(leaf.spec, axes)
    return leaf.rebox(full, rest)


# ------------------------------------------------------------------ average


@jax.named_scope("sync_gradients")
def sync_gradients(grads: PyTree, axis_names: AxisNames, specs: SpecTree = None) -> PyTree:
    """Averages gradients over the axes that do not shard their leaves.

    `gather_params` averages the gradients of a leaf over the axes that shard it. `sync_gradients`
    averages only gradients that may still differ, so a second call does not change them.

    See `gather_params` for the losses and the axes for which the result is the gradient of the
    mean loss. Without a gather (plain data parallelism), call `vary` on the parameters first:
    otherwise, under `check_vma=True`, JAX has summed the gradients already.

    Args:
        grads: The gradients, or any pytree to average. Leaves that are not arrays pass
            through, and so do the `float0`s that JAX returns for integers.
        axis_names: The axes to average over, the same as in `gather_params`.
        specs: How the parameters are sharded, as in `gather_params`. By default, the plan in force
            is searched for parameters with the structure and the shapes of `grads`; gradients may
            be `None`, and arrays that cannot be shards are averaged over all axes.

    Returns:
        A tree of the same structure.

    Raises:
        LeafError: If leaves are integers or keys, which have no mean, or mutable references.
        SpecError: As `gather_params`, or if a gradient that a gather has scattered over an axis is
            found to be averaged over it.
        UnknownAxisError, ShardingRuleError: As `gather_params`.

    Examples:
        >>> f = lambda g: sync_gradients(g, "fsdp")
        >>> mesh = make_mesh("fsdp=8")
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("fsdp"), out_specs=P())(jnp.arange(8.0))
        Array([3.5], dtype=float32)

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP.
    """
    instead = "under `jax.jit`, gradients need no averaging"
    axes = bound_axes(axis_names, "sync_gradients(grads, axis_names, specs)", instead)
    if specs is None:
        call = "sync_gradients(grads, axis_names, {})"
        specs = find_specs(grads, axes, call, are_gradients=True)
    leaves, treedef = leaves_with_specs(grads, specs, "sync_gradients")
    if facts := _facts(leaves, [_explain_shard(leaf, axes) for leaf in leaves]):
        raise SpecError(
            f"sync_gradients: {listed('gradients of shards would be averaged:', facts)} Pass the"
            " specs of the parameters: `sync_gradients(grads, axis_names, specs)`."
        )
    if facts := _facts(leaves, map(_no_mean, leaves)):
        raise LeafError(
            f"sync_gradients: {listed('these leaves are not gradients:', facts)} Remove them"
            " from the tree, or use `value_and_grad`, which differentiates floating leaves only."
        )
    # The step raises if such a shard was never gathered, because it is not averaged over these
    # axes.
    if (step := current_plan()) is not None:
        for leaf in leaves:
            if over := set(axes).intersection(leaf.axes):
                step.record_reduced(leaf.value, leaf.spec, over)
    return treedef.unflatten([_average_leaf(leaf, axes) for leaf in leaves])


def _explain_shard(leaf: Leaf, axes: Sequence[str]) -> str:
    """Why the average would mix different rows, if the origin of the array is known."""
    origin = origin_of(leaf.value)
    scattered = origin.scattered if isinstance(origin, Reduced) else ()
    averaged = [axis for axis in scattered if axis in axes and axis not in leaf.axes]
    return f"each device has its shard along {averaged}, not summands." if averaged else ""


def _no_mean(leaf: Leaf) -> str:
    """Why a leaf has no mean; empty if it has one, or passes through."""
    x = leaf.value
    if leaf.passes_through or x.dtype == float0 or jnp.issubdtype(x.dtype, jnp.inexact):
        return ""
    return f"{x.dtype}{list(x.shape)} has neither a mean nor a gradient."


def _average_leaf(leaf: Leaf, axes: tuple[str, ...]) -> Any:
    if leaf.passes_through or leaf.value.dtype == float0:
        return leaf.node
    # The transpose of the gather has averaged it over the axes of its spec. Averaged gradients no
    # longer differ, so a second call is free.
    over = tuple(a for a in axes if a not in leaf.axes and still_differs(leaf.value, a))
    if not over:
        return leaf.node
    scattered = tuple(axis for axis in leaf.axes if axis in axes)
    # One call for each leaf is enough: XLA combines small all-reduces.
    return leaf.with_value(note_origin(lax.pmean(leaf.value, over), Reduced(scattered, over)))


# ------------------------------------------------------------------ value and grad


def value_and_grad(
    loss: Callable[..., Any],
    axis_names: AxisNames,
    specs: SpecTree = None,
    *,
    has_aux: bool = False,
    dtype: DTypeLike | None = None,
    gather: bool = True,
) -> Callable[..., Any]:
    """Makes a gradient function for `shard_map`; the one for `jit` is `training.value_and_grad`.

    Examples:
        >>> step = value_and_grad(lambda w, x: jnp.mean(x @ w), "fsdp", P("fsdp"))
        >>> mesh, w, x = make_mesh("fsdp=8"), jnp.ones((8, 2)), jnp.ones((16, 8))
        >>> f = jax.shard_map(
        ...     step, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=(P(), P("fsdp"))
        ... )
        >>> f(w, x)[1][0]
        Array([0.5, 0.5], dtype=float32)

    The function gathers the parameters, differentiates and averages: FSDP in one call. It is right
    for every loss. If the loss is the mean over this device's batch, the gradients are the
    gradients of the mean over all devices. If the loss was reduced by `jax.lax.pmean`, `psum`, or a
    quotient of `psum`s, the gradients are the gradients of the reduced value.

    Args:
        loss: Called as `loss(params, *args)` with full parameters; returns a scalar, or with
            `has_aux` a pair of a scalar and anything.
        axis_names: The axes to gather and average over: all that shard the batch, and all
            that shard parameters to save memory.
        specs: As in `gather_params`. Parameters that were gathered before do not need specs.
        has_aux: Whether `loss` returns `(scalar, aux)`. `aux` is this device's own and is returned
            unchanged: reduce it yourself.
        dtype: As in `gather_params`.
        gather: Whether to gather before `loss` is called. Otherwise `loss` gets this device's
            shards, and calls `gather_params` itself with the same axes, such as on the weights
            of one layer inside a scan over layers.

    Returns:
        `f(params, *args) -> (value, grads)`, or `((value, aux), grads)`. Call it inside
        `shard_map`, on this device's shards. The value is the mean over the axes, and the
        gradients are sharded like `params`; they are `None` for leaves that are not floating.

    Raises:
        SpecError: When called, as `gather_params`; under `check_vma=True`, if the loss varies over
            an axis that is not in `axis_names` and over which no parameter varies: its gradients
            would be sums over that axis. `shard_map_step` raises if `gather=False`, and the loss
            never gathers a leaf.
        ArgumentError: If `loss` is not a function.
        UnknownAxisError: When called, if an axis is not bound here.
        ShardingRuleError, LeafError: When called, as `gather_params`.
    """
    where, shown = "value_and_grad", "value_and_grad(loss, axis_names, specs)"
    check_function(loss, shown)
    axes = axis_tuple(axis_names, shown)

    def value_and_grad_of_loss(params: PyTree, *args: Any) -> tuple[Any, PyTree]:
        check_bound(axes, where, "`jax.value_and_grad` under `jax.jit` is enough")
        call = "value_and_grad(loss, axis_names, {})"
        # Found once, so that the gather and the average use the same specs.
        own = find_specs(params, axes, call) if specs is None else specs
        leaves, treedef = tree_flatten(params)
        split = StaticSplit(leaves, treedef, has_gradient)

        def local(differentiated: list[Any]) -> tuple[Any, Any]:
            tree = split.combine(differentiated)
            out = loss(gather_params(tree, axes, own, dtype=dtype) if gather else tree, *args)
            value, aux = out if has_aux else (out, None)
            _check_axes_named(value, leaves, axes)
            # A loss that `pmean` has reduced does not vary. Without `vary`, its gradient would be
            # divided by the number of devices twice: here, and in the mean.
            return vary(value, axes), aux

        # JAX sums the gradient of an array that does not vary at each use, such as in every layer
        # of a scan. `sync_gradients` averages the gradients of varying arrays once.
        start = vary(split.dynamic(leaves), axes)
        (value, aux), grads = jax.value_and_grad(local, has_aux=True)(start)
        grads = sync_gradients(split.fill_static(grads), axes, own)
        value = lax.pmean(value, axes) if axes else value
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_of_loss


def _check_axes_named(value: Any, leaves: Sequence[Any], axes: Sequence[str]) -> None:
    # JAX would sum the gradients of parameters that do not vary over such an axis.
    expected = {*axes, *(axis for x in leaves if is_array(x) for axis in varying_axes(x))}
    if is_array(value) and (more := varying_axes(value) - expected):
        raise SpecError(
            f"value_and_grad: the loss also varies over {sorted(more)}, but axis_names is {axes}."
            " Its gradients would be summed over those axes: name them, or reduce the loss."
        )

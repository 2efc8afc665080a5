"""Inside `shard_map`: averages gradients, alone or together with gathering and differentiating."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_flatten
from jax.typing import DTypeLike

from treeshard._boxes import leaves_with_specs
from treeshard._by_hand_params import AxisNames, Facts, gather_params
from treeshard._errors import LeafError, SpecError, listed
from treeshard._mean_grads import still_differs, vary, varying
from treeshard._mesh import axis_tuple, check_bound
from treeshard._specs import is_array


@jax.named_scope("sync_gradients")
def sync_gradients(grads: Any, axis_names: AxisNames, specs: Any = None) -> Any:
    """Averages gradients over the axes that do not shard their leaves.

    `gather_params` has averaged the gradients of a leaf over the axes that shard it. Only
    gradients that may still differ are averaged here, so a second call changes nothing.

    See `gather_params` for the losses and the axes for which the result is the gradient of the
    mean loss. Without a gather (plain data parallelism), call `vary` on the parameters first:
    otherwise, under `check_vma=True`, JAX has summed the gradients already.

    Args:
        grads: The gradients, or any pytree to average. Leaves that are not arrays pass
            through, and so do the `float0`s that JAX returns for integers.
        axis_names: The axes to average over, the same as in `gather_params`.
        specs: How the parameters are sharded, as in `gather_params`; by default the specs are
            read from boxes. `None` in it leaves a subtree as it is.

    Returns:
        A tree of the same structure.

    Raises:
        LeafError: If leaves are integers or keys, which have no mean.
        SpecError: If `specs` does not fit the tree or a leaf.
        UnknownAxisError: If an axis is not bound here, or a spec has an axis that the mesh
            lacks.

    Examples:
        >>> f = lambda g: sync_gradients(g, "fsdp")
        >>> mesh = make_mesh("fsdp=8")
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("fsdp"), out_specs=P())(jnp.arange(8.0))
        Array([3.5], dtype=float32)

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP.
    """
    axes = axis_tuple(axis_names, "sync_gradients")
    check_bound(axes, "sync_gradients", "under `jax.jit`, gradients need no averaging")
    leaves, treedef = leaves_with_specs(grads, specs, "sync_gradients")
    out, misfits = [leaf.unchanged() for leaf in leaves], Facts()
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        x = leaf.value
        if leaf.spec is None or not is_array(x) or x.dtype == jax.dtypes.float0:
            continue
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            misfits.add(leaf, f"{x.dtype}{list(x.shape)} has neither a mean nor a gradient.")
            continue
        over = tuple(a for a in axes if a not in leaf.axes and still_differs(x, a))
        by_axes.setdefault(over, []).append(i)
    if misfits:
        raise LeafError(
            f"sync_gradients: {listed('these leaves are not gradients:', misfits)} Remove them"
            " from the tree, or use `value_and_grad`, which differentiates floating leaves only."
        )
    for over, indices in by_axes.items():
        if over:
            means = lax.pmean([leaves[i].value for i in indices], over)
            for i, mean in zip(indices, means, strict=True):
                out[i] = leaves[i].with_value(mean)
    return treedef.unflatten(out)


# ------------------------------------------------------------------ value and grad


def value_and_grad(
    loss: Callable[..., Any],
    axis_names: AxisNames,
    specs: Any = None,
    *,
    has_aux: bool = False,
    dtype: DTypeLike | None = None,
    gather: bool = True,
) -> Callable[..., Any]:
    """Makes a function that gathers, differentiates and averages: FSDP in one call.

    It is right for every loss: for the mean over this device's batch (the gradients are then
    those of the mean over all devices), and for a loss that was reduced by `jax.lax.pmean`,
    `psum`, or a quotient of `psum`s (the gradients are then those of that value).

    Args:
        loss: Called as `loss(params, *args)` with full parameters; returns a scalar, or with
            `has_aux` a pair of a scalar and anything.
        axis_names: The axes to gather and average over: all that shard the batch, and all
            that shard parameters to save memory.
        specs: How `params` is sharded, as in `gather_params`.
        has_aux: Whether `loss` returns more than the scalar. `aux` is returned as it is, this
            device's own: reduce it yourself.
        dtype: The dtype to which floating leaves are converted before they are sent.
        gather: Whether to gather before `loss` is called. Otherwise `loss` gets this device's
            shards, and calls `gather_params` itself with the same axes, such as on the weights
            of one layer inside a scan over layers.

    Returns:
        `f(params, *args) -> (value, grads)`, or `((value, aux), grads)`. Call it inside
        `shard_map`, on this device's shards. The value is the mean over the axes, and the
        gradients are sharded like `params`; those of leaves that are not floating are `None`.

    Raises:
        SpecError: When called, if `specs` does not fit `params`; under `check_vma=True`, if
            the loss varies over an axis that is not in `axis_names` and over which no
            parameter varies: its gradients would be sums over that axis.
        UnknownAxisError: When called, if an axis is not bound here.

    Examples:
        >>> step = value_and_grad(lambda w, x: jnp.mean(x @ w), "fsdp", P("fsdp"))
        >>> mesh, w, x = make_mesh("fsdp=8"), jnp.ones((8, 2)), jnp.ones((16, 8))
        >>> f = jax.shard_map(
        ...     step, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=(P(), P("fsdp"))
        ... )
        >>> f(w, x)[1][0]
        Array([0.5, 0.5], dtype=float32)
    """
    where = "value_and_grad"
    axes = axis_tuple(axis_names, where)

    def value_and_grad_of_loss(params: Any, *args: Any) -> tuple[Any, Any]:
        check_bound(axes, where, "`jax.value_and_grad` under `jax.jit` is enough")
        leaves, treedef = tree_flatten(params)
        floating = [
            i for i, x in enumerate(leaves) if is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        ]

        def filled(new: Sequence[Any], others: Sequence[Any]) -> Any:
            every = list(others)
            for i, x in zip(floating, new, strict=True):
                every[i] = x
            return treedef.unflatten(every)

        def local(differentiated: Sequence[Any]) -> tuple[Any, Any]:
            tree = filled(differentiated, leaves)
            out = loss(gather_params(tree, axes, specs, dtype=dtype) if gather else tree, *args)
            value, aux = out if has_aux else (out, None)
            _check_axes_named(value, leaves, axes)
            return vary(value, axes), aux

        start = vary([leaves[i] for i in floating], axes)
        (value, aux), grads = jax.value_and_grad(local, has_aux=True)(start)
        grads = sync_gradients(filled(grads, [None] * len(leaves)), axes, specs)
        value = lax.pmean(value, axes) if axes else value
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_of_loss


def _check_axes_named(value: Any, leaves: Sequence[Any], axes: Sequence[str]) -> None:
    expected = {*axes, *(axis for x in leaves if is_array(x) for axis in varying(x))}
    if is_array(value) and (more := varying(value) - expected):
        raise SpecError(
            f"value_and_grad: the loss also varies over {sorted(more)}, but axis_names is {axes}."
            " Its gradients would be summed over those axes: name them, or reduce the loss."
        )

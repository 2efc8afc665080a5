"""Gathers whose gradients are means over the devices, whether or not `shard_map` checks what
varies.

Two conventions meet here. A loss belongs to one device, and the cotangents of gathered arrays
with it. The gradient of a shard, and of what all devices hold alike, is that of the mean loss
over all devices. `mean_gather` goes from the second to the first, `mean_scatter` back; each is
the other's derivative, so gradients of gradients are right too.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treeshard._errors import SpecError
from treeshard._mesh import axis_tuple, check_bound
from treeshard._specs import is_array

# For messages: what to call outside `shard_map`.
INSTEAD_OF_GATHER = (
    "`treeshard.unshard` gathers under `jax.jit`, and `treeshard.gather` brings trees to the host"
)


def varying(x: Any) -> frozenset[str]:
    """The axes over which the devices may hold different values, as far as JAX keeps track."""
    kind = jax.typeof(x)
    # No default: an empty set, wrongly, would make gradients as many times too large as
    # there are devices.
    return frozenset(
        kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    )


def still_differs(x: Any, axis: str) -> bool:
    """Whether the devices along `axis` may hold different values of `x`."""
    return axis in varying(x) or not _is_checked(axis)


def _is_checked(axis: str) -> bool:
    # The one value that surely varies.
    return axis in varying(lax.axis_index(axis))


def vary_array(x: Any, axes: Sequence[str]) -> Any:
    """Casts an array so that it counts as different on the devices along `axes`."""
    alike = tuple(axis for axis in axes if not still_differs(x, axis))
    return lax.pcast(x, alike, to="varying") if alike else x


class Gathering(NamedTuple):
    """How one array is gathered.

    Attributes:
        dims: The dims to gather, each with the axes that shard it, outermost first.
        alike: Axes along which all devices hold the same, and which its gradient is averaged
            over too. Only known under `check_vma=True`.
        wire: The dtype that is sent.
        own: The dtype of the array.
    """

    dims: tuple[tuple[int, tuple[str, ...]], ...]
    alike: tuple[str, ...]
    wire: Any
    own: Any

    def size(self) -> int:
        axes = (*self.alike, *(axis for _, axes in self.dims for axis in axes))
        return math.prod(lax.axis_size(axis) for axis in axes)


def gather_by(x: Any, how: Gathering) -> Any:
    """Gathers an array; its gradient is scattered again, and a mean."""
    if not jnp.issubdtype(how.own, jnp.inexact):
        return _gather(lax.stop_gradient(x), how)
    return mean_gather(x, how)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def mean_gather(x: Any, how: Gathering) -> Any:
    """All-gathers; the gradient is reduce-scattered and divided."""
    return _gather(x, how)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def mean_scatter(g: Any, how: Gathering) -> Any:
    """Reduce-scatters and divides; the gradient is all-gathered."""
    with jax.named_scope("scatter_gradients"):
        for dim, axes in how.dims:
            g = lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
        g = g.astype(how.own)
        return (lax.psum(g, how.alike) if how.alike else g) / how.size()


mean_gather.defvjp(
    lambda x, how: (mean_gather(x, how), None), lambda how, _, g: (mean_scatter(g, how),)
)
mean_scatter.defvjp(
    lambda g, how: (mean_scatter(g, how), None), lambda how, _, c: (mean_gather(c, how),)
)


def _gather(x: Any, how: Gathering) -> Any:
    with jax.named_scope("gather_params"):
        x = vary_array(x.astype(how.wire) if how.wire != how.own else x, how.alike)
        for dim, axes in how.dims:
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return x


# ------------------------------------------------------------------ public


def gather_array_with_mean_grads(
    x: jax.Array, dim: int, axis_names: str | Sequence[str]
) -> jax.Array:
    """All-gathers this device's part of an array; its gradient is the mean over the devices.

    With `n` devices along `axis_names`, shape `(..., dk, ...)` becomes `(..., n * dk, ...)`.
    Backwards, the devices' gradients are reduce-scattered and divided by `n`: what each gets
    is its part of the gradient of the devices' mean loss. That holds for a loss that is the
    device's own, not reduced yet; see `value_and_grad` for the others.

    Args:
        x: This device's part.
        dim: The dim that is sharded; negative ones count from the back.
        axis_names: The axis that shards it, or several, outermost first.

    Returns:
        The whole array, of the same dtype. It has reverse-mode gradients of any order, no
        forward-mode ones.

    Raises:
        UnknownAxisError: If an axis is not bound here.
        SpecError: If `x` has no such dim.

    Examples:
        >>> gather = lambda x: gather_array_with_mean_grads(x, 0, "fsdp")
        >>> mesh = make_mesh("fsdp=8")
        >>> jax.shard_map(gather, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(
        ...     jnp.ones(8)
        ... ).shape
        (64,)

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP.
    """
    where = "gather_array_with_mean_grads"
    axes = axis_tuple(axis_names, where)
    check_bound(axes, where, INSTEAD_OF_GATHER)
    if not -x.ndim <= dim < x.ndim:
        raise SpecError(f"{where}: there is no dim {dim} in shape {x.shape}.")
    how = Gathering(((dim % x.ndim, axes),) if axes else (), (), x.dtype, x.dtype)
    return gather_by(vary_array(x, axes), how)


def vary(tree: Any, axis_names: str | Sequence[str]) -> Any:
    """Casts arrays that all devices hold alike so that they count as each device's own.

    Values stay. Under `check_vma=True`, JAX sums the gradient of what devices hold alike over
    all of them, on its own and at once; that of the result stays with each device, until
    `sync_gradients` averages it. Parameters are varied before they are differentiated, a
    loss that is reduced already before it is returned. Under `check_vma=False` nothing is
    kept track of, and nothing happens.

    Args:
        tree: Any pytree. Leaves that are no arrays pass through.
        axis_names: Over which axes, one or several. Those that a leaf varies over already
            are fine.

    Returns:
        A tree of the same structure.

    Raises:
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> def step(w, x):  # plain data parallel
        ...     grads = jax.grad(lambda w: jnp.mean(x @ w))(vary(w, "data"))
        ...     return sync_gradients(grads, "data")
        >>> mesh, w, x = make_mesh("data=8"), jnp.ones(2), jnp.ones((16, 2))
        >>> jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)
        Array([1., 1.], dtype=float32)
    """
    axes = axis_tuple(axis_names, "vary")
    check_bound(axes, "vary", "nothing varies, and nothing needs it")
    return jax.tree.map(lambda x: vary_array(x, axes) if is_array(x) else x, tree)

"""All-gathers whose gradients are means over the devices, with and without `check_vma`.

The transpose of `jax.lax.all_gather` is a reduce-scatter, which sums; whether JAX also sums the
gradient of an array that is not gathered depends on `check_vma`. Hence a derivative of our own, for
which two conventions meet. The cotangent of a gathered array is that of one device's own loss.
The gradient of a shard, and of a replicated array, is that of the mean loss over all devices.
`mean_gather` maps from the second to the first, and `mean_scatter` back. Each is the derivative
of the other, so gradients of gradients are right too.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import is_array
from treeshard._core.mesh import AnyMesh, axis_tuple, check_bound, vary_array
from treeshard._core.paths import PyTree
from treeshard._core.torus import gather_along, scatter_along
from treeshard._planning.plan_in_force import mesh_in_force
from treeshard.errors import SpecError

# For messages: which function to call outside `shard_map` instead.
INSTEAD_OF_GATHER = (
    "`treeshard.unshard` gathers under `jax.jit`, and `treeshard.gather` brings trees to the host"
)


AxisNames = str | Sequence[str]


def bound_axes(axis_names: AxisNames, where: str, instead: str) -> tuple[str, ...]:
    """Axis names as a tuple. Raises `UnknownAxisError` for one that is not bound here; `instead`
    says what to do outside `shard_map`."""
    axes = axis_tuple(axis_names, where)
    check_bound(axes, where, instead)
    return axes


class Gathering(NamedTuple):
    """How one array is gathered.

    Attributes:
        dims: The dims to gather, each with the axes that shard it, outermost first.
        replicated: Axes along which all devices have the same array. Its gradient is averaged
            over them too. Only known under `check_vma=True`.
        wire_dtype: The dtype that is sent.
        dtype: The dtype of the array.
        mesh: The mesh of these axes, with its devices if they are known.
    """

    dims: tuple[tuple[int, tuple[str, ...]], ...]
    replicated: tuple[str, ...]
    wire_dtype: Any
    dtype: Any
    mesh: AnyMesh | None

    def size(self) -> int:
        axes = (*self.replicated, *(axis for _, axes in self.dims for axis in axes))
        return math.prod(lax.axis_size(axis) for axis in axes)


def gather_by(x: Any, how: Gathering) -> Any:
    """All-gathers an array; its gradient is reduce-scattered, and a mean over the devices."""
    if not jnp.issubdtype(how.dtype, jnp.inexact):
        return _gather(lax.stop_gradient(x), how)
    return mean_gather(x, how)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def mean_gather(x: Any, how: Gathering) -> Any:
    """All-gathers; the gradient is reduce-scattered and divided by the number of devices."""
    return _gather(x, how)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def mean_scatter(g: Any, how: Gathering) -> Any:
    """Reduce-scatters and divides by the number of devices; the gradient is all-gathered."""
    with jax.named_scope("scatter_gradients"):
        for dim, axes in how.dims:
            g = scatter_along(g, axes, dim, how.mesh)
        # Partial sums are sent in the narrow dtype, but added up over more devices in the wide one.
        g = g.astype(how.dtype)
        return (lax.psum(g, how.replicated) if how.replicated else g) / how.size()


mean_gather.defvjp(
    lambda x, how: (mean_gather(x, how), None), lambda how, _, g: (mean_scatter(g, how),)
)
mean_scatter.defvjp(
    lambda g, how: (mean_scatter(g, how), None), lambda how, _, c: (mean_gather(c, how),)
)


def _gather(x: Any, how: Gathering) -> Any:
    with jax.named_scope("gather_params"):
        if how.wire_dtype != how.dtype:
            x = x.astype(how.wire_dtype)
        x = vary_array(x, how.replicated)
        for dim, axes in how.dims:
            x = gather_along(x, axes, dim, how.mesh)
        return x


# ------------------------------------------------------------------ public


def gather_array_with_mean_grads(x: jax.Array, dim: int, axis_names: AxisNames) -> jax.Array:
    """All-gathers the shards of an array; its gradient is the mean over the devices.

    With `n` devices along `axis_names`, shape `(..., dk, ...)` becomes `(..., n * dk, ...)`.
    In the backward pass, the gradients of all devices are reduce-scattered and divided by `n`:
    each device gets its shard of the gradient of the mean loss. The loss must be this device's
    own, not reduced yet; for other losses see `value_and_grad`.

    Args:
        x: This device's shard.
        dim: The dim that is sharded; negative ones count from the back.
        axis_names: The axis that shards it, or several, outermost first.

    Returns:
        The full array, of the same dtype. Reverse-mode gradients of any order work;
        forward-mode ones do not.

    Raises:
        UnknownAxisError: If an axis is not bound here.
        SpecError: If `x` does not have this dim.

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
    axes = bound_axes(axis_names, where, INSTEAD_OF_GATHER)
    if not -x.ndim <= dim < x.ndim:
        raise SpecError(f"{where}: dim {dim} is out of range for shape {x.shape}.")
    dims = ((dim % x.ndim, axes),) if axes else ()
    how = Gathering(dims, (), x.dtype, x.dtype, mesh_in_force())
    return gather_by(vary_array(x, axes), how)


def vary(tree: PyTree, axis_names: AxisNames) -> PyTree:
    """Marks arrays that are equal on all devices as varying, so that gradients stay per device.

    Values do not change. Under `check_vma=True`, JAX itself sums the gradient of an array that
    is equal on all devices, over all of them. The gradient of the result of `vary` stays with
    each device instead, until `sync_gradients` averages it. Call it on parameters before you
    differentiate with respect to them, and on a reduced loss before you return it. Under
    `check_vma=False`, JAX does not track what varies, and `vary` does nothing.

    Args:
        tree: Any pytree. Leaves that are not arrays pass through.
        axis_names: The axis to vary over, or several. A leaf may vary over some already.

    Returns:
        A tree of the same structure.

    Raises:
        UnknownAxisError: If an axis is not bound here.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> def step(w, x):  # plain data parallel
        ...     grads = jax.grad(lambda w: jnp.mean(x @ w))(vary(w, "data"))
        ...     return sync_gradients(grads, "data")
        >>> mesh, w, x = make_mesh("data=8"), jnp.ones(2), jnp.ones((16, 2))
        >>> jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)
        Array([1., 1.], dtype=float32)
    """
    check_no_refs(tree, "vary")
    axes = bound_axes(axis_names, "vary", "nothing varies, and `vary` is not needed")
    return jax.tree.map(lambda x: vary_array(x, axes) if is_array(x) else x, tree)

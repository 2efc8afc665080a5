"""Gathers one array inside `shard_map`, and marks arrays as varying between devices."""

from collections.abc import Sequence
from typing import Any

import jax

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import is_array
from treeshard._core.mean_gather import Gathering, gather_by
from treeshard._core.mesh import axis_tuple, check_bound, vary_array
from treeshard._core.origins import note_origin
from treeshard._core.paths import PyTree
from treeshard._planning.plan_in_force import mesh_in_force
from treeshard.errors import SpecError

# For messages: the function to call outside `shard_map`.
INSTEAD_OF_GATHER = (
    "`treeshard.unshard` gathers under `jax.jit`, and `treeshard.gather` brings trees to the host"
)


AxisNames = str | Sequence[str]


def bound_axes(axis_names: AxisNames, where: str, instead: str) -> tuple[str, ...]:
    """Axis names as a tuple. Raises `UnknownAxisError` if one is not bound here: `instead` is the
    advice for calls outside `shard_map`. `where` is as in `axis_tuple`."""
    axes = axis_tuple(axis_names, where)
    check_bound(axes, where.partition("(")[0], instead)
    return axes


def gather_array_with_mean_grads(x: jax.Array, axis: int, axis_name: AxisNames) -> jax.Array:
    """All-gathers the shards of an array; its gradient is the mean over the devices.

    With `n` devices along `axis_name`, shape `(..., dk, ...)` becomes `(..., n * dk, ...)`.
    In the backward pass, the gradients of all devices are reduce-scattered and divided by `n`:
    each device gets its shard of the gradient of the mean loss. The loss must be this device's
    own, not reduced yet; for other losses see `value_and_grad`.

    Args:
        x: This device's shard.
        axis: The dim that is sharded. Negative numbers count from the back.
        axis_name: The mesh axis that shards it, or several, outermost first.

    Returns:
        The full array, of the same dtype. Reverse-mode gradients of any order work.
        Forward-mode gradients do not.

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
    axes = bound_axes(axis_name, where, INSTEAD_OF_GATHER)
    if not -x.ndim <= axis < x.ndim:
        raise SpecError(f"{where}: dim {axis} is out of range for shape {x.shape}.")
    # Marked as varying first. Otherwise JAX sums gradients under `check_vma=True`, and the result
    # would be the mean of sums.
    dims = ((axis % x.ndim, axes),) if axes else ()
    how = Gathering(dims, (), x.dtype, x.dtype, mesh_in_force())
    return gather_by(vary_array(x, axes), how)


def vary(tree: PyTree, axis_names: AxisNames) -> PyTree:
    """Marks arrays that are equal on all devices as varying, so that gradients stay per device.

    Values do not change. With `check_vma=True`, JAX sums the gradient of an array that is equal on
    all devices. The gradient of the result of `vary` stays per device, until `sync_gradients`
    averages it. Call `vary` on parameters before you differentiate with respect to them, and on a
    reduced loss before you return it. With `check_vma=False`, JAX does not track what varies, and
    `vary` returns its argument.

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
    axes = bound_axes(
        axis_names, "vary(tree, axis_names)", "arrays do not vary, and `vary` is not needed"
    )

    # The result keeps the origin, by which a plan recognises parameters that the step received.
    def vary_leaf(x: Any) -> Any:
        return note_origin(vary_array(x, axes), x) if is_array(x) else x

    return jax.tree.map(vary_leaf, tree)

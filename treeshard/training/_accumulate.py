"""Computes the gradients of a batch that is too large for one pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from treeshard._core.jax_private import varying_axes
from treeshard._core.mesh import (
    axis_tuple,
    get_axes_size_in_mesh,
    manual_axes,
    vary_array,
)
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._placement.constraint import with_sharding_constraint
from treeshard.errors import SpecError, listed

GradFn = Callable[[PyTree, Any], tuple[PyTree, PyTree]]


def accumulate_gradients(
    grad_fn: GradFn,
    batch: PyTree,
    num_minibatches: int,
    key: jax.Array | None = None,
    *,
    axis_names: str | Sequence[str] | None = None,
) -> tuple[PyTree, PyTree]:
    """Averages gradients over minibatches that run one after another, to save memory.

    The batch is never gathered: if it is sharded over its first dim, each minibatch takes
    an equal number of rows from each device.

    Without `axis_names`, `grad_fn` communicates once per minibatch. With `axis_names`, there is
    one reduction after the loop, and each device needs memory for one full gradient:

    - under `jit_step`, `grad_fn` is called separately for each device's rows of a minibatch,
      and the result is the mean of these means;
    - inside `shard_map`, where a minibatch has only this device's rows, `grad_fn` returns this
      device's gradients of full parameters, not reduced, and they are averaged at the end.

    Args:
        grad_fn: Called as `grad_fn(minibatch, key)`; returns `(grads, metrics)`, two pytrees of
            arrays. The gradients must be those of a mean over the minibatch.
        batch: A pytree of arrays with a common first dim, of `num_minibatches * n` rows.
        num_minibatches: The number of minibatches.
        key: Split into one key for each call of `grad_fn`; without it `grad_fn` gets `None`.
        axis_names: The axes that shard the batch.

    Returns:
        The mean of the gradients, and the sum of the metrics: over the minibatches, and with
        `axis_names` over the devices along these axes too.

    Raises:
        SpecError: If the number of rows is not divisible by the number of minibatches, or
            the rows of a minibatch not by the size of the axes; lists all such leaves, and the
            nearest sizes that are. If `num_minibatches` is less than 1.
        UnknownAxisError: If the mesh lacks one of `axis_names`.
        NoMeshError: If `axis_names` is given and no mesh is in force.

    Examples:
        >>> def grad_fn(minibatch, key):
        ...     return jax.grad(lambda w: (minibatch * w).mean())(2.0), {"rows": len(minibatch)}
        >>> grads, metrics = accumulate_gradients(grad_fn, jnp.arange(8.0), 4)
        >>> float(grads), int(metrics["rows"])
        (3.5, 8)

    Source:
        The function of this name in the UvA deep-learning tutorials.
    """
    if num_minibatches < 1:
        raise SpecError(f"accumulate_gradients: num_minibatches is {num_minibatches}, not >= 1.")
    names = () if axis_names is None else axis_tuple(axis_names, "accumulate_gradients")
    in_shard_map = set(names) <= manual_axes()
    parts = 1 if in_shard_map else get_axes_size_in_mesh(names)
    _check_divides(batch, num_minibatches, parts)
    if parts > 1:
        grad_fn = _for_each_part(grad_fn, parts, names)
    minibatches = jax.tree.map(partial(_split, count=num_minibatches, parts=parts), batch)
    keys = None if key is None else jax.random.split(key, num_minibatches)

    def add(total: Any, minibatch_and_key: tuple[Any, Any]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad_fn(*minibatch_and_key)), None

    structs = jax.eval_shape(grad_fn, *jax.tree.map(lambda x: x[0], (minibatches, keys)))
    (grads, metrics), _ = jax.lax.scan(add, jax.tree.map(_zeros, structs), (minibatches, keys))
    grads = jax.tree.map(lambda x: x / num_minibatches, grads)
    if parts > 1:
        grads = jax.tree.map(lambda x: x.mean(0), grads)
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)
    if names and in_shard_map:
        grads = jax.tree.map(lambda x: jax.lax.pmean(x, names), grads)
    return grads, metrics


def _check_divides(batch: PyTree, count: int, parts: int) -> None:
    facts = [
        f"{path or 'the batch'}: {len(x)} rows are not divisible by {count} minibatches"
        f"{f' on {parts} devices' if parts > 1 else ''}. Use {_nearest(len(x), count * parts)}."
        for path, x in zip(leaf_paths(batch), jax.tree.leaves(batch), strict=True)
        if len(x) % (count * parts)
    ]
    if facts:
        raise SpecError(listed("accumulate_gradients: the batch is not divisible:", facts))


def _nearest(rows: int, unit: int) -> str:
    below, above = rows // unit * unit, -(-rows // unit) * unit
    return f"{below} or {above}" if below else str(above)


def _split(x: Any, count: int, parts: int) -> jax.Array:
    """Reshapes `(rows, ...)` to `(count, rows / count, ...)`, or for several parts to
    `(count, parts, rows / count / parts, ...)`.

    Minibatch `i` gets the rows `i`, `i + count`, ... of each part, so no row has to move to
    another device.
    """
    x = jnp.asarray(x)
    if parts > 1:
        x = x.reshape(parts, -1, count, *x.shape[1:])
        return jnp.moveaxis(x, 2, 0)
    return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)


def _for_each_part(grad_fn: GradFn, parts: int, names: tuple[str, ...]) -> GradFn:
    """Maps `grad_fn` over the parts of a minibatch, one per device, on the first dim."""
    axes: Any = names

    def grads_of_parts(minibatch: Any, key: jax.Array | None) -> tuple[Any, Any]:
        minibatch = with_sharding_constraint(minibatch, PartitionSpec(axes))
        keys = None if key is None else jax.random.split(key, parts)
        mapped = jax.vmap(
            grad_fn, (0, None if keys is None else 0), spmd_axis_name=axes, axis_size=parts
        )
        return with_sharding_constraint(mapped(minibatch, keys), PartitionSpec(axes))

    return grads_of_parts


def _zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    return vary_array(jnp.zeros_like(struct), sorted(varying_axes(struct)))

"""A scan over layers that gathers the weights of the next layer while this one computes.

The gather stands in the carry of the loop: the next trip alone uses its result, so that a compiler
can overlap it with all products of this trip, without a flag. In a plain scan, each trip begins
with gathers that it has to wait for. Backward it is the layer before that is gathered, which JAX
cannot derive from the forward loop: hence the `custom_vjp`. The last layer, which has no next one,
stands behind the loop; its weights stay for the backward pass, which begins with it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_map

from treeshard._core.arrays import array_text, has_gradient
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.specs import with_types
from treeshard._placement.constraint import unshard
from treeshard.errors import ArgumentError, SpecError, listed

Layer = Callable[[PyTree, PyTree], PyTree]


def scan_layers(
    layer: Layer,
    x: PyTree,
    layers: PyTree,
    *,
    gather: Callable[[PyTree], PyTree] = unshard,
    prefetch: int = 1,
) -> PyTree:
    """Runs `x = layer(x, gather(weights))` for each of some stacked layers.

    With `prefetch=1`, the weights of the next layer are gathered while this one computes, and in
    the backward pass those of the layer before. Memory for the full weights of one more layer is
    needed. With `prefetch=0` it is a plain `jax.lax.scan` of a `jax.checkpoint`.

    In both cases the forward pass keeps the input of each layer only, and the backward pass
    computes the layer again; a `jax.checkpoint` inside of `layer` says what that keeps. Values and
    gradients are those of the plain loop. With `prefetch=1`, the last layer's weights are gathered
    once, since the backward pass begins with them, and all others twice.

    Args:
        layer: Called as `layer(x, weights)` with the full weights of one layer; returns the next
            `x`. What it closes over gets its gradient.
        x: What the first layer gets: floating-point arrays, such as activations, or those with the
            sum of a loss.
        layers: Weights, stacked on dim 0, which is not sharded.
        gather: Makes the full weights of a layer of its shards. It may cast them before: half the
            bytes move then.
        prefetch: How many layers ahead weights are gathered: 1, or 0.

    Returns:
        What the last layer returns.

    Raises:
        ArgumentError: If `prefetch` is neither 0 nor 1.
        SpecError: If leaves of `layers` differ in dim 0, or leaves of `x` are not floating. Lists
            all of them.

    Examples:
        >>> layers = {"w": jnp.ones((4, 8, 8)) / 8}
        >>> layer = lambda x, w: x @ w["w"]
        >>> ts.training.scan_layers(layer, jnp.ones((2, 8)), layers, gather=lambda w: w).shape
        (2, 8)

    Source:
        FSDP's backward and forward prefetch, for compilers that see the program.
    """
    if prefetch not in (0, 1):
        raise ArgumentError(f"scan_layers: prefetch is {prefetch!r}, and neither 0 nor 1.")
    count = _count(layers)
    _check_floating(x)
    if not prefetch or count < 2:
        body = jax.checkpoint(lambda x, weights: (layer(x, gather(weights)), None))
        return jax.lax.scan(body, x, layers)[0]
    # For the types alone: what is not used is not compiled.
    run, closed_over = jax.closure_convert(layer, x, gather(_cut(layers, 0)))
    scanned = jax.custom_vjp(lambda *args: _forward(run, gather, count, *args)[0])
    scanned.defvjp(partial(_forward, run, gather, count), partial(_backward, run, gather, count))
    return scanned(x, layers, closed_over)


def _cut(layers: PyTree, i: Any) -> PyTree:
    return tree_map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), layers)


def _put(layers: PyTree, new: PyTree, i: Any) -> PyTree:
    put = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
    return tree_map(put, layers, new)


def _forward(
    run: Callable[..., PyTree],
    gather: Callable[[PyTree], PyTree],
    count: int,
    x: PyTree,
    layers: PyTree,
    closed_over: Any,
) -> tuple[PyTree, Any]:
    def trip(carry: Any, i: Any) -> tuple[Any, None]:
        x, weights, inputs = carry
        following = gather(_cut(layers, i + 1))
        return (run(x, weights, *closed_over), following, _put(inputs, x, i)), None

    # Gathered weight by weight, as they are used: this layer has none before it.
    first = gather(_cut(layers, 0))
    # With the type of `x`; all but the first are written later.
    inputs = tree_map(lambda x: jnp.broadcast_to(x[None], (count - 1, *x.shape)), x)
    start = run(x, first, *closed_over), gather(_cut(layers, 1)), inputs
    (of_last, last, inputs), _ = jax.lax.scan(trip, start, jnp.arange(1, count - 1))
    return run(of_last, last, *closed_over), (inputs, of_last, last, layers, closed_over)


def _backward(
    run: Callable[..., PyTree],
    gather: Callable[[PyTree], PyTree],
    count: int,
    kept: Any,
    cotangent: PyTree,
) -> Any:
    inputs, of_last, last, layers, closed_over = kept

    def of_layer(i: Any, x: PyTree, weights: PyTree, cotangent: PyTree) -> Any:
        _, pull_back = jax.vjp(run, x, weights, *closed_over)
        of_x, of_weights, *of_others = pull_back(cotangent)
        _, scatter = jax.vjp(lambda shards: gather(shards), _cut(layers, i))
        return of_x, scatter(of_weights)[0], of_others

    def trip(carry: Any, i: Any) -> tuple[Any, None]:
        cotangent, x, weights, grads, sums = carry
        before = gather(_cut(layers, i))
        cotangent, new, of_others = of_layer(i + 1, x, weights, cotangent)
        sums = tree_map(jnp.add, sums, of_others)
        return (cotangent, _cut(inputs, i), before, _put(grads, new, i + 1), sums), None

    start = (cotangent, of_last, last, *tree_map(_zeros, (layers, list(closed_over))))
    trips = jnp.arange(count - 1)
    (cotangent, x, weights, grads, sums), _ = jax.lax.scan(trip, start, trips, reverse=True)
    of_x, new, of_others = of_layer(0, x, weights, cotangent)
    return of_x, _put(grads, new, 0), tree_map(jnp.add, sums, of_others)


def _zeros(x: Any) -> Any:
    """A gradient of `x` that is zero. Where `x` is `reduced`, its gradient is a sum that waits."""
    zeros, spec = jnp.zeros_like(x), jax.typeof(x).sharding.spec
    return (
        jax.sharding.reshard(zeros, with_types(spec, spec.reduced, ())) if spec.reduced else zeros
    )


def _count(layers: PyTree) -> int:
    """The number of layers."""
    leaves = tree_leaves(layers)
    lengths = {x.shape[0] if x.ndim else 0 for x in leaves}
    if len(lengths) == 1 and 0 not in lengths:
        return lengths.pop()
    facts = [
        f"{path_under('layers', path)}: {array_text(x)}."
        for path, x in zip(leaf_paths(layers), leaves, strict=True)
    ]
    headline = "leaves do not stack one number of layers:"
    raise SpecError(f"scan_layers: {listed(headline, facts)}")


def _check_floating(x: PyTree) -> None:
    facts = [
        f"{path_under('x', path)}: {array_text(leaf)} is not floating."
        for path, leaf in zip(leaf_paths(x), tree_leaves(x), strict=True)
        if not has_gradient(leaf)
    ]
    if facts:
        advice = " What layers do not change can be closed over."
        raise SpecError(f"scan_layers: {listed('layers cannot pass these on:', facts)}{advice}")

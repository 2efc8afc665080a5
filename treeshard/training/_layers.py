"""A scan over layers that gathers the small weights of the next layer while this one computes.

The gather stands in the carry of the loop: the next trip alone uses its result, so that a compiler
can overlap it with all products of this trip, without a flag. In a plain scan, each trip begins
with gathers that it has to wait for. Backward it is the layer before that is gathered, which JAX
cannot derive from the forward loop: hence the `custom_vjp`.

Why not all weights: the first products of a trip hide the gathers of large weights already. With
all of them in the carry, compilers for GPUs put some at the end of the trip, where no product is
left, and the weights of the first layer are waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from treeshard._core.arrays import array_text, has_gradient, is_array
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.specs import with_types
from treeshard._placement.constraint import unshard
from treeshard.errors import ArgumentError, SpecError, listed

Layer = Callable[[PyTree, PyTree], PyTree]

# XLA joins gathers for GPUs up to this size (`kDefaultAllGatherCombineThreshold`). A gather that is
# joined with one of this trip would have to be waited for.
_JOINED = 30 * 2**20


def scan_layers(
    layer: Layer,
    x: PyTree,
    layers: PyTree,
    *,
    gather: Callable[[PyTree], PyTree] = unshard,
    prefetch: int = 1,
) -> PyTree:
    """Runs `x = layer(x, gather(weights))` for each of some stacked layers.

    With `prefetch=1`, the smallest weights of the next layer, of together up to 30 MiB, are
    gathered while this one computes, and in the backward pass those of the layer before. The first
    products use them, and hide the gathers of the other weights. Memory for these is needed, and in
    programs for TPUs that for about one more layer. With `prefetch=0` it is a plain `jax.lax.scan`
    of a `jax.checkpoint`.

    In both cases the forward pass keeps the input of each layer only, and the backward pass
    computes the layer again; a `jax.checkpoint` inside of `layer` says what that keeps. Values and
    gradients are those of the plain loop, and each weight is gathered twice.

    Args:
        layer: Called as `layer(x, weights)` with the full weights of one layer; returns the next
            `x`. What it closes over gets its gradient.
        x: What the first layer gets: floating-point arrays, such as activations, or those with the
            sum of a loss.
        layers: Weights, stacked on dim 0, which is not sharded. Integers, booleans and keys are
            stacked too and get no gradient; leaves that are not arrays go to each layer unchanged.
        gather: Makes the full weights of a layer of its shards. It may cast them before: half the
            bytes move then.
        prefetch: How many layers ahead small weights are gathered: 1, or 0.

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
    arrays, static = eqx.partition(layers, is_array)
    count = _count(arrays)
    _check_floating(x)

    def full(arrays: PyTree) -> PyTree:
        return gather(eqx.combine(arrays, static))

    if not prefetch or count < 2:
        body = jax.checkpoint(lambda x, arrays: (layer(x, full(arrays)), None))
        return jax.lax.scan(body, x, arrays)[0]
    # For the types alone: what is not used is not compiled.
    weights, static_weights = eqx.partition(full(_cut(arrays, 0)), is_array)

    def of_arrays(x: PyTree, weights: PyTree) -> PyTree:
        return layer(x, eqx.combine(weights, static_weights))

    run, closed_over = jax.closure_convert(of_arrays, x, weights)
    loops = _Loops(
        run, lambda arrays: eqx.filter(full(arrays), is_array), _are_early(weights), count
    )
    scanned = jax.custom_vjp(lambda *args: loops.forward(*args)[0])
    scanned.defvjp(loops.forward, loops.backward)
    return scanned(x, arrays, closed_over)


def _are_early(weights: PyTree) -> PyTree:
    """Which weights of a layer are gathered while the layer before computes: the smallest ones,
    and one matrix at least."""
    leaves, treedef = tree_flatten(weights)
    sizes = {i: x.size * x.dtype.itemsize for i, x in enumerate(leaves) if has_gradient(x)}
    early: set[int] = set()
    together = 0
    for i in sorted(sizes, key=sizes.__getitem__):
        together += sizes[i]
        if together > _JOINED and any(leaves[k].ndim > 1 for k in early):
            break
        early.add(i)
    return treedef.unflatten([i in early for i in range(len(leaves))])


def _cut(layers: PyTree, i: Any) -> PyTree:
    return tree_map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), layers)


def _put(layers: PyTree, new: PyTree, i: Any) -> PyTree:
    put = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
    return tree_map(put, layers, new)


@dataclass(frozen=True)
class _Loops:
    """The two loops.

    Attributes:
        run: The layer: of its input, its full weights, and what it closes over.
        gather: Makes full weights of shards.
        are_early: Which weights are gathered a layer ahead.
        count: The number of layers.
    """

    run: Callable[..., PyTree]
    gather: Callable[[PyTree], PyTree]
    are_early: PyTree
    count: int

    def early(self, layers: PyTree, i: Any) -> PyTree:
        """The weights of layer `i` that are gathered ahead; the others are `None`."""
        return eqx.filter(self.gather(_cut(layers, i)), self.are_early)

    def weights(self, layers: PyTree, i: Any, early: PyTree) -> PyTree:
        # What is not used of this gather is not compiled.
        return eqx.combine(early, self.gather(_cut(layers, i)))

    def forward(self, x: PyTree, layers: PyTree, closed_over: Any) -> tuple[PyTree, Any]:
        def trip(carry: Any, i: Any) -> tuple[Any, PyTree]:
            x, early = carry
            weights = self.weights(layers, i, early)
            # In the last trip, of the same layer again: the backward pass begins with it.
            following = self.early(layers, jnp.minimum(i + 1, self.count - 1))
            return (self.run(x, weights, *closed_over), following), x

        start = x, self.early(layers, 0)
        (x, early), inputs = jax.lax.scan(trip, start, jnp.arange(self.count))
        return x, (inputs, early, layers, closed_over)

    def backward(self, kept: Any, cotangent: PyTree) -> Any:
        inputs, early, layers, closed_over = kept
        # JAX has no gradients of integers and keys, and none in a custom rule stands for zero.
        trained, others = eqx.partition(layers, has_gradient)
        closed_trained, closed_others = eqx.partition(closed_over, has_gradient)

        def of_layer(i: Any, early: PyTree, cotangent: PyTree) -> Any:
            weights, not_trained = eqx.partition(self.weights(layers, i, early), has_gradient)

            def run(x: PyTree, weights: PyTree, closed: PyTree) -> PyTree:
                all_weights = eqx.combine(weights, not_trained)
                return self.run(x, all_weights, *eqx.combine(closed, closed_others))

            def gathered(shards: PyTree) -> PyTree:
                full = self.gather(eqx.combine(shards, _cut(others, i)))
                return eqx.filter(full, has_gradient)

            _, pull_back = jax.vjp(run, _cut(inputs, i), weights, closed_trained)
            of_x, of_weights, of_closed = pull_back(cotangent)
            _, scatter = jax.vjp(gathered, _cut(trained, i))
            return of_x, scatter(of_weights)[0], of_closed

        def trip(carry: Any, i: Any) -> tuple[Any, None]:
            cotangent, early, grads, sums = carry
            before = self.early(layers, i - 1)
            cotangent, new, of_closed = of_layer(i, early, cotangent)
            sums = tree_map(jnp.add, sums, of_closed)
            return (cotangent, before, _put(grads, new, i), sums), None

        start = (cotangent, early, *tree_map(_zeros, (trained, closed_trained)))
        trips = jnp.arange(1, self.count)
        (cotangent, early, grads, sums), _ = jax.lax.scan(trip, start, trips, reverse=True)
        # The first layer has none before it.
        of_x, new, of_closed = of_layer(0, early, cotangent)
        return of_x, _put(grads, new, 0), tree_map(jnp.add, sums, of_closed)


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

"""Tensor parallel layers: their weights are split over devices that work on the same rows.

Do not pass the axis that splits these weights to `value_and_grad`, `gather_params` and
`sync_gradients`, which take the axes that split rows or save memory. The gradients of
parameters that are replicated along it are right without an average.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treeshard._core.arrays import is_array
from treeshard._core.jax_private import varying_axes
from treeshard._core.mesh import axis_tuple, check_bound
from treeshard._core.paths import leaf_paths
from treeshard.errors import SpecError, listed
from treeshard.manual._mean_gather import still_differs, vary_array

# ------------------------------------------------------------------
# Enters and leaves the regions of a model that run tensor parallel.
# Activations enter a region in which every device has its own columns of the weights, and leave
# it as a sum over the devices. The two operations are each other's transpose. They are defined
# here for both modes of `shard_map`: without `check_vma`, JAX does not know that the gradients of
# replicated arrays have to be summed.

AxisNames = str | Sequence[str]

# For messages: what to do outside `shard_map` instead.
_INSTEAD = "under `jax.jit`, specs on the weights are enough"


def enter_parallel(x: Any, axis_names: AxisNames, *, dim: int | None = None) -> Any:
    """Passes activations into a region where each device has its own part of the weights.

    In the forward pass nothing is communicated. In the backward pass, the gradients of all
    devices are summed, by one all-reduce. With `dim`, each device has a shard of `x` only: `x`
    is all-gathered in the forward pass, and its gradient reduce-scattered in the backward pass.

    Replicated parameters that each device applies to its own shard of the activations have to
    enter too: the scale of a norm on rows that are split, or the weights of heads that all
    devices share.

    Args:
        x: An array, equal on all devices along the axes; with `dim`, a shard of one. Or a tree
            of arrays, such as a norm's parameters; leaves that are not arrays pass through.
        axis_names: The axis that splits the weights, or several.
        dim: The dim of `x` that is split over the axes, such as that of the sequence.

    Returns:
        The full `x`, on every device. Reverse-mode gradients work; forward-mode ones do not.

    Raises:
        SpecError: Under `check_vma=True`, if leaves may differ along the axes and `dim` is not
            given, or if they do not differ and `dim` is given; lists all of them. If a leaf
            does not have this dim.
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> def norm(x, scale):  # on a shard of the sequence
        ...     return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) * scale
        >>> f = lambda x, scale: norm(x, enter_parallel(scale, "tensor")[None])
        >>> mesh, split = make_mesh("tensor=8"), P("tensor")
        >>> f = jax.shard_map(f, mesh=mesh, in_specs=(split, P()), out_specs=split)
        >>> f(jnp.ones((16, 4)), jnp.ones(4)).shape
        (16, 4)

    Source:
        Megatron-LM: `copy_to_tensor_model_parallel_region`, with `dim`
        `gather_from_sequence_parallel_region`. Shoeybi et al. 2019, arXiv:1909.08053;
        Korthikanti et al. 2022, arXiv:2205.05198.
    """
    axes = bound_axes(axis_names, "enter_parallel")
    return enter_region(x, axes, dim, "enter_parallel")


def leave_parallel(x: Any, axis_names: AxisNames, *, dim: int | None = None) -> Any:
    """Sums the results that the devices computed with their parts of the weights.

    This is one all-reduce in the forward pass, and nothing in the backward pass. With `dim`,
    each device keeps only its shard of the sum: the forward pass reduce-scatters, and the
    backward pass all-gathers the gradient.

    Use it also to reduce a loss whose rows are split over the axes, as
    `leave_parallel(total / count, axis)`: under `check_vma=False`, the gradient of a plain
    `jax.lax.psum` is too large by a factor of the number of devices.

    Args:
        x: This device's summand, or a tree of them.
        axis_names: The axis that splits the weights, or several.
        dim: The dim of the sum to split over the axes.

    Returns:
        The sum, equal on all devices along the axes; with `dim`, this device's shard of it.

    Raises:
        SpecError: Under `check_vma=True`, if a leaf is equal on all devices, so that there is
            nothing to sum. If a leaf does not have this dim, or it is not divisible by the
            number of devices along the axes.
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> f = lambda x, w: leave_parallel(x @ w, "tensor")
        >>> specs = (P(None, "tensor"), P("tensor"))
        >>> f = jax.shard_map(f, mesh=make_mesh("tensor=8"), in_specs=specs, out_specs=P())
        >>> f(jnp.ones((1, 16)), jnp.ones((16, 2)))
        Array([[16., 16.]], dtype=float32)

    Source:
        Megatron-LM: `reduce_from_tensor_model_parallel_region`, with `dim`
        `reduce_scatter_to_sequence_parallel_region`.
    """
    axes = bound_axes(axis_names, "leave_parallel")
    return leave_region(x, axes, dim, "leave_parallel")


def bound_axes(axis_names: AxisNames, where: str) -> tuple[str, ...]:
    """Axis names as a tuple. Raises `UnknownAxisError` for one that is not bound here."""
    axes = axis_tuple(axis_names, where)
    check_bound(axes, where, _INSTEAD)
    return axes


@jax.named_scope("enter_parallel")
def enter_region(x: Any, axes: tuple[str, ...], dim: int | None, where: str) -> Any:
    """`enter_parallel`, with the beginning of its messages."""
    if dim is None:
        check_leaves(x, where, lambda leaf: _varies(leaf, axes))
        return _each(lambda leaf: _copy(leaf, axes), x)
    check_leaves(x, where, lambda leaf: _no_dim(leaf, dim) or _not_split(leaf, axes, "gather"))
    return _each(lambda leaf: _gather(leaf, dim % leaf.ndim, axes), x)


@jax.named_scope("leave_parallel")
def leave_region(x: Any, axes: tuple[str, ...], dim: int | None, where: str) -> Any:
    """`leave_parallel`, with the beginning of its messages."""
    check_leaves(x, where, lambda leaf: _not_split(leaf, axes, "sum"))
    if dim is None:
        return _each(lambda leaf: _sum(leaf, axes), x)
    check_leaves(x, where, lambda leaf: _no_dim(leaf, dim) or _uneven(leaf, dim, axes))
    return _each(lambda leaf: _scatter(leaf, dim % leaf.ndim, axes), x)


def _each(f: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: f(x) if is_array(x) else x, tree)


# JAX transposes these two correctly in both modes.


def _gather(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scatter(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


# JAX transposes these two correctly only under `check_vma=True`. Each must be the transpose of
# the other.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return vary_array(x, axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes)


_copy.defvjp(lambda x, axes: (_copy(x, axes), None), lambda axes, _, g: (_sum(g, axes),))
_sum.defvjp(lambda x, axes: (_sum(x, axes), None), lambda axes, _, g: (_copy(g, axes),))


# ------------------------------------------------------------------ checks


def named(axes: tuple[str, ...]) -> str:
    """`'data', 'tensor'`."""
    return ", ".join(map(repr, axes))


def check_leaves(tree: Any, where: str, fact_of: Callable[[Any], str | None]) -> None:
    """Raises one `SpecError` with all facts that `fact_of` returns about leaves."""
    pairs = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    rows = [(path, fact_of(leaf)) for path, leaf in pairs if is_array(leaf)]
    facts = [f"{path}: {fact}" if path else fact for path, fact in rows if fact]
    if facts:
        raise SpecError(f"{where}: {listed('these leaves do not fit:', facts)}")


def _varies(x: Any, axes: tuple[str, ...]) -> str | None:
    if more := varying_axes(x) & set(axes):
        return (
            f"shape {x.shape} differs between devices along {named(tuple(sorted(more)))}."
            " If these are shards of one array, pass the sharded dim as `dim`. If they are"
            " summands, sum them with `leave_parallel`. If they were computed from parameters"
            " that are not split, leave this axis out of the axis_names of `value_and_grad`,"
            " `gather_params` and `vary`."
        )
    return None


def unsplit_axes(x: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes along which all devices are known to have the same values."""
    return tuple(axis for axis in axes if not still_differs(x, axis))


def _not_split(x: Any, axes: tuple[str, ...], to_do: str) -> str | None:
    if unsplit := unsplit_axes(x, axes):
        return (
            f"shape {x.shape} is equal on all devices along {named(unsplit)}: there is nothing"
            f" to {to_do}."
        )
    return None


def _no_dim(x: Any, dim: int) -> str | None:
    if -x.ndim <= dim < x.ndim:
        return None
    return f"dim {dim} is out of range for shape {x.shape}."


def _uneven(x: Any, dim: int, axes: tuple[str, ...]) -> str | None:
    size = lax.axis_size(axes)
    if x.shape[dim] % size:
        return (
            f"dim {dim} of shape {x.shape} is not divisible by {size}, the number of devices along"
            f" {named(axes)}."
        )
    return None


Array = jax.Array


def column_parallel(
    x: Array, weights: Any, axis_names: AxisNames, biases: Any = None, *, dim: int | None = None
) -> Any:
    """Multiplies by this device's columns of weights: the first half of a parallel layer.

    With `n` devices along the axes, `x` of shape `(..., k)` and a weight of shape `(k, m)`
    give each device `(..., m / n)`, its columns of the product. `x` enters the parallel region
    once for all weights: q, k and v cost one all-reduce in the backward pass, not three.

    Args:
        x: Equal on all devices along the axes, or this device's shard of it (see `dim`).
        weights: This device's shard, `(k, m / n)`, of a weight with the spec `P(None, axis)`;
            or a tree of such weights. (Equinox stores the transpose.)
        axis_names: The axis that splits the columns, or several. Do not pass it to
            `gather_params` and `value_and_grad`, which would gather the weights over it.
        biases: This device's shard, `(m / n,)`, of a bias with the spec `P(axis)`; a tree like
            `weights`.
        dim: The dim of `x` that is split over the axes (see `enter_parallel`).

    Returns:
        `x @ weight + bias`, for each of the weights.

    Raises:
        SpecError: If weights do not have as many rows as `x` has features (lists all of
            them), or a bias does not fit. Under `check_vma=True`, also if a weight is not
            split; and as `enter_parallel` for `x`.
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> f = lambda x, w: column_parallel(x, w, "tensor")
        >>> mesh, columns = make_mesh("tensor=8"), P(None, "tensor")
        >>> f = jax.shard_map(f, mesh=mesh, in_specs=(P(), columns), out_specs=columns)
        >>> f(jnp.ones((2, 4)), jnp.ones((4, 16))).shape
        (2, 16)

    Source:
        Megatron-LM's `ColumnParallelLinear`; Shoeybi et al. 2019, arXiv:1909.08053.
    """
    axes = bound_axes(axis_names, "column_parallel")
    x = enter_region(x, axes, dim, "column_parallel: x")
    _check_weights(x, weights, axes, "column_parallel")
    out = jax.tree.map(lambda w: x @ w, weights)
    return out if biases is None else jax.tree.map(_plus, out, biases)


def row_parallel(
    x: Array,
    weight: Array,
    axis_names: AxisNames,
    bias: Array | None = None,
    *,
    dim: int | None = None,
) -> Array:
    """Multiplies by this device's rows of a weight and sums: the second half of a parallel layer.

    With `n` devices along the axes, `x` of shape `(..., k / n)`, as `column_parallel` returns
    it, and a weight of shape `(k, m)` give all devices the product, `(..., m)`.

    Args:
        x: This device's columns.
        weight: This device's shard, `(k / n, m)`, of a weight with the spec `P(axis)`.
        axis_names: The axis that splits the rows, or several.
        bias: The full bias, `(m,)`. It is added once, after the sum.
        dim: The dim of the result to split over the axes (see `leave_parallel`).

    Returns:
        `x @ weight + bias` of the full `x` and weight, equal on all devices along the axes;
        with `dim`, this device's shard of it.

    Raises:
        SpecError: If the weight does not have as many rows as `x` has features, or the bias
            does not fit. Under `check_vma=True`, also if the weight is not split.
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> f = lambda x, w: row_parallel(x, w, "tensor")
        >>> specs = (P(None, "tensor"), P("tensor"))
        >>> f = jax.shard_map(f, mesh=make_mesh("tensor=8"), in_specs=specs, out_specs=P())
        >>> f(jnp.ones((2, 16)), jnp.ones((16, 4))).shape
        (2, 4)

    Source:
        Megatron-LM's `RowParallelLinear`; Shoeybi et al. 2019, arXiv:1909.08053.
    """
    axes = bound_axes(axis_names, "row_parallel")
    _check_weights(x, weight, axes, "row_parallel")
    out = leave_region(x @ weight, axes, dim, "row_parallel")
    if bias is None:
        return out
    # With `dim`, each device adds it to its own rows, so the gradient of the bias is a sum.
    return _plus(out, bias if dim is None else enter_region(bias, axes, None, "row_parallel: bias"))


def _plus(x: Array, bias: Array) -> Array:
    if bias.shape != x.shape[-1:]:
        raise SpecError(
            f"the bias is {bias.shape} here, and the product {x.shape}: it needs {x.shape[-1]}"
            " elements. In `column_parallel` it is split like the columns of its weight, by"
            " P(axis); in `row_parallel` it is not split."
        )
    return x + jnp.broadcast_to(bias, x.shape)


def parallel_mlp(
    x: Array,
    up: Any,
    down: Array,
    axis_names: AxisNames,
    *,
    activation: Callable[..., Array] = jax.nn.gelu,
    dim: int | None = None,
) -> Array:
    """Computes a multilayer perceptron whose hidden units are split over the devices.

    It costs one all-reduce in the forward pass and one in the backward pass. It has no biases;
    for those, call `column_parallel` and `row_parallel` yourself.

    Args:
        x: `(..., width)`, equal on all devices along the axes.
        up: This device's shard, `(width, hidden / n)`, or a tuple or list of several, whose
            products are all passed to `activation`.
        down: This device's shard, `(hidden / n, width)`.
        axis_names: The axis that splits the hidden units, or several.
        activation: For a gated one: `lambda up, gate: up * jax.nn.silu(gate)`.
        dim: The dim of `x`, and of the result, that is split over the axes, such as that of
            the sequence. Each all-reduce is then an all-gather and a reduce-scatter, and the
            operations between the layers work on shards.

    Returns:
        `(..., width)`, equal on all devices along the axes, or split like `x`.

    Raises:
        SpecError, UnknownAxisError: As `column_parallel` and `row_parallel`.

    Examples:
        >>> f = lambda x, up, down: parallel_mlp(x, up, down, "tensor")
        >>> specs = (P(), P(None, "tensor"), P("tensor"))
        >>> f = jax.shard_map(f, mesh=make_mesh("tensor=8"), in_specs=specs, out_specs=P())
        >>> f(jnp.ones((2, 4)), jnp.ones((4, 16)), jnp.ones((16, 4))).shape
        (2, 4)

    Source:
        Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    hidden = column_parallel(x, up, axis_names, dim=dim)
    hidden = activation(*hidden) if isinstance(hidden, tuple | list) else activation(hidden)
    return row_parallel(hidden, down, axis_names, dim=dim)


def parallel_attention(
    x: Array,
    qkv: tuple[Array, Array, Array],
    out: Array,
    axis_names: AxisNames,
    *,
    head_width: int,
    attend: Callable[[Array, Array, Array], Array] = jax.nn.dot_product_attention,
    dim: int | None = None,
) -> Array:
    """Computes self-attention whose heads are split over the devices.

    It costs one all-reduce in the forward pass and one in the backward pass. Keys and values
    may have fewer heads than queries, but at least one per device.

    Args:
        x: `(..., time, width)`, equal on all devices along the axes.
        qkv: This device's shards of the weights of queries, keys and values,
            `(width, heads / n * head_width)`.
        out: This device's shard of the output weight, `(heads / n * head_width, width)`.
        axis_names: The axis that splits the heads, or several.
        head_width: The width of one head, whose square root scales the scores.
        attend: Called with queries, keys and values, `(..., time, heads / n, head_width)`;
            returns an array of that shape. Use it for a causal mask
            (`partial(jax.nn.dot_product_attention, is_causal=True)`) or rotary positions.
        dim: The dim of `x`, and of the result, that is split over the axes, as in
            `parallel_mlp`.

    Returns:
        `(..., time, width)`, equal on all devices along the axes, or split like `x`.

    Raises:
        SpecError: If a head would be split over devices; and as `column_parallel` and
            `row_parallel`.
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> f = lambda x, w, out: parallel_attention(x, (w, w, w), out, "tensor", head_width=2)
        >>> specs = (P(), P(None, "tensor"), P("tensor"))
        >>> f = jax.shard_map(f, mesh=make_mesh("tensor=8"), in_specs=specs, out_specs=P())
        >>> f(jnp.ones((1, 3, 4)), jnp.ones((4, 16)), jnp.ones((16, 4))).shape
        (1, 3, 4)

    Source:
        Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    axes = bound_axes(axis_names, "parallel_attention")
    facts = [
        f"{name}: {w.shape[-1]} columns per device are not divisible by the head width"
        f" {head_width}. The number of heads must be divisible by {lax.axis_size(axes)}, the"
        f" number of devices along {named(axes)}."
        for name, w in zip("qkv", qkv, strict=True)
        if w.shape[-1] % head_width
    ]
    if facts:
        raise SpecError(f"parallel_attention: {listed('heads would be split:', facts)}")
    q, k, v = column_parallel(x, qkv, axes, dim=dim)
    heads = attend(*(y.reshape(*y.shape[:-1], -1, head_width) for y in (q, k, v)))
    return row_parallel(heads.reshape(q.shape), out, axes, dim=dim)


def _check_weights(x: Any, weights: Any, axes: tuple[str, ...], where: str) -> None:
    axis = axes[0] if len(axes) == 1 else axes
    split = f"Columns are split by P(None, {axis!r}), rows by P({axis!r})."

    def fact(w: Any) -> str | None:
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            return (
                f"the weight's shard is {w.shape} here, and x {x.shape}: it needs {x.shape[-1]}"
                f" rows. {split} Equinox stores the transpose of its weights."
            )
        if unsplit := unsplit_axes(w, axes):
            return (
                f"the weight {w.shape} is equal on all devices along {named(unsplit)}, so all of"
                f" them would do the same work. {split} If each shall use the full weight, pass"
                " it through `enter_parallel`."
            )
        return None

    check_leaves(weights, where, fact)

"""Tensor parallel layers: their weights are split over devices that work on the same rows.

Do not pass the axis that splits these weights to `value_and_grad`, `gather_params` and
`sync_gradients`, which take the axes that split rows or save memory. The gradients of
parameters that are replicated along it are right without an average.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treeshard._errors import SpecError, listed
from treeshard._parallel_regions import (
    AxisNames,
    bound_axes,
    check_leaves,
    enter_region,
    leave_region,
    named,
    unsplit_axes,
)

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

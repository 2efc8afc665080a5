"""Layers whose weights are split over devices that work on the same rows: tensor parallelism.

The axis that splits them is no business of `value_and_grad`, `gather_params` and
`sync_gradients`, which are given the axes that split rows or save memory. Gradients of what all
devices along it hold alike come out right without an average.
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
    give each device `(..., m / n)`, its columns of the product. `x` enters once, however
    many weights there are: q, k and v cost one all-reduce backwards, not three.

    Args:
        x: The same on all devices along the axes, or a part of it (see `dim`).
        weights: This device's part, `(k, m / n)`, of a weight with the spec `P(None, axis)`;
            or a tree of such weights. (Equinox stores the transpose.)
        axis_names: The axis that splits the columns, or several. `gather_params` and
            `value_and_grad` must not be given it: they would make the weights whole.
        biases: This device's part, `(m / n,)`, with the spec `P(axis)`; a tree like `weights`.
        dim: The dim of `x` that is split over the axes (see `enter_parallel`).

    Returns:
        `x @ weight + bias`, for each of the weights.

    Raises:
        SpecError: If a weight's rows are not as many as the features of `x` (all such are
            named), or a bias does not fit; under `check_vma=True`, if a weight is not split, or
            as `enter_parallel` about `x`.
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
    whole = enter_region(x, axes, dim, "column_parallel: x")
    _check_weights(whole, weights, axes, "column_parallel")
    out = jax.tree.map(lambda w: whole @ w, weights)
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

    With `n` devices along the axes, `x` of shape `(..., k / n)`, such as `column_parallel`
    leaves it, and a weight of shape `(k, m)` give all devices the product, `(..., m)`.

    Args:
        x: This device's columns.
        weight: This device's part, `(k / n, m)`, of a weight with the spec `P(axis)`.
        axis_names: The axis that splits the rows, or several.
        bias: The whole of it, `(m,)`. It is added once, after the sum.
        dim: The dim of the result to split over the axes (see `leave_parallel`).

    Returns:
        `x @ weight + bias` with whole `x` and weight, the same on all devices along the axes;
        with `dim`, this device's part of it.

    Raises:
        SpecError: If the weight's rows are not as many as the features of `x`, or the bias
            does not fit; under `check_vma=True`, if the weight is not split.
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
    # With `dim` every device adds it to rows of its own, so that its gradient is a sum.
    return _plus(out, bias if dim is None else enter_region(bias, axes, None, "row_parallel: bias"))


def _plus(x: Array, bias: Array) -> Array:
    if bias.shape != x.shape[-1:]:
        raise SpecError(
            f"the bias is {bias.shape} here, and the product {x.shape}: it needs {x.shape[-1]}"
            " elements. It is split like the columns of its weight, by P(axis), in"
            " `column_parallel`, and whole in `row_parallel`."
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
    """Computes a multilayer perceptron of which every device has some hidden units.

    One all-reduce forwards, one backwards. It has no biases: for those use `column_parallel`
    and `row_parallel`, of which this is made.

    Args:
        x: `(..., width)`, the same on all devices along the axes.
        up: This device's part, `(width, hidden / n)`; with several weights in a tuple or list,
            `activation` is called with as many arrays.
        down: This device's part, `(hidden / n, width)`.
        axis_names: The axis that splits the hidden units, or several.
        activation: Say `lambda up, gate: up * jax.nn.silu(gate)` for a gated one.
        dim: The dim of `x`, and of the result, that is split over the axes: that of the
            sequence, for example. The all-reduces are then each an all-gather and a
            reduce-scatter, and what stands between the layers works on parts.

    Returns:
        `(..., width)`, the same on all devices along the axes, or split like `x`.

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
    """Computes self-attention of which every device has some heads.

    One all-reduce forwards, one backwards. Keys and values may have fewer heads than queries,
    but at least one on each device.

    Args:
        x: `(..., time, width)`, the same on all devices along the axes.
        qkv: This device's parts of the weights that make queries, keys and values,
            `(width, heads / n * head_width)`.
        out: This device's part of the weight that brings heads together,
            `(heads / n * head_width, width)`.
        axis_names: The axis that splits the heads, or several.
        head_width: The width of one head, whose square root scales the scores.
        attend: From queries, keys and values, `(..., time, heads / n, head_width)`, to what
            each head found: the place for a causal mask
            (`partial(jax.nn.dot_product_attention, is_causal=True)`) or rotary positions.
        dim: The dim of `x`, and of the result, that is split over the axes, as in
            `parallel_mlp`.

    Returns:
        `(..., time, width)`, the same on all devices along the axes, or split like `x`.

    Raises:
        SpecError: If a device would get a part of a head; and as `column_parallel` and
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
        f"{name}: {w.shape[-1]} columns here are not a number of heads of width {head_width}."
        f" The heads must divide by the {lax.axis_size(axes)} devices along {named(axes)}."
        for name, w in zip("qkv", qkv, strict=True)
        if w.shape[-1] % head_width
    ]
    if facts:
        raise SpecError(f"parallel_attention: {listed('heads would be cut:', facts)}")
    q, k, v = column_parallel(x, qkv, axes, dim=dim)
    found = attend(*(y.reshape(*y.shape[:-1], -1, head_width) for y in (q, k, v)))
    return row_parallel(found.reshape(q.shape), out, axes, dim=dim)


def _check_weights(x: Any, weights: Any, axes: tuple[str, ...], where: str) -> None:
    axis = axes[0] if len(axes) == 1 else axes
    split = f"Columns are split by P(None, {axis!r}), rows by P({axis!r})."

    def fact(w: Any) -> str | None:
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            return (
                f"the weight's part is {w.shape} here, and x {x.shape}: it needs {x.shape[-1]}"
                f" rows. {split} The weights of Equinox are the transpose."
            )
        if alike := unsplit_axes(w, axes):
            return (
                f"the weight {w.shape} is the same on all devices along {named(alike)}, so every"
                f" one would do the same work. {split} If each is to use all of it, let it in"
                " with `enter_parallel`."
            )
        return None

    check_leaves(weights, where, fact)

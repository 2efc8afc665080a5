"""Tensor parallel layers: their weights are split over devices that work on the same rows.

Activations enter a region in which each device has its own columns of the weights, and leave the
region as a sum over the devices. The two operations are each other's transpose. They work in both
modes of `shard_map`: without `check_vma`, JAX does not sum the gradients of replicated arrays.

Do not pass the axis that splits these weights to `value_and_grad`, `gather_params` and
`sync_gradients`. They take the axes that split rows or save memory. Parameters that are replicated
along the tensor axis have right gradients without an average.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treeshard._core.arrays import is_array
from treeshard._core.jax_private import varying_axes
from treeshard._core.mesh import still_differs, vary_array
from treeshard._core.paths import PyTree, leaf_paths
from treeshard.errors import SpecError, listed
from treeshard.manual._mean_gather import AxisNames, bound_axes

# For messages: the advice for calls outside `shard_map`.
_INSTEAD = "under `jax.jit`, specs on the weights are enough"


# ------------------------------------------------------------------ regions


def enter_parallel(x: PyTree, axis_names: AxisNames, *, dim: int | None = None) -> PyTree:
    """Passes activations into a region where each device has its own part of the weights.

    The forward pass does not communicate. The backward pass sums the gradients of all devices, with
    one all-reduce. With `dim`, each device has only a shard of `x`: the forward pass all-gathers
    `x`, and the backward pass reduce-scatters its gradient.

    Call it also on replicated parameters that each device applies to its own shard of the
    activations, such as the scale of a norm on rows that are split, or the weights of heads that
    all devices share.

    Args:
        x: An array, equal on all devices along the axes; with `dim`, a shard of one. Or a tree
            of arrays, such as a norm's parameters; leaves that are not arrays pass through.
        axis_names: The axis that splits the weights, or several.
        dim: The dim of `x` that is split over the axes, such as the sequence's dim.

    Returns:
        The full `x`, on every device. Reverse-mode gradients work, forward-mode gradients do not.

    Raises:
        SpecError: If a leaf does not have this dim. Under `check_vma=True`, also if leaves may
            differ along the axes and `dim` is not given, or do not differ and `dim` is given. The
            message lists all of them.
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
    axes = bound_axes(axis_names, "enter_parallel", _INSTEAD)
    return _enter(x, axes, dim, "enter_parallel")


def leave_parallel(x: PyTree, axis_names: AxisNames, *, dim: int | None = None) -> PyTree:
    """Sums the results that the devices computed with their parts of the weights.

    The forward pass all-reduces, and the backward pass does not communicate. With `dim`, each
    device keeps only its shard of the sum: the forward pass reduce-scatters, and the backward pass
    all-gathers the gradient.

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
        SpecError: If a leaf does not have this dim, or the dim is not divisible by the number of
            devices along the axes. Under `check_vma=True`, also if a leaf is equal on all devices,
            because its sum would be too large.
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
    axes = bound_axes(axis_names, "leave_parallel", _INSTEAD)
    return _leave(x, axes, dim, "leave_parallel")


# Four conversions between replicated and split values. The gradient takes the opposite one:
#
# 1. `_copy`: equal values become operands of each device's part; gradients are summed.
# 2. `_sum`: summands become their sum; the gradient of the sum goes to each.
# 3. `_gather`: rows become all rows (sequence parallelism); gradients are scattered.
# 4. `_scatter`: summands become rows of their sum; gradients are gathered.


@jax.named_scope("enter_parallel")
def _enter(x: Any, axes: tuple[str, ...], dim: int | None, where: str) -> Any:
    """`enter_parallel`; messages start with `where`."""
    if dim is None:
        _check_leaves(x, where, lambda leaf: _varies(leaf, axes))
        return _each(lambda leaf: _copy(leaf, axes), x)
    _check_leaves(x, where, lambda leaf: _no_dim(leaf, dim) or _not_split(leaf, axes, "gather"))
    return _each(lambda leaf: _gather(leaf, dim % leaf.ndim, axes), x)


@jax.named_scope("leave_parallel")
def _leave(x: Any, axes: tuple[str, ...], dim: int | None, where: str) -> Any:
    """`leave_parallel`; messages start with `where`."""
    _check_leaves(x, where, lambda leaf: _not_split(leaf, axes, "sum"))
    if dim is None:
        return _each(lambda leaf: _sum(leaf, axes), x)
    _check_leaves(x, where, lambda leaf: _no_dim(leaf, dim) or _uneven(leaf, dim, axes))
    return _each(lambda leaf: _scatter(leaf, dim % leaf.ndim, axes), x)


def _each(f: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: f(x) if is_array(x) else x, tree)


# JAX transposes `_gather` and `_scatter` correctly in both modes.


def _gather(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scatter(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


# JAX transposes `_copy` and `_sum` correctly only under `check_vma=True`. Each must be the
# transpose of the other.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return vary_array(x, axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes)


_copy.defvjp(lambda x, axes: (_copy(x, axes), None), lambda axes, _, g: (_sum(g, axes),))
_sum.defvjp(lambda x, axes: (_sum(x, axes), None), lambda axes, _, g: (_copy(g, axes),))


# ------------------------------------------------------------------ layers


def column_parallel(
    x: jax.Array,
    weights: PyTree,
    axis_names: AxisNames,
    biases: PyTree = None,
    *,
    dim: int | None = None,
) -> PyTree:
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
    axes = bound_axes(axis_names, "column_parallel", _INSTEAD)
    x = _enter(x, axes, dim, "column_parallel: x")
    _check_weights(x, weights, axes, "column_parallel")
    out = jax.tree.map(lambda w: x @ w, weights)
    return out if biases is None else jax.tree.map(_plus, out, biases)


def row_parallel(
    x: jax.Array,
    weight: jax.Array,
    axis_names: AxisNames,
    bias: jax.Array | None = None,
    *,
    dim: int | None = None,
) -> jax.Array:
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
    axes = bound_axes(axis_names, "row_parallel", _INSTEAD)
    _check_weights(x, weight, axes, "row_parallel")
    out = _leave(x @ weight, axes, dim, "row_parallel")
    if bias is None:
        return out
    # With `dim`, each device adds it to its own rows, so the gradient of the bias is a sum.
    return _plus(out, bias if dim is None else _enter(bias, axes, None, "row_parallel: bias"))


def _plus(x: jax.Array, bias: jax.Array) -> jax.Array:
    if bias.shape != x.shape[-1:]:
        raise SpecError(
            f"the bias is {bias.shape} here, and the product {x.shape}: it needs {x.shape[-1]}"
            " elements. In `column_parallel` it is split like the columns of its weight, by"
            " P(axis); in `row_parallel` it is not split."
        )
    return x + jnp.broadcast_to(bias, x.shape)


# ------------------------------------------------------------------ checks


def _axes_text(axes: tuple[str, ...]) -> str:
    """`'data', 'tensor'`."""
    return ", ".join(map(repr, axes))


def _check_leaves(tree: Any, where: str, fact_of: Callable[[Any], str | None]) -> None:
    """Raises one `SpecError` with all facts that `fact_of` returns about leaves."""
    pairs = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    rows = [(path, fact_of(leaf)) for path, leaf in pairs if is_array(leaf)]
    facts = [f"{path}: {fact}" if path else fact for path, fact in rows if fact]
    if facts:
        raise SpecError(f"{where}: {listed('these leaves do not fit:', facts)}")


def _varies(x: Any, axes: tuple[str, ...]) -> str | None:
    if more := varying_axes(x) & set(axes):
        return (
            f"shape {x.shape} differs between devices along {_axes_text(tuple(sorted(more)))}."
            " If these are shards of one array, pass the sharded dim as `dim`. If they are"
            " summands, sum them with `leave_parallel`. If they were computed from parameters"
            " that are not split, do not pass this axis to `value_and_grad`, `gather_params`"
            " or `vary`."
        )
    return None


def _unsplit_axes(x: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes along which, by its type, an array is equal on all devices."""
    return tuple(axis for axis in axes if not still_differs(x, axis))


def _not_split(x: Any, axes: tuple[str, ...], to_do: str) -> str | None:
    # A sum of equal values would be too large by the number of devices, without an error.
    if unsplit := _unsplit_axes(x, axes):
        return (
            f"shape {x.shape} is equal on all devices along {_axes_text(unsplit)}: there is nothing"
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
            f" {_axes_text(axes)}."
        )
    return None


def _check_weights(x: Any, weights: Any, axes: tuple[str, ...], where: str) -> None:
    axis = axes[0] if len(axes) == 1 else axes
    split = f"Columns are split by P(None, {axis!r}), rows by P({axis!r})."

    def fact(w: Any) -> str | None:
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            return (
                f"the weight's shard is {w.shape} here, and x {x.shape}: it needs {x.shape[-1]}"
                f" rows. {split} Equinox stores the transpose of its weights."
            )
        if unsplit := _unsplit_axes(w, axes):
            return (
                f"the weight {w.shape} is equal on all devices along {_axes_text(unsplit)}, so all"
                f" of them would do the same work. {split} If each shall use the full weight, pass"
                " it through `enter_parallel`."
            )
        return None

    _check_leaves(weights, where, fact)

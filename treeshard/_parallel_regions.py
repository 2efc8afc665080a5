"""Enters and leaves the regions of a model that run tensor parallel.

Activations enter a region in which every device has its own columns of the weights, and leave
it as a sum over the devices. The two operations are each other's transpose. They are defined
here for both modes of `shard_map`: without `check_vma`, JAX does not know that the gradients of
replicated arrays have to be summed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from treeshard._errors import SpecError, listed
from treeshard._mean_grads import still_differs, vary_array, varying
from treeshard._mesh import axis_tuple, check_bound
from treeshard._paths import leaf_paths
from treeshard._specs import is_array

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
    if more := varying(x) & set(axes):
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

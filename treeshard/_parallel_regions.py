"""Into tensor parallelism and out of it.

Activations enter a region in which every device has its own columns of the weights, and leave
it as a sum over the devices. The two are each other's transpose, which is said here once for
both modes of `shard_map`: without `check_vma` JAX does not know that the gradients of what all
devices hold alike have to be summed.
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

# For messages: what to do outside `shard_map`.
_INSTEAD = "under `jax.jit`, specs on the weights are all it takes"


def enter_parallel(x: Any, axis_names: AxisNames, *, dim: int | None = None) -> Any:
    """Hands every device all of `x`, to work on with its part of the weights.

    Forwards nothing moves. Backwards, the devices' gradients are summed, by one all-reduce.
    With `dim`, each device holds a part of `x` only: it is all-gathered forwards, and its
    gradient reduce-scattered backwards.

    What all devices hold alike and each uses on its own part has to enter too: the scale of
    a norm on rows that are split, or the weights of heads that all devices share.

    Args:
        x: An array, the same on all devices along the axes; with `dim`, a part of one. Or a
            tree of them, such as a norm's parameters; leaves that are no arrays pass through.
        axis_names: The axis that splits the weights, or several.
        dim: The dim of `x` that is split over the axes, such as that of the sequence.

    Returns:
        The whole `x`, on every device. It has reverse-mode gradients, no forward-mode ones.

    Raises:
        SpecError: Under `check_vma=True`, if `x` may differ along the axes and no `dim` is
            given, or the other way round: all such leaves. If `x` has no such dim.
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> def norm(x, scale):  # on a part of the sequence
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
    """Sums what every device computed with its part of the weights.

    Forwards it is one all-reduce, and backwards nothing moves. With `dim`, each device keeps
    a part of the sum only: it is reduce-scattered forwards, and its gradient all-gathered.

    It also ends a loss whose rows are split over the axes, as `leave_parallel(total / count)`:
    under `check_vma=False` the gradient of a plain `jax.lax.psum` is as many times too large
    as there are devices.

    Args:
        x: Every device's summand, or a tree of them.
        axis_names: The axis that splits the weights, or several.
        dim: The dim of the sum to split over the axes.

    Returns:
        The sum, the same on all devices along the axes; with `dim`, this device's part.

    Raises:
        SpecError: Under `check_vma=True`, if a leaf is the same on all devices, so that there is
            nothing to sum. If `x` has no such dim, or the axes do not divide it.
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
    """`enter_parallel`, with the words that messages begin with."""
    if dim is None:
        check_leaves(x, where, lambda leaf: _not_alike(leaf, axes))
        return _each(lambda leaf: _copy(leaf, axes), x)
    check_leaves(x, where, lambda leaf: _no_dim(leaf, dim) or _not_split(leaf, axes, "gather"))
    return _each(lambda leaf: _gather(leaf, dim % leaf.ndim, axes), x)


@jax.named_scope("leave_parallel")
def leave_region(x: Any, axes: tuple[str, ...], dim: int | None, where: str) -> Any:
    """`leave_parallel`, with the words that messages begin with."""
    check_leaves(x, where, lambda leaf: _not_split(leaf, axes, "sum"))
    if dim is None:
        return _each(lambda leaf: _sum(leaf, axes), x)
    check_leaves(x, where, lambda leaf: _no_dim(leaf, dim) or _uneven(leaf, dim, axes))
    return _each(lambda leaf: _scatter(leaf, dim % leaf.ndim, axes), x)


def _each(f: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: f(x) if is_array(x) else x, tree)


# JAX transposes these two rightly in both modes.


def _gather(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scatter(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


# And these under `check_vma=True` only: each is to be the other's transpose.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return vary_array(x, axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes)


_copy.defvjp(lambda x, axes: (_copy(x, axes), None), lambda axes, _, g: (_sum(g, axes),))
_sum.defvjp(lambda x, axes: (_sum(x, axes), None), lambda axes, _, g: (_copy(g, axes),))


# ------------------------------------------------------------------ what can be wrong


def named(axes: tuple[str, ...]) -> str:
    """`'data', 'tensor'`."""
    return ", ".join(map(repr, axes))


def check_leaves(tree: Any, where: str, fact_of: Callable[[Any], str | None]) -> None:
    """Raises `SpecError` with what `fact_of` says of the leaves, if it says anything."""
    pairs = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    found = [(path, fact_of(leaf)) for path, leaf in pairs if is_array(leaf)]
    facts = [f"{path}: {fact}" if path else fact for path, fact in found if fact]
    if facts:
        raise SpecError(f"{where}: {listed('these leaves do not fit:', facts)}")


def _not_alike(x: Any, axes: tuple[str, ...]) -> str | None:
    if more := varying(x) & set(axes):
        return (
            f"shape {x.shape} differs from device to device along {named(tuple(sorted(more)))}."
            " If these are parts of one array, say of which dim with `dim`; if they are summands,"
            " `leave_parallel` sums them. If parameters that are not split went into it: leave"
            " this axis out of the axis_names of `value_and_grad`, `gather_params` and `vary`."
        )
    return None


def unsplit_axes(x: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes along which all devices are known to hold the same."""
    return tuple(axis for axis in axes if not still_differs(x, axis))


def _not_split(x: Any, axes: tuple[str, ...], to_do: str) -> str | None:
    if alike := unsplit_axes(x, axes):
        return (
            f"shape {x.shape} is the same on all devices along {named(alike)}: there is nothing"
            f" to {to_do}."
        )
    return None


def _no_dim(x: Any, dim: int) -> str | None:
    return None if -x.ndim <= dim < x.ndim else f"there is no dim {dim} in shape {x.shape}."


def _uneven(x: Any, dim: int, axes: tuple[str, ...]) -> str | None:
    size = lax.axis_size(axes)
    if x.shape[dim] % size:
        return f"dim {dim} of shape {x.shape} does not divide by {size} along {named(axes)}."
    return None

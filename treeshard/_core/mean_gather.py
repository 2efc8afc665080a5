"""All-gathers whose gradients are means over the devices, with and without `check_vma`.

The transpose of `jax.lax.all_gather` is a reduce-scatter, which sums, and `check_vma` decides
whether JAX also sums the gradient of a replicated array. This module therefore defines its own
derivatives, between two conventions:

1. The cotangent of a gathered array belongs to one device's own loss.
2. The gradient of a shard, or of a replicated array, belongs to the mean loss over all devices.

`mean_gather` maps from the second to the first, and `mean_scatter` back. Each is the derivative of
the other, so gradients of gradients are right, too.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from treeshard._core.mesh import AnyMesh, still_differs, vary_array
from treeshard._core.origins import note_origin
from treeshard._core.specs import all_axes, axes_of, dims_over, drop_axes, entries
from treeshard._core.torus import gather_along, scatter_along


class Gathering(NamedTuple):
    """How one array is gathered.

    Attributes:
        dims: The dims to gather, each with the axes that shard it, outermost first.
        replicated: Axes along which all devices have the same array. Its gradient is also averaged
            over these axes. They are known only under `check_vma=True`.
        wire_dtype: The dtype for communication.
        dtype: The dtype of the array.
        mesh: The mesh of these axes, with its devices if they are known.
    """

    dims: tuple[tuple[int, tuple[str, ...]], ...]
    replicated: tuple[str, ...]
    wire_dtype: Any
    dtype: Any
    mesh: AnyMesh | None

    def size(self) -> int:
        axes = (*self.replicated, *(axis for _, axes in self.dims for axis in axes))
        return math.prod(lax.axis_size(axis) for axis in axes)


class Reduced(NamedTuple):
    """The origin of a gradient that was reduced by hand.

    Attributes:
        scattered: The axes over which this device has its shard of the mean.
        averaged: The axes over which all devices have the mean.
    """

    scattered: tuple[str, ...]
    averaged: tuple[str, ...] = ()


class GatheredFrom(NamedTuple):
    """The origin of an array that was gathered: the spec of the axes that still shard it."""

    rest: PartitionSpec


def gather_by(x: Any, how: Gathering) -> Any:
    """All-gathers an array; its gradient is reduce-scattered, and a mean over the devices."""
    if not jnp.issubdtype(how.dtype, jnp.inexact):  # numbers without a gradient
        return _gather(lax.stop_gradient(x), how)
    return mean_gather(x, how)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def mean_gather(x: Any, how: Gathering) -> Any:
    """All-gathers; the gradient is reduce-scattered and divided by the number of devices."""
    return _gather(x, how)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def mean_scatter(g: Any, how: Gathering) -> Any:
    """Reduce-scatters and divides by the number of devices; the gradient is all-gathered."""
    with jax.named_scope("scatter_gradients"):
        for dim, axes in how.dims:
            g = scatter_along(g, axes, dim, how.mesh)
        # Partial sums are sent in the narrow dtype, but added up over more devices in the wide one.
        g = g.astype(how.dtype)
        return (lax.psum(g, how.replicated) if how.replicated else g) / how.size()


def _scatter_gradient(how: Gathering, _: None, g: Any) -> tuple[Any]:
    # Recorded, so that a later average does not include the same axes again.
    scattered = tuple(axis for _, axes in how.dims for axis in axes)
    return (note_origin(mean_scatter(g, how), Reduced(scattered, how.replicated)),)


mean_gather.defvjp(lambda x, how: (mean_gather(x, how), None), _scatter_gradient)
mean_scatter.defvjp(
    lambda g, how: (mean_scatter(g, how), None), lambda how, _, c: (mean_gather(c, how),)
)


def _gather(x: Any, how: Gathering) -> Any:
    with jax.named_scope("gather_params"):
        # Cast before the gather, to communicate fewer bytes.
        if how.wire_dtype != how.dtype:
            x = x.astype(how.wire_dtype)
        # Typed as varying, so that its gradient arrives unsummed: `mean_scatter` takes the mean.
        x = vary_array(x, how.replicated)
        for dim, axes in how.dims:
            x = gather_along(x, axes, dim, how.mesh)
        return x


# ------------------------------------------------------------------ shards of a spec


def gather_shard(
    x: Any, spec: PartitionSpec, axes: Sequence[str], mesh: AnyMesh | None, wire_dtype: Any = None
) -> Any:
    """Gathers an array over the axes that shard it by `spec`; `gather_by` has its gradient.

    The gradient is also averaged over the other axes in `axes`, over which JAX would sum it.
    """
    split = all_axes(entries(spec))
    how = Gathering(
        dims=dims_over(spec, axes),
        replicated=tuple(a for a in axes if a not in split and not still_differs(x, a)),
        wire_dtype=x.dtype if wire_dtype is None else jnp.dtype(wire_dtype),
        dtype=x.dtype,
        mesh=mesh,
    )
    full = gather_by(vary_array(x, [axis for axis in split if axis in axes]), how)
    return note_origin(full, GatheredFrom(drop_axes(spec, axes)))


def explain_not_innermost(spec: PartitionSpec, axes: Sequence[str]) -> str:
    """Why a dim that several axes shard cannot be split, or gathered, over some of them."""
    for dim, over in dims_over(spec, axes):
        sharded_by = axes_of(entries(spec)[dim])
        # The shards along an outer axis are not contiguous: shards of inner axes are between them.
        if sharded_by[-len(over) :] != over:
            return (
                f"{spec} splits dim {dim} by {sharded_by}, the outermost axis first. Only the"
                f" innermost axes can be split or gathered alone. Name all axes, or write {over}"
                " last."
            )
    return ""

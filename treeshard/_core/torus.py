"""Gathers and scatters along an axis that covers all dims of a TPU's torus, dim after dim.

The compiler for TPUs all-reduces what should be scattered over all dims of a torus at once, which
sends twice the bytes and keeps the full result. Scattered over one dim after the other, each over
the groups of devices along it (`axis_index_groups`), it stays a reduce-scatter. The bytes are
those of one scatter, and the shards come out in the order of the axis.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from treeshard._core.mesh import AnyMesh, manual_axes

Groups = tuple[tuple[int, ...], ...]
# In a torus of three dims, the compiler scatters over two dims at once.
_SCATTERED_AT_ONCE = {2: 1, 3: 2}


def torus_groups(mesh: AnyMesh | None, axis: str) -> tuple[Groups, ...]:
    """The groups of positions along an axis to scatter over, one after the other.

    Empty where one scatter is enough: on devices that are not TPUs, and along an axis that does not
    cover all dims of their torus, or not in the order of their coordinates.
    """
    sizes = torus_dims(mesh, axis) if isinstance(mesh, Mesh) else ()
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    moved = (np.moveaxis(positions, dim, -1) for dim in range(len(sizes)))
    return tuple(tuple(map(tuple, each.reshape(-1, each.shape[-1]).tolist())) for each in moved)


@lru_cache(maxsize=64)
def torus_dims(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """The factors of the size of an axis that are scattered over one by one, outermost first."""
    if not hasattr(mesh.devices.flat[0], "coords"):
        return ()
    coords = np.array([device.coords for device in mesh.devices.flat])
    extents = np.ptp(coords, axis=0) + 1
    along = np.moveaxis(
        coords.reshape(*mesh.devices.shape, -1), mesh.axis_names.index(axis), 0
    ).reshape(mesh.shape[axis], -1, coords.shape[1])
    from_first = along - along[:1]
    covered = np.ptp(from_first[:, 0], axis=0) + 1
    dims = np.flatnonzero(extents > 1)
    if len(dims) not in _SCATTERED_AT_ONCE or not (covered == extents).all():
        return ()
    # How many positions lie between two that are neighbours along a dim.
    strides = {int(dim): int((from_first[:, 0, dim] != 0).argmax()) for dim in dims}
    in_order = sorted(strides, key=strides.__getitem__, reverse=True)
    sizes = [int(extents[dim]) for dim in in_order]
    expected = np.indices(sizes).reshape(len(sizes), -1).T
    if expected.shape[0] != mesh.shape[axis]:
        return ()
    if (from_first[:, :, in_order] != expected[:, None]).any():
        return ()
    at_once = _SCATTERED_AT_ONCE[len(sizes)]
    return (math.prod(sizes[:at_once]), *sizes[at_once:])


# ------------------------------------------------------------------ collectives


def _steps(axes: Sequence[str], mesh: AnyMesh | None) -> list[tuple[tuple[str, ...], Any]]:
    """The axes and the groups of each scatter over `axes`, one after the other."""
    bound = manual_axes()  # and not by `jax.vmap`, whose collectives take no groups
    if len(axes) == 1 and axes[0] in bound:
        groups = torus_groups(mesh, axes[0])
        if groups:
            return [(tuple(axes), each) for each in groups]
    return [(tuple(axes), None)]


def gather_along(x: Any, axes: Sequence[str], dim: int, mesh: AnyMesh | None) -> jax.Array:
    """All-gathers one dim over axes of `mesh`; inside `shard_map`."""
    for over, groups in reversed(_steps(axes, mesh)):
        x = jax.lax.all_gather(x, over, axis=dim, tiled=True, axis_index_groups=groups)
    return x


def scatter_along(x: Any, axes: Sequence[str], dim: int, mesh: AnyMesh | None) -> jax.Array:
    """Sums over axes of `mesh`, and keeps this device's part of one dim; inside `shard_map`."""
    steps = _steps(axes, mesh)
    if len(steps) == 1:
        # Without `tiled`, the dim must be as long as the axis, and is dropped.
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    x = jnp.moveaxis(x, dim, 0)
    for over, groups in steps:
        # Parts along a dim of their own need no padding to the tiles of TPUs, where the compiler
        # would all-reduce the others, or send rows to their places afterwards.
        parts = x.reshape(len(groups[0]), -1, *x.shape[1:])
        x = jax.lax.psum_scatter(parts, over, axis_index_groups=groups)
    return jnp.moveaxis(x, 0, dim)

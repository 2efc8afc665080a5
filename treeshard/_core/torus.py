"""Scatters and gathers along an axis that covers all dims of a TPU's torus, dim after dim.

The compiler for TPUs turns a scatter over all dims of a torus into an all-reduce, which sends twice
the bytes and keeps the full result. A scatter dim by dim, over the groups of devices along each dim
(`axis_index_groups`), stays a reduce-scatter. It sends the bytes of one scatter, and the shards are
in the order of the axis.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from treeshard._core.mesh import AnyMesh, manual_axes

Groups = tuple[tuple[int, ...], ...]
# Over two of the three dims of a torus, the TPU compiler scatters at once.
_SCATTERED_AT_ONCE = {2: 1, 3: 2}
_SMALL_GATHER, _MANY_DEVICES = 2**24, 32


@lru_cache(maxsize=64)
def torus_dims(mesh: AnyMesh, axis: str) -> tuple[int, ...]:
    """The lengths of the dims of a TPU's torus, outermost first, if an axis covers all of them.

    Empty if one scatter is enough: on other devices, and along an axis that covers only a part of
    the torus, a torus of one dim, or a torus in another order than its coordinates.
    """
    if not isinstance(mesh, Mesh) or not hasattr(mesh.devices.flat[0], "coords"):
        return ()
    coords = np.array([device.coords for device in mesh.devices.flat])
    lengths = np.ptp(coords, axis=0) + 1
    dims = np.flatnonzero(lengths > 1)
    count = mesh.shape[axis]
    if len(dims) not in _SCATTERED_AT_ONCE or lengths.prod() != count:
        return ()
    grid = coords.reshape(*mesh.devices.shape, -1)
    # For each position along the axis, the devices there.
    along = np.moveaxis(grid, mesh.axis_names.index(axis), 0).reshape(count, -1, len(lengths))
    along = along - along[:1]
    # The distance in positions between neighbours along a dim.
    strides = {dim: (along[:, 0, dim] != 0).argmax() for dim in dims}
    in_order = sorted(strides, key=strides.__getitem__, reverse=True)
    sizes = tuple(int(lengths[dim]) for dim in in_order)
    row_major = np.indices(sizes).reshape(len(sizes), count).T
    is_in_order = (along[:, :, in_order] == row_major[:, None]).all()
    return sizes if is_in_order else ()


def covers_torus(mesh: AnyMesh | None, axes: Iterable[str]) -> bool:
    """Whether any of these axes covers all dims of a TPU's torus."""
    return mesh is not None and any(torus_dims(mesh, axis) for axis in axes)


def _groups(sizes: Sequence[int]) -> list[Groups]:
    """The positions along an axis, in groups along each of some dims."""
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    of_dims = [np.moveaxis(positions, dim, -1).reshape(-1, n) for dim, n in enumerate(sizes)]
    return [tuple(map(tuple, of_dim.tolist())) for of_dim in of_dims]


def _dims_along(axes: Sequence[str], mesh: AnyMesh | None) -> tuple[int, ...]:
    """The dims of the torus to run over; empty if one collective over `axes` is enough."""
    # Collectives over an axis that `jax.vmap` has bound take no groups.
    if mesh is None or len(axes) != 1 or axes[0] not in manual_axes():
        return ()
    return torus_dims(mesh, axes[0])


# ------------------------------------------------------------------ collectives


def gather_along(x: Any, axes: Sequence[str], dim: int, mesh: AnyMesh | None) -> jax.Array:
    """All-gathers one dim over axes of `mesh`; inside `shard_map`."""
    sizes = _dims_along(axes, mesh)
    steps: list[Groups | None] = [None]
    if len(sizes) == 2 and _becomes_all_reduce(x, math.prod(sizes)):
        steps = [*reversed(_groups(sizes))]
    for groups in steps:
        x = jax.lax.all_gather(x, tuple(axes), axis=dim, tiled=True, axis_index_groups=groups)
    return x


def _becomes_all_reduce(x: Any, devices: int) -> bool:
    """Whether the TPU compiler makes an all-reduce of a gather over all dims at once.

    It does so for small gathers, from 8x8 chips. Other gathers stay gathers, and overlap with
    computation more often than gathers dim by dim.
    """
    return devices >= _MANY_DEVICES and devices * x.size * x.dtype.itemsize <= _SMALL_GATHER


def scatter_along(x: Any, axes: Sequence[str], dim: int, mesh: AnyMesh | None) -> jax.Array:
    """Sums over axes of `mesh`, and keeps this device's part of one dim; inside `shard_map`."""
    sizes = _dims_along(axes, mesh)
    if not sizes:
        # Without `tiled`, the dim must be as long as the axis, and is dropped.
        return jax.lax.psum_scatter(x, tuple(axes), scatter_dimension=dim, tiled=True)
    at_once = _SCATTERED_AT_ONCE[len(sizes)]
    x = jnp.moveaxis(x, dim, 0)
    for groups in _groups((math.prod(sizes[:at_once]), *sizes[at_once:])):
        # Parts along their own dim fit the tiles of TPUs. Otherwise the compiler would all-reduce,
        # or send rows to their places afterwards.
        parts = x.reshape(len(groups[0]), -1, *x.shape[1:])
        x = jax.lax.psum_scatter(parts, tuple(axes), axis_index_groups=groups)
    return jnp.moveaxis(x, 0, dim)

"""Strategies for moving arrays to their target shardings."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treeshard._host import is_key, numbers, second_handle
from treeshard._mesh import AnyMesh
from treeshard._own_shards import shard_from_full, transfer_across_processes

# Moves each array to the sharding at the same index.
Move = Callable[[list[Any], list[NamedSharding]], list[jax.Array]]


def choose_move(leaf: Any, target: NamedSharding, from_single_device: Move) -> Move | None:
    """Returns how to move a leaf to its target; `None` if it is already there.

    `from_single_device` moves arrays that are on a single device.
    """
    if not isinstance(leaf, jax.Array):
        return through_host if target.is_fully_addressable else shard_from_full
    current = leaf.sharding
    if leaf.is_fully_addressable and not target.is_fully_addressable:
        return shard_from_full
    if current.is_equivalent_to(target, leaf.ndim):
        # A compiled step distinguishes meshes, so the same placement on another mesh is still
        # relabelled, without a copy.
        if isinstance(current, NamedSharding) and current.mesh == target.mesh:
            return None
        return _by_jax if target.is_fully_addressable else _compiled
    if len(current.device_set) == 1 and leaf.is_fully_addressable:
        return _by_jax if target.is_fully_replicated else from_single_device
    if isinstance(current, NamedSharding) and _devices(current.mesh) == _devices(target.mesh):
        return _compiled
    return _by_jax if leaf.is_fully_addressable else transfer_across_processes


def _devices(mesh: AnyMesh) -> list[Any]:
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def _by_jax(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    # Where shards differ, JAX copies through the host and caches that copy on its argument.
    return jax.device_put([x if is_key(x) else second_handle(x) for x in arrays], targets)


def _compiled(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    return jax.jit(unchanged, out_shardings=targets)(arrays)


def replicate_then_split(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    """Copies each array to all devices, and splits them there in one program."""
    # Splitting them on their single device would take one program for each shape.
    replicated = [target.update(spec=PartitionSpec()) for target in targets]
    return _compiled(jax.device_put(arrays, replicated), targets)


class _TrackedView(np.ndarray):
    """A view that stays alive as long as `self[...]` and all views of that.

    The base of such a view is this object. For plain arrays, numpy would set the base to the
    owner of the memory instead.
    """


def through_host(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    """Copies arrays from host memory in one batch, without compiling; never aliases them."""
    sources = [_source(x) for x in arrays]
    tracked = [x.view(_TrackedView) for x in sources]
    in_use = [weakref.ref(x) for x in tracked]
    placed = jax.device_put([np.asarray(x[...]) for x in tracked], targets)
    del tracked
    jax.block_until_ready(placed)  # until then JAX still reads the sources
    for i, array in enumerate(arrays):
        # The CPU platform adopts memory that happens to be aligned, whatever `may_alias` says,
        # and keeps it alive. Detecting that afterwards is cheaper than copying in advance.
        if in_use[i]() is not None:
            placed[i] = jax.device_put(np.array(sources[i]), targets[i])
        if is_key(array):
            placed[i] = jax.random.wrap_key_data(placed[i], impl=jax.random.key_impl(array))
    return placed


def _source(x: Any) -> np.ndarray:
    """The values of an array on the host or on one device, in a dtype that JAX supports."""
    if isinstance(x, jax.Array):
        return numbers(x)
    with np.errstate(all="ignore"):  # values beyond float32 become inf, as in jnp.asarray
        return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))


def unchanged(x: Any) -> Any:
    return x

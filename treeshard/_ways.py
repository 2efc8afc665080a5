"""How arrays get from where they are to where they belong, one way for each kind of journey."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treeshard._host import is_key, numbers, second_handle
from treeshard._mesh import AnyMesh
from treeshard._own_shards import cut, sent

# Moves arrays to their targets, one to one.
Way = Callable[[list[Any], list[NamedSharding]], list[jax.Array]]


def way(leaf: Any, target: NamedSharding, spread: Way) -> Way | None:
    """The way for a leaf, none if it lies right; `spread` is the one for single-device arrays."""
    if not isinstance(leaf, jax.Array):
        return through_host if target.is_fully_addressable else cut
    here = leaf.sharding
    if leaf.is_fully_addressable and not target.is_fully_addressable:
        return cut
    if here.is_equivalent_to(target, leaf.ndim):
        # The same placement on another mesh gets its new name without a copy: a compiled step
        # tells them apart.
        if isinstance(here, NamedSharding) and here.mesh == target.mesh:
            return None
        return _by_jax if target.is_fully_addressable else _compiled
    if len(here.device_set) == 1 and leaf.is_fully_addressable:
        return _by_jax if target.is_fully_replicated else spread
    if isinstance(here, NamedSharding) and _devices(here.mesh) == _devices(target.mesh):
        return _compiled
    return _by_jax if leaf.is_fully_addressable else sent


def _devices(mesh: AnyMesh) -> list[Any]:
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def _by_jax(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    # Where shards differ JAX goes through the host, and keeps that copy on what it was given.
    return jax.device_put([x if is_key(x) else second_handle(x) for x in arrays], into)


def _compiled(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    return jax.jit(unchanged, out_shardings=into)(arrays)


def from_one_device(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    """To all devices whole, and there in one program: device to device."""
    # Cut up on its one device, each shape would need a program of its own.
    return _compiled(jax.device_put(arrays, [x.update(spec=PartitionSpec()) for x in into]), into)


class _Lent(np.ndarray):
    """A view that lives as long as `self[...]` or a view of that: numpy keeps each of them on
    the next, where among plain arrays it would keep the owner of the memory alone."""


def through_host(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    """From host memory, which is left alone, in one batch and without compiling."""
    sources = [_source(x) for x in arrays]
    lent = [x.view(_Lent) for x in sources]
    in_use = [weakref.ref(x) for x in lent]
    placed = jax.device_put([np.asarray(x[...]) for x in lent], into)
    del lent
    jax.block_until_ready(placed)  # until then the sources are still being read
    for i, array in enumerate(arrays):
        # On the CPU platform JAX takes over memory that happens to be aligned, whatever it is
        # told, and keeps it alive. To see that afterwards is cheaper than to copy in advance.
        if in_use[i]() is not None:
            placed[i] = jax.device_put(np.array(sources[i]), into[i])
        if is_key(array):
            placed[i] = jax.random.wrap_key_data(placed[i], impl=jax.random.key_impl(array))
    return placed


def _source(x: Any) -> np.ndarray:
    """The numbers of an array on the host or on one device, in a dtype that JAX has."""
    if isinstance(x, jax.Array):
        return numbers(x)
    with np.errstate(all="ignore"):  # beyond float32 comes inf, as in jnp.asarray
        return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))


def unchanged(x: Any) -> Any:
    return x

"""Assembles arrays shard by shard; each process makes only its own shards."""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from treeshard._errors import MismatchError
from treeshard._host import data_of, is_key, numbers
from treeshard._parcels import Box, box_of
from treeshard._point_to_point import deliver
from treeshard._processes import processes_of
from treeshard._specs import array_text

# Takes a leaf's path and the index of a shard; returns that shard.
Read = Callable[[str, tuple[slice, ...]], Any]


def assemble(
    shape: tuple[int, ...], dtype: Any, target: NamedSharding, read_shard: Callable[[Any], Any]
) -> jax.Array:
    """Assembles an array from its local shards, which `read_shard` returns by index.

    Each shard is copied into fresh memory, which JAX may adopt. 64-bit values become 32-bit
    ones unless JAX's x64 mode is on.
    """
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(dtype).newbyteorder("="))
    # Without local devices, JAX would still ask for the value of a replicated array.
    if not target.addressable_devices:
        return jax.make_array_from_single_device_arrays(shape, target, [], dtype=dtype)

    def fresh_shard(index: Any) -> np.ndarray:
        with np.errstate(all="ignore"):  # values beyond float32 become inf, as in jnp.asarray
            return np.array(read_shard(index), dtype, order="C")

    return jax.make_array_from_callback(shape, target, fresh_shard, dtype=dtype)


def shard_from_full(arrays: Sequence[Any], targets: Sequence[NamedSharding]) -> list[jax.Array]:
    """Shards arrays of which every process has a full copy, on the host or on its own devices."""
    placed = []
    for x, target in zip(arrays, targets, strict=True):
        full = numbers(x)
        placed.append(as_keys(assemble(full.shape, full.dtype, target, full.__getitem__), x))
    return placed


def transfer_across_processes(
    arrays: Sequence[jax.Array], targets: Sequence[NamedSharding]
) -> list[jax.Array]:
    """Moves arrays to devices of other processes, through the host.

    Each process receives one copy of each shard that it needs and does not have.
    """
    data = list(map(data_of, arrays))
    wanted = [_wanted(x.shape, target) for x, target in zip(data, targets, strict=True)]
    shardings = [*(x.sharding for x in data), *targets]
    among = processes_of({device for sharding in shardings for device in sharding.device_set})
    participates = jax.process_index() in among
    received = deliver(data, wanted, among) if participates else repeat({})
    placed = []
    for x, keyless, target, parts in zip(arrays, data, targets, received, strict=participates):
        placed.append(as_keys(jax.block_until_ready(_of_parts(keyless, target, parts)), x))
    return placed


def _of_parts(x: jax.Array, target: NamedSharding, parts: Mapping[Box, np.ndarray]) -> jax.Array:
    return assemble(x.shape, x.dtype, target, lambda index: parts[box_of(index, x.shape)])


def _wanted(shape: tuple[int, ...], target: NamedSharding) -> list[tuple[int, Box]]:
    """Which process needs which shards."""
    indices = target.devices_indices_map(shape).items()
    return list(dict.fromkeys((d.process_index, box_of(index, shape)) for d, index in indices))


def read_shards(
    read: Read, path: str, struct: jax.ShapeDtypeStruct, target: NamedSharding
) -> jax.Array:
    """Assembles an array from what `read` returns for each local shard, calling it once each.

    Raises `MismatchError` if `read` returns another shape or dtype.
    """
    full = jax.eval_shape(jax.random.key_data, struct) if is_key(struct) else struct
    cache: dict[Box, np.ndarray] = {}

    def read_once(index: Any) -> np.ndarray:
        box = box_of(index[: struct.ndim], struct.shape)
        if box not in cache:
            cache[box] = _read_checked(read, path, struct, tuple(slice(*ends) for ends in box))
        return cache[box]

    array = assemble(full.shape, full.dtype, target, read_once)
    return as_keys(jax.block_until_ready(array), struct)  # then the host memory can be freed


def _read_checked(
    read: Read, path: str, struct: jax.ShapeDtypeStruct, index: tuple[slice, ...]
) -> np.ndarray:
    region = f"{path or 'the array'}[{', '.join(f'{i.start}:{i.stop}' for i in index)}]"
    try:
        result = read(path, index)
    except Exception as error:
        error.add_note(f"`read` was called for {region}.")
        raise
    shard = result if isinstance(result, jax.Array) else np.asarray(result)
    expected = jax.ShapeDtypeStruct(tuple(i.stop - i.start for i in index), struct.dtype)
    if (shard.shape, shard.dtype) != (expected.shape, expected.dtype):
        raise MismatchError(
            f"`read` returned {array_text(shard)} for {region}; expected {array_text(expected)}."
            f" It must return only that part of {array_text(struct)}, in the same dtype."
        )
    return numbers(shard)


def as_keys(data: jax.Array, like: Any) -> jax.Array:
    """Wraps key data as typed keys if `like` has typed keys; else returns the array itself."""
    if not is_key(like):
        return data
    impls: list[Any] = []
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(data, impl=impls[0])

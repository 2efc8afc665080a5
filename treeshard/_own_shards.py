"""Arrays that are made shard by shard: each process makes its own, and no other."""

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


def made(
    shape: tuple[int, ...], dtype: Any, target: NamedSharding, part: Callable[[Any], Any]
) -> jax.Array:
    """An array over processes, of which `part` gives the shards that lie here.

    It gives memory of its own, which JAX may take over. 64-bit numbers become 32-bit ones unless
    JAX's x64 mode is on.
    """
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(dtype).newbyteorder("="))
    if not target.addressable_devices:  # for a replicated array JAX would ask all the same
        return jax.make_array_from_single_device_arrays(shape, target, [], dtype=dtype)

    def own(index: Any) -> np.ndarray:
        with np.errstate(all="ignore"):  # beyond float32 comes inf, as in jnp.asarray
            return np.array(part(index), dtype, order="C")

    return jax.make_array_from_callback(shape, target, own, dtype=dtype)


def cut(arrays: Sequence[Any], into: Sequence[NamedSharding]) -> list[jax.Array]:
    """Places arrays that every process holds, on the host or on devices of its own."""
    placed = []
    for x, target in zip(arrays, into, strict=True):
        whole = numbers(x)
        array = made(whole.shape, whole.dtype, target, whole.__getitem__)
        placed.append(as_keys(array, x))
    return placed


def sent(arrays: Sequence[jax.Array], into: Sequence[NamedSharding]) -> list[jax.Array]:
    """Moves arrays to other devices, through the host; of each shard, one copy goes over the
    network to each process that wants it and does not have it."""
    data = list(map(data_of, arrays))
    wanted = [_wanted(x.shape, target) for x, target in zip(data, into, strict=True)]
    devices = {d for x in (*(x.sharding for x in data), *into) for d in x.device_set}
    among = processes_of(devices)
    took_part = jax.process_index() in among
    came = deliver(data, wanted, among) if took_part else repeat({})
    placed = []
    for x, array, target, boxes in zip(arrays, data, into, came, strict=took_part):
        placed.append(as_keys(jax.block_until_ready(_of_boxes(array, target, boxes)), x))
    return placed


def _of_boxes(x: jax.Array, target: NamedSharding, boxes: Mapping[Box, np.ndarray]) -> jax.Array:
    return made(x.shape, x.dtype, target, lambda index: boxes[box_of(index, x.shape)])


def _wanted(shape: tuple[int, ...], target: NamedSharding) -> list[tuple[int, Box]]:
    """Which process needs which shards."""
    places = target.devices_indices_map(shape).items()
    return list(dict.fromkeys((d.process_index, box_of(index, shape)) for d, index in places))


def filled(read: Read, path: str, struct: jax.ShapeDtypeStruct, target: NamedSharding) -> jax.Array:
    """Makes an array of what `read` gives for each of its shards here; asked once for each.

    Raises `MismatchError` if that is something else.
    """
    whole = jax.eval_shape(jax.random.key_data, struct) if is_key(struct) else struct
    known: dict[Box, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        box = box_of(index[: struct.ndim], struct.shape)
        if box not in known:
            known[box] = _read(read, path, struct, tuple(slice(*ends) for ends in box))
        return known[box]

    array = made(whole.shape, whole.dtype, target, part)
    return as_keys(jax.block_until_ready(array), struct)  # so that host memory is free again


def _read(
    read: Read, path: str, struct: jax.ShapeDtypeStruct, index: tuple[slice, ...]
) -> np.ndarray:
    place = f"{path or 'the array'}[{', '.join(f'{i.start}:{i.stop}' for i in index)}]"
    try:
        given = read(path, index)
    except Exception as error:
        error.add_note(f"`read` was asked for {place}.")
        raise
    x = given if isinstance(given, jax.Array) else np.asarray(given)
    belongs = jax.ShapeDtypeStruct(tuple(i.stop - i.start for i in index), struct.dtype)
    if (x.shape, x.dtype) != (belongs.shape, belongs.dtype):
        raise MismatchError(
            f"`read` gave {array_text(x)} for {place}, where {array_text(belongs)} belongs. It is"
            f" to return that part of {array_text(struct)} alone, in its dtype."
        )
    return numbers(x)


def as_keys(data: jax.Array, like: Any) -> jax.Array:
    """Typed keys of their data, where `like` is of typed keys; else the array itself."""
    if not is_key(like):
        return data
    impls: list[Any] = []
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(data, impl=impls[0])

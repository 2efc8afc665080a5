"""Moves arrays that were read from disk to their devices, region by region.

A region is freed as soon as it is on its devices, so the host never holds a large array in full. A
call of `jax.device_put` takes as long as moving 100 KB, so one call moves many small regions.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from treeshard._core.arrays import Region, items_on_host, region_shape, regions_here
from treeshard._core.memory import Meter
from treeshard._core.text import parse_dtype
from treeshard._disk.requests import RequestedLeaf

_TOGETHER = 2**22  # bytes that one call moves, unless a single region is larger
_LEAST = 2**16  # bytes; smaller regions count as this much

Key = TypeVar("Key")
Part = tuple[Key, Region, np.ndarray]  # a region of the array of a key, in host memory


def to_devices(
    targets: Mapping[Key, RequestedLeaf], parts: Iterable[Part[Key]]
) -> dict[Key, jax.Array]:
    """Assembles arrays on their devices, from the regions that this process holds.

    The regions must not be used afterwards, because CPU devices may adopt their memory. Arrays with
    missing regions are left out.
    """
    shards: dict[Key, list[jax.Array]] = {key: [] for key in targets}
    for waiting in _batches(parts):
        for key, shard in _move_regions(targets, waiting):
            shards[key].append(shard)
    arrays = {key: _assemble(target, shards.pop(key)) for key, target in targets.items()}
    return {key: x for key, x in arrays.items() if x is not None}


def default_sharding() -> Sharding:
    """The sharding of JAX's default device."""
    return _put(np.zeros((), bool), None).sharding


def _put(x: Any, to: Any) -> Any:
    with jax.ensure_compile_time_eval():  # in the user's trace, the result would be a tracer
        return jax.device_put(x, to)


def add_part(
    meter: Meter,
    target: RequestedLeaf,
    region: Region,
    default: Sharding,
    *,
    nbytes: int,
    converts: bool,
) -> None:
    """Adds the host memory of a region of `nbytes` on its way to `target`, or to `default` devices.

    A conversion holds the values before and after it. A move holds the values and their copy.
    """
    count = math.prod(region_shape(region))
    if converts:
        meter.add(count * target.itemsize)
        meter.add(-nbytes)
    if target.on_devices:
        sharding = default if target.sharding is None else target.sharding
        meter.add(items_on_host(sharding, target.shape, region) * target.itemsize)
        meter.add(-count * target.itemsize)


def _batches(parts: Iterable[Part[Key]]) -> Iterator[list[Part[Key]]]:
    waiting: list[Part[Key]] = []
    held = 0
    for part in parts:
        waiting.append(part)
        held += max(_LEAST, part[2].nbytes)
        del part  # or it would stay in memory while the next one is read
        if held > _TOGETHER:
            yield waiting
            waiting, held = [], 0
    yield waiting


def _move_regions(
    targets: Mapping[Key, RequestedLeaf], waiting: list[Part[Key]]
) -> Iterator[tuple[Key, jax.Array]]:
    """Moves regions to their devices, and takes them out of `waiting`."""
    outgoing = [
        (key, values, to)
        for key, region, values in waiting
        for to in _destinations(targets[key], region)
    ]
    keys, values, destinations = zip(*outgoing, strict=True) if outgoing else ((), (), ())
    moved = jax.block_until_ready(_put([*values], [*destinations]))
    waiting.clear()
    # JAX releases numpy arrays that it has read in the next call that creates an array.
    default_sharding()
    return zip(keys, moved, strict=True)


def _is_full(target: RequestedLeaf, region: Region) -> bool:
    """Whether a region is the full array, which JAX splits in one transfer."""
    return target.is_here and region_shape(region) == target.shape


def _destinations(target: RequestedLeaf, region: Region) -> list[Sharding | None]:
    if _is_full(target, region):
        return [target.sharding]
    assert target.sharding is not None
    kind = target.sharding.memory_kind
    return [
        SingleDeviceSharding(device, memory_kind=kind)
        for device, held in regions_here(target.sharding, target.shape).items()
        if held == region
    ]


def _assemble(target: RequestedLeaf, shards: list[jax.Array]) -> jax.Array | None:
    if target.is_here and len(shards) == 1 and shards[0].shape == target.shape:
        return shards[0]
    if target.sharding is None or len(shards) < len(target.sharding.addressable_devices):
        return None
    # Without a shard on this process, JAX needs the dtype.
    return jax.make_array_from_single_device_arrays(
        target.shape, target.sharding, shards, dtype=parse_dtype(target.dtype)
    )

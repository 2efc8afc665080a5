"""Moves arrays that were read from disk to their devices.

A call of `jax.device_put` takes time itself, as much as moving 100 KB: a tree of many small arrays
is moved many arrays in a call.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from treeshard._core.arrays import Region, regions_here
from treeshard._disk.leaves import Shape

_TOGETHER = 2**22  # bytes that are moved in one call
_LEAST = 2**16  # what an array counts at least

Key = TypeVar("Key")


class Read(NamedTuple):
    """An array that was read: the regions of it that the devices of this process get.

    If its sharding is `None`, it goes to the default device, where JAX may move it from.
    """

    shape: Shape
    dtype: np.dtype
    sharding: Sharding | None
    values: dict[Region, np.ndarray]

    @property
    def is_moved_whole(self) -> bool:
        """Whether JAX splits it, in one transfer: to devices of this process, and read in full."""
        full = tuple((0, length) for length in self.shape)
        here = self.sharding is None or self.sharding.is_fully_addressable
        return here and [*self.values] == [full]


def to_devices(arrays: Iterable[tuple[Key, Read]]) -> Iterator[tuple[Key, jax.Array]]:
    """The arrays on their devices. At most 4 MiB wait in host memory, or one array that is larger.

    They share no memory with the values, which can be freed.
    """
    waiting: list[tuple[Key, Read]] = []
    held = 0
    for key, x in arrays:
        waiting.append((key, x))
        held += max(_LEAST, sum(part.nbytes for part in x.values.values()))
        if held > _TOGETHER:
            yield from _moved(waiting)
            waiting, held = [], 0
    yield from _moved(waiting)


def _moved(waiting: list[tuple[Key, Read]]) -> Iterator[tuple[Key, jax.Array]]:
    outgoing = [_outgoing(x) for _, x in waiting]
    parts = [part for of_array in outgoing for part in of_array]
    # Arrays that share memory with numpy's could not be donated.
    moved = jax.device_put([x for x, _ in parts], [to for _, to in parts], may_alias=False)
    remaining = iter(jax.block_until_ready(moved))
    for (key, x), of_array in zip(waiting, outgoing, strict=True):
        placed = [next(remaining) for _ in of_array]
        if x.is_moved_whole:
            yield key, placed[0]
        else:
            assert x.sharding is not None
            # Without a shard on this process, there is none to take the dtype from.
            yield (
                key,
                jax.make_array_from_single_device_arrays(
                    x.shape, x.sharding, placed, dtype=x.dtype
                ),
            )


def _outgoing(x: Read) -> list[tuple[np.ndarray, Sharding | None]]:
    """What goes to devices of an array, and where."""
    if x.is_moved_whole:
        [full] = x.values.values()
        return [(full, x.sharding)]
    assert x.sharding is not None
    kind = x.sharding.memory_kind
    return [
        (x.values[region], SingleDeviceSharding(device, memory_kind=kind))
        for device, region in regions_here(x.sharding, x.shape).items()
    ]

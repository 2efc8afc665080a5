"""Compares the replicas of arrays on several devices or processes by checksums.

A part of an array is identified by its region, so processes also compare rows that only some of
them share. Bits are compared: a NaN equals itself, and 0.0 differs from -0.0.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np
from jax.sharding import Sharding

from treeshard._core.arrays import (
    Region,
    data_of,
    device_dtype,
    processes_by_shard,
    regions_here,
    to_numpy,
    to_read,
    used_bits,
)

_BLOCK = 2**20  # bytes copied at a time, if a copy is needed
_CONTIGUOUS: Any = ("readonly", "contig")  # numpy's annotations lack the second
_FOR_A_THREAD = 2**22  # the least bytes for a thread: `crc32` releases the GIL


class Part(NamedTuple):
    """A part of an array that several devices or processes hold."""

    name: str  # `[0:4, 8:16]`; empty for the full array
    holders: tuple[int, ...]  # the processes that hold it, ascending
    copies: list[Any]  # the values on this process: one copy, or one per device

    def checksums(self) -> list[int]:
        """The distinct checksums of the copies: a single one if all are equal."""
        return list(dict.fromkeys(_checksums(self.copies)))


def shared_parts(x: Any, among: Sequence[int]) -> Iterator[Part]:
    """The parts of an array that another process, or another device of this process, holds too.

    For an array on devices of this process alone, or on the host, each of the processes `among` has
    a copy.
    """
    x = data_of(x)
    if not isinstance(x, jax.Array):
        yield Part("", tuple(among), [x])
        return
    compared = _regions_to_compare(x.sharding, x.shape, tuple(among))
    copies = defaultdict[Region, list[Any]](list)
    for shard in to_read(x).addressable_shards if x.size and compared else ():
        copies[regions_here(x.sharding, x.shape)[shard.device]].append(shard.data)
    for region, owners in compared.items():
        if copies[region]:
            yield Part(region_name(region, x.shape), owners, copies[region])


@lru_cache(4096)
def _regions_to_compare(
    sharding: Sharding, shape: tuple[int, ...], among: tuple[int, ...]
) -> dict[Region, tuple[int, ...]]:
    """The regions here that several devices or processes hold, each with these processes."""
    here = Counter(regions_here(sharding, shape).values())
    # For an array on devices of this process, each other process has one of the same shape.
    owners: Mapping[Region, Collection[int]] = dict.fromkeys(here, among)
    if not sharding.is_fully_addressable:
        owners = processes_by_shard(sharding, shape)
    return {
        region: tuple(sorted(owners[region]))
        for region, copies in here.items()
        if copies > 1 or len(owners[region]) > 1
    }


def is_shared(x: jax.Array) -> bool:
    """Whether several processes hold a part of an array; all processes get the same answer."""
    data = data_of(x)
    return any(len(among) > 1 for among in processes_by_shard(data.sharding, data.shape).values())


def region_name(region: Region, shape: Sequence[int]) -> str:
    """`[0:4, :, 8:16]`, without full dims at the end."""
    spans = [
        ":" if (start, stop) == (0, length) else f"{start}:{stop}"
        for (start, stop), length in zip(region, shape, strict=True)
    ]
    while spans and spans[-1] == ":":
        spans.pop()
    return f"[{', '.join(spans)}]" if spans else ""


def checksum(x: Any) -> int:
    """The CRC-32 of the values of an array in C order, as they are on devices.

    64-bit numbers count as 32-bit numbers, and dtypes smaller than a byte by their used bits.
    Arrays of numpy are copied block by block.
    """
    values = np.atleast_1d(to_numpy(x))  # without a dim, a cast in `nditer` of NumPy 2.0 is garbage
    dtype = device_dtype(values.dtype)
    used = used_bits(dtype)
    register = 0
    with np.errstate(all="ignore"):  # values beyond float32 become inf, as in jnp.asarray
        blocks: Any = np.nditer(
            values,
            flags=("external_loop", "buffered", "zerosize_ok"),
            op_flags=_CONTIGUOUS,
            op_dtypes=dtype,
            casting="unsafe",
            order="C",
            buffersize=_BLOCK // dtype.itemsize,
        )
        for block in blocks:
            data = block.view(np.uint8)
            register = crc32(data if used == 255 else data & used, register)
    return register


def checksum_text(x: Any) -> str:
    return f"CRC-32 {checksum(x)}"


def _checksums(copies: Sequence[Any]) -> list[int]:
    if len(copies) == 1 or copies[0].nbytes < _FOR_A_THREAD:
        return list(map(checksum, copies))
    try:
        with ThreadPoolExecutor(min(len(copies), os.cpu_count() or 1)) as pool:
            return list(pool.map(checksum, copies))
    except RuntimeError:  # threads cannot start once the process ends
        return list(map(checksum, copies))

"""The CRC-32 of a full array, computed from its shards in place.

CRC-32 is linear over GF(2): the register after a message is the xor of the registers after each of
its parts, each advanced by as many zero bytes as follow that part. So shards can be read in any
order, by any process that holds them, and nothing is gathered or compiled.

Checksums of shards would hold for one sharding only, and a checkpoint is restored on any mesh. A
cryptographic hash needs the bytes in order, on one process.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from treeshard._core.arrays import (
    Region,
    data_of,
    is_spread,
    primary_shards,
    region_shape,
    regions_here,
    run_dim,
    used_bits,
)
from treeshard._core.processes import TIMEOUT, all_or_none
from treeshard._core.threads import in_thread
from treeshard.errors import ProcessError

try:  # the same numbers, faster
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

ONES = 0xFFFFFFFF
SHORT = 128  # shorter runs are faster many at once in numpy than with one call each
FOR_A_THREAD = 2**16  # bytes of a run from which on a thread pays off: zlib releases the GIL
BLOCK = 2**20  # bytes copied at a time, where a copy is needed
COPIES_DIFFER = "its values differ between processes, each of which holds its own copy."

# What a process sends of each array: whether it holds a copy of its own, and the register.
_CONTRIBUTION = np.dtype([("is_copy", "?"), ("register", "<u4")])


class Joint(NamedTuple):
    """The CRC-32 of each full array, and how the copies of some differ, by index."""

    crcs: list[int]
    differing: dict[int, str]


def checksums(
    arrays: Sequence[jax.Array | np.ndarray], what: str, timeout: float = TIMEOUT
) -> Joint:
    """The CRC-32 of each full array, on every process, which all must make this call.

    It does not depend on the sharding: `zlib.crc32(np.asarray(x).tobytes())`. In dtypes smaller
    than a byte the unused bits count as zero; typed keys count as their `key_data`. Of each shard
    the first replica is read.
    """
    with all_or_none(what, phase="checksums", timeout=timeout) as messages:
        arrays = list(map(data_of, arrays))
        messages.append(registers(arrays))
    return of_registers(messages, arrays, what)


def registers(arrays: Sequence[jax.Array | np.ndarray]) -> bytes:
    """What this process contributes to the checksums; `of_registers` combines it."""
    # A Ctrl-C in this thread could leave a lock of the pool taken, and its threads would not end.
    return in_thread([], _registers, arrays).result()


def _registers(arrays: Sequence[jax.Array | np.ndarray]) -> bytes:
    contribution = np.zeros(len(arrays), _CONTRIBUTION)
    contribution["is_copy"] = [not is_spread(x) for x in arrays]
    # Parts of one layout are joined many at once: numpy takes as long for one as for hundreds.
    waiting = defaultdict[_Layout, list[tuple[_Part, _Registers]]](list)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as readers:
        for part in _parts(arrays):
            layout = part.layout
            # Without the data: on accelerators it has a copy on the host, freed once it is read.
            waiting[layout].append((part._replace(data=None), _read(part, readers)))
            if 4 * layout.runs * len(waiting[layout]) >= BLOCK:  # the bytes of their registers
                _join(contribution, layout, waiting.pop(layout))
        for layout, parts in waiting.items():
            _join(contribution, layout, parts)
    return contribution.tobytes()


def of_registers(
    messages: Sequence[bytes], arrays: Sequence[jax.Array | np.ndarray], what: str
) -> Joint:
    """As `checksums`, from the `registers` of every process."""
    if len(set(map(len, messages))) > 1:
        raise ProcessError(f"{what}: the processes have different numbers of arrays.")
    # A row for each process, a column for each array.
    contributions = np.stack([np.frombuffer(message, _CONTRIBUTION) for message in messages])
    is_copy, every = contributions["is_copy"], contributions["register"]
    has_copies = is_copy.any(axis=0)
    first_copy = every[is_copy.argmax(axis=0), np.arange(len(arrays))]
    joint = np.where(has_copies, first_copy, np.bitwise_xor.reduce(every, axis=0))
    crcs = joint ^ _crc_of_zeros([x.size * x.dtype.itemsize for x in arrays])

    unequal = (is_copy & (every != first_copy)).any(axis=0)
    differing = dict.fromkeys(np.flatnonzero(unequal).tolist(), COPIES_DIFFER)
    return Joint(crcs.tolist(), differing)


def checksum(x: np.ndarray) -> int:
    """The CRC-32 of a numpy array, as in `checksums`; a transposed array is not copied."""
    items = x.reshape(-1) if x.flags.c_contiguous else x.flat
    return _of_run(items, used_bits(x.dtype), ONES) ^ ONES


def checksum_of_blocks(
    shape: tuple[int, ...], itemsize: int, blocks: Iterable[tuple[Region, np.ndarray]]
) -> int:
    """The CRC-32 of a numpy array, as in `checksum`, from the blocks that it consists of."""
    register = np.zeros(1, np.uint32)
    for region, block in blocks:
        if block.shape == shape:
            return checksum(block)
        layout = _layout(block.shape, shape, itemsize)
        after = layout.bytes_after(region, shape)
        runs = layout.joined(_of_runs(block, layout.runs))
        register = register ^ _each_advanced(runs, np.array([after]))
    return int((register ^ _crc_of_zeros([math.prod(shape) * itemsize]))[0])


# ------------------------------------------------------------------ arrays and their parts


class _Layout(NamedTuple):
    """The layout of a part in its array, wherever it starts.

    From dim `split` on, the last that is split, a part consists of `runs` runs of the array's
    memory, all of one length. `strides` are those of the array, in bytes.
    """

    part: tuple[int, ...]
    strides: tuple[int, ...]
    split: int
    runs: int

    def bytes_after(self, region: Region, shape: Sequence[int]) -> int:
        """How many bytes of an array of this shape follow a part of this layout."""
        ends = zip(shape, region, self.strides, strict=True)
        return sum((length - stop) * stride for length, (_, stop), stride in ends)

    def joined(self, registers: np.ndarray) -> np.ndarray:
        """The registers of parts of this layout, from those of their runs, one row per part."""
        for dim in reversed(range(self.split)):
            registers = _joined(registers.reshape(-1, self.part[dim]), self.strides[dim])
        return registers.reshape(-1)


@lru_cache(1024)
def _layout(part: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> _Layout:
    strides = tuple(itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    split = run_dim(part, shape)
    return _Layout(part, strides, split, math.prod(part[:split]))


class _Part(NamedTuple):
    """A part of the array of an index. `after` are the bytes of the array that follow it."""

    array: int
    data: Any
    layout: _Layout
    after: int = 0


def _parts(arrays: Sequence[jax.Array | np.ndarray]) -> Iterator[_Part]:
    """The first replica of each part that this process has."""
    known: dict[Any, dict[Any, _Part]] = {}  # arrays that agree in the key have the same parts
    for i, x in enumerate(arrays):
        if not x.size:
            continue
        if not isinstance(x, jax.Array):
            yield _Part(i, x, _layout(x.shape, x.shape, x.dtype.itemsize))
            continue
        shards = list(primary_shards(x))
        key = (x.sharding, x.shape, x.dtype.itemsize)
        if key not in known:
            known[key] = {shard.device: _part(x, shard) for shard in shards}
        for shard in shards:
            yield known[key][shard.device]._replace(array=i, data=shard.data)


def _part(x: jax.Array, shard: Any) -> _Part:
    region = regions_here(x.sharding, x.shape)[shard.device]
    layout = _layout(region_shape(region), x.shape, x.dtype.itemsize)
    return _Part(0, None, layout, layout.bytes_after(region, x.shape))


# Of each run of a part that was read, or is being read on a thread, the register.
_Registers = np.ndarray | Future[np.ndarray]


def _read(part: _Part, readers: ThreadPoolExecutor) -> _Registers:
    runs = part.layout.runs
    if part.data.nbytes // runs >= FOR_A_THREAD:
        with suppress(RuntimeError):  # there are no threads once the process ends
            return readers.submit(lambda: _of_runs(np.asarray(part.data), runs))
    return _of_runs(np.asarray(part.data), runs)


def _join(
    contribution: np.ndarray, layout: _Layout, read: Sequence[tuple[_Part, _Registers]]
) -> None:
    """Adds parts of one layout to the registers of their arrays, which start from zero."""
    parts = [part for part, _ in read]
    runs = np.stack([x.result() if isinstance(x, Future) else x for _, x in read])
    arrays = [part.array for part in parts]
    after = np.array([part.after for part in parts])
    advanced = _each_advanced(layout.joined(runs), after)
    # `ufunc.at`, since an array may have several of these parts.
    np.bitwise_xor.at(contribution["register"], arrays, advanced)


def _of_runs(part: np.ndarray, count: int) -> np.ndarray:
    """The registers of `count` runs of equal length, each starting from zero."""
    used = used_bits(part.dtype)
    if count == 1:
        items = part.reshape(-1) if part.flags.c_contiguous else part.flat
        return np.array([_of_run(items, used)], np.uint32)
    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    length = data.size // count
    if length < SHORT:
        # A multiple of the run, so that no run is in two blocks.
        step = BLOCK // length * length
        blocks = [data[i : i + step].reshape(-1, length) for i in range(0, data.size, step)]
        return np.concatenate([_of_short(block & used) for block in blocks])
    rows: Any = data.reshape(-1, length)
    if used < 255:  # in dtypes smaller than a byte
        return np.array([_of_run(row, used) for row in rows], np.uint32)
    return np.fromiter(map(crc32, rows, repeat(ONES)), np.uint32, count) ^ ONES


def _of_run(items: np.ndarray | np.flatiter, used: int, register: int = 0) -> int:
    """The register after a run, from the one before it."""
    step = BLOCK // items[:1].itemsize
    register ^= ONES  # zlib inverts all bits before and after
    for i in range(0, len(items), step):
        data = items[i : i + step].view(np.uint8)
        register = crc32((data if used == 255 else data & used).data, register)
    return register ^ ONES


def _of_short(runs: np.ndarray) -> np.ndarray:
    """As `_of_runs`, for rows of bytes: joins each row from its words, which are registers."""
    size = math.gcd(runs.shape[1], 4)
    size = 2 ** (size.bit_length() - 1)
    words = runs.view(f"<u{size}").astype(np.uint32)
    return _advanced(_joined(words, size), size)


# ------------------------------------------------------------------ the mathematics


def _joined(registers: np.ndarray, stride: int) -> np.ndarray:
    """Per row, the joint register of messages that end `stride` bytes apart."""
    while (count := registers.shape[1]) > 1:
        if count % 2:  # a leading register of zero changes nothing
            registers = np.pad(registers, ((0, 0), (1, 0)))
        registers = _advanced(registers[:, ::2], stride) ^ registers[:, 1::2]
        stride *= 2
    return registers[:, 0]


def _crc_of_zeros(sizes: Sequence[int]) -> np.ndarray:
    """The CRC-32 of so many zero bytes: xor with it turns a register from zero into zlib's."""
    return _each_advanced(np.full(len(sizes), ONES, np.uint32), np.array(sizes, np.int64)) ^ ONES


def _each_advanced(registers: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The registers, each advanced by its own count of zero bytes."""
    for bit in range(int(counts.max(initial=0)).bit_length()):
        registers = np.where(counts >> bit & 1, _advanced(registers, 1 << bit), registers)
    return registers


def _advanced(registers: np.ndarray, count: int) -> np.ndarray:
    """The registers, all advanced by `count` zero bytes."""
    table = _table(count)
    first, second = table[0][registers & 255], table[1][registers >> 8 & 255]
    return first ^ second ^ table[2][registers >> 16 & 255] ^ table[3][registers >> 24]


@lru_cache(1024)
def _table(count: int) -> np.ndarray:
    """What each value of each byte of a register becomes after `count` zero bytes."""
    units = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if count == 1:
        low = [crc32(bytes([1 << bit]), ONES) ^ ONES for bit in range(8)]
        later = np.concatenate([np.array(low, np.uint32), units[:-8]])
    elif count & (count - 1):
        later = _each_advanced(units, np.full(32, count))
    else:
        later = _advanced(_advanced(units, count // 2), count // 2)
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return np.bitwise_xor.reduce(np.where(bits, later.reshape(4, 1, 8), np.uint32(0)), axis=2)

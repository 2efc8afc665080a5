"""The CRC-32 of a whole array, from its shards where they lie.

CRC-32 is linear over GF(2): the register that a message leaves is the xor of those that its
parts leave, each moved on by as many zero bytes as follow that part. So shards are read in any
order, by whatever process has them, and nothing is gathered or compiled.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from treeshard._errors import ProcessError, listed
from treeshard._host import is_key, to_read
from treeshard._processes import TIMEOUT, exchange, together

try:  # the same numbers, faster
    from isal.isal_zlib import crc32  # pyright: ignore[reportMissingImports]
except ImportError:
    from zlib import crc32

ONES = 0xFFFFFFFF
SHORT = 128  # runs of fewer bytes are quicker in numpy, many at once, than by a call each
BLOCK = 2**20  # bytes that are copied at a time, where they must be

_TOLD = np.dtype([("whole", "?"), ("register", "<u4")])


def checksums(
    arrays: Sequence[jax.Array | np.ndarray],
    what: str,
    timeout: float = TIMEOUT,
    *,
    names: Sequence[str] = (),
) -> list[int]:
    """The CRC-32 of each whole array, on every process.

    It is the same however the array is sharded: `zlib.crc32(np.asarray(x).tobytes())`. Of each
    shard one copy is read. In types smaller than a byte the bits that are not used count as
    zero; of typed keys the `key_data` counts.

    Args:
        arrays: Global arrays, or arrays that each process has for itself, as numpy's.
        what: What is being done, for messages. Every process must make this call.
        timeout: Seconds that other processes are waited for.
        names: What messages call the arrays.

    Raises:
        ProcessError: If a process did not come or could not read its arrays, or if an array that
            each has for itself is not the same on all of them.
    """
    mine = np.zeros(len(arrays), _TOLD)
    with together(what, timeout=timeout):
        arrays = [jax.random.key_data(x) if is_key(x) else x for x in arrays]
        mine["whole"] = [not isinstance(x, jax.Array) or x.is_fully_addressable for x in arrays]
        mine["register"] = _registers(arrays)
    said = exchange(what, mine.tobytes(), timeout=timeout)
    if len({len(one) for one in said}) > 1:
        raise ProcessError(f"{what}: the processes have different numbers of arrays.")
    told = [np.frombuffer(one, _TOLD) for one in said]
    whole, every = (np.stack([one[field] for one in told]) for field in _TOLD.names or ())
    least, most = (np.where(whole, every, ONES).min(axis=0), np.where(whole, every, 0).max(axis=0))
    local = whole.any(axis=0)
    if differing := np.flatnonzero(local & (least != most)).tolist():
        raise ProcessError(_message(what, [names[i] if names else f"array {i}" for i in differing]))
    registers = np.where(local, most, np.bitwise_xor.reduce(every, axis=0))
    sizes = [x.size * x.dtype.itemsize for x in arrays]
    return (registers ^ _of_zeros(sizes)).tolist()


def checksum(x: np.ndarray) -> int:
    """The CRC-32 of a numpy array, as `checksums`; of a transposed one no copy is made."""
    register, _ = _of_part(x, (0,) * x.ndim, x.shape)
    return register ^ int(_of_zeros([x.nbytes])[0])


def _message(what: str, differing: Sequence[str]) -> str:
    facts = [f"{name}: other values on other processes." for name in differing]
    return (
        f"{what}: {listed(f'{len(facts)} arrays differ between processes:', facts)}\n"
        "Each process has its own. Make them the same, or make global arrays of their parts."
    )


# ------------------------------------------------------------------ arrays and their parts


class _Part(NamedTuple):
    """A part of an array: which array, where the part lies, where it begins, and in what shape."""

    owner: int
    data: Any
    start: Sequence[int]
    shape: Sequence[int]


def _parts(arrays: Sequence[jax.Array | np.ndarray]) -> Iterator[_Part]:
    for i, x in enumerate(arrays):
        if not isinstance(x, jax.Array):
            yield _Part(i, x, (0,) * x.ndim, x.shape)
            continue
        for piece in to_read(x).addressable_shards:
            if piece.replica_id == 0:
                yield _Part(i, piece.data, [at.start or 0 for at in piece.index], x.shape)


def _registers(arrays: Sequence[jax.Array | np.ndarray]) -> np.ndarray:
    """What the parts of each array that are read here leave at its end, from zero."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as readers:  # zlib lets others run
        parts = _parts(arrays)
        reads = [readers.submit(_read, x) if x.data.nbytes > BLOCK else _read(x) for x in parts]
    found = [x.result() if isinstance(x, Future) else x for x in reads]
    registers = np.zeros(len(arrays), np.uint32)
    if found:
        owners, left, after = (np.array(column) for column in zip(*found, strict=True))
        np.bitwise_xor.at(registers, owners, _each_moved(left.astype(np.uint32), after))
    return registers


def _read(part: _Part) -> tuple[int, int, int]:
    return part.owner, *_of_part(np.asarray(part.data), part.start, part.shape)


def _of_part(part: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """The register that a part of an array leaves, and how many bytes of the array follow it.

    From the last dim that is split on, a part is runs of the array's memory.
    """
    if not part.size:
        return 0, 0
    dims = range(part.ndim)
    stride = [part.itemsize * math.prod(shape[dim + 1 :]) for dim in dims]
    split = max((dim for dim in dims if part.shape[dim] < shape[dim]), default=0)
    registers = _of_runs(part, math.prod(part.shape[:split]))
    for dim in reversed(range(split)):
        registers = _joined(registers.reshape(-1, part.shape[dim]), stride[dim])
    ends = zip(start, part.shape, strict=True)
    after = [stride[dim] * (shape[dim] - sum(end)) for dim, end in enumerate(ends)]
    return int(registers[0]), sum(after)


def _of_runs(part: np.ndarray, count: int) -> np.ndarray:
    """The registers that so many equal runs leave, each from zero."""
    used = used_bits(part.dtype)
    if count == 1:
        items = part.reshape(-1) if part.flags.c_contiguous else part.flat
        return np.array([_of_run(items, used)], np.uint32)
    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    length = data.size // count
    if length < SHORT:
        step = BLOCK // length * length
        blocks = [data[i : i + step].reshape(-1, length) for i in range(0, data.size, step)]
        return np.concatenate([_of_short(block & used) for block in blocks])
    places = range(0, data.size, length)
    if used < 255:
        return np.array([_of_run(data[i : i + length], used) for i in places], np.uint32)
    view = data.data  # numpy would take longer to cut it than zlib to read it
    return np.array([crc32(view[i : i + length], ONES) for i in places], np.uint32) ^ ONES


def _of_run(items: np.ndarray | np.flatiter, used: int) -> int:
    step = BLOCK // items[:1].itemsize
    register = ONES  # as zlib counts it, which turns all bits over before and after
    for i in range(0, len(items), step):
        data = items[i : i + step].view(np.uint8)
        register = crc32((data if used == 255 else data & used).data, register)
    return register ^ ONES


def _of_short(runs: np.ndarray) -> np.ndarray:
    """As `_of_runs`, for rows of bytes: each is joined from its words, which are registers."""
    size = math.gcd(runs.shape[1], 4)
    size = 2 ** (size.bit_length() - 1)
    words = runs.view(f"<u{size}").astype(np.uint32)
    return _moved(_joined(words, size), size)


@lru_cache
def used_bits(dtype: np.dtype) -> int:
    """The bits of each byte that count: not all where a number is smaller than a byte."""
    if dtype.kind != "V":  # numpy's own
        return 255
    about = jax.numpy.finfo if jax.numpy.issubdtype(dtype, np.floating) else jax.numpy.iinfo
    return 2 ** min(8, about(dtype).bits) - 1


# ------------------------------------------------------------------ the mathematics


def _joined(registers: np.ndarray, stride: int) -> np.ndarray:
    """Per row, the register that messages leave together which end `stride` bytes apart."""
    while (count := registers.shape[1]) > 1:
        if count % 2:  # a message that leaves nothing in front changes nothing
            registers = np.pad(registers, ((0, 0), (1, 0)))
        registers = _moved(registers[:, ::2], stride) ^ registers[:, 1::2]
        stride *= 2
    return registers[:, 0]


def _of_zeros(sizes: Sequence[int]) -> np.ndarray:
    """The CRC-32 of so many zero bytes: what makes a register from zero zlib's number."""
    return _each_moved(np.full(len(sizes), ONES, np.uint32), np.array(sizes, np.int64)) ^ ONES


def _each_moved(registers: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Registers, each so many zero bytes later."""
    for bit in range(int(counts.max(initial=0)).bit_length()):
        registers = np.where(counts >> bit & 1, _moved(registers, 1 << bit), registers)
    return registers


def _moved(registers: np.ndarray, count: int) -> np.ndarray:
    """Registers, all `count` zero bytes later."""
    table = _table(count)
    first, second = table[0][registers & 255], table[1][registers >> 8 & 255]
    return first ^ second ^ table[2][registers >> 16 & 255] ^ table[3][registers >> 24]


@lru_cache(1024)
def _table(count: int) -> np.ndarray:
    """What each of the four bytes of a register becomes `count` zero bytes later."""
    units = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if count == 1:
        low = [crc32(bytes([1 << bit]), ONES) ^ ONES for bit in range(8)]
        later = np.concatenate([np.array(low, np.uint32), units[:-8]])
    elif count & (count - 1):
        later = _each_moved(units, np.full(32, count))
    else:
        later = _moved(_moved(units, count // 2), count // 2)
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return np.bitwise_xor.reduce(np.where(bits, later.reshape(4, 1, 8), np.uint32(0)), axis=2)

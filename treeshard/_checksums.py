"""The CRC-32 of a whole array, from its shards where they lie.

CRC-32 is linear over GF(2): the register that a message leaves is the xor of those that its
parts leave, each moved on by as many zero bytes as follow that part. So shards are read in any
order, by whatever process has them, and nothing is gathered or compiled.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from treeshard._across import is_spread
from treeshard._errors import ProcessError, listed
from treeshard._host import data_of, own_shards
from treeshard._processes import TIMEOUT, together

try:  # the same numbers, faster
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

ONES = 0xFFFFFFFF
SHORT = 128  # runs of fewer bytes are quicker in numpy, many at once, than by a call each
FOR_A_THREAD = 2**16  # bytes of a run for which zlib lets other threads run for long enough
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
    with together(what, timeout=timeout) as said:
        arrays = list(map(data_of, arrays))
        said.mine = registers(arrays)
    return of_registers(said.every, arrays, what, names=names)


def registers(arrays: Sequence[jax.Array | np.ndarray]) -> bytes:
    """What a process has to say of the arrays, from which `of_registers` makes their checksums."""
    mine = np.zeros(len(arrays), _TOLD)
    mine["whole"] = [not is_spread(x) for x in arrays]
    mine["register"] = _registers(arrays)
    return mine.tobytes()


def of_registers(
    said: Sequence[bytes],
    arrays: Sequence[jax.Array | np.ndarray],
    what: str,
    *,
    names: Sequence[str] = (),
) -> list[int]:
    """As `checksums`, from what each process said by `registers`."""
    if len({len(one) for one in said}) > 1:
        raise ProcessError(f"{what}: the processes have different numbers of arrays.")
    told = [np.frombuffer(one, _TOLD) for one in said]
    whole, every = (np.stack([one[field] for one in told]) for field in _TOLD.names or ())
    least, most = (np.where(whole, every, ONES).min(axis=0), np.where(whole, every, 0).max(axis=0))
    local = whole.any(axis=0)
    if differing := np.flatnonzero(local & (least != most)).tolist():
        raise ProcessError(_message(what, [names[i] if names else f"array {i}" for i in differing]))
    found = np.where(local, most, np.bitwise_xor.reduce(every, axis=0))
    return (found ^ _of_zeros([x.size * x.dtype.itemsize for x in arrays])).tolist()


def checksum(x: np.ndarray) -> int:
    """The CRC-32 of a numpy array, as `checksums`; of a transposed one no copy is made."""
    return int((_of_runs(x, 1) ^ _of_zeros([x.nbytes]))[0])


def _message(what: str, differing: Sequence[str]) -> str:
    facts = [f"{name}: other values on other processes." for name in differing]
    return (
        f"{what}: {listed(f'{len(facts)} arrays differ between processes:', facts)}\n"
        "Each process has its own. Make them the same, or make global arrays of their parts."
    )


# ------------------------------------------------------------------ arrays and their parts


class _Layout(NamedTuple):
    """How a part lies in its array.

    From the last dim that is split on, it is runs of the array's memory, all of one length.
    """

    part: tuple[int, ...]
    whole: tuple[int, ...]
    itemsize: int

    @property
    def split(self) -> int:
        pairs = enumerate(zip(self.part, self.whole, strict=True))
        return max((dim for dim, (part, whole) in pairs if part < whole), default=0)

    @property
    def strides(self) -> list[int]:
        """Bytes from one index to the next, of each dim of the array."""
        return [self.itemsize * math.prod(self.whole[dim + 1 :]) for dim in range(len(self.whole))]

    @property
    def runs(self) -> int:
        return math.prod(self.part[: self.split])

    def after(self, start: Sequence[int]) -> int:
        """How many bytes of the array follow a part that begins there."""
        ends = map(sum, zip(start, self.part, strict=True))
        left = (whole - end for whole, end in zip(self.whole, ends, strict=True))
        return sum(map(math.prod, zip(self.strides, left, strict=True)))

    def joined(self, registers: np.ndarray) -> np.ndarray:
        """Of parts that lie like this, a row of runs for each: the registers that they leave."""
        for dim in reversed(range(self.split)):
            registers = _joined(registers.reshape(-1, self.part[dim]), self.strides[dim])
        return registers.reshape(-1)


class _Part(NamedTuple):
    """A part of an array: of which, its data, where it begins, and how it lies."""

    owner: int
    data: Any
    start: Sequence[int]
    layout: _Layout


def _parts(arrays: Sequence[jax.Array | np.ndarray]) -> Iterator[_Part]:
    """What is read here: one copy of each shard."""
    for i, x in enumerate(arrays):
        shape, itemsize = x.shape, x.dtype.itemsize
        if not isinstance(x, jax.Array):
            yield _Part(i, x, (0,) * x.ndim, _Layout(shape, shape, itemsize))
            continue
        for piece in own_shards(x):
            start = [at.start or 0 for at in piece.index]
            yield _Part(i, piece.data, start, _Layout(piece.data.shape, shape, itemsize))


def _registers(arrays: Sequence[jax.Array | np.ndarray]) -> np.ndarray:
    """What the parts of each array that are read here leave at its end, from zero."""
    found = np.zeros(len(arrays), np.uint32)
    alike = defaultdict[_Layout, list[_Left]](list)  # joined many at once, which is quicker
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as readers:
        for part in _parts(arrays):
            if part.data.size:
                layout = part.layout
                long = part.data.nbytes // layout.runs >= FOR_A_THREAD
                runs = readers.submit(_read, part) if long else _read(part)
                alike[layout].append(_Left(part.owner, runs, layout.after(part.start)))
                if len(alike[layout]) * layout.runs * found.itemsize >= BLOCK:
                    _add(found, layout, alike.pop(layout))
    for layout, left in alike.items():
        _add(found, layout, left)
    return found


class _Left(NamedTuple):
    """What the runs of a part leave; of which array it is, and how many bytes of that follow."""

    owner: int
    runs: Any
    after: int


def _add(found: np.ndarray, layout: _Layout, left: Sequence[_Left]) -> None:
    runs = [one.runs.result() if isinstance(one.runs, Future) else one.runs for one in left]
    after = np.array([one.after for one in left])
    moved = _each_moved(layout.joined(np.stack(runs)), after)
    np.bitwise_xor.at(found, [one.owner for one in left], moved)


def _read(part: _Part) -> np.ndarray:
    return _of_runs(np.asarray(part.data), part.layout.runs)


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
    rows: Any = data.reshape(-1, length)
    if used < 255:
        return np.array([_of_run(row, used) for row in rows], np.uint32)
    return np.fromiter(map(crc32, rows, repeat(ONES)), np.uint32, count) ^ ONES


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

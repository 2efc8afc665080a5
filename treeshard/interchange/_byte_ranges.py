"""Writes parts of an array to a file that holds the full array, and reads them back.

A shard is seldom a single run of bytes. If an array is sharded by columns, every shard has a part
of every row. So shards are joined into blocks first, and then written run by run.

The package safetensors reads slices through a memory map. If another program cuts a mapped file
short, the process ends with SIGBUS, which Python cannot catch (seen with version 0.8.0). `preadv`
returns fewer bytes instead, so that the error names the file. A write through a map also ends in
SIGBUS on a full disk, and its pages count as memory of the process.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from treeshard._core.arrays import Region, intersect, region_shape, relative_slices, runs
from treeshard._disk.files import start_flush

# Bytes that are joined, or split, at a time.
BLOCK = 2**23
_SMALL = 2**16  # bytes; smaller arrays are copied


class Piece(NamedTuple):
    """A part of an array in this process's memory."""

    region: Region
    items: np.ndarray


def full_region(shape: Sequence[int]) -> Region:
    return tuple((0, length) for length in shape)


def write(file: int, at: int, shape: Sequence[int], pieces: Iterable[Piece]) -> None:
    """Writes pieces of an array to their positions in an open file.

    The array has `shape`, begins at byte `at`, and is stored little-endian in C order. Pieces with
    the same order in memory are written without a copy. Others are copied, at most `BLOCK` bytes at
    a time.
    """
    for block, parts in _blocks(pieces):
        data = parts[0].items
        if len(parts) > 1:
            data = np.empty(region_shape(block), data.dtype)
            for region, items in parts:
                data[relative_slices(region, block)] = items
        # This copies only if the order of bytes or dims differs.
        little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        _transfer(_write_from, file, at, shape, block, little)


def write_full(file: int, at: int, x: np.ndarray) -> None:
    """Writes a full array to its position in an open file, as `write`."""
    if x.nbytes > _SMALL:
        write(file, at, x.shape, [Piece(full_region(x.shape), x)])
    else:  # splitting it into blocks would take longer than a copy
        write_bytes(file, at, x.astype(x.dtype.newbyteorder("<"), copy=False).tobytes())


def write_bytes(file: int, at: int, data: bytes) -> None:
    _move_all(_write_from, file, memoryview(data), at)


def _write_from(file: int, data: memoryview, at: int) -> int:
    end = at + (moved := os.pwrite(file, data, at))
    if at // BLOCK < end // BLOCK:  # the disk can work while the next block is made
        start_flush(file)
    return moved


def read(file: int, at: int, shape: Sequence[int], pieces: Iterable[Piece]) -> None:
    """Fills pieces of an array from the positions of `write`. Raises `EOFError`."""
    for block, parts in _blocks(pieces):
        data = parts[0].items
        # A run of bytes can only be read into a contiguous array.
        if len(parts) > 1 or not data.flags.c_contiguous:
            data = np.empty(region_shape(block), data.dtype)
        _transfer(_read_into, file, at, shape, block, data)
        for region, items in parts:
            if items is not data:
                items[...] = data[relative_slices(region, block)]


def _read_into(file: int, into: memoryview, at: int) -> int:
    return os.preadv(file, [into], at)


def _transfer(
    move: Callable[[int, memoryview, int], int],
    file: int,
    at: int,
    shape: Sequence[int],
    block: Region,
    data: np.ndarray,
) -> None:
    """Moves the bytes of a block, one contiguous run at a time."""
    rest = data.reshape(-1).view(np.uint8).data  # the same memory, which `move` may fill
    if data.size == math.prod(shape):
        _move_all(move, file, rest, at)
        return
    starts, length = runs(block, shape)
    for start in (at + starts.reshape(-1) * data.itemsize).tolist():
        run, rest = rest[: length * data.itemsize], rest[length * data.itemsize :]
        _move_all(move, file, run, start)


def _move_all(
    move: Callable[[int, memoryview, int], int], file: int, run: memoryview, at: int
) -> None:
    """Moves all bytes of a run, in as many system calls as it takes."""
    while run:
        # Linux moves at most 2 GiB in a call, and fewer bytes if a signal arrives. At the end of
        # the file, `preadv` returns 0.
        moved = move(file, run, at)
        if not moved:
            raise EOFError(f"the file ends at byte {at}")
        run, at = run[moved:], at + moved


# ------------------------------------------------------------------ blocks


def _blocks(pieces: Iterable[Piece]) -> Iterator[tuple[Region, list[Piece]]]:
    """Splits the region around all pieces into blocks, with the parts of pieces in each block.

    Bytes between pieces belong to other processes, so a block with gaps is split into its parts.
    """
    pieces = [piece for piece in pieces if piece.items.size]
    if not pieces:
        return
    if len(pieces) == 1 and pieces[0].items.nbytes <= BLOCK:
        yield pieces[0].region, pieces
        return
    dims = zip(*(piece.region for piece in pieces), strict=True)
    around = tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in dims)
    for block in _cut(around, BLOCK // pieces[0].items.itemsize):
        parts = list(_parts_in(block, pieces))
        if sum(part.items.size for part in parts) == math.prod(region_shape(block)):
            yield block, parts
        else:
            yield from ((part.region, [part]) for part in parts)


def _parts_in(block: Region, pieces: Iterable[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        region = intersect(piece.region, block)
        if region is not None:
            # Without the dots, an empty index would turn the array into a number.
            index = (*relative_slices(region, piece.region), ...)
            yield Piece(region, piece.items[index])


def _cut(region: Region, most: int) -> Iterator[Region]:
    """Halves a part of an array until each part has at most `most` items, in C order."""
    if math.prod(region_shape(region)) <= most:
        yield region
        return
    # The outermost dim is halved, so that both halves keep the full rows of the file.
    dim = next(dim for dim, length in enumerate(region_shape(region)) if length > 1)
    start, stop = region[dim]
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        yield from _cut((*region[:dim], half, *region[dim + 1 :]), most)

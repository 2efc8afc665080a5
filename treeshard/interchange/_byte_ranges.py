"""Writes parts of an array to a file that holds the full array, and reads them back."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from treeshard._core.arrays import Region, common, lengths, runs, within

# Bytes that are joined, or split, at a time.
BLOCK = 2**23


class Piece(NamedTuple):
    """A part of an array in this process's memory."""

    region: Region
    items: np.ndarray


def full_piece(x: np.ndarray) -> Piece:
    return Piece(tuple((0, length) for length in x.shape), x)


def write(file: int, at: int, shape: Sequence[int], pieces: Iterable[Piece]) -> None:
    """Writes pieces of an array to their positions in an open file.

    The array has `shape`, begins at byte `at`, and is in C order, little-endian. Pieces with the
    same order in memory are written without a copy; others are copied, at most `BLOCK` bytes at a
    time.
    """
    for block, parts in _blocks(pieces):
        data = _joined(block, parts)
        little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        _transfer(os.pwrite, file, at, shape, block, little)


def write_bytes(file: int, at: int, data: bytes) -> None:
    _whole(os.pwrite, file, memoryview(data), at)


def read(file: int, at: int, shape: Sequence[int], pieces: Iterable[Piece]) -> None:
    """Fills pieces of an array from where `write` puts them; or raises `EOFError`."""
    for block, parts in _blocks(pieces):
        data = parts[0][1]
        if len(parts) > 1 or not data.flags.c_contiguous:
            data = np.empty(lengths(block), data.dtype)
        _transfer(_read_into, file, at, shape, block, data)
        for index, part in parts:
            if part is not data:
                part[...] = data[index]


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
    rest = data.reshape(-1).view(np.uint8).data
    starts, length = runs(block, shape)
    for start in (at + starts.reshape(-1) * data.itemsize).tolist():
        run, rest = rest[: length * data.itemsize], rest[length * data.itemsize :]
        _whole(move, file, run, start)


def _whole(
    move: Callable[[int, memoryview, int], int], file: int, run: memoryview, at: int
) -> None:
    """Moves all bytes of a run, in as many system calls as it takes."""
    while run:
        moved = move(file, run, at)
        if not moved:
            raise EOFError(f"the file ends at byte {at}")
        run, at = run[moved:], at + moved


# ------------------------------------------------------------------ blocks


def _blocks(pieces: Iterable[Piece]) -> Iterator[tuple[Region, list[tuple[Any, np.ndarray]]]]:
    """Splits the region around all pieces into blocks, or one that has gaps into its parts.

    With each block come the indices of its parts, and their values.
    """
    pieces = [piece for piece in pieces if piece.items.size]
    if not pieces:
        return
    spans = zip(*(piece.region for piece in pieces), strict=True)
    around = tuple((min(a for a, _ in dim), max(b for _, b in dim)) for dim in spans)
    for block in _cut(around, BLOCK // pieces[0].items.itemsize):
        overlaps = ((piece, common(piece.region, block)) for piece in pieces)
        parts = [  # the dots keep an array of one item an array
            (part, piece.items[(*within(part, piece.region), ...)])
            for piece, part in overlaps
            if part is not None
        ]
        if sum(items.size for _, items in parts) == math.prod(lengths(block)):
            yield block, [(within(part, block), items) for part, items in parts]
        else:
            yield from ((part, [(within(part, part), items)]) for part, items in parts)


def _cut(region: Region, most: int) -> Iterator[Region]:
    """Splits a part of an array into parts of at most `most` items, in C order."""
    inner = [math.prod(lengths(region[dim + 1 :])) for dim in range(len(region))]
    dim = next((dim for dim, items in enumerate(inner) if items <= most), None)
    if dim is None:
        yield region
        return
    step = max(1, most // max(1, inner[dim]))
    start, stop = region[dim]
    for lead in itertools.product(*(range(*span) for span in region[:dim])):
        for i in range(start, stop, step):
            yield (*((j, j + 1) for j in lead), (i, min(i + step, stop)), *region[dim + 1 :])


def _joined(block: Region, parts: list[tuple[Any, np.ndarray]]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0][1]
    data = np.empty(lengths(block), parts[0][1].dtype)
    for index, part in parts:
        data[index] = part
    return data

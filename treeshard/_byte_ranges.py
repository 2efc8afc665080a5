"""Parts of an array, to and from a file that holds the whole of it."""

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from treeshard._parcels import Box, lengths, within

# Bytes that are put together, or taken apart, at a time.
BLOCK = 2**23
# What lies in shorter runs of bytes is put together with its neighbours.
_SHORT = 2**18


class Piece(NamedTuple):
    """A part of an array that is held here.

    Attributes:
        box: Which part.
        items: What it holds.
    """

    box: Box
    items: np.ndarray


def write(file: int, at: int, shape: Sequence[int], pieces: Iterable[Piece]) -> None:
    """Writes pieces of an array of `shape` to their places in an open file.

    The array begins at byte `at` and lies in C order, little-endian. Pieces that lie so are
    written from where they are; of others, `BLOCK` bytes are copied at a time.
    """
    for block, parts in _blocks(shape, pieces):
        data = _joined(block, parts)
        little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        _transfer(os.pwrite, file, at, shape, block, little)


def write_bytes(file: int, at: int, data: bytes) -> None:
    """Writes bytes to an open file."""
    _whole(os.pwrite, file, memoryview(data), at)


def read(file: int, at: int, shape: Sequence[int], pieces: Iterable[Piece]) -> None:
    """Fills pieces of an array from an open file where `write` would put them.

    Raises:
        EOFError: If the file ends before.
    """
    for block, parts in _blocks(shape, pieces):
        data = parts[0][1]
        if len(parts) > 1 or not data.flags.c_contiguous:
            data = np.empty(lengths(block), data.dtype)
        _transfer(_read_into, file, at, shape, block, data)
        for place, part in parts:
            if part is not data:
                part[...] = data[place]


def _read_into(file: int, into: memoryview, at: int) -> int:
    return os.preadv(file, [into], at)


def _transfer(
    move: Callable[[int, memoryview, int], int],
    file: int,
    at: int,
    shape: Sequence[int],
    block: Box,
    data: np.ndarray,
) -> None:
    """Moves the bytes of a block, run by run."""
    rest = data.reshape(-1).view(np.uint8).data
    starts, length = _runs(block, shape)
    for start in (at + starts * data.itemsize).tolist():
        run, rest = rest[: length * data.itemsize], rest[length * data.itemsize :]
        _whole(move, file, run, start)


def _whole(
    move: Callable[[int, memoryview, int], int], file: int, run: memoryview, at: int
) -> None:
    """Moves all of a run; the system may take several turns."""
    while run:
        moved = move(file, run, at)
        if not moved:
            raise EOFError(f"the file ends at byte {at}")
        run, at = run[moved:], at + moved


def _runs(box: Box, shape: Sequence[int]) -> tuple[np.ndarray, int]:
    """Where the runs of a part begin in an array's C order, and how long each is, in items."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    split = _split_dims(box, shape)
    dim = split[-1] if split else 0
    begins = [np.arange(*span) * stride for span, stride in zip(box, strides, strict=True)]
    starts = reduce(np.add.outer, begins[:dim], np.zeros((), np.int64)).reshape(-1)
    first = box[dim][0] * strides[dim] if box else 0
    return starts + first, math.prod(lengths(box[dim:]))


def _split_dims(box: Box, shape: Sequence[int]) -> list[int]:
    return [dim for dim, n in enumerate(lengths(box)) if n < shape[dim]]


# ------------------------------------------------------------------ what is moved at once


def _blocks(
    shape: Sequence[int], pieces: Iterable[Piece]
) -> Iterator[tuple[Box, list[tuple[Any, np.ndarray]]]]:
    """Cuts pieces, neighbours joined, into blocks: with each, the parts that it consists of and
    their places in it."""
    for dim, row in _neighbours(shape, pieces):
        first, last = row[0], row[-1]
        box = list(first.box)
        if len(row) > 1:
            box[dim] = first.box[dim][0], last.box[dim][1]
        for block in _cut(tuple(box), BLOCK // first.items.itemsize):
            yield block, [part for piece in row if (part := _part(piece, block)) is not None]


def _neighbours(shape: Sequence[int], pieces: Iterable[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """Groups pieces that lie in short runs with those that go on where they end, and says along
    which dim; every other piece is alone."""
    rows: defaultdict[Any, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if not piece.items.size:
            continue
        split = _split_dims(piece.box, shape)
        dim = split[-1] if split else 0
        run = math.prod(lengths(piece.box[dim:])) * piece.items.itemsize
        if split and run < _SHORT:
            rows[dim, piece.box[:dim]].append(piece)
        else:
            yield dim, [piece]
    for (dim, _), row in rows.items():
        row.sort(key=lambda piece: piece.box[dim])
        group = row[:1]
        for piece in row[1:]:
            if piece.box[dim][0] != group[-1].box[dim][1]:
                yield dim, group
                group = []
            group.append(piece)
        yield dim, group


def _cut(box: Box, most: int) -> Iterator[Box]:
    """Cuts a part of an array into smaller ones of at most `most` items, in C order."""
    inner = [math.prod(lengths(box[dim + 1 :])) for dim in range(len(box))]
    dim = next((dim for dim, items in enumerate(inner) if items <= most), None)
    if dim is None:
        yield box
        return
    step = max(1, most // max(1, inner[dim]))
    start, stop = box[dim]
    for lead in itertools.product(*(range(*span) for span in box[:dim])):
        for i in range(start, stop, step):
            yield (*((j, j + 1) for j in lead), (i, min(i + step, stop)), *box[dim + 1 :])


def _part(piece: Piece, block: Box) -> tuple[Any, np.ndarray] | None:
    """What a piece has of a block, and its place there."""
    both = tuple(
        (max(start, first), min(stop, last))
        for (start, stop), (first, last) in zip(piece.box, block, strict=True)
    )
    if any(start >= stop for start, stop in both):
        return None
    # The dots keep an array of one item an array.
    return within(both, block), piece.items[(*within(both, piece.box), ...)]


def _joined(block: Box, parts: list[tuple[Any, np.ndarray]]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0][1]
    data = np.empty(lengths(block), parts[0][1].dtype)
    for place, part in parts:
        data[place] = part
    return data

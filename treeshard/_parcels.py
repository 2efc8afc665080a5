"""Which parts of an array go from which process to which, and through which box and shard."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

CHUNK = 2**21  # bytes; several of them are in use at a time

Box = tuple[tuple[int, int], ...]  # where a part begins and ends in each dim
Pair = tuple[int, int]  # sender and receiver


class Parcel(NamedTuple):
    """A part of an array, on its way from one process to another or within one.

    Attributes:
        pair: Who has it and who wants it.
        held: The shard that it is cut from.
        wanted: The box that it goes into.
        part: What of the array it is; no more than a chunk, if it travels.
        nbytes: Its size.
    """

    pair: Pair
    held: Box
    wanted: Box
    part: Box
    nbytes: int


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """A shard's index as a box."""
    return tuple(i.indices(length)[:2] for i, length in zip(index, shape, strict=True))


def route(x: jax.Array, wanted: Iterable[tuple[int, Box]]) -> tuple[Parcel, ...]:
    return _parcels(x.sharding, x.shape, np.dtype(x.dtype).itemsize, tuple(wanted))


@lru_cache(maxsize=4096)
def _parcels(
    sharding: Sharding, shape: tuple[int, ...], itemsize: int, wanted: tuple[tuple[int, Box], ...]
) -> tuple[Parcel, ...]:
    """How the wanted boxes are put together; the same on every process."""
    holders: dict[Box, dict[int, None]] = defaultdict(dict)
    for device, index in sharding.devices_indices_map(shape).items():
        holders[box_of(index, shape)][device.process_index] = None
    found = []
    for receiver, box in wanted:
        for turn, (held, among) in enumerate(holders.items()):
            part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, box, strict=True))
            if any(start >= stop for start, stop in part):
                continue
            here = receiver in among
            sender = receiver if here else [*among][(receiver + turn) % len(among)]
            for piece in [part] if here else _pieces(part, itemsize):
                nbytes = itemsize * math.prod(lengths(piece))
                found.append(Parcel((sender, receiver), held, box, piece, nbytes))
    return tuple(found)


def _pieces(part: Box, itemsize: int) -> list[Box]:
    """A part cut into pieces of at most a chunk: as many rows as fit, or pieces of each row."""
    if not part:
        return [part]
    (start, stop), rest = part[0], part[1:]
    row = itemsize * math.prod(lengths(rest))
    if row > CHUNK:
        inside = _pieces(rest, itemsize)
        return [((i, i + 1), *piece) for i in range(start, stop) for piece in inside]
    rows = CHUNK // row
    return [((i, min(i + rows, stop)), *rest) for i in range(start, stop, rows)]


def lengths(box: Box) -> tuple[int, ...]:
    """How long a box is in each dim."""
    return tuple(stop - start for start, stop in box)


def within(part: Box, box: Box) -> tuple[slice, ...]:
    """Where in a box a part of it lies."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))

"""Divides the transfer of an array between processes into parcels."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

CHUNK = 2**21  # bytes of one parcel; several are in flight at a time

Box = tuple[tuple[int, int], ...]  # a region of an array: (start, stop) per dim
Pair = tuple[int, int]  # (sender, receiver), by process index


class Parcel(NamedTuple):
    """A region of an array that one process sends to another, or copies within itself.

    Attributes:
        pair: The sending and the receiving process.
        held: The box of the shard that contains it on the sender.
        wanted: The box of the receiver that contains it.
        part: The box of the parcel itself; at most `CHUNK` bytes if sender and receiver differ.
        nbytes: Its size in bytes.
    """

    pair: Pair
    held: Box
    wanted: Box
    part: Box
    nbytes: int


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """The index of a shard, as a box."""
    return tuple(i.indices(length)[:2] for i, length in zip(index, shape, strict=True))


def route(x: jax.Array, wanted: Iterable[tuple[int, Box]]) -> tuple[Parcel, ...]:
    """The parcels that bring each process in `wanted` its box; the same on every process."""
    return _parcels(x.sharding, x.shape, np.dtype(x.dtype).itemsize, tuple(wanted))


@lru_cache(maxsize=4096)
def _parcels(
    sharding: Sharding, shape: tuple[int, ...], itemsize: int, wanted: tuple[tuple[int, Box], ...]
) -> tuple[Parcel, ...]:
    holders: dict[Box, dict[int, None]] = defaultdict(dict)
    for device, index in sharding.devices_indices_map(shape).items():
        holders[box_of(index, shape)][device.process_index] = None
    parcels = []
    for receiver, box in wanted:
        for turn, (held, among) in enumerate(holders.items()):
            part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, box, strict=True))
            if any(start >= stop for start, stop in part):
                continue
            here = receiver in among
            sender = receiver if here else [*among][(receiver + turn) % len(among)]
            for piece in [part] if here else _pieces(part, itemsize):
                nbytes = itemsize * math.prod(lengths(piece))
                parcels.append(Parcel((sender, receiver), held, box, piece, nbytes))
    return tuple(parcels)


def _pieces(part: Box, itemsize: int) -> list[Box]:
    """Cuts a box into boxes of at most `CHUNK` bytes: as many rows as fit, or pieces of a row."""
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
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def within(part: Box, box: Box) -> tuple[slice, ...]:
    """The index of `part` relative to `box`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))

"""Parts of arrays, from the processes that hold them to those that want them.

The bytes travel over the network of the devices, between one device of each process, in chunks
of one size. So whatever the arrays are, one program is compiled for each distance between sender
and receiver, and beside what was asked for, there is memory for a few chunks.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from treeshard._host import to_read
from treeshard._parcels import CHUNK, Box, Pair, Parcel, box_of, lengths, route, within


def deliver(
    arrays: Sequence[jax.Array],
    wanted: Sequence[Iterable[tuple[int, Box]]],
    among: Sequence[int],
    before: Callable[[int], None] = lambda place: None,
) -> Iterator[dict[Box, np.ndarray]]:
    """Brings parts of arrays to the processes that want them, array by array.

    All of `among` must call it alike, and go through all that it yields.

    Args:
        arrays: Lie on any devices; no typed keys, which have no bytes (send their data).
        wanted: For each array, which process wants which boxes of it.
        among: The processes that hold something of the arrays, or want it; ascending.
        before: Called with an array's position before anything travels for it, if it does.

    Yields:
        For each array the boxes that this process wants.
    """
    post = _Post(arrays, [route(x, boxes) for x, boxes in zip(arrays, wanted, strict=True)], among)
    for place, x in enumerate(arrays):
        if post.begin(place):
            before(place)
        boxes = {box: np.empty(lengths(box), x.dtype) for r, box in wanted[place] if r == post.me}
        for parcel, data in post.received(place):
            boxes[parcel.wanted][within(parcel.part, parcel.wanted)] = data
        yield boxes


# ------------------------------------------------------------------ the way they go


class _Post:
    """What goes from each process to each other: for each pair one stream of bytes."""

    def __init__(
        self, arrays: Sequence[jax.Array], routes: Sequence[Sequence[Parcel]], among: Sequence[int]
    ):
        self.me = jax.process_index()
        self.arrays, self.routes = arrays, routes
        self.shards = lru_cache(maxsize=2)(lambda place: _shards(arrays[place]))
        total = Counter[Pair]()
        for parcels in routes:
            _add(parcels, total)
        # Pairs of one distance send at once: in these no process sends or receives twice.
        self.rounds: dict[int, list[Pair]] = defaultdict(list)
        for sender, receiver in total:
            distance = (among.index(receiver) - among.index(sender)) % len(among)
            self.rounds[distance].append((sender, receiver))
        self.size = _chunk_size(max(total.values(), default=0))
        self.devices = _devices(arrays, among) if total else ()
        self.outgoing = {r: _chunks(self._bytes_for(r), self.size) for r in among}
        self.arrived = {s: _Stream() for s in among}
        self.nothing = _aligned(self.size)  # what those send who have nothing to send
        self.due = Counter[Pair]()  # of each stream, until the array is through whose turn it is
        self.gone = Counter[Pair]()  # of each stream, in whole chunks

    def begin(self, place: int) -> bool:
        """Comes to the next array, and says whether anything must still travel for it."""
        _add(self.routes[place], self.due)
        return any(self.due[pair] > self.gone[pair] for pair in self.due)

    def received(self, place: int) -> Iterator[tuple[Parcel, np.ndarray]]:
        """What this process wants of the array: what lies here, then the rest as it comes in."""
        expected = defaultdict(deque[Parcel])
        for parcel in self.routes[place]:
            if parcel.pair == (self.me, self.me):
                yield parcel, self._cut(place, parcel)
            elif parcel.pair[1] == self.me:
                expected[parcel.pair[0]].append(parcel)
        yield from self._complete(place, expected)  # by what came with the last array
        for pairs in self.rounds.values():
            while owing := [pair for pair in pairs if self.due[pair] > self.gone[pair]]:
                self._send(pairs, owing)
                yield from self._complete(place, expected)

    def _send(self, pairs: Sequence[Pair], owing: Sequence[Pair]) -> None:
        """One chunk for each pair that owes some."""
        mine = [next(self.outgoing[r]) for s, r in owing if s == self.me]
        came = _permuted(mine[0] if mine else self.nothing, self.devices, tuple(pairs))
        for sender, receiver in owing:
            self.gone[sender, receiver] += self.size
            if receiver == self.me:
                self.arrived[sender].append(came)

    def _complete(
        self, place: int, expected: Mapping[int, deque[Parcel]]
    ) -> Iterator[tuple[Parcel, np.ndarray]]:
        for sender, parcels in expected.items():
            while parcels and parcels[0].nbytes <= self.arrived[sender].nbytes:
                parcel = parcels.popleft()
                data = self.arrived[sender].take(parcel.nbytes).view(self.arrays[place].dtype)
                yield parcel, data.reshape(lengths(parcel.part))

    def _bytes_for(self, receiver: int) -> Iterator[np.ndarray]:
        for place, parcels in enumerate(self.routes):
            for parcel in parcels:
                if parcel.pair == (self.me, receiver):
                    data = np.ascontiguousarray(self._cut(place, parcel))
                    yield data.reshape(-1).view(np.uint8)

    def _cut(self, place: int, parcel: Parcel) -> np.ndarray:
        return np.asarray(self.shards(place)[parcel.held])[within(parcel.part, parcel.held)]


class _Stream:
    """Bytes that came in chunks and are taken in other lengths."""

    def __init__(self):
        self.chunks: deque[np.ndarray] = deque()
        self.nbytes = 0

    def append(self, chunk: np.ndarray) -> None:
        self.chunks.append(chunk)
        self.nbytes += chunk.size

    def take(self, nbytes: int) -> np.ndarray:
        self.nbytes -= nbytes
        parts = []
        while nbytes:
            first = self.chunks.popleft()
            parts.append(first[:nbytes])
            if first.size > nbytes:
                self.chunks.appendleft(first[nbytes:])
            nbytes -= parts[-1].size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _chunks(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The bytes of all pieces in chunks of one size, each in the memory of the one before.

    Fresh memory for each would be taken and given back by many threads, and pile up.
    """
    chunk, filled = _aligned(size), 0
    for piece in pieces:
        while piece.size:
            fits = piece[: size - filled]
            chunk[filled : filled + fits.size] = fits
            piece, filled = piece[fits.size :], filled + fits.size
            if filled == size:
                yield chunk
                filled = 0
    if filled:
        yield chunk


def _aligned(size: int) -> np.ndarray:
    """Zeros that the CPU platform takes as they lie, instead of a copy."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _chunk_size(longest: int) -> int:
    """A few sizes only, since each is a program of its own."""
    return next(size for size in (2**16, 2**19, CHUNK) if size >= min(longest, CHUNK))


def _add(parcels: Iterable[Parcel], total: Counter[Pair]) -> None:
    for parcel in parcels:
        if parcel.pair[0] != parcel.pair[1]:
            total[parcel.pair] += parcel.nbytes


def _shards(x: jax.Array) -> dict[Box, jax.Array]:
    """The shards that lie here, one of each."""
    return {box_of(piece.index, x.shape): piece.data for piece in to_read(x).addressable_shards}


# ------------------------------------------------------------------ between devices


def _devices(arrays: Sequence[jax.Array], among: Sequence[int]) -> tuple[Any, ...]:
    """One device of each process, of the kind that the arrays lie on."""
    platform = next(iter(arrays[0].sharding.device_set)).platform
    first = {}
    for device in jax.devices(platform):
        first.setdefault(device.process_index, device)
    return tuple(first[process] for process in among)


def _permuted(mine: np.ndarray, devices: Sequence[Any], pairs: tuple[Pair, ...]) -> np.ndarray:
    """Sends a chunk along the pairs, and returns the one that came here (else zeros).

    When it returns, the chunk is gone, and its memory may be used again.
    """
    mesh = _mesh(tuple(devices))
    here = next(d for d in devices if d.process_index == jax.process_index())
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    chunks = jax.make_array_from_single_device_arrays(
        (len(devices) * mine.size,), sharding, [jax.device_put(mine, here)]
    )
    with jax.set_mesh(mesh):  # whatever mesh is in force would not be this one
        moved = _program(mesh, pairs)(chunks)
    return np.asarray(moved.addressable_shards[0].data)


@cache
def _mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), ("process",), axis_types=(AxisType.Auto,))


@cache
def _program(mesh: Mesh, pairs: tuple[Pair, ...]) -> Callable[[jax.Array], jax.Array]:
    places = {device.process_index: i for i, device in enumerate(mesh.devices.flat)}
    ways = [(places[sender], places[receiver]) for sender, receiver in pairs]
    spec = PartitionSpec("process")
    send = jax.shard_map(
        lambda chunk: jax.lax.ppermute(chunk, "process", ways),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    return jax.jit(send)

"""Sends parts of arrays from the processes that hold them to those that need them.

Each part is cut into chunks, and the bytes of the chunks from one process to another form a stream.
Streams travel over the devices' network, between one device of each process, in packets of one
size. So one program is compiled for each distance between sender and receiver, whatever the
arrays are, and the transfer needs memory for a few packets besides the result.

A jitted identity with `out_shardings` needs meshes of the same devices, one program for each set of
shapes, and memory for a full copy where it replicates. The coordination service that carries our
messages is one process on one host: it is for kilobytes.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from treeshard._core.arrays import (
    Region,
    intersect,
    processes_by_shard,
    region_of,
    region_shape,
    relative_slices,
    to_read,
)

CHUNK_BYTES = 2**21  # of one chunk or packet at most; several are in flight at a time
Pair = tuple[int, int]  # (sender, receiver), by process index


def deliver(
    arrays: Sequence[jax.Array],
    wanted: Sequence[Iterable[tuple[int, Region]]],
    among: Sequence[int],
    turn: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[dict[Region, np.ndarray]]:
    """Delivers parts of arrays to the processes that need them; yields this one's, array by array.

    All processes in `among`, ascending, must make the same call, and exhaust the iterator. Of typed
    keys, send the data. `turn` is the context in which the data of an array travels, by its index.
    """
    # Every process computes the routes of all: nobody has to be told what comes, or when.
    routes = [
        _chunks_of(x.sharding, x.shape, np.dtype(x.dtype).itemsize, tuple(regions))
        for x, regions in zip(arrays, wanted, strict=True)
    ]
    streams = _Streams(arrays, routes, among)
    for i, x in enumerate(arrays):
        with turn(i) if streams.begin(i) else nullcontext():
            regions = {
                region: np.empty(region_shape(region), x.dtype)
                for r, region in wanted[i]
                if r == streams.process
            }
            for chunk, data in streams.receive(i):
                regions[chunk.wanted][relative_slices(chunk.part, chunk.wanted)] = data
        yield regions


# ------------------------------------------------------------------ chunks


class Chunk(NamedTuple):
    """A region of an array that goes to another process, of at most `CHUNK_BYTES`, or stays
    here."""

    pair: Pair
    held: Region  # of the shard that contains it on the sender
    wanted: Region  # of the receiver that contains it
    part: Region  # of the chunk itself
    nbytes: int


@lru_cache(maxsize=4096)
def _chunks_of(
    sharding: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    wanted: tuple[tuple[int, Region], ...],
) -> tuple[Chunk, ...]:
    """The chunks that bring each process in `wanted` its region; the same on every process."""
    shards = processes_by_shard(sharding, shape)
    chunks = []
    for receiver, region in wanted:
        for turn, (held, among) in enumerate(shards.items()):
            if (part := intersect(held, region)) is None:
                continue
            sender, pieces = receiver, [part]
            if receiver not in among:
                # Those that hold a shard take turns, so that no process sends all of it.
                sender = [*among][(receiver + turn) % len(among)]
                pieces = _pieces(part, itemsize)
            for piece in pieces:
                nbytes = itemsize * math.prod(region_shape(piece))
                chunks.append(Chunk((sender, receiver), held, region, piece, nbytes))
    return tuple(chunks)


def _pieces(part: Region, itemsize: int) -> list[Region]:
    """Cuts a region into regions of at most `CHUNK_BYTES`: as many rows as fit, or parts of one."""
    if not part:
        return [part]
    (start, stop), rest = part[0], part[1:]
    row = itemsize * math.prod(region_shape(rest))
    if row > CHUNK_BYTES:
        inside = _pieces(rest, itemsize)
        return [((i, i + 1), *piece) for i in range(start, stop) for piece in inside]
    rows = CHUNK_BYTES // row
    return [((i, min(i + rows, stop)), *rest) for i in range(start, stop, rows)]


# ------------------------------------------------------------------ streams between processes


class _Streams:
    """One stream of bytes for each pair of processes, sent in packets of one size."""

    def __init__(
        self, arrays: Sequence[jax.Array], routes: Sequence[Sequence[Chunk]], among: Sequence[int]
    ):
        self.process = jax.process_index()
        self.arrays, self.routes = arrays, routes
        self.shards = lru_cache(maxsize=2)(lambda i: _local_shards(arrays[i]))
        total = Counter[Pair]()
        for chunks in routes:
            _add_bytes(chunks, total)
        # A `ppermute` takes each process once as a sender and once as a receiver. So pairs of one
        # distance send in one round.
        self.rounds: dict[int, list[Pair]] = defaultdict(list)
        for sender, receiver in total:
            distance = (among.index(receiver) - among.index(sender)) % len(among)
            self.rounds[distance].append((sender, receiver))
        self.packet_size = _packet_size(max(total.values(), default=0))
        self.devices = _device_of_each(arrays, among) if total else ()
        self.outgoing = {r: _packets(self._bytes_for(r), self.packet_size) for r in among}
        self.incoming = {s: np.empty(0, np.uint8) for s in among}
        self.padding = _allocate_aligned(
            self.packet_size
        )  # sent by processes that have nothing to send
        self.needed = Counter[Pair]()  # bytes of each stream that the arrays so far need
        self.sent = Counter[Pair]()  # bytes of each stream that were sent, in full packets

    def begin(self, i: int) -> bool:
        """Starts the next array, and returns whether any of its data still has to travel."""
        _add_bytes(self.routes[i], self.needed)
        return any(self.needed[pair] > self.sent[pair] for pair in self.needed)

    def receive(self, i: int) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Yields what this process needs of an array: local parts, then the rest as it arrives."""
        expected = defaultdict(deque[Chunk])
        for chunk in self.routes[i]:
            if chunk.pair == (self.process, self.process):
                yield chunk, self._read(i, chunk)
            elif chunk.pair[1] == self.process:
                expected[chunk.pair[0]].append(chunk)
        yield from self._complete(i, expected)  # from packets that arrived with the last array
        for pairs in self.rounds.values():
            while behind := [pair for pair in pairs if self.needed[pair] > self.sent[pair]]:
                self._send(pairs, behind)
                yield from self._complete(i, expected)

    def _send(self, pairs: Sequence[Pair], behind: Sequence[Pair]) -> None:
        """Sends one packet for each pair that is behind."""
        packet = self.padding
        for sender, receiver in behind:
            if sender == self.process:
                packet = next(self.outgoing[receiver])
        # All processes run the program, whether they have data or not: they would wait in it.
        packet = _permute(packet, self.devices, tuple(pairs))
        for sender, receiver in behind:
            self.sent[sender, receiver] += self.packet_size
            if receiver == self.process:
                # What is left of the packets before is less than a chunk.
                self.incoming[sender] = np.concatenate([self.incoming[sender], packet])

    def _complete(
        self, i: int, expected: Mapping[int, deque[Chunk]]
    ) -> Iterator[tuple[Chunk, np.ndarray]]:
        for sender, chunks in expected.items():
            while chunks and chunks[0].nbytes <= self.incoming[sender].nbytes:
                chunk = chunks.popleft()
                data, self.incoming[sender] = np.split(self.incoming[sender], [chunk.nbytes])
                yield chunk, data.view(self.arrays[i].dtype).reshape(region_shape(chunk.part))

    def _bytes_for(self, receiver: int) -> Iterator[np.ndarray]:
        for i, chunks in enumerate(self.routes):
            for chunk in chunks:
                if chunk.pair == (self.process, receiver):
                    data = np.ascontiguousarray(self._read(i, chunk))
                    yield data.reshape(-1).view(np.uint8)

    def _read(self, i: int, chunk: Chunk) -> np.ndarray:
        return np.asarray(self.shards(i)[chunk.held])[relative_slices(chunk.part, chunk.held)]


def _packets(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yields the bytes of all pieces in packets of one size, each in the memory of the last.

    Fresh memory for each packet would be allocated and freed by many threads, and pile up.
    """
    packet, filled = _allocate_aligned(size), 0
    for piece in pieces:
        while piece.size:
            head = piece[: size - filled]
            packet[filled : filled + head.size] = head
            piece, filled = piece[head.size :], filled + head.size
            if filled == size:
                yield packet
                filled = 0
    if filled:
        yield packet


def _allocate_aligned(size: int) -> np.ndarray:
    """Zeros, aligned so that the CPU platform uses the memory in place instead of copying it."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _packet_size(longest_stream: int) -> int:
    """One of a few sizes, since each size is a program of its own."""
    wanted = min(longest_stream, CHUNK_BYTES)
    return next(size for size in (2**16, 2**19, CHUNK_BYTES) if size >= wanted)


def _add_bytes(chunks: Iterable[Chunk], total: Counter[Pair]) -> None:
    for chunk in chunks:
        if chunk.pair[0] != chunk.pair[1]:
            total[chunk.pair] += chunk.nbytes


def _local_shards(x: jax.Array) -> dict[Region, jax.Array]:
    """The local shards of an array, one copy of each."""
    return {region_of(piece.index, x.shape): piece.data for piece in to_read(x).addressable_shards}


# ------------------------------------------------------------------ between devices


def _device_of_each(arrays: Sequence[jax.Array], among: Sequence[int]) -> tuple[Any, ...]:
    """One device of each process, on the platform of the arrays."""
    platform = next(iter(arrays[0].sharding.device_set)).platform
    first = {}
    for device in jax.devices(platform):
        first.setdefault(device.process_index, device)
    return tuple(first[process] for process in among)


def _permute(packet: np.ndarray, devices: Sequence[Any], pairs: tuple[Pair, ...]) -> np.ndarray:
    """Sends a packet along the pairs, and returns the one received here (zeros if none).

    On return the packet was sent, so its memory may be reused.
    """
    mesh = _process_mesh(tuple(devices))
    local_device = next(d for d in devices if d.process_index == jax.process_index())
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    packets = jax.make_array_from_single_device_arrays(
        (len(devices) * packet.size,), sharding, [jax.device_put(packet, local_device)]
    )
    with jax.set_mesh(mesh):  # another mesh may be in force
        received = _permute_program(mesh, pairs)(packets)
    # Reading the result waits for the program, and on CPUs it is a view of the device's memory.
    return np.asarray(received.addressable_shards[0].data)


@cache
def _process_mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), ("process",), axis_types=(AxisType.Auto,))


@cache
def _permute_program(mesh: Mesh, pairs: tuple[Pair, ...]) -> Callable[[jax.Array], jax.Array]:
    positions = {device.process_index: i for i, device in enumerate(mesh.devices.flat)}
    permutation = [(positions[sender], positions[receiver]) for sender, receiver in pairs]
    spec = PartitionSpec("process")
    send = jax.shard_map(
        lambda packet: jax.lax.ppermute(packet, "process", permutation),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    return jax.jit(send)

"""Sends arrays, or parts of arrays, between processes.

Each process sends its bytes as streams of packets of equal size, over the devices' network, between
one device per process. The packets have only a few sizes, so only a few programs are compiled,
whatever the shapes of the arrays. Besides the result, a transfer needs memory for a few packets.

1. `deliver` brings each process its parts, in one stream per pair of processes. Pairs with the same
   distance between sender and receiver share one `ppermute`, so each distance compiles one program.
   If there are more than a few distances, one `all_to_all` sends a packet for every pair.
2. `collect` brings full arrays to one process or to all. Few processes use `deliver`. Among many
   processes, each has one stream, and one program all-gathers a packet of each stream. Even if a
   single process needs the arrays, no link of a ring carries more bytes than that process receives.

A jitted identity with `out_shardings` would need meshes with the same devices, one program for each
set of shapes, and memory for a full copy of replicated arrays. The coordination service that
carries our messages is a single process on one host, and is meant for kilobytes.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import product
from operator import itemgetter
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
    slices_of,
    to_read,
)

CHUNK_BYTES = 2**21  # the most that one process receives at a time; several are in flight
MAX_DISTANCES = 4  # between senders and receivers; each distance compiles a program
Pair = tuple[int, int]  # (sender, receiver), by process index
Range = tuple[int, int]  # (start, stop), in a dim


def collect(
    arrays: Sequence[jax.Array],
    receivers: Sequence[int],
    among: Sequence[int],
    turn: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[list[np.ndarray]]:
    """Brings full arrays to the receivers.

    Yields each array in a list on receivers, and an empty list on other processes. The list has the
    only reference to the array.

    All processes in `among`, ascending, must make the same call, and exhaust the iterator. For
    typed keys, pass the key data. `turn(i)` is the context in which array `i` travels.
    """
    if len(among) > MAX_DISTANCES + 1:
        yield from _gather_all(arrays, receivers, among, turn)
        return
    full = [region_of((slice(None),) * x.ndim, x.shape) for x in arrays]
    wanted = [[(receiver, region) for receiver in receivers] for region in full]
    for regions in deliver(arrays, wanted, among, turn):
        received = [regions.popitem()[1]] if regions else []
        yield received


def _gather_all(
    arrays: Sequence[jax.Array],
    receivers: Sequence[int],
    among: Sequence[int],
    turn: Callable[[int], AbstractContextManager[Any]],
) -> Iterator[list[np.ndarray]]:
    """As `collect`, by an all-gather: each process publishes the shards that it must send."""
    me, position = jax.process_index(), {process: i for i, process in enumerate(among)}
    # Every process computes what all processes publish, so they exchange no schedule.
    published = [_find_publishers(x.sharding, x.shape, tuple(receivers)) for x in arrays]
    total = Counter[int]()
    for x, regions in zip(arrays, published, strict=True):
        total.update(_bytes_by_sender(x, regions))
    size = _packet_size(max(total.values(), default=0), among)
    devices = _device_of_each(arrays, among) if total else ()
    outgoing = _packets(_bytes_to_publish(arrays, published, size), size)
    padding = _allocate_aligned(size)  # sent by processes without data
    # Bytes of each stream that the arrays so far need, and that were sent in full packets.
    needed, sent = Counter[int](), Counter[int]()
    incoming = dict.fromkeys(total, np.empty(0, np.uint8))
    for i, (x, regions) in enumerate(zip(arrays, published, strict=True)):
        needed.update(_bytes_by_sender(x, regions))
        full = _with_local_shards(x) if me in receivers else None
        expected = {sender: _Pieces(x, shards, size) for sender, shards in regions.items()}
        behind = _behind(needed, sent)
        with turn(i) if behind else nullcontext():
            while True:
                if full is not None:  # also from packets that arrived with the last array
                    for sender, pieces in expected.items():
                        incoming[sender] = pieces.write(incoming[sender], full)
                if not behind:
                    break
                packets = _gather_packets(next(outgoing) if me in behind else padding, devices)
                for sender in behind:
                    sent[sender] += size
                    if full is not None:
                        packet = packets[position[sender]]
                        incoming[sender] = np.concatenate([incoming[sender], packet])
                behind = _behind(needed, sent)
        received = [] if full is None else [full]
        full = None
        yield received


def deliver(
    arrays: Sequence[jax.Array],
    wanted: Sequence[Iterable[tuple[int, Region]]],
    among: Sequence[int],
    turn: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[dict[Region, np.ndarray]]:
    """Delivers parts of arrays to the processes that need them.

    Yields, for each array, the parts that this process receives.

    All processes in `among`, ascending, must make the same call, and exhaust the iterator. For
    typed keys, pass the key data. `turn(i)` is the context in which array `i` travels.
    """
    # Every process computes the routes of all processes, so they exchange no schedule.
    limit = _packet_limit(CHUNK_BYTES, among) if len(among) > MAX_DISTANCES + 1 else CHUNK_BYTES
    routes = [
        _chunks_of(x.sharding, x.shape, np.dtype(x.dtype).itemsize, tuple(regions), limit)
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


# ------------------------------------------------------------------ full arrays


@lru_cache(maxsize=4096)
def _find_publishers(
    sharding: Sharding, shape: tuple[int, ...], receivers: tuple[int, ...]
) -> dict[int, list[Region]]:
    """The shards that some receiver lacks, by the process that publishes them."""
    published = defaultdict[int, list[Region]](list)
    for turn, (region, holders) in enumerate(processes_by_shard(sharding, shape).items()):
        has_all = len(holders) >= len(receivers) and all(i in holders for i in receivers)
        if not has_all and math.prod(region_shape(region)):
            # The holders of a shard take turns, so that no process sends every shard.
            published[[*holders][turn % len(holders)]].append(region)
    return dict(published)


def _with_local_shards(x: jax.Array) -> np.ndarray:
    """A full array, without the shards of other processes."""
    full = np.empty(x.shape, x.dtype)
    for region, shard in _local_shards(x).items():
        full[slices_of(region)] = np.asarray(shard)
    return full


def _bytes_by_sender(x: jax.Array, regions: Mapping[int, Iterable[Region]]) -> dict[int, int]:
    itemsize = np.dtype(x.dtype).itemsize
    return {
        sender: itemsize * sum(math.prod(region_shape(region)) for region in of_sender)
        for sender, of_sender in regions.items()
    }


def _behind(needed: Counter[int], sent: Counter[int]) -> list[int]:
    """The senders whose sent bytes do not yet cover the arrays so far."""
    return [sender for sender in needed if needed[sender] > sent[sender]]


def _bytes_to_publish(
    arrays: Sequence[jax.Array], published: Sequence[Mapping[int, list[Region]]], size: int
) -> Iterator[np.ndarray]:
    for x, regions in zip(arrays, published, strict=True):
        own = regions.get(jax.process_index(), [])
        shards = _local_shards(x) if own else {}
        for region in own:
            shard = np.asarray(shards[region])
            for piece in _pieces(region, shard.itemsize, size):
                data = np.ascontiguousarray(shard[relative_slices(piece, region)])
                yield data.reshape(-1).view(np.uint8)


class _Pieces:
    """The pieces of an array that one sender sends, in the order of its stream."""

    def __init__(self, x: jax.Array, regions: Iterable[Region], size: int) -> None:
        self._dtype = np.dtype(x.dtype)
        self._rest = (
            piece for region in regions for piece in _pieces(region, self._dtype.itemsize, size)
        )
        self._next = next(self._rest, None)

    def write(self, data: np.ndarray, full: np.ndarray) -> np.ndarray:
        """Writes the complete pieces to `full`; returns the remaining bytes."""
        while self._next is not None:
            shape = region_shape(self._next)
            nbytes = self._dtype.itemsize * math.prod(shape)
            if nbytes > data.size:
                break
            full[slices_of(self._next)] = data[:nbytes].view(self._dtype).reshape(shape)
            data, self._next = data[nbytes:], next(self._rest, None)
        return data


# ------------------------------------------------------------------ chunks


class Chunk(NamedTuple):
    """A region of an array. It stays on its process, or goes to another and has a limited size."""

    pair: Pair
    held: Region  # the sender's shard that contains the chunk
    wanted: Region  # the receiver's region that contains the chunk
    part: Region  # the chunk itself
    nbytes: int


@lru_cache(maxsize=4096)
def _chunks_of(
    sharding: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    wanted: tuple[tuple[int, Region], ...],
    limit: int,
) -> tuple[Chunk, ...]:
    """The chunks that bring each process in `wanted` its region; the same on every process."""
    shards = processes_by_shard(sharding, shape)
    turns = {held: turn for turn, held in enumerate(shards)}
    # Shards form a grid. Its ranges in each dim find the shards that overlap a region, without a
    # search through all shards for each process.
    ranges = [sorted({held[dim] for held in shards}) for dim in range(len(shape))]
    chunks = []
    for receiver, region in wanted:
        near = product(*map(_overlapping, ranges, region))
        for turn, held in sorted((turns[held], held) for held in near):
            among, part = shards[held], intersect(held, region)
            assert part is not None
            sender, pieces = receiver, [part]
            if receiver not in among:
                # The holders of a shard take turns, so that no process sends every shard.
                sender = [*among][(receiver + turn) % len(among)]
                pieces = [*_pieces(part, itemsize, limit)]
            for piece in pieces:
                nbytes = itemsize * math.prod(region_shape(piece))
                chunks.append(Chunk((sender, receiver), held, region, piece, nbytes))
    return tuple(chunks)


def _overlapping(ranges: Sequence[Range], wanted: Range) -> Sequence[Range]:
    """The ranges that overlap the wanted one; `ranges` are sorted and disjoint."""
    first = bisect_right(ranges, wanted[0], key=itemgetter(1))
    return ranges[first : bisect_left(ranges, wanted[1], lo=first, key=itemgetter(0))]


def _pieces(part: Region, itemsize: int, limit: int) -> Iterator[Region]:
    """Cuts a region into regions of at most `limit` bytes: several rows, or parts of a row."""
    if not part:
        yield part
        return
    (start, stop), rest = part[0], part[1:]
    row = itemsize * math.prod(region_shape(rest))
    if row > limit:
        for i in range(start, stop):
            yield from (((i, i + 1), *piece) for piece in _pieces(rest, itemsize, limit))
        return
    rows = limit // row
    for i in range(start, stop, rows):
        yield (i, min(i + rows, stop)), *rest


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
        # In a `ppermute`, each process sends once and receives once. So the pairs of one distance
        # send in one round.
        self.rounds: dict[int, list[Pair]] = defaultdict(list)
        position = {process: i for i, process in enumerate(among)}
        for sender, receiver in total:
            distance = (position[receiver] - position[sender]) % len(among)
            self.rounds[distance].append((sender, receiver))
        self.position = position
        self.sends_to_all = len(self.rounds) > MAX_DISTANCES
        if self.sends_to_all:
            self.rounds = {0: list(total)}
        longest = max(total.values(), default=0)
        self.packet_size = _packet_size(longest, among if self.sends_to_all else ())
        self.devices = _device_of_each(arrays, among) if total else ()
        self.outgoing = {r: _packets(self._bytes_for(r), self.packet_size) for r in among}
        self.incoming = {s: np.empty(0, np.uint8) for s in among}
        self.padding = _allocate_aligned(self.packet_size)  # sent by processes without data
        # Bytes of each stream that the arrays so far need, and that were sent in full packets.
        self.needed = Counter[Pair]()
        self.sent = Counter[Pair]()

    def begin(self, i: int) -> bool:
        """Starts the next array; returns whether any process still has to send data for it."""
        _add_bytes(self.routes[i], self.needed)
        return any(self.needed[pair] > self.sent[pair] for pair in self.needed)

    def receive(self, i: int) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Yields the chunks of an array for this process: local chunks first, others as they
        arrive."""
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
        own = {r: next(self.outgoing[r]) for s, r in behind if s == self.process}
        # All processes run the program, even without data, since each waits in it for the others.
        if self.sends_to_all:
            packets = _exchange_packets(
                [own.get(r, self.padding) for r in self.position], self.devices
            )
            received = {s: packets[i] for s, i in self.position.items()}
        else:
            packet = next(iter(own.values()), self.padding)
            packet = _permute(packet, self.devices, tuple(pairs))
            received = defaultdict[int, np.ndarray](lambda: packet)
        for sender, receiver in behind:
            self.sent[sender, receiver] += self.packet_size
            if receiver == self.process:
                # The rest of the packets before is smaller than a chunk.
                data = [self.incoming[sender], received[sender]]
                self.incoming[sender] = np.concatenate(data)

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
    """Yields the bytes of all pieces in packets of equal size, which share one buffer.

    Fresh buffers would be allocated and freed by many threads, and pile up.
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
    """Zeros, aligned so that the CPU platform uses the memory in place and does not copy it."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _packet_size(longest_stream: int, among: Sequence[int] = ()) -> int:
    """The size of a packet, chosen from a few, because each size compiles a program.

    If a process receives a packet from each process in `among`, packets are smaller.
    """
    sizes = [_packet_limit(size, among) for size in (2**16, 2**19, CHUNK_BYTES)]
    return next((size for size in sizes if size >= longest_stream), sizes[-1])


def _packet_limit(size: int, among: Sequence[int]) -> int:
    return max(size // max(len(among), 1), 2**10)


def _add_bytes(chunks: Iterable[Chunk], total: Counter[Pair]) -> None:
    for chunk in chunks:
        if chunk.pair[0] != chunk.pair[1]:
            total[chunk.pair] += chunk.nbytes


def _local_shards(x: jax.Array) -> dict[Region, jax.Array]:
    """The distinct local shards of an array, by region."""
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
    """Sends a packet along the pairs; returns the packet that this process receives, or zeros.

    The packet is sent when the call returns, so its memory may be reused.
    """
    return _run(_permute_program(_process_mesh(tuple(devices)), pairs), packet, devices)


def _gather_packets(packet: np.ndarray, devices: Sequence[Any]) -> np.ndarray:
    """The packets of all processes, one in each row."""
    program = _gather_program(_process_mesh(tuple(devices)))
    return _run(program, packet, devices).reshape(len(devices), -1)


def _exchange_packets(packets: Sequence[np.ndarray], devices: Sequence[Any]) -> np.ndarray:
    """Sends a packet to each process; returns the received packets, one in each row."""
    program = _exchange_program(_process_mesh(tuple(devices)))
    return _run(program, np.concatenate(packets), devices).reshape(len(devices), -1)


def _run(
    program: Callable[[jax.Array], jax.Array], data: np.ndarray, devices: Sequence[Any]
) -> np.ndarray:
    """Runs a program with the data of each process, on one device per process.

    Returns the result of this process.
    """
    mesh = _process_mesh(tuple(devices))
    local_device = next(d for d in devices if d.process_index == jax.process_index())
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    given = jax.make_array_from_single_device_arrays(
        (len(devices) * data.size,), sharding, [jax.device_put(data, local_device)]
    )
    with jax.set_mesh(mesh):  # another mesh may be in force
        received = program(given)
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


@cache
def _gather_program(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda packets: packets, out_shardings=NamedSharding(mesh, PartitionSpec()))


@cache
def _exchange_program(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec("process")
    exchange = jax.shard_map(
        lambda packets: jax.lax.all_to_all(packets, "process", 0, 0, tiled=True),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    return jax.jit(exchange)

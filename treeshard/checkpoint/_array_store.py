"""The array store of a checkpoint: zarr arrays in an OCDBT database, by TensorStore.

A file per shard would make a million files of 20,000 leaves on 64 devices. A database has a few
files and one index. Processes that write to one database wait for each other, so each writes its
own, and `merge` then makes one index for the files of all; it copies no array. Orbax stores arrays
in the same way, and reads these.

The files are trusted, as Orbax and TensorStore trust them. What is compared before an array is read
is whether it is the one that the table of leaves describes.
"""

import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache, partial
from itertools import chain, groupby, product
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import numpy as np
import tensorstore
from etils import epath
from jax.sharding import Sharding

from treeshard._core.arrays import (
    Region,
    is_on_host,
    items_on_host,
    primary_shards,
    region_shape,
    regions_here,
    to_host,
    to_read,
)
from treeshard._core.memory import Meter, kept_by_allocator
from treeshard._core.processes import show_progress
from treeshard._core.text import dtype_name
from treeshard._disk.leaves import Shape
from treeshard._disk.to_devices import Part, Target, to_devices
from treeshard._disk.untrusted import check_memory
from treeshard.checkpoint._paths import ARRAYS, is_local
from treeshard.errors import CheckpointError, short

Arrays = Mapping[str, jax.Array | np.ndarray]

_SMALL = 2**20  # bytes
_NODES = "cache_pool#nodes"  # TensorStore's name of the cache for the nodes of the index
_NEW_DATABASE = {
    # Values up to this size are in the nodes of the index, and need no further read.
    "max_inline_value_bytes": 1024,
    # TensorStore's default is zstd. Most of what is in the nodes are small arrays of weights, which
    # hardly shrink.
    "compression": None,
}


def _context() -> Any:
    # `file_io_sync` would flush each file when it is written. `flush_tree` does that at the end.
    return tensorstore.Context({_NODES: {"total_bytes_limit": 10**8}, "file_io_sync": False})


def _database(path: epath.Path, process: int | None = None) -> dict[str, Any]:
    """TensorStore's name of the database, or of that of a process, until all are merged."""
    name = "" if process is None else f"ocdbt.process_{process}/"
    folder: Any = f"{path / ARRAYS}/{name}"
    if is_local(path):
        # As text it would be a URL, in which `%` and `?` have a meaning.
        folder = {"driver": "file", "path": folder}
    return {"driver": "ocdbt", "base": folder, "cache_pool": _NODES}


def written_by(path: epath.Path, process: int) -> epath.Path:
    """The directory in which a process writes."""
    return path / ARRAYS / f"ocdbt.process_{process}"


# ------------------------------------------------------------------ how an array is stored

# What TensorStore takes: dims of an array, and bytes of a key in an OCDBT database, which ends in
# the numbers of a chunk.
MOST_DIMS, LONGEST_KEY = 32, 2**16 - 1024

# The dtypes of zarr 3 in TensorStore, beyond numpy's own. All others have one byte, and are stored
# as that.
_STORED = {"bfloat16", "int4", "float8_e4m3fn", "float8_e5m2"}
_STORED |= {"float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"}


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which values are stored."""
    is_of_numpy = dtype.kind != "V"
    return dtype if is_of_numpy or dtype.name in _STORED else np.dtype("uint8")


_QUOTED_AS_IT_IS = re.compile("[A-Za-z0-9_~-][A-Za-z0-9_~/-]*")


def store_key(leaf: str) -> str:
    """The key of a leaf: `layers/0/w` becomes `layers.0.w`. Different paths have different keys."""
    if _QUOTED_AS_IT_IS.fullmatch(leaf):
        return leaf.replace("/", ".")
    parts = [quote(part, safe="").replace(".", "%2E") for part in leaf.split("/")]
    key = ".".join(parts)
    # In a key, `/` begins the name of a part of the array, and `.` and `..` may mean folders. No
    # other key begins with a bare `%`.
    return key if key.strip(".") else f"%{key}"


class StoredArray(NamedTuple):
    """An array as the table of leaves describes it, and where to read it to.

    `sharding` is `None` for a numpy array in host memory.
    """

    shape: Shape
    dtype: np.dtype
    chunk: Shape
    sharding: Sharding | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def chunk_shape(x: jax.Array | np.ndarray) -> Shape:
    """The shape of the chunks in which an array is stored: its shards, unless it is small."""
    if not isinstance(x, jax.Array) or _is_one_part(x):
        return x.shape
    return x.sharding.shard_shape(x.shape)


def _is_one_part(x: jax.Array | StoredArray) -> bool:
    """Whether this process writes and reads an array as one part, however it is sharded."""
    if x.sharding is None:
        return True
    return x.sharding.is_fully_addressable and x.nbytes < _SMALL


def _full(shape: Shape) -> Region:
    return tuple((0, length) for length in shape)


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


# ------------------------------------------------------------------ the values of the database

# An array is some values of the database: its description, and one for each chunk, its bytes in C
# order. TensorStore takes ten times as long to open an array as to write or read such a value, so
# arrays of small chunks, of which a tree may have 100,000, are written and read as values.

_DESCRIPTION = "zarr.json"


def _zarr(kvstore: Any, shape: Shape, dtype: str, chunk: Shape) -> dict[str, Any]:
    """TensorStore's specification of an array."""
    return {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": {
            "shape": shape,
            "data_type": dtype,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        },
        # By default a chunk of zeros is left out, and looks like one that was lost.
        "store_data_equal_to_fill_value": True,
    }


@lru_cache(maxsize=1024)
def _description(shape: Shape, dtype: str, chunk: Shape) -> bytes:
    """What TensorStore writes to describe an array."""
    spec = _zarr("memory://", shape, dtype, chunk)
    array: Any = tensorstore.open(spec, create=True, context=tensorstore.Context()).result()
    return array.kvstore[_DESCRIPTION]


def _chunk_key(region: Region, chunk: Shape) -> str:
    """Where zarr 3 puts the chunk that a region is in: `c/0/2` is the third of the first row, and
    `c` that of a scalar. Empty if the region is in several."""
    pairs = [*zip(region, chunk, strict=True)]
    if any(start // step != (stop - 1) // step for (start, stop), step in pairs):
        return ""
    return "/".join(["c", *(str(start // step) for (start, _), step in pairs)])


class _ReadValue:
    """A region of one chunk that is being read as a value; like a future of TensorStore."""

    def __init__(self, future: Any, x: StoredArray, region: Region, array: Callable[[], Any]):
        self._future, self._x, self._region, self._array = future, x, region, array

    def exception(self) -> Any:
        return self._future.exception()

    def result(self) -> np.ndarray:
        """The values in the region. Raises as TensorStore does for arrays."""
        found = None if self._future.exception() else self._future.result().value
        chunk = self._x.chunk
        if found is None or len(found) != _bytes_of(self._x, chunk):
            # It is missing or damaged: TensorStore says how.
            return _read_regions(self._array(), self._region).result()
        pairs = zip(self._region, chunk, strict=True)
        in_chunk = tuple(slice(start % n, start % n + stop - start) for (start, stop), n in pairs)
        return np.array(np.frombuffer(found, self._x.dtype).reshape(chunk)[in_chunk])


# ------------------------------------------------------------------ transfers


# The threads that TensorStore may start, which has two pools, and those that read checksums or
# write in the background.
_CORES = os.cpu_count() or 1
THREADS = max(4, _CORES) + _CORES + min(8, _CORES) + 2


class _Transfer(NamedTuple):
    """A region of an array to be read or written; `start` returns TensorStore's future of it.

    `nbytes` are what it takes in host memory meanwhile: the region, and when it is read, the chunks
    that it is in, which TensorStore has in memory too.
    """

    leaf: str
    region: Region
    nbytes: int
    start: Callable[[], Any]


def _in_turn(transfers: Iterable[_Transfer], most: int) -> Generator[tuple[_Transfer, Any]]:
    """Starts transfers of about `most` bytes at a time, and yields them in order with futures.

    None outlives the generator; TensorStore would cancel a write that nothing refers to.
    """
    started: deque[tuple[_Transfer, Any]] = deque()
    in_flight = 0
    try:
        for transfer in transfers:
            while started and in_flight + transfer.nbytes > most:
                in_flight -= started[0][0].nbytes
                yield started.popleft()  # no variable keeps what was read
            started.append((transfer, transfer.start()))
            in_flight += transfer.nbytes
        while started:
            yield started.popleft()
    finally:
        for _, future in started:
            future.exception()  # waits


# ------------------------------------------------------------------ writing

_BEING_WRITTEN = 2**27  # bytes that are being written at a time

Parts = list[tuple[Region, np.ndarray]]


class Copy(NamedTuple):
    """What this process stores of an array, in host memory: the first replicas of its shards."""

    shape: Shape
    dtype: np.dtype
    chunk: Shape
    parts: Parts


def memory_to_save(arrays: Arrays) -> int:
    """The host memory that `copies` and `write_arrays` take, and checksums meanwhile."""
    copied = small = read = 0
    for x in arrays.values():
        parts: list[Any] = [x]
        if isinstance(x, jax.Array) and not _is_one_part(x):
            parts = [shard.data for shard in x.addressable_shards if shard.replica_id == 0]
        elif not isinstance(x, jax.Array) and jax.process_index() != 0:
            parts = []
        size = sum(part.nbytes for part in parts)
        copied += size
        small += size if size < _SMALL else 0
        if isinstance(x, jax.Array) and not is_on_host(x):
            read = max([read, *(part.nbytes for part in parts)])
    # A transaction copies what it will write. For the checksums of what is on accelerators, each
    # thread copies a shard.
    return copied + min(small, _BEING_WRITTEN + 2**24) + min(8, _CORES) * read


def copies(arrays: Arrays) -> dict[str, Copy]:
    """Copies of what this process stores, by leaf path, so that the arrays may change."""
    large = {
        leaf: list(primary_shards(x))
        for leaf, x in arrays.items()
        if isinstance(x, jax.Array) and not _is_one_part(x)
    }
    # All transfers from devices begin before the first is waited for.
    for shards in large.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    copied: dict[str, Copy] = {}
    for leaf, x in arrays.items():
        if leaf in large:
            parts = _copied_shards(x, large.pop(leaf))
        elif isinstance(x, jax.Array):
            parts = [(_full(x.shape), to_host(x))]
        else:
            parts = _copy_of_process_0(x)
        copied[leaf] = Copy(x.shape, np.dtype(x.dtype), chunk_shape(x), parts)
    return copied


def with_copies(arrays: Arrays, copied: Mapping[str, Copy]) -> dict[str, jax.Array | np.ndarray]:
    """The arrays, with the copies of numpy arrays in their place: these may change meanwhile."""
    result = dict(arrays)
    for leaf, x in arrays.items():
        if isinstance(x, np.ndarray) and copied[leaf].parts:
            [(_, result[leaf])] = copied[leaf].parts
    return result


def _copied_shards(x: Any, shards: list[Any]) -> Parts:
    # On the host, `np.asarray` of a shard is a view of memory that a donation gives away.
    as_numpy = np.array if to_read(x) is x else np.asarray
    regions = regions_here(x.sharding, x.shape)
    return [(regions[shard.device], as_numpy(shard.data)) for shard in shards]


def _copy_of_process_0(x: Any) -> Parts:
    """Each process has a numpy array of its own, and process 0 stores it for all."""
    if jax.process_index() != 0:
        return []
    return [(_full(x.shape), np.array(x))]


def write_arrays(path: epath.Path, copied: Mapping[str, Copy]) -> int:
    """Writes what this process stores, and frees it. `merge` makes it visible.

    Returns how many parts of arrays this process has written, and descriptions of arrays: those are
    written by process 0, even of arrays that it has no part of.
    """
    context = _context()
    database = {**_database(path, jax.process_index()), "config": _NEW_DATABASE}
    count = sum(len(x.parts) for x in copied.values())
    if jax.process_index() == 0:
        count += len(copied)
    small: dict[str, Copy] = {}
    large: dict[str, Copy] = {}
    for leaf, x in copied.items():
        is_small = sum(data.nbytes for _, data in x.parts) < _SMALL
        (small if is_small else large)[leaf] = x
    _write_values(database, _values(small, large), context)
    with closing(_in_turn(_writes(database, large, context), _BEING_WRITTEN)) as writes:
        for _, future in writes:
            future.result()
    return count


def _values(small: Mapping[str, Copy], large: Mapping[str, Copy]) -> Iterator[tuple[str, bytes]]:
    """The keys and values of small arrays, and of descriptions. Takes the parts as `_writes`."""
    if jax.process_index() == 0:
        for leaf, x in chain(small.items(), large.items()):
            described = _description(x.shape, dtype_name(x.dtype), x.chunk)
            yield f"{store_key(leaf)}/{_DESCRIPTION}", described
    for leaf, x in small.items():
        while x.parts:
            region, data = x.parts.pop()
            yield f"{store_key(leaf)}/{_chunk_key(region, x.chunk)}", data.tobytes()


def _write_values(
    database: dict[str, Any], values: Iterable[tuple[str, bytes]], context: Any
) -> None:
    """Writes values in few transactions: each writes the index anew, and is held in memory."""
    store = tensorstore.KvStore.open(database, context=context).result()
    transaction, writes, held = tensorstore.Transaction(), [], 0
    for key, value in values:
        writes.append(store.with_transaction(transaction).write(key, value))
        held += len(value)
        if held > _BEING_WRITTEN:
            _commit(transaction, writes)
            transaction, writes, held = tensorstore.Transaction(), [], 0
    _commit(transaction, writes)


def _commit(transaction: Any, writes: Iterable[Any]) -> None:
    transaction.commit_async().result()
    for write in writes:
        write.result()  # a commit does not fail for a key that cannot be written


def _writes(
    database: dict[str, Any], large: Mapping[str, Copy], context: Any
) -> Iterator[_Transfer]:
    """The writes of large arrays. Takes the parts out of the copies, to free them once written."""
    for leaf, x in large.items():
        folder = {**database, "path": f"{store_key(leaf)}/"}
        spec = _zarr(folder, x.shape, dtype_name(x.dtype), x.chunk)
        # Process 0 describes the array in its own database.
        store = tensorstore.open(spec, context=context, open=True, assume_metadata=True).result()
        while x.parts:
            region, data = x.parts.pop()
            write = partial(
                store[_index(region)].write,
                data,
                can_reference_source_data_indefinitely=True,  # by default TensorStore copies it
            )
            yield _Transfer(leaf, region, data.nbytes, write)


def merge(path: epath.Path, writers: Iterable[int], leaves: Iterable[str]) -> None:
    """Merges what the processes `writers` have written, and describes it for Orbax."""
    context, transaction = _context(), tensorstore.Transaction(atomic=True)
    database = {**_database(path), "config": _NEW_DATABASE}
    merged = tensorstore.KvStore.open(database, context=context).result()
    for process in writers:
        folder = written_by(path, process)
        if not folder.exists():  # TensorStore would create it
            raise CheckpointError(f"what process {process} has written is not in {folder}.")
        part = tensorstore.KvStore.open(_database(path, process), context=context).result()
        # Copies entries of the index. They refer to the files of the process.
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    (path / ARRAYS / "_METADATA").write_text(json.dumps(_for_orbax(map(store_key, leaves))))


def _for_orbax(keys: Iterable[str]) -> dict[str, Any]:
    """What Orbax reads in `_METADATA`: a flat dict of arrays, in zarr 3 and OCDBT."""
    value = {"value_type": "jax.Array", "skip_deserialize": False}
    rows = {
        str((key,)): {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": value}
        for key in keys
    }
    return {
        "tree_metadata": rows,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


# ------------------------------------------------------------------ reading

_IN_FLIGHT = 2**27  # bytes that are in memory while they are read, if no single region has more
_LEAST_PART = 2**16  # what a part counts at least
_UNREAD = "it cannot be read: "

Wanted = Mapping[str, StoredArray]
Reader = Callable[[Region], Any]  # begins to read a region; returns a future of it


class ArrayStore:
    """The array store of a checkpoint, open for reading. Arrays are given by leaf path."""

    def __init__(self, path: epath.Path) -> None:
        self._path = path
        self._database = _database(path)
        self._context = _context()

    def open(
        self, wanted: Wanted, regions: Mapping[str, Sequence[Region]]
    ) -> tuple[dict[str, Reader], dict[str, str]]:
        """Opens arrays to read regions of them, such as these.

        Returns those that are as the table says, and why others are not. Raises `CheckpointError`
        if this process may not read one.
        """
        values = tensorstore.KvStore.open(self._database, context=self._context).result()
        small = {
            leaf: values.read(f"{store_key(leaf)}/{_DESCRIPTION}")
            for leaf, x in wanted.items()
            if _bytes_of(x, x.chunk) < _SMALL
            and all(_chunk_key(region, x.chunk) for region in regions[leaf])
        }
        as_values = {leaf for leaf, found in small.items() if _describes(found, wanted[leaf])}
        openings = {leaf: self._begin(leaf) for leaf in wanted if leaf not in as_values}
        readers: dict[str, Reader] = {}
        errors: dict[str, str] = {}
        for leaf, x in wanted.items():
            if leaf in as_values:
                readers[leaf] = partial(self._read_value, values, leaf, x)
            elif why := self._why_closed(openings[leaf]) or _misfit(openings[leaf].result(), x):
                errors[leaf] = f"{_UNREAD}{why}"
            else:
                readers[leaf] = partial(_read_regions, openings[leaf].result())
        return readers, errors

    def _read_value(self, values: Any, leaf: str, x: StoredArray, region: Region) -> _ReadValue:
        future = values.read(f"{store_key(leaf)}/{_chunk_key(region, x.chunk)}")
        return _ReadValue(future, x, region, lambda: self._begin(leaf).result())

    def _begin(self, leaf: str) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": {**self._database, "path": f"{store_key(leaf)}/"},
            "fill_missing_data_reads": False,  # a missing chunk is an error, not zeros
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        return tensorstore.open(spec, read=True, open=True, context=self._context)

    def _why_closed(self, opening: Any) -> str:
        """Why an array cannot be opened; empty if it can."""
        error = opening.exception()
        if error is None:
            return ""
        if "NOT_FOUND" in str(error):
            return "it is not in the array store."
        return self._why(error)

    def read(
        self, wanted: Wanted, *, progress: bool = False
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Reads arrays, each process its own shards. Returns them, and why others are not read.

        Raises `CheckpointError` as `open`. The caller checks that there is `memory_to_read`.
        """
        regions = {leaf: _regions(x) for leaf, x in wanted.items()}
        here = {leaf: wanted[leaf] for leaf, parts in regions.items() if parts}
        readers, errors = self.open(here, regions)
        reads = [
            _transfer(leaf, here[leaf], region, reader)
            for leaf, reader in readers.items()
            for region in regions[leaf]
        ]
        on_host: dict[str, np.ndarray] = {}

        def read_parts() -> Iterator[Part[str]]:
            bar = show_progress(list(readers), "restore", show=progress)
            shown = None
            for read, future in _in_turn(reads, _IN_FLIGHT):
                if read.leaf != shown:
                    shown = next(bar)
                try:
                    values = [future.result()]
                except Exception as error:  # TensorStore raises types of Python's own, by status
                    errors[read.leaf] = f"{_UNREAD}{self._why(error)}"
                    continue
                del future  # no variable keeps what was read
                if wanted[read.leaf].sharding is None:
                    on_host[read.leaf] = values.pop()
                else:
                    yield read.leaf, read.region, values.pop()
            next(bar, None)

        targets = {
            leaf: Target(x.shape, x.dtype, x.sharding)
            for leaf, x in wanted.items()
            if x.sharding is not None
        }
        return to_devices(targets, read_parts()) | on_host, errors

    def check_memory_for_blocks(self, arrays: Iterable[StoredArray]) -> None:
        """Raises `CheckpointError` unless the blocks of each array fit in host memory."""
        arrays = list(arrays)
        # A block and the chunks that it is in; and the block before it.
        block = max((_bytes_of(x, _block(x)) for x in arrays), default=0)
        needed = min(sum(2 * x.nbytes for x in arrays), max(2 * block, _IN_FLIGHT) + block)
        needed += kept_by_allocator(
            ((_bytes_of(x, _block(x)), 2 * x.nbytes) for x in arrays), _IN_FLIGHT
        )
        check_memory(self._path, needed, THREADS, "Verify it where there is more.")

    def blocks(
        self,
        wanted: Wanted,
        readers: Mapping[str, Reader],
    ) -> Iterator[tuple[str, Iterator[tuple[Region, np.ndarray]]]]:
        """Reads blocks of arrays that `open` has returned, a few at a time, in their order.

        Raises `ValueError` if one cannot be read, and `CheckpointError` if this process may not
        read a file.
        """
        reads = (
            _transfer(leaf, wanted[leaf], region, reader)
            for leaf, reader in readers.items()
            for region in _blocks_of(wanted[leaf])
        )
        by_leaf = groupby(_in_turn(reads, _IN_FLIGHT), lambda pair: pair[0].leaf)
        return ((leaf, self._values(started)) for leaf, started in by_leaf)

    def _values(
        self, started: Iterable[tuple[_Transfer, Any]]
    ) -> Iterator[tuple[Region, np.ndarray]]:
        for read, future in started:
            try:
                yield read.region, future.result()
            except Exception as error:
                raise ValueError(f"{_UNREAD}{self._why(error)}") from None

    def _why(self, error: Exception) -> str:
        """Why an array cannot be read. If it may not be, it is not damaged: `CheckpointError`."""
        text = " ".join(str(error).split()) or type(error).__name__
        text = _DETAILS.sub("", text).replace(f"{self._path}/", "")
        if "PERMISSION_DENIED" in text:
            raise CheckpointError(
                f"This process may not read files of the array store: {text}."
            ) from None
        _, _, inner = text.partition(f'in OCDBT database at local file "{ARRAYS}/": ')
        if " file " in inner:  # it names the damaged file
            return short(inner)
        return short(_OPENING.sub("", text))


# An error of TensorStore: its status, what it was doing, from the outside in, and details.
#   DATA_LOSS: Error opening "zarr3" driver: Error reading "w/zarr.json" in OCDBT database at local
#   file "/runs/7/state/": Error reading local file "/runs/7/state/d/1f3": CRC-32C checksum mismatch
#   [source locations='tensorstore/internal/...'] [tensorstore_spec='{...}']
_DETAILS = re.compile(r" \[(tensorstore_spec|source locations)=.*")
_OPENING = re.compile('^[A-Z_]+: (Error opening "zarr3" driver: )?')


def _describes(found: Any, x: StoredArray) -> bool:
    """Whether a description that is being read is that of the table. If not, `_misfit` says why."""
    if found.exception():
        return False
    return found.result().value == _description(x.shape, dtype_name(x.dtype), x.chunk)


def _misfit(store: Any, x: StoredArray) -> str:
    """How a stored array differs from what the table says; empty if it does not."""
    shape, dtype = tuple(store.shape), store.dtype.numpy_dtype
    chunk = store.chunk_layout.read_chunk.shape or ()  # `None` for a scalar
    if (shape, dtype) != (x.shape, x.dtype):
        return f"stored as {dtype}{list(shape)}, expected {x.dtype}{list(x.shape)}."
    if chunk != x.chunk:
        return f"stored in chunks of {list(chunk)}, expected chunks of {list(x.chunk)}."
    return ""


def _bytes_of(x: StoredArray, shape: Shape) -> int:
    return math.prod(shape) * x.dtype.itemsize


def memory_to_read(wanted: Wanted) -> int:
    """The host memory that reading arrays takes at most, by a run that reads nothing."""
    meter, buffers = Meter(), list[tuple[int, int]]()
    reads = [
        _transfer(leaf, x, region, lambda _: None)
        for leaf, x in wanted.items()
        for region in _regions(x)
    ]
    planned = [read._replace(start=partial(meter.add, read.nbytes)) for read in reads]
    for read, _ in _in_turn(planned, _IN_FLIGHT):
        x = wanted[read.leaf]
        in_host = _bytes_of(x, region_shape(read.region))
        buffers += (in_host, in_host), (_bytes_of(x, x.chunk), read.nbytes - in_host)
        meter.add(in_host - read.nbytes)
        if x.sharding is not None:
            meter.add(x.dtype.itemsize * items_on_host(x.sharding, x.shape, read.region))
            meter.add(-in_host)
    return meter.peak + kept_by_allocator(buffers, _IN_FLIGHT)


def _block(x: StoredArray) -> Shape:
    """The shape of the blocks in which an array is read."""
    return x.chunk if 2 * x.nbytes > _IN_FLIGHT else x.shape


def first_block(x: StoredArray) -> Region:
    """The first of the blocks in which an array is read."""
    return _full(_block(x))


def _blocks_of(x: StoredArray) -> Iterator[Region]:
    """The blocks in which to read an array: its chunks if it is large, and otherwise all of it."""
    spans = [
        [(start, min(start + step, length)) for start in range(0, length, step)]
        for length, step in zip(x.shape, _block(x), strict=True)
    ]
    return product(*spans)


def _regions(x: StoredArray) -> list[Region]:
    """The distinct regions of an array that this process reads."""
    if x.sharding is None or _is_one_part(x):
        return [_full(x.shape)]
    return list(dict.fromkeys(regions_here(x.sharding, x.shape).values()))


def _read_regions(store: Any, region: Region) -> Any:
    return store[_index(region)].read()


def _transfer(leaf: str, x: StoredArray, region: Region, reader: Reader) -> _Transfer:
    pairs = zip(region, x.chunk, strict=True)
    chunks = math.prod(-(-stop // step) - start // step for (start, stop), step in pairs)
    nbytes = _bytes_of(x, region_shape(region)) + chunks * _bytes_of(x, x.chunk)
    return _Transfer(leaf, region, max(_LEAST_PART, nbytes), partial(reader, region))

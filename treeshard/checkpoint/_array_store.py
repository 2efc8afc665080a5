"""The arrays of a checkpoint: zarr arrays in an OCDBT database, written by TensorStore.

With a file per shard, 20,000 leaves on 64 devices would become a million files. A database has a
few files and one index. Processes that write to the same database wait for each other, so each
process writes its own. `merge` then writes one index for all files, without copying arrays. Orbax
stores arrays in the same way, and reads these.

The directory `state` has these parts, and each is protected against damage:

1. Chunks hold the values of the arrays. Each ends in its CRC-32C, a codec of zarr, so TensorStore
   rejects a damaged chunk on any mesh.
2. The index has nodes of a B-tree and a manifest, each with a CRC-32C.
3. Files with random names hold the chunks and the index. A chunk from another checkpoint is intact,
   so the checkpoint lists its files, with a checksum of both ends (`changed_files`). In an object
   store it lists the manifest, which names the other files.
4. A description of each array serves Orbax. Here the table of leaves is used instead: to open an
   array by its description takes ten times as long as to read it.
"""

import json
import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property, lru_cache, partial
from itertools import chain, product
from typing import Any, TypeVar
from urllib.parse import quote

import jax
import numpy as np
import tensorstore
from etils import epath

from treeshard._core.arrays import (
    Region,
    is_on_host,
    primary_shards,
    region_shape,
    slices_of,
    to_host,
    to_read,
)
from treeshard._core.text import parse_dtype
from treeshard._disk.files import FLUSHES, start_flushes
from treeshard._disk.leaves import SavedLeaf, Shape
from treeshard.checkpoint._paths import ARRAYS, MANIFEST, is_local
from treeshard.errors import CheckpointError, DeletedLeafError, short

Arrays = Mapping[str, jax.Array | np.ndarray]
Parts = list[tuple[Region, Any]]  # parts of an array: of numpy, or on devices

SMALL = 2**20  # bytes; a smaller local array is one chunk, however it is sharded
IN_FLIGHT = 2**27  # bytes that are read or written at a time, unless a single part is larger

_NODES = "cache_pool#nodes"  # TensorStore's name of the cache for the nodes of the index
_NEW_DATABASE = {
    # Values up to this size are stored in the nodes of the index, and need no further read. The
    # checksums of the nodes also protect these values, such as descriptions of arrays.
    "max_inline_value_bytes": 1024,
    # TensorStore's default is zstd, which hardly shrinks the small weights in the nodes.
    "compression": None,
}

# The threads of TensorStore's two pools, those that compare replicas or flush, and those that write
# in the background.
_CORES = os.cpu_count() or 1
THREADS = max(4, _CORES) + _CORES + max(FLUSHES, min(8, _CORES)) + 2


def _context() -> Any:
    # `file_io_sync` would flush each file when it is written. `flush_tree` does that at the end.
    return tensorstore.Context({_NODES: {"total_bytes_limit": 10**8}, "file_io_sync": False})


def _files(path: epath.Path, folder: str = "") -> Any:
    """TensorStore's name of the directory of the arrays, or of one in it."""
    name = f"{path / ARRAYS}/{folder}"
    # Text would be a URL, in which `%` and `?` have a meaning.
    return {"driver": "file", "path": name} if is_local(path) else name


def _database(path: epath.Path, folder: str = "") -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _files(path, folder), "cache_pool": _NODES}


def _open_database(database: Mapping[str, Any], context: Any) -> Any:
    return tensorstore.KvStore.open(database, context=context).result()


def _folder_of(process: int) -> str:
    return f"ocdbt.process_{process}"  # as Orbax names it


def written_by(path: epath.Path, process: int) -> epath.Path:
    """The directory in which a process writes."""
    return path / ARRAYS / _folder_of(process)


# ------------------------------------------------------------------ how an array is stored

# The dtypes of zarr 3 in TensorStore, beyond numpy's own. All others have one byte, and are stored
# as uint8.
_STORED = {"bfloat16", "int4", "float8_e4m3fn", "float8_e5m2"}
_STORED |= {"float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"}


@lru_cache
def stored_dtype(dtype: np.dtype) -> str:
    """The name of the dtype in which values are stored."""
    is_of_numpy = dtype.kind != "V"
    return str(dtype) if is_of_numpy or dtype.name in _STORED else "uint8"


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


def chunk_shape(x: Any) -> Shape:
    """The shape of the chunks in which an array is stored: its shards, unless it is small."""
    return x.shape if _is_one_part(x) else x.sharding.shard_shape(x.shape)


def _is_one_part(x: Any) -> bool:
    """Whether this process writes an array as one part, however it is sharded."""
    return not isinstance(x, jax.Array) or (x.is_fully_addressable and x.nbytes < SMALL)


@lru_cache(4096)
def full_region(shape: Shape) -> Region:
    """All of an array of this shape."""
    return tuple((0, length) for length in shape)


def _zarr(shape: Shape, dtype: str, chunk: Shape) -> dict[str, Any]:
    """TensorStore's specification of an array, wherever it is."""
    bytes_in_order = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "driver": "zarr3",
        "metadata": {
            "shape": shape,
            "data_type": dtype,
            "codecs": [bytes_in_order, {"name": "crc32c"}],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        },
        # By default, a chunk of zeros is left out, and a lost chunk is read as zeros. The two could
        # not be told apart.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        # By default each read asks the file system, or the object store, whether the index in
        # memory is still the newest.
        "recheck_cached_data": False,
    }


# Many arrays have the same one, and TensorStore takes longer to read it than to open an array.
_specification = lru_cache(maxsize=1024)(lambda *args: tensorstore.Spec(_zarr(*args)))


@lru_cache(maxsize=1024)
def _description(shape: Shape, dtype: str, chunk: Shape) -> bytes:
    """The description that TensorStore writes for an array."""
    spec = _zarr(shape, dtype, chunk) | {"kvstore": "memory://"}
    array: Any = tensorstore.open(spec, create=True, context=tensorstore.Context()).result()
    return array.kvstore["zarr.json"]


def _open(values: Any, row: SavedLeaf) -> Any:
    """The array of a leaf in a database, opened from the table of leaves without a read."""
    spec = _specification(row.stored_shape, row.stored, row.chunk)
    where = values / f"{store_key(row.path)}/"
    return tensorstore.open(spec, kvstore=where, open=True, assume_metadata=True).result()


# ------------------------------------------------------------------ tiny arrays

# To open an array takes longer than to read a tiny one. So TensorStore encodes and decodes the
# chunks of many tiny arrays as chunks of one array in memory, and the database has the same bytes.

_TINY = 2**14  # bytes
_TOGETHER = 256  # tiny arrays that are encoded or decoded at a time
_MOST_DIMS = 32  # of TensorStore; an array of tiny arrays has one more dim than these

T = TypeVar("T")
# Begins with the row of its array, and a region.
Item = TypeVar("Item", bound=tuple[Any, ...])


def is_tiny(row: SavedLeaf, region: Region) -> bool:
    """Whether a region is all of an array that is stored as one tiny chunk."""
    is_all = row.chunk == row.stored_shape and region == full_region(row.stored_shape)
    return is_all and chunk_bytes(row) <= _TINY and len(region) < _MOST_DIMS


def group_tiny(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Groups the items of tiny arrays of one type. All other items are alone."""
    groups = defaultdict[Any, list[Item]](list)
    for item in items:
        row: SavedLeaf = item[0]
        if not is_tiny(row, item[1]):
            yield [item]
            del item  # or it would stay in memory
            continue
        group = groups[row.stored, row.chunk]
        group.append(item)
        if len(group) == _TOGETHER:
            yield groups.pop((row.stored, row.chunk))
    yield from groups.values()


def _chunk_keys(group: Sequence[tuple[Any, ...]]) -> list[str]:
    """The keys of the only chunks of tiny arrays of one type."""
    zeros = "/0" * len(group[0][0].stored_shape)
    return [f"{store_key(row.path)}/c{zeros}" for row, *_ in group]


def _array_in_memory(row: SavedLeaf, count: int) -> tuple[Any, Any, list[str]]:
    """A store in memory, an array in it of `count` chunks like that of `row`, and their keys."""
    context, shape = tensorstore.Context(), row.stored_shape
    store = tensorstore.KvStore.open("memory://", context=context).result()
    spec = _specification((count, *shape), row.stored, (1, *shape))
    array = tensorstore.open(spec, kvstore=store, open=True, assume_metadata=True).result()
    return store, array, [f"c/{i}{'/0' * len(shape)}" for i in range(count)]


def _encode(row: SavedLeaf, values: Sequence[np.ndarray]) -> list[bytes]:
    """The chunks of tiny arrays of one type, with their checksums."""
    store, array, keys = _array_in_memory(row, len(values))
    stored = parse_dtype(row.stored or "")  # several dtypes are stored as one
    array.write(np.stack([x.view(stored) for x in values])).result()
    return [store[key] for key in keys]


def _decode(row: SavedLeaf, chunks: Sequence[bytes]) -> np.ndarray | None:
    """The values of tiny arrays of one type; `None` if a chunk is missing or damaged."""
    store, array, keys = _array_in_memory(row, len(chunks))
    for key, chunk in zip(keys, chunks, strict=True):
        store[key] = chunk
    read = array.read()
    return None if read.exception() else read.result()


# ------------------------------------------------------------------ writing


def select_parts(arrays: Arrays) -> dict[str, Parts]:
    """What this process stores, by leaf path: no part is copied."""
    return {leaf: _select_parts(x) for leaf, x in arrays.items()}


def _select_parts(x: Any) -> Parts:
    if not isinstance(x, jax.Array):
        # Each process has a numpy array of its own, and process 0 stores it for all.
        return [(full_region(x.shape), x)] if jax.process_index() == 0 else []
    if _is_one_part(x):
        return [(full_region(x.shape), to_read(x))]
    return list(primary_shards(x))


def memory_to_save(parts: Mapping[str, Parts], *, copied: bool) -> int:
    """The host memory to write parts, or `copies` of them, and to compare replicas before."""
    total = small = largest = read = 0
    for _, part in chain.from_iterable(parts.values()):
        size = part.nbytes
        small += size if size < SMALL else 0
        if isinstance(part, jax.Array) and not is_on_host(part):
            read = max(read, size)
        if copied or not _is_view(part):
            total, largest = total + size, max(largest, size)
    held = total if copied else min(total, max(IN_FLIGHT, largest))
    # TensorStore copies what is small, too, and refers to the rest. To compare replicas on
    # accelerators, each thread copies a shard. Tiny arrays are encoded from a copy and to a copy.
    encoded = 3 * min(small, _TOGETHER * _TINY)
    return held + min(small, IN_FLIGHT + 2**24) + encoded + min(8, _CORES) * read


def _is_view(part: Any) -> bool:
    """Whether a part is written from its own memory.

    Other threads may change arrays of numpy, but not arrays of JAX, which are not donated while a
    view refers to them.
    """
    return isinstance(part, jax.Array) and is_on_host(part)


def copies(parts: dict[str, Parts]) -> dict[str, Parts]:
    """Copies of parts in host memory, so that the arrays may change. Takes them out of `parts`."""
    for _, part in chain.from_iterable(parts.values()):
        _start_transfer(part)
    return {leaf: [(region, _copy_part(x)) for region, x in parts.pop(leaf)] for leaf in [*parts]}


def _copy_part(part: Any) -> np.ndarray:
    if isinstance(part, jax.Array) and not is_on_host(part):
        return _values(part)
    return to_host(part)


def _start_transfer(part: Any) -> None:
    """Starts to copy a part from an accelerator, so that many are on their way at a time."""
    if isinstance(part, jax.Array) and not is_on_host(part):
        part.copy_to_host_async()


def _values(part: Any) -> np.ndarray:
    if _is_view(part) and len(part.sharding.device_set) > 1:
        return to_host(part)  # it is small; JAX would keep a copy on the array
    return np.asarray(part)


def write_arrays(
    path: epath.Path, rows: Iterable[SavedLeaf], parts: dict[str, Parts], *, copied: bool
) -> bool:
    """Writes and frees the parts that this process stores. `merge` makes them visible.

    `copied` says whether the parts are `copies`. Returns whether anything was written. Process 0
    writes the descriptions of all arrays.
    """
    rows = [row for row in rows if row.path in parts]
    describes = jax.process_index() == 0
    if not any(parts.values()) and not (describes and rows):
        return False
    own = _database(path, f"{_folder_of(jax.process_index())}/") | {"config": _NEW_DATABASE}
    values = _open_database(own, _context())
    if describes:
        transaction = tensorstore.Transaction()
        in_transaction = values.with_transaction(transaction)
        described = [
            in_transaction.write(
                f"{store_key(row.path)}/zarr.json",
                _description(row.stored_shape, row.stored or "", row.chunk or ()),
            )
            for row in rows
        ]
        _wait(_start_commit(transaction, described))
    batches = split_batches(_take_parts(rows, parts), lambda part: part[2].nbytes, at_a_time=4)
    start = partial(_start_batch, values, copied=copied)
    started = set[str]()
    # Some batches are encoded while others are written to files, and the disk writes those before.
    with closing(keep_in_flight(batches, _bytes_of_parts, start)) as in_flight:
        for _, writes in in_flight:
            _wait(writes)
            if is_local(path):
                start_flushes(written_by(path, jax.process_index()) / "d", started)
    return True


def _bytes_of_parts(batch: list[tuple[SavedLeaf, Region, Any]]) -> int:
    return sum(part.nbytes for _, _, part in batch)


def _start_batch(
    values: Any, batch: list[tuple[SavedLeaf, Region, Any]], *, copied: bool
) -> list[Any]:
    """Starts to write parts, and frees those that TensorStore copies. Returns futures.

    Each transaction rewrites the index, and holds its writes in memory.
    """
    for row, _, part in batch:
        if isinstance(part, jax.Array) and part.is_deleted():
            raise DeletedLeafError(
                f"{row.path}: it was deleted or donated while it was saved. Run the next step once"
                " `save` has returned, or save with `Checkpoints`, which copies the state first."
            )
        _start_transfer(part)
    transaction = tensorstore.Transaction()
    in_transaction = values.with_transaction(transaction)
    arrays: dict[str, Any] = {}
    copying: list[Any] = []
    writes: list[Any] = []
    for group in group_tiny(batch):
        row, region, part = group[0]
        if is_tiny(row, region):
            chunks = _encode(row, [_values(part) for _, _, part in group])
            writes += map(in_transaction.write, _chunk_keys(group), chunks)
            continue
        if row.path not in arrays:
            arrays[row.path] = _open(in_transaction, row)
        write = arrays[row.path][slices_of(region)].write(
            _values(part).view(parse_dtype(row.stored or "")),
            # By default TensorStore copies what it is given.
            can_reference_source_data_indefinitely=copied or not isinstance(part, np.ndarray),
        )
        copying.append(write.copy)
        writes.append(write.commit)
    batch.clear()
    _wait(copying)
    return _start_commit(transaction, writes)


def _take_parts(
    rows: Iterable[SavedLeaf], parts: dict[str, Parts]
) -> Iterator[tuple[SavedLeaf, Region, Any]]:
    for row in rows:
        while parts[row.path]:
            yield row, *parts[row.path].pop()


def _start_commit(transaction: Any, writes: Iterable[Any]) -> list[Any]:
    # A commit does not fail for a key that cannot be written.
    return [transaction.commit_async(), *writes]


def _wait(futures: Iterable[Any]) -> None:
    for future in futures:
        future.result()


def merge(path: epath.Path, writers: Iterable[int], leaves: Iterable[str]) -> None:
    """Merges the databases of the processes `writers`, and describes the result for Orbax."""
    context, transaction = _context(), tensorstore.Transaction(atomic=True)
    database = {**_database(path), "config": _NEW_DATABASE}
    merged = _open_database(database, context)
    for process in writers:
        folder = written_by(path, process)
        if not folder.exists():  # TensorStore would create it
            raise CheckpointError(f"what process {process} has written is not in {folder}.")
        of_process = _database(path, f"{_folder_of(process)}/")
        part = _open_database(of_process, context)
        # This copies entries of the index, which refer to the files of the process.
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    (path / ARRAYS / "_METADATA").write_text(json.dumps(_orbax_metadata(map(store_key, leaves))))


def _orbax_metadata(keys: Iterable[str]) -> dict[str, Any]:
    """The `_METADATA` of Orbax for a flat dict of arrays, in zarr 3 and OCDBT."""
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

_LEAST = 2**16  # bytes; smaller parts count as this much

Read = tuple[SavedLeaf, Region]


def region_bytes(row: SavedLeaf, region: Region) -> int:
    """The bytes of a region of a stored array."""
    return _bytes(region_shape(region), row.stored or "")


def chunk_bytes(row: SavedLeaf) -> int:
    """The bytes of a chunk of a stored array."""
    return _bytes(row.chunk or (), row.stored or "")


@lru_cache(4096)
def _bytes(shape: Shape, dtype: str) -> int:
    return math.prod(shape) * parse_dtype(dtype).itemsize


def bytes_to_read(group: Sequence[Read]) -> int:
    """The host memory of the reads of a group: the regions, and the chunks that overlap them, which
    TensorStore holds during the reads. For tiny arrays, it includes the array in memory."""
    row, region = group[0]
    pairs = zip(region, row.chunk or (), strict=True)
    count = math.prod(-(-stop // step) - start // step for (start, stop), step in pairs)
    return len(group) * max(_LEAST, region_bytes(row, region) + count * chunk_bytes(row))


def chunks_of(row: SavedLeaf) -> Iterator[Region]:
    """The regions of the chunks of a stored array."""
    spans = [
        [(start, min(start + step, length)) for start in range(0, length, step)]
        for length, step in zip(row.stored_shape, row.chunk or (), strict=True)
    ]
    return product(*spans)


class ArrayStore:
    """Reads the arrays of a checkpoint, by the rows of its table."""

    def __init__(self, path: epath.Path) -> None:
        self._path, self._context = path, _context()
        self._opened: tuple[SavedLeaf, Any] | None = None

    def read(
        self, reads: Iterable[Read], errors: dict[str, str]
    ) -> Iterator[tuple[SavedLeaf, Region, np.ndarray]]:
        """Reads regions of arrays, a few at a time.

        Errors of arrays that cannot be read go to `errors`, by leaf path. Raises `CheckpointError`
        if this process lacks the permission to read a file.
        """
        for group, futures in keep_in_flight(group_tiny(reads), bytes_to_read, self._start):
            if is_tiny(*group[0]):
                decoded = None
                if not any(x.exception() for x in futures):
                    decoded = _decode(group[0][0], [x.result().value for x in futures])
                if decoded is not None:
                    # A view would keep the whole group in memory.
                    yield from ((*read, decoded[i, ...].copy()) for i, read in enumerate(group))
                    continue
                # Reads one by one find out which arrays are damaged.
                futures = [self._start_region(*read) for read in group]
            futures.reverse()
            for row, region in group:
                try:
                    values = [futures.pop().result()]  # no variable keeps the array in memory
                except Exception as error:  # TensorStore has a built-in exception for each status
                    errors[row.path] = f"it cannot be read: {self._why(error)}"
                    continue
                yield row, region, values.pop()

    @cached_property
    def _values(self) -> Any:
        return _open_database(_database(self._path), self._context)

    def _start(self, group: list[Read]) -> list[Any]:
        """Starts to read regions, or the chunks of tiny arrays."""
        if not is_tiny(*group[0]):
            return [self._start_region(*read) for read in group]
        return [self._values.read(key, staleness_bound=-math.inf) for key in _chunk_keys(group)]

    def _start_region(self, row: SavedLeaf, region: Region) -> Any:
        if self._opened is None or self._opened[0] is not row:  # the regions of a leaf follow
            self._opened = row, _open(self._values, row)
        return self._opened[1][slices_of(region)].read()

    def _why(self, error: Exception) -> str:
        """Why an array cannot be read. Raises `CheckpointError` if permission is missing."""
        text = " ".join(str(error).split()) or type(error).__name__
        text = _DETAILS.sub("", text).replace(f"{self._path}/", "")
        if "PERMISSION_DENIED" in text:
            raise CheckpointError(
                f"This process may not read files of the array store: {text}."
            ) from None
        if _LOST_CHUNK.match(text):
            return "it is not in the array store."
        _, _, inner = text.partition(f'in OCDBT database at local file "{ARRAYS}/": ')
        if " file " in inner:  # it names the damaged file
            return short(inner)
        text = _STATUS.sub("", text)
        if found := _DAMAGED_CHUNK.match(text):
            chunk, why = found.groups()
            files = self.files_by_key.get(chunk) or [ARRAYS]
            return f"chunk {short(chunk)} in {files[0]} is damaged ({why})."
        return short(text)

    @cached_property
    def files_by_key(self) -> dict[str, list[str]]:
        """For each key, the files that hold its value and the index nodes above it.

        The index is read only after an error. Nodes that cannot be read are left out.
        """
        found: dict[str, list[str]] = {}
        base = tensorstore.KvStore.open(_files(self._path), context=self._context).result()
        nodes: list[tuple[str, bytes, list[str]]] = []
        with suppress(ValueError, IndexError, KeyError):  # the manifest is damaged, or empty
            latest = tensorstore.ocdbt.dump(base, context=self._context).result()["versions"][-1]
            nodes.append((latest["root"]["location"], b"", [MANIFEST]))
        while nodes:
            location, prefix, above = nodes.pop()
            files = [_file_of(location), *above]
            try:
                node = tensorstore.ocdbt.dump(base, location, context=self._context).result()
            except ValueError:  # a damaged node: the leaves below it cannot be read
                continue
            for entry in node["entries"]:
                key = prefix + entry["key"]
                if "location" in entry:
                    inner = prefix + entry["subtree_common_prefix"]
                    nodes.append((entry["location"], inner, files))
                else:
                    value = entry.get("indirect_value")
                    own = [_file_of(value)] if value else []
                    found[key.decode()] = [f"{ARRAYS}/{file}" for file in [*own, *files]]
        return found


# An error of TensorStore: its status, what it was doing, from the outside in, and details.
#   DATA_LOSS: Error reading "w/c/0/1" in OCDBT database at local file "/runs/7/state/": Digest
#   mismatch, stored digest is 0x342feb4f but computed digest is 0x013f2404
#   [source locations='tensorstore/internal/...'] [tensorstore_spec='{...}']
_DETAILS = re.compile(r" \[(tensorstore_spec|source locations)=.*")
_STATUS = re.compile("^[A-Z_]+: ")
_DAMAGED_CHUNK = re.compile(r'Error reading "([^"]+)" in OCDBT database at [^"]*"[^"]*": (.*)')
#   NOT_FOUND: chunk {0} stored at "w/c/0" in OCDBT database at local file "/runs/7/" is missing
_LOST_CHUNK = re.compile("NOT_FOUND: chunk ")


def _file_of(location: str) -> str:
    """The file of `value:ocdbt.process_0/:d/1f3:0:67108868`, relative to `ARRAYS`."""
    _, folder, name, _, _ = location.split(":")
    return f"{folder}{name}"


def split_batches(
    items: Iterable[T], size_of: Callable[[T], int], at_a_time: int = 1
) -> Iterator[list[T]]:
    """Splits items into lists, of which `at_a_time` have at most `IN_FLIGHT` bytes together. A
    larger item has a list of its own."""
    most = IN_FLIGHT // at_a_time
    batch: list[T] = []
    held = 0
    for item in items:
        size = size_of(item)
        if batch and held + size > most:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
        del item  # or it would stay in memory while the next one is made
    if batch:
        yield batch


def keep_in_flight(
    groups: Iterable[list[Item]],
    size_of: Callable[[list[Item]], int],
    start: Callable[[list[Item]], list[T]],
) -> Generator[tuple[list[Item], list[T]]]:
    """Starts reads or writes of about `IN_FLIGHT` bytes at a time. Yields groups and their futures.

    No read or write outlives the iterator.
    """
    started: deque[tuple[int, list[Item], list[Any]]] = deque()
    in_flight = 0
    try:
        for group in groups:
            size = size_of(group)
            while started and in_flight + size > IN_FLIGHT:
                in_flight -= started[0][0]
                yield started.popleft()[1:]  # no variable keeps the array in memory
            started.append((size, group, start(group)))
            in_flight += size
        while started:
            yield started.popleft()[1:]
    finally:
        for future in chain.from_iterable(futures for _, _, futures in started):
            future.exception()  # waits

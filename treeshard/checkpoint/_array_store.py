"""The array store of a checkpoint: zarr arrays, in a few files (OCDBT) or each in its own.

TensorStore writes and reads them, as Orbax does, and Orbax can read them. The files may come from
anybody: before memory is taken for an array, what the store declares is compared with what is
expected of it, and the index of few files is limited before TensorStore reads it.
"""

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore
from etils import epath
from jax.sharding import Sharding, SingleDeviceSharding

from treeshard._core.arrays import Region, lengths, own_shards, regions_here, to_host, to_read
from treeshard._core.processes import with_bar
from treeshard._core.text import human_bytes
from treeshard._disk.untrusted import LARGE, check_memory, file_sizes
from treeshard.checkpoint._ocdbt import MANIFEST, Index
from treeshard.checkpoint._paths import ARRAYS, is_local
from treeshard.errors import CheckpointError, DamagedError, FormatError, short

Arrays = Mapping[str, jax.Array | np.ndarray]

_SMALL = 2**20  # bytes
_NODES = "cache_pool#nodes"  # caches the nodes of the index
# Nodes are not compressed: the values in them are compressed, or would hardly shrink.
_NEW = {"config": {"max_inline_value_bytes": 1024, "compression": None}}


def _store(path: epath.Path, key: str, in_few_files: bool, process: int | None = None) -> Any:
    """TensorStore's name of an array; of one that a process writes, until all are merged."""
    if not in_few_files:
        return _folder(path, key)
    folder = _folder(path, "" if process is None else f"ocdbt.process_{process}")
    return {"driver": "ocdbt", "base": folder, "path": key and f"{key}/", "cache_pool": _NODES}


def _context() -> Any:
    # Files are flushed later, by `flush_tree`.
    return tensorstore.Context({_NODES: {"total_bytes_limit": 10**8}, "file_io_sync": False})


def _in_one_piece(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a process that holds all shards writes and reads them as one."""
    if x.sharding is None:
        return True
    return x.sharding.is_fully_addressable and x.size * x.dtype.itemsize < _SMALL


def _folder(path: epath.Path, name: str) -> Any:
    folder = f"{path / ARRAYS}/{name and f'{name}/'}"
    return {"driver": "file", "path": folder} if is_local(path) else folder


def written_by(path: epath.Path, process: int, *, in_few_files: bool) -> epath.Path:
    """The directory in which a process writes."""
    return path / ARRAYS / f"ocdbt.process_{process}" if in_few_files else path / ARRAYS


# ------------------------------------------------------------------ writing


_BEING_WRITTEN = 2**27  # bytes of large arrays that are being written at a time


class Copy(NamedTuple):
    """What this process stores of an array, in host memory: the first replicas of shards.

    Of numpy arrays, process 0 stores one part.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    parts: list[tuple[Region, np.ndarray]]


def copies(arrays: Arrays) -> dict[str, Copy]:
    """Copies of what this process stores, so that the arrays may change."""
    large = {
        key: list(own_shards(x))
        for key, x in arrays.items()
        if isinstance(x, jax.Array) and not _in_one_piece(x)
    }
    for shard in (shard for shards in large.values() for shard in shards):
        shard.data.copy_to_host_async()
    known: Any = {}
    copied: dict[str, Copy] = {}
    for key, x in arrays.items():
        shape, chunk, full = x.shape, x.shape, tuple((0, length) for length in x.shape)
        if not isinstance(x, jax.Array):
            parts = [(full, np.array(x))] if jax.process_index() == 0 else []
        elif key in large:
            regions, chunk = regions_here(x.sharding, shape), x.sharding.shard_shape(shape)
            as_numpy = np.array if to_read(x) is x else np.asarray  # `asarray` may give a view
            parts = [(regions[shard.device], as_numpy(shard.data)) for shard in large.pop(key)]
        else:
            parts = [(full, to_host(x, known))]
        copied[key] = Copy(shape, np.dtype(x.dtype), chunk, parts)
    return copied


def write_arrays(
    path: epath.Path, copied: Mapping[str, Copy], *, compress: bool, in_few_files: bool
) -> None:
    """Writes what this process stores, and frees it. If in few files, `merge` makes it visible."""
    me = jax.process_index()
    transaction = tensorstore.Transaction()
    context = _context()

    def begin(key: str, x: Copy, how: dict[str, Any]) -> Any:
        codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        chunk = x.chunk
        if compress:
            codecs.append({"name": "zstd", "configuration": {"level": 3}})
            chunk = _compressed_chunk(chunk, x.dtype.itemsize)
        about = {"shape": x.shape, "data_type": str(x.dtype), "codecs": codecs}
        about["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        store = _store(path, key, in_few_files, me) | (_NEW if in_few_files else {})
        spec = {"driver": "zarr3", "kvstore": store, "metadata": about}
        spec["store_data_equal_to_fill_value"] = True
        return tensorstore.open(spec, context=context, **how)

    # A transaction makes many small writes one, and holds them in memory until it is committed.
    together = {"transaction": transaction} if in_few_files else {}
    created = {k: begin(k, x, {"create": True} | together) for k, x in copied.items() if me == 0}
    at_end: list[Any] = []  # without references to them, writes would end
    waiting: deque[tuple[int, Any]] = deque()
    held = 0
    try:
        for key, x in copied.items():
            is_small = in_few_files and sum(data.nbytes for _, data in x.parts) < _SMALL
            how = {"open": True, "assume_metadata": True} | (together if is_small else {})
            store = created[key] if is_small and created else begin(key, x, how)
            while x.parts:
                region, data = x.parts.pop()
                part = store.result()[_index(region)]
                write = part.write(data, can_reference_source_data_indefinitely=True)
                if is_small:
                    at_end.append(write)
                    continue
                waiting.append((data.nbytes, write))
                held += data.nbytes
                while held > _BEING_WRITTEN:
                    held -= waiting[0][0]
                    waiting[0][1].result()
                    waiting.popleft()
        for write in [*created.values(), *(write.copy for write in at_end)]:
            write.result()
        transaction.commit_async().result()
    finally:
        failed = [error for _, write in waiting if (error := write.exception()) is not None]
    if failed:
        raise failed[0]


def _compressed_chunk(chunk: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of equal parts of a chunk that a reader accepts, however well they compress."""
    for dim, length in enumerate(chunk):
        count = -(-math.prod(chunk) * itemsize // _LARGE_CHUNK)
        count = next(n for n in range(max(1, min(count, length)), length + 1) if length % n == 0)
        chunk = (*chunk[:dim], length // count, *chunk[dim + 1 :])
    return chunk


def merge(path: epath.Path, keys: Iterable[str], *, in_few_files: bool) -> None:
    """Merges what the processes have written, and describes it for Orbax."""
    if in_few_files:
        context, transaction = _context(), tensorstore.Transaction(atomic=True)
        spec = _store(path, "", True) | _NEW
        merged = tensorstore.KvStore.open(spec, context=context).result()
        for process in range(jax.process_count()):
            if written_by(path, process, in_few_files=True).exists():
                spec = _store(path, "", True, process)
                part = tensorstore.KvStore.open(spec, context=context).result()
                part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
        transaction.commit_async().result()
    of_array = {"value_type": "jax.Array", "skip_deserialize": False}
    rows = {
        str((key,)): {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": of_array}
        for key in keys
    }
    about = {"tree_metadata": rows, "use_ocdbt": in_few_files, "use_zarr3": True}
    about |= {"store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    (path / ARRAYS / "_METADATA").write_text(json.dumps(about))


# ------------------------------------------------------------------ reading

Structs = Mapping[str, jax.ShapeDtypeStruct]

_IN_FLIGHT = 2**26  # bytes that are being read at a time, if no single array has more
_LEAST_PART = 2**16  # what a part counts at least
_TO_PLACE = 2**24  # bytes that are placed at a time, if no single array has more
# Compression shrinks zeros to a thirty-thousandth, and earlier versions compressed the index too.
_MOST_EXPANSION = 2**20
_MOST_EXPANSION_OF_A_CHUNK = 2**10  # of one that is larger than `_LARGE_CHUNK`
_LARGE_CHUNK = 2**26  # bytes
# Each chunk that is read takes memory, however small it is.
_MOST_CHUNKS = 2**16  # of an array, unless they have `_LEAST_CHUNK` bytes on average
_LEAST_CHUNK = 2**12
_WHILE_READ = 2**10  # bytes of a chunk that is being read, besides its values
# Those of arrays that treeshard or Orbax wrote, and similar ones. Blosc takes as much memory as a
# chunk says, and each codec takes some.
_CODECS = {"bytes", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"}
_MOST_CODECS = 8
_UNREAD = "it cannot be read: "
_DETAILS = re.compile(r" \[(tensorstore_spec|source locations)=.*")
_OPENING = re.compile('^[A-Z_]+: (Error opening "zarr3" driver: )?')


class ArrayStore:
    """The array store of a checkpoint, open for reading.

    Raises `DamagedError` if one of its files is not a regular file, so that reading it might not
    end, or if its index takes more memory than an honest one; and `CheckpointError` if the
    directory may not be read.
    """

    def __init__(self, path: epath.Path) -> None:
        self._path = path
        self._in_few_files = (path / ARRAYS / MANIFEST).exists()
        self._bytes: int | None = None
        self._largest: dict[str, int] = {}  # values larger than `LARGE`, by array
        self._chunks: dict[str, int] = {}  # of arrays that are not one chunk
        self._codecs: set[str] = set()  # those that may be read
        if is_local(path):
            self._bytes, large = _sizes(path / ARRAYS)
            for name, size in large.items():
                key = name.partition("/")[0]
                self._largest[key] = max(size, self._largest.get(key, 0))
        self._context = _context()

    def open(self, wanted: Structs) -> tuple[dict[str, Any], dict[str, str]]:
        """Opens arrays by key: returns those that are as expected, and why others are not.

        Raises `DamagedError` if the files cannot hold them all, and `CheckpointError` if this
        process may not read one.
        """
        declared = sum(x.size * x.dtype.itemsize for x in wanted.values())
        if self._bytes is not None and declared > self._bytes * _MOST_EXPANSION:
            raise DamagedError(
                f"{self._path}: the table of leaves lists arrays of {human_bytes(declared)}, which"
                f" files of {human_bytes(self._bytes)} cannot hold."
            )
        spec = {"driver": "zarr3", "fill_missing_data_reads": False}
        spec |= {"recheck_cached_data": False, "recheck_cached_metadata": False}

        def begin(key: str) -> Any:
            store = spec | {"kvstore": _store(self._path, key, self._in_few_files)}
            return tensorstore.open(store, read=True, open=True, context=self._context)

        stores: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for key, future in {key: begin(key) for key in wanted}.items():
            try:
                store = future.result()
            except Exception as error:  # of any type
                absent = "NOT_FOUND" in str(error)
                why = "it is not in the array store." if absent else self._why(error)
                errors[key] = f"{_UNREAD}{why}"
                continue
            if why := self._misfit(key, store, wanted[key]):
                errors[key] = f"{_UNREAD}{why}"
            else:
                stores[key] = store
        return stores, errors

    def _misfit(self, key: str, store: Any, wanted: jax.ShapeDtypeStruct) -> str:
        """How a stored array differs from what is expected; empty if it does not."""
        shape, dtype, chunk_shape = tuple(store.shape), store.dtype.numpy_dtype, _chunk_shape(store)
        if (shape, dtype) != (wanted.shape, wanted.dtype):
            expected = f"expected {wanted.dtype}{list(wanted.shape)}"
            return f"stored as {dtype}{list(shape)}, {expected}."
        size, chunk = (math.prod(x) * dtype.itemsize for x in (shape, chunk_shape))
        most = size if self._bytes is None else min(size, self._bytes * _MOST_EXPANSION_OF_A_CHUNK)
        if chunk > max(_LARGE_CHUNK, most):
            text = human_bytes(chunk)
            return f"it is stored in chunks of {text}, more than the array or its files have."
        if chunk_shape != shape:
            self._chunks[key] = count = math.prod(_chunk_counts(shape, chunk_shape))
            if count > max(_MOST_CHUNKS, size // _LEAST_CHUNK):
                return f"it is stored in {count:,} chunks of {human_bytes(chunk)}: too many."
        if stored := self._largest.get(key):
            most = 2 * (math.prod(store.chunk_layout.write_chunk.shape) * dtype.itemsize + LARGE)
            if stored > most:
                return f"a chunk is stored in {human_bytes(stored)}, and has {human_bytes(chunk)}."
        if (text := str(store.codec)) not in self._codecs:
            codecs = [*islice(_names(store.codec.to_json()["codecs"]), _MOST_CODECS + 1)]
            if len(codecs) > _MOST_CODECS or not _CODECS.issuperset(codecs):
                names = ", ".join(codecs[:_MOST_CODECS])
                return f"it is stored by codecs that treeshard does not read: {names}."
            self._codecs.add(text)
        return ""

    def read(self, wanted: Structs, *, progress: str = "") -> tuple[dict[str, Any], dict[str, str]]:
        """Reads arrays, each process its own shards; without a sharding, as numpy. Else as `open`.

        `progress` is the public function, which a progress bar names; empty for none.
        """
        stores, errors = self.open({key: x for key, x in wanted.items() if _regions(x)})
        check_memory(self._path, [(x.shape, x.dtype, x.sharding) for x in wanted.values()])
        parts = ((key, x, part) for key, x in stores.items() for part in _regions(wanted[key]))
        groups = groupby(_read_ahead(parts, self._chunks), lambda part: part[0])
        arrays: dict[str, Any] = {}
        ready: dict[str, dict[Region, np.ndarray]] = {}  # to be placed together
        ready |= {key: {} for key, x in wanted.items() if not _regions(x)}
        held = 0
        for _ in with_bar([*stores], progress, show=bool(progress)):
            key, reads = next(groups)
            try:
                ready[key] = {region: x.result() for _, region, x in reads}
            except Exception as error:  # of any type
                errors[key] = f"{_UNREAD}{self._why(error)}"
                continue
            held += sum(x.nbytes for x in ready[key].values())
            if held >= _TO_PLACE:
                arrays |= _placed(wanted, ready)
                ready, held = {}, 0
        return arrays | _placed(wanted, ready), errors

    def _why(self, error: Exception) -> str:
        """Why an array cannot be read. Raises `CheckpointError` if it may not: it is not damaged.

        TensorStore's text is shortened to the part that names the damaged file.
        """
        text = " ".join(str(error).split()) or type(error).__name__
        text = _DETAILS.sub("", text).replace(f"{self._path}/", "")
        if "PERMISSION_DENIED" in text:
            raise CheckpointError(
                f"This process may not read files of the array store: {text}."
            ) from None
        _, _, inner = text.partition(f'in OCDBT database at local file "{ARRAYS}/": ')
        return short(inner if " file " in inner else _OPENING.sub("", text))

    def blocks(self, store: Any) -> Iterator[tuple[Region, np.ndarray]]:
        """Reads an array that `open` has returned in blocks of its chunks, a few at a time.

        A block is a chunk, or several that are small.

        Raises `ValueError` if it cannot be read, and `CheckpointError` if this process has no
        memory for a chunk, or may not read a file.
        """
        chunk, dtype = _chunk_shape(store), store.dtype.numpy_dtype
        if math.prod(chunk) * dtype.itemsize > _LARGE_CHUNK:
            check_memory(self._path, [(chunk, dtype, None)])
        block = [*chunk]
        for dim in reversed(range(len(block))):
            several = max(1, _SMALL // (math.prod(block) * dtype.itemsize))
            block[dim] *= min(several, -(-store.shape[dim] // block[dim]))
        indices = np.ndindex(*_chunk_counts(store.shape, block))
        starts = (np.multiply(index, block).tolist() for index in indices)
        regions = (
            tuple((a, min(a + n, end)) for a, n, end in zip(start, block, store.shape, strict=True))
            for start in starts
        )
        for _, region, part in _read_ahead((("", store, region) for region in regions), {}):
            try:
                yield region, part.result()
            except Exception as error:  # of any type
                raise ValueError(f"{_UNREAD}{self._why(error)}") from None


def _sizes(folder: epath.Path) -> tuple[int, dict[str, int]]:
    """The bytes of all files, and those of the large values by key."""
    try:
        if not folder.is_dir():
            return 0, {}
        total, on_disk, large = file_sizes(folder)
        if (folder / MANIFEST).exists():
            large = Index(Path(folder), on_disk).large_values()
        return total, large
    except (CheckpointError, FormatError) as error:
        raise DamagedError(f"{folder.parent}: {error}") from None
    except OSError as error:
        text = f"{folder.parent}: the array store cannot be read: {error}."
        raise CheckpointError(text) from None


def _names(codecs: list[dict[str, Any]]) -> Iterator[str]:
    for codec in codecs:
        yield codec["name"]
        about = codec.get("configuration", {})
        yield from _names([*about.get("codecs", ()), *about.get("index_codecs", ())])


def _chunk_shape(store: Any) -> tuple[int, ...]:
    return store.chunk_layout.read_chunk.shape or ()


def _chunk_counts(shape: Iterable[int], chunk: Iterable[int]) -> list[int]:
    return [-(-length // step) for length, step in zip(shape, chunk, strict=True)]


def _regions(x: jax.ShapeDtypeStruct) -> list[Region]:
    """The distinct regions of an array that this process reads."""
    if _in_one_piece(x):
        return [tuple((0, length) for length in x.shape)]
    return list(dict.fromkeys(regions_here(x.sharding, x.shape).values()))


def _placed(wanted: Structs, read: Mapping[str, Mapping[Region, np.ndarray]]) -> dict[str, Any]:
    """The arrays from the values of their regions: on the host, or placed all at once."""
    arrays: dict[str, Any] = {}
    pieces: list[tuple[str, np.ndarray, Sharding]] = []
    for key, values in read.items():
        x = wanted[key]
        if x.sharding is None:
            (arrays[key],) = values.values()
        elif _in_one_piece(x):
            pieces += ((key, full, x.sharding) for full in values.values())
        else:
            kind = x.sharding.memory_kind
            for device, region in regions_here(x.sharding, x.shape).items():
                one = SingleDeviceSharding(device, memory_kind=kind)
                pieces.append((key, values[region], one))
    # Arrays that share memory with numpy's could not be donated.
    placed = jax.device_put([x for _, x, _ in pieces], [s for *_, s in pieces], may_alias=False)
    jax.block_until_ready(placed)  # so that host memory can be freed
    shards = defaultdict[str, list[jax.Array]](list)
    for (key, *_), shard in zip(pieces, placed, strict=True):
        shards[key].append(shard)
    for key in read.keys() - arrays.keys():
        x = wanted[key]
        arrays[key] = (
            shards[key][0]
            if _in_one_piece(x)
            else jax.make_array_from_single_device_arrays(
                x.shape, x.sharding, shards[key], dtype=x.dtype
            )
        )
    return arrays


def _read_ahead(
    parts: Iterable[tuple[str, Any, Region]], chunks: Mapping[str, int]
) -> Iterator[tuple[str, Region, Any]]:
    """Starts to read parts of arrays, and yields them in order, with futures of their values.

    `chunks` are those of an array, if it has several.
    """
    waiting: deque[tuple[int, tuple[str, Region, Any]]] = deque()
    held = 0
    for key, store, region in parts:
        size = math.prod(lengths(region)) * store.dtype.numpy_dtype.itemsize
        size = max(_LEAST_PART, size, chunks.get(key, 1) * _WHILE_READ)
        while waiting and held + size > _IN_FLIGHT:
            done, part = waiting.popleft()
            held -= done
            yield part
        waiting.append((size, (key, region, store[_index(region)].read())))
        held += size
    yield from (part for _, part in waiting)


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)

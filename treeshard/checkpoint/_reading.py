"""Reads arrays of a checkpoint to host memory or directly into shards.

The files may come from anybody. Before memory is taken for an array, what its store declares is
compared with what is expected of it.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import numpy as np
import tensorstore
from etils import epath
from jax.sharding import SingleDeviceSharding

from treeshard._core.arrays import Region, lengths, region_of
from treeshard._core.processes import with_bar
from treeshard._core.text import human_bytes
from treeshard._disk.untrusted import bytes_of_files, parse
from treeshard.checkpoint._packed import FOLDER
from treeshard.checkpoint._paths import ARRAYS, is_local, read_bytes
from treeshard.errors import CheckpointError, DamagedError, FormatError

IN_FLIGHT = 2**26  # bytes that are being read at a time, if no single array has more
# Compression shrinks zeros to a thirty-thousandth, and the index of the store compresses again.
_MOST_EXPANSION = 2**20
_SMALL_CHUNK = 2**26  # bytes of a chunk that may be larger than its array
_NODES = "cache_pool#nodes"  # caches the nodes of the index of the store


@dataclass(frozen=True)
class OnHost:
    """The shape and dtype of an array to read as numpy."""

    shape: tuple[int, ...]
    dtype: Any


Wanted = jax.ShapeDtypeStruct | OnHost


def bytes_of_store(path: epath.Path) -> int:
    """The bytes of all files of the array store of a checkpoint, if it is in a file system.

    Raises:
        DamagedError: If one of them is not a regular file, so that reading it might not end.
        CheckpointError: If the directory may not be read.
    """
    parts = [path / ARRAYS, path / FOLDER] if is_local(path) else []
    try:
        return sum(bytes_of_files(part) for part in parts if part.is_dir())
    except CheckpointError as error:
        raise DamagedError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: the array store cannot be read: {error}.") from None


def check_declared(path: epath.Path, declared: int, stored: int) -> None:
    """Raises `DamagedError` if files of `stored` bytes cannot hold arrays of `declared` bytes."""
    if is_local(path) and declared > stored * _MOST_EXPANSION:
        raise DamagedError(
            f"{path}: the table of leaves lists arrays of {human_bytes(declared)}, which files of"
            f" {human_bytes(stored)} cannot hold."
        )


def read(
    path: epath.Path, wanted: Mapping[str, Wanted], *, progress: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads arrays, each process its own shards.

    Args:
        path: The checkpoint.
        wanted: By key: shape, stored dtype, and sharding.
        progress: The public function, which a progress bar names; empty for none.

    Returns:
        The arrays; and why the others cannot be read.

    Raises:
        CheckpointError: If this process may not read a file.
    """
    stores, errors = _open(path, wanted)
    parts = (
        (key, store, region) for key, store in stores.items() for region in _regions(wanted[key])
    )
    arrays: dict[str, Any] = {
        key: jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)
        for key, x in wanted.items()
        if not isinstance(x, OnHost) and not x.sharding.addressable_devices
    }
    groups = groupby(_read_ahead(parts), lambda part: part[0])
    for _ in with_bar([*stores], progress, show=bool(progress)):
        key, reads = next(groups)
        try:
            arrays[key] = _placed(wanted[key], {region: x.result() for _, region, x in reads})
        except Exception as error:  # of any type
            errors[key] = _text(error)
    return arrays, errors


def read_blocks(path: epath.Path, key: str, x: OnHost) -> Iterator[tuple[Region, np.ndarray]]:
    """Reads an array in blocks of its chunks, a few at a time.

    Raises:
        ValueError: If it cannot be read.
    """
    stores, errors = _open(path, {key: x})
    if errors:
        raise ValueError(errors[key])
    blocks = ((key, stores[key], region) for region in _grid(x.shape, _chunk_shape(stores[key])))
    for _, region, part in _read_ahead(blocks):
        try:
            yield region, part.result()
        except Exception as error:  # of any type
            raise ValueError(_text(error)) from None


def _grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Region]:
    counts = [-(-length // step) for length, step in zip(shape, chunk, strict=True)]
    for index in np.ndindex(*counts):
        starts = [i * step for i, step in zip(index, chunk, strict=True)]
        stops = map(min, np.add(starts, chunk).tolist(), shape)
        yield tuple(zip(starts, stops, strict=True))


def _regions(x: Wanted) -> Iterable[Region]:
    """The distinct parts of an array that this process reads."""
    if isinstance(x, OnHost):
        return [tuple((0, length) for length in x.shape)]
    indices = x.sharding.addressable_devices_indices_map(x.shape).values()
    return dict.fromkeys(region_of(index or (), x.shape) for index in indices)


def _placed(x: Wanted, parts: Mapping[Region, np.ndarray]) -> Any:
    if isinstance(x, OnHost):
        (full,) = parts.values()
        return full
    kind = x.sharding.memory_kind
    shards = [
        jax.device_put(  # shards that share memory could not be donated
            parts[region_of(index or (), x.shape)],
            SingleDeviceSharding(device, memory_kind=kind),
            may_alias=False,
        )
        for device, index in x.sharding.addressable_devices_indices_map(x.shape).items()
    ]
    array = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards, dtype=x.dtype)
    return jax.block_until_ready(array)  # so that its host memory can be freed


def _read_ahead(parts: Iterable[tuple[str, Any, Region]]) -> Iterator[tuple[str, Region, Any]]:
    """Starts to read parts of stores, and yields them in order, with futures of their values."""
    waiting: deque[tuple[int, tuple[str, Region, Any]]] = deque()
    held = 0
    for key, store, region in parts:
        size = math.prod(lengths(region)) * store.dtype.numpy_dtype.itemsize
        while waiting and held + size > IN_FLIGHT:
            done, part = waiting.popleft()
            held -= done
            yield part
        index = tuple(slice(start, stop) for start, stop in region)
        waiting.append((size, (key, region, store[index].read())))
        held += size
    yield from (part for _, part in waiting)


# ------------------------------------------------------------------ opening


def _open(path: epath.Path, wanted: Mapping[str, Wanted]) -> tuple[dict[str, Any], dict[str, str]]:
    """Opens the arrays with shards here; returns those that are as expected, and errors."""
    here = [k for k, x in wanted.items() if isinstance(x, OnHost) or x.sharding.addressable_devices]
    try:
        about = parse(read_bytes(path / ARRAYS / "_METADATA"))
        in_few_files, driver = about["use_ocdbt"], "zarr3" if about["use_zarr3"] else "zarr"
    except PermissionError as error:
        raise _unreadable(str(error)) from None
    except (OSError, FormatError, CheckpointError, KeyError, TypeError) as error:
        return {}, dict.fromkeys(here, f"Orbax's metadata of the array store is lost: {error}")
    context = tensorstore.Context({_NODES: {"total_bytes_limit": 10**8}})
    spec = {"driver": driver, "fill_missing_data_reads": False}
    spec |= {"recheck_cached_data": False, "recheck_cached_metadata": False}

    def begin(key: str) -> Any:
        files = _files(path, "" if in_few_files else key)
        nodes = {"driver": "ocdbt", "base": files, "path": f"{key}/", "cache_pool": _NODES}
        store = spec | {"kvstore": nodes if in_few_files else files}
        return tensorstore.open(store, read=True, open=True, context=context)

    futures = {key: begin(key) for key in here}
    stores: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for key, future in futures.items():
        try:
            store = future.result()
        except Exception as error:  # of any type
            absent = "NOT_FOUND" in str(error)
            errors[key] = "it is not in the array store." if absent else _text(error)
            continue
        if why := _misfit(store, wanted[key]):
            errors[key] = why
        else:
            stores[key] = store
    return stores, errors


def _files(path: epath.Path, key: str) -> Any:
    """TensorStore's name of the directory of the array store, or of one of its arrays."""
    folder = f"{path / ARRAYS}/{key and f'{key}/'}"
    return {"driver": "file", "path": folder} if is_local(path) else folder


def _misfit(store: Any, wanted: Wanted) -> str:
    """How a stored array differs from what is expected; empty if it does not."""
    shape, dtype = tuple(store.shape), store.dtype.numpy_dtype
    if (shape, dtype) != (tuple(wanted.shape), wanted.dtype):
        expected = f"expected {wanted.dtype}{list(wanted.shape)}"
        return f"stored as {dtype}{list(shape)}, {expected}."
    chunk = math.prod(_chunk_shape(store)) * dtype.itemsize
    if chunk > max(_SMALL_CHUNK, math.prod(shape) * dtype.itemsize):
        return f"it is stored in chunks of {human_bytes(chunk)}, which are larger than the array."
    return ""


def _chunk_shape(store: Any) -> tuple[int, ...]:
    return store.chunk_layout.read_chunk.shape or ()


def _text(error: Exception) -> str:
    """Why an array cannot be read. Raises `CheckpointError` if it may not: that is no damage."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.partition(" [")[0]  # TensorStore appends the whole spec
    if "PERMISSION_DENIED" in text:
        raise _unreadable(text) from None
    return text


def _unreadable(text: str) -> CheckpointError:
    return CheckpointError(f"This process may not read files of the array store: {text}.")

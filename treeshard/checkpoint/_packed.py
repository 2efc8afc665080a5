"""Small arrays, many in one file per process: `HEAD`, an index, then the bytes of shards.

The array store takes milliseconds for each array, however small. The index is JSON. By key, it has
the dtype of an array, its shape, the shape of its shards, and of each stored shard where its bytes
begin after the index and where the shard begins in each dim.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple, cast
from zlib import crc32

import jax
import numpy as np
from etils import epath
from jax.sharding import Sharding, SingleDeviceSharding

from treeshard._core.arrays import (
    Region,
    array_text,
    common,
    lengths,
    own_shards,
    regions_here,
    within,
)
from treeshard._core.processes import with_bar
from treeshard._disk.untrusted import MOST_BYTES, open_file, parse
from treeshard.checkpoint._paths import is_local
from treeshard.errors import CheckpointError, FormatError

SMALL = 2**20  # bytes: arrays below it are packed
FOLDER = "small"
HEAD = struct.Struct("<8sQI")  # which file this is, the length and the CRC-32 of the index
# What files that are damaged, or of unknown origin, raise.
_ERRORS = (OSError, CheckpointError, ValueError, TypeError, LookupError, AttributeError)
_MAGIC = b"treeshd\x01"


class Small(NamedTuple):
    """Copies of the shards of an array that this process stores.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        shard_shape: The shape of each shard.
        shards: Where a shard begins, and its bytes in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    shards: list[tuple[list[int], bytes]]


def is_small(x: jax.Array | np.ndarray) -> bool:
    """Whether an array is packed."""
    return x.size * x.dtype.itemsize < SMALL


def copies(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, Small]:
    """Copies of what this process stores of arrays: first replicas; process 0 also numpy arrays."""
    kept: dict[str, Small] = {}
    for key, x in arrays.items():
        if not isinstance(x, jax.Array):
            if jax.process_index() == 0:
                kept[key] = Small(str(x.dtype), x.shape, x.shape, [([0] * x.ndim, x.tobytes())])
        elif pieces := list(own_shards(x)):
            regions = regions_here(x.sharding, x.shape)
            shards = [
                ([start for start, _ in regions[piece.device]], np.asarray(piece.data).tobytes())
                for piece in pieces
            ]
            kept[key] = Small(str(x.dtype), x.shape, pieces[0].data.shape, shards)
    return kept


def write_packed(path: epath.Path, kept: Mapping[str, Small]) -> epath.Path | None:
    """Writes the file of this process, and returns its path; `None` if it stores nothing."""
    if not kept:
        return None
    index: dict[str, Any] = {}
    begin = 0
    for key, (dtype, shape, shard_shape, shards) in kept.items():
        places = []
        for start, data in shards:
            places.append([begin, *start])
            begin += len(data)
        index[key] = [dtype, shape, shard_shape, places]
    text = json.dumps(index, separators=(",", ":")).encode()
    (path / FOLDER).mkdir(exist_ok=True)
    name = path / FOLDER / f"shards_{jax.process_index()}"
    with name.open("wb") as file:
        file.write(HEAD.pack(_MAGIC, len(text), crc32(text)) + text)
        file.writelines(data for small in kept.values() for _, data in small.shards)
    return name


# ------------------------------------------------------------------ reading


class _Place(NamedTuple):
    """Where a shard is stored."""

    region: Region
    file: BinaryIO
    begin: int


def read_packed(
    path: epath.Path, wanted: Mapping[str, Any], *, progress: str = ""
) -> tuple[dict[str, Any], dict[str, str], str]:
    """Reads those arrays that are packed, each process its own shards.

    Args:
        path: The checkpoint.
        wanted: By key: shape and dtype; with a `sharding`, unless it is to be read to the host.
        progress: The public function, which a progress bar names; empty for none.

    Returns:
        The arrays; for packed arrays that cannot be read, why; and which files cannot be read, so
        that other arrays may be in them.
    """
    parts: dict[str, dict[Region, np.ndarray]] = {}
    errors: dict[str, str] = {}
    lost = ""
    with ExitStack() as opened:
        places: dict[str, list[_Place]] = {}
        for name in sorted((path / FOLDER).iterdir()) if (path / FOLDER).is_dir() else ():
            try:
                file = opened.enter_context(_opened(name))
                for key, text, found in _indexed(file, wanted):
                    places.setdefault(key, []).extend(found)
                    if text != (expected := array_text(wanted[key])):
                        errors[key] = f"stored as {text}, expected {expected}."
            except _ERRORS as error:
                lost += f" {FOLDER}/{name.name} is damaged: {error}"
        whole = [key for key in places if key not in errors]
        for key in with_bar(whole, progress, show=bool(progress)):
            try:
                parts[key] = {r: _read(r, wanted[key], places[key]) for r in _regions(wanted[key])}
            except (OSError, ValueError) as error:
                errors[key] = f"{error}{lost}"
    return _placed(wanted, parts), errors, lost


def _regions(x: Any) -> Iterable[Region]:
    """The distinct regions of an array that this process reads; the full array if it holds all."""
    if not hasattr(x, "sharding") or x.sharding.is_fully_addressable:
        return [tuple((0, length) for length in x.shape)]
    return dict.fromkeys(regions_here(x.sharding, x.shape).values())


def _placed(
    wanted: Mapping[str, Any], parts: Mapping[str, Mapping[Region, np.ndarray]]
) -> dict[str, Any]:
    """The arrays from the values of their regions: on the host, or placed all at once."""
    arrays: dict[str, Any] = {}
    steps: list[tuple[str, np.ndarray, Sharding]] = []
    for key, values in parts.items():
        sharding = getattr(wanted[key], "sharding", None)
        if sharding is None or sharding.is_fully_addressable:
            (arrays[key],) = values.values()
        if sharding is not None and sharding.is_fully_addressable:
            steps.append((key, arrays[key], sharding))
        elif sharding is not None:
            kind = sharding.memory_kind
            for device, region in regions_here(sharding, wanted[key].shape).items():
                one = SingleDeviceSharding(device, memory_kind=kind)
                steps.append((key, values[region], one))
    # Arrays that share memory with numpy's could not be donated.
    placed = jax.device_put([x for _, x, _ in steps], [s for *_, s in steps], may_alias=False)
    for key, group in groupby(zip(steps, placed, strict=True), lambda pair: pair[0][0]):
        shards, x = [shard for _, shard in group], wanted[key]
        arrays[key] = (
            shards[0]
            if x.sharding.is_fully_addressable
            else jax.make_array_from_single_device_arrays(
                x.shape, x.sharding, shards, dtype=x.dtype
            )
        )
    return arrays


def _opened(file: epath.Path) -> BinaryIO:
    return open_file(file) if is_local(file) else cast("BinaryIO", file.open("rb"))


def _indexed(file: BinaryIO, wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, list[_Place]]]:
    """The wanted arrays in a file: key, dtype and shape as text, and where shards are stored."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(HEAD.size)
    magic, length, crc = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0)
    if magic != _MAGIC or length > min(size, MOST_BYTES):
        raise FormatError("it has no head.")
    text = file.read(length)
    if crc32(text) != crc:
        raise FormatError("its index is not as saved.")
    for key, (dtype, shape, shard_shape, places) in parse(text).items():
        if key in wanted:
            regions = [
                tuple((a, a + n) for a, n in zip(start, shard_shape, strict=True))
                for _, *start in places
            ]
            begins = [HEAD.size + length + begin for begin, *_ in places]
            found = [_Place(r, file, begin) for r, begin in zip(regions, begins, strict=True)]
            yield key, f"{dtype}[{','.join(map(str, shape))}]", found


def _read(region: Region, x: Any, places: Iterable[_Place]) -> np.ndarray:
    """The values of a region, from the stored shards that overlap it."""
    same = [(place, region) for place in places if place.region == region]
    parts = ((place, common(place.region, region)) for place in places)
    pairs = same[:1] or [(place, part) for place, part in parts if part is not None]
    if sum(math.prod(lengths(part)) for _, part in pairs) != math.prod(lengths(region)):
        raise ValueError("not all of its shards are stored.")
    itemsize = np.dtype(x.dtype).itemsize
    sizes = [math.prod(lengths(place.region)) * itemsize for place, _ in pairs]
    for (place, _), size in zip(pairs, sizes, strict=True):  # before memory is taken
        if not HEAD.size <= place.begin <= place.file.seek(0, os.SEEK_END) - size:
            raise ValueError("the file of its shards is cut short.")
    values = np.zeros(lengths(region), x.dtype)
    for (place, part), size in zip(pairs, sizes, strict=True):
        place.file.seek(place.begin)
        data = place.file.read(size)
        shard = np.frombuffer(data, x.dtype).reshape(lengths(place.region))
        values[within(part, region)] = shard[within(part, place.region)]
    return values

"""The arrays of a tree as named tensors: their names, and the parts to write and read.

All names and dtypes are checked before the first byte is written or read. If a leaf that the format
cannot hold were left out, the file would load as another tree.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np
from jax.tree_util import tree_leaves

from treeshard._core.arrays import (
    Region,
    bytes_to_read,
    has_shape,
    is_key,
    is_spread,
    primary_shards,
    region_shape,
    regions_here,
)
from treeshard._core.memory import Meter, kept_by_allocator, lacking_memory
from treeshard._core.paths import PyTree, leaf_paths, shared_names
from treeshard._core.processes import all_or_none, show_progress
from treeshard._core.text import parse_dtype
from treeshard._disk.leaves import SavedLeaf, check_known, is_none
from treeshard._disk.requests import Placing, Request, RequestedLeaf, read_request
from treeshard._disk.to_devices import (
    Part,
    add_part,
    default_sharding,
    to_devices,
)
from treeshard._placement.targets import raise_unmovable, unreadable
from treeshard.errors import (
    CheckpointError,
    DamagedError,
    LeafError,
    TreeShardError,
    did_you_mean,
    listed,
)
from treeshard.interchange._byte_ranges import BLOCK, Piece, full_region, read
from treeshard.interchange._files import Stored
from treeshard.interchange._format import DTYPES, METADATA, PACKED, code_of

Names = Callable[[str], str] | Mapping[str, str]


# ------------------------------------------------------------------ names


def tensor_names(tree: PyTree, rename: Names | None, where: str) -> dict[int, str]:
    """The names of the arrays of a tree, by leaf index. `None` is a leaf.

    Raises `CheckpointError` if leaves would share a name, if the format does not allow a name, or
    if a mapping has a path that the tree lacks.
    """
    leaves = tree_leaves(tree, is_leaf=is_none)
    paths = leaf_paths(tree, is_leaf=is_none)
    path_of = {i: path for i, path in enumerate(paths) if has_shape(leaves[i])}
    facts: list[str] = []
    if isinstance(rename, Mapping):
        for path in rename.keys() - set(path_of.values()):  # such as a typing error
            hint = did_you_mean(str(path), path_of.values())
            facts.append(f"{path}: `rename` has it, but the tree has no such array.{hint}")
    names: dict[int, str] = {}
    for i, path in path_of.items():
        name = _rename(path, rename)
        if why := _explain_invalid(name):
            facts.append(f"{path}: its name would be {name!a}, {why}")
        else:
            names[i] = name
    shared = shared_names(map(names.get, range(len(leaves))), tree, is_leaf=is_none)
    for name, keys in shared.items():
        told = f"{name}: the name of {' and '.join(keys)}."
        facts.append(f"{told} Give them different names with `rename`.")
    if facts:
        raise CheckpointError(f"{where}: {listed(f'{len(facts)} names are invalid:', facts)}")
    return names


def _rename(path: str, rename: Names | None) -> Any:
    if rename is None:
        return path
    return rename.get(path, path) if isinstance(rename, Mapping) else rename(path)


def _explain_invalid(name: Any) -> str:
    if not isinstance(name, str):
        return f"which is a {type(name).__name__}, not a str."
    if name == METADATA:
        return "which the format reserves."
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate, as in a file name that is not UTF-8
        return "which is not valid Unicode."
    return ""


# ------------------------------------------------------------------ what is saved


def tensors_of(tree: Any, rename: Names | None, where: str) -> dict[str, Any]:
    """The arrays of a tree, by the names of their tensors. Raises if one cannot be written."""
    check_known(tree, where)
    arrays = ((i, leaf) for i, leaf in enumerate(tree_leaves(tree)) if has_shape(leaf))
    misfits = {i: _unwritable(leaf) for i, leaf in arrays}
    raise_unmovable(tree, misfits, where)
    leaves = tree_leaves(tree, is_leaf=is_none)
    return {name: leaves[i] for i, name in tensor_names(tree, rename, where).items()}


_NO_KEYS = (
    "safetensors has no PRNG keys. Save `jax.random.key_data(key)`, and turn it back into keys with"
    " `jax.random.wrap_key_data`."
)
_NO_DTYPE = (
    "safetensors does not have this dtype, or packs it. Use `.astype`, or `.view('uint8')` for the"
    " bytes."
)


def _unwritable(leaf: Any) -> TreeShardError | None:
    if misfit := unreadable(leaf):
        return misfit
    if code_of(leaf.dtype) is None:
        return LeafError(_NO_KEYS if is_key(leaf) else _NO_DTYPE)
    return None


def names_to_write(tensors: Mapping[str, Any], what: str, timeout: float) -> list[str]:
    """The tensors that this process writes. The first process with a full array writes it."""

    def combine(messages: list[bytes]) -> bytes:
        has_it_all = zip(*messages, strict=True)  # for each tensor, a 1 or 0 from each process
        return json.dumps([row.index(1) if any(row) else None for row in has_it_all]).encode()

    with all_or_none(what, combine, phase="parts", timeout=timeout) as parts:
        parts.own = bytes(not is_spread(x) for x in tensors.values())
    me, owners = jax.process_index(), json.loads(parts.answer)
    return [name for name, i in zip(tensors, owners, strict=True) if i is None or i == me]


def pieces_of(leaf: Any) -> list[Piece]:
    """The shards of a leaf that this process writes: the shards with replica index 0."""
    if not isinstance(leaf, jax.Array):
        x = np.asarray(leaf)
        return [Piece(full_region(x.shape), x)]
    return [Piece(region, np.asarray(shard)) for region, shard in primary_shards(leaf)]


def check_memory_to_write(path: Path, tensors: Iterable[Any]) -> None:
    """Raises `CheckpointError` unless there is memory for the shards of one tensor."""
    # `write` makes two copies of a block: the joined shards, and their bytes as in the file.
    needed = max(map(bytes_to_read, tensors), default=0) + 2 * BLOCK
    if lacking := lacking_memory(needed):
        raise CheckpointError(f"save_safetensors: {path} was not written: it needs {lacking[0]}")


# ------------------------------------------------------------------ what is loaded


def tensor_request(
    stored: Mapping[str, Stored],
    like: PyTree,
    placing: Placing,
    rename: Names | None,
    cast: Any,
    partial: bool,
    where: str,
) -> Request:
    """Compares the requested tensors with the stored ones. Without `like`, all are requested."""
    types = {
        name: SavedLeaf(name, "array", x.tensor.shape, DTYPES[x.tensor.code])
        for name, x in stored.items()
    }
    # The same request as for a checkpoint, so that both report differences in the same way.
    request = read_request(
        types,
        like,
        placing,
        cast=cast,
        partial=partial,
        names=lambda tree: tensor_names(tree, rename, where),
        where=where,
        of_subtrees=rename is None,  # `rename` has the paths in `like`
    )
    for leaf in request.to_read().values():
        code = stored[leaf.name].tensor.code
        if code in PACKED:
            why = f"{code} packs several numbers into a byte; no array can do that."
            request.differences.misfits[leaf.name] = why
    return request


def tensor_facts(stored: Mapping[str, Stored]) -> str:
    """A checksum of the tensors in the files, for processes to compare."""
    return f"{crc32(repr([x.tensor for x in stored.values()]).encode()):08x}"


class Reading(NamedTuple):
    """A tensor that is read for a leaf."""

    leaf_index: int  # in the like-tree
    leaf: RequestedLeaf
    stored: Stored
    regions: list[Region]  # the regions that this process reads


def plan_readings(request: Request, stored: Mapping[str, Stored]) -> list[Reading]:
    """The readings of this process for a request, ordered by file and offset."""
    readings = []
    for i, leaf in request.to_read().items():
        regions = [full_region(leaf.shape)]
        if leaf.sharding is not None:
            # A region that several devices hold is read once.
            regions = list(dict.fromkeys(regions_here(leaf.sharding, leaf.shape).values()))
        readings.append(Reading(i, leaf, stored[leaf.name], regions))
    # Disks and network file systems read ahead.
    return sorted(readings, key=lambda row: (row.stored.file.fileno(), row.stored.tensor.start))


_KEPT = 2**26  # the most bytes of freed blocks that the allocator keeps, as measured


def memory_to_load(readings: Iterable[Reading]) -> int:
    """The most host memory that `read_tensors` takes, for readings in this order."""
    meter, sizes = Meter(), list[tuple[int, int]]()
    default = default_sharding()
    for row in readings:
        leaf, stored = row.leaf, row.stored.tensor.dtype
        if leaf.on_devices and leaf.sharding is None:
            leaf = leaf._replace(sharding=default)
        counts = {region: math.prod(region_shape(region)) for region in row.regions}
        # All regions of a tensor are read before the first is moved.
        meter.add(sum(counts.values()) * stored.itemsize)
        converts = parse_dtype(leaf.dtype) != stored
        for region, count in counts.items():
            add_part(meter, leaf, region, nbytes=count * stored.itemsize, converts=converts)
            if leaf.on_devices:
                size = count * leaf.itemsize
                sizes.append((size, size))
    return meter.peak + kept_by_allocator(sizes, _KEPT)


def read_tensors(request: Request, readings: Sequence[Reading], *, progress: bool) -> PyTree:
    """Reads the tree of a request."""
    shown = show_progress(readings, "load_safetensors", unit="tensor", show=progress)
    on_host: dict[int, np.ndarray] = {}

    def read_parts() -> Iterator[Part[int]]:
        for i, leaf, stored, regions in shown:
            parts = _read_regions(stored, regions)
            # Each region is taken out of `parts`, so that no variable keeps it in memory.
            while parts and leaf.on_devices:
                yield (i, *_take(parts, leaf.dtype))
            if parts:
                _, on_host[i] = _take(parts, leaf.dtype)

    on_devices = {row.leaf_index: row.leaf for row in readings if row.leaf.on_devices}
    return request.tree((to_devices(on_devices, read_parts()) | on_host).items())


def _take(parts: dict[Region, np.ndarray], dtype: str) -> tuple[Region, np.ndarray]:
    """Takes a region out of `parts`, in the requested dtype."""
    region, x = parts.popitem()
    with np.errstate(all="ignore"):  # out of range becomes inf, as in `jnp.asarray`
        return region, x.astype(parse_dtype(dtype), copy=False)


def read_full(stored: Stored) -> np.ndarray:
    """Reads a tensor in full. Raises `DamagedError` if its file is cut short during the call."""
    full = full_region(stored.tensor.shape)
    return _read_regions(stored, [full])[full]


def _read_regions(stored: Stored, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
    tensor, file = stored
    pieces = [Piece(region, np.empty(region_shape(region), tensor.dtype)) for region in regions]
    try:
        read(file.fileno(), tensor.start, tensor.shape, pieces)
    except EOFError:
        raise DamagedError(f"{file.name} was cut short while it was read.") from None
    return dict(pieces)

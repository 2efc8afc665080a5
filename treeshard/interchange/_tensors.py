"""The arrays of a tree as named tensors: their names, what to write of them, what to read.

All names and dtypes are checked before the first byte is written or read: the format has no place
for a leaf that it cannot hold, and a file without it would load as a tree that lacks it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
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
    region_of,
    region_shape,
    regions_here,
)
from treeshard._core.hosts import check_memory_of_hosts
from treeshard._core.memory import Meter, kept_by_allocator, lacking_memory
from treeshard._core.paths import PyTree, leaf_paths, shared_names
from treeshard._core.processes import all_or_none, show_progress
from treeshard._core.text import parse_dtype
from treeshard._disk.leaves import check_known, is_none
from treeshard._disk.requests import (
    Differences,
    LeafType,
    Placing,
    Request,
    RequestedLeaf,
    cast_dtype,
    read_request,
)
from treeshard._disk.to_devices import (
    Part,
    Target,
    add_part,
    default_sharding,
    to_devices,
)
from treeshard._disk.untrusted import check_memory, no_memory_to_read
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
from treeshard.interchange._format import DTYPES, METADATA, PACKED, Tensor, code_of

Names = Callable[[str], str] | Mapping[str, str]


# ------------------------------------------------------------------ names

_UNKNOWN = "{path}: `rename` has it, but the tree has no such array.{hint}"
_INVALID = "{path}: its name would be {name!a}, {why}"
_SHARED = "{name}: the name of {keys}. Give them different names with `rename`."


def tensor_names(tree: PyTree, rename: Names | None, where: str) -> dict[int, str]:
    """The names of the arrays of a tree, by leaf index; `None` is a leaf.

    Raises `CheckpointError` if leaves would share a name, if the format does not allow a name, or
    if a mapping has other paths.
    """
    leaves = tree_leaves(tree, is_leaf=is_none)
    paths = leaf_paths(tree, is_leaf=is_none)
    path_of = {i: path for i, path in enumerate(paths) if has_shape(leaves[i])}
    facts: list[str] = []
    names: dict[int, str] = {}
    if isinstance(rename, Mapping):
        for path in rename.keys() - set(path_of.values()):
            hint = did_you_mean(str(path), path_of.values())
            facts.append(_UNKNOWN.format(path=path, hint=hint))
    for i, path in path_of.items():
        name = _renamed(path, rename)
        why = _why_invalid(name)
        if why:
            facts.append(_INVALID.format(path=path, name=name, why=why))
        else:
            names[i] = name
    shared = shared_names(map(names.get, range(len(leaves))), tree, is_leaf=is_none)
    facts += [_SHARED.format(name=name, keys=" and ".join(shared[name])) for name in shared]
    if facts:
        raise CheckpointError(f"{where}: {listed(f'{len(facts)} names are invalid:', facts)}")
    return names


def _renamed(path: str, rename: Names | None) -> Any:
    if rename is None:
        return path
    if isinstance(rename, Mapping):
        return rename.get(path, path)
    return rename(path)


def _why_invalid(name: Any) -> str:
    if not isinstance(name, str):
        return f"which is a {type(name).__name__}, not a str."
    if name == METADATA:
        return "which the format reserves."
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate, as Python makes of file names that are not UTF-8
        return "which is not valid Unicode."
    return ""


# ------------------------------------------------------------------ what is saved


def tensors_of(tree: Any, rename: Names | None, where: str) -> dict[str, Any]:
    """The arrays of a tree, all of which can be written, by the names of their tensors."""
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
    """The tensors of which this process writes shards, or all: the first that has all does."""
    with all_or_none(what, phase="parts", timeout=timeout) as answers:
        answers.append(bytes(not is_spread(x) for x in tensors.values()))
    has_it_all = zip(*answers, strict=True)  # for each tensor, a 1 or 0 of each process
    return [
        name
        for name, row in zip(tensors, has_it_all, strict=True)
        if not any(row) or row.index(1) == jax.process_index()
    ]


def pieces_of(leaf: Any) -> list[Piece]:
    """The shards of a leaf that this process writes: the first copy of each that it holds."""
    if not isinstance(leaf, jax.Array):
        x = np.asarray(leaf)
        return [Piece(full_region(x.shape), x)]
    shards = primary_shards(leaf)
    return [Piece(region_of(shard.index, leaf.shape), np.asarray(shard.data)) for shard in shards]


def check_memory_to_write(path: Path, tensors: Iterable[Any]) -> None:
    """Raises `CheckpointError` unless there is memory for the shards of one tensor."""
    # Of a block, `write` makes two copies: the joined shards, and their bytes as in the file.
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
    where: str,
) -> Request:
    """Compares the requested tensors with the stored ones. Without `like`, all are requested."""
    types = {name: _leaf_type(x.tensor) for name, x in stored.items()}
    names = partial(tensor_names, rename=rename, where=where)
    request = read_request(types, like, placing, cast=cast, names=names, where=where)
    requested = (stored[leaf.name].tensor for leaf in request.to_read().values())
    request.differences.misfits.update(_packed(requested))
    return request


def _leaf_type(tensor: Tensor) -> LeafType:
    return LeafType("array", tensor.shape, DTYPES[tensor.code])


def _packed(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Why some tensors cannot be arrays, by name."""
    fact = "{} packs several numbers into a byte; no array can do that."
    return {x.name: fact.format(x.code) for x in tensors if x.code in PACKED}


def tensor_facts(stored: Mapping[str, Stored]) -> str:
    """The files' tensors in short, for processes to compare."""
    return f"{crc32(repr([x.tensor for x in stored.values()]).encode()):08x}"


def read_tensors(request: Request, stored: Mapping[str, Stored], *, progress: bool) -> PyTree:
    """Reads the tree of a request, ordered by file and offset."""
    rows = _rows(request, stored)
    shown = show_progress(rows, "load_safetensors", unit="tensor", show=progress)
    on_host: dict[int, np.ndarray] = {}

    def read_parts() -> Iterator[Part[int]]:
        for tensor, i, leaf in shown:
            parts = _read_regions(tensor, _regions(leaf))
            dtype = parse_dtype(leaf.type.dtype)
            while parts and leaf.type.on_devices:
                yield (i, *_take(parts, dtype))  # no variable keeps it
            if parts:
                _, on_host[i] = _take(parts, dtype)

    targets = {
        i: Target(leaf.type.shape, parse_dtype(leaf.type.dtype), leaf.sharding)
        for _, i, leaf in rows
        if leaf.type.on_devices
    }
    return request.tree((to_devices(targets, read_parts()) | on_host).items())


def check_memory_to_load(
    path: Path, request: Request, stored: Mapping[str, Stored], timeout: float
) -> None:
    """Raises on all processes, unless each host has the memory for `read_tensors`."""
    needed = _memory_to_load((x.tensor, leaf) for x, _, leaf in _rows(request, stored))
    error = partial(no_memory_to_read, path)
    check_memory_of_hosts("load_safetensors", needed, error, timeout=timeout)


def read_by_name(
    path: Path, stored: Mapping[str, Stored], cast: Any, *, progress: bool
) -> dict[str, np.ndarray]:
    """Reads all tensors into host memory, in the order of the files."""
    to = cast_dtype(cast)
    Differences((), (), _packed(x.tensor for x in stored.values())).check(str(path))
    leaves = {
        name: RequestedLeaf(name, _leaf_type(x.tensor).cast(to), None) for name, x in stored.items()
    }
    check_memory(path, _memory_to_load((stored[name].tensor, x) for name, x in leaves.items()))
    shown = show_progress(list(stored), "load_safetensors", unit="tensor", show=progress)
    dtypes = {name: parse_dtype(x.type.dtype) for name, x in leaves.items()}
    return {name: _cast(read_full(stored[name]), dtypes[name]) for name in shown}


def _rows(
    request: Request, stored: Mapping[str, Stored]
) -> list[tuple[Stored, int, RequestedLeaf]]:
    rows = [(stored[leaf.name], i, leaf) for i, leaf in request.to_read().items()]
    # Disks and network file systems read ahead.
    return sorted(rows, key=lambda row: (row[0].file.fileno(), row[0].tensor.start))


_KEPT = 2**26  # bytes of freed blocks that the allocator keeps at most, by measurement


def _memory_to_load(tensors: Iterable[tuple[Tensor, RequestedLeaf]]) -> int:
    """The host memory that it takes at most to load tensors, in this order, as requested."""
    meter, sizes = Meter(), list[tuple[int, int]]()
    default = default_sharding()
    for tensor, leaf in tensors:
        dtype = parse_dtype(leaf.type.dtype)
        sharding = (leaf.sharding or default) if leaf.type.on_devices else None
        target = Target(leaf.type.shape, dtype, sharding)
        counts = {region: math.prod(region_shape(region)) for region in _regions(leaf)}
        # All regions of a tensor are read before the first is moved.
        meter.add(sum(counts.values()) * tensor.dtype.itemsize)
        for region, count in counts.items():
            nbytes = count * tensor.dtype.itemsize
            add_part(meter, target, region, nbytes=nbytes, converts=dtype != tensor.dtype)
            if leaf.type.on_devices:
                sizes.append((count * dtype.itemsize,) * 2)
    return meter.peak + kept_by_allocator(sizes, _KEPT)


def _regions(leaf: RequestedLeaf) -> list[Region]:
    """The regions of a tensor that this process reads: of one on devices, its own shards."""
    if leaf.sharding is None:
        return [full_region(leaf.type.shape)]
    return list(dict.fromkeys(regions_here(leaf.sharding, leaf.type.shape).values()))


def _take(parts: dict[Region, np.ndarray], dtype: np.dtype) -> tuple[Region, np.ndarray]:
    region, x = parts.popitem()
    return region, _cast(x, dtype)


def read_full(stored: Stored) -> np.ndarray:
    """Reads a tensor. Raises `DamagedError` if its file was cut short meanwhile."""
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


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if x.dtype == dtype:
        return x
    with np.errstate(all="ignore"):  # out of range becomes inf, as in `jnp.asarray`
        return x.astype(dtype)

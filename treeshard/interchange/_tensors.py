"""The arrays of a tree as named tensors: their names, and the parts to write and read.

All names and dtypes are checked before the first byte is written or read. If a leaf that the format
cannot hold were left out, the file would load as another tree.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_leaves

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
from treeshard._core.paths import PyTree, name_leaves, shared_names
from treeshard._core.processes import all_or_none, show_progress
from treeshard._core.text import parse_dtype
from treeshard._disk.leaves import SavedLeaf, check_known, is_none
from treeshard._disk.requests import (
    Differences,
    Placing,
    Request,
    RequestedLeaf,
    after_cast,
    cast_dtype,
    convert,
    read_request,
)
from treeshard._disk.to_devices import (
    Part,
    add_part,
    default_sharding,
    to_devices,
)
from treeshard._disk.untrusted import check_memory
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


def tensor_names(tree: PyTree, rename: Names | None, where: str) -> dict[int, str]:
    """The names of the arrays of a tree, by leaf index. `None` is a leaf.

    Raises `CheckpointError` if leaves would share a name, if the format does not allow a name, or
    if a mapping has a path that the tree lacks.
    """
    leaves, treedef = tree_flatten(tree, is_leaf=is_none)
    paths = name_leaves(tree, treedef)
    path_of = {i: path for i, path in enumerate(paths) if has_shape(leaves[i])}
    facts: list[str] = []
    if isinstance(rename, Mapping):
        for path in rename.keys() - set(path_of.values()):  # such as a typing error
            hint = did_you_mean(str(path), path_of.values())
            facts.append(f"{path}: `rename` has it, but the tree has no such array.{hint}")
    names = {**path_of}
    if rename is not None:
        names = {i: _rename(path, rename) for i, path in path_of.items()}
    for i, why in _invalid_names(names).items():
        facts.append(f"{path_of[i]}: its name would be {names.pop(i)!a}, {why}")
    shared = shared_names(map(names.get, range(len(leaves))), tree, is_leaf=is_none)
    for name, keys in shared.items():
        told = f"{name}: the name of {' and '.join(keys)}."
        facts.append(f"{told} Give them different names with `rename`.")
    if facts:
        raise CheckpointError(f"{where}: {listed(f'{len(facts)} names are invalid:', facts)}")
    return names


def _rename(path: str, rename: Names) -> Any:
    return rename.get(path, path) if isinstance(rename, Mapping) else rename(path)


def _invalid_names(names: Mapping[int, Any]) -> dict[int, str]:
    """Why the format does not allow some names, by leaf index."""
    try:  # all at once, as nearly always all are valid
        "".join(names.values()).encode()
        if METADATA not in names.values():
            return {}
    except (TypeError, UnicodeEncodeError):
        pass
    return {i: why for i, name in names.items() if (why := _explain_invalid(name))}


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
    arrays = {i: leaf for i, leaf in enumerate(tree_leaves(tree)) if has_shape(leaf)}
    raise_unmovable(tree, {i: _unwritable(leaf) for i, leaf in arrays.items()}, where)
    names = tensor_names(tree, rename, where).values()
    return dict(zip(names, arrays.values(), strict=True))


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
    if jax.process_count() == 1:
        return [*tensors]

    def combine(messages: list[bytes]) -> bytes:
        has_it_all = zip(*messages, strict=True)  # for each tensor, a 1 or 0 from each process
        return json.dumps([row.index(1) if any(row) else None for row in has_it_all]).encode()

    with all_or_none(what, combine, phase="parts", timeout=timeout) as parts:
        parts.own = bytes(not is_spread(x) for x in tensors.values())
    me, owners = jax.process_index(), json.loads(parts.answer)
    return [name for name, i in zip(tensors, owners, strict=True) if i is None or i == me]


def values_of(leaf: Any) -> np.ndarray | list[Piece]:
    """A numpy leaf, or the shards that this process writes: the shards with replica index 0."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    return [Piece(region, np.asarray(shard)) for region, shard in primary_shards(leaf)]


def check_memory_to_write(path: Path, tensors: Mapping[str, Any], rows: Iterable[Tensor]) -> None:
    """Raises `CheckpointError` unless there is memory for the shards of one tensor."""
    # `write` makes two copies of a block: the joined shards, and their bytes as in the file.
    block = min(BLOCK, max([row.nbytes for row in rows], default=0))
    needed = max([bytes_to_read(x) for x in tensors.values()], default=0) + 2 * block
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
    wanted = (stored[leaf.name].tensor for leaf in request.to_read().values())
    request.differences.misfits.update(_packed(wanted))
    return request


def _packed(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Why tensors cannot be read, by name."""
    why = "{} packs several numbers into a byte; no array can do that."
    return {x.name: why.format(x.code) for x in tensors if x.code in PACKED}


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
        counts = {region: math.prod(region_shape(region)) for region in row.regions}
        # All regions of a tensor are read before the first is moved.
        meter.add(sum(counts.values()) * stored.itemsize)
        converts = parse_dtype(leaf.dtype) != stored
        for region, count in counts.items():
            nbytes = count * stored.itemsize
            add_part(meter, leaf, region, default, nbytes=nbytes, converts=converts)
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
    return region, convert(x, parse_dtype(dtype))


def _read_regions(stored: Stored, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
    tensor, file = stored
    pieces = [Piece(region, np.empty(region_shape(region), tensor.dtype)) for region in regions]
    try:
        read(file.fileno(), tensor.start, tensor.shape, pieces)
    except EOFError:
        raise _cut_short(file) from None
    return dict(pieces)


def _cut_short(file: BinaryIO) -> DamagedError:
    return DamagedError(f"{file.name} was cut short while it was read.")


# ------------------------------------------------------------------ loading into host memory


def load_on_host(
    source: Path, stored: Mapping[str, Stored], cast: Any, *, progress: bool
) -> dict[str, np.ndarray]:
    """Reads all tensors in full, by name. Raises as `load_safetensors`."""
    to = cast_dtype(cast)
    Differences((), (), _packed(x for x, _ in stored.values())).check(str(source))
    dtypes = {code: parse_dtype(after_cast(name, to)) for code, name in DTYPES.items()}
    held = needed = 0
    for x, _ in stored.values():
        held += math.prod(x.shape) * dtypes[x.code].itemsize
        is_converted = x.dtype != dtypes[x.code]  # which holds it before and after
        needed = max(needed, held + (x.nbytes if is_converted else 0))
    check_memory(source, needed)
    arrays: dict[str, np.ndarray] = {}
    tensors = [*stored.values()]  # ordered by file and offset
    shown = show_progress(tensors, "load_safetensors", unit="tensor", show=progress)
    for tensor, x in _read_all(shown):
        arrays[tensor.name] = convert(x, dtypes[tensor.code])
        del x  # frees it before the next one is read
    return dict(sorted(arrays.items()))  # as JAX orders a dict


def read_full(stored: Stored) -> np.ndarray:
    """Reads a tensor in full. Raises `DamagedError` if its file is cut short during the call."""
    full = full_region(stored.tensor.shape)
    return _read_regions(stored, [full])[full]


_AHEAD = 2**16  # bytes that are read at once for small tensors


def _read_all(tensors: Iterable[Stored]) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Reads tensors in full, which come ordered by file and offset."""
    ahead, begin, of_file = b"", 0, None
    for x in tensors:
        tensor, file = x
        if tensor.nbytes > _AHEAD:
            yield tensor, read_full(x)
            continue
        if file is not of_file or tensor.start + tensor.nbytes > begin + len(ahead):
            file.seek(tensor.start)
            ahead, begin, of_file = file.read(_AHEAD), tensor.start, file
            if tensor.nbytes > len(ahead):
                raise _cut_short(file)
        at = tensor.start - begin
        yield tensor, np.ndarray(tensor.shape, tensor.dtype, ahead, at).copy()

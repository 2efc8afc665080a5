"""Requests for tensors of open files: compares them with the files, and reads them."""

from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np

from treeshard._across import facts_of
from treeshard._asked_for import Differences, LeafType, cast_dtype, compare
from treeshard._byte_ranges import Piece, read
from treeshard._errors import DamagedError
from treeshard._like import Asked, Placing, arrays_asked_for
from treeshard._literals import parse_dtype
from treeshard._parcels import box_of, lengths
from treeshard._progress import with_bar
from treeshard._safetensors import PACKED
from treeshard._tensor_files import Stored
from treeshard._tensor_trees import Names, tensor_names


class Wanted(NamedTuple):
    """A tree to read.

    Attributes:
        leaves: The leaves of the like-tree.
        treedef: Its structure.
        names: The names of the requested tensors, by the positions of their leaves.
        asked: The requested arrays, by the same positions.
        stored: The tensors in the files, by name.
        differences: How the requested tensors differ from the stored ones.
    """

    leaves: list[Any]
    treedef: Any
    names: dict[int, str]
    asked: dict[int, Asked]
    stored: dict[str, Stored]
    differences: Differences

    def facts(self) -> dict[str, str]:
        """What all processes must agree on."""
        files = repr([(x.tensor, x.at) for x in self.stored.values()])
        rows = [
            (name, self.leaves[i], [] if asked.sharding is None else [asked.sharding])
            for i, name in self.names.items()
            if (asked := self.asked[i]) and name in self.stored
        ]
        return {"the files": f"{crc32(files.encode()):08x}", **facts_of(rows)}

    def read(self, progress: bool) -> Any:
        """Reads the tree, ordered by file and offset."""
        rows = [(self.stored[name], i) for i, name in self.names.items() if name in self.stored]
        rows.sort(key=lambda row: (row[0].file.fileno(), row[0].at))
        leaves = list(self.leaves)
        for stored, i in with_bar(rows, "load_safetensors", unit="tensor", show=progress):
            leaf = _read(stored, self.asked[i])
            leaves[i] = leaf[()] if isinstance(leaves[i], np.generic) else leaf
        return self.treedef.unflatten(leaves)


def wanted_of(
    stored: dict[str, Stored],
    like: Any,
    placing: Placing,
    rename: Names | None,
    cast: Any,
    where: str,
) -> Wanted:
    """Compares the requested tensors with the stored ones. Without `like`, all are requested.

    Raises:
        As `load_safetensors`, except for the differences.
    """
    to = None if cast is None else cast_dtype(cast)
    types = {
        name: LeafType("array", x.tensor.shape, str(x.tensor.dtype)) for name, x in stored.items()
    }
    tree = _all_of(types, to) if like is None else like
    leaves, treedef, asked = arrays_asked_for(tree, placing, where)
    if like is None and placing.rules is None:
        asked = {i: Asked(x.type._replace(on_devices=False), None) for i, x in asked.items()}
    names = tensor_names(treedef.unflatten(leaves), rename, where)
    differences = compare(types, {name: asked[i].type for i, name in names.items()}, to)
    packed = {
        name: f"{stored[name].tensor.code} packs several numbers into a byte; no array can do that."
        for name in names.values()
        if name in stored and stored[name].tensor.code in PACKED
    }
    differences = differences._replace(misfits=differences.misfits | packed)
    return Wanted(leaves, treedef, names, asked, stored, differences)


def _all_of(types: dict[str, LeafType], to: str | None) -> dict[str, jax.ShapeDtypeStruct]:
    wanted = {name: x if to is None else x.cast(to) for name, x in types.items()}
    return {name: jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype)) for name, x in wanted.items()}


def _read(stored: Stored, asked: Asked) -> Any:
    """Reads a tensor as requested; for one on devices, only the shards of this process."""
    shape, sharding = stored.tensor.shape, asked.sharding
    indices = [(slice(None),) * len(shape)]
    if sharding is not None:
        indices = sharding.addressable_devices_indices_map(shape).values()
    boxes = dict.fromkeys(box_of(index or (), shape) for index in indices)
    pieces = [Piece(box, np.empty(lengths(box), stored.tensor.dtype)) for box in boxes]
    try:
        read(stored.file.fileno(), stored.at, shape, pieces)
    except EOFError:
        raise DamagedError(f"{stored.file.name} was cut short while it was read.") from None
    dtype = parse_dtype(asked.type.dtype)
    with np.errstate(all="ignore"):  # out of range becomes inf, as in `jnp.asarray`
        parts = {piece.box: piece.items.astype(dtype, copy=False) for piece in pieces}
    if sharding is None:
        (full,) = parts.values()
        return jax.device_put(full) if asked.type.on_devices else full
    array = jax.make_array_from_callback(
        shape, sharding, lambda index: parts[box_of(index or (), shape)], dtype=dtype
    )
    return jax.block_until_ready(array)  # so that its host memory can be freed

"""Which tensors of open files are read, and into what."""

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
    """What is to be read.

    Attributes:
        leaves: The leaves of the like-tree.
        treedef: Its structure.
        names: The tensors asked for, by the positions of their leaves.
        asked: What is asked for there.
        stored: What the files have, by name.
        differences: In what the one is not the other.
    """

    leaves: list[Any]
    treedef: Any
    names: dict[int, str]
    asked: dict[int, Asked]
    stored: dict[str, Stored]
    differences: Differences

    def facts(self) -> dict[str, str]:
        """What all processes must have alike."""
        files = repr([(x.tensor, x.at) for x in self.stored.values()])
        rows = [
            (name, self.leaves[i], [] if asked.sharding is None else [asked.sharding])
            for i, name in self.names.items()
            if (asked := self.asked[i]) and name in self.stored
        ]
        return {"the files": f"{crc32(files.encode()):08x}", **facts_of(rows)}

    def read(self, progress: bool) -> Any:
        """The tree, read; in the order of the bytes."""
        there = [(self.stored[name], i) for i, name in self.names.items() if name in self.stored]
        there.sort(key=lambda one: (one[0].file.fileno(), one[0].at))
        leaves = list(self.leaves)
        for stored, i in with_bar(there, "load_safetensors", unit="tensor", show=progress):
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
    """Compares what is asked for with what is there. Without `like`, that is all of it by name.

    Raises:
        As `load_safetensors` does, but for the differences.
    """
    to = None if cast is None else cast_dtype(cast)
    there = {
        name: LeafType("array", x.tensor.shape, str(x.tensor.dtype)) for name, x in stored.items()
    }
    tree = _all_of(there, to) if like is None else like
    leaves, treedef, asked = arrays_asked_for(tree, placing, where)
    if like is None and placing.rules is None:
        asked = {i: Asked(x.type._replace(on_devices=False), None) for i, x in asked.items()}
    names = tensor_names(treedef.unflatten(leaves), rename, where)
    found = compare(there, {name: asked[i].type for i, name in names.items()}, to)
    packed = {
        name: f"{stored[name].tensor.code} packs several numbers in a byte; no array can hold it."
        for name in names.values()
        if name in stored and stored[name].tensor.code in PACKED
    }
    found = found._replace(misfits=found.misfits | packed)
    return Wanted(leaves, treedef, names, asked, stored, found)


def _all_of(there: dict[str, LeafType], to: str | None) -> dict[str, jax.ShapeDtypeStruct]:
    types = {name: x if to is None else x.cast(to) for name, x in there.items()}
    return {name: jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype)) for name, x in types.items()}


def _read(stored: Stored, asked: Asked) -> Any:
    """A tensor as it is asked for; of one on devices, the parts for those of this process."""
    shape, sharding = stored.tensor.shape, asked.sharding
    indices = [(slice(None),) * len(shape)]
    if sharding is not None:
        indices = sharding.addressable_devices_indices_map(shape).values()
    boxes = dict.fromkeys(box_of(index or (), shape) for index in indices)
    pieces = [Piece(box, np.empty(lengths(box), stored.tensor.dtype)) for box in boxes]
    try:
        read(stored.file.fileno(), stored.at, shape, pieces)
    except EOFError:
        raise DamagedError(f"{stored.file.name} was cut short while it was being read.") from None
    dtype = parse_dtype(asked.type.dtype)
    with np.errstate(all="ignore"):  # beyond float16 comes inf, as in `jnp.asarray`
        parts = {piece.box: piece.items.astype(dtype, copy=False) for piece in pieces}
    if sharding is None:
        (whole,) = parts.values()
        return jax.device_put(whole) if asked.type.on_devices else whole
    array = jax.make_array_from_callback(
        shape, sharding, lambda index: parts[box_of(index or (), shape)], dtype=dtype
    )
    return jax.block_until_ready(array)  # so that host memory is free again

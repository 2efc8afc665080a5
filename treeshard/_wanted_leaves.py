"""Which leaves of a checkpoint are read, and into what."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from treeshard._across import facts_of
from treeshard._asked_for import (
    Differences,
    cast_dtype,
    compare,
    leaf_type,
    saved_types,
)
from treeshard._errors import MismatchError, listed
from treeshard._host import to_read
from treeshard._leaf_table import LeafTable, flatten_all, unpack
from treeshard._like import Asked, Placing, arrays_asked_for
from treeshard._literals import parse_dtype
from treeshard._orbax import OnHost
from treeshard._paths import same_path_keys
from treeshard._plan import Plan
from treeshard._saved_leaf import SavedLeaf, value_of


class Wanted(NamedTuple):
    """What is to be read.

    Attributes:
        paths: The paths of the leaves of the like-tree, `None`s among them.
        leaves: These leaves.
        treedef: Its structure.
        asked: What is asked for, by the positions of leaves; static ones are left out.
        saved: What the checkpoint has, by path.
        differences: In what the one is not the other.
    """

    paths: list[str]
    leaves: list[Any]
    treedef: Any
    asked: dict[int, Asked]
    saved: dict[str, SavedLeaf]
    differences: Differences

    def facts(self) -> dict[str, str]:
        """What all processes must have alike."""
        rows = [
            (row.path, self.leaves[i], [] if asked.sharding is None else [asked.sharding])
            for i, row, asked in self._there()
            if asked.type.dtype
        ]
        return facts_of(rows)

    def structs(self) -> dict[str, jax.ShapeDtypeStruct | OnHost]:
        """What is to be read of the array store, by key: as it was written."""
        return {row.key: _struct(row, asked) for _, row, asked in self._there() if row.stored}

    def rows(self) -> list[SavedLeaf]:
        """The leaves that are to be read."""
        return [row for _, row, _ in self._there()]

    def tree(self, arrays: dict[str, Any]) -> Any:
        """The tree, of what was read by `structs`; arrays are taken out one by one."""
        leaves = list(self.leaves)
        for i, row, asked in self._there():
            own = {row.key: arrays.pop(row.key)} if row.stored else {}
            leaf = unpack([row], own)[row.path]
            leaf = _as_asked(leaf, asked) if row.kind == "array" else leaf
            leaves[i] = leaf[()] if isinstance(leaves[i], np.generic) else leaf
        return self.treedef.unflatten(leaves)

    def _there(self) -> Iterator[tuple[int, SavedLeaf, Asked]]:
        for i, asked in self.asked.items():
            if (row := self.saved.get(self.paths[i])) is not None:
                yield i, row, asked


def wanted_of(
    table: LeafTable,
    like: Any,
    placing: Placing,
    cast: Any,
    where: str,
) -> Wanted:
    """Compares what is asked for with what is there. Without `like`, that is all of it by path.

    Raises:
        As `checkpoint.restore` does, but for the differences.
    """
    to = None if cast is None else cast_dtype(cast)
    tree = _all_of(table, to) if like is None else like.structs if isinstance(like, Plan) else like
    found, _, arrays = arrays_asked_for(tree, placing, where)
    paths, leaves, treedef = flatten_all(tree)
    asked: dict[int, Asked] = {}
    place = iter(range(len(found)))  # there, `None`s are no leaves
    for i, leaf in enumerate(leaves):
        array = None if leaf is None else arrays.get(next(place))
        if array is None and (kind := leaf_type(leaf)) is not None:
            array = Asked(kind, None)
        if array is not None:
            asked[i] = array
    if like is None and placing.rules is None:
        asked = {i: Asked(x.type._replace(on_devices=False), None) for i, x in asked.items()}
    _check_paths(tree, [paths[i] for i in asked], where)
    types = {paths[i]: x.type for i, x in asked.items()}
    differences = compare(saved_types(table.leaves), types, to)
    saved = {row.path: row for row in table.leaves}
    return Wanted(paths, leaves, treedef, asked, saved, differences)


def _all_of(table: LeafTable, to: str | None) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for row, kind in zip(table.leaves, saved_types(table.leaves).values(), strict=True):
        if row.kind in ("array", "key"):
            dtype = (kind if to is None else kind.cast(to)).dtype
            tree[row.path] = jax.ShapeDtypeStruct(row.shape, parse_dtype(dtype))
        else:
            tree[row.path] = None if row.value is None else value_of(row.kind, row.value)
    return tree


def _check_paths(tree: Any, paths: list[str], where: str) -> None:
    shared = [path for path, count in Counter(paths).items() if count > 1]
    facts = [f"{path}: the path of {', '.join(same_path_keys(tree, path))}." for path in shared]
    if facts:
        headline = f"{where}: paths are shared by leaves of `like`, so nothing tells them apart:"
        raise MismatchError(listed(headline, facts))


def _struct(row: SavedLeaf, asked: Asked) -> jax.ShapeDtypeStruct | OnHost:
    dtype = parse_dtype(row.stored or "")
    if not asked.type.on_devices or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return OnHost(row.stored_shape, dtype)  # the latter is converted, or would not be had
    return jax.ShapeDtypeStruct(row.stored_shape, dtype, sharding=asked.sharding or _default())


def _default() -> Sharding:
    return jax.device_put(np.zeros((), bool)).sharding


def _as_asked(leaf: Any, asked: Asked) -> Any:
    """An array in the dtype that is asked for, where it is asked for."""
    dtype = parse_dtype(asked.type.dtype)
    with np.errstate(all="ignore"):  # beyond float16 comes inf, as in `jnp.asarray`
        if not asked.type.on_devices:
            return leaf.astype(dtype, copy=False)
        if not isinstance(leaf, jax.Array):  # of no elements, or too wide for devices
            whole = leaf.astype(dtype, copy=False)
            sharding = asked.sharding or _default()
            return jax.make_array_from_callback(leaf.shape, sharding, whole.__getitem__)
        if leaf.dtype == dtype:
            return leaf
        pieces = [
            jax.device_put(np.asarray(piece.data).astype(dtype), piece.data.sharding)
            for piece in to_read(leaf).addressable_shards
        ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces, dtype=dtype)

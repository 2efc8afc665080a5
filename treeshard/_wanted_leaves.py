"""Which leaves of a checkpoint to read, and as what."""

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
    """The leaves to read.

    Attributes:
        paths: The paths of the leaves of the like-tree, `None`s included.
        leaves: These leaves.
        treedef: Its structure.
        asked: The requests by leaf index; static leaves have none.
        saved: The stored leaves by path.
        differences: How the requested leaves differ from the stored ones.
    """

    paths: list[str]
    leaves: list[Any]
    treedef: Any
    asked: dict[int, Asked]
    saved: dict[str, SavedLeaf]
    differences: Differences

    def facts(self) -> dict[str, str]:
        """What must be the same on all processes."""
        rows = [
            (row.path, self.leaves[i], [] if asked.sharding is None else [asked.sharding])
            for i, row, asked in self._there()
            if asked.type.dtype
        ]
        return facts_of(rows)

    def structs(self) -> dict[str, jax.ShapeDtypeStruct | OnHost]:
        """The arrays to read from the store, by key, as they are stored."""
        return {row.key: _struct(row, asked) for _, row, asked in self._there() if row.stored}

    def rows(self) -> list[SavedLeaf]:
        """The leaves to read."""
        return [row for _, row, _ in self._there()]

    def tree(self, arrays: dict[str, Any]) -> Any:
        """The tree made of the arrays that `structs` requests, which are removed one by one."""
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
    """Compares a request with the stored leaves. Without `like` it requests all of them, by path.

    Raises:
        As `checkpoint.restore`, except for the differences.
    """
    to = None if cast is None else cast_dtype(cast)
    tree = _all_of(table, to) if like is None else like.structs if isinstance(like, Plan) else like
    found, _, arrays = arrays_asked_for(tree, placing, where)
    paths, leaves, treedef = flatten_all(tree)
    asked: dict[int, Asked] = {}
    place = iter(range(len(found)))  # these do not include `None`s
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
    facts = [f"{path}: shared by {', '.join(same_path_keys(tree, path))}." for path in shared]
    if facts:
        headline = f"{where}: several leaves of `like` have the same path:"
        raise MismatchError(listed(headline, facts))


def _struct(row: SavedLeaf, asked: Asked) -> jax.ShapeDtypeStruct | OnHost:
    dtype = parse_dtype(row.stored or "")
    if not asked.type.on_devices or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return OnHost(row.stored_shape, dtype)  # too wide for devices: converted on the host
    return jax.ShapeDtypeStruct(row.stored_shape, dtype, sharding=asked.sharding or _default())


def _default() -> Sharding:
    return jax.device_put(np.zeros((), bool)).sharding


def _as_asked(leaf: Any, asked: Asked) -> Any:
    """An array in the requested dtype and place."""
    dtype = parse_dtype(asked.type.dtype)
    with np.errstate(all="ignore"):  # overflow gives inf, as in `jnp.asarray`
        if not asked.type.on_devices:
            return leaf.astype(dtype, copy=False)
        if not isinstance(leaf, jax.Array):  # empty, or too wide for devices
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

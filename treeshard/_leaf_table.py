"""Trees as a table of leaves and flat arrays, which an array store can have; and back.

The table is written and read by `_table_text`; `_asked_for` compares it with what is asked for.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from treeshard._errors import CheckpointError, LeafError, listed
from treeshard._host import data_of, is_key, second_handle, to_read
from treeshard._literals import parse_dtype
from treeshard._mesh import axis_sizes
from treeshard._paths import leaf_paths
from treeshard._saved_leaf import SavedLeaf, kind_of, stored_dtype, text_crc, value_of, value_text
from treeshard._specs import has_shape
from treeshard._targets import Misfit, raise_misfits, unmovable


class LeafTable(NamedTuple):
    """What a checkpoint says of its leaves.

    Attributes:
        meshes: The axes and sizes of the meshes that they lay on, usually of one.
        leaves: A row for every leaf that is not static, in the order in which JAX flattens.
    """

    meshes: tuple[dict[str, int], ...]
    leaves: tuple[SavedLeaf, ...]

    def with_checksums(self, found: Mapping[str, int]) -> "LeafTable":
        """The table with the CRC-32 of stored arrays, by their key in the array store."""
        rows = [
            row if row.stored is None else row._replace(crc=found[row.key]) for row in self.leaves
        ]
        return self._replace(leaves=tuple(rows))


class Packed(NamedTuple):
    """A tree, taken apart.

    Attributes:
        table: Its leaves; the checksums of stored arrays are still to come.
        arrays: The numbers of those that the array store gets, as it gets them, by `SavedLeaf.key`.
            The CRC-32 of such an array is that of the leaf.
    """

    table: LeafTable
    arrays: dict[str, jax.Array | np.ndarray]


def flatten_all(tree: Any) -> tuple[list[str], list[Any], Any]:
    """The paths and leaves of a tree, `None`s among them, and its structure."""
    leaves, treedef = tree_flatten(tree, is_leaf=_is_none)
    return leaf_paths(tree, is_leaf=_is_none), leaves, treedef


def pack(tree: Any, where: str = "save") -> Packed:
    """Takes a tree apart. No array is copied but those whose type the array store lacks.

    Leaves that are none of array, key, number, string, bytes and `None` are static, and left
    out. numpy's scalars are arrays of shape `()`.

    Args:
        tree: Any pytree.
        where: What is being done, for messages.

    Raises:
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct`, masked, of a dtype that JAX does
            not have (such as `object`), or a string that is no Unicode.
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If leaves share a path.
    """
    shaped = tree_leaves(tree)
    misfits = {i: misfit for i, x in enumerate(shaped) if (misfit := _unstorable(x)) is not None}
    raise_misfits(tree, shaped, misfits, where)
    paths, leaves, _ = flatten_all(tree)
    found = [(path, x, kind) for path, x in zip(paths, leaves, strict=True) if (kind := kind_of(x))]
    _check_paths(tree, [path for path, _, _ in found], where)
    _check_unicode(found, where)
    rows = tuple(_row(path, x, kind) for path, x, kind in found)
    pairs = [(row, x) for row, (_, x, _) in zip(rows, found, strict=True) if row.stored]
    return Packed(LeafTable(_meshes(leaves), rows), {row.key: _as_stored(x) for row, x in pairs})


def unpack(
    rows: Iterable[SavedLeaf],
    arrays: Mapping[str, jax.Array | np.ndarray],
    shardings: Mapping[str, Sharding] | None = None,
) -> dict[str, Any]:
    """The leaves as they were, by path.

    Args:
        rows: The leaves wanted.
        arrays: The numbers of those that are stored, as read, by `SavedLeaf.key`.
        shardings: Where arrays without elements go, by path, since nothing is stored of them;
            others are numpy's. Keys are on devices anyway.
    """
    places = shardings or {}
    return {row.path: _leaf(row, arrays, places.get(row.path)) for row in rows}


# ------------------------------------------------------------------ there


def _is_none(x: Any) -> bool:
    return x is None


def _unstorable(x: Any) -> Misfit | None:
    if has_shape(x):
        if misfit := unmovable(x):
            return misfit
        if is_key(x) and not isinstance(jax.random.key_impl(x), str):
            why = "its PRNG implementation has no name that another program could know."
            return Misfit(LeafError, f"{why} Save `jax.random.key_data` of it.")
    elif isinstance(x, np.ndarray | np.generic) and not isinstance(x, str | bytes):
        return Misfit(LeafError, "JAX has no such dtype. Use `.astype`, or `.tolist()`, first.")
    return None


def _check_paths(tree: Any, paths: Sequence[str], where: str) -> None:
    shared = [path for path, count in Counter(paths).items() if count > 1]
    if not shared:
        return
    pairs = tree_flatten_with_path(tree, is_leaf=_is_none)[0]
    keys = dict.fromkeys(shared, "")
    for path, (key, x) in zip(leaf_paths(tree, is_leaf=_is_none), pairs, strict=True):
        if path in keys and kind_of(x):
            keys[path] += f"{keys[path] and ', '}{keystr(key)}"
    facts = [f"{path}: the path of {names}. Rename a key." for path, names in keys.items()]
    raise CheckpointError(f"{where}: {listed(f'{len(facts)} paths are shared by leaves:', facts)}")


def _check_unicode(found: Iterable[tuple[str, Any, str]], where: str) -> None:
    facts = []
    for path, x, kind in found:
        try:
            f"{path}{x if kind == 'str' else ''}".encode()
        except UnicodeEncodeError as error:
            facts.append(f"{path!a}: it is no Unicode ({error.reason}). Make it bytes.")
    if facts:
        raise LeafError(f"{where}: {listed(f'{len(facts)} strings cannot be saved:', facts)}")


def _row(path: str, x: Any, kind: str) -> SavedLeaf:
    if not has_shape(x):
        value = None if x is None else value_text(x)
        return SavedLeaf(path, kind, value=value, crc=text_crc(value or ""))
    sharding = getattr(x, "sharding", None)
    spec = repr(sharding.spec) if isinstance(sharding, NamedSharding) else None
    dtype = str(x.dtype if kind == "key" else x.dtype.newbyteorder("="))
    impl = str(jax.random.key_impl(x)) if kind == "key" else None
    stored = "uint32" if kind == "key" else stored_dtype(dtype)
    crc = None if x.size else 0
    return SavedLeaf(path, kind, x.shape, dtype, spec, stored if x.size else None, impl, None, crc)


def _meshes(leaves: Iterable[Any]) -> tuple[dict[str, int], ...]:
    meshes = {
        x.sharding.mesh: None
        for x in leaves
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
    }
    axes = {tuple(axis_sizes(mesh).items()): None for mesh in meshes}
    return tuple(dict(pairs) for pairs in axes)


def _as_stored(x: Any) -> jax.Array | np.ndarray:
    x = data_of(x)
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        x = x.astype(x.dtype.newbyteorder("="), copy=False)
    elif jax.process_count() > 1 and x.is_fully_addressable:
        x = np.asarray(second_handle(x))  # one of several: that of process 0 is stored
    stored = stored_dtype(str(x.dtype))
    return x if stored == x.dtype else _seen_as(x, np.dtype(stored))


# ------------------------------------------------------------------ and back


def _leaf(row: SavedLeaf, arrays: Mapping[str, Any], sharding: Sharding | None) -> Any:
    if row.kind == "none":
        return None
    if row.value is not None:
        return value_of(row.kind, row.value)
    data: Any
    dtype = np.dtype("uint32") if row.kind == "key" else parse_dtype(row.dtype)
    if row.stored is None:
        data = np.zeros(row.stored_shape, dtype)
        if sharding is not None:
            data = jax.make_array_from_callback(data.shape, sharding, data.__getitem__)
    else:
        data = arrays[row.key]
        data = data if data.dtype == dtype else _seen_as(data, dtype)
    return data if row.impl is None else jax.random.wrap_key_data(data, impl=row.impl)


def _seen_as(x: jax.Array | np.ndarray, dtype: np.dtype) -> Any:
    """The same bytes as another dtype of one byte, in memory of their own."""
    if not isinstance(x, jax.Array):
        return np.array(x).view(dtype)
    pieces = [
        jax.device_put(np.array(piece.data).view(dtype), piece.data.sharding)
        for piece in to_read(x).addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces, dtype=dtype)

"""Converts a tree to a table of leaves and flat arrays for an array store, and back.

`_table_text` writes and reads the table; `_asked_for` compares it with a request.
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
    """The table of leaves of a checkpoint.

    Attributes:
        meshes: The axes and sizes of the meshes that the arrays were on, usually one.
        leaves: A row for each leaf that is not static, in the order in which JAX flattens.
    """

    meshes: tuple[dict[str, int], ...]
    leaves: tuple[SavedLeaf, ...]

    def with_checksums(self, crcs: Mapping[str, int]) -> "LeafTable":
        """The table with the CRC-32 of each stored array, given by key in the array store."""
        rows = [
            row if row.stored is None else row._replace(crc=crcs[row.key]) for row in self.leaves
        ]
        return self._replace(leaves=tuple(rows))


class Packed(NamedTuple):
    """A tree as a table and arrays.

    Attributes:
        table: Its leaves, without the checksums of stored arrays.
        arrays: The stored arrays, in the form in which they are stored, by `SavedLeaf.key`. The
            CRC-32 of such an array is that of its leaf.
    """

    table: LeafTable
    arrays: dict[str, jax.Array | np.ndarray]


def flatten_all(tree: Any) -> tuple[list[str], list[Any], Any]:
    """The paths and leaves of a tree, `None`s included, and its structure."""
    leaves, treedef = tree_flatten(tree, is_leaf=_is_none)
    return leaf_paths(tree, is_leaf=_is_none), leaves, treedef


def pack(tree: Any, where: str = "save") -> Packed:
    """Converts a tree to a table and arrays, without copying arrays of dtypes that the store has.

    Leaves other than arrays, keys, numbers, strings, bytes and `None` are static, and left out.
    numpy scalars are arrays of shape `()`.

    Args:
        tree: Any pytree.
        where: The operation, for messages.

    Raises:
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct`, masked, of a dtype that JAX does
            not support (such as `object`), or a string that is not valid Unicode.
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If several leaves have the same path.
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
    """The leaves as they were saved, by path.

    Args:
        rows: The leaves to make.
        arrays: The arrays read from the store, by `SavedLeaf.key`.
        shardings: The shardings of arrays without elements, by path, since the store does not hold
            them. Others are numpy arrays; keys are always on devices.
    """
    places = shardings or {}
    return {row.path: _leaf(row, arrays, places.get(row.path)) for row in rows}


# ------------------------------------------------------------------ to a table


def _is_none(x: Any) -> bool:
    return x is None


def _unstorable(x: Any) -> Misfit | None:
    if has_shape(x):
        if misfit := unmovable(x):
            return misfit
        if is_key(x) and not isinstance(jax.random.key_impl(x), str):
            why = "its PRNG implementation has no name, so no other program could restore it."
            return Misfit(LeafError, f"{why} Save `jax.random.key_data` of it.")
    elif isinstance(x, np.ndarray | np.generic) and not isinstance(x, str | bytes):
        return Misfit(
            LeafError, "JAX does not support this dtype. Use `.astype`, or `.tolist()`, first."
        )
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
    facts = [f"{path}: shared by {names}. Rename a key." for path, names in keys.items()]
    raise CheckpointError(
        f"{where}: {listed(f'{len(facts)} paths are shared by several leaves:', facts)}"
    )


def _check_unicode(found: Iterable[tuple[str, Any, str]], where: str) -> None:
    facts = []
    for path, x, kind in found:
        try:
            f"{path}{x if kind == 'str' else ''}".encode()
        except UnicodeEncodeError as error:
            facts.append(f"{path!a}: it is not valid Unicode ({error.reason}). Save it as bytes.")
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
        x = np.asarray(second_handle(x))  # each process has a copy: process 0 stores its own
    stored = stored_dtype(str(x.dtype))
    return x if stored == x.dtype else _viewed_as(x, np.dtype(stored))


# ------------------------------------------------------------------ from a table


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
        data = data if data.dtype == dtype else _viewed_as(data, dtype)
    return data if row.impl is None else jax.random.wrap_key_data(data, impl=row.impl)


def _viewed_as(x: jax.Array | np.ndarray, dtype: np.dtype) -> Any:
    """A copy of the bytes of `x`, viewed as another dtype of one byte."""
    if not isinstance(x, jax.Array):
        return np.array(x).view(dtype)
    pieces = [
        jax.device_put(np.array(piece.data).view(dtype), piece.data.sharding)
        for piece in to_read(x).addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces, dtype=dtype)

"""Writes the table of leaves as JSON, and reads it."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from treeshard._core.arrays import data_of, has_shape, is_key, second_handle, to_read
from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import leaf_paths
from treeshard._core.spec_trees import Misfit
from treeshard._core.specs import axes_of, entries
from treeshard._core.text import check_keys, parse_dtype, parse_json, parse_spec, typed
from treeshard._disk.leaves import (
    SCALARS,
    SavedLeaf,
    key_dtype,
    kind_of,
    stored_dtype,
    text_crc,
    value_of,
    value_text,
)
from treeshard._placement.targets import raise_unmovable, unmovable
from treeshard.errors import CheckpointError, DamagedError, FormatError, LeafError, listed

# ------------------------------------------------------------------
# Converts a tree to a table of leaves and flat arrays for an array store, and back.
# `_table_text` writes and reads the table; `_asked_for` compares it with a request.


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
    raise_unmovable(tree, misfits, where)
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


VERSION = 1

_TABLE = ("treeshard_leaves", "meshes", "leaves", "crc")
# The fields of a row of each kind.
_ROW = {
    "array": ("path", "kind", "shape", "dtype", "spec", "stored", "crc"),
    "key": ("path", "kind", "shape", "dtype", "spec", "stored", "impl", "crc"),
    "none": ("path", "kind", "crc"),
    **dict.fromkeys(SCALARS, ("path", "kind", "value", "crc")),
}
_TEXTS = ("dtype", "impl", "value")
_MOST = 2**62  # bytes that an array may have, were its empty dims of length 1
_RANK = 64  # numpy's limit


def to_text(table: LeafTable) -> str:
    """Writes a table as JSON, a line per leaf.

    The last entry is the CRC-32 of the values of the others, not of their layout, so that other
    programs may reformat the JSON.
    """
    rows = [{name: getattr(row, name) for name in _ROW[row.kind]} for row in table.leaves]
    meshes = [list(map(list, axes.items())) for axes in table.meshes]
    crc = _crc(dict(zip(_TABLE, (VERSION, meshes, rows), strict=False)))
    lines = ",".join(f"\n  {json.dumps(row)}" for row in rows)
    head = f'"treeshard_leaves": {VERSION},\n"meshes": {json.dumps(meshes)}'
    return f'{{\n{head},\n"leaves": [{lines}\n],\n"crc": {crc}\n}}\n'


def from_text(text: str) -> LeafTable:
    """Reads what `to_text` wrote.

    Raises:
        DamagedError: If it is not what was written.
        FormatError: If it is of another version; or if somebody wrote it who did not mean a
            table: the place is named.
    """
    try:
        raw = parse_json(text.encode(errors="surrogatepass"))
        found = _crc(raw) if isinstance(raw, dict) else None
    except (FormatError, RecursionError) as error:
        raise DamagedError(f"The table of leaves is {error}") from None
    if found is None or not {"treeshard_leaves", "crc"} <= raw.keys():
        raise DamagedError("The table of leaves has no version or no checksum.")
    if found != raw["crc"]:
        raise DamagedError(f"The table of leaves has the CRC-32 {found}, and not {raw['crc']!r}.")
    if raw["treeshard_leaves"] != VERSION:
        raise FormatError(
            f"The table of leaves is of version {raw['treeshard_leaves']!r}, and this treeshard"
            f" reads version {VERSION}. Read it with the treeshard that wrote it."
        )
    check_keys(raw, _TABLE, "the table of leaves")
    meshes = tuple(
        _axes(x, f"meshes[{i}]") for i, x in enumerate(typed(raw["meshes"], list, "meshes"))
    )
    axes = frozenset(axis for mesh in meshes for axis in mesh)
    rows = enumerate(typed(raw["leaves"], list, "leaves"))
    leaves = tuple(_row_from(x, f"leaves[{i}]", axes) for i, x in rows)
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise FormatError("leaves: two have the same path. Nothing could tell them apart.")
    return LeafTable(meshes, leaves)


def _crc(raw: Mapping[str, Any]) -> int:
    others = {key: value for key, value in raw.items() if key != "crc"}
    return crc32(json.dumps(others, sort_keys=True, separators=(",", ":")).encode())


def _axes(raw: Any, where: str) -> dict[str, int]:
    for pair in typed(raw, list, where):
        if not isinstance(pair, list) or [type(x) for x in pair] != [str, int] or pair[1] < 1:
            raise FormatError(f"{where}: {pair!r} is no pair of an axis and its size.")
    if len(dict(raw)) < len(raw):
        raise FormatError(f"{where}: an axis stands there twice.")
    return dict(raw)


def _row_from(raw: Any, where: str, axes: frozenset[str]) -> SavedLeaf:
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in _ROW:
        raise FormatError(f"{where}: the kind is {kind!r}, not one of {', '.join(_ROW)}.")
    check_keys(raw, _ROW[kind], where)
    path = typed(raw["path"], str, f"{where}.path")
    try:
        for name in raw.keys() & _TEXTS:
            typed(raw[name], str, name)
        leaf = SavedLeaf(**{**raw, "shape": tuple(typed(raw.get("shape", []), list, "shape"))})
        if kind in ("array", "key"):
            _check_array(leaf, axes)
        else:
            _check_value(leaf)
    except FormatError as error:
        raise FormatError(f"{where} ({path}): {error}") from None
    return leaf


def _check_array(leaf: SavedLeaf, axes: frozenset[str]) -> None:
    itemsize = _itemsize(leaf.dtype) if leaf.impl is None else 4
    if leaf.impl is not None and leaf.dtype != (dtype := key_dtype(leaf.impl)):
        raise FormatError(f"dtype is {leaf.dtype!r}, and keys of {leaf.impl!r} have {dtype!r}.")
    if any(type(length) is not int or length < 0 for length in leaf.shape):
        raise FormatError(f"{leaf.shape} is no shape.")
    held = itemsize * math.prod(max(1, length) for length in leaf.stored_shape)
    if held > _MOST or len(leaf.shape) > _RANK:
        raise FormatError(f"no array can have the shape {leaf.shape}.")
    if leaf.spec is not None and _rank(typed(leaf.spec, str, "spec"), axes) > len(leaf.shape):
        raise FormatError(f"spec is {leaf.spec}, and the shape is {leaf.shape}.")
    empty = 0 in leaf.shape
    known = [None] if empty else ["uint32"] if leaf.impl else [leaf.dtype]
    if leaf.stored not in known and not (itemsize == 1 and leaf.stored == "uint8"):
        raise FormatError(f"stored is {leaf.stored!r}, not {known[0]!r}.")
    if leaf.crc is not None and not 0 <= typed(leaf.crc, int, "crc") < (1 if empty else 2**32):
        raise FormatError(f"crc is {leaf.crc}, which it cannot be.")


def _check_value(leaf: SavedLeaf) -> None:
    text = leaf.value or ""
    if leaf.kind != "none":
        value_of(leaf.kind, text)
    if leaf.crc != (crc := text_crc(text)) or type(leaf.crc) is not int:
        raise FormatError(f"crc is {leaf.crc!r}, and that of the value is {crc}.")


@lru_cache
def _itemsize(name: str) -> int:
    dtype = parse_dtype(name) if name.isidentifier() else None
    if not isinstance(dtype, np.dtype) or str(dtype) != name or unmovable(np.empty((), dtype)):
        raise FormatError(f"dtype is {name!r}, which arrays cannot have.")
    return dtype.itemsize


@lru_cache
def _rank(spec: str, axes: frozenset[str]) -> int:
    read = entries(parse_spec(spec))
    if unknown := {axis for entry in read for axis in axes_of(entry)} - axes:
        raise FormatError(f"spec is {spec}, and no mesh has an axis {min(unknown)!r}.")
    return len(read)

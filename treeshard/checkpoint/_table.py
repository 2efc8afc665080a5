"""The table of leaves of a checkpoint: made from a tree, written as JSON, and read."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves

from treeshard._core.arrays import data_of, has_shape, is_key, map_shards, second_handle
from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import PyTree, leaf_paths, shared_names
from treeshard._core.spec_trees import Misfit
from treeshard._core.text import parse_dtype
from treeshard._disk.leaves import SavedLeaf, is_none, kind_of, stored_dtype, value_of, value_text
from treeshard._disk.untrusted import check_size, parse
from treeshard._placement.targets import raise_unmovable, unmovable
from treeshard.errors import CheckpointError, DamagedError, FormatError, LeafError, listed


class LeafTable(NamedTuple):
    """The table of leaves of a checkpoint: a row for each that is not static, in JAX's order.

    `meshes` are the axes and sizes of the meshes that the arrays were on, usually one.
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
    """A tree as a table without checksums, and the arrays to store, by `SavedLeaf.key`."""

    table: LeafTable
    arrays: dict[str, jax.Array | np.ndarray]


# ------------------------------------------------------------------ from a tree, and back


def pack(tree: PyTree, where: str = "save") -> Packed:
    """Converts a tree to a table and arrays, without copying arrays of dtypes that the store has.

    Leaves other than arrays, keys, numbers, strings, bytes and `None` are static, and left out.
    numpy scalars are arrays of shape `()`. Raises as `checkpoint.save` does for leaves and paths.
    """
    shaped = enumerate(tree_leaves(tree))
    misfits = {i: misfit for i, x in shaped if (misfit := _unstorable(x)) is not None}
    raise_unmovable(tree, misfits, where)
    leaves = tree_leaves(tree, is_leaf=is_none)
    named = list(zip(leaf_paths(tree, is_leaf=is_none), leaves, strict=True))
    names = [path if kind_of(x) else None for path, x in named]
    if shared := shared_names(names, tree, is_leaf=is_none):
        facts = [f"{p}: shared by {', '.join(keys)}. Rename a key." for p, keys in shared.items()]
        headline = f"{len(facts)} paths are shared by several leaves:"
        raise CheckpointError(f"{where}: {listed(headline, facts)}")
    _check_unicode(named, where)
    rows: list[SavedLeaf] = []
    arrays: dict[str, jax.Array | np.ndarray] = {}
    for path, x in named:
        if (row := _row(path, x)) is not None:
            rows.append(row)
            if row.stored:
                arrays[row.key] = _as_stored(x)
    return Packed(LeafTable(_meshes(leaves), tuple(rows)), arrays)


def unpack(row: SavedLeaf, stored: jax.Array | np.ndarray | None) -> Any:
    """The leaf of a row, from its array as stored. Keys are on devices.

    An array without elements is not stored, and is a numpy array here.
    """
    if row.kind == "none":
        return None
    if row.value is not None:
        return value_of(row.kind, row.value)
    data = in_its_dtype(row, stored)
    return data if row.impl is None else jax.random.wrap_key_data(data, impl=row.impl)


def in_its_dtype(row: SavedLeaf, stored: jax.Array | np.ndarray | None) -> Any:
    """The array of a row, or the data of its keys; `stored` as in `unpack`."""
    dtype = np.dtype("uint32") if row.kind == "key" else parse_dtype(row.dtype)
    data: Any = np.zeros(row.stored_shape, dtype) if stored is None else stored
    return data if data.dtype == dtype else _viewed_as(data, dtype)


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


def _check_unicode(named: Iterable[tuple[str, Any]], where: str) -> None:
    facts = []
    for path, x in named:
        kind = kind_of(x)
        try:
            f"{path if kind else ''}{x if kind == 'str' else ''}".encode()
        except UnicodeEncodeError as error:
            facts.append(f"{path!a}: it is not valid Unicode ({error.reason}). Save it as bytes.")
    if facts:
        raise LeafError(f"{where}: {listed(f'{len(facts)} strings cannot be saved:', facts)}")


def _row(path: str, x: Any) -> SavedLeaf | None:
    kind = kind_of(x)
    if kind is None:
        return None
    if not has_shape(x):
        value = None if x is None else value_text(x)
        return SavedLeaf(path, kind, value=value, crc=crc32((value or "").encode()))
    sharding = getattr(x, "sharding", None)
    spec = repr(sharding.spec) if isinstance(sharding, NamedSharding) else None
    dtype = str(x.dtype if kind == "key" else x.dtype.newbyteorder("="))
    impl = str(jax.random.key_impl(x)) if kind == "key" else None
    stored = stored_dtype(dtype) if x.size else None
    return SavedLeaf(path, kind, x.shape, dtype, spec, stored, impl, crc=None if x.size else 0)


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


def _viewed_as(x: jax.Array | np.ndarray, dtype: np.dtype) -> Any:
    """A copy of the bytes of `x`, viewed as another dtype of one byte."""
    if isinstance(x, jax.Array):
        return map_shards(x, lambda values: np.array(values).view(dtype), dtype)
    return np.array(x).view(dtype)


# ------------------------------------------------------------------ as JSON

VERSION = 3

# The fields of a row, by the kind of its leaf.
_VALUE = ("path", "kind", "value", "crc")
_FIELDS = {
    "array": ("path", "kind", "shape", "dtype", "spec", "stored", "crc"),
    "key": ("path", "kind", "shape", "dtype", "spec", "stored", "impl", "crc"),
    "none": ("path", "kind", "crc"),
}
_MOST = 2**62  # bytes of an array, if its empty dims had length 1
_MOST_DIMS = 64  # numpy's limit


def to_text(table: LeafTable) -> str:
    """Writes a table as JSON, a line per leaf.

    The last entry is the CRC-32 of the values of the others, not of their layout, so that other
    programs may reformat the JSON.
    """
    rows = [
        {name: getattr(row, name) for name in _FIELDS.get(row.kind, _VALUE)} for row in table.leaves
    ]
    meshes = [list(map(list, axes.items())) for axes in table.meshes]
    crc = _crc({"treeshard_leaves": VERSION, "meshes": meshes, "leaves": rows})
    lines = ",".join(f"\n  {json.dumps(row)}" for row in rows)
    head = f'"treeshard_leaves": {VERSION},\n"meshes": {json.dumps(meshes)}'
    text = f'{{\n{head},\n"leaves": [{lines}\n],\n"crc": {crc}\n}}\n'
    try:
        check_size(text.encode())
    except FormatError as error:
        raise CheckpointError(
            f"The table of leaves is too large: {error} Save long strings and bytes as arrays."
        ) from None
    return text


def from_text(text: str) -> LeafTable:
    """Reads what `to_text` wrote.

    Raises `DamagedError` if it is not what was written, and `FormatError` if another version of
    treeshard wrote it, or another program wrote a row that is not one of a leaf.
    """
    try:
        raw = parse(text.encode(errors="surrogatepass"))
        crc = _crc(raw) if isinstance(raw, dict) else None
    except (FormatError, RecursionError) as error:
        raise DamagedError(f"The table of leaves is {error}") from None
    if crc is None or not {"treeshard_leaves", "crc"} <= raw.keys():
        raise DamagedError("The table of leaves has no version or no checksum.")
    if crc != raw["crc"]:
        raise DamagedError(f"The table of leaves has the CRC-32 {crc}, and not {raw['crc']!r}.")
    if raw["treeshard_leaves"] != VERSION:
        raise FormatError(
            f"The table of leaves is of version {raw['treeshard_leaves']!r}, and this treeshard"
            f" reads version {VERSION}. Read it with the treeshard that wrote it."
        )
    try:
        meshes = tuple(dict(axes) for axes in raw["meshes"])
        leaves = tuple(_row_of(row, f"leaves[{i}]") for i, row in enumerate(raw["leaves"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"The table of leaves is not one of treeshard's: {error}") from None
    return LeafTable(meshes, leaves)


def _row_of(raw: Any, where: str) -> SavedLeaf:
    """The row in JSON. Refuses what would fail later, where no error could name the leaf."""
    try:
        row = SavedLeaf(**{**raw, "shape": tuple(raw.get("shape", ()))})
        texts = [x for x in (row.path, row.dtype, row.spec, row.value) if x is not None]
        valid = row.path is not None and all(isinstance(x, str) for x in texts)
        valid &= raw.keys() == set(_FIELDS.get(row.kind, _VALUE))
        if row.kind in ("array", "key"):
            valid &= (row.kind == "key") == (row.impl is not None) and _has_valid_array(row)
        elif row.kind != "none":
            valid &= row.value is not None and value_of(row.kind, row.value) is not None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: {error}") from None
    if not valid:
        raise FormatError(f"{where}: {json.dumps(raw)[:200]}")
    return row


def _has_valid_array(row: SavedLeaf) -> bool:
    itemsize = 4 if row.kind == "key" else parse_dtype(row.dtype).itemsize
    if not all(type(n) is int and n >= 0 for n in row.shape) or len(row.shape) > _MOST_DIMS:
        return False
    if itemsize * math.prod(max(1, n) for n in row.stored_shape) > _MOST:
        return False
    if 0 in row.shape:
        return row.stored is None
    # Array stores of another version may lack other dtypes, and hold bytes instead.
    return row.stored == stored_dtype(row.dtype) or (itemsize == 1 and row.stored == "uint8")


def _crc(raw: Mapping[str, Any]) -> int:
    others = {key: value for key, value in raw.items() if key != "crc"}
    return crc32(json.dumps(others, sort_keys=True, separators=(",", ":")).encode())

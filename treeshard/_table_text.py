"""Writes the table of leaves as JSON, and reads it."""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np

from treeshard._errors import DamagedError, FormatError
from treeshard._leaf_table import LeafTable
from treeshard._literals import check_keys, parse_dtype, parse_json, parse_spec, typed
from treeshard._saved_leaf import SCALARS, SavedLeaf, key_dtype, text_crc, value_of
from treeshard._specs import axes_of, entries
from treeshard._targets import unmovable

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
    leaves = tuple(_row(x, f"leaves[{i}]", axes) for i, x in rows)
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


def _row(raw: Any, where: str, axes: frozenset[str]) -> SavedLeaf:
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

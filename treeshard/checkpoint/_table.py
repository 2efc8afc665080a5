"""The table of leaves of a checkpoint: built from a tree, written as JSON, and read back.

The array store and the metadata of Orbax list the arrays. The table adds leaves that are not
arrays, the order of the tree, shardings, and the list of files. It is JSON, so that you can read it
without these libraries.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves

from treeshard._core.arrays import (
    array_text,
    data_of,
    has_shape,
    is_key,
    owner_elsewhere,
    to_read,
)
from treeshard._core.facts import Facts
from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import PyTree, leaf_paths, shared_names
from treeshard._core.text import dtype_name, parse_dtype, parse_json
from treeshard._disk.files import FileFacts
from treeshard._disk.leaves import (
    SavedLeaf,
    check_known,
    is_none,
    key_shape,
    kind_of,
    value_of,
    value_text,
)
from treeshard._placement.targets import raise_unmovable, unreadable
from treeshard.checkpoint._array_store import (
    Arrays,
    chunk_shape,
    stored_dtype,
)
from treeshard.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    LeafError,
    TreeShardError,
    listed,
)

WHERE = "save"


class LeafTable(NamedTuple):
    """The table of leaves of a checkpoint.

    Attributes:
        meshes: The axes and sizes of the meshes of the arrays, usually one mesh.
        leaves: A row for each leaf that is not static, in JAX's order.
        files: The files of the arrays, which are known once they are written. In an object store,
            where writes are atomic, only the manifest, which names the other files.
        empty: The containers without children, by path: `dict`, `list` or `tuple`.
    """

    meshes: tuple[dict[str, int], ...]
    leaves: tuple[SavedLeaf, ...]
    files: FileFacts
    empty: Mapping[str, str] = {}


# ------------------------------------------------------------------ from a tree, and back


def pack(tree: PyTree, facts: Facts) -> tuple[LeafTable, Arrays]:
    """Builds the table of a tree, and collects the arrays to store, by path.

    Arrays are copied only if the store lacks their dtype. Numpy scalars become arrays of shape
    `()`. Leaves other than arrays, keys, numbers, strings, bytes, enums and `None` are static, and
    left out. The facts that must agree on all processes go to `facts`. Raises as `checkpoint.save`
    does for leaves and paths.
    """
    check_known(tree, WHERE)
    misfits = {i: _unstorable(x) for i, x in enumerate(tree_leaves(tree))}
    raise_unmovable(tree, misfits, WHERE)
    leaves = tree_leaves(tree, is_leaf=is_none)
    named = {path: leaves[i] for i, path in paths_of(tree, WHERE, CheckpointError).items()}
    _check_unicode(named)
    meshes = _meshes(leaves)
    facts |= {f"mesh {i}": str(axes) for i, axes in enumerate(meshes, 1)}
    rows: list[SavedLeaf] = []
    arrays: dict[str, jax.Array | np.ndarray] = {}
    for path, x in named.items():
        row = _row_of(path, x, arrays)
        if row.dtype:
            facts[path] = f"{array_text(row)} as {row.spec}, {row.impl or row.stored}"
        else:
            facts[path] = f"{row.kind} {row.value}"
        rows.append(row)
    processes = range(jax.process_count())
    # After all shapes, because messages list only the first differences.
    for path, x in named.items():
        facts.add_origin(path, x, processes)
    empty = _empty_containers(tree)
    facts["empty containers"] = str(empty)
    return LeafTable(meshes, tuple(rows), {}, empty), arrays


def paths_of(tree: PyTree, where: str, error: type[Exception]) -> dict[int, str]:
    """The paths of the leaves that are not static, by leaf index. Raises if paths are shared."""
    leaves = tree_leaves(tree, is_leaf=is_none)
    paths = leaf_paths(tree, is_leaf=is_none)
    names = [path if kind_of(x) else None for path, x in zip(paths, leaves, strict=True)]
    shared = shared_names(names, tree, is_leaf=is_none)
    if shared:
        facts = [f"{p}: shared by {', '.join(keys)}. Rename a key." for p, keys in shared.items()]
        headline = f"{len(facts)} paths are shared by several leaves:"
        raise error(f"{where}: {listed(headline, facts)}")
    return {i: name for i, name in enumerate(names) if name is not None}


def _empty_containers(tree: PyTree) -> dict[str, str]:
    nodes = tree_leaves(tree, is_leaf=_is_empty)
    if not any(map(_is_empty, nodes)):
        return {}
    paths = leaf_paths(tree, is_leaf=_is_empty)
    return {path: _empty_kind(x) for path, x in zip(paths, nodes, strict=True) if _is_empty(x)}


_OF_ITEMS = (list, tuple, Mapping)  # `|` would make a new type in each call


def _is_empty(x: Any) -> bool:
    return isinstance(x, _OF_ITEMS) and not x


_CONTAINERS = {"list": list, "tuple": tuple, "dict": dict}


def _empty_kind(x: Any) -> str:
    kinds = (kind for kind, container in _CONTAINERS.items() if isinstance(x, container))
    return next(kinds, "dict")


def empty_containers(table: LeafTable) -> dict[str, Any]:
    """The containers of a table without children, by path. A named tuple becomes a tuple."""
    return {path: _CONTAINERS.get(kind, dict)() for path, kind in table.empty.items()}


def unpack(row: SavedLeaf, array: Any) -> Any:
    """Makes the leaf of a row, from its array or from the data of its keys."""
    if row.kind == "none":
        return None
    if row.value is not None:
        return value_of(row.kind, row.value)
    return array if row.impl is None else jax.random.wrap_key_data(array, impl=row.impl)


def view_in_dtype(row: SavedLeaf, stored: np.ndarray) -> np.ndarray:
    """The values of a row, or the data of its keys, in their own dtype."""
    dtype = np.dtype("uint32") if row.kind == "key" else parse_dtype(row.dtype)
    return stored if stored.dtype == dtype else stored.view(dtype)


def _unstorable(x: Any) -> TreeShardError | None:
    if has_shape(x):
        if misfit := unreadable(x):
            return misfit
        if x.dtype == jax.dtypes.float0:
            why = "float0 has no values: it is the gradient of an integer. Put `None` in its place."
            return LeafError(why)
        if is_key(x) and not isinstance(jax.random.key_impl(x), str):
            why = "its PRNG implementation has no name, so no other program could restore it."
            return LeafError(f"{why} Save `jax.random.key_data` of it.")
        if owner := owner_elsewhere(x):  # process 0 stores what it has alone
            return LeafError(
                f"it is on devices of process {owner} alone. Move it to devices of several"
                " processes, or of process 0, before: `treeshard.reshard(tree, specs, mesh)`."
            )
        return None
    # numpy's strings are subclasses of Python's.
    if isinstance(x, np.ndarray | np.generic) and not isinstance(x, str | bytes):
        return LeafError("JAX does not support this dtype. Use `.astype`, or `.tolist()`, first.")
    return None


def _check_unicode(named: Mapping[str, Any]) -> None:
    """Raises if a path or string has half of a surrogate pair, which UTF-8 cannot encode."""
    facts: list[str] = []
    for path, x in named.items():
        try:
            path.encode()
            if isinstance(x, str):
                x.encode()
        except UnicodeEncodeError as error:
            facts.append(f"{path!a}: it is not valid Unicode ({error.reason}). Save it as bytes.")
    if facts:
        raise LeafError(f"{WHERE}: {listed(f'{len(facts)} strings cannot be saved:', facts)}")


def _row_of(path: str, x: Any, arrays: dict[str, Any]) -> SavedLeaf:
    """The row of a leaf. Adds its array to `arrays`, unless it has no elements to store."""
    if x is None:
        return SavedLeaf(path, "none")
    if not has_shape(x):
        kind, value = value_text(x)
        return SavedLeaf(path, kind, value=value)
    sharding = getattr(x, "sharding", None)
    spec = repr(sharding.spec) if isinstance(sharding, NamedSharding) else None
    stored = chunk = None
    if x.size:
        array = arrays[path] = _as_stored(x)
        stored, chunk = stored_dtype(array.dtype), chunk_shape(array)
    if is_key(x):
        impl = str(jax.random.key_impl(x))
        return SavedLeaf(path, "key", x.shape, dtype_name(x.dtype), spec, stored, chunk, impl)
    dtype = dtype_name(x.dtype.newbyteorder("="))
    return SavedLeaf(path, "array", x.shape, dtype, spec, stored, chunk)


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
        return x.astype(x.dtype.newbyteorder("="), copy=False)
    if jax.process_count() > 1 and x.is_fully_addressable:
        return np.asarray(to_read(x))  # each process has a copy: process 0 stores its own
    return x


# ------------------------------------------------------------------ as JSON

VERSION = 4

# The fields of a row, by the kind of its leaf.
_OF_VALUES = ("path", "kind", "value")
_FIELDS = {
    "array": ("path", "kind", "shape", "dtype", "spec", "stored", "chunk"),
    "key": ("path", "kind", "shape", "dtype", "spec", "stored", "chunk", "impl"),
    "none": ("path", "kind"),
}


def to_text(table: LeafTable) -> str:
    """Writes a table as JSON, a line per leaf and per file.

    The last entry is the CRC-32 of the values of the others, not of their layout, so that other
    programs may reformat the JSON.
    """
    rows = [
        {name: getattr(row, name) for name in _FIELDS.get(row.kind, _OF_VALUES)}
        for row in table.leaves
    ]
    # Lists keep the order of axes where other programs sort the keys of objects.
    meshes = [list(map(list, axes.items())) for axes in table.meshes]
    files = dict(sorted(table.files.items()))
    raw = {"treeshard_leaves": VERSION, "meshes": meshes, "leaves": rows, "files": files}
    head = f'"treeshard_leaves": {VERSION},\n"meshes": {json.dumps(meshes)}'
    if table.empty:
        raw["empty"] = table.empty
        head += f',\n"empty": {json.dumps(table.empty)}'
    crc = _crc(raw)
    leaf_lines = ",".join(f"\n  {json.dumps(row)}" for row in rows)
    file_lines = ",".join(f"\n  {json.dumps(x)}: {facts}" for x, facts in files.items())
    arrays = f'"leaves": [{leaf_lines}\n],\n"files": {{{file_lines}\n}}'
    return f'{{\n{head},\n{arrays},\n"crc": {crc}\n}}\n'


def from_text(text: str) -> LeafTable:
    """Reads a table from the text of `to_text`.

    Raises `DamagedError` if the text has changed. Raises `FormatError` if another version of
    treeshard wrote it, or if another program wrote an invalid row.
    """
    try:
        raw = parse_json(text.encode())
    except FormatError as error:
        raise DamagedError(f"The table of leaves is {error}") from None
    if not isinstance(raw, dict) or not {"treeshard_leaves", "crc"} <= raw.keys():
        raise DamagedError("The table of leaves has no version or no checksum.")
    crc = _crc(raw)
    if crc != raw["crc"]:
        raise DamagedError(f"The table of leaves has the CRC-32 {crc}, and not {raw['crc']!r}.")
    if raw["treeshard_leaves"] != VERSION:
        raise FormatError(
            f"The table of leaves is of version {raw['treeshard_leaves']!r}, and this treeshard"
            f" reads version {VERSION}. Read it with the treeshard that wrote it."
        )
    try:
        meshes = tuple(dict(axes) for axes in raw["meshes"])
        leaves = tuple(_row_of_json(row, f"leaves[{i}]") for i, row in enumerate(raw["leaves"]))
        files = {str(name): list(facts) for name, facts in raw["files"].items()}
        empty = {str(path): str(kind) for path, kind in raw.get("empty", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"The table of leaves is not one of treeshard's: {error}") from None
    return LeafTable(meshes, leaves, files, empty)


def _row_of_json(raw: Any, where: str) -> SavedLeaf:
    """Parses a row, and checks all fields here, where an error can name the leaf."""
    try:
        if raw.keys() != set(_FIELDS.get(raw["kind"], _OF_VALUES)):
            raise FormatError(f"its fields are {', '.join(raw)}.")
        # JSON has no tuples.
        fields: Any = {k: tuple(x) if isinstance(x, list) else x for k, x in raw.items()}
        row = SavedLeaf(**fields)
        if row.impl is not None:
            key_shape(row.impl)
        elif row.dtype:
            parse_dtype(row.dtype)
        elif row.kind != "none":
            value_of(row.kind, row.value or "")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: {error}") from None
    return row


def _crc(raw: Mapping[str, Any]) -> int:
    others = {key: value for key, value in raw.items() if key != "crc"}
    return crc32(json.dumps(others, sort_keys=True, separators=(",", ":")).encode())

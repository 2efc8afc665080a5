"""Restores a tree from a checkpoint: all processes agree, then each reads its shards."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict
from zlib import crc32

import jax
import numpy as np
from etils import epath
from jax.sharding import Sharding

from treeshard._core.arrays import to_read
from treeshard._core.mesh import AnyMesh, MeshLike
from treeshard._core.paths import same_path_keys
from treeshard._core.processes import AS_LONG_AS_IT_TAKES, TIMEOUT, agreeing, facts_of, together
from treeshard._core.text import parse_dtype
from treeshard._disk.leaves import ReadLeaf, SavedLeaf, raise_damages, value_of
from treeshard._disk.requests import (
    Asked,
    Differences,
    Placing,
    arrays_asked_for,
    cast_dtype,
    compare,
    leaf_type,
    saved_types,
)
from treeshard._planning.plan import Plan
from treeshard._planning.rules import Rules
from treeshard.checkpoint._checksums import checksum, of_registers, registers
from treeshard.checkpoint._paths import PathLike, checkpoint_path, seal, table_text
from treeshard.checkpoint._store import OnHost, read
from treeshard.checkpoint._table import LeafTable, flatten_all, from_text, unpack
from treeshard.errors import DamagedError, FormatError, MismatchError, listed

# ------------------------------------------------------------------
# Which leaves of a checkpoint to read, and as what.


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


# ------------------------------------------------------------------
# Reads leaves from the array store, and names the leaf in whatever goes wrong.

Structs = Mapping[str, jax.ShapeDtypeStruct | OnHost]

_BATCH = 2**28  # bytes that are read to host memory at a time, if no single leaf has more


def read_together(
    path: epath.Path,
    rows: Sequence[SavedLeaf],
    structs: Structs,
    *,
    verify: bool,
    where: str,
    among: Sequence[int] | None,
) -> dict[str, Any]:
    """Reads arrays, each process its own shards. All processes return, or all raise.

    Args:
        path: The checkpoint.
        rows: The requested leaves.
        structs: The arrays to read for them, by key; leaves without elements have none.
        verify: Whether to compare checksums.
        where: The operation, as in `exchange`.
        among: As in `exchange`.

    Raises:
        DamagedError: If leaves cannot be read, or are not as saved: all are listed.
        ProcessError: If a process does not arrive.
    """
    stored = [row for row in rows if row.key in structs]
    known = [row for row in stored if verify and row.crc is not None]
    with together(where, among=among, timeout=AS_LONG_AS_IT_TAKES) as said:
        arrays, damages = _read_arrays(path, stored, structs)
        data = [arrays[row.key] for row in known if row.key in arrays]
        said.mine = _Outcome(damages, b"" if damages else registers(data)).told()
    read = list(map(_Outcome.from_told, said.every))
    raise_damages(path, {leaf: why for one in read for leaf, why in one.damages.items()})
    names = [row.path for row in known]
    found = of_registers([one.registers for one in read], data, where, names=names)
    wrong = {row.path: _difference(row, crc) for row, crc in zip(known, found, strict=True)}
    raise_damages(path, {leaf: why for leaf, why in wrong.items() if why})
    return arrays


class _Outcome(NamedTuple):
    """The result of a process's read: damages by leaf path; without any, its `registers`."""

    damages: dict[str, str]
    registers: bytes

    def told(self) -> bytes:
        return json.dumps(self.damages).encode() + b"\n" + self.registers

    @classmethod
    def from_told(cls, told: bytes) -> "_Outcome":
        damages, _, registers = told.partition(b"\n")
        return cls(json.loads(damages), registers)


def read_each(path: epath.Path, rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
    """Reads leaves to host memory, a few at a time, and compares their checksums."""
    for batch in _batches(rows):
        stored = [row for row in batch if row.stored]
        structs = {row.key: _on_host(row) for row in stored}
        arrays, damages = _read_arrays(path, stored, structs)
        for row in batch:
            x = arrays.pop(row.key, None)
            damage = damages.get(row.path, "") if x is None else _difference(row, checksum(x))
            yield ReadLeaf(row, None if damage else _in_its_dtype(row, x), damage)


def _in_its_dtype(row: SavedLeaf, stored: np.ndarray | None) -> np.ndarray | None:
    if not row.dtype:
        return None
    dtype = parse_dtype("uint32" if row.kind == "key" else row.dtype)
    return np.zeros(row.stored_shape, dtype) if stored is None else stored.view(dtype)


def _read_arrays(
    path: epath.Path, rows: Sequence[SavedLeaf], structs: Structs
) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays by key, and by path why leaves cannot be read."""
    arrays, met = read(path, structs)
    texts = {row.path: met[row.key] for row in rows if row.key in met}
    short = {leaf: text if len(text) < 200 else f"{text[:200]}..." for leaf, text in texts.items()}
    return arrays, {leaf: f"it cannot be read: {text}" for leaf, text in short.items()}


def _on_host(row: SavedLeaf) -> OnHost:
    return OnHost(row.stored_shape, parse_dtype(row.stored or ""))


def _difference(row: SavedLeaf, crc: int) -> str:
    if row.crc is None or crc == row.crc:
        return ""
    return f"its bytes have the CRC-32 {crc}, but were saved with {row.crc}."


def _batches(rows: Iterable[SavedLeaf]) -> Iterator[list[SavedLeaf]]:
    batch: list[SavedLeaf] = []
    held = 0
    for row in rows:
        if batch and held + row.bytes > _BATCH:
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += row.bytes
    yield batch


WHERE = "restore"


class RestoreOptions(TypedDict, total=False):
    """The keyword arguments of `restore`."""

    rules: Rules | None
    mesh: AnyMesh | None
    min_size: int | None
    cast: Any
    partial: bool
    verify: bool
    timeout: float


def restore(
    path: PathLike,
    like: Any = None,
    *,
    rules: Rules | None = None,
    mesh: MeshLike | None = None,
    min_size: int | None = None,
    cast: Any = None,
    partial: bool = False,
    verify: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """Reads a checkpoint directly into shards, on any mesh and any number of processes.

    Before any array is read, the requested leaves are compared with the stored ones; no dtype is
    converted silently. After reading, the checksums are compared with the saved ones.

    Args:
        path: The checkpoint.
        like: A `Plan`, or a tree of arrays or their `jax.ShapeDtypeStruct`s. The result has its
            structure and its static leaves. By default the result is a flat dict by path.
        rules: How to shard the arrays, by their paths, as in `plan`. By default each array is
            placed as its leaf of `like`: numpy arrays in host memory, arrays without a sharding
            on the default device. Without `like` all arrays stay in host memory.
        mesh: The mesh for the rules, as in `plan`; by default the current one.
        min_size: For the rules: leaves with fewer elements are replicated, as in `plan`.
        cast: A floating-point dtype. Arrays of other floating-point dtypes are converted to it
            where `like` requests it, or everywhere without `like`.
        partial: Whether leaves may be missing from the checkpoint or from `like`. Leaves that are
            not in the checkpoint keep their values from `like`, and a `ShardingWarning` lists
            them.
        verify: Whether to compare checksums, which reads the arrays in memory once more.
        timeout: Seconds to wait for other processes; waits for their reads have no limit.

    Returns:
        The tree. Its arrays share memory with nothing else.

    Raises:
        CheckpointError: If there is no checkpoint at `path`: it says what is there instead.
        DamagedError: If the checkpoint is not as saved: the leaves are listed.
        MismatchError: If leaves are missing, not requested, or of another kind, shape or dtype
            than requested; if they have a 64-bit dtype and JAX's x64 mode is off. All are listed.
        FormatError: If another version of treeshard wrote the checkpoint; if `cast` is not a
            floating-point dtype.
        ShardingRuleError: If the rules do not decide every leaf, or decide a spec that does not
            fit.
        NoMeshError: If there is no mesh for the rules.
        MeshError: If the mesh is abstract: it has no devices.
        ProcessError: If the processes request different things, or one of them fails or does not
            arrive.
        ValueError: If `mesh` or `min_size` is given without `rules`.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((256, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/mlp", {"w": np.ones((256, 64), np.float32), "act": jax.nn.relu})
        ...     tree = restore(f"{folder}/mlp", like, rules=[("w", P("fsdp"))], mesh=mesh)
        ...     flat = restore(f"{folder}/mlp")
        >>> tree["w"].sharding.spec, list(flat)
        (P('fsdp',), ['w'])
    """
    # A restore to host memory alone needs no other process.
    among = [jax.process_index()] if like is None and rules is None else None
    found = checkpoint_path(path)
    with agreeing(WHERE, among=among, timeout=timeout) as facts:
        text = table_text(found)
        wanted = wanted_of(_read(found, text), like, Placing(rules, mesh, min_size), cast, WHERE)
        wanted.differences.check(str(found), partial=partial)
        table = f"CRC-32 {crc32(text.encode())}"
        facts |= {"the path": str(found), "the table of leaves": table, **wanted.facts()}
    arrays = read_together(
        found,
        wanted.rows(),
        wanted.structs(),
        verify=verify,
        where=WHERE,
        among=among,
    )
    return wanted.tree(arrays)


def table_at(path: epath.Path) -> LeafTable:
    """The table of the checkpoint at `path`. Raises as `checkpoint.inspect` does."""
    return _read(path, table_text(path))


def _read(path: epath.Path, text: str) -> LeafTable:
    try:
        table = from_text(text)
    except (DamagedError, FormatError) as error:
        raise type(error)(f"{path}: {error}") from None
    if seal(path) != str(crc32(text.encode())):
        raise DamagedError(f"{path}: the table of leaves does not belong to the arrays beside it.")
    return table

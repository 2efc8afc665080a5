"""Restores a tree from a checkpoint: all processes agree, then each reads its shards.

No array is read in one place and sent to others: every process opens the store and reads the
regions that its devices will hold, whoever wrote them. All that the processes exchange is whether
they make the same call, what they could not read, and their parts of the checksums.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict
from zlib import crc32

import jax
import numpy as np
from etils import epath
from jax.sharding import Sharding

from treeshard._core.arrays import map_shards
from treeshard._core.hosts import check_memory_of_hosts
from treeshard._core.meetings import breaking_if_left
from treeshard._core.memory import Meter
from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree, nested
from treeshard._core.processes import AS_LONG_AS_IT_TAKES, TIMEOUT, all_or_none, require_agreement
from treeshard._core.text import parse_dtype
from treeshard._disk.files import PathLike
from treeshard._disk.leaves import ReadLeaf, SavedLeaf, raise_damages
from treeshard._disk.requests import LeafType, Placing, RequestedLeaf, read_request
from treeshard._disk.to_devices import default_sharding, items_here
from treeshard._disk.untrusted import check_memory, no_memory_to_read
from treeshard._planning.rules import Rules
from treeshard.checkpoint._array_store import (
    THREADS,
    ArrayStore,
    StoredArray,
    first_block,
    memory_to_read,
)
from treeshard.checkpoint._checksums import (
    Joint,
    checksum,
    checksum_of_blocks,
    of_registers,
    registers,
)
from treeshard.checkpoint._paths import checkpoint_path, explaining, reading, seal, table_text
from treeshard.checkpoint._table import LeafTable, from_text, in_its_dtype, paths_of, unpack
from treeshard.errors import DamagedError, FormatError, MismatchError

WHERE = "restore"

_paths = partial(paths_of, where=WHERE, error=MismatchError)
Leaves = Sequence[tuple[SavedLeaf, RequestedLeaf]]  # as they are stored, and as requested


class RestoreOptions(TypedDict, total=False):
    """The keyword arguments of `restore`."""

    rules: Rules | None
    mesh: MeshLike | None
    min_size: int | None
    cast: Any
    partial: bool
    verify: bool
    timeout: float
    progress: bool


@breaking_if_left()
def restore(
    path: PathLike,
    like: PyTree = None,
    *,
    rules: Rules | None = None,
    mesh: MeshLike | None = None,
    min_size: int | None = None,
    cast: Any = None,
    partial: bool = False,
    verify: bool = True,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> PyTree:
    """Reads a checkpoint directly into shards, on any mesh and any number of processes.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((256, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/mlp", {"w": np.ones((256, 64), np.float32), "act": jax.nn.relu})
        ...     tree = restore(f"{folder}/mlp", like, rules=[("w", P("fsdp"))], mesh=mesh)
        ...     host = restore(f"{folder}/mlp")
        >>> tree["w"].sharding.spec, list(host)
        (P('fsdp',), ['w'])

    Requested and stored leaves are compared before any array is read, checksums after.

    Args:
        path: The checkpoint.
        like: A `Plan`, or a tree of arrays or `jax.ShapeDtypeStruct`s. The result has its
            structure and its static leaves. Without it, the result is dicts in dicts, by the parts
            of the paths: `tree["layers"]["0"]["weight"]`.
        rules: How to shard the arrays, by their paths, as in `plan`. By default arrays are placed
            like those of `like`; without `like` they stay in host memory.
        mesh: The mesh for the rules, as in `plan`; by default the current one.
        min_size: For the rules, as in `plan`.
        cast: A floating-point dtype to convert floating-point arrays to, where `like` requests
            it (or is not given).
        partial: Whether leaves may be missing from the checkpoint or from `like`. Leaves that the
            checkpoint lacks stay as they are in `like`, and a `ShardingWarning` lists them.
        verify: Whether to compare the saved checksums, which reads the arrays once more in memory.
        timeout: Seconds to wait for other processes; waits for their reads have no limit.
        progress: Whether to show a progress bar with a step per array (needs `tqdm`).

    Returns:
        The tree. Its arrays share memory with nothing else, nor with each other.

    Raises:
        CheckpointError: If there is no checkpoint at `path`; if there is not enough host memory.
        RemovedError: If its writer removes or replaces the checkpoint meanwhile.
        DamagedError: If the checkpoint is not as saved: the leaves are listed.
        MismatchError: If leaves are missing, not requested, or of another kind, shape or dtype
            than requested; if they have 64 bits without JAX's x64 mode; if JAX does not know the
            class of a leaf of `like`.
        FormatError: If another version of treeshard wrote the checkpoint; if `cast` is not a
            floating-point dtype.
        ShardingRuleError: If the rules do not decide every leaf, or a spec does not fit its leaf.
        NoMeshError: If there is no mesh for the rules.
        MeshError: If the mesh is abstract.
        ProcessError: If the processes request different trees, or one fails or does not arrive.
        ValueError: If `mesh` or `min_size` is given without `rules`.
        ImportError: If `progress` is set and `tqdm` is not installed.
        ShardingRuleError: Also if `like` is a `Plan` with errors, as `Plan.check_before_use`, whose
            warnings apply too.
        LeafError: If `like` has a mutable reference (`jax.Ref`).
    """
    # A restore to host memory alone needs no other process.
    among = [jax.process_index()] if like is None and rules is None else None
    checkpoint = checkpoint_path(path)
    with reading(checkpoint) as check:
        with require_agreement(WHERE, among=among, timeout=timeout) as facts, explaining(check):
            text = table_text(checkpoint)
            rows = {row.path: row for row in _table_of(checkpoint, text).leaves}
            types = {row.path: LeafType(row.kind, row.shape, row.dtype) for row in rows.values()}
            placing = Placing(rules, mesh, min_size)
            request = read_request(types, like, placing, cast=cast, names=_paths, where=WHERE)
            request.differences.check(str(checkpoint), partial=partial)
            facts["the path"] = str(checkpoint)
            facts["the table of leaves"] = f"CRC-32 {crc32(text.encode())}"
            request.add_to(facts)
        requested = request.to_read()
        leaves = [(rows[x.name], x) for x in requested.values()]
        arrays = _read_together(checkpoint, leaves, check, verify, among, timeout, progress)
    tree = request.tree(zip(requested, _values(leaves, arrays), strict=True))
    return nested(tree) if like is None else tree


def table_at(path: epath.Path) -> LeafTable:
    """The table of the checkpoint at `path`. Raises as `checkpoint.inspect` does."""
    return _table_of(path, table_text(path))


def _table_of(path: epath.Path, text: str) -> LeafTable:
    try:
        table = from_text(text)
    except (DamagedError, FormatError) as error:
        raise type(error)(f"{path}: {error}") from None
    # The table is whole. It may still be that of another checkpoint.
    if seal(path) != str(crc32(text.encode())):
        raise DamagedError(f"{path}: the table of leaves does not belong to the arrays beside it.")
    return table


# ------------------------------------------------------------------ a leaf as requested


def _values(leaves: Leaves, arrays: dict[str, Any]) -> Iterator[Any]:
    """The requested leaves. Takes each array out of `arrays`."""
    for row, requested in leaves:
        stored = arrays.pop(row.path, None)
        if row.kind == "key" and stored is None and requested.sharding is not None:
            stored = _empty_keys(row, requested.sharding)
        value = unpack(row, stored)
        yield _as_requested(value, requested) if row.kind == "array" else value


def _memory_to_cast(leaves: Leaves, wanted: Mapping[str, StoredArray]) -> int:
    """The host memory that `_values` needs: for all arrays as they are stored, which it replaces
    one by one."""
    meter = Meter()
    sizes = {path: items_here(x.sharding, x.shape) for path, x in wanted.items()}
    meter.add(sum(wanted[path].dtype.itemsize * size for path, size in sizes.items()))
    for row, requested in leaves:
        if row.kind != "array" or row.path not in wanted:
            continue
        was, dtype = wanted[row.path], parse_dtype(requested.type.dtype)
        if dtype != was.dtype:
            meter.add(2 * dtype.itemsize * sizes[row.path])  # on the host, then on the devices
            meter.add(-(dtype.itemsize + was.dtype.itemsize) * sizes[row.path])
    return meter.peak


def _empty_keys(row: SavedLeaf, sharding: Sharding) -> jax.Array:
    empty = np.zeros(row.stored_shape, np.uint32)
    return jax.make_array_from_callback(empty.shape, sharding, empty.__getitem__, dtype=empty.dtype)


def _as_requested(x: Any, requested: RequestedLeaf) -> Any:
    """An array in the requested dtype and place."""
    dtype = parse_dtype(requested.type.dtype)
    with np.errstate(all="ignore"):  # overflow gives inf, as in `jnp.asarray`
        if not requested.type.on_devices:
            return x.astype(dtype, copy=False)
        if not isinstance(x, jax.Array):  # empty, or too wide for devices
            full = x.astype(dtype, copy=False)
            sharding = requested.sharding or default_sharding()
            return jax.make_array_from_callback(x.shape, sharding, full.__getitem__)
        if x.dtype == dtype:
            return x
        return map_shards(x, lambda values: values.astype(dtype), dtype)


# ------------------------------------------------------------------ reading the array store

_BATCH = 2**28  # bytes that are read to host memory at a time, if no single leaf has more


def _read_together(
    path: epath.Path,
    leaves: Leaves,
    check: Callable[[], None],
    verify: bool,
    among: Sequence[int] | None,
    timeout: float,
    progress: bool,
) -> dict[str, Any]:
    """Reads the stored arrays of leaves, by path; all processes do, or all raise.

    `check` raises if the writer has removed or replaced the checkpoint meanwhile.
    """
    stored = [(row, requested) for row, requested in leaves if row.stored]
    default = default_sharding()
    wanted = {row.path: _stored_array(row, requested, default) for row, requested in stored}
    verified = [row for row, _ in stored if verify and row.crc is not None]
    check_memory_of_hosts(
        WHERE,
        max(memory_to_read(wanted), _memory_to_cast(leaves, wanted)),
        partial(no_memory_to_read, path),
        threads=THREADS,
        among=among,
        timeout=timeout,
    )
    reading_together = all_or_none(WHERE, phase="read", among=among, timeout=AS_LONG_AS_IT_TAKES)
    with reading_together as messages, explaining(check):
        arrays, unread = ArrayStore(path).read(wanted, progress=progress)
        check()
        to_verify = [] if unread else [arrays[row.path] for row in verified]
        messages += [json.dumps(unread).encode(), b"\n", registers(to_verify)]
    unread_anywhere: dict[str, str] = {}
    every_registers: list[bytes] = []
    for message in messages:
        unread_there, _, registers_there = message.partition(b"\n")  # of which JSON has none
        unread_anywhere |= json.loads(unread_there)
        every_registers.append(registers_there)
    raise_damages(path, unread_anywhere)
    joint = of_registers(every_registers, to_verify, WHERE)
    raise_damages(path, _damages(verified, joint))
    return arrays


def _damages(rows: Sequence[SavedLeaf], joint: Joint) -> dict[str, str]:
    damages = {row.path: _damage(row, crc) for row, crc in zip(rows, joint.crcs, strict=True)}
    damages |= {rows[i].path: why for i, why in joint.differing.items()}
    return {path: why for path, why in damages.items() if why}


def _damage(row: SavedLeaf, crc: int) -> str:
    if row.crc is None or crc == row.crc:
        return ""
    return f"its bytes have the CRC-32 {crc}, but were saved with {row.crc}."


def read_each(path: epath.Path, rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
    """Reads leaves to host memory, a few at a time, and compares their checksums."""
    store = ArrayStore(path)
    for batch in _batches(rows):
        wanted = _on_host(batch)
        check_memory(path, memory_to_read(wanted), THREADS)
        arrays, errors = store.read(wanted)
        for row in batch:
            # No variable keeps what was yielded while the next batch is read.
            yield _read_leaf(row, arrays.pop(row.path, None), errors.get(row.path, ""))


def _read_leaf(row: SavedLeaf, x: np.ndarray | None, damage: str) -> ReadLeaf:
    if x is not None:
        damage = _damage(row, checksum(x))
    return ReadLeaf(row, in_its_dtype(row, x) if row.dtype and not damage else None, damage)


def damages_of(path: epath.Path, rows: Iterable[SavedLeaf]) -> Iterator[tuple[SavedLeaf, str]]:
    """Reads leaves block by block, and says how each is damaged; empty if it is as saved."""
    store = ArrayStore(path)
    for batch in _batches(rows):
        wanted = _on_host(batch)
        # All blocks of an array lie alike in its chunks, and a damaged table may say any number.
        readers, damages = store.open(
            wanted, {leaf: [first_block(x)] for leaf, x in wanted.items()}
        )
        store.check_memory_for_blocks(wanted[leaf] for leaf in readers)
        crcs: dict[str, int] = {}
        for leaf, of_leaf in store.blocks(wanted, readers):
            x = wanted[leaf]
            try:
                crcs[leaf] = checksum_of_blocks(x.shape, x.dtype.itemsize, of_leaf)
            except ValueError as error:  # a block cannot be read
                damages[leaf] = str(error)
        for row in batch:
            if row.path in crcs:
                damages[row.path] = _damage(row, crcs[row.path])
            yield row, damages.get(row.path, "")


def _stored_array(row: SavedLeaf, requested: RequestedLeaf, default: Sharding) -> StoredArray:
    """What to read from the array store for a leaf, with a default for where to place it."""
    on_host = _array_on_host(row)
    # A dtype that is too wide for devices is read to the host, and converted there.
    is_too_wide = jax.dtypes.canonicalize_dtype(on_host.dtype) != on_host.dtype
    if is_too_wide or not requested.type.on_devices:
        return on_host
    return on_host._replace(sharding=requested.sharding or default)


def _array_on_host(row: SavedLeaf) -> StoredArray:
    return StoredArray(row.stored_shape, parse_dtype(row.stored or ""), row.chunk or ())


def _on_host(rows: Iterable[SavedLeaf]) -> dict[str, StoredArray]:
    return {row.path: _array_on_host(row) for row in rows if row.stored}


def _batches(rows: Iterable[SavedLeaf]) -> Iterator[list[SavedLeaf]]:
    batch: list[SavedLeaf] = []
    size = 0
    for row in rows:
        if batch and size + row.bytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += row.bytes
    yield batch

"""Restores a tree from a checkpoint: all processes agree, then each reads its shards.

Every process opens the store and reads the regions that its devices will hold, whichever process
wrote them. The processes exchange no arrays. They compare their calls and report what they could
not read.

Each region is converted in host memory, moved to its devices and freed before many others are
read. TensorStore compares the checksum of each chunk. An intact chunk of another step has a valid
checksum too, so the files are compared with the list of saved files.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypedDict
from zlib import crc32

import jax
import numpy as np
from etils import epath

from treeshard._core.arrays import regions_here
from treeshard._core.hosts import check_memory_of_hosts
from treeshard._core.meetings import breaking_if_left
from treeshard._core.memory import Meter, kept_by_allocator
from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree, nest
from treeshard._core.processes import (
    TIMEOUT,
    all_or_none,
    require_agreement,
    show_progress,
)
from treeshard._core.spec_trees import SpecTree
from treeshard._core.text import parse_dtype
from treeshard._disk.files import FileFacts, PathLike
from treeshard._disk.leaves import ReadLeaf, SavedLeaf, raise_damages
from treeshard._disk.requests import Placing, RequestedLeaf, convert, read_request
from treeshard._disk.to_devices import Part, add_part, default_sharding, to_devices
from treeshard._disk.untrusted import check_memory, no_memory_to_read
from treeshard._planning.rules import Rules
from treeshard.checkpoint._array_store import (
    IN_FLIGHT,
    SMALL,
    THREADS,
    ArrayStore,
    Read,
    bytes_to_read,
    chunk_bytes,
    chunks_of,
    full_region,
    group_tiny,
    keep_in_flight,
    region_bytes,
    split_batches,
    store_key,
)
from treeshard.checkpoint._paths import (
    MANIFEST,
    changed_files,
    checkpoint_path,
    explaining,
    reading,
    seal,
    table_text,
)
from treeshard.checkpoint._table import (
    LeafTable,
    empty_containers,
    from_text,
    paths_of,
    unpack,
    view_in_dtype,
)
from treeshard.errors import DamagedError, FormatError, MismatchError

WHERE = "restore"

_paths = partial(paths_of, where=WHERE, error=MismatchError)
Leaves = Sequence[tuple[SavedLeaf, RequestedLeaf]]  # as they are stored, and as requested


class RestoreOptions(TypedDict, total=False):
    """The keyword arguments of `restore`."""

    rules: Rules | SpecTree | None
    mesh: MeshLike | None
    min_size: int | None
    cast: Any
    partial: bool
    timeout: float
    progress: bool


@breaking_if_left()
def restore(
    path: PathLike,
    like: PyTree = None,
    *,
    rules: Rules | SpecTree | None = None,
    mesh: MeshLike | None = None,
    min_size: int | None = None,
    cast: Any = None,
    partial: bool = False,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> PyTree:
    """Restores a tree from a checkpoint, on any mesh and with any number of processes.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((256, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/mlp", {"w": np.ones((256, 64), np.float32), "act": jax.nn.relu})
        ...     tree = restore(f"{folder}/mlp", like, rules=[("w", P("fsdp"))], mesh=mesh)
        ...     host = restore(f"{folder}/mlp")
        >>> tree["w"].sharding.spec, list(host)
        (P('fsdp',), ['w'])

    Each process reads only its own shards. The requested leaves are compared with the stored ones
    before the first array is read.

    Args:
        path: The checkpoint.
        like: A `Plan`, a tree of plans, or a tree of arrays or `jax.ShapeDtypeStruct`s. The result
            has the structure and the static leaves of `like`. The plan of a subtree, such as
            `plan["params"]`, reads only this subtree. Without `like`, the result is nested dicts by
            the parts of the paths, such as `tree["layers"]["0"]["weight"]`.
        rules: Rules to shard the arrays by their paths, as in `plan`. By default, arrays are placed
            like the arrays of `like`. Without `like` they stay in host memory.
        mesh: The mesh for the rules, as in `plan`. The default is the current mesh.
        min_size: For the rules, as in `plan`.
        cast: A floating-point dtype. Floating-point arrays are converted to it if `like` requests
            it, or if there is no `like`.
        partial: Whether leaves may be missing from the checkpoint or from `like`. `None` counts as
            missing in both, and `...` in `like`. Leaves that the checkpoint lacks stay as they are
            in `like`, and a `ShardingWarning` lists them.
        timeout: Seconds to wait for other processes. Their reads may take longer, as long as they
            are alive.
        progress: Whether to show a progress bar with a step per array (needs `tqdm`).

    Returns:
        The tree. No two of its arrays share memory.

    Raises:
        CheckpointError: If `path` is not a checkpoint, or the host has too little memory.
        RemovedError: If the writer of the checkpoint removes or replaces it during the call.
        DamagedError: If leaves are damaged. All of them are listed.
        MismatchError: If leaves are missing, are not requested, or have another kind, shape or
            dtype than requested. If arrays have 64 bits, and JAX's x64 mode is off. If JAX does not
            know the class of a leaf of `like`.
        FormatError: If another version of treeshard wrote the checkpoint. If `cast` is not a
            floating-point dtype.
        ShardingRuleError: If a leaf matches no rule, or a spec does not fit its leaf. If `like` is
            a `Plan` with errors, as `Plan.check_before_use`, whose warnings apply too.
        NoMeshError: If there is no mesh for the rules.
        MeshError: If the mesh is abstract.
        LeafError: If `like` has a mutable reference (`jax.Ref`).
        ProcessError: If the processes request different trees, or a process fails or does not
            arrive.
        ValueError: If `mesh` or `min_size` is given without `rules`.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Source:
        Orbax restores to the shardings of a target tree in the same way.
    """
    # A restore to host memory needs no other process.
    among = [jax.process_index()] if like is None and rules is None else None
    checkpoint = checkpoint_path(path)
    with reading(checkpoint) as check:
        with require_agreement(WHERE, among=among, timeout=timeout) as facts, explaining(check):
            table = table_at(checkpoint)
            rows = {row.path: row for row in table.leaves}
            placing = Placing(rules, mesh, min_size)
            request = read_request(
                rows, like, placing, cast=cast, partial=partial, names=_paths, where=WHERE
            )
            request.differences.check(str(checkpoint), partial=partial)
            facts["the path"] = str(checkpoint)
            facts["the table of leaves"] = f"CRC-32 {seal(checkpoint)}"
            request.add_to(facts)
        requested = request.to_read()
        leaves = [(rows[x.name], x) for x in requested.values()]
        arrays = _read_together(checkpoint, table.files, leaves, check, among, timeout, progress)
    tree = request.tree(zip(requested, _values(leaves, arrays), strict=True))
    return nest({**empty_containers(table), **tree}) if like is None else tree


def table_at(path: epath.Path) -> LeafTable:
    """The table of the checkpoint at `path`. Raises as `checkpoint.inspect` does."""
    text = table_text(path)
    try:
        table = from_text(text)
    except (DamagedError, FormatError) as error:
        raise type(error)(f"{path}: {error}") from None
    # An intact table may still belong to another checkpoint. The seal is stored with the arrays.
    if seal(path) != str(crc32(text.encode())):
        raise DamagedError(f"{path}: the table of leaves does not belong to the arrays beside it.")
    return table


# ------------------------------------------------------------------ a leaf as requested


def _values(leaves: Leaves, arrays: dict[str, Any]) -> Iterator[Any]:
    """The requested leaves. Takes each array out of `arrays`."""
    for row, requested in leaves:
        array = arrays.pop(row.path, None)
        if row.dtype and array is None:
            array = _empty(row, requested)
        yield unpack(row, array)


def _empty(row: SavedLeaf, requested: RequestedLeaf) -> Any:
    """An array without elements, which is not stored."""
    target = _data_of(row, requested)
    empty = np.zeros(target.shape, parse_dtype(target.dtype))
    if target.sharding is None:
        return jax.device_put(empty) if target.on_devices else empty
    return jax.make_array_from_callback(
        empty.shape, target.sharding, empty.__getitem__, dtype=empty.dtype
    )


# ------------------------------------------------------------------ reading the array store


def _read_together(
    path: epath.Path,
    files: FileFacts,
    leaves: Leaves,
    check: Callable[[], None],
    among: Sequence[int] | None,
    timeout: float,
    progress: bool,
) -> dict[str, Any]:
    """Reads the stored arrays of leaves, by path; all processes do, or all raise.

    `check` raises if the writer has removed or replaced the checkpoint meanwhile.
    """
    rows = [row for row, _ in leaves if row.stored]
    targets = {row.path: _data_of(row, leaf) for row, leaf in leaves if row.stored}
    check_memory_of_hosts(
        WHERE,
        _memory_to_read(_reads(rows, targets), targets),
        partial(no_memory_to_read, path),
        threads=THREADS,
        among=among,
        timeout=timeout,
    )
    reading_together = all_or_none(
        WHERE, _join_errors, phase="read", among=among, timeout=timeout, works=True
    )
    with reading_together as messages, explaining(check):
        store = ArrayStore(path)
        errors: dict[str, str] = {}
        shown = show_progress(rows, WHERE, show=progress)
        arrays = _read_arrays(store, _reads(shown, targets), targets, errors)
        # Each of N processes has written files. If every process compared all files, N times N
        # files would be opened, so process 0 does. The other processes, which may see a copy of
        # their own, compare only the root of the index. It names every file that they read, by
        # names that are unique to the save.
        if among is None and jax.process_index() != 0:
            files = {name: facts for name, facts in files.items() if name == MANIFEST}
        errors = _damages(changed_files(path, files), rows, store, errors)
        check()
        messages.own = json.dumps(errors).encode() if errors else b""
    errors_anywhere: dict[str, str] = json.loads(messages.answer or "{}")
    raise_damages(path, errors_anywhere)
    return arrays


def _data_of(row: SavedLeaf, x: RequestedLeaf) -> RequestedLeaf:
    """The array that is read for a leaf: of keys, their data."""
    return x if row.kind == "array" else x._replace(shape=row.stored_shape, dtype="uint32")


def _reads(rows: Iterable[SavedLeaf], targets: Mapping[str, RequestedLeaf]) -> Iterator[Read]:
    """The distinct regions that this process reads of each array."""
    for row in rows:
        target = targets[row.path]
        regions = [full_region(target.shape)]
        # JAX splits what is small faster than it takes to read several regions.
        if target.sharding is not None and not (target.is_here and row.bytes < SMALL):
            regions = dict.fromkeys(regions_here(target.sharding, target.shape).values())
        for region in regions:
            yield row, region


def _read_arrays(
    store: ArrayStore,
    reads: Iterable[Read],
    targets: Mapping[str, RequestedLeaf],
    errors: dict[str, str],
) -> dict[str, Any]:
    """Reads arrays to where they belong. Errors of arrays that cannot be read go to `errors`."""
    on_host: dict[str, np.ndarray] = {}

    def read_parts() -> Iterator[Part[str]]:
        for row, region, stored in store.read(reads, errors):
            target = targets[row.path]
            values = [convert(view_in_dtype(row, stored), parse_dtype(target.dtype))]
            del stored  # frees it before the next read
            if target.on_devices:
                yield row.path, region, values.pop()
            else:
                on_host[row.path] = values.pop()

    on_devices = {path: x for path, x in targets.items() if x.on_devices}
    return to_devices(on_devices, read_parts()) | on_host


def _memory_to_read(reads: Iterable[Read], targets: Mapping[str, RequestedLeaf]) -> int:
    """The most host memory that `_read_arrays` takes, from a run without reads."""
    meter, buffers, default = Meter(), list[tuple[int, int]](), default_sharding()

    def start(group: list[Read]) -> list[int]:
        meter.add(bytes_to_read(group))
        return [bytes_to_read(group)]

    for group, [taken] in keep_in_flight(group_tiny(reads), bytes_to_read, start):
        stored = len(group) * region_bytes(*group[0])
        buffers += (stored, stored), (chunk_bytes(group[0][0]), taken - stored)
        meter.add(stored - taken)
        for row, region in group:
            target = targets[row.path]
            # Arrays that are stored as `uint8` are viewed in their own dtype, without a copy.
            converts = row.kind == "array" and row.dtype != target.dtype
            nbytes = region_bytes(row, region)
            add_part(meter, target, region, default, nbytes=nbytes, converts=converts)
    return meter.peak + kept_by_allocator(buffers, IN_FLIGHT)


# ------------------------------------------------------------------ damage


def _join_errors(messages: list[bytes]) -> bytes:
    """The errors of all processes, by leaf; empty if there are none."""
    errors: dict[str, str] = {}
    for message in filter(None, messages):
        errors |= json.loads(message)
    return json.dumps(errors).encode() if errors else b""


def _damages(
    changed: Mapping[str, str],
    rows: Sequence[SavedLeaf],
    store: ArrayStore,
    errors: Mapping[str, str],
) -> dict[str, str]:
    """How leaves are damaged, in the order of the tree: tiny arrays are read in another order."""
    # The error of a leaf says more than the fact that its file has changed.
    found = {**_leaves_in(changed, rows, store), **errors}
    return {row.path: found[row.path] for row in rows if row.path in found}


def _leaves_in(
    changed: Mapping[str, str], rows: Iterable[SavedLeaf], store: ArrayStore
) -> dict[str, str]:
    """The leaves with values or index entries in changed files, each with the reason.

    An intact chunk in such a file may be from another step, so these leaves count as damaged.
    """
    if not changed:  # without reading the index
        return {}
    found: dict[str, str] = {}
    for key, holders in store.files_by_key.items():
        for file in holders:
            if file in changed:
                # The key of a chunk begins with the key of its array, which has no `/`.
                found[key.partition("/")[0]] = f"its file {file} {changed[file]}."
    keys = {row.path: store_key(row.path) for row in rows}
    return {leaf: found[key] for leaf, key in keys.items() if key in found}


def read_each(path: epath.Path, table: LeafTable, rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
    """Reads leaves of the table to host memory, a few at a time."""
    store = ArrayStore(path)
    in_changed = _leaves_in(changed_files(path, table.files), table.leaves, store)
    for batch in split_batches(rows, lambda row: row.bytes):
        reads = [(row, full_region(row.stored_shape)) for row in batch if row.stored]
        targets = {row.path: _on_host(row) for row, _ in reads}
        check_memory(path, _memory_to_read(reads, targets), THREADS)
        errors: dict[str, str] = {}
        arrays = _read_arrays(store, reads, targets, errors)
        for row in batch:
            damage = errors.get(row.path, "") or in_changed.get(row.path, "")
            # Without a variable, each leaf is freed before the next batch is read.
            yield _read_leaf(row, arrays.pop(row.path, None), damage)


def _on_host(row: SavedLeaf) -> RequestedLeaf:
    return _data_of(row, RequestedLeaf(row.path, row.kind, row.shape, row.dtype))


def _read_leaf(row: SavedLeaf, x: np.ndarray | None, damage: str) -> ReadLeaf:
    if row.dtype and not row.stored:  # it has no elements
        x = _empty(row, _on_host(row))
    return ReadLeaf(row, None if damage else x, damage)


def find_damages(
    path: epath.Path, table: LeafTable, rows: Iterable[SavedLeaf]
) -> tuple[dict[str, str], dict[str, str]]:
    """Reads all leaves, chunk by chunk. Returns how leaves are damaged, by path, and other files.

    `rows` are the rows of the table. The other files are the index of a single process, and the
    metadata for Orbax.
    """
    stored = [row for row in table.leaves if row.stored]
    # The chunks in flight, a decoded copy of each by TensorStore, and the previous chunk.
    largest = max(map(chunk_bytes, stored), default=0)
    needed = min(2 * sum(row.bytes for row in stored), max(IN_FLIGHT, 2 * largest) + largest)
    needed += kept_by_allocator(((chunk_bytes(x), 2 * x.bytes) for x in stored), IN_FLIGHT)
    check_memory(path, needed, THREADS, "Verify it where there is more.")
    store = ArrayStore(path)
    errors: dict[str, str] = {}
    chunks = ((row, chunk) for row in rows if row.stored for chunk in chunks_of(row))
    deque(store.read(chunks, errors), maxlen=0)  # TensorStore compares the checksums
    changed = changed_files(path, table.files)
    damages = _damages(changed, stored, store, errors)
    holders = set(chain.from_iterable(store.files_by_key.values())) if changed else set()
    others = {file: why for file, why in changed.items() if file not in holders}
    return damages, others

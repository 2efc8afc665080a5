"""Saves a tree as a checkpoint: what all processes check before any of them writes."""

from typing import Any

import jax
from etils import epath

from treeshard._core.arrays import array_text
from treeshard._core.processes import agreeing
from treeshard._disk.files import Lock
from treeshard._disk.leaves import SavedLeaf
from treeshard.checkpoint._checksums import checksums
from treeshard.checkpoint._paths import check_vacant, is_local, lock_of
from treeshard.checkpoint._store import Writing, lies_here, write
from treeshard.checkpoint._table import LeafTable, Packed, pack, to_text
from treeshard.errors import CheckpointError, listed

WHERE = "save"


def begin(
    path: epath.Path,
    tree: Any,
    *,
    fingerprints: bool,
    compress: bool,
    ocdbt: bool,
    timeout: float,
) -> Writing:
    """Begins to save a tree. Once this returns, its leaves may change or be donated.

    Raises:
        As `checkpoint.save` does; here, or in `Writing.wait`.
    """
    lock: Lock | None = None

    def release() -> None:
        if lock is not None:
            lock.release()

    try:
        with agreeing(WHERE, timeout=timeout) as facts:
            packed = pack(tree, WHERE)
            if jax.process_index() == 0:
                _check_here(packed)
                lock = _locked(path)
                check_vacant(path)
            options = f"fingerprints={fingerprints}, compress={compress}, ocdbt={ocdbt}"
            facts |= {"the path": str(path), "the options": options, **_facts(packed.table)}

        def table() -> str:
            return to_text(_with_checksums(packed, timeout) if fingerprints else packed.table)

        return write(
            path,
            packed.arrays,
            table,
            compress=compress,
            ocdbt=ocdbt,
            timeout=timeout,
            at_end=release,
        )
    except BaseException:
        release()
        raise


def _with_checksums(packed: Packed, timeout: float) -> LeafTable:
    names = [row.path for row in packed.table.leaves if row.stored is not None]
    crcs = checksums(list(packed.arrays.values()), WHERE, timeout, names=names)
    return packed.table.with_checksums(dict(zip(packed.arrays, crcs, strict=True)))


def _check_here(packed: Packed) -> None:
    facts = [
        f"{row.path}: process 0, which writes the metadata, has no shard of it. `reshard` it to a"
        " mesh that includes a device of process 0."
        for row in packed.table.leaves
        if row.stored and not lies_here(packed.arrays[row.key])
    ]
    if facts:
        raise CheckpointError(f"{WHERE}: {listed(f'{len(facts)} leaves cannot be saved:', facts)}")


def _locked(path: epath.Path) -> Lock | None:
    """Creates the parent directory, and locks the path against other writers."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path.parent} cannot be created: {error.strerror}.") from None
    return Lock(lock_of(path), str(path)) if is_local(path) else None


def _facts(table: LeafTable) -> dict[str, str]:
    """What must be the same on all processes."""
    meshes = {f"mesh {i + 1}": str(axes) for i, axes in enumerate(table.meshes)}
    return meshes | {row.path: _fact(row) for row in table.leaves}


def _fact(row: SavedLeaf) -> str:
    if not row.dtype:
        return f"{row.kind} {row.value}"
    return f"{array_text(row)} as {row.spec}, {row.impl or row.stored}"

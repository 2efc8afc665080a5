"""Saves a tree as a checkpoint: what all processes check before any of them writes."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress

import jax
from etils import epath
from jax.tree_util import tree_leaves

from treeshard._core.arrays import array_text, has_shape, is_key
from treeshard._core.paths import PyTree
from treeshard._core.processes import agreeing, with_bar
from treeshard._disk.files import Lock, make_directory
from treeshard._disk.leaves import SavedLeaf
from treeshard._disk.untrusted import bytes_of_files
from treeshard.checkpoint._checksums import checksums
from treeshard.checkpoint._paths import check_vacant, is_local, lock_of, partial_path
from treeshard.checkpoint._store import Writing, has_shards_here, write
from treeshard.checkpoint._table import Packed, pack, to_text
from treeshard.errors import CheckpointError, listed, warn

WHERE = "save"


def begin(
    path: epath.Path,
    tree: PyTree,
    *,
    fingerprints: bool,
    compress: bool,
    ocdbt: bool,
    on_divergence: str,
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

    if on_divergence not in ("error", "warn"):
        raise ValueError(f"{WHERE}(on_divergence={on_divergence!r}): it is 'error' or 'warn'.")
    try:
        with agreeing(WHERE, timeout=timeout) as facts:
            packed = pack(tree, WHERE)
            if jax.process_index() == 0:
                _check_shards_here(packed)
                lock = _locked(path)
                check_vacant(path)
            facts["the path"] = str(path)
            facts["the options"] = (
                f"fingerprints={fingerprints}, compress={compress}, ocdbt={ocdbt}"
            )
            for i, axes in enumerate(packed.table.meshes):
                facts[f"mesh {i + 1}"] = str(axes)
            facts |= {row.path: _fact(row) for row in packed.table.leaves}

        def table() -> str:
            if not fingerprints:
                return to_text(packed.table)
            arrays = list(packed.arrays.values())
            crcs, differing = checksums(arrays, WHERE, timeout, replicas=True)
            names = [row.path for row in packed.table.leaves if row.stored and row.same_as is None]
            if differing:
                _tell({names[i]: why for i, why in differing.items()}, on_divergence)
            return to_text(packed.table.with_checksums(dict(zip(packed.arrays, crcs, strict=True))))

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


def wait(writing: Writing, path: epath.Path, tree: PyTree, *, progress: bool) -> None:
    """Waits for a save of `tree`, on process 0 with a bar of the bytes that are on disk.

    Raises:
        As `Writing.wait`.
    """
    if progress and jax.process_index() == 0:
        arrays = [x for x in tree_leaves(tree) if has_shape(x) and not is_key(x)]
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        for percent in with_bar(range(1, 101), WHERE, unit="%"):
            while not writing.done() and 100 * _bytes_written(path) < percent * size:
                time.sleep(0.05)
    writing.wait()


def _bytes_written(path: epath.Path) -> int:
    with suppress(CheckpointError, OSError):  # files come and go
        return bytes_of_files(partial_path(path)) if is_local(path) else 0
    return 0


def _check_shards_here(packed: Packed) -> None:
    facts = [
        f"{row.path}: process 0, which writes the metadata, has no shard of it. `reshard` it to a"
        " mesh that includes a device of process 0."
        for row in packed.table.leaves
        if row.stored and not has_shards_here(packed.arrays[row.key])
    ]
    if facts:
        raise CheckpointError(f"{WHERE}: {listed(f'{len(facts)} leaves cannot be saved:', facts)}")


def _tell(differing: Mapping[str, str], on_divergence: str) -> None:
    """Raises or warns that copies of leaves differ."""
    facts = [f"{path}: {why}" for path, why in differing.items()]
    text = f"{WHERE}: {listed(f'the copies of {len(facts)} leaves differ:', facts)}\n"
    if on_divergence == "warn":
        warn(f"{text}The first replicas are saved, and of separate copies that of process 0.")
        return
    raise CheckpointError(
        f"{text}A checkpoint holds one copy. Find out why they differ, such as other PRNG keys or"
        " other data on a process, or a `shard_map` that returns varying values as replicated; or"
        " save the first with on_divergence='warn'."
    )


def _locked(path: epath.Path) -> Lock | None:
    """Creates the parent directory, and locks the path against other writers."""
    if not path.name:
        raise CheckpointError(f"{path} is the root of a file system. Save to a directory in it.")
    try:
        make_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path.parent} cannot be created: {error.strerror}.") from None
    return Lock(lock_of(path), str(path)) if is_local(path) else None


def _fact(row: SavedLeaf) -> str:
    """What must be the same on all processes."""
    if not row.dtype:
        return f"{row.kind} {row.value}"
    same = "" if row.same_as is None else f", the same array as {row.same_as}"
    return f"{array_text(row)} as {row.spec}, {row.impl or row.stored}{same}"

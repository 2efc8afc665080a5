"""Saves a tree as one directory, atomically and durably, on all processes together.

A save has three stages, each of which ends on all processes before the next begins: process 0
creates a directory under a temporary name; each process writes its arrays into it; process 0 merges
their indexes and renames the directory. A rename in a file system happens at once or not at all,
and readers ignore the temporary name, so they need not know about writers.

`begin` returns once the arrays are copied to the host, and a thread does the rest. Without the copy
no step could donate its state until everything is written.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
from etils import epath

from treeshard._core.arrays import array_text
from treeshard._core.paths import PyTree
from treeshard._core.processes import AS_LONG_AS_IT_TAKES, agreeing, exchange, with_bar
from treeshard._disk.files import Lock, flush, flush_tree, make_directory
from treeshard._disk.leaves import SavedLeaf
from treeshard.checkpoint._array_store import copies, merge, write_arrays, written_by
from treeshard.checkpoint._checksums import checksums
from treeshard.checkpoint._paths import (
    ARRAYS,
    COMMITTED,
    SEAL,
    TABLE,
    TABLE_FILE,
    check_vacant,
    is_local,
    list_files,
    lock_of,
    partial_path,
    sweep,
)
from treeshard.checkpoint._table import WHERE, LeafTable, Packed, pack, to_text
from treeshard.errors import CheckpointError, listed, warn


class Writing:
    """A save in the background, of arrays with `size` bytes."""

    def __init__(self, path: epath.Path, size: int, end: Future[None]) -> None:
        self._path, self._size, self._end = path, size, end

    def wait(self, *, progress: bool = False) -> None:
        """Returns once all processes have written everything; or raises what failed on any."""
        try:
            if progress and jax.process_index() == 0:
                for percent in with_bar(range(1, 101), WHERE, unit="%"):
                    while not self._end.done() and 100 * self._on_disk() < percent * self._size:
                        time.sleep(0.05)
            self._end.result()
        except KeyboardInterrupt:
            self._end.exception()  # hold the locks until the last byte is written
            raise

    def _on_disk(self) -> int:
        """The bytes of all files so far; 0 in an object store, which shows only complete ones."""
        if not is_local(self._path):
            return 0
        files = Path(partial_path(self._path)).rglob("*")
        with suppress(OSError):  # files are renamed and removed meanwhile
            return sum(file.stat().st_size for file in files if file.is_file())
        return 0


def begin(
    path: epath.Path,
    tree: PyTree,
    *,
    fingerprints: bool,
    on_divergence: str,
    timeout: float,
) -> Writing:
    """Begins to save a tree, as `checkpoint.save` does. Its leaves may then change or be donated.

    Either all processes save it or all raise, here or in `Writing.wait`. If they raise, process 0
    removes the unfinished checkpoint.
    """
    if on_divergence not in ("error", "warn"):
        raise ValueError(f"{WHERE}(on_divergence={on_divergence!r}): it is 'error' or 'warn'.")
    first = jax.process_index() == 0
    with ExitStack() as held:
        with agreeing(WHERE, timeout=timeout) as facts:
            packed = pack(tree)
            if first:
                held.enter_context(_locked(path))
                check_vacant(path)
            facts |= _facts(path, packed.table, fingerprints)
        if first:
            held.callback(sweep, path)  # after a failure, before the lock is released
        thread = ThreadPoolExecutor(1, "treeshard-save")
        created = False
        try:
            with _interrupts_deferred():
                with _stage(path, "begin", timeout):
                    if first:
                        _create(path)
                created = True
                written = thread.submit(write_arrays, partial_path(path), copies(packed.arrays))
                # While the thread writes, this one reads the arrays for their checksums.
                table = _table(packed, timeout, on_divergence) if fingerprints else packed.table
                text = to_text(table)
            leaves = list(packed.arrays)
            size = sum(x.size * x.dtype.itemsize for x in packed.arrays.values())
            end = thread.submit(_finish, path, written, text, leaves, held.pop_all())
            return Writing(path, size, end)
        except BaseException:
            thread.shutdown()  # until nothing is being written
            if created:  # the other processes wait for this stage
                with suppress(Exception), _stage(path, "written", AS_LONG_AS_IT_TAKES):
                    raise
            raise
        finally:
            thread.shutdown(wait=False)


def _facts(path: epath.Path, table: LeafTable, fingerprints: bool) -> dict[str, str]:
    """What must be the same on all processes."""
    facts = {"the path": str(path), "the options": f"fingerprints={fingerprints}"}
    facts |= {f"mesh {i}": str(axes) for i, axes in enumerate(table.meshes, 1)}
    return facts | {row.path: _fact(row) for row in table.leaves}


def _fact(row: SavedLeaf) -> str:
    if not row.dtype:
        return f"{row.kind} {row.value}"
    return f"{array_text(row)} as {row.spec}, {row.impl or row.stored}"


def _table(packed: Packed, timeout: float, on_divergence: str) -> LeafTable:
    """The table with checksums."""
    leaves, arrays = list(packed.arrays), list(packed.arrays.values())
    crcs, differing = checksums(arrays, WHERE, timeout, replicas=True)
    if differing:
        _tell({leaves[i]: why for i, why in differing.items()}, on_divergence)
    return packed.table.with_checksums(dict(zip(leaves, crcs, strict=True)))


def _tell(differing: Mapping[str, str], on_divergence: str) -> None:
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


# ------------------------------------------------------------------ the stages


def _locked(path: epath.Path) -> AbstractContextManager[Any]:
    """Creates the parent directory, and locks the path against other writers."""
    if not path.name:
        raise CheckpointError(f"{path} is the root of a file system. Save to a directory in it.")
    make_directory(path.parent)
    return Lock(lock_of(path), str(path)) if is_local(path) else nullcontext()


def _create(path: epath.Path) -> None:
    partial = partial_path(path)
    sweep(path)
    partial.mkdir()
    (partial / ARRAYS).mkdir()


def _finish(
    path: epath.Path, written: Future[None], text: str, leaves: Sequence[str], held: ExitStack
) -> None:
    """Waits for the arrays, and gives the checkpoint its name, durably."""
    me, partial = jax.process_index(), partial_path(path)
    with held:
        with _stage(path, "written", AS_LONG_AS_IT_TAKES):
            written.result()
            if me == 0:
                (partial / TABLE).mkdir()
                (partial / TABLE / TABLE_FILE).write_text(text)
                (partial / ARRAYS / SEAL).write_text(str(crc32(text.encode())))
            elif is_local(path):
                # On a network file system, `fsync` covers what its own machine wrote.
                flush_tree(written_by(partial, me))
        with _stage(path, "committed", AS_LONG_AS_IT_TAKES):
            if me == 0:
                merge(partial, leaves)
                _commit(path, partial)


def _commit(path: epath.Path, partial: epath.Path) -> None:
    """Makes a written checkpoint visible under its name."""
    if not is_local(path):
        (path / COMMITTED).write_text("")
        return
    list_files(partial)
    # The rename may reach the disk before the files do, unless these are flushed first; and it is
    # on the disk only once the directory that has the name is.
    flush_tree(partial)
    partial.rename(path)
    flush(path.parent)


@contextmanager
def _stage(path: epath.Path, name: str, timeout: float) -> Iterator[None]:
    """A part of a save on all processes: if it raises on one, even for a Ctrl-C, all raise."""
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
    message = "" if raised is None else f"{type(raised).__name__}: {raised}"
    lane = f"save {path}"
    messages = exchange(f"{lane}: {name}", message.encode(), timeout=timeout, lane=lane)
    if raised is not None and not isinstance(raised, Exception):
        raise raised  # a Ctrl-C stays one
    failures = {i: text.decode() for i, text in enumerate(messages) if text}
    if not failures:
        return
    if jax.process_count() > 1:
        failures = {i: f"process {i} raised {text}" for i, text in failures.items()}
    why = listed("Several processes failed:", list(failures.values()))
    raise CheckpointError(
        f"{path} was not saved; what existed before is unchanged. {why}"
    ) from raised


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raises a Ctrl-C that arrives during the block after it; a second one is raised at once.

    So background threads are not orphaned. Outside the main thread, which alone receives signals,
    it does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    # A handler that C code installed is `None`, and ignoring the signal is a number.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupted_at: list[Any] = []

    def later(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, handler)
        interrupted_at.append(frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupted_at:
        handler(signal.SIGINT, interrupted_at[0])

"""Saves a tree as one directory, atomically and durably, on all processes together."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from zlib import crc32

import jax
from etils import epath

from treeshard._core.arrays import array_text
from treeshard._core.paths import PyTree
from treeshard._core.processes import AS_LONG_AS_IT_TAKES, agreeing, exchange, with_bar
from treeshard._disk.files import Lock, flush, flush_tree, make_directory
from treeshard._disk.leaves import SavedLeaf
from treeshard._disk.untrusted import file_sizes
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
    lock_of,
    partial_path,
    sweep,
)
from treeshard.checkpoint._table import LeafTable, Packed, pack, to_text
from treeshard.errors import CheckpointError, listed, warn

WHERE = "save"


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
        with suppress(CheckpointError, OSError):  # files come and go
            return file_sizes(partial_path(self._path)).total if is_local(self._path) else 0
        return 0


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
    """Begins to save a tree, as `checkpoint.save` does. Its leaves may then change or be donated.

    Either all processes save it or all raise, here or in `Writing.wait`. If they raise, process 0
    removes the unfinished checkpoint.
    """
    if on_divergence not in ("error", "warn"):
        raise ValueError(f"{WHERE}(on_divergence={on_divergence!r}): it is 'error' or 'warn'.")
    first = jax.process_index() == 0
    with ExitStack() as held:
        with agreeing(WHERE, timeout=timeout) as facts:
            packed = pack(tree, WHERE)
            if first:
                held.enter_context(_locked(path))
                check_vacant(path)
            facts["the path"] = str(path)
            facts["the options"] = (
                f"fingerprints={fingerprints}, compress={compress}, ocdbt={ocdbt}"
            )
            for i, axes in enumerate(packed.table.meshes):
                facts[f"mesh {i + 1}"] = str(axes)
            facts |= {row.path: _fact(row) for row in packed.table.leaves}
        if first:
            held.callback(sweep, path)  # after a failure
        partial = partial_path(path)
        thread = ThreadPoolExecutor(1, "treeshard-save")
        begun = False
        try:
            with _interrupts_deferred():
                with _stage(path, "begin", timeout):
                    if first:
                        sweep(path)
                        partial.mkdir()
                        (partial / ARRAYS).mkdir()
                begun = True
                copied = copies(packed.arrays)
                written = thread.submit(
                    write_arrays, partial, copied, compress=compress, in_few_files=ocdbt
                )
                del copied
                table = _table(packed, timeout, on_divergence) if fingerprints else packed.table
                text = to_text(table)
            keys = list(packed.arrays)
            size = sum(x.size * x.dtype.itemsize for x in packed.arrays.values())
            end = thread.submit(_finish, path, written, text, keys, ocdbt, held.pop_all())
            return Writing(path, size, end)
        except BaseException:
            thread.shutdown()  # until nothing is being written
            if begun:
                with suppress(Exception), _stage(path, "written", AS_LONG_AS_IT_TAKES):
                    raise
            raise
        finally:
            thread.shutdown(wait=False)


def _table(packed: Packed, timeout: float, on_divergence: str) -> LeafTable:
    """The table with checksums, which are computed while the arrays are written."""
    arrays = list(packed.arrays.values())
    crcs, differing = checksums(arrays, WHERE, timeout, replicas=True)
    names = [row.path for row in packed.table.leaves if row.stored]
    if differing:
        _tell({names[i]: why for i, why in differing.items()}, on_divergence)
    return packed.table.with_checksums(dict(zip(packed.arrays, crcs, strict=True)))


def _finish(
    path: epath.Path,
    written: Future[None],
    text: str,
    keys: Sequence[str],
    ocdbt: bool,
    held: ExitStack,
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
                flush_tree(written_by(partial, me, in_few_files=ocdbt))
        with _stage(path, "committed", AS_LONG_AS_IT_TAKES):
            if me == 0:
                merge(partial, keys, in_few_files=ocdbt)
                if not is_local(path):
                    (path / COMMITTED).write_text("")
                    return
                flush_tree(partial)
                partial.rename(path)
                flush(path.parent)


@contextmanager
def _stage(path: epath.Path, name: str, timeout: float) -> Iterator[None]:
    """A part of a save on all processes: if it raises on one, even for a Ctrl-C, all raise."""
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:
        own = error
    told = b"" if own is None else f"{type(own).__name__}: {own}".encode()
    lane = f"save {path}"
    errors = exchange(f"{lane}: {name}", told, timeout=timeout, lane=lane)
    if own is not None and not isinstance(own, Exception):
        raise own
    if any(errors):
        texts = {i: text.decode() for i, text in enumerate(errors) if text}
        if jax.process_count() > 1:
            texts = {i: f"process {i} raised {text}" for i, text in texts.items()}
        why = listed("Several processes failed:", list(texts.values()))
        raise CheckpointError(
            f"{path} was not saved; what existed before is unchanged. {why}"
        ) from own


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raises a Ctrl-C that arrives during the block after it; a second one is raised at once.

    So background threads are not orphaned. Outside the main thread, which alone receives signals,
    it does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
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


def _locked(path: epath.Path) -> AbstractContextManager[Any]:
    """Creates the parent directory, and locks the path against other writers."""
    if not path.name:
        raise CheckpointError(f"{path} is the root of a file system. Save to a directory in it.")
    make_directory(path.parent)
    return Lock(lock_of(path), str(path)) if is_local(path) else nullcontext()


def _fact(row: SavedLeaf) -> str:
    """What must be the same on all processes."""
    if not row.dtype:
        return f"{row.kind} {row.value}"
    return f"{array_text(row)} as {row.spec}, {row.impl or row.stored}"

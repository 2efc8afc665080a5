"""Everything that uses Orbax: saves arrays and their table as one directory, atomically and
durably.

Orbax waits minutes for other processes, even for those that have failed. So each process tells
Orbax that it is alone, and the processes wait for each other here instead.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from zlib import crc32

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from etils import epath

from treeshard._core.processes import AS_LONG_AS_IT_TAKES, exchange
from treeshard._disk.files import flush, flush_tree
from treeshard.checkpoint._packed import Small, copies, is_small, write_packed
from treeshard.checkpoint._paths import (
    ARRAYS,
    COMMITTED,
    SEAL,
    TABLE,
    TABLE_FILE,
    is_local,
    partial_path,
    sweep,
)
from treeshard.errors import CheckpointError, listed

Arrays = Mapping[str, jax.Array | np.ndarray]

# ------------------------------------------------------------------ writing


class Writing:
    """A save in the background, whose end is a future."""

    def __init__(self, end: Future[None]) -> None:
        self._end = end

    def done(self) -> bool:
        """Whether it has ended."""
        return self._end.done()

    def wait(self) -> None:
        """Returns once all processes have written everything; or raises what failed on any."""
        try:
            self._end.result()
        except KeyboardInterrupt:
            self._end.exception()  # hold the locks until the last byte is written
            raise


def write(
    path: epath.Path,
    arrays: Arrays,
    table: Callable[[], str],
    *,
    compress: bool,
    ocdbt: bool,
    timeout: float,
    at_end: Callable[[], None],
) -> Writing:
    """Begins to write a checkpoint, and returns once the arrays may change or be donated.

    Either all processes write it or all raise, here or in `Writing.wait`. If they raise, process 0
    removes the unfinished checkpoint.

    Args:
        path: The directory, which must not exist yet.
        arrays: By key, the same on all processes. Process 0 has a shard of each.
        table: Returns the text of the table. Called while the arrays are being written; it may
            read them.
        compress: Whether to compress with zstd.
        ocdbt: Whether to store all arrays in a few files.
        timeout: Seconds to wait for other processes at the beginning.
        at_end: Called after the last write.

    Raises:
        CheckpointError: If it cannot be written: on all processes, with the error of each.
        ProcessError: If a process does not arrive.
    """
    context = _context()
    context.array.saving.use_compression = compress
    context.array.saving.use_ocdbt = ocdbt
    context.array.saving.use_replica_parallel = False  # the checksums are of the first replicas
    barriers = SaveBarriers(str(path), timeout)
    parts = _Parts(path, arrays, context)
    thread = ThreadPoolExecutor(1, "treeshard-save")  # Orbax wants a thread without an event loop
    quiet = ExitStack()
    quiet.enter_context(_quiet())

    def end(error: BaseException | None = None) -> None:
        try:
            barriers.wait(error)
        finally:
            if error is not None and jax.process_index() == 0:
                sweep(path)
            quiet.close()
            at_end()

    def finish(text: str) -> None:
        try:
            parts.finish(text)
            barriers.wait()
            if jax.process_index() == 0:
                parts.commit()
        except BaseException as error:
            end(error)
            raise
        end()

    is_begun = False
    try:
        with _interrupts_deferred():
            if jax.process_index() == 0:
                parts.create()
            barriers.wait()
            thread.submit(parts.begin).result()
            is_begun = True
            text = table()
        return Writing(thread.submit(finish, text))
    except BaseException as error:
        parts.abandon()
        try:
            end(error)
        except CheckpointError:
            if not is_begun:  # what `table` raises needs no explanation
                raise
        raise
    finally:
        thread.shutdown(wait=False)


class _Parts:
    """What a process writes of a checkpoint: its shards; process 0 also the table, and the name.

    Args:
        path: The checkpoint.
        arrays: As in `write`.
        context: How Orbax writes them.
    """

    def __init__(self, path: epath.Path, arrays: Arrays, context: ocp.Context) -> None:
        self._path, self._partial = path, partial_path(path)
        here = {key: x for key, x in arrays.items() if has_shards_here(x)}
        in_few_files = context.array.saving.use_ocdbt
        self._small = {key: x for key, x in here.items() if in_few_files and is_small(x)}
        self._arrays = {key: x for key, x in here.items() if key not in self._small}
        self._copies: dict[str, Small] = {}
        self._context = context
        self._merge: Any = None

    def create(self) -> None:
        """Creates the directory of the unfinished checkpoint."""
        sweep(self._path)
        self._partial.mkdir()
        (self._partial / ARRAYS).mkdir()

    def begin(self) -> None:
        """Copies the arrays, and begins to write them."""
        if self._arrays:
            handler = ocp.handlers.PyTreeHandler(context=self._context)
            directory = _Created(self._partial / ARRAYS)
            with self._context:
                self._merge = _run(handler.save(directory, self._arrays))
        self._copies = copies(self._small)

    def abandon(self) -> None:
        """Waits until nothing is being written any more."""
        for write in self._merge.commit_futures if self._merge else ():
            with suppress(Exception):
                write.result()

    def finish(self, table: str) -> None:
        """Writes everything but the name, and flushes what this process wrote."""
        try:
            for write in self._merge.commit_futures if self._merge else ():
                write.result()
        finally:
            self.abandon()
        file = write_packed(self._partial, self._copies)
        if jax.process_index() == 0:
            (self._partial / TABLE).mkdir()
            (self._partial / TABLE / TABLE_FILE).write_text(table)
            (self._partial / ARRAYS / SEAL).write_text(str(crc32(table.encode())))
        elif is_local(self._path):
            own = self._partial / ARRAYS / f"ocdbt.process_{jax.process_index()}"
            flush_tree(own if own.exists() else self._partial / ARRAYS)
            if file is not None:
                flush(file)

    def commit(self) -> None:
        """Merges the parts of all processes, and gives the checkpoint its name, durably."""
        if self._merge:
            with self._context:
                _run(self._merge)
        if not is_local(self._path):
            (self._path / COMMITTED).write_text("")
            return
        flush_tree(self._partial)
        self._partial.rename(self._path)
        flush(self._path.parent)


class _Created:
    """A directory that exists, for Orbax, which awaits the creation of directories."""

    def __init__(self, path: epath.Path) -> None:
        self.path = path

    def __truediv__(self, name: Any) -> "_Created":
        return _Created(self.path / name)

    async def await_creation(self) -> epath.Path:
        return self.path


def _run(steps: Awaitable[Any]) -> Any:
    """Runs something of Orbax. Unlike `asyncio.run`, several threads may do so at a time."""

    async def all_steps() -> Any:
        return await steps

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(all_steps())
    finally:
        loop.close()


class SaveBarriers:
    """The barriers of one save: its directory exists, its arrays are written, it is committed.

    Each process reaches all of them in turn. A process that fails brings its error to the next
    barrier, and there all processes raise. Unlike in `together`, a Ctrl-C is brought there too.

    Args:
        path: The checkpoint.
        timeout: Seconds to wait for other processes at the first barrier.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        later = AS_LONG_AS_IT_TAKES
        self._left = [("begin", timeout), ("written", later), ("committed", later)]

    def wait(self, error: BaseException | None = None) -> None:
        """Waits at the next barrier; does nothing if one has failed already.

        Raises:
            CheckpointError: If this or another process has failed: it lists the errors by process.
            ProcessError: If a process does not arrive.
        """
        if not self._left:
            return
        stage, timeout = self._left.pop(0)
        own = b"" if error is None else f"{type(error).__name__}: {error}".encode()
        try:
            errors = exchange(
                f"save {self._path}: {stage}", own, timeout=timeout, lane=f"save {self._path}"
            )
        except BaseException:
            self._left.clear()
            raise
        if any(errors):
            self._left.clear()
            if error is None or isinstance(error, Exception):  # and not Ctrl-C
                raise CheckpointError(self._message(errors)) from error

    def _message(self, errors: list[bytes]) -> str:
        texts = {i: text.decode() for i, text in enumerate(errors) if text}
        if jax.process_count() > 1:
            texts = {i: f"process {i} raised {text}" for i, text in texts.items()}
        why = listed("Several processes failed:", list(texts.values()))
        return f"{self._path} was not saved; what existed before is unchanged. {why}"


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


def has_shards_here(x: jax.Array | np.ndarray) -> bool:
    """Whether this process holds any shard of `x`."""
    return not isinstance(x, jax.Array) or bool(x.sharding.addressable_devices)


# ------------------------------------------------------------------ settings and logs


@contextmanager
def _quiet() -> Iterator[None]:
    """Filters Orbax's messages out of the log. Whatever matters is raised."""

    def passes(record: logging.LogRecord) -> bool:
        return record.name == "absl" and "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _context() -> ocp.Context:
    context = ocp.Context()
    context.multiprocessing.active_processes = {jax.process_index()}
    return context

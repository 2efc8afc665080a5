"""All that is asked of Orbax: arrays and a table of them in one directory, which is there at once
and whole, or not at all; and arrays read back straight to their shards.

Where Orbax waits for other processes it does so for minutes, and for those that have failed too.
So it is told that each process is alone, and they meet here instead.
"""

import asyncio
import gc
import logging
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from etils import epath

from treeshard._checkpoint_paths import ARRAYS, SEAL, TABLE, TABLE_FILE, sweep
from treeshard._errors import CheckpointError
from treeshard._interrupts import interrupts_afterwards
from treeshard._meetings import Meetings

Arrays = Mapping[str, jax.Array | np.ndarray]

IN_FLIGHT = 2**28  # bytes that are read at a time, beside what has its place, if no array has more


@dataclass(frozen=True)
class OnHost:
    """Stands for an array that is to be read as numpy's."""

    shape: tuple[int, ...]
    dtype: Any


# ------------------------------------------------------------------ writing


class Writing:
    """What is being written in the background."""

    def __init__(self, finish: Callable[[], None]) -> None:
        thread = ThreadPoolExecutor(1, "treeshard-save")
        self._end = thread.submit(finish)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Returns once all processes have written all of it; or raises what any of them met."""
        try:
            self._end.result()
        except KeyboardInterrupt:
            self._end.exception()  # the locks must outlive the last byte
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

    All processes write it or all raise: here, or in `Writing.wait`. If they raise, process 0
    removes what there was of it.

    Args:
        path: The directory, which must not be there yet.
        arrays: By key, the same on all processes. A part of each lies on process 0.
        table: Called once the arrays are being written, which it may read: the text beside them.
        compress: Whether to compress by zstd.
        ocdbt: Whether to put small arrays together into few files.
        timeout: Seconds in which the others must come.
        at_end: Called when nothing more is written.

    Raises:
        CheckpointError: If it cannot be written: on all processes, with what each met.
        ProcessError: If a process did not come.
    """
    context = _context()
    context.asynchronous.create_directories_asynchronously = False
    context.array.saving.use_compression = compress
    context.array.saving.use_ocdbt = ocdbt
    meetings = Meetings(str(path), timeout)
    parts = _Parts(arrays, context, meetings)
    quiet = ExitStack()
    quiet.enter_context(_quiet())

    def end(error: BaseException | None = None) -> None:
        try:
            meetings.meet(error)
        finally:
            if error is not None and jax.process_index() == 0:
                sweep(path)
            quiet.close()
            at_end()

    def finish() -> None:
        try:
            response.result()
        except BaseException as error:
            end(error)
            raise
        end()

    response: Any = None
    try:
        with interrupts_afterwards():
            if jax.process_index() == 0:
                sweep(path)
            with context:
                response = ocp.save_checkpointables_async(path, {ARRAYS: parts})
            parts.table.set_result(table())
    except BaseException as error:
        if response is None:
            end(error)
        else:  # what is begun comes to its end
            if not parts.table.done():
                # Ctrl-C itself would end the loop that Orbax keeps.
                met = error if isinstance(error, Exception) else CheckpointError("interrupted")
                parts.table.set_exception(met)
            with suppress(CheckpointError):
                finish()
        raise
    return Writing(finish)


class _Parts:
    """The arrays, which Orbax writes, and beside them the table. What makes one checkpoint of the
    parts of all processes is not begun before all have written theirs.

    Attributes:
        table: Where its text is to come.
    """

    def __init__(self, arrays: Arrays, context: ocp.Context, meetings: Meetings) -> None:
        self._arrays = {key: x for key, x in arrays.items() if lies_here(x)}
        self._context, self._meetings = context, meetings
        self.table = Future[str]()

    async def save(self, directory: ocp.path.PathAwaitingCreation) -> Coroutine[Any, Any, None]:
        self._meetings.meet()  # process 0 has made the directory
        if not self._arrays:
            return self._finish(directory.path.parent, (), None)
        handler = ocp.handlers.PyTreeHandler(context=self._context)
        end: Any = await handler.save(directory, self._arrays)
        return self._finish(directory.path.parent, end.commit_futures, end)

    async def _finish(self, path: epath.Path, parts: Sequence[Any], end: Any) -> None:
        waits = [asyncio.to_thread(part.result) for part in parts]
        waits.append(asyncio.to_thread(self._write_table, path))
        found = await asyncio.gather(*waits, return_exceptions=True)
        errors = [error for error in found if isinstance(error, BaseException)]
        await asyncio.to_thread(self._meetings.meet, errors[0] if errors else None)
        if end is not None:
            await end

    def _write_table(self, path: epath.Path) -> None:
        text = self.table.result()
        if jax.process_index() == 0:
            (path / TABLE).mkdir()
            (path / TABLE / TABLE_FILE).write_text(text)
            (path / ARRAYS / SEAL).write_text(str(crc32(text.encode())))

    async def load(self, directory: Any) -> None:
        raise NotImplementedError  # Orbax asks for one; `read` is ours


# ------------------------------------------------------------------ reading


def lies_here(x: jax.Array | np.ndarray) -> bool:
    """Whether any of it lies on this process."""
    return not isinstance(x, jax.Array) or bool(x.sharding.addressable_devices)


def read(
    path: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct | OnHost]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads arrays, each process its own shards.

    Args:
        path: The checkpoint.
        wanted: By key: shape, dtype as written, and sharding.

    Returns:
        The arrays; and of those that cannot be read, what Orbax says.
    """
    elsewhere = {
        key: jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)
        for key, x in wanted.items()
        if not isinstance(x, OnHost) and not x.sharding.addressable_devices
    }  # of which Orbax would make nothing
    there = {key: x for key, x in wanted.items() if key not in elsewhere}
    if not there:
        return elsewhere, {}
    context = _context()
    context.pytree.loading.partial_load = True  # others may be there
    most = max(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in there.values())
    context.memory.read_concurrent_bytes = max(IN_FLIGHT, 2 * most + 1)
    # In a thread of its own, since notebooks have a loop already.
    with _quiet("asyncio"), _no_late_news(), ThreadPoolExecutor(1, "treeshard-restore") as thread:
        arrays, met = thread.submit(_read, path, there, context).result()
    odd = {key: why for key, x in there.items() if (why := _odd(arrays.get(key), x))}
    read = {key: x for key, x in arrays.items() if key not in odd}
    return read | elsewhere, odd | met


def _odd(found: Any, wanted: jax.ShapeDtypeStruct | OnHost) -> str:
    """What is wrong with what Orbax made of an array, if anything is."""
    if not isinstance(found, jax.Array | np.ndarray):
        return "it is not among the arrays."  # of which Orbax says nothing
    if (found.shape, found.dtype) == (wanted.shape, wanted.dtype):
        return ""
    return f"{found.dtype}{list(found.shape)} is there, not {wanted.dtype}{list(wanted.shape)}."


def _read(
    path: epath.Path, wanted: Mapping[str, Any], context: ocp.Context
) -> tuple[dict[str, Any], dict[str, str]]:
    async def load(some: Mapping[str, Any]) -> Any:
        # Not by `ocp.load`, which counts what all processes do together.
        handler = ocp.handlers.PyTreeHandler(context=context)
        return await (await handler.load(path / ARRAYS, dict(some)))

    try:
        return asyncio.run(load(wanted)), {}
    except Exception as error:  # of any type, and mostly without a name
        traceback.clear_frames(error.__traceback__)
    arrays: dict[str, Any] = {}
    met: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, struct in wanted.items():
            try:
                arrays |= asyncio.run(load({key: struct}))
            except Exception as error:
                met[key] = " ".join(str(error).split()) or type(error).__name__
                traceback.clear_frames(error.__traceback__)
        gc.collect()  # the tasks that Orbax has left unfinished complain as they go
    return arrays, met


@contextmanager
def _no_late_news() -> Iterator[None]:
    """When a read fails Orbax closes its loop, and what was being read beside it finds nobody."""
    hook = sys.unraisablehook

    def ours(told: Any) -> None:
        code = getattr(told.object, "cr_code", None)  # of a coroutine
        unfinished = code is not None and "orbax" in code.co_filename
        if not unfinished and str(told.exc_value) != "Event loop is closed":
            hook(told)

    sys.unraisablehook = ours
    try:
        yield
    finally:
        sys.unraisablehook = hook


# ------------------------------------------------------------------ its settings and its talk


@contextmanager
def _quiet(*more: str) -> Iterator[None]:
    """Keeps from the log what Orbax says there. What matters it raises."""

    def passes(record: logging.LogRecord) -> bool:
        return record.name == "absl" and "orbax" not in record.pathname

    loggers = [logging.getLogger(name) for name in ("absl", *more)]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


def _context() -> ocp.Context:
    context = ocp.Context()
    context.multiprocessing.active_processes = {jax.process_index()}
    return context

"""Saves a tree as one directory, atomically and durably, on all processes together.

A save has three stages, and each ends on all processes before the next begins. First, process 0
creates a directory with a temporary name. Second, each process writes its arrays into it. Third,
process 0 merges the indexes and renames the directory. In a file system, a rename happens at once
or not at all, and readers ignore the temporary name.

A thread writes. For a save in the background, `begin` first copies the arrays to the host, so that
the next step can donate its state. Other saves copy only the parts in flight, and none of the
arrays on CPU devices.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
from etils import epath

from treeshard._core.hosts import check_memory_of_hosts
from treeshard._core.meetings import Combine, MeetingOptions, showing_life
from treeshard._core.paths import PyTree
from treeshard._core.processes import (
    Messages,
    compare_copies,
    exchange_outcomes,
    require_agreement,
    show_progress,
    to_first,
)
from treeshard._core.threads import Outcome, defer_interrupts, start_thread
from treeshard._disk.files import (
    FileFacts,
    Lock,
    bytes_in,
    check_mark,
    facts_of_files,
    file_facts,
    flush,
    flush_tree,
    make_directory,
    new_mark,
    warn_of_removed,
)
from treeshard.checkpoint._array_store import (
    THREADS,
    Arrays,
    Parts,
    copies,
    memory_to_save,
    merge,
    select_parts,
    write_arrays,
    written_by,
)
from treeshard.checkpoint._paths import (
    ARRAYS,
    COMMITTED,
    MANIFEST,
    MARK,
    SEAL,
    TABLE,
    TABLE_FILE,
    check_vacant,
    is_local,
    lock_of,
    partial_path,
    put_in_place,
    sweep,
)
from treeshard.checkpoint._table import WHERE, LeafTable, pack, to_text
from treeshard.errors import CheckpointError, LeafError, counted, listed, warn


class Writing:
    """A save at `path` that a thread writes, with `size` bytes of arrays."""

    def __init__(self, path: epath.Path, size: int, end: Outcome[None]) -> None:
        self.path, self._size, self._end = path, size, end

    @property
    def has_ended(self) -> bool:
        return self._end.done

    def wait(self, *, progress: bool = False) -> None:
        """Waits until all processes have finished. Raises if the save failed on any process."""
        try:
            if progress and jax.process_index() == 0:
                for percent in show_progress(range(1, 101), WHERE, unit="%"):
                    while not self._end.done and 100 * self._on_disk() < percent * self._size:
                        time.sleep(0.05)
            self._end.wait()
        except KeyboardInterrupt:
            self._end.wait()  # hold the locks until the last byte is written
            raise
        untold.discard(self)
        self._end.result()

    def error(self) -> BaseException | None:
        """The error of a save that has ended, or `None`."""
        return self._end.error() if self._end.done else None

    def _on_disk(self) -> int:
        """The bytes of all files so far, or 0 in an object store, which shows complete files."""
        if not is_local(self.path):
            return 0
        return bytes_in(Path(partial_path(self.path)))


# The saves whose outcome has not been reported yet.
untold: set[Writing] = set()
os.register_at_fork(after_in_child=untold.clear)


def begin(
    running: list[Writing],
    path: epath.Path,
    tree: PyTree,
    *,
    on_divergence: str,
    timeout: float,
    in_background: bool,
    run: Lock | None = None,
    replace: bool = False,
) -> Writing:
    """Begins to save a tree, as `checkpoint.save` does.

    With `in_background`, its leaves may change or be donated before `Writing.wait` returns. Either
    all processes save the tree, or all raise, here or in `Writing.wait`. After an error, process 0
    removes the unfinished checkpoint. `run` is the lock of the directory, if it is held. With
    `replace`, an existing checkpoint at `path` is replaced. Otherwise it is an error.

    The save is added to `running` as its thread starts, so that a Ctrl-C loses none.
    """
    if on_divergence not in ("error", "warn"):
        raise ValueError(f"{WHERE}(on_divergence={on_divergence!r}): it is 'error' or 'warn'.")
    first = jax.process_index() == 0
    with ExitStack() as held:
        # These checks run on all processes before the first byte is written.
        with require_agreement(WHERE, timeout=timeout, reads=False) as facts:
            facts["the path"] = str(path)
            table, arrays = pack(tree, facts)
            if not table.leaves:
                raise LeafError(f"{WHERE}: the tree has no array, number, text or `None` to save.")
            parts = select_parts(arrays)
            if first:
                _lock(path, run, held)
                check_vacant(path, replace=replace)
        needed, lacks = memory_to_save(parts, copied=in_background), partial(_no_memory, path)
        check_memory_of_hosts(WHERE, needed, lacks, threads=THREADS, timeout=timeout)
        # Only now, because a read of an array waits for the program that computes it.
        _check_copies(arrays, timeout, on_divergence)
        if first:
            # Removes an unfinished or replaced checkpoint before the lock is released.
            held.callback(_clean_up, path)
        size = sum(row.bytes for row in table.leaves if row.stored)
        threads: list[Outcome[Any]] = []
        try:
            with defer_interrupts(at_most=1):  # so that no thread is orphaned
                with _stage(path, "begin", timeout) as mark:
                    if first:
                        mark.own = _create(path)
                    if in_background:
                        parts = copies(parts)
                with defer_interrupts():  # the thread takes over the locks
                    given = path, table, parts, mark.answer, timeout, replace, held.pop_all()
                    end = start_thread(threads, _finish, *given, copied=in_background)
                    writing = Writing(path, size, end)
                    running.append(writing)
                    untold.add(writing)
            return writing
        except BaseException:
            for outcome in threads:  # hold the locks until the last byte is written
                outcome.wait()
            raise


def _no_memory(path: epath.Path, fact: str, _free: int) -> CheckpointError:
    return CheckpointError(
        f"{path} was not saved: copies of its arrays need {fact} Free some, or shard the arrays"
        " over more processes."
    )


def _lock(path: epath.Path, run: Lock | None, held: ExitStack) -> None:
    if run is not None:
        run.check()
    if not path.name:
        raise CheckpointError(f"{path} is the root of a file system. Save to a directory in it.")
    make_directory(path.parent)
    if is_local(path):
        Lock(lock_of(path), str(path), held)


def _explain_difference(x: Any) -> str:
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        return "its replicas on different devices are not equal."
    return "its values differ between processes, which hold separate copies."


def _check_copies(arrays: Arrays, timeout: float, on_divergence: str) -> None:
    """Raises or warns if the copies of an array on several devices or processes differ."""
    differing = compare_copies(WHERE, arrays, timeout=timeout)
    if not differing:
        return
    facts = [
        f"{path}: {_explain_difference(arrays[path])}\n    {part or 'all of it'}: {checksums}"
        for path, (part, checksums) in differing.items()
    ]
    text = f"{WHERE}: {listed(f'the copies of {len(facts)} leaves differ:', facts)}\n"
    if on_divergence != "warn":
        raise CheckpointError(
            f"{text}A checkpoint holds one copy. Find out why they differ, such as other PRNG"
            " keys or other data on a process, or a `shard_map` that returns varying values as"
            " replicated; or save the first with on_divergence='warn'."
        )
    warn(f"{text}The first replicas are saved, and, for separate copies, the copy of process 0.")


# ------------------------------------------------------------------ the stages


def _clean_up(path: epath.Path) -> None:
    with suppress(Exception):  # the first error is raised, and the next save sweeps again
        sweep(path)


def _create(path: epath.Path) -> bytes:
    """Creates the unfinished checkpoint, and returns the mark that every process must see."""
    partial = partial_path(path)
    warn_of_removed(WHERE, path.parent, sweep(path))
    partial.mkdir()
    (partial / ARRAYS).mkdir()
    return new_mark(partial / MARK)


def _finish(
    path: epath.Path,
    table: LeafTable,
    parts: dict[str, Parts],
    mark: bytes,
    timeout: float,
    replace: bool,
    held: ExitStack,
    *,
    copied: bool,
) -> None:
    """Writes the arrays durably, and gives the checkpoint its name."""
    me, partial = jax.process_index(), partial_path(path)
    leaves = list(parts)
    with held:
        with _stage(path, "written", timeout, to_first, works=True) as reports:
            if me != 0:  # before a byte is written where process 0 would not find it
                check_mark(partial / MARK, mark, timeout)
            has_written = write_arrays(partial, table.leaves, parts, copied=copied)
            files: FileFacts = {}  # the files that process 0 must see in a file system
            if me != 0 and has_written and is_local(path):
                # On a network file system, `fsync` covers only the writes of its own machine.
                folder = written_by(partial, me)
                flush_tree(folder)
                facts = facts_of_files(folder)
                files = {f"{folder.name}/{name}": x for name, x in facts.items()}
            reports.own = json.dumps([has_written, files]).encode()
        with _stage(path, "committed", timeout, works=True) as unflushed:
            if me == 0:
                of_process = [json.loads(report) for report in reports.received]
                merge(partial, [i for i, (wrote, _) in enumerate(of_process) if wrote], leaves)
                seen_by = [files for _, files in of_process]
                unflushed.own = _commit(path, table, seen_by, replace).encode()
        if unflushed.answer:
            raise CheckpointError(
                f"{path} is complete and can be read, but it may not survive a power cut:"
                f" {path.parent} could not be flushed: {unflushed.answer.decode()}."
            )


def _commit(path: epath.Path, table: LeafTable, written: Sequence[FileFacts], replace: bool) -> str:
    """Gives a written checkpoint its name, if its table can be read back.

    `written` has the files of each process. Returns why the name could not be flushed, or the empty
    text.
    """
    partial = partial_path(path)
    (partial / MARK).unlink()
    if is_local(path):
        table = table._replace(files=facts_of_files(partial / ARRAYS))
        _check_seen(partial, table.files, written)
    else:
        # The manifest makes the tables of two steps differ, so that neither fits the other.
        with (partial / ARRAYS / MANIFEST).open("rb") as file:
            table = table._replace(files={MANIFEST: file_facts(file)})
    text = to_text(table)
    (partial / TABLE).mkdir()
    (partial / TABLE / TABLE_FILE).write_text(text)
    (partial / ARRAYS / SEAL).write_text(str(crc32(text.encode())))
    if is_local(path):
        # Without a flush, the rename may reach the disk before the files. The rename itself is
        # durable once the parent directory is flushed.
        flush_tree(partial)
    # The table locates everything else, so it is read back before it may replace a checkpoint.
    if (partial / TABLE / TABLE_FILE).read_text() != text:
        raise CheckpointError("the table of leaves that was written reads otherwise.")
    if not is_local(path):
        (path / COMMITTED).write_text("")
        return ""
    put_in_place(partial, path, replace=replace)
    # The checkpoint exists from here on, so a later error must not deny it.
    try:
        flush(path.parent)
    except OSError as error:
        return str(error)
    return ""


def _check_seen(partial: epath.Path, files: FileFacts, written: Sequence[FileFacts]) -> None:
    """Raises unless process 0 sees the same files as the processes that have written them."""
    for process, of_process in enumerate(written):
        seen = {name: files[name] for name in of_process if name in files}
        if seen != of_process:
            raise CheckpointError(
                f"process {process} has written {_total_text(of_process)}, and process 0 sees"
                f" {_total_text(seen)} in {written_by(partial, process)}. Save to a directory"
                " that all processes share."
            )


def _total_text(files: FileFacts) -> str:
    return f"{counted(len(files), 'file')} of {sum(size for size, _ in files.values()):,} bytes"


@contextmanager
def _stage(
    path: epath.Path,
    name: str,
    timeout: float,
    combine: Combine = b"".join,
    *,
    works: bool = False,
) -> Iterator[Messages]:
    """A stage of a save on all processes. If one process raises, even by a Ctrl-C, all raise.

    It is like `all_or_none`, but its error lists the errors of all processes.
    """
    messages = Messages()
    raised: BaseException | None = None
    channel = f"save {path}"
    options: MeetingOptions = {"timeout": timeout, "works": works, "channel": channel}
    with showing_life(options):
        try:
            yield messages
        except BaseException as error:
            raised = error
        what = f"{channel}: {name}"
        told, failures = exchange_outcomes(what, raised, messages.own, combine, **options)
    if raised is not None and not isinstance(raised, Exception):
        raise raised  # a Ctrl-C stays a KeyboardInterrupt
    if failures:
        if jax.process_count() == 1:
            failures = [failures[0].removeprefix("process 0 raised ")]
        raise CheckpointError(
            f"{path} was not saved; what existed before is unchanged."
            f" {listed('Several processes failed:', failures)}"
        ) from raised
    messages.answer, messages.received = told

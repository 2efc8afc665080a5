"""Files that all processes write parts of, and that are renamed into place when complete."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from treeshard._directory_lock import locked
from treeshard._errors import CheckpointError
from treeshard._processes import AS_LONG_AS_IT_TAKES, together


@contextmanager
def new_files(
    name: Path, paths: Sequence[Path], stale: Sequence[Path], what: str, timeout: float
) -> Iterator[list[int]]:
    """Opens files under hidden names beside `paths`, the same files on every process.

    Once all processes have left the block without an error, the files are renamed to `paths`, in
    this order, and replace existing ones. After an error on any process they are removed.

    Args:
        name: The path that is locked: one run at a time writes files under it.
        paths: The files. Of several, the last is the index of the others: an existing index is
            removed before the others are replaced.
        stale: Files to remove at the end.
        what: The operation, as in `together`.
        timeout: Seconds to wait for other processes; waits for their writes have no limit.

    Raises:
        CheckpointError: If another run is writing the same files, or if a process does not see
            the files that process 0 created.
        ProcessError: If other processes fail, or do not arrive.
        OSError: If a file cannot be created or written.
    """
    first = jax.process_index() == 0
    hidden = [path.with_name(f".{path.name}.part") for path in paths]
    with ExitStack() as held:
        files: list[int] = []
        with together(what, timeout=timeout) as said:
            if first:
                said.mine = mark = os.urandom(16)
                held.enter_context(locked(name.with_name(f".{name.name}.lock"), f"{what}: {name}"))
                files = [held.enter_context(_made(path, mark)) for path in hidden]
        with together(what, timeout=timeout):
            if not first:
                files = [held.enter_context(_found(path, said.every[0])) for path in hidden]
        with together(what, timeout=AS_LONG_AS_IT_TAKES):
            yield files
            for file in files:
                os.fsync(file)
        with together(what, timeout=AS_LONG_AS_IT_TAKES):
            if first:
                _name(hidden, paths, stale)


@contextmanager
def _made(path: Path, mark: bytes) -> Iterator[int]:
    """Creates a file, or takes over the leftover of a killed run."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.pwrite(file, mark, 0)
        os.fsync(file)
        yield file
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


@contextmanager
def _found(path: Path, mark: bytes) -> Iterator[int]:
    """Opens the file of process 0, unless another machine has a different one of this name."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        file = None
    try:
        if file is None or os.pread(file, len(mark), 0) != mark:
            raise CheckpointError(
                f"Process {jax.process_index()} does not see the file that process 0 created in"
                f" {path.parent}. Save to a directory that all processes share."
            )
        yield file
    finally:
        if file is not None:
            os.close(file)


def _name(hidden: Sequence[Path], paths: Sequence[Path], stale: Sequence[Path]) -> None:
    if len(paths) > 1:
        paths[-1].unlink(missing_ok=True)
    for before, after in zip(hidden, paths, strict=True):
        before.replace(after)
    for path in stale:
        path.unlink(missing_ok=True)
    for directory in {path.parent for path in paths}:
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

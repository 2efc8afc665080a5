"""One writer at a time: locks that end with the process that holds them, however it ends."""

import fcntl
import os
import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from treeshard._errors import CheckpointError, warn


class Lock:
    """An exclusive lock on what is written at a path, held from here to `release`.

    It is an `flock` on a file beside the path, or inside it if it is a directory of several
    checkpoints. The system gives it back when the process ends, even if it is killed.

    Args:
        file: The file to lock. It tells who holds it, and is removed with the lock.
        what: What is locked, for messages.

    Raises:
        CheckpointError: If another process, or this one, has locked it: it says who. If the file
            cannot be made.
    """

    def __init__(self, file: Path, what: str) -> None:
        self._file = file
        self._handle: int | None = _locked(file, what)
        _held.add(self)

    def release(self) -> None:
        """Gives the lock back. Doing so again does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):
                self._file.unlink()  # before another one can have it
            os.close(handle)

    def close_copy(self) -> None:
        """Closes what a forked process has of it: it would hold the lock on."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Holds a `Lock` while its block runs."""
    lock = Lock(file, what)
    try:
        yield
    finally:
        lock.release()


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_copies() -> None:
    for lock in _held:
        lock.close_copy()


os.register_at_fork(after_in_child=_close_copies)


def _locked(file: Path, what: str) -> int | None:
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise CheckpointError(f"{what}: cannot be written to: {error.strerror}.") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace")
            os.close(handle)
            raise CheckpointError(f"{what}: {_held_by(holder)}") from None
        except OSError as error:
            os.close(handle)
            warn(
                f"{what}: this file system has no locks ({error.strerror}), so nothing keeps a"
                " second writer away."
            )
            return None
        if _is_still(file, handle):
            os.ftruncate(handle, 0)
            os.write(handle, _who().encode())
            return handle
        os.close(handle)  # whoever held it has removed it meanwhile


def _is_still(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except FileNotFoundError:
        return False


def _held_by(holder: str) -> str:
    if holder.startswith(f"{_process()},"):
        return "this process is writing there already. Close what it has open first."
    return (
        f"another writer is at work: {holder or 'one that does not say who'}. Two would destroy"
        " each other's checkpoints. Wait for it or end it, or write elsewhere."
    )


def _who() -> str:
    return f"{_process()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"


def _process() -> str:
    return f"process {os.getpid()} on {platform.node()}"

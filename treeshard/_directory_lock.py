"""Locks for writers of a path. A lock ends with the process that holds it, however that ends."""

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
    """An exclusive lock for writing at a path, held from construction to `release`.

    It is an `flock` on a file beside the path, or inside a directory of several checkpoints. The
    system releases it when the process ends, even if the process is killed.

    Args:
        file: The file to lock. It names the holder, and is removed on release.
        what: What is locked, for messages.

    Raises:
        CheckpointError: If another process, or this one, holds the lock: it says which. If the file
            cannot be created.
    """

    def __init__(self, file: Path, what: str) -> None:
        self._file = file
        self._handle: int | None = _locked(file, what)
        _held.add(self)

    def release(self) -> None:
        """Releases the lock. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):
                self._file.unlink()  # while the lock is still held
            os.close(handle)

    def close_copy(self) -> None:
        """Closes a forked process's copy of the handle, which would keep the lock held."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Holds a `Lock` during the block."""
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
                f"{what}: this file system does not support locks ({error.strerror}), so a second"
                " writer is not kept out."
            )
            return None
        if _is_still(file, handle):
            os.ftruncate(handle, 0)
            os.write(handle, _who().encode())
            return handle
        os.close(handle)  # its holder has just removed it


def _is_still(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except FileNotFoundError:
        return False


def _held_by(holder: str) -> str:
    if holder.startswith(f"{_process()},"):
        return "this process is already writing here. Close its other writer first."
    return (
        f"another run is writing here: {holder or 'an unknown process'}. Two writers would destroy"
        " each other's checkpoints. Wait for it, end it, or write to another path."
    )


def _who() -> str:
    return f"{_process()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"


def _process() -> str:
    return f"process {os.getpid()} on {platform.node()}"

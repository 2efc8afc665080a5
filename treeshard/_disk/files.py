"""Files that several processes or runs write: locks, and new files that appear when complete.

A file is never changed in place, since power loss or a kill would leave half of it. It is written
under another name, flushed, and renamed, which file systems do at once or not at all. The order of
flushes decides what power loss leaves: without `fsync`, a file system may make a rename durable
before the contents, and one rename before an earlier one.
"""

import ctypes
import errno
import fcntl
import os
import platform
import re
import shutil
import stat
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import jax

from treeshard._core.text import human_bytes
from treeshard.errors import CheckpointError, warn

PathLike = str | os.PathLike[str]


def file_path(path: PathLike) -> Path:
    """A path in a file system, with `~` expanded; `file:///runs` is `/runs`."""
    text = os.fspath(path)
    if text.startswith("file:///"):
        text = text.removeprefix("file://")
    if "://" in text:
        raise CheckpointError(f"{text} is not in a file system. Pass a local path.")
    scheme = re.match("([a-z][a-z0-9+.-]+):/(?!/)", text)  # what `pathlib` makes of ://
    if scheme:
        meant = text.replace(":/", "://" if scheme[1] != "file" else ":///", 1)
        raise CheckpointError(f"{text} is a `Path` of a URL. Pass it as text: {meant!r}.")
    if "\0" in text:
        raise CheckpointError(f"{text}: a path cannot contain a NUL character.")
    return Path(text).expanduser()


# ------------------------------------------------------------------ durability


def flush(path: PathLike) -> None:
    """Waits until the contents of a file, or the names in a directory, are on the disk.

    A file that is on the disk can still be lost if its name is not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush directories: there the system decides when.
        if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def close(handle: int) -> None:
    """Closes an open file that nothing is written to, or that is flushed.

    The system closes it even if it raises, as for a disk that is gone.
    """
    with suppress(OSError):
        os.close(handle)


FileFacts = dict[str, list[int]]  # by name: the size of a file, and a checksum of its ends


def flush_tree(directory: PathLike) -> FileFacts:
    """Flushes all files and directories in a directory, and itself. Returns what the files are.

    The names of the files are relative to the directory.
    """
    facts: FileFacts = {}
    for folder, _, names in os.walk(directory, topdown=False, onerror=_raise):
        for name in names:
            file = os.path.join(folder, name)
            flush(file)
            with open(file, "rb") as flushed:
                facts[os.path.relpath(file, directory)] = file_facts(flushed)
        flush(folder)
    return facts


def _raise(error: OSError) -> None:
    """For `os.walk`, which by default leaves out a folder that it cannot list."""
    raise error


_END = 2**12  # bytes


def file_facts(file: IO[bytes]) -> list[int]:
    """The size of a file, and the CRC-32 of its first and last 4 KiB.

    They tell it from another file of its name, as of another step. Nobody wants to wait for a
    checksum of all of a large file, whose contents have checksums of their own.
    """
    crc = crc32(file.read(_END))
    file.seek(0, os.SEEK_END)
    size = file.tell()
    file.seek(max(0, size - _END))
    return [size, crc32(file.read(_END), crc)]


def make_directory(path: os.PathLike[str]) -> None:
    """Creates a directory and its parents, durably, unless it exists. Object stores have none."""
    if "://" in str(path):
        return
    try:
        new = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
        Path(path).mkdir(parents=True, exist_ok=True)
        for folder in new:
            flush(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be created: {error.strerror}.") from None


# Of Linux, for paths relative to the current directory, which absolute ones are not.
_AT_CURRENT_DIRECTORY, _RENAME_EXCHANGE = -100, 2


def exchange_names(one: PathLike, other: PathLike) -> bool:
    """Exchanges the names of two directories at once, so that none is absent at any moment.

    Returns whether it did: NFS and systems other than Linux do not have it.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here = _AT_CURRENT_DIRECTORY
    if rename is None:
        return False
    return rename(here, os.fsencode(one), here, os.fsencode(other), _RENAME_EXCHANGE) == 0


# ------------------------------------------------------------------ shared directories

# Seconds until a file that another machine created must be visible. Network file systems remember
# for a while that a name was absent.
_VISIBLE_WITHIN = 10.0


def new_mark(file: Any) -> bytes:
    """Creates a file that other processes should see, with random contents, which it returns.

    The path is one of `pathlib`, or of `etils.epath` for object stores.
    """
    mark = os.urandom(16)
    try:
        file.unlink(missing_ok=True)  # a link would be followed
        file.write_bytes(mark)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror}.") from None
    return mark


def remove_mark(file: Any) -> None:
    """Removes the file of `new_mark`; one that is left behind is replaced by the next."""
    with suppress(OSError):
        file.unlink()


def check_mark(file: Any, mark: bytes, timeout: float) -> None:
    """Raises `CheckpointError` unless this process sees the file that process 0 created.

    Every machine may have a directory of this name: what one writes there, the others do not have.
    """
    until = time.monotonic() + min(_VISIBLE_WITHIN, timeout / 2)  # before the others give up
    while not _has_mark(file, mark):
        if time.monotonic() > until:
            raise CheckpointError(
                f"process {jax.process_index()}, on {platform.node()}, does not see the file that"
                f" process 0 created in {file.parent}. Save to a directory that all processes"
                " share."
            )
        with suppress(OSError):  # a network file system asks its server when a directory is opened
            list(file.parent.iterdir())
        time.sleep(0.05)


def _has_mark(file: Any, mark: bytes) -> bool:
    try:
        return file.read_bytes() == mark
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None


# ------------------------------------------------------------------ locks


class Lock:
    """An exclusive lock for writing at a path, held from construction to `release`.

    It is an `flock` on a file beside the path, or inside a directory of several checkpoints. The
    system releases it when the process ends, even if the process is killed; a file that merely
    exists would have to be removed by hand then. The file names the holder, for the
    `CheckpointError` of a second one.
    """

    def __init__(self, file: Path, what: str) -> None:
        self._file = file
        self._handle: int | None = _open_locked(file, what)
        _locks.add(self)

    @property
    def is_held(self) -> bool:
        """Whether others are kept out: not after `release`, nor without locks in the system."""
        return self._handle is not None

    def check(self) -> None:
        """Raises `CheckpointError` if its file is elsewhere, as after a rename of the directory."""
        if self._handle is not None and not is_open_as(self._file, self._handle):
            raise CheckpointError(
                f"{self._file.parent} was renamed or removed while it was open for writing, or its"
                f" lock {self._file.name} was. Move it back, or open the directory again."
            )

    def release(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self._handle is not None:
            with suppress(OSError):
                self._file.unlink()  # while the lock is still held
        self.close_copy()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def close_copy(self) -> None:
        """Closes a forked process's copy of the handle, which would keep the lock held."""
        handle, self._handle = self._handle, None
        if handle is not None:
            close(handle)


# An `flock` belongs to the open file, which a fork shares, and ends when its last handle is closed.
# So a child closes the locks of its parent, and must know all of them.
_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock.close_copy() for lock in _locks])


# Anybody may have put something else at the name of a lock file. A link is not followed, and
# opening a FIFO does not wait for its other end.
_OPEN_SAFELY = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def _open_locked(file: Path, what: str) -> int | None:
    """Opens and locks a file; returns its handle, or `None` if the file system has no locks."""
    not_ours = f"{what}: cannot be written to: {file} is a link or not a regular file. Remove it."
    while True:
        with ExitStack() as opened:
            try:
                handle = os.open(file, _OPEN_SAFELY, 0o666)
                opened.callback(close, handle)
                status = os.fstat(handle)
                # It has no name if its holder has just removed it, and two if it is a hard link.
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                    raise CheckpointError(not_ours)
                if not _flock(handle, what):
                    return None
                # Its holder may have removed it after we opened it. Others lock the next file of
                # this name, so this one keeps nobody out.
                if not is_open_as(file, handle):
                    continue
                _name_holder(handle, file)
            except OSError as error:
                if os.path.islink(file):
                    raise CheckpointError(not_ours) from None
                why = f"{what}: cannot be written to: {error.strerror}."
                raise CheckpointError(why) from None
            opened.pop_all()
            return handle


def _flock(handle: int, what: str) -> bool:
    """Locks an open file, or raises if another writer has; `False` if there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace") or "an unknown process"
        if holder.startswith(f"{_this_process()},"):
            why = "this process is already writing here. Close its other writer first."
        else:
            why = (
                f"another run is writing here: {holder}. Two writers would destroy each other's"
                " files. Wait for it, end it, or write to another path."
            )
        raise CheckpointError(f"{what}: {why}") from None
    except OSError as error:
        warn(
            f"{what}: this file system does not support locks ({error.strerror}), so a second"
            " writer is not kept out."
        )
        return False
    return True


def _name_holder(handle: int, file: Path) -> None:
    """Writes who holds a lock into its file."""
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{_this_process()}, since {datetime.now():%Y-%m-%d %H:%M:%S}".encode())
    except OSError:  # a full disk
        with suppress(OSError):
            file.unlink()
        raise


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def is_open_as(file: PathLike, handle: int) -> bool:
    """Whether a file or directory is the one that was opened, and not another one of its name."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None


# ------------------------------------------------------------------ what killed writers left


def tell_removed(what: str, directory: PathLike, removed: Mapping[str, int | None]) -> None:
    """Warns of leftovers that were removed: their names, and their bytes where these are known."""
    if not removed:
        return
    names = [
        name if size is None else f"{name} ({human_bytes(size)})" for name, size in removed.items()
    ]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    # In an object store, which has no locks, nobody knows either who wrote them.
    if None in removed.values():
        more += ". A run that is still saving there loses them, too"
    warn(
        f"{what}: removed files of interrupted saves from {os.fspath(directory)}:"
        f" {', '.join(names[:5])}{more}."
    )


def remove_left(path: Path) -> dict[str, int | None]:
    """Removes a directory of a save that has ended, or what else has its name.

    Returns its name and bytes, or nothing if there is none, or it cannot be removed.
    """
    if not os.path.lexists(path):
        return {}
    size = bytes_in(path)
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()  # what a link refers to stays
        else:
            shutil.rmtree(path)
        return {path.name: size}
    return {}


def bytes_in(path: Path) -> int:
    """The bytes of a file, or of all files in a directory that may be changing."""
    with suppress(OSError):
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.lstat().st_size for file in files if file.is_file())
    return 0

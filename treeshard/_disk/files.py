"""Files that several processes or runs write: locks, and files that appear when complete.

A file is never changed in place, because a kill or power cut would leave half of it. It is written
with another name, flushed and renamed. A rename happens at once or not at all. The order of flushes
matters: without `fsync`, a file system may make a rename durable before the contents, or before an
earlier rename.
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
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import jax

from treeshard._core.text import human_bytes
from treeshard._core.threads import Outcome, defer_interrupts, start_thread
from treeshard.errors import CheckpointError, warn

PathLike = str | os.PathLike[str]


def file_path(path: PathLike) -> Path:
    """A path in a file system, with `~` expanded. `file:///runs` becomes `/runs`."""
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

    A file on the disk can still be lost if its name is not on the disk.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush directories. They choose the time themselves.
        if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def start_flush(handle: int) -> None:
    """Has the disk start to write what a file has so far, if the system is Linux. Does not wait.

    A later `fsync` waits for less, and still raises the errors of these writes.
    """
    start = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if start is not None:  # from byte 0 to the end
        start(handle, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


_SYNC_FILE_RANGE_WRITE = 2  # of Linux


def close(handle: int) -> None:
    """Closes a file that was only read, or that is already flushed.

    The system closes it even if the call fails, for example because the disk is gone.
    """
    with suppress(OSError):
        os.close(handle)


FLUSHES = 4  # that run at a time


def flush_tree(directory: PathLike) -> None:
    """Flushes a directory with all files and directories in it."""
    folders = [*os.walk(directory, topdown=False, onerror=_raise)]
    paths = [os.path.join(folder, name) for folder, _, names in folders for name in names]
    paths += [folder for folder, _, _ in folders]
    # A disk completes flushes that arrive together in about the time of one.
    running: list[Outcome[None]] = []
    for first in range(FLUSHES):
        start_thread(running, _flush_each, paths[first::FLUSHES])
    for flushes in running:
        flushes.wait()
    for flushes in running:
        flushes.result()


def _flush_each(paths: Iterable[str]) -> None:
    for path in paths:
        flush(path)


def start_flushes(directory: PathLike, started: set[str]) -> None:
    """Starts to write the files of a directory to the disk, and adds them to `started`."""
    with suppress(OSError):  # flushes raise errors
        for name in {*os.listdir(directory)} - started:
            with open(os.path.join(directory, name), "rb") as file:
                start_flush(file.fileno())
            started.add(name)


def _raise(error: OSError) -> None:
    """Raises an error of `os.walk`, which by default skips folders that it cannot list."""
    raise error


_END = 2**12  # bytes
FileFacts = dict[str, list[int]]  # by name: the size of a file, and a checksum of its ends


def facts_of_files(directory: PathLike) -> FileFacts:
    """The facts of all files in a directory, by their names relative to it."""
    facts: FileFacts = {}
    for folder, _, names in os.walk(directory, onerror=_raise):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                facts[os.path.relpath(file.name, directory)] = file_facts(file)
    return facts


def file_facts(file: IO[bytes]) -> list[int]:
    """The size of a file, and the CRC-32 of its first and last 4 KiB.

    They distinguish it from a file of the same name in another step. A checksum of a whole large
    file would take long, and its contents already have checksums.
    """
    crc = crc32(file.read(_END))
    file.seek(0, os.SEEK_END)
    size = file.tell()
    file.seek(max(0, size - _END))
    return [size, crc32(file.read(_END), crc)]


def make_directory(path: os.PathLike[str]) -> None:
    """Creates a directory and its parents durably. Object stores have no directories."""
    if "://" in str(path):
        return
    try:
        new = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
        Path(path).mkdir(parents=True, exist_ok=True)
        for folder in new:
            flush(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be created: {error.strerror}.") from None


# Constants of Linux's `renameat2`. The first is ignored for absolute paths.
_AT_CURRENT_DIRECTORY, _RENAME_EXCHANGE = -100, 2


def exchange_names(one: PathLike, other: PathLike) -> bool:
    """Exchanges the names of two directories at once, so that both exist at any moment.

    Returns whether it succeeded. NFS, and systems other than Linux, do not support it.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here = _AT_CURRENT_DIRECTORY
    if rename is None:
        return False
    return rename(here, os.fsencode(one), here, os.fsencode(other), _RENAME_EXCHANGE) == 0


# ------------------------------------------------------------------ shared directories

# Seconds until a file from another machine must be visible. Network file systems cache for a while
# that a name was absent.
_VISIBLE_WITHIN = 10.0


def new_mark(file: Any) -> bytes:
    """Creates a file that other processes should see, and returns its random contents.

    The path is a `pathlib.Path`, or an `etils.epath.Path` for object stores.
    """
    mark = os.urandom(16)
    try:
        file.unlink(missing_ok=True)  # a link would be followed
        file.write_bytes(mark)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror}.") from None
    return mark


def remove_mark(file: Any) -> None:
    """Removes the file of `new_mark`. If it stays, the next mark replaces it."""
    with suppress(OSError):
        file.unlink()


def check_mark(file: Any, mark: bytes, timeout: float) -> None:
    """Raises `CheckpointError` unless this process sees the file that process 0 created.

    Each machine may have its own directory of this name, which the others do not see.
    """
    until = time.monotonic() + min(_VISIBLE_WITHIN, timeout / 2)  # before the others give up
    while not _has_mark(file, mark):
        if time.monotonic() > until:
            raise CheckpointError(
                f"process {jax.process_index()}, on {platform.node()}, does not see the file that"
                f" process 0 created in {file.parent}. Save to a directory that all processes"
                " share."
            )
        with suppress(OSError):  # opening a directory makes a network file system ask its server
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
    """An exclusive lock for writing at a path, held from construction until `held` is closed.

    It is an `flock` on a file beside the path, or inside a directory of checkpoints. The system
    releases it when the process ends, even by a kill. The file names the holder, unless the disk is
    full, for the `CheckpointError` of a second writer.
    """

    def __init__(self, file: Path, what: str, held: ExitStack) -> None:
        self._file = file
        with defer_interrupts():  # a Ctrl-C must not lose a lock that is already taken
            self._handle: int | None = _open_locked(file, what)
            _locks.add(self)
            for _ in range(2):  # a Ctrl-C may interrupt the first before it begins
                held.callback(self._release)

    @property
    def is_held(self) -> bool:
        """Whether the lock is held. False after its release, and in file systems without locks."""
        return self._handle is not None

    def check(self) -> None:
        """Raises `CheckpointError` if the lock file has moved, as by a rename of the directory."""
        if self._handle is not None and not is_open_as(self._file, self._handle):
            raise CheckpointError(
                f"{self._file.parent} was renamed or removed while it was open for writing, or its"
                f" lock {self._file.name} was. Move it back, or open the directory again."
            )

    def _release(self) -> None:
        with defer_interrupts():
            if self._handle is not None:
                with suppress(OSError):
                    self._file.unlink()  # while the lock is still held
            self.close_copy()

    def close_copy(self) -> None:
        """Closes a forked process's copy of the handle, which would keep the lock held."""
        handle, self._handle = self._handle, None
        if handle is not None:
            close(handle)


# An `flock` belongs to the open file, which a fork shares, and ends when the last handle is closed.
# So a child process closes the locks of its parent.
_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock.close_copy() for lock in _locks])


# Another user may have created the lock file. Links are not followed, and opening a FIFO does not
# block.
_OPEN_SAFELY = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def _open_locked(file: Path, what: str) -> int | None:
    """Opens and locks a file. Returns its handle, or `None` if the file system has no locks."""
    not_ours = f"{what}: cannot be written to: {file} is a link or not a regular file. Remove it."
    while True:
        with ExitStack() as opened:
            try:
                handle = os.open(file, _OPEN_SAFELY, 0o666)
                opened.callback(close, handle)
                status = os.fstat(handle)
                # The link count is 0 if the holder has just removed it, and 2 for a hard link.
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                    raise CheckpointError(not_ours)
                if not _flock(handle, what):
                    return None
                # The holder may have removed the file after it was opened here. Other writers lock
                # the next file of this name, so this lock would be useless.
                if not is_open_as(file, handle):
                    continue
                _name_holder(handle)
            except OSError as error:
                if os.path.islink(file):
                    raise CheckpointError(not_ours) from None
                why = f"{what}: cannot be written to: {error.strerror}."
                raise CheckpointError(why) from None
            opened.pop_all()
            return handle


def _flock(handle: int, what: str) -> bool:
    """Locks an open file. Raises if another writer holds it. Returns `False` without locks."""
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


def _name_holder(handle: int) -> None:
    """Writes the holder of a lock into its file.

    On a full disk, the lock is held without a name, so that its holder can remove files.
    """
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"{_this_process()}, since {datetime.now():%Y-%m-%d %H:%M:%S}".encode())


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def is_open_as(file: PathLike, handle: int) -> bool:
    """Whether a path still names the file or directory that was opened."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None


# ------------------------------------------------------------------ what killed writers left


def warn_of_removed(what: str, directory: PathLike, removed: Mapping[str, int | None]) -> None:
    """Warns of removed leftovers, with their names and, if known, their bytes."""
    if not removed:
        return
    names = [
        name if size is None else f"{name} ({human_bytes(size)})" for name, size in removed.items()
    ]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    # In an object store, without locks, a live run may have written them.
    if None in removed.values():
        more += ". A run that is still saving there loses them, too"
    warn(
        f"{what}: removed files of interrupted saves from {os.fspath(directory)}:"
        f" {', '.join(names[:5])}{more}."
    )


def remove_left(path: Path) -> dict[str, int | None]:
    """Removes the directory of a save that has ended, or a file of its name.

    Returns its name and bytes. Empty if it does not exist or cannot be removed.
    """
    if not os.path.lexists(path):
        return {}
    size = bytes_in(path)
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()  # keeps the target of a link
        else:
            shutil.rmtree(path)
        return {path.name: size}
    return {}


def bytes_in(path: Path) -> int:
    """The bytes of a file, or of all files in a directory, which may be changing."""
    with suppress(OSError):
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.lstat().st_size for file in files if file.is_file())
    return 0

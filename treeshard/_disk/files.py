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
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import jax

from treeshard._core.processes import AS_LONG_AS_IT_TAKES, all_or_none
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


FileFacts = dict[str, list[int]]  # by name: the size of a file, and a checksum of its ends


def flush_tree(directory: PathLike) -> FileFacts:
    """Flushes all files and directories in a directory, and itself. Returns what the files are.

    The names of the files are relative to the directory.
    """
    facts: FileFacts = {}
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            file = os.path.join(folder, name)
            flush(file)
            facts[os.path.relpath(file, directory)] = file_facts(file)
        flush(folder)
    return facts


_END = 2**12  # bytes


def file_facts(path: PathLike) -> list[int]:
    """The size of a file, and the CRC-32 of its first and last 4 KiB.

    They tell it from another file of its name, as of another step. Nobody wants to wait for a
    checksum of all of a large file, whose contents have checksums of their own.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        crc = crc32(file.read(_END))
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

_IS_OURS = "this process is already writing here. Close its other writer first."
_IS_OF_ANOTHER = (
    "another run is writing here: {}. Two writers would destroy each other's files. Wait for it,"
    " end it, or write to another path."
)
_NOT_OURS = "{} is a link, or not a regular file. Remove it"
_NO_LOCKS = "{}: this file system does not support locks ({}), so a second writer is not kept out."


class Lock:
    """An exclusive lock for writing at a path, held from construction to `release`.

    It is an `flock` on a file beside the path, or inside a directory of several checkpoints. The
    system releases it when the process ends, even if the process is killed; a file that merely
    exists would have to be removed by hand then. The file names the holder, for the
    `CheckpointError` of a second one.
    """

    def __init__(self, file: Path, what: str, *, to_sweep: bool = False) -> None:
        self._file = file
        self._handle: int | None = _lock(file, what, to_sweep=to_sweep)
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
            with suppress(OSError):  # of a disk that is gone: the handle is closed all the same
                os.close(handle)


def take_stale_lock(file: Path) -> Lock | None:
    """Takes the lock that a killed writer has left, so that what else it left may be removed.

    `None` if a living one holds it, on this machine or another, or if that cannot be known.
    """
    with suppress(CheckpointError):
        lock = Lock(file, str(file), to_sweep=True)
        return lock if lock.is_held else None
    return None


# An `flock` belongs to the open file, which a fork shares, and ends when its last handle is closed.
_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock.close_copy() for lock in _locks])


# Neither follows a link nor waits for the other end of a FIFO.
_OWN_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_SWEEPS = "removes what a killed one left"
_TRIES = 3  # before a lock counts as held: a sweep of others has each for a moment


def _lock(file: Path, what: str, *, to_sweep: bool) -> int | None:
    """A handle of the locked file; `None` if the file system has no locks.

    With `to_sweep` the file must exist, and writers wait until the lock is free again.
    """
    try:
        return _locked(file, what, to_sweep=to_sweep)
    except OSError as error:
        why = _NOT_OURS.format(file) if os.path.islink(file) else error.strerror
        raise CheckpointError(f"{what}: cannot be written to: {why}.") from None


def _locked(file: Path, what: str, *, to_sweep: bool) -> int | None:
    me = f"process {os.getpid()} on {platform.node()}"
    tries = 1 if to_sweep else _TRIES
    while True:
        handle = os.open(file, _OWN_FILE | (0 if to_sweep else os.O_CREAT), 0o666)
        with ExitStack() as opened:
            opened.callback(os.close, handle)
            if not _is_only_ours(handle):
                why = _NOT_OURS.format(file)
                raise CheckpointError(f"{what}: cannot be written to: {why}.")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(handle, 200).decode(errors="replace")
                if to_sweep or not holder.endswith(_SWEEPS):
                    tries -= 1
                if not tries:
                    is_me = holder.startswith(f"{me},")
                    why = (
                        _IS_OURS if is_me else _IS_OF_ANOTHER.format(holder or "an unknown process")
                    )
                    raise CheckpointError(f"{what}: {why}") from None
                time.sleep(0.01)
                continue
            except OSError as error:
                if not to_sweep:
                    warn(_NO_LOCKS.format(what, error.strerror))
                return None
            if not is_open_as(file, handle):
                continue  # its holder removed it after we had opened it: lock the new one
            since = f"since {datetime.now():%Y-%m-%d %H:%M:%S}"
            try:
                os.ftruncate(handle, 0)
                os.write(handle, f"{me}, {_SWEEPS if to_sweep else since}".encode())
            except OSError:  # a full disk
                with suppress(OSError):
                    file.unlink()
                raise
            opened.pop_all()
            return handle


def _is_only_ours(handle: int) -> bool:
    """Whether it is a regular file of one name; of none, if its holder has just removed it."""
    status = os.fstat(handle)
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


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
        more += ". A run that is still saving there has lost them, too"
    warn(
        f"{what}: removed what killed saves had left in {os.fspath(directory)}:"
        f" {', '.join(names[:5])}{more}."
    )


# ------------------------------------------------------------------ new files

_PART = ".part"


@contextmanager
def atomic_files(
    name: Path,
    paths: Sequence[Path],
    belongs: Callable[[Path, str], bool],
    keep_earlier: Callable[[], None],
    what: str,
    timeout: float,
) -> Iterator[list[int]]:
    """Opens files under hidden names beside `paths`, the same files on every process.

    Once all processes have left the block without an error, the files are renamed to `paths`, in
    this order, and replace existing ones. After an error on any process they are removed. The last
    of several is their index: its rename decides which files are read.

    Args:
        name: The path that is locked: one run at a time writes files under it.
        paths: The files.
        belongs: Whether a file of this name belongs to a save at a path. At the end, those of
            earlier saves are removed; at the beginning, those that killed ones left unfinished,
            also of other paths in this directory.
        keep_earlier: Called before the first of several files is replaced. It keeps earlier files
            that the existing index names under other names, and has the index name these.
        what: The operation, as in `all_or_none`.
        timeout: Seconds to wait for other processes; waits for their writes have no limit.
    """
    first = jax.process_index() == 0
    hidden = [path.with_name(f".{path.name}{_PART}") for path in paths]
    files: list[int] = []
    with ExitStack() as held:
        with all_or_none(what, phase="create", timeout=timeout) as marks:
            if first:
                mark = os.urandom(16)
                marks.append(mark)
                lock_file = name.with_name(f".{name.name}{_LOCK}")
                lock = held.enter_context(Lock(lock_file, f"{what}: {name}"))
                beside = [path for path in name.parent.iterdir() if path != lock_file]
                removed = _remove_left(beside, belongs)
                if lock.is_held:
                    removed |= _remove_unfinished(beside, partial(belongs, name))
                tell_removed(what, name.parent, removed)
                files += [held.enter_context(_created(path, mark)) for path in hidden]
        with all_or_none(what, phase="open", timeout=timeout):
            if not first:
                files += [
                    held.enter_context(_of_process_0(path, marks[0], timeout)) for path in hidden
                ]
        with all_or_none(what, phase="write", timeout=AS_LONG_AS_IT_TAKES):
            yield files
            for file in files:
                os.fsync(file)
        with all_or_none(what, phase="rename", timeout=AS_LONG_AS_IT_TAKES):
            if first:
                _rename(name, hidden, paths, keep_earlier)
                _remove_earlier(name, paths, belongs, what)


_LOCK = ".treeshard-files-lock"


def _remove_left(beside: Sequence[Path], belongs: Callable[[Path, str], bool]) -> dict[str, int]:
    """Removes what killed saves at other paths left unfinished; returns the bytes of each file."""
    removed: dict[str, int] = {}
    for path in beside:
        if not (path.name.startswith(".") and path.name.endswith(_LOCK)):
            continue
        lock = take_stale_lock(path)
        if lock is not None:
            with lock:
                name = path.with_name(path.name[1:].removesuffix(_LOCK))
                removed |= _remove_unfinished(beside, partial(belongs, name))
    return removed


def _remove_unfinished(beside: Iterable[Path], belongs: Callable[[str], bool]) -> dict[str, int]:
    removed: dict[str, int] = {}
    for path in beside:
        is_hidden = path.name.startswith(".") and path.name.endswith(_PART)
        if is_hidden and belongs(path.name[1:].removesuffix(_PART)) and path.is_file():
            removed[path.name] = path.stat().st_size
            path.unlink()
    return removed


@contextmanager
def _created(path: Path, mark: bytes) -> Iterator[int]:
    """Creates a file, in place of the leftover of a killed run or of a link."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.pwrite(file, mark, 0)
        os.fsync(file)
        yield file
    finally:
        os.close(file)
        with suppress(OSError):
            path.unlink()


@contextmanager
def _of_process_0(path: Path, mark: bytes, timeout: float) -> Iterator[int]:
    """Opens the file of process 0, unless another machine has a different one of this name."""
    check_mark(path, mark, timeout)
    file = os.open(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _rename(
    name: Path, hidden: Sequence[Path], paths: Sequence[Path], keep_earlier: Callable[[], None]
) -> None:
    """Renames the files, in an order that power loss does not change. The last step decides."""
    directory = name.parent
    if len(paths) > 1:
        keep_earlier()
        flush(directory)
        for before, after in zip(hidden[:-1], paths[:-1], strict=True):
            before.replace(after)
        flush(directory)
    hidden[-1].replace(paths[-1])
    if name not in paths and name.exists():
        flush(directory)
        name.unlink()  # a file of this name is read in place of the index


def _remove_earlier(
    name: Path, paths: Sequence[Path], belongs: Callable[[Path, str], bool], what: str
) -> None:
    """Removes the files of earlier saves, once the new ones are durable."""
    directory = name.parent
    try:
        flush(directory)
        for path in sorted(directory.iterdir()):
            if path not in paths and belongs(name, path.name):
                path.unlink()
        flush(directory)
    except OSError as error:
        raise CheckpointError(
            f"{what}: {name} is saved, but power loss may undo that, or files of an earlier save"
            f" are still there: {error}. Save again."
        ) from None

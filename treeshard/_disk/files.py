"""Files that several processes or runs write: locks, and new files that appear when complete.

A file is never changed in place, since power loss or a kill would leave half of it. It is written
under another name, flushed, and renamed, which file systems do at once or not at all. The order of
flushes decides what power loss leaves: without `fsync`, a file system may make a rename durable
before the contents, and one rename before an earlier one.
"""

import errno
import fcntl
import os
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

import jax

from treeshard._core.processes import AS_LONG_AS_IT_TAKES, together
from treeshard.errors import CheckpointError, warn

PathLike = str | os.PathLike[str]


def file_path(path: PathLike) -> Path:
    """A path in a file system, with `~` expanded; `file:///runs` is `/runs`."""
    text = os.fspath(path)
    if text.startswith("file:///"):
        text = text.removeprefix("file://")
    if "://" in text:
        raise CheckpointError(f"{text} is not in a file system. Pass a local path.")
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


def flush_tree(directory: PathLike) -> None:
    """Flushes all files and directories in a directory, and itself."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            flush(os.path.join(folder, name))
        flush(folder)


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


def remove_tree(directory: PathLike) -> None:
    """Removes a directory and all that is in it, however deep.

    `shutil.rmtree` recurses before Python 3.13, and so fails for 1,000 nested directories. Here
    each directory is first moved to the top, where its path is not too long for the system either.
    """
    top = Path(directory)
    if top.is_symlink():
        raise OSError(errno.ELOOP, f"{top} is a link, and what it refers to is not removed")
    folders, moved = [top], count()
    for folder in folders:  # which grows
        with os.scandir(folder) as entries:
            inside = list(entries)
        for entry in inside:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path).rename(top / f"{next(moved)}.to-be-removed"))
            else:
                os.unlink(entry.path)
        if folder is not top:
            folder.rmdir()
    top.rmdir()


# ------------------------------------------------------------------ locks

_IS_OURS = "this process is already writing here. Close its other writer first."
_IS_OF_ANOTHER = (
    "another run is writing here: {}. Two writers would destroy each other's files. Wait for it,"
    " end it, or write to another path."
)
_NO_LOCKS = "{}: this file system does not support locks ({}), so a second writer is not kept out."


class Lock:
    """An exclusive lock for writing at a path, held from construction to `release`.

    It is an `flock` on a file beside the path, or inside a directory of several checkpoints. The
    system releases it when the process ends, even if the process is killed; a file that merely
    exists would have to be removed by hand then. The file names the holder, for the
    `CheckpointError` of a second one.
    """

    def __init__(self, file: Path, what: str) -> None:
        self._file = file
        self._handle: int | None = _lock(file, what)
        _locks.add(self)

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
            os.close(handle)


# An `flock` belongs to the open file, which a fork shares, and ends when its last handle is closed.
_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock.close_copy() for lock in _locks])


def _lock(file: Path, what: str) -> int | None:
    """A handle of the locked file; `None` if the file system has no locks."""
    me = f"process {os.getpid()} on {platform.node()}"
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
            why = _IS_OF_ANOTHER.format(holder or "an unknown process")
            if holder.startswith(f"{me},"):
                why = _IS_OURS
            raise CheckpointError(f"{what}: {why}") from None
        except OSError as error:
            os.close(handle)
            warn(_NO_LOCKS.format(what, error.strerror))
            return None
        if _is_open_as(file, handle):
            os.ftruncate(handle, 0)
            os.write(handle, f"{me}, since {datetime.now():%Y-%m-%d %H:%M:%S}".encode())
            return handle
        os.close(handle)  # its holder removed it after we had opened it: lock the new one


def _is_open_as(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------ new files

_PART = ".part"


@contextmanager
def new_files(
    name: Path, paths: Sequence[Path], earlier: Callable[[str], bool], what: str, timeout: float
) -> Iterator[list[int]]:
    """Opens files under hidden names beside `paths`, the same files on every process.

    Once all processes have left the block without an error, the files are renamed to `paths`, in
    this order, and replace existing ones. After an error on any process they are removed. The last
    of several is their index; an existing one is removed before the others are replaced.

    Args:
        name: The path that is locked: one run at a time writes files under it.
        paths: The files.
        earlier: Whether a file of this name beside `name` belongs to it. At the end, those of
            earlier saves are removed; at the beginning, those that killed ones left unfinished.
        what: The operation, as in `together`.
        timeout: Seconds to wait for other processes; waits for their writes have no limit.
    """
    first = jax.process_index() == 0
    hidden = [path.with_name(f".{path.name}{_PART}") for path in paths]
    stale: list[Path] = []
    files: list[int] = []
    with ExitStack() as held:
        with together(what, timeout=timeout) as marks:
            if first:
                mark = os.urandom(16)
                marks.append(mark)
                held.enter_context(Lock(name.with_name(f".{name.name}.lock"), f"{what}: {name}"))
                beside = [path for path in name.parent.iterdir() if path not in paths]
                stale = [path for path in beside if earlier(path.name)]
                _remove_unfinished(beside, earlier)
                files += [held.enter_context(_created(path, mark)) for path in hidden]
        with together(what, timeout=timeout):
            if not first:
                files += [held.enter_context(_of_process_0(path, marks[0])) for path in hidden]
        with together(what, timeout=AS_LONG_AS_IT_TAKES):
            yield files
            for file in files:
                os.fsync(file)
        with together(what, timeout=AS_LONG_AS_IT_TAKES):
            if first:
                _rename(hidden, paths, stale)


def _remove_unfinished(beside: Iterable[Path], earlier: Callable[[str], bool]) -> None:
    for path in beside:
        is_hidden = path.name.startswith(".") and path.name.endswith(_PART)
        if is_hidden and earlier(path.name[1:].removesuffix(_PART)) and path.is_file():
            path.unlink()


@contextmanager
def _created(path: Path, mark: bytes) -> Iterator[int]:
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
def _of_process_0(path: Path, mark: bytes) -> Iterator[int]:
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


def _rename(hidden: Sequence[Path], paths: Sequence[Path], stale: Sequence[Path]) -> None:
    """Renames the files, in an order that power loss does not change."""
    directory, index = paths[-1].parent, paths[-1]
    if len(paths) > 1:
        index.unlink(missing_ok=True)
        flush(directory)  # no index names files of two saves
        for before, after in zip(hidden[:-1], paths[:-1], strict=True):
            before.replace(after)
        flush(directory)
    hidden[-1].replace(index)
    flush(directory)
    for path in stale:
        path.unlink(missing_ok=True)
    flush(directory)

"""Paths of checkpoints: whether one is complete, incomplete, removed, or something else.

In a file system, the name says whether a checkpoint is complete, because a rename happens at once
or not at all. Object stores cannot rename directories, so there a last file marks a complete
checkpoint. Orbax uses the same names, so its tools ignore incomplete checkpoints too.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from etils import epath
from etils.epath.backend import fsspec_backend

from treeshard._core.arguments import check_path
from treeshard._disk.files import (
    FileFacts,
    Lock,
    PathLike,
    close,
    exchange_names,
    file_facts,
    file_path,
    is_open_as,
    remove_left,
)
from treeshard.errors import (
    CheckpointError,
    DamagedError,
    RemovedError,
    did_you_mean,
)

ARRAYS, TABLE = "state", "leaves"  # the parts of a checkpoint
MANIFEST = "manifest.ocdbt"  # the root of the index, which names all files with values
TABLE_FILE = "table.json"
SEAL = "table.crc32"  # the CRC-32 of the table that was saved with these arrays
MARK = "treeshard-mark"  # a file that every process must see before it writes
TEMPORARY = ".orbax-checkpoint-tmp"  # the suffix of an incomplete checkpoint
COMMITTED = "commit_success.txt"  # marks a complete checkpoint in an object store

# The names beside a checkpoint `7`. Readers ignore all of them:
# 1. `7.orbax-checkpoint-tmp`: the checkpoint is being written, or was replaced by an exchange of
#    names.
# 2. `7.orbax-checkpoint-tmp-replaced`: it is being replaced, and names cannot be exchanged. After a
#    kill between two renames it gets its name back.
# 3. `7.orbax-checkpoint-tmp-1f2e3d4c-removed`: a thread is removing it.
# 4. `.7.treeshard-lock`, while it is written, and `.treeshard-lock`, while a run is open.
# The next save of `7` removes 1 and 2. The next run that opens the directory removes all.
_LOCK = "treeshard-lock"
_OF_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint")
_STEP = re.compile("0|[1-9][0-9]*")
_REMOVED = "-removed"  # the suffix of a step that is being removed
_REPLACED = "-replaced"  # the suffix of a step that is about to be replaced
_LEFT_STEP = re.compile(rf"(?P<step>[0-9]+){re.escape(TEMPORARY)}")  # with or without a suffix
_LOCK_OF_STEP = re.compile(rf"\.(?P<step>[0-9]+)\.{_LOCK}")


def checkpoint_path(path: PathLike) -> epath.Path:
    """The path of a checkpoint, absolute in a file system. Raises `CheckpointError`."""
    check_path(path, "checkpoint", "save(path, tree)`, `restore(path, like)")
    text = os.fspath(path)
    if "://" in text and not text.startswith("file:///"):
        return _in_object_store(text)
    try:
        absolute = os.path.abspath(file_path(path))
        absolute.encode()
    except FileNotFoundError:
        raise CheckpointError(
            f"{text} is relative to the current directory, which no longer exists. Pass an"
            " absolute path."
        ) from None
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{text!a} is not UTF-8, which the array store needs. Rename the directory, or use"
            " another."
        ) from None
    # TensorStore would write the arrays elsewhere, or not find them.
    if "\\" in absolute:
        raise CheckpointError(
            f"{absolute}: the array store reads a backslash in a path as `/`. Rename the directory,"
            " or use another."
        )
    return epath.Path(absolute)


# The packages with which etils reads object stores, by fsspec, unless TensorFlow is installed.
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}


def _in_object_store(text: str) -> epath.Path:
    scheme, _, name = text.partition("://")
    if not name.strip("/") or name.startswith("/"):
        raise CheckpointError(f"{text} names no bucket. Pass {scheme}://BUCKET/NAME.")
    try:
        path = epath.Path(text)
    except KeyError:
        raise CheckpointError(
            f"{text}: there is no access to {scheme}://. Pass a local path, gs:// or s3://."
        ) from None
    package = _PACKAGES.get(scheme)
    if package is None or find_spec("tensorflow") is not None:
        return path
    missing = [name for name in ("fsspec", package) if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise CheckpointError(
            f"{text}: reading and writing {scheme}:// needs {' and '.join(missing)}. Install with"
            f" `pip install {names}`, or pass a local path."
        )
    _forget_listings(text)
    return path


def _forget_listings(text: str) -> None:
    """Turns off the cache of listings in fsspec, which would hide the files of other processes."""
    files = fsspec_backend.fs(text)
    files.dircache.use_listings_cache = False
    files.invalidate_cache()


def is_local(path: epath.Path) -> bool:
    """Whether the path is in a file system, not in an object store."""
    return "://" not in str(path)


# ------------------------------------------------------------------ reading


def is_there(path: epath.Path) -> bool:
    """Whether `path` exists. Raises `CheckpointError` if the disk does not answer."""
    if not is_local(path):
        return path.exists()
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    return True


def is_complete(path: epath.Path) -> bool:
    """Whether a checkpoint at `path`, if there is one, is complete."""
    return TEMPORARY not in path.name and (is_local(path) or is_there(path / COMMITTED))


def steps_in(directory: epath.Path) -> tuple[int, ...]:
    """The steps with complete checkpoints in a directory, ascending.

    Directories that treeshard did not write do not count. Raises `CheckpointError` if a directory
    cannot be read.
    """
    before: list[str] | None = None
    while True:
        names = _names_in(directory)
        paths = [directory / name for name in names if _STEP.fullmatch(name)]
        steps = [path for path in paths if is_ours(path) and is_complete(path)]
        # A writer with `keep=1` replaces a step by the next. A listing takes a while, so it may
        # name the removed step, or neither.
        gone_now = [path for path in paths if path not in steps and not os.path.lexists(path)]
        if (steps and not gone_now) or names == before:
            return tuple(sorted(int(path.name) for path in steps))
        before = names


def _names_in(directory: epath.Path) -> list[str]:
    """The sorted names in a directory. Empty if the directory does not exist."""
    if not (is_local(directory) or directory.is_dir()):
        return []
    try:
        return sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be listed: {error.strerror}.") from None


def changed_files(path: epath.Path, files: FileFacts) -> dict[str, str]:
    """How the files of a checkpoint differ from the saved files, by name.

    Raises `CheckpointError` if this process lacks the permission to read a file.
    """
    changed: dict[str, str] = {}
    for name, (size, crc) in files.items():
        file = path / ARRAYS / name
        why = ""
        try:
            with file.open("rb") as opened:
                found_size, found_crc = file_facts(opened)
            if found_size != size:
                why = f"has {found_size:,} bytes, and was saved with {size:,}"
            elif found_crc != crc:
                why = "has other contents than were saved"
        except FileNotFoundError:
            why = "is missing"
        except PermissionError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
        except OSError as error:
            why = f"cannot be read: {error.strerror or error}"
        if why:
            changed[f"{ARRAYS}/{name}"] = why
    return changed


def lacking_files(path: epath.Path, files: FileFacts) -> list[str]:
    """The files of the arrays that are missing or have another size, without reading them."""
    lacking: list[str] = []
    for name, (size, _) in files.items():
        file = f"{ARRAYS}/{name}"
        try:
            if os.stat(path / file).st_size != size:
                lacking.append(file)
        except FileNotFoundError:
            lacking.append(file)
        except OSError:
            pass  # the file may be intact, and a reader will get the error
    return lacking


def is_ours(path: epath.Path) -> bool:
    """Whether `path` is a checkpoint of treeshard, even if its table of leaves is lost."""
    return is_there(path / TABLE / TABLE_FILE) or is_there(path / ARRAYS / SEAL)


def table_text(path: epath.Path) -> str:
    """The text of the table of leaves. Raises an error that says what `path` is instead."""
    if not is_complete(path) and is_there(path):
        steps = _steps(path.parent)
        raise CheckpointError(f"{path} is incomplete: its writer did not finish.{steps}")
    try:
        return (path / TABLE / TABLE_FILE).read_bytes().decode()
    except FileNotFoundError:
        raise _none_at(path) from None
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: the table of leaves cannot be read: {error}.") from None
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path}: the table of leaves is not text: {error}.") from None


def seal(path: epath.Path) -> str:
    """The CRC-32 of the table that was saved with the arrays, or the empty text if it is lost."""
    try:
        return (path / ARRAYS / SEAL).read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return ""
    except OSError as error:
        raise CheckpointError(f"{path}: its seal cannot be read: {error}.") from None


@contextmanager
def reading(path: epath.Path, *, listed: bool = False) -> Iterator[Callable[[], None]]:
    """Raises `RemovedError` instead of other errors if the writer has removed the checkpoint.

    A writer removes old steps (`keep=`), and replaces a step that is saved again. The context
    yields a function that raises the error if the checkpoint has changed, for use after reads
    without an error. With `listed`, a listing had the checkpoint, so a missing one was removed.
    """
    # While a directory is open, no other one gets its inode.
    handle = _open_directory(path) if is_local(path) else None
    was_there = listed or handle is not None or (not is_local(path) and is_complete(path))

    def check() -> None:
        why = ""
        with suppress(CheckpointError):  # a disk that does not answer gives no hints
            why = _change_of(path, handle) if was_there else ""
        if why:
            raise RemovedError(f"{path} was {why}") from None

    try:
        with explaining(check):
            yield check
    finally:
        if handle is not None:
            close(handle)


@contextmanager
def explaining(check: Callable[[], None]) -> Iterator[None]:
    """Calls the function of `reading` before it passes on a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        check()
        raise


def _open_directory(path: epath.Path) -> int | None:
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    return None


def _change_of(path: epath.Path, handle: int | None) -> str:
    """How an existing checkpoint has changed. Empty if it has not."""
    if not (is_there(path) if is_local(path) else is_complete(path)):
        return f"removed while it was read, as `keep=` of its writer does.{_steps(path.parent)}"
    if handle is None or is_open_as(path, handle):
        return ""
    return "replaced while it was read: its writer has saved this step again. Read it again."


def _none_at(path: epath.Path) -> CheckpointError:
    """The error for a path without a table of leaves, which says what is there."""
    if not is_there(path):
        visible = [name for name in _names_in(path.parent) if not name.startswith(".")]
        near = _steps(path.parent) or did_you_mean(path.name, visible)
        return CheckpointError(f"There is no checkpoint at {path}.{near}")
    steps = steps_in(path)
    if steps:
        latest = str(path / str(steps[-1]))
        return CheckpointError(
            f"{path} is a directory of checkpoints, not a checkpoint.{_steps(path)} Name one:"
            f" {latest!r}."
        )
    if (path / TABLE).is_dir():
        return DamagedError(f"{path}: its table of leaves is missing, so its contents are unknown.")
    if any((path / name).exists() for name in _OF_ORBAX):
        return CheckpointError(
            f"{path} is a checkpoint that Orbax wrote without treeshard: it has no table of leaves."
            " Read it with Orbax."
        )
    return CheckpointError(f"{path} is not a checkpoint: it has no table of leaves.")


def _steps(directory: epath.Path) -> str:
    """A sentence for an error about the steps in a directory. Empty if there are no steps."""
    steps: tuple[int, ...] = ()
    with suppress(CheckpointError):
        steps = steps_in(directory)
    if not steps:
        return ""
    if len(steps) == 1:
        return f" The directory has step {steps[0]}."
    latest = ", ".join(map(str, steps[-10:]))
    earlier = "..., " if len(steps) > 10 else ""
    return f" The directory has steps {earlier}{latest}."


# ------------------------------------------------------------------ writing


def lock_of(path: epath.Path) -> Path:
    """The lock file for writing a checkpoint. Object stores have none."""
    return Path(path.with_name(f".{path.name}.{_LOCK}"))


def lock_in(directory: epath.Path) -> Path:
    """The lock file for writing to a directory of checkpoints."""
    return Path(directory / f".{_LOCK}")


def check_vacant(path: epath.Path, *, replace: bool = False) -> None:
    """Raises `CheckpointError` unless a checkpoint can be created at `path`, or replaced there."""
    if TEMPORARY in path.name:
        raise CheckpointError(
            f"{path}: names with {TEMPORARY!r} are reserved for unfinished checkpoints."
        )
    if not is_there(path) or _is_unfinished(path):
        return
    if replace and is_ours(path):
        if is_local(path):
            return
        raise CheckpointError(
            f"There is already a checkpoint at {path}, and an object store cannot replace one"
            " atomically. Remove it first."
        )
    what = "file"
    if path.is_dir():
        what = "checkpoint" if (path / TABLE).is_dir() else "directory"
    raise CheckpointError(
        f"There is already a {what} at {path}, and `save` does not overwrite. Remove it first, or"
        " save to another path."
    )


def sweep(path: epath.Path) -> dict[str, int | None]:
    """Removes the unfinished files of earlier saves of a checkpoint. No save may be running.

    A checkpoint that was about to be replaced gets its name back. Returns the bytes of each removed
    directory, or `None` for its bytes in an object store.
    """
    removed: dict[str, int | None] = {}
    if not is_local(path):
        if _is_unfinished(path):
            path.rmtree()
            removed[path.name] = None
        return removed
    replaced = _replaced_path(path)
    if is_ours(replaced) and not is_there(path):
        replaced.rename(path)
    for left in (partial_path(path), replaced):
        if left.is_dir():  # a file of this name is not ours
            removed |= remove_left(Path(left))
    return removed


def _is_unfinished(path: epath.Path) -> bool:
    """Whether `path` in an object store is an unfinished checkpoint of treeshard.

    In a file system, an unfinished checkpoint has another name.
    """
    if is_local(path) or is_there(path / COMMITTED):
        return False
    names = set(_names_in(path))
    return bool(names) and names <= {MARK, ARRAYS, TABLE}


def sweep_run(directory: epath.Path) -> dict[str, int | None]:
    """Removes the unfinished and half-removed steps of a run that was killed. Returns as `sweep`.

    Its lock must be held, where there are locks.
    """
    removed: dict[str, int | None] = {}
    for name in _names_in(directory):
        if not is_local(directory) and _STEP.fullmatch(name):
            removed |= sweep(directory / name)
        match = _LEFT_STEP.match(name) or _LOCK_OF_STEP.fullmatch(name)
        if match is None:
            continue
        path = directory / match["step"]
        # If its lock is not free, another process is writing it.
        with suppress(CheckpointError), ExitStack() as held:
            if not Lock(lock_of(path), str(path), held).is_held:
                continue
            removed |= sweep(path)
            # A run that is alive removes these in its own thread, so `sweep` keeps them.
            if name.endswith(_REMOVED) and (directory / name).is_dir():
                removed |= remove_left(Path(directory / name))
    return removed


def partial_path(path: epath.Path) -> epath.Path:
    """The path at which a checkpoint is written until it is complete."""
    return path.with_name(f"{path.name}{TEMPORARY}") if is_local(path) else path


def put_in_place(partial: epath.Path, path: epath.Path, *, replace: bool) -> None:
    """Renames a complete checkpoint to its final name.

    With `replace`, an existing checkpoint gets a name that `sweep` removes. A kill leaves either
    the old or the new one.
    """
    if not (replace and is_ours(path)):
        partial.rename(path)
    elif not exchange_names(partial, path):
        path.rename(_replaced_path(path))
        partial.rename(path)


def _replaced_path(path: epath.Path) -> epath.Path:
    return path.with_name(f"{path.name}{TEMPORARY}{_REPLACED}")


def mark_removed(path: epath.Path) -> epath.Path:
    """Marks a checkpoint as incomplete, before its files are removed."""
    if not is_local(path):
        (path / COMMITTED).unlink(missing_ok=True)
        return path
    # The removal of an earlier checkpoint of this step may still be running.
    name = f"{path.name}{TEMPORARY}-{os.urandom(4).hex()}{_REMOVED}"
    try:
        return path.rename(path.with_name(name))
    except OSError as error:
        if error.errno != errno.EXDEV:  # a directory in a lower layer of an overlay
            raise
    for name in (f"{TABLE}/{TABLE_FILE}", f"{ARRAYS}/{SEAL}"):  # without them it is not a step
        (path / name).unlink(missing_ok=True)
    return path

"""What there is at a path: a checkpoint, one that is not whole, several, or something else."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

try:
    from etils import epath  # which comes with Orbax
except ModuleNotFoundError:
    raise ImportError(
        "treeshard.checkpoint needs Orbax. Install it with `pip install 'treeshard[checkpoint]'`."
    ) from None

from treeshard._errors import CheckpointError, DamagedError, did_you_mean

PathLike = str | os.PathLike[str]

ARRAYS, TABLE = "state", "leaves"  # the parts of a checkpoint
TABLE_FILE = "table.json"
SEAL = "table.crc32"  # beside the arrays: which table was saved with them
TEMPORARY = ".orbax-checkpoint-tmp"  # what follows the name of a directory that is not whole
COMMITTED = "commit_success.txt"  # where directories cannot be renamed, it says that one is whole

_LOCK = "treeshard-lock"
_OF_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint")
_STEP = re.compile("0|[1-9][0-9]*")


def checkpoint_path(path: PathLike) -> epath.Path:
    """The path, absolute if it is in a file system."""
    found = epath.Path(path)
    return epath.Path(os.path.abspath(found)) if is_local(found) else found


def is_local(path: epath.Path) -> bool:
    """Whether it is in a file system, and not in an object store."""
    return "://" not in str(path)


# ------------------------------------------------------------------ what is there


def is_whole(path: epath.Path) -> bool:
    """Whether a checkpoint, if there is one, was written to its end."""
    return TEMPORARY not in path.name and (is_local(path) or (path / COMMITTED).exists())


def steps_in(directory: epath.Path) -> tuple[int, ...]:
    """The steps that a directory has whole checkpoints of, ascending."""
    if not directory.is_dir():
        return ()
    there = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)]
    return tuple(sorted(int(path.name) for path in there if path.is_dir() and is_whole(path)))


def table_text(path: epath.Path) -> str:
    """The table of leaves of the checkpoint at `path`.

    Raises:
        CheckpointError: If there is none that treeshard has written: it says what there is.
        DamagedError: If its table is no text, or gone.
    """
    if path.exists() and not is_whole(path):
        steps = _steps(path.parent)
        raise CheckpointError(f"{path} is not whole: its writer did not come to the end.{steps}")
    try:
        return (path / TABLE / TABLE_FILE).read_text()
    except FileNotFoundError:
        raise _none_at(path) from None
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: the table of leaves cannot be read: {error}.") from None
    except ValueError as error:
        raise DamagedError(f"{path}: the table of leaves is no text: {error}.") from None


def seal(path: epath.Path) -> str:
    """The CRC-32 of the table that was saved with the arrays; nothing if that is lost."""
    try:
        return (path / ARRAYS / SEAL).read_text()
    except (OSError, ValueError):
        return ""


def _none_at(path: epath.Path) -> CheckpointError:
    if not path.exists():
        names = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, [name for name in names if not name.startswith(".")])
        return CheckpointError(f"There is no checkpoint at {path}.{_steps(path.parent) or near}")
    if steps := steps_in(path):
        name = repr(str(path / str(steps[-1])))
        what = "is a directory of checkpoints, and none itself"
        return CheckpointError(f"{path} {what}.{_steps(path)} Name one: {name}.")
    if (path / TABLE).is_dir():
        return DamagedError(f"{path}: its table of leaves is gone, and nothing says what it held.")
    if any((path / name).exists() for name in _OF_ORBAX):
        return CheckpointError(
            f"{path} is a checkpoint that Orbax wrote without treeshard: it has no table of"
            " leaves. Read it with Orbax."
        )
    return CheckpointError(f"{path} is no checkpoint: it has no table of leaves.")


def _steps(directory: epath.Path) -> str:
    steps = steps_in(directory)
    if not steps:
        return ""
    shown = ", ".join(map(str, steps[-10:]))
    return f" The directory has step{'s' * (len(steps) > 1)} {'..., ' * (len(steps) > 10)}{shown}."


# ------------------------------------------------------------------ for those who write


def lock_of(path: epath.Path) -> Path:
    """The file that whoever writes a checkpoint locks. Object stores have no locks."""
    return Path(path.with_name(f".{path.name}.{_LOCK}"))


def lock_in(directory: epath.Path) -> Path:
    """The file that whoever writes to a directory of checkpoints locks."""
    return Path(directory / f".{_LOCK}")


def written_by(left: epath.Path) -> epath.Path | None:
    """The checkpoint that a file or directory is left of, if its writer may have been killed."""
    name = left.name.removeprefix(".").removesuffix(f".{_LOCK}")
    if TEMPORARY in left.name:
        name = left.name.partition(TEMPORARY)[0]
    elif left.name != f".{name}.{_LOCK}":
        return None
    return left.with_name(name)


def check_vacant(path: epath.Path) -> None:
    """Raises `CheckpointError` unless a checkpoint can be made at `path`."""
    if TEMPORARY in path.name:
        raise CheckpointError(f"{path}: names with {TEMPORARY!r} are for unfinished checkpoints.")
    if path.exists():
        is_one = (path / TABLE).is_dir()
        what = "checkpoint" if is_one else "directory" if path.is_dir() else "file"
        raise CheckpointError(
            f"There is a {what} at {path} already, and nothing is overwritten. Remove it first,"
            " or save to another path."
        )


def sweep(path: epath.Path) -> None:
    """Removes what is left of tries to write a checkpoint. None may be under way."""
    if not is_local(path):
        return
    with suppress(OSError):
        for left in path.parent.iterdir():
            if left.name.startswith(f"{path.name}{TEMPORARY}"):
                shutil.rmtree(left)


def set_aside(path: epath.Path) -> epath.Path:
    """Makes a checkpoint one that is not whole, which `rmtree` may take its time with."""
    if is_local(path):
        return path.rename(path.with_name(f"{path.name}{TEMPORARY}-removed"))
    (path / COMMITTED).unlink(missing_ok=True)
    return path

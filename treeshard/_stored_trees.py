"""Trees on disk, as checkpoints or safetensors: what they hold, and their leaves one by one."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treeshard._byte_ranges import Piece, read
from treeshard._contents import Contents
from treeshard._errors import CheckpointError
from treeshard._read_leaf import ReadLeaf
from treeshard._safetensors import PACKED
from treeshard._saved_leaf import SavedLeaf
from treeshard._tensor_files import Stored, open_tensors


@dataclass(frozen=True)
class StoredTree:
    """A tree on disk.

    Attributes:
        format: `"checkpoint"` or `"safetensors"`.
        contents: What it holds. Tensors have neither specs nor checksums.
        read: Reads leaves of it, a few at a time.
        steps: The steps that there are of it in a directory of checkpoints.
    """

    format: str
    contents: Contents
    read: Callable[[Iterable[SavedLeaf]], Iterator[ReadLeaf]]
    steps: tuple[int, ...] = ()


def open_stored(path: str, step: int | None = None) -> AbstractContextManager[StoredTree]:
    """Opens a checkpoint, the latest of a directory of checkpoints, or safetensors files.

    Args:
        path: Where.
        step: Which one of a directory of checkpoints.

    Raises:
        CheckpointError: If there is none of these.
        DamagedError: If what says what it holds is not what was saved.
        FormatError: If it is of another version, or no safetensors.
        OSError: If it cannot be read.
    """
    if not _has_tensors(path):
        # Orbax takes long to load, and need not be there for the other formats.
        return importlib.import_module("treeshard._stored_checkpoint").open_checkpoint(path, step)
    if step is not None:
        raise CheckpointError(f"{path} is no directory of checkpoints, and has no step {step}.")
    return _opened_tensors(Path(path))


def _has_tensors(path: str) -> bool:
    found = Path(path)
    if not found.is_dir():
        return found.exists() or found.with_name(f"{found.name}.index.json").exists()
    folders = [x.name for x in found.iterdir() if x.is_dir()]
    is_checkpoint = "leaves" in folders or any(map(str.isdigit, folders))
    return not is_checkpoint and any(found.glob("*.safetensors*"))


def whole(x: np.ndarray) -> Piece:
    """All of an array, to be read or written."""
    return Piece(tuple((0, length) for length in x.shape), x)


@contextmanager
def _opened_tensors(path: Path) -> Iterator[StoredTree]:
    with open_tensors(path) as stored:
        rows = tuple(_row(name, x) for name, x in stored.items())

        def read_each(wanted: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
            return (_read(row, stored[row.path]) for row in wanted)

        yield StoredTree("safetensors", Contents(str(path), rows, ()), read_each)


def _row(name: str, stored: Stored) -> SavedLeaf:
    dtype = str(stored.tensor.dtype)
    return SavedLeaf(name, "array", stored.tensor.shape, dtype, stored=dtype)


def _read(row: SavedLeaf, stored: Stored) -> ReadLeaf:
    one = stored.tensor
    packed = one.code in PACKED
    x = np.empty((one.stop - one.start,), "uint8") if packed else np.empty(one.shape, one.dtype)
    try:
        read(stored.file.fileno(), stored.at, x.shape, [whole(x)])
    except EOFError:
        return ReadLeaf(row, None, f"{stored.file.name} was cut short while it was being read.")
    return ReadLeaf(row, x, "")

"""Trees on disk, as checkpoints or safetensors: lists their leaves, and reads them one by one.

What is at a path is told by its files, and not by an option: commands take what users have.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from treeshard._disk.files import file_path
from treeshard._disk.leaves import Contents, ReadLeaf, SavedLeaf
from treeshard._disk.untrusted import check_memory
from treeshard.errors import CheckpointError, DamagedError, RemovedError
from treeshard.interchange._files import Stored, open_tensors
from treeshard.interchange._tensors import read_full


class StoredTree(NamedTuple):
    """A tree on disk. Tensors have neither specs nor checksums.

    `read` reads some of its leaves, a few at a time, and `damages` says how each is damaged.
    `steps` are all steps of the directory of checkpoints that it is in. `check` raises if its
    writer has removed it meanwhile.
    """

    format: str
    contents: Contents
    read: Callable[[Iterable[SavedLeaf]], Iterator[ReadLeaf]]
    damages: Callable[[Iterable[SavedLeaf]], Iterable[tuple[SavedLeaf, str]]] | None = None
    steps: tuple[int, ...] = ()
    check: Callable[[], None] = lambda: None


R = TypeVar("R")


def use_stored(
    path: str, step: int | None, use: Callable[[StoredTree], R], *, shapes_only: bool = False
) -> R:
    """Calls a function with a stored tree, as `open_stored` opens it.

    If the writer removes the latest step meanwhile, calls it with the later one.
    """
    while True:
        try:
            with open_stored(path, step, shapes_only) as tree:
                return use(tree)
        except RemovedError:
            if step is not None or not _has_steps(path):
                raise


@contextmanager
def open_stored(
    path: str, step: int | None = None, shapes_only: bool = False
) -> Iterator[StoredTree]:
    """Opens a checkpoint, one of a directory of them (by default the latest), or safetensors files.

    With `shapes_only`, the data of safetensors files may be missing.
    """
    if not _has_tensors(path):
        with _open_checkpoint(path, step) as tree:
            yield tree
        return
    if step is not None:
        raise CheckpointError(f"{path} is not a directory of checkpoints: it has no step {step}.")
    file = file_path(path)
    with open_tensors(file, shapes_only) as stored:
        dtypes = {name: str(x.tensor.dtype) for name, x in stored.items()}
        rows = tuple(
            SavedLeaf(name, "array", x.tensor.shape, dtypes[name], stored=dtypes[name])
            for name, x in stored.items()
        )
        yield StoredTree("safetensors", Contents(str(file), rows, ()), partial(_read, stored))


def _has_tensors(path: str) -> bool:
    if path.startswith(("gs://", "s3://")):  # only checkpoints are read from there
        return False
    target = file_path(path)
    if not target.is_dir():
        return target.exists() or target.with_name(f"{target.name}.index.json").exists()
    # A checkpoint has its arrays in `leaves`; a directory of checkpoints has one for each step.
    folders = [x.name for x in target.iterdir() if x.is_dir()]
    is_checkpoint = "leaves" in folders or any(map(str.isdigit, folders))
    return not is_checkpoint and any(target.glob("*.safetensors*"))


def _has_steps(path: str) -> bool:
    from treeshard.checkpoint import _paths

    return bool(_paths.steps_in(_paths.checkpoint_path(path)))


@contextmanager
def _open_checkpoint(path: str, step: int | None) -> Iterator[StoredTree]:
    # These load TensorStore, which safetensors do not need.
    from treeshard.checkpoint import _paths, _restore

    directory = _paths.checkpoint_path(path)
    steps = _paths.steps_in(directory)
    if step is None and steps:
        step = steps[-1]
    if step is not None:
        directory = directory / str(step)
    with _paths.reading(directory, listed=step in steps) as check:
        table = _restore.table_at(directory)
        contents = Contents(str(directory), table.leaves, table.meshes)
        read = partial(_restore.read_each, directory, table.files)
        damages = partial(_restore.damages_of, directory, table.files)
        yield StoredTree("checkpoint", contents, read, damages, steps, check)


def _read(stored: dict[str, Stored], rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
    for row in rows:
        x = stored[row.path]
        check_memory(x.file.name, x.tensor.nbytes)
        try:
            yield ReadLeaf(row, read_full(x), "")
        except DamagedError as error:
            yield ReadLeaf(row, None, str(error))

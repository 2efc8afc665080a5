"""Trees on disk, as checkpoints or safetensors: lists their leaves, and reads them one by one.

The files at a path determine the format, so commands have no option for it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import jax

from treeshard._disk.files import file_path
from treeshard._disk.leaves import Contents, ReadLeaf, SavedLeaf
from treeshard._disk.untrusted import check_memory
from treeshard.errors import CheckpointError, DamagedError, RemovedError
from treeshard.interchange._files import Stored, open_tensors
from treeshard.interchange._tensors import read_full


class StoredTree(NamedTuple):
    """A tree on disk."""

    format: str  # "checkpoint" or "safetensors"
    contents: Contents  # for `inspect`; safetensors have no specs
    # Reads some of the leaves, a few at a time.
    read: Callable[[Iterable[SavedLeaf]], Iterator[ReadLeaf]]
    # Returns how leaves and other files are damaged, by name. `None` for safetensors, which have no
    # checksums.
    damages: Callable[[Iterable[SavedLeaf]], tuple[dict[str, str], dict[str, str]]] | None = None
    steps: tuple[int, ...] = ()  # all steps of its directory of checkpoints
    # Raises `RemovedError` if the writer has removed the checkpoint since.
    check: Callable[[], None] = lambda: None


R = TypeVar("R")


def use_stored(
    path: str, step: int | None, use: Callable[[StoredTree], R], *, shapes_only: bool = False
) -> R:
    """Calls a function with a checkpoint, a step of a directory of checkpoints, or safetensors.

    By default, the step is the latest. If the writer removes that step during the call, the
    function is called again with a later step. With `shapes_only`, safetensors may be without
    their data.
    """
    # Files need only the CPU. Unless the user chose a platform, JAX would reserve most of the
    # memory of a GPU, and fail on a TPU that a training run uses.
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")
    if not _has_tensors(path):
        return _use_checkpoint(path, step, use)
    if step is not None:
        raise CheckpointError(f"{path} is not a directory of checkpoints: it has no step {step}.")
    file = file_path(path)
    with open_tensors(file, shapes_only) as stored:
        dtypes = {name: str(x.tensor.dtype) for name, x in stored.items()}
        rows = tuple(
            SavedLeaf(name, "array", x.tensor.shape, dtypes[name], stored=dtypes[name])
            for name, x in stored.items()
        )
        contents = Contents(str(file), rows, ())
        return use(StoredTree("safetensors", contents, partial(_read_tensors, stored)))


def _has_tensors(path: str) -> bool:
    """Whether a path has safetensors, and not a checkpoint."""
    if path.startswith(("gs://", "s3://")):  # only checkpoints are read from there
        return False
    target = file_path(path)
    if not target.is_dir():
        return target.exists() or target.with_name(f"{target.name}.index.json").exists()
    # A directory may have both, because users export next to their checkpoints. A checkpoint has a
    # folder `leaves`. A directory of checkpoints has a folder for each step.
    folders = [x.name for x in target.iterdir() if x.is_dir()]
    is_checkpoint = "leaves" in folders or any(map(str.isdigit, folders))
    return not is_checkpoint and any(target.glob("*.safetensors*"))


def _use_checkpoint(path: str, step: int | None, use: Callable[[StoredTree], R]) -> R:
    # These modules import TensorStore, which safetensors do not need.
    from treeshard.checkpoint import _paths, _restore

    root = _paths.checkpoint_path(path)
    while True:
        steps = _paths.steps_in(root)
        chosen = steps[-1] if steps and step is None else step
        directory = root if chosen is None else root / str(chosen)
        try:
            with _paths.reading(directory, listed=chosen in steps) as check:
                table = _restore.table_at(directory)
                contents = Contents(str(directory), table.leaves, table.meshes)
                read = partial(_restore.read_each, directory, table)
                damages = partial(_restore.find_damages, directory, table)
                return use(StoredTree("checkpoint", contents, read, damages, steps, check))
        except RemovedError:
            if step is not None or not steps:
                raise


def _read_tensors(stored: dict[str, Stored], rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
    for row in rows:
        x = stored[row.path]
        check_memory(x.file.name, x.tensor.nbytes)
        try:
            yield ReadLeaf(row, read_full(x), "")
        except DamagedError as error:
            yield ReadLeaf(row, None, str(error))

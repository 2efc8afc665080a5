"""A checkpoint as a stored tree; in its own module, since it loads Orbax."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from treeshard._cli.stored_trees import StoredTree
from treeshard._disk.leaves import Contents
from treeshard.checkpoint._paths import checkpoint_path, steps_in
from treeshard.checkpoint._restore import read_each, table_at


def open_checkpoint(path: str, step: int | None = None) -> AbstractContextManager[StoredTree]:
    """See `open_stored`."""
    directory = checkpoint_path(path)
    steps = steps_in(directory)
    if step is None and steps:
        step = steps[-1]
    if step is not None:
        directory = directory / str(step)
    table = table_at(directory)
    contents = Contents(str(directory), table.leaves, table.meshes)
    return nullcontext(StoredTree("checkpoint", contents, partial(read_each, directory), steps))

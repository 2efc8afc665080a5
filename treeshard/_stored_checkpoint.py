"""A checkpoint as a tree on disk; apart from other formats, since it takes Orbax."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from treeshard._checkpoint_paths import checkpoint_path, steps_in
from treeshard._contents import Contents
from treeshard._restoring import table_at
from treeshard._stored_arrays import read_each
from treeshard._stored_trees import StoredTree


def open_checkpoint(path: str, step: int | None = None) -> AbstractContextManager[StoredTree]:
    """As `open_stored`."""
    found = checkpoint_path(path)
    steps = steps_in(found)
    if step is None and steps:
        step = steps[-1]
    if step is not None:
        found = found / str(step)
    table = table_at(found)

    contents = Contents(str(found), table.leaves, table.meshes)
    return nullcontext(StoredTree("checkpoint", contents, partial(read_each, found), steps))

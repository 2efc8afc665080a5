"""A checkpoint as a tree on disk; apart from other formats, since it takes Orbax."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from treeshard._checkpoint_paths import checkpoint_path, steps_in
from treeshard._contents import Contents
from treeshard._literals import parse_dtype
from treeshard._restoring import table_at
from treeshard._saved_leaf import SavedLeaf
from treeshard._stored_arrays import read_each
from treeshard._stored_trees import ReadLeaf, StoredTree


def open_checkpoint(path: str, step: int | None = None) -> AbstractContextManager[StoredTree]:
    """As `open_stored`."""
    found = checkpoint_path(path)
    steps = steps_in(found)
    if step is None and steps:
        step = steps[-1]
    if step is not None:
        found = found / str(step)
    table = table_at(found)

    def read(rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
        for row, stored, damage in read_each(found, rows):
            yield ReadLeaf(row, None if damage else _in_its_dtype(row, stored), damage)

    contents = Contents(str(found), table.leaves, table.meshes)
    return nullcontext(StoredTree("checkpoint", contents, read, steps))


def _in_its_dtype(row: SavedLeaf, stored: np.ndarray | None) -> np.ndarray | None:
    if not row.dtype:
        return None
    dtype = parse_dtype("uint32" if row.kind == "key" else row.dtype)
    return np.zeros(row.stored_shape, dtype) if stored is None else stored.view(dtype)

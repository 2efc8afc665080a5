"""How a checkpoint becomes a tree: all processes ask for the same, and each reads its shards."""

from typing import Any
from zlib import crc32

import jax
from etils import epath

from treeshard._agreement import agree
from treeshard._checkpoint_paths import table_text
from treeshard._errors import DamagedError, FormatError
from treeshard._leaf_table import LeafTable
from treeshard._like import Placing
from treeshard._mesh import AnyMesh
from treeshard._processes import TIMEOUT, together
from treeshard._rules import Rules
from treeshard._stored_arrays import read_together
from treeshard._table_text import from_text
from treeshard._wanted_leaves import wanted_of

WHERE = "restore"


def restored(
    path: epath.Path,
    like: Any,
    *,
    rules: Rules | None = None,
    mesh: AnyMesh | None = None,
    min_size: int | None = None,
    cast: Any = None,
    partial: bool = False,
    verify: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """The tree at `path`, as it is asked for. Raises as `checkpoint.restore` does."""
    # What goes to host memory alone concerns no other process.
    among = [jax.process_index()] if like is None and rules is None else None
    with together(WHERE, among=among, timeout=timeout):
        text = table_text(path)
        wanted = wanted_of(_read(path, text), like, Placing(rules, mesh, min_size), cast, WHERE)
        wanted.differences.check(str(path), partial=partial)
    table = f"CRC-32 {crc32(text.encode())}"
    facts = {"the path": str(path), "the table of leaves": table, **wanted.facts()}
    agree(WHERE, facts, among=among, timeout=timeout)
    arrays = read_together(
        path,
        wanted.rows(),
        wanted.structs(),
        verify=verify,
        where=WHERE,
        among=among,
        timeout=timeout,
    )
    return wanted.tree(arrays)


def table_at(path: epath.Path) -> LeafTable:
    """The table of the checkpoint at `path`. Raises as `checkpoint.inspect` does."""
    return _read(path, table_text(path))


def _read(path: epath.Path, text: str) -> LeafTable:
    try:
        return from_text(text)
    except (DamagedError, FormatError) as error:
        raise type(error)(f"{path}: {error}") from None

"""How a checkpoint becomes a tree: all processes ask for the same, and each reads its shards."""

from typing import Any, TypedDict
from zlib import crc32

import jax
from etils import epath

from treeshard._agreement import agreeing
from treeshard._checkpoint_paths import PathLike, checkpoint_path, seal, table_text
from treeshard._errors import DamagedError, FormatError
from treeshard._leaf_table import LeafTable
from treeshard._like import Placing
from treeshard._mesh import AnyMesh
from treeshard._processes import TIMEOUT
from treeshard._rules import Rules
from treeshard._stored_arrays import read_together
from treeshard._table_text import from_text
from treeshard._wanted_leaves import wanted_of

WHERE = "restore"


class RestoreOptions(TypedDict, total=False):
    """What may be said to `restore` by name."""

    rules: Rules | None
    mesh: AnyMesh | None
    min_size: int | None
    cast: Any
    partial: bool
    verify: bool
    timeout: float


def restore(
    path: PathLike,
    like: Any = None,
    *,
    rules: Rules | None = None,
    mesh: AnyMesh | None = None,
    min_size: int | None = None,
    cast: Any = None,
    partial: bool = False,
    verify: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """Reads a checkpoint straight to shards, on any mesh and any number of processes.

    Before an array is read, all leaves that are asked for are compared with all that were saved,
    and nothing is converted without a word. Afterwards the bytes are compared with those saved.

    Args:
        path: The checkpoint.
        like: A `Plan`, or a tree of arrays or their `jax.ShapeDtypeStruct`s: what comes back has
            its structure and its static leaves. By default a flat dict by path comes back.
        rules: How the arrays are to lie, by their paths, as in `plan`. By default they lie as
            those of `like` do: numpy's in host memory, and those without a sharding on the
            default device; without `like`, in host memory.
        mesh: The mesh for the rules; by default the one in force.
        min_size: For the rules: leaves with fewer elements stay whole, as in `plan`.
        cast: A floating-point dtype that arrays of others are converted to, if `like` asks for it
            (or is not given).
        partial: Whether leaves may be missing in the checkpoint, or in `like`. Those that the
            checkpoint does not have stay as they are in `like`, and a `ShardingWarning` lists
            them.
        verify: Whether to compare checksums. It reads the arrays once more, in memory.
        timeout: Seconds that other processes are waited for; not while they read.

    Returns:
        The tree. It shares memory with nothing else.

    Raises:
        CheckpointError: If there is no checkpoint at `path`: it says what there is.
        DamagedError: If the checkpoint is not what was saved: the leaves are named.
        MismatchError: If leaves are missing, not asked for, or of another kind, shape or dtype
            than asked for; if they have 64 bits and JAX's x64 mode is off. All are listed.
        FormatError: If the checkpoint is of another version of treeshard; if `cast` is no
            floating-point dtype.
        ShardingRuleError: If the rules do not decide every leaf, or decide what does not fit.
        NoMeshError: If there is no mesh for the rules, or only one without devices.
        ProcessError: If the processes do not ask for the same, or one of them failed or did not
            come.
        ValueError: If `mesh` or `min_size` is given without `rules`.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((256, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as there:
        ...     save(f"{there}/mlp", {"w": np.ones((256, 64), np.float32), "act": jax.nn.relu})
        ...     tree = restore(f"{there}/mlp", like, rules=[("w", P("fsdp"))], mesh=mesh)
        ...     flat = restore(f"{there}/mlp")
        >>> tree["w"].sharding.spec, list(flat)
        (P('fsdp',), ['w'])
    """
    # What goes to host memory alone concerns no other process.
    among = [jax.process_index()] if like is None and rules is None else None
    found = checkpoint_path(path)
    with agreeing(WHERE, among=among, timeout=timeout) as facts:
        text = table_text(found)
        wanted = wanted_of(_read(found, text), like, Placing(rules, mesh, min_size), cast, WHERE)
        wanted.differences.check(str(found), partial=partial)
        table = f"CRC-32 {crc32(text.encode())}"
        facts |= {"the path": str(found), "the table of leaves": table, **wanted.facts()}
    arrays = read_together(
        found,
        wanted.rows(),
        wanted.structs(),
        verify=verify,
        where=WHERE,
        among=among,
    )
    return wanted.tree(arrays)


def table_at(path: epath.Path) -> LeafTable:
    """The table of the checkpoint at `path`. Raises as `checkpoint.inspect` does."""
    return _read(path, table_text(path))


def _read(path: epath.Path, text: str) -> LeafTable:
    try:
        table = from_text(text)
    except (DamagedError, FormatError) as error:
        raise type(error)(f"{path}: {error}") from None
    if seal(path) != str(crc32(text.encode())):
        raise DamagedError(f"{path}: the table of leaves is not the one that its arrays came with.")
    return table

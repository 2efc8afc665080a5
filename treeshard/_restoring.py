"""Restores a tree from a checkpoint: all processes agree, then each reads its shards."""

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
    """The keyword arguments of `restore`."""

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
    """Reads a checkpoint directly into shards, on any mesh and any number of processes.

    Before any array is read, the requested leaves are compared with the stored ones; no dtype is
    converted silently. After reading, the checksums are compared with the saved ones.

    Args:
        path: The checkpoint.
        like: A `Plan`, or a tree of arrays or their `jax.ShapeDtypeStruct`s. The result has its
            structure and its static leaves. By default the result is a flat dict by path.
        rules: How to shard the arrays, by their paths, as in `plan`. By default each array is
            placed as its leaf of `like`: numpy arrays in host memory, arrays without a sharding
            on the default device. Without `like` all arrays stay in host memory.
        mesh: The mesh for the rules, as in `plan`; by default the current one.
        min_size: For the rules: leaves with fewer elements are replicated, as in `plan`.
        cast: A floating-point dtype. Arrays of other floating-point dtypes are converted to it
            where `like` requests it, or everywhere without `like`.
        partial: Whether leaves may be missing from the checkpoint or from `like`. Leaves that are
            not in the checkpoint keep their values from `like`, and a `ShardingWarning` lists
            them.
        verify: Whether to compare checksums, which reads the arrays in memory once more.
        timeout: Seconds to wait for other processes; waits for their reads have no limit.

    Returns:
        The tree. Its arrays share memory with nothing else.

    Raises:
        CheckpointError: If there is no checkpoint at `path`: it says what is there instead.
        DamagedError: If the checkpoint is not as saved: the leaves are listed.
        MismatchError: If leaves are missing, not requested, or of another kind, shape or dtype
            than requested; if they have a 64-bit dtype and JAX's x64 mode is off. All are listed.
        FormatError: If another version of treeshard wrote the checkpoint; if `cast` is not a
            floating-point dtype.
        ShardingRuleError: If the rules do not decide every leaf, or decide a spec that does not
            fit.
        NoMeshError: If there is no mesh for the rules, or only one without devices.
        ProcessError: If the processes request different things, or one of them fails or does not
            arrive.
        ValueError: If `mesh` or `min_size` is given without `rules`.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((256, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/mlp", {"w": np.ones((256, 64), np.float32), "act": jax.nn.relu})
        ...     tree = restore(f"{folder}/mlp", like, rules=[("w", P("fsdp"))], mesh=mesh)
        ...     flat = restore(f"{folder}/mlp")
        >>> tree["w"].sharding.spec, list(flat)
        (P('fsdp',), ['w'])
    """
    # A restore to host memory alone needs no other process.
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
        raise DamagedError(f"{path}: the table of leaves does not belong to the arrays beside it.")
    return table

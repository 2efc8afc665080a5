"""Trees on disk: saved from any mesh, restored to any other, and known to be what was saved.

A checkpoint is a directory that Orbax writes: the arrays, and beside them a table of all leaves
with a checksum of each. It is there at once and whole, or not at all. Nothing in it is code, and
nothing read from it is run.
"""

from typing import Any

from treeshard._checkpoint_paths import PathLike, checkpoint_path
from treeshard._checkpoints import Checkpoints as Checkpoints
from treeshard._contents import Contents as Contents
from treeshard._processes import TIMEOUT
from treeshard._progress import with_bar
from treeshard._read_leaf import raise_damages
from treeshard._restoring import restore as restore
from treeshard._restoring import table_at
from treeshard._saved_leaf import SavedLeaf as SavedLeaf
from treeshard._saving import begin
from treeshard._stored_arrays import read_each


def save(
    path: PathLike,
    tree: Any,
    *,
    fingerprints: bool = True,
    compress: bool = False,
    ocdbt: bool = True,
    timeout: float = TIMEOUT,
) -> None:
    """Saves a tree as a checkpoint, each process the shards that it holds. Nothing is gathered.

    All is checked before anything is written: that every leaf can be saved, and that all
    processes save the same leaves. The checkpoint has its name once it is whole; after an error,
    on any process, there is none, and what there was before is as it was.

    Args:
        path: The directory to make, on every process the same, and on a file system or object
            store that all of them share. It must not be there yet.
        tree: Any pytree. Saved are arrays of every dtype that JAX has, typed PRNG keys, Python
            numbers, strings, bytes and `None`. Other leaves, such as functions, are static: they
            are left out, and come from the like-tree when it is restored. Of an array that each
            process has for itself, which must be the same on all, process 0 saves its own.
        fingerprints: Whether to save a checksum of every array, so that damage is found.
        compress: Whether to compress by zstd. Weights shrink little, and it takes long.
        ocdbt: Whether to put arrays together into few files, and not each into its own.
        timeout: Seconds that other processes are waited for; not while they write.

    Raises:
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct`, or of a dtype that JAX does not
            have.
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If there is something at `path`, if another run is writing there (object
            stores have no lock that would tell), or if it cannot be written; if leaves share a
            path.
        ProcessError: If the processes do not save the same; if one of them failed before
            anything was written, or did not come.

    Examples:
        >>> w = shard(np.ones((256, 64), np.float32), P("fsdp"), make_mesh("fsdp=8"))
        >>> state = {"w": w, "key": jax.random.key(0), "step": 7, "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as there:
        ...     save(f"{there}/step_7", state)
        ...     again = restore(f"{there}/step_7", state, rules=[(".*", P("data"))], mesh=mesh)
        >>> again["w"].sharding.spec, again["step"], again["act"] is jax.nn.relu
        (P('data',), 7, True)
    """
    begin(
        checkpoint_path(path),
        tree,
        fingerprints=fingerprints,
        compress=compress,
        ocdbt=ocdbt,
        timeout=timeout,
    ).wait()


def inspect(path: PathLike) -> Contents:
    """Reads what a checkpoint holds. No array is read, and other processes are not asked.

    Args:
        path: The checkpoint.

    Returns:
        The `Contents`, with a `SavedLeaf` for every leaf; `print` shows them as a table.

    Raises:
        CheckpointError: If there is no checkpoint at `path`: it says what there is.
        DamagedError: If its table of leaves is not what was saved.
        FormatError: If it is of another version of treeshard.

    Examples:
        >>> with tempfile.TemporaryDirectory() as there:
        ...     save(f"{there}/mlp", {"w": np.ones((8, 4), np.float32), "step": 7})
        ...     found = inspect(f"{there}/mlp")
        >>> [(leaf.path, leaf.kind, leaf.shape, leaf.bytes) for leaf in found.leaves]
        [('step', 'int', (), 1), ('w', 'array', (8, 4), 128)]
    """
    found = checkpoint_path(path)
    table = table_at(found)
    return Contents(str(found), table.leaves, table.meshes)


def verify(path: PathLike, *, progress: bool = False) -> None:
    """Reads every leaf of a checkpoint, and compares its bytes with those that were saved.

    It takes no model, no mesh and no other process, and host memory for a few leaves at a time.

    Args:
        path: The checkpoint.
        progress: Whether to show a bar, a step a leaf (needs `tqdm`).

    Raises:
        DamagedError: If leaves cannot be read, or are not what was saved: all are named.
        CheckpointError, FormatError: As `inspect`.
        ImportError: If `progress` is asked for and `tqdm` is not installed.

    Examples:
        >>> with tempfile.TemporaryDirectory() as there:
        ...     save(f"{there}/mlp", {"w": np.ones((8, 4), np.float32)})
        ...     verify(f"{there}/mlp")
    """
    found = checkpoint_path(path)
    leaves = read_each(found, with_bar(table_at(found).leaves, "verify", show=progress))
    raise_damages(found, {leaf.row.path: leaf.damage for leaf in leaves if leaf.damage})

"""Saves trees from any mesh, restores them on any mesh, and detects damaged values.

A checkpoint is a directory with a table of all leaves and files, and with the arrays as zarr in the
layout of Orbax. TensorStore writes them with a checksum for each chunk. Saves are atomic and
durable. A checkpoint contains no code.

Examples:
    >>> from treeshard import checkpoint
    >>> state = {"w": np.ones((8, 4), np.float32), "step": 7}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(f"{folder}/step_7", state)
    ...     restored = checkpoint.restore(f"{folder}/step_7", state)
    >>> restored["w"].shape, restored["step"]
    ((8, 4), 7)
"""

try:
    import etils.epath  # noqa: F401
    import tensorstore  # noqa: F401
except ModuleNotFoundError:
    raise ImportError(
        "treeshard.checkpoint needs TensorStore and etils. Install them with"
        " `pip install 'treeshard[checkpoint]'`."
    ) from None

from treeshard._core.paths import PyTree
from treeshard._core.processes import TIMEOUT, show_progress
from treeshard._disk.files import PathLike
from treeshard._disk.leaves import Contents, SavedLeaf, raise_damages
from treeshard.checkpoint._checkpoints import Checkpoints
from treeshard.checkpoint._paths import checkpoint_path, reading
from treeshard.checkpoint._restore import find_damages, restore, table_at
from treeshard.checkpoint._save import begin

__all__ = [
    "Checkpoints",
    "Contents",
    "SavedLeaf",
    "inspect",
    "restore",
    "save",
    "verify",
]


def save(
    path: PathLike,
    tree: PyTree,
    *,
    on_divergence: str = "error",
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> None:
    """Saves a tree as a checkpoint, where each process writes its own shards.

    Examples:
        >>> w = shard(np.ones((256, 64), np.float32), P("fsdp"), make_mesh("fsdp=8"))
        >>> state = {"w": w, "key": jax.random.key(0), "step": 7, "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/step_7", state)
        ...     again = restore(f"{folder}/step_7", state, rules=[(".*", P("data"))], mesh=mesh)
        >>> again["w"].sharding.spec, again["step"], again["act"] is jax.nn.relu
        (P('data',), 7, True)

    Leaves are checked, and compared between processes, before the first byte is written. The save
    is atomic and durable. The checkpoint gets its name once it is complete and on the disk. An
    error on any process leaves no checkpoint.

    Args:
        path: The directory to create, on a file system or object store that all processes share. It
            must not exist yet. `Checkpoints.save` can replace a step.
        tree: Any pytree. Arrays, typed PRNG keys, Python numbers, strings, bytes, `None`, enums and
            flags are saved. `restore` takes functions, types, modules and dtypes from its `like`
            instead. A numpy array must be equal on all processes.
        on_divergence: What to do if replicas of an array, or copies on several processes, differ in
            a bit. `"error"` raises a `CheckpointError`. `"warn"` saves the first replica of each
            shard, or the copy of process 0.
        timeout: Seconds to wait for other processes. Their writes may take longer, as long as they
            are alive.
        progress: Whether to show a progress bar of the bytes on disk (needs `tqdm`).

    Raises:
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct` or a mutable reference (`jax.Ref`),
            has a dtype that JAX does not support, or has a class that JAX does not know, such as a
            plain dataclass or a deque. Functions are not saved. A callable object that has arrays
            in its attributes, or is a plain dataclass with numbers, has such a class. Also if the
            tree has no leaf to save.
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If `path` exists or cannot be written, for example because the disk is
            full. If another run is writing there, except in object stores. If the processes do not
            share the directory. If several leaves have the same path. If replicas differ. If the
            host has too little memory.
        ProcessError: If the processes save different trees, or if a process does not arrive, or
            fails before the first byte is written.
        ValueError: If `on_divergence` is another word.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Warns:
        ShardingWarning: If replicas differ, with `on_divergence="warn"`. If an unfinished
            checkpoint of a killed save is removed from this path.

    Source:
        Orbax, for the layout of the arrays.
    """
    if progress:
        show_progress((), "save")  # raises without tqdm, before anything is written
    writing = begin(
        [],
        checkpoint_path(path),
        tree,
        on_divergence=on_divergence,
        timeout=timeout,
        in_background=False,
    )
    writing.wait(progress=progress)


def inspect(path: PathLike) -> Contents:
    """Lists the leaves of a checkpoint without reading its arrays, on this process alone.

    Args:
        path: The checkpoint.

    Returns:
        The `Contents`, with a `SavedLeaf` for each leaf. `print` shows a table.

    Raises:
        CheckpointError: If `path` is not a checkpoint. The message says what it is instead.
        DamagedError: If the table of leaves is damaged.
        RemovedError: If the writer of the checkpoint removes or replaces it during the call.
        FormatError: If another version of treeshard wrote the checkpoint.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/mlp", {"w": np.ones((8, 4), np.float32), "step": 7})
        ...     contents = inspect(f"{folder}/mlp")
        >>> [(leaf.path, leaf.kind, leaf.shape, leaf.bytes) for leaf in contents.leaves]
        [('step', 'int', (), 1), ('w', 'array', (8, 4), 128)]
    """
    checkpoint = checkpoint_path(path)
    with reading(checkpoint):
        table = table_at(checkpoint)
    return Contents(str(checkpoint), table.leaves, table.meshes)


def verify(path: PathLike, *, progress: bool = False) -> None:
    """Reads every leaf of a checkpoint and compares its checksums.

    Files without leaves are compared with the list of saved files too. The call needs no model, no
    mesh and no other process, and holds a few chunks in host memory.

    Args:
        path: The checkpoint.
        progress: Whether to show a progress bar with a step per leaf (needs `tqdm`).

    Raises:
        DamagedError: If leaves or files cannot be read or have changed. All of them are listed.
        CheckpointError: As `inspect`. Also if the host has too little memory.
        FormatError, RemovedError: As `inspect`.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/mlp", {"w": np.ones((8, 4), np.float32)})
        ...     verify(f"{folder}/mlp")
    """
    checkpoint = checkpoint_path(path)
    with reading(checkpoint) as check:
        table = table_at(checkpoint)
        rows = show_progress(table.leaves, "verify", show=progress)
        damages, other_files = find_damages(checkpoint, table, rows)
        check()  # what was read may be intact, and from another checkpoint
        raise_damages(checkpoint, damages, other_files)


def __dir__() -> list[str]:
    return __all__

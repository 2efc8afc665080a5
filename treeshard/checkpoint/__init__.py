"""Saves trees from any mesh, restores them to any other, and never returns damaged values.

A checkpoint is a directory: arrays as zarr, written by TensorStore in the layout that Orbax reads,
with a checksum of each chunk, and a table of all leaves and files. Saves are atomic and durable. A
checkpoint contains no code, and reading one runs nothing from it.

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
    """Saves a tree as a checkpoint. Each process writes its own shards; nothing is gathered.

    Examples:
        >>> w = shard(np.ones((256, 64), np.float32), P("fsdp"), make_mesh("fsdp=8"))
        >>> state = {"w": w, "key": jax.random.key(0), "step": 7, "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/step_7", state)
        ...     again = restore(f"{folder}/step_7", state, rules=[(".*", P("data"))], mesh=mesh)
        >>> again["w"].sharding.spec, again["step"], again["act"] is jax.nn.relu
        (P('data',), 7, True)

    Leaves are checked, and compared between processes, before anything is written. Saves are
    atomic and durable: the checkpoint gets its name once it is complete and on the disk, and an
    error on any process leaves no checkpoint.

    Args:
        path: The directory to create, on a file system or object store that all processes share. It
            must not exist. `Checkpoints.save` can replace a step.
        tree: Any pytree. Arrays, typed PRNG keys, Python numbers, strings, bytes, `None`, and enums
            and flags, by name, are saved. Functions, types, modules and dtypes are not: `restore`
            takes them from its like-tree. A numpy array must be equal on all processes.
        on_divergence: What to do if replicas of an array, or the processes' copies of one, differ
            in a bit: `"error"` raises a `CheckpointError`; `"warn"` saves the first replica of
            each shard, and the copy of process 0.
        timeout: Seconds to wait for other processes; waits for their writes have no limit.
        progress: Whether to show a progress bar of the bytes on disk (needs `tqdm`).

    Raises:
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct`, a mutable reference (`jax.Ref`), of
            a dtype that JAX does not support, or of a class that JAX does not know, such as a plain
            dataclass or a deque; if there is nothing to save.
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If `path` exists or cannot be written; if another run is writing there
            (not detected on object stores); if the processes do not share its directory; if
            several leaves have the same path; if replicas differ; if there is not enough host
            memory.
        ProcessError: If the processes save different trees, or one of them fails before anything
            is written or does not arrive.
        ValueError: If `on_divergence` is another word.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Warns:
        ShardingWarning: With `on_divergence="warn"`, if replicas differ. If a killed save
            had left an unfinished checkpoint at this path, which is removed.
    """
    if progress:
        show_progress((), "save")  # raises without tqdm, before anything is written
    writing = begin(
        checkpoint_path(path),
        tree,
        on_divergence=on_divergence,
        timeout=timeout,
        in_background=False,
    )
    writing.wait(progress=progress)


def inspect(path: PathLike) -> Contents:
    """Lists the contents of a checkpoint. No array is read, and no other process takes part.

    Args:
        path: The checkpoint.

    Returns:
        The `Contents`, with a `SavedLeaf` for each leaf; `print` shows them as a table.

    Raises:
        CheckpointError: If there is no checkpoint at `path`: it says what is there instead.
        DamagedError: If its table of leaves is not as saved.
        RemovedError: If its writer removes or replaces it meanwhile.
        FormatError: If another version of treeshard wrote it.

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
    """Reads every leaf of a checkpoint, and checks that it is as saved.

    Its files are compared with those that were saved, too, even if no leaf is read from them. It
    needs no model, no mesh and no other process, and host memory for a few chunks at a time.

    Args:
        path: The checkpoint.
        progress: Whether to show a progress bar with a step per leaf (needs `tqdm`).

    Raises:
        DamagedError: If leaves or files cannot be read, or are not as saved: all are listed.
        CheckpointError, FormatError, RemovedError: As `inspect`.
        CheckpointError: Also if there is not enough host memory.
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

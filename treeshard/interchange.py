"""Trees as safetensors files, which other frameworks read and write."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from treeshard._agreement import agreeing
from treeshard._byte_ranges import write, write_bytes
from treeshard._errors import CheckpointError
from treeshard._like import Placing
from treeshard._literals import parse_bytes
from treeshard._mesh import AnyMesh
from treeshard._new_files import new_files
from treeshard._processes import AS_LONG_AS_IT_TAKES, TIMEOUT, together
from treeshard._progress import with_bar
from treeshard._rules import Rules
from treeshard._safetensors import code_of
from treeshard._tensor_files import NewFile, left_over, open_tensors, spread
from treeshard._tensor_trees import Names, pieces_of, tensors_of, writers
from treeshard._wanted_tensors import wanted_of

PathLike = str | os.PathLike[str]


# ------------------------------------------------------------------ to files


def save_safetensors(
    path: PathLike,
    tree: Any,
    *,
    rename: Names | None = None,
    max_file_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> None:
    """Writes the arrays of a tree to a safetensors file, byte for byte as its own package would.

    No array is gathered: every process writes the shards that it holds (the first copy of each)
    to where they belong in the file, and needs a few megabytes to do so. The file gets its name
    when it is whole and on disk; after an error on any process there is what was there before.

    Args:
        path: The file, such as `"model.safetensors"`; the same on every process, in a directory
            that all of them share.
        tree: Any pytree. Leaves that are no arrays, Python numbers among them, are not written.
            Of an array that every process has for itself, the first one's is.
        rename: The name of a leaf's tensor by the leaf's path, as a function or a mapping. What
            a mapping does not have keeps its path, `"layers/0/weight"`.
        max_file_size: In bytes, or as `"5GB"`. More than that is spread over files
            `model-00001-of-00003.safetensors`, none of them larger unless a single tensor is,
            and `model.safetensors.index.json` says what is where. By default all is one file.
        metadata: Texts for the head of every file, such as `{"format": "pt"}`, which Hugging
            Face's libraries ask for.
        timeout: Seconds that other processes are waited for; not while they write.
        progress: Whether to show a bar, a step a leaf (needs `tqdm`).

    Raises:
        LeafError: If a leaf is of a dtype that the format does not have (typed PRNG keys, types
            of less than a byte), or has no numbers (tracers, `ShapeDtypeStruct`s).
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If two leaves would have the same name, or one a name that cannot be;
            if the files cannot be written; if another run is writing them.
        FormatError: If `max_file_size` is no amount, or the names need more than the format's
            100 MB.
        ProcessError: If the processes do not mean the same tree, or one of them failed or did
            not come.
        ImportError: If `progress` is asked for and `tqdm` is not installed.

    Examples:
        >>> mlp = {"w": shard(np.ones((8, 4), np.float32), P("fsdp"), make_mesh("fsdp=8"))}
        >>> with tempfile.TemporaryDirectory() as there:
        ...     file = f"{there}/model.safetensors"
        ...     save_safetensors(file, {"mlp": mlp}, rename=lambda path: path.replace("/", "."))
        ...     load_safetensors(file)["mlp.w"].shape
        (8, 4)

    Source:
        The format and its order of tensors: github.com/huggingface/safetensors. The names of
        several files and their index: Hugging Face's `save_pretrained`.
    """
    where, to = "save_safetensors", Path(path)
    try:
        with agreeing(where, timeout=timeout) as facts:
            most = parse_bytes(max_file_size) if isinstance(max_file_size, str) else max_file_size
            found = tensors_of(tree, rename, where)
            rows = [(name, code_of(x.dtype) or "", tuple(x.shape)) for name, x in found.items()]
            files = spread(to, rows, most, metadata)
            stale = left_over(to, files)
            facts["the path"] = str(to)
            facts |= {file.path.name: f"{len(file.head)} bytes of header" for file in files}
            facts |= {name: f"{code}{list(shape)}" for name, code, shape in rows}
        whose = writers(list(found.values()), where, timeout)
        mine = {
            name: leaf
            for (name, leaf), writer in zip(found.items(), whose, strict=True)
            if writer in (None, jax.process_index())
        }
        with new_files(to, [file.path for file in files], stale, where, timeout) as opened:
            _write(files, opened, mine, progress)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {to} cannot be written: {error}. What was there is there still."
        ) from error


def _write(
    files: list[NewFile], opened: list[int], mine: Mapping[str, Any], progress: bool
) -> None:
    places = [
        (file, len(new.head) + one.start, mine[one.name])
        for new, file in zip(files, opened, strict=True)
        for one in new.tensors
        if one.name in mine
    ]
    for file, at, leaf in with_bar(places, "save_safetensors", unit="tensor", show=progress):
        write(file, at, leaf.shape, pieces_of(leaf))
    if jax.process_index() == 0:
        for new, file in zip(files, opened, strict=True):
            write_bytes(file, 0, new.head)


# ------------------------------------------------------------------ from files


def load_safetensors(
    path: PathLike,
    like: Any = None,
    *,
    rules: Rules | None = None,
    mesh: AnyMesh | None = None,
    min_size: int | None = None,
    rename: Names | None = None,
    cast: Any = None,
    partial: bool = False,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> Any:
    """Reads safetensors files straight to shards: each process its own bytes, and no others.

    Before a tensor is read, all that are asked for are compared with all that are there, and
    nothing is converted without a word.

    Args:
        path: A file, an index (`model.safetensors.index.json`), a directory with one of these,
            or what was given to `save_safetensors`.
        like: A tree of arrays or their `jax.ShapeDtypeStruct`s, or a `Plan`: what comes back has
            its structure, and its leaves that are no arrays. By default a flat dict by name
            comes back.
        rules: How the arrays are to lie, by their paths in `like` (without it, by their names),
            as in `plan`. By default they lie as those of `like` do: numpy's in host memory, and
            those without a sharding on the default device; without `like`, in host memory.
        mesh: The mesh for the rules; by default the one in force.
        min_size: For the rules: leaves with fewer elements stay whole, as in `plan`.
        rename: As in `save_safetensors`, from paths in `like` to names in the file.
        cast: A floating-point dtype that tensors of others are converted to, if `like` asks for
            it (or is not given).
        partial: Whether tensors may be missing in the file, or in `like`. Leaves that the file
            does not have stay as they are in `like`, and a `ShardingWarning` lists them.
        timeout: Seconds that other processes are waited for; not while they read.
        progress: Whether to show a bar, a step a tensor (needs `tqdm`).

    Returns:
        The tree. Its arrays share memory with nothing else.

    Raises:
        MismatchError: If tensors are missing, not asked for, or of another shape or dtype than
            asked for; if they have 64 bits and JAX's x64 mode is off. All are listed.
        FormatError: If the header of a file, or the index, is malformed or contradicts itself;
            if `cast` is no floating-point dtype.
        DamagedError: If a file is cut short, or goes on after its last tensor.
        CheckpointError: If a file cannot be read or is not there; if a directory has several;
            if `rename` gives two leaves one name.
        ShardingRuleError: If the rules do not decide every leaf, or decide what does not fit.
        NoMeshError: If there is no mesh for the rules, or only one without devices.
        ProcessError: If the processes do not ask for the same, or one of them failed or did not
            come.
        ValueError: If `mesh` or `min_size` is given without `rules`, or `rename` without `like`.
        ImportError: If `progress` is asked for and `tqdm` is not installed.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((512, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as there:
        ...     save_safetensors(f"{there}/mlp.safetensors", {"w": np.ones((512, 64), np.float32)})
        ...     tree = load_safetensors(there, like, rules=[("w", P("fsdp"))], mesh=mesh)
        >>> tree["w"].sharding.spec
        P('fsdp',)
    """
    where, source = "load_safetensors", Path(path)
    if like is None and rename is not None:
        raise ValueError(
            f"{where}: `rename` says what a leaf of `like` is called in the file, and there is no"
            " `like`. What comes back is a dict by name: rename its keys."
        )
    # What goes to host memory alone concerns no other process.
    among = [jax.process_index()] if like is None and rules is None else None
    try:
        with ExitStack() as held:
            with agreeing(where, among=among, timeout=timeout) as facts:
                stored = held.enter_context(open_tensors(source))
                wanted = wanted_of(
                    stored, like, Placing(rules, mesh, min_size), rename, cast, where
                )
                wanted.differences.check(str(source), partial=partial)
                facts |= {"the path": str(source), **wanted.facts()}
            with together(where, among=among, timeout=AS_LONG_AS_IT_TAKES):
                return wanted.read(progress)
    except OSError as error:
        raise CheckpointError(f"{where}: {source} cannot be read: {error}.") from error

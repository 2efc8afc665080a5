"""Saves trees to safetensors files, which other frameworks read and write, and loads them.

The package safetensors writes what one process has in full, in memory. Here each process writes and
reads the bytes of its own shards, so that no host needs memory for more than it trains with.
"""

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import jax

from treeshard._core.arguments import check_path
from treeshard._core.hosts import check_memory_of_hosts
from treeshard._core.meetings import breaking_if_left
from treeshard._core.mesh import MeshLike
from treeshard._core.processes import (
    TIMEOUT,
    all_or_none,
    require_agreement,
    show_progress,
)
from treeshard._core.text import parse_bytes
from treeshard._disk.files import PathLike, file_path
from treeshard._disk.requests import Placing, Request
from treeshard._disk.untrusted import check_memory, no_memory_to_read
from treeshard._planning.rules import Rules
from treeshard.errors import CheckpointError
from treeshard.interchange._files import (
    Stored,
    destination,
    lay_out_files,
    open_tensors,
    write_files,
)
from treeshard.interchange._format import Tensor, code_of
from treeshard.interchange._names import map_tensors
from treeshard.interchange._tensors import (
    Names,
    check_memory_to_write,
    memory_to_load,
    names_to_write,
    pieces_of,
    plan_readings,
    read_tensors,
    tensor_facts,
    tensor_request,
    tensors_of,
)

__all__ = ["load_safetensors", "map_tensors", "save_safetensors", "tensor_shapes"]


# ------------------------------------------------------------------ save


@breaking_if_left()
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
    """Writes the arrays of a tree to a safetensors file, with the same bytes as its own package.

    Examples:
        >>> mlp = {"w": shard(np.ones((8, 4), np.float32), P("fsdp"), make_mesh("fsdp=8"))}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = f"{directory}/model.safetensors"
        ...     save_safetensors(file, {"mlp": mlp}, rename=lambda path: path.replace("/", "."))
        ...     load_safetensors(file)["mlp.w"].shape
        (8, 4)

    No array is gathered: every process writes the shards that it holds to their positions in the
    file. Saves are atomic: after an error on any process the earlier files are unchanged. An array
    at two paths is written twice; Hugging Face's libraries expect tied weights once, so save a
    tree without the other path.

    Args:
        path: The file, such as `"model.safetensors"`. Without this suffix it is a folder, in which
            the file is `model.safetensors`, where `transformers` looks for it. Folders that do not
            exist are created. It is the same on every process, in a directory that all of them
            share.
        tree: Any pytree. Leaves that are not arrays, such as Python numbers, are not written.
            Of an array that every process holds in full, the copy of the first is written.
        rename: The name of each tensor: a function of the leaf's path, or a mapping from paths
            to names. Other paths stay as they are, `"layers/0/weight"`.
        max_file_size: In bytes, or as `"5GB"`. Trees with more bytes are split into files
            `model-00001-of-00003.safetensors` with an index, `model.safetensors.index.json`. Only
            a single tensor may exceed it. By default there is one file. Where an earlier save has
            these names, the new files are `model-00001-of-00003-2.safetensors`.
        metadata: Strings for the header. In a folder it is `{"format": "pt"}` by default, which
            Hugging Face's libraries require. A file has none by default.
        timeout: Seconds to wait for other processes, without the time in which they write.
        progress: Whether to show a progress bar with a step per leaf (needs `tqdm`).

    Raises:
        LeafError: If the format lacks the dtype of a leaf (keys, types of less than a byte), a leaf
            has no values, or JAX does not know its class.
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If two leaves would have one name, or a name is not allowed; if the files
            cannot be written, or another run is writing them; if the processes do not share the
            directory; if there is not enough host memory.
        FormatError: If `max_file_size` is not an amount of bytes, or the header exceeds 64 MiB.
        ProcessError: If the processes pass different trees, or one failed or did not arrive; if
            replicas of a small array differ, as in `gather`.
        ImportError: If `progress` is set and `tqdm` is not installed.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Warns:
        ShardingWarning: If unfinished files of a killed save at this path are removed.

    Source:
        The format and its order of tensors: github.com/huggingface/safetensors. The names of
        several files, and their index: Hugging Face's `save_pretrained`.
    """
    where = "save_safetensors"
    check_path(path, where, "save_safetensors(path, tree)")
    to, metadata = destination(file_path(path), metadata)
    # Everything that can fail is checked here on all processes, before a file is created.
    with require_agreement(where, timeout=timeout) as facts:
        most = parse_bytes(max_file_size) if isinstance(max_file_size, str) else max_file_size
        tensors = tensors_of(tree, rename, where)
        check_memory_to_write(to, tensors.values())
        rows = [Tensor(name, code_of(x.dtype) or "", x.shape) for name, x in tensors.items()]
        files = lay_out_files(to, rows, most, metadata)
        facts["the path"] = str(to)
        facts |= {file.path.name: f"{len(file.head)} bytes of header" for file in files}
        facts |= {x.name: f"{x.code}{list(x.shape)}" for x in rows}
        # Processes that hold the same array must have made it in the same call: one of them writes.
        for name, x in tensors.items():
            facts.add_origin(name, x, range(jax.process_count()))
    names = names_to_write(tensors, where, timeout)
    names_with_bar = show_progress(names, where, unit="tensor", show=progress)
    # One after another, so that host memory holds the shards of a single tensor.
    values = ((name, pieces_of(tensors[name])) for name in names_with_bar)
    write_files(to, files, values, where, timeout)


# ------------------------------------------------------------------ load


def load_safetensors(
    path: PathLike,
    like: Any = None,
    *,
    rules: Rules | None = None,
    mesh: MeshLike | None = None,
    min_size: int | None = None,
    rename: Names | None = None,
    cast: Any = None,
    partial: bool = False,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> Any:
    """Reads safetensors files directly into shards; each process reads only its own bytes.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((512, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = f"{directory}/mlp.safetensors"
        ...     save_safetensors(file, {"w": np.ones((512, 64), np.float32)})
        ...     tree = load_safetensors(file, like, rules=[("w", P("fsdp"))], mesh=mesh)
        >>> tree["w"].sharding.spec
        P('fsdp',)

    All requested tensors are compared with the stored ones before anything is read.

    Args:
        path: A file, an index, or that of `save_safetensors`. In a directory, `model.safetensors`
            is read, or else the only index, or else the only file.
        like: A `Plan`, or a tree of arrays or `jax.ShapeDtypeStruct`s, or of plans. The result has
            its structure and its other leaves. Without it, the result is a flat dict by name. The
            plan of a subtree, `plan["params"]`, reads the subtree alone, unless there is `rename`.
        rules: How to shard the arrays, by their paths (without `like`, by their names). By default
            arrays are placed like those of `like`; without `like` they stay in host memory.
        mesh: The mesh for the rules; by default the current one.
        min_size: For the rules, as in `plan`.
        rename: As in `save_safetensors`, from paths in `like` to names in the file.
        cast: A floating-point dtype to convert tensors to, where `like` requests it (or is not
            given).
        partial: Whether tensors may be missing in the file, or in `like`, where `None` and `...`
            are missing, too. What the file lacks stays as in `like`, and a `ShardingWarning` lists
            it.
        timeout: Seconds to wait for other processes, without the time in which they read.
        progress: Whether to show a progress bar with a step per tensor (needs `tqdm`).

    Returns:
        The tree. Its arrays share memory with nothing else.

    Raises:
        MismatchError: If tensors are missing, were not requested, or have another shape or dtype
            than requested; if they have 64 bits without JAX's x64 mode; if JAX does not know the
            class of a leaf of `like`.
        FormatError: If a header or the index is malformed; if `cast` is not a floating-point
            dtype.
        DamagedError: If a file is too short, or too long.
        CheckpointError: If a file is missing or cannot be read; if a directory has several; if
            `rename` gives two leaves one name; if there is not enough host memory.
        ShardingRuleError: If the rules do not decide every leaf, or a spec does not fit.
        NoMeshError: If there is no mesh for the rules.
        MeshError: If the mesh is abstract.
        ProcessError: If the processes request different trees, or one failed or did not arrive.
        ValueError: If `mesh` or `min_size` is given without `rules`, or `rename` without `like`.
        ImportError: If `progress` is set and `tqdm` is not installed.
        ShardingRuleError: Also if `like` is a `Plan` with errors, as `Plan.check_before_use`, whose
            warnings apply too.
        LeafError: If `like` has a mutable reference (`jax.Ref`).
    """
    where, source = "load_safetensors", file_path(path)
    if like is None and rename is not None:
        raise ValueError(
            f"{where}: `rename` maps the paths of `like` to names in the file, and there is no"
            " `like`. The result is a dict by name: rename its keys."
        )
    placing = Placing(rules, mesh, min_size)

    def open_request(open_files: ExitStack) -> tuple[Request, dict[str, Stored]]:
        stored = open_files.enter_context(open_tensors(source))
        request = tensor_request(stored, like, placing, rename, cast, partial, where)
        request.differences.check(str(source), partial=partial)
        return request, stored

    try:
        with breaking_if_left(), ExitStack() as open_files:
            # To load into host memory, other processes need not call.
            if like is None and rules is None:
                request, stored = open_request(open_files)
                readings = plan_readings(request, stored)
                check_memory(source, memory_to_load(readings))
                return read_tensors(request, readings, progress=progress)
            with require_agreement(where, timeout=timeout) as facts:
                request, stored = open_request(open_files)
                facts |= {"the path": str(source), "the files": tensor_facts(stored)}
                request.add_to(facts)
            readings = plan_readings(request, stored)
            # All processes of a host share its memory, and raise if one host has too little.
            too_little = functools.partial(no_memory_to_read, source)
            needed = memory_to_load(readings)
            check_memory_of_hosts(where, needed, too_little, timeout=timeout)
            with all_or_none(where, phase="read", timeout=timeout, works=True):
                return read_tensors(request, readings, progress=progress)
    except OSError as error:
        raise CheckpointError(f"{where}: {source} cannot be read: {error}.") from error


def tensor_shapes(path: PathLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Lists the tensors of safetensors files, from their headers: no data is read.

    Args:
        path: As in `load_safetensors`.

    Returns:
        Shapes and dtypes by name, ordered by file and then by offset, as `plan` takes them.

    Raises:
        CheckpointError, FormatError, DamagedError: As `load_safetensors`.

    Examples:
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_safetensors(f"{directory}/w.safetensors", {"w": np.ones((8, 4), np.float32)})
        ...     tensor_shapes(f"{directory}/w.safetensors")
        {'w': ShapeDtypeStruct(shape=(8, 4), dtype=float32)}
    """
    source = file_path(path)
    try:
        with open_tensors(source) as stored:
            tensors = [x.tensor for x in stored.values()]
    except OSError as error:
        raise CheckpointError(f"tensor_shapes: {source} cannot be read: {error}.") from error
    return {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors}


def __dir__() -> list[str]:
    return __all__

"""Saves trees to safetensors files and loads them, to exchange weights with other frameworks.

The package safetensors needs every tensor in full in the memory of one process. Here each process
writes and reads only the bytes of its own shards.
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
from treeshard._disk.untrusted import no_memory_to_read
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
    load_on_host,
    memory_to_load,
    names_to_write,
    plan_readings,
    read_tensors,
    tensor_facts,
    tensor_request,
    tensors_of,
    values_of,
)

__all__ = ["load_safetensors", "map_tensors", "save_safetensors", "tensor_shapes"]

_RENAME = "If the file has other names, pass `rename=`, a dict or a function from paths to names. "

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
    """Saves the arrays of a tree as safetensors, where each process writes its own shards.

    Examples:
        >>> mlp = {"w": shard(np.ones((8, 4), np.float32), P("fsdp"), make_mesh("fsdp=8"))}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = f"{directory}/model.safetensors"
        ...     save_safetensors(file, {"mlp": mlp}, rename=lambda path: path.replace("/", "."))
        ...     load_safetensors(file)["mlp.w"].shape
        (8, 4)

    The files have the same bytes as files of the package safetensors. Saves are atomic: after an
    error on any process, earlier files are unchanged. An array at two paths is written twice.
    Hugging Face's libraries expect tied weights once, so save the tree without the second path.

    Args:
        path: A file, such as `"model.safetensors"`, or a folder. A path without this suffix is a
            folder, and the file in it is `model.safetensors`, which `transformers` reads. Missing
            folders are created. All processes pass the same path, in a directory that they share.
        tree: Any pytree. Only arrays are written. If every process holds an array in full, the copy
            of process 0 is written.
        rename: The names of the tensors: a function of the path of a leaf, or a mapping from paths
            to names. By default, the name is the path, such as `"layers/0/weight"`.
        max_file_size: The largest size of a file, in bytes or as text such as `"5GB"`. A larger
            tree is split into files `model-00001-of-00003.safetensors` with an index
            `model.safetensors.index.json`. A single tensor may exceed the size. If an earlier save
            has these names, the new files are `model-00001-of-00003-2.safetensors`. By default
            there is one file.
        metadata: Strings for the header. The default is `{"format": "pt"}` in a folder, for Hugging
            Face's libraries, and no metadata in a file.
        timeout: Seconds to wait for other processes. Their writes may take longer, as long as they
            are alive.
        progress: Whether to show a progress bar with a step per leaf (needs `tqdm`).

    Raises:
        LeafError: If a leaf has a dtype that the format lacks, such as PRNG keys and int4, has no
            values, is a mutable reference (`jax.Ref`), or has a class that JAX does not know.
        DeletedLeafError: If a leaf was deleted or donated.
        CheckpointError: If two leaves would have the same name, or a name is not allowed. If the
            files cannot be written, or another run is writing them. If the processes do not share
            the directory. If the host has too little memory.
        FormatError: If `max_file_size` is not a number of bytes, `metadata` has other values than
            strings, or the header exceeds 64 MiB.
        ProcessError: If the processes pass different trees, or a process fails or does not arrive.
            If replicas of a small array differ, as in `gather`.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Warns:
        ShardingWarning: If unfinished files of a killed save are removed from this path.

    Source:
        The format is from github.com/huggingface/safetensors. The names of several files and their
        index are from Hugging Face's `save_pretrained`.
    """
    where = "save_safetensors"
    check_path(path, where, "save_safetensors(path, tree)")
    to, metadata = destination(file_path(path), metadata)
    # All checks run here on all processes, before a file is created.
    with require_agreement(where, timeout=timeout) as facts:
        most = parse_bytes(max_file_size) if isinstance(max_file_size, str) else max_file_size
        tensors = tensors_of(tree, rename, where)
        rows = [
            Tensor(name, code_of(x.dtype) or "", x.shape, x.nbytes) for name, x in tensors.items()
        ]
        check_memory_to_write(to, tensors, rows)
        files = lay_out_files(to, rows, most, metadata)
        everyone = range(jax.process_count())
        if len(everyone) > 1:
            facts["the path"] = str(to)
            facts |= {file.path.name: f"{len(file.head)} bytes of header" for file in files}
            facts |= {x.name: f"{x.code}{list(x.shape)}" for x in rows}
            # If several processes hold the same array, one of them writes it, so all must have made
            # it in the same call.
            for name, x in tensors.items():
                facts.add_origin(name, x, everyone)
    names = names_to_write(tensors, where, timeout)
    names_with_bar = show_progress(names, where, unit="tensor", show=progress)
    # A generator, so that host memory holds the shards of a single tensor.
    values = ((name, values_of(tensors[name])) for name in names_with_bar)
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
    """Loads safetensors files, where each process reads only its own shards.

    Examples:
        >>> like = {"w": jax.ShapeDtypeStruct((512, 64), "float32"), "act": jax.nn.relu}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = f"{directory}/mlp.safetensors"
        ...     save_safetensors(file, {"w": np.ones((512, 64), np.float32)})
        ...     tree = load_safetensors(file, like, rules=[("w", P("fsdp"))], mesh=mesh)
        >>> tree["w"].sharding.spec
        P('fsdp',)

    The requested tensors are compared with the stored ones before the first byte is read.

    Args:
        path: A file, an index, or a folder, as for `save_safetensors`. In a folder,
            `model.safetensors` is read, or `model.safetensors.index.json`, or else the only index,
            or else the only file.
        like: A `Plan`, a tree of plans, or a tree of arrays or `jax.ShapeDtypeStruct`s. The result
            has the structure and the other leaves of `like`. The plan of a subtree, such as
            `plan["params"]`, reads only this subtree if `rename` is missing. Without `like`, the
            result is a flat dict by name.
        rules: Rules to shard the arrays by their paths, or without `like` by their names. By
            default, arrays are placed like the arrays of `like`. Without `like` they stay in host
            memory.
        mesh: The mesh for the rules. The default is the current mesh.
        min_size: For the rules, as in `plan`.
        rename: As in `save_safetensors`, from paths in `like` to names in the file.
        cast: A floating-point dtype. Tensors are converted to it if `like` requests it, or if there
            is no `like`.
        partial: Whether tensors may be missing in the file or in `like`. `None` and `...` in `like`
            count as missing. Leaves that the file lacks stay as they are in `like`, and a
            `ShardingWarning` lists them.
        timeout: Seconds to wait for other processes. Their reads may take longer, as long as they
            are alive.
        progress: Whether to show a progress bar with a step per tensor (needs `tqdm`).

    Returns:
        The tree. No two of its arrays share memory.

    Raises:
        MismatchError: If tensors are missing, are not requested, or have another shape or dtype
            than requested. If tensors have 64 bits, and JAX's x64 mode is off. If JAX does not know
            the class of a leaf of `like`.
        FormatError: If a header or the index is malformed, or `cast` is not a floating-point dtype.
        DamagedError: If a file is too short or too long.
        CheckpointError: If a file is missing or cannot be read. If a folder has several candidates.
            If `rename` gives two leaves the same name. If the host has too little memory.
        ShardingRuleError: If a leaf matches no rule, or a spec does not fit its leaf. If `like` is
            a `Plan` with errors, as `Plan.check_before_use`, whose warnings apply too.
        NoMeshError: If there is no mesh for the rules.
        MeshError: If the mesh is abstract.
        LeafError: If `like` has a mutable reference (`jax.Ref`).
        ProcessError: If the processes request different trees, or a process fails or does not
            arrive.
        ValueError: If `mesh` or `min_size` is given without `rules`, or `rename` without `like`.
        ImportError: If safetensors is not installed, or if `progress` is set and `tqdm` is not
            installed.

    Source:
        github.com/huggingface/safetensors, whose `safe_open` reads slices on one process.
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
        fix = _RENAME if rename is None else ""
        request.differences.check(str(source), partial=partial, fix=fix)
        return request, stored

    try:
        with breaking_if_left(), ExitStack() as open_files:
            # A load into host memory needs no other process.
            if like is None and rules is None:
                placing.check(where)
                stored = open_files.enter_context(open_tensors(source))
                return load_on_host(source, stored, cast, progress=progress)
            with require_agreement(where, timeout=timeout) as facts:
                request, stored = open_request(open_files)
                facts |= {"the path": str(source), "the files": tensor_facts(stored)}
                request.add_to(facts)
            readings = plan_readings(request, stored)
            # The processes of a host share its memory. If one host has too little, all raise.
            too_little = functools.partial(no_memory_to_read, source)
            needed = memory_to_load(readings)
            check_memory_of_hosts(where, needed, too_little, timeout=timeout)
            with all_or_none(where, phase="read", timeout=timeout, works=True):
                return read_tensors(request, readings, progress=progress)
    except OSError as error:
        raise CheckpointError(f"{where}: {source} cannot be read: {error}.") from error


def tensor_shapes(path: PathLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads the shapes and dtypes of the tensors in safetensors files, from their headers.

    Args:
        path: As in `load_safetensors`.

    Returns:
        A dict of `jax.ShapeDtypeStruct`s by name, ordered by file and then by offset, which you can
        pass to `plan`.

    Raises:
        CheckpointError, FormatError, DamagedError, ImportError: As `load_safetensors`.

    Examples:
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_safetensors(f"{directory}/w.safetensors", {"w": np.ones((8, 4), np.float32)})
        ...     tensor_shapes(f"{directory}/w.safetensors")
        {'w': ShapeDtypeStruct(shape=(8, 4), dtype=float32)}

    Source:
        github.com/huggingface/safetensors.
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

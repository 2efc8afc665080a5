"""Gets the graph of a compiled program, and the mesh that it runs on."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves

from treeshard._core.mesh import AnyMesh, MeshLike, axis_sizes, describe_mesh
from treeshard.communication._hlo import HloProgram, Op
from treeshard.errors import FormatError, MeshError

CompiledProgram = Any  # a `jax.stages.Compiled`, or its text; `read_program` checks it

_LOWERED = (
    "a lowered program shows only the collectives that were written by hand; XLA's partitioner"
    " adds the others. Compile it: `step.lower(state, batch).compile()`."
)
_KEY = re.compile(r"""\['([^']*)'\]|\["([^"]*)"\]|\[(\d+)\]|\.(\w+)|\[<flat index (\d+)>\]""")


def read_program(
    program: CompiledProgram, mesh: MeshLike | None = None
) -> tuple[HloProgram, Mapping[str, int] | None]:
    """The graph of a program, and the axes of its mesh if they are known.

    Raises `FormatError`, `MeshError` and `TypeError` as `collectives` documents them.
    """
    if isinstance(program, jax.stages.Compiled):
        text = program.as_text() or ""
        mesh = _mesh_of(program) if mesh is None else mesh
    elif isinstance(program, str):
        text = program
    elif isinstance(program, jax.stages.Lowered):
        raise TypeError(f"collectives: {_LOWERED}")
    else:
        raise TypeError(
            f"collectives: {type(program).__name__} is not a program. Compile it first:"
            " `step.lower(state, batch).compile()`, or pass the text of one."
        )
    graph = _parse(text)
    if mesh is None:
        return graph, graph.axes
    count = math.prod(axis_sizes(mesh).values())
    if graph.devices not in (None, count):
        raise MeshError(
            f"collectives: the program runs on {graph.devices} device(s), but the mesh"
            f" ({describe_mesh(mesh)}) has {count}. Pass the mesh that it was compiled for."
        )
    return graph, axis_sizes(mesh)


def _parse(text: str) -> HloProgram:
    if not text:
        raise FormatError("collectives: the text is empty. This backend may not provide one.")
    first = re.search(r"^(?!\s*$|//|#)\s*(\w+(?:\.\w+)?)", text, re.M)
    if first is not None and first[1] in ("module", "func.func"):
        raise FormatError(f"collectives: {_LOWERED}")
    if first is None or first[1] != "HloModule":
        raise FormatError(
            "collectives: the text is not a program. HLO starts with `HloModule`; this starts with"
            f" {text.strip()[:40]!r}."
        )
    try:
        return HloProgram(text)
    except FormatError as error:
        raise FormatError(f"collectives: {error} Pass the full `as_text()`.") from error


def _mesh_of(program: jax.stages.Compiled) -> AnyMesh | None:
    """The mesh of a program's arguments and results, if they agree on one."""
    shardings = tree_leaves((program.input_shardings, program.output_shardings))
    meshes = {x.mesh for x in shardings if isinstance(x, NamedSharding)}
    sizes = {tuple(axis_sizes(mesh).items()) for mesh in meshes}
    return next(iter(meshes)) if len(sizes) == 1 else None


def argument_path(parameter: Op) -> str | None:
    """The path of a parameter of the entry: `state['layers'][0].w` is `state/layers/0/w`.

    JAX's own name if it has another form, and `None` if the text does not have it.
    """
    name = parameter.op_name
    match = None if name is None else re.match(r"\w+", name)
    if name is None or match is None:
        return name
    parts, position = [match[0]], match.end()
    while position < len(name):
        key = _KEY.match(name, position)
        if key is None:
            return name
        parts.append(next(part for part in key.groups() if part is not None))
        position = key.end()
    return "/".join(parts)

"""Gets the graph of a compiled program, and the mesh that it runs on.

The mesh comes from the program's arguments and results in JAX. The text has XLA's names of axes, or
no names, and for several slices it describes one slice.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_leaves

from treeshard._core.mesh import AnyMesh, MeshLike, axis_sizes, describe_mesh
from treeshard.communication._arguments import Argument, arguments_of
from treeshard.communication._hlo import HloProgram
from treeshard.errors import FormatError, MeshError

# The prefix of the attributes with which TPUs send data between slices.
MEGASCALE = "_xla_megascale"

CompiledProgram = Any  # a `jax.stages.Compiled`, or its text; `read_program` checks it

_LOWERED = (
    "a lowered program shows only the collectives that were written by hand; XLA's partitioner"
    " adds the others. Compile it: `step.lower(state, batch).compile()`."
)


class ReadProgram(NamedTuple):
    """A parsed program."""

    graph: HloProgram
    arguments: Sequence[Argument]
    # The mesh axes along which the devices of one slice differ, with their sizes. For devices in
    # several slices, the text describes one slice. Empty if the mesh is unknown.
    within: Mapping[str, int]
    # The axes along which slices differ, with their sizes.
    between: Mapping[str, int]
    platform: str | None  # such as `"cpu"`; `None` for a text


def read_program(program: CompiledProgram, mesh: MeshLike | None = None) -> ReadProgram:
    """Parses a program. Raises as `collectives` documents it."""
    program = _unwrap(program)
    text = _text_of(program)
    graph = _parse(text)
    arguments = arguments_of(program, graph)
    if mesh is None and isinstance(program, jax.stages.Compiled):
        mesh = _mesh_of(program)
    platform = _platform_of(program)
    if mesh is None:
        return ReadProgram(graph, arguments, {}, {}, platform)
    axes = axis_sizes(mesh)
    count = math.prod(axes.values())
    if graph.devices in (None, count):
        return ReadProgram(graph, arguments, axes, {}, platform)
    slices, rest = divmod(count, graph.devices or count)
    if rest or MEGASCALE not in text:
        raise MeshError(
            f"collectives: the program runs on {graph.devices} device(s), but the mesh"
            f" ({describe_mesh(mesh)}) has {count}. Pass the mesh that it was compiled for."
        )
    between = _slices_by_device(mesh) or _slices_outermost(axes, slices)
    within = {axis: size // between.get(axis, 1) for axis, size in axes.items()}
    return ReadProgram(graph, arguments, within, between, platform)


def _unwrap(program: CompiledProgram) -> CompiledProgram:
    """JAX's object inside the result of `Step.compile` or `eqx.filter_jit`."""
    inner = getattr(program, "compiled", None)
    return inner if isinstance(inner, jax.stages.Compiled) else program


def _text_of(program: CompiledProgram) -> str:
    if isinstance(program, jax.stages.Compiled):
        return program.as_text() or ""
    if isinstance(program, str):
        return program
    if isinstance(program, jax.stages.Lowered):
        raise TypeError(f"collectives: {_LOWERED}")
    raise TypeError(
        f"collectives: {type(program).__name__} is not a program. Compile it first:"
        " `step.lower(state, batch).compile()`, or pass the text of one."
    )


def _slices_by_device(mesh: MeshLike) -> dict[str, int]:
    """How many slices each axis spans; empty if the devices do not know their slices."""
    if not isinstance(mesh, Mesh) or not hasattr(mesh.devices.flat[0], "slice_index"):
        return {}
    numbers = np.vectorize(lambda device: device.slice_index or 0)(mesh.devices)
    between = {
        axis: np.unique(np.moveaxis(numbers, i, 0).reshape(numbers.shape[i], -1)[:, 0]).size
        for i, axis in enumerate(mesh.axis_names)
    }
    return {axis: size for axis, size in between.items() if size > 1}


def _slices_outermost(axes: Mapping[str, int], slices: int) -> dict[str, int]:
    """How many slices each axis spans, if the outermost axes span the slices."""
    between: dict[str, int] = {}
    for axis, size in axes.items():
        shared = math.gcd(size, slices)
        slices //= shared
        if shared > 1:
            between[axis] = shared
    return between


def _platform_of(program: CompiledProgram) -> str | None:
    if not isinstance(program, jax.stages.Compiled):
        return None
    shardings = tree_leaves((program.input_shardings, program.output_shardings))
    devices = (device for sharding in shardings for device in sharding.device_set)
    return next((device.platform for device in devices), None)


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

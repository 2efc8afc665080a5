"""Lists the collectives of a compiled or lowered program."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves

from treeshard._errors import FormatError, MeshError
from treeshard._hlo import HloProgram
from treeshard._mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._moved import Collective, Reader
from treeshard._program import Program
from treeshard._stablehlo import StableHloProgram


def collectives(program: Any, mesh: AnyMesh | None = None) -> list[Collective]:
    """Lists what a program moves between devices, with the tree paths of the arrays it moves.

    An op on several buffers gives one entry per buffer; only an all-to-all gives one for all,
    since its buffers are the parts of one array. What cannot be determined is `None`, never a
    guess.

    Args:
        program: A `jax.stages.Compiled`: what runs. Or a `jax.stages.Lowered`: what was traced,
            before the partitioner adds its own collectives, so only what was written by hand.
            Or the text of either, HLO or StableHLO.
        mesh: The mesh that the program runs on, to name its axes. By default it is read from
            the program's shardings; the text of HLO alone does not name axes.

    Returns:
        A `Collective` per buffer, in program order. If a program calls one function from several
        places, there is one per place.

    Raises:
        FormatError: If the text is not a program, is truncated, or contains a collective that
            cannot be parsed.
        MeshError: If the program is partitioned over another number of devices than `mesh` has.
        TypeError: If `program` is none of these, such as a function that was not compiled.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> w = jax.ShapeDtypeStruct((64, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
        >>> whole = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
        >>> [moved] = collectives(whole.lower(w).compile())
        >>> moved.kind, moved.axes, moved.bytes, moved.wire_bytes, moved.count
        ('all-gather', ('fsdp',), 2048, 1792, 1)
    """
    read, axes = read_program(program, mesh)
    return list(Reader(read, axes).all())


def read_program(
    program: Any, mesh: AnyMesh | None = None
) -> tuple[Program, Mapping[str, int] | None]:
    """The graph of a program, and the axes of its mesh if they are known."""
    found = mesh
    if isinstance(program, jax.stages.Compiled):
        text = program.as_text()
        found = mesh or _mesh_of(program)
    elif isinstance(program, jax.stages.Lowered):
        text = program.as_text(debug_info=True)
    elif isinstance(program, str):
        text = program
    else:
        raise TypeError(
            f"collectives: {type(program).__name__} is not a program. Compile it first:"
            " `step.lower(state, batch).compile()`, or pass the text of one."
        )
    if not text:
        raise FormatError("collectives: the text is empty. This backend may not provide one.")
    read = _parse(text)
    if found is None:
        return read, read.axes
    count = math.prod(axis_sizes(found).values())
    if read.devices is not None and read.devices != count:
        raise MeshError(
            f"collectives: the program runs on {read.devices} device(s), but the mesh"
            f" ({describe_mesh(found)}) has {count}. Pass the mesh that it was compiled for."
        )
    return read, axis_sizes(found)


def _parse(text: str) -> Program:
    first = re.search(r"^(?!\s*$|//|#)\s*(\w+(?:\.\w+)?)", text, re.M)
    try:
        if first is not None and first[1] == "HloModule":
            return HloProgram(text)
        if first is not None and first[1] in ("module", "func.func"):
            return StableHloProgram(text)
    except FormatError as error:
        raise FormatError(f"collectives: {error} Pass the full `as_text()`.") from error
    raise FormatError(
        f"collectives: the text is not a program. HLO starts with `HloModule` and StableHLO with"
        f" `module`; this starts with {text.strip()[:40]!r}."
    )


def _mesh_of(program: jax.stages.Compiled) -> AnyMesh | None:
    """The mesh of a program's arguments and results, if they agree on one."""
    shardings = tree_leaves((program.input_shardings, program.output_shardings))
    meshes = {x.mesh for x in shardings if isinstance(x, NamedSharding)}
    sizes = {tuple(axis_sizes(mesh).items()) for mesh in meshes}
    return next(iter(meshes)) if len(sizes) == 1 else None

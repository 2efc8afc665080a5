"""`treeshard compile`: compiles a step for devices that may be absent, and reads its program.

The function gets the mesh and makes the step, where a step as an argument would be simpler: a step
knows the devices of its mesh, and a module that is imported should not have to guess them.
"""

import argparse
import ctypes
import json
import math
import sys
from dataclasses import asdict
from typing import Any

import jax

from treeshard._cli.functions import call_function, load_function, wrong_result
from treeshard._core.make_mesh import make_mesh, simulate_devices
from treeshard._core.mesh import describe_mesh, parse_axes
from treeshard._core.text import human_bytes
from treeshard.errors import DoesNotFitError, counted
from treeshard.programs import CompiledStep, Types
from treeshard.training._step import Step

_ALL = "fsdp=-1"  # the mesh by default: all devices
_SIMULATED = 8  # CPUs, if neither a topology nor the mesh says how many
_M_ARENA_MAX = -8  # in glibc's malloc.h

# Exit codes; 2 is that of invalid input. Where the memory of a device is not known, nothing says
# that the program does not fit.
_AS_PLANNED = 0
_REFUSED = 1
_MOVES_OTHERS = 3

_EXPECTED = (
    "It gets the mesh, and must return (step, state, batch): a step of `jit_step` or"
    " `shard_map_step`, and the state and the batch that it takes, as arrays or as"
    " `jax.ShapeDtypeStruct`s: `return step, plan.structs, batch`."
)
# By `Memory.fits`.
_VERDICTS = {
    True: "It fits: {size} per device.",
    False: "It does NOT fit: {size} per device.",
    None: "It needs {size} per device; whether that fits is unknown.",
}


def run_compile(options: argparse.Namespace) -> tuple[str, int]:
    """Prints what a compiled step moves, needs and costs. Returns one of the exit codes below."""
    _share_freed_memory()  # before a compiler has threads
    mesh = mesh_for(options.mesh, options.topology)
    step, state, batch = load_step(options.function, mesh)
    try:
        compiled = _compiled(options.function, mesh, step, state, batch)
    except DoesNotFitError as error:
        return _refusal(step, error, options.json), _REFUSED
    moved = compiled.communication()
    to_text = _as_json if options.json else _as_text
    code = _code(compiled.memory().fits, not moved.unplanned, options.strict)
    types = compiled.types() if options.types else None
    return to_text(compiled, moved, types), code


def _compiled(
    text: str, mesh: jax.sharding.Mesh, step: Step, state: Any, batch: Any
) -> CompiledStep:
    devices = f"{mesh.size:,} x {mesh.devices.flat[0].device_kind} ({describe_mesh(mesh)})"
    # XLA compiles without a word, for minutes.
    print(f"compiling {text} for {devices} ...", file=sys.stderr, flush=True)
    return call_function(text, step.compile, state, batch)


def _code(fits: bool | None, is_planned: bool, strict: bool) -> int:
    """The exit code: whether it fits comes first, since what does not fit does not run."""
    if fits is False:
        return _REFUSED
    if is_planned:
        return _AS_PLANNED
    return _REFUSED if strict else _MOVES_OTHERS


def _share_freed_memory() -> None:
    """Has all threads of a compiler allocate from one arena. By default glibc gives threads arenas
    of their own, and memory that one thread has freed is of no use to the others."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl, of Alpine Linux, has none
        libc.mallopt(_M_ARENA_MAX, 1)


def mesh_for(axes: str | None, topology: str | None) -> jax.sharding.Mesh:
    """A mesh of absent devices; without a topology, of as many simulated CPUs as the axes need."""
    sizes = parse_axes(axes or _ALL)
    if topology is None:
        count = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            count = max(count, _SIMULATED)
        simulate_devices(count)
        # Else JAX would start the accelerators of this machine, and make the mesh of them.
        jax.config.update("jax_platforms", "cpu")
    return make_mesh(sizes, topology=topology)


def load_step(text: str, mesh: jax.sharding.Mesh) -> tuple[Step, Any, Any]:
    """Calls `MODULE:FUNCTION` with a mesh, for a step and structs of its state and its batch."""
    result = call_function(text, load_function(text), mesh)
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], Step):
        raise wrong_result(text, result, _EXPECTED)
    return result


# ------------------------------------------------------------------ the report


def _as_text(compiled: CompiledStep, moved: Any, types: Types | None) -> str:
    memory = compiled.memory()
    parts = [str(compiled.plan), f"communication:\n{moved}", f"memory:\n{memory}"]
    if types is not None:
        parts.append(f"{types}")
    verdict = _VERDICTS[memory.fits].format(size=human_bytes(memory.total))
    return "\n\n".join([*parts, f"{verdict} {_moves(moved)}"])


def _moves(moved: Any) -> str:
    if moved.unplanned:
        codes = dict.fromkeys(difference.code for difference in moved.unplanned)
        return f"It moves what was not planned: {', '.join(codes)}."
    others = {"activation": moved.activations, "batch sum": moved.batch_sums}
    counts = [counted(len(members), noun) for noun, members in others.items() if members]
    if counts:
        return (
            f"It moves what is planned, and {' and '.join(counts)}, of which a plan says nothing."
        )
    return "It moves what is planned."


def _as_json(compiled: CompiledStep, moved: Any, types: Types | None) -> str:
    memory = compiled.memory()
    # `asdict` has the fields of a record, and not its properties, such as the total.
    report = {
        "plan": json.loads(compiled.plan.to_json()),
        "fits": memory.fits,
        "communication": {
            "rows": [asdict(row) for row in moved.rows],
            "unplanned": list(map(_unplanned, moved.unplanned)),
            "by_compiler": list(map(_unplanned, moved.by_compiler)),
        },
        "memory": {
            "total": memory.total,
            **asdict(memory),
            "at_peak": [buffer._asdict() for buffer in memory.at_peak],
        },
    }
    if types is not None:
        report["types"] = [
            {**value._asdict(), "spec": None if value.spec is None else str(value.spec)}
            for value in types
        ]
    return json.dumps(report)


def _unplanned(difference: Any) -> dict[str, Any]:
    collectives = [asdict(collective) for collective in difference.collectives]
    return {**difference._asdict(), "collectives": collectives}


def _refusal(step: Step, error: DoesNotFitError, as_json: bool) -> str:
    if as_json:
        plan = json.loads(step.plan.to_json())
        return json.dumps({"plan": plan, "fits": False, "error": str(error)})
    return f"{step.plan}\n\nIt does NOT fit. {error}"

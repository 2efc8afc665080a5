"""`treeshard compile`: compiles a step for devices that may be absent, and reads its program.

The function gets the mesh and makes the step, where a step as an argument would be simpler: a step
knows the devices of its mesh, and a module that is imported should not have to guess them.
"""

import argparse
import ctypes
import importlib
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import jax

from treeshard._core.make_mesh import make_mesh, simulate_devices
from treeshard._core.mesh import describe_mesh, parse_axes
from treeshard._core.text import human_bytes
from treeshard.errors import DoesNotFitError, FormatError, TreeShardError, counted, did_you_mean
from treeshard.programs import CompiledStep, Memory
from treeshard.training._step import Step

_ALL = "fsdp=-1"  # the mesh by default: all devices
_SIMULATED = 8  # CPUs, if neither a topology nor the mesh says how many
_M_ARENA_MAX = -8  # in glibc's malloc.h

# Exit codes; 2 is that of invalid input. Where the memory of a device is not known, nothing says
# that the program does not fit.
_AS_PLANNED = 0
_DOES_NOT_FIT = 1
_MOVES_OTHERS = 3

# By `Memory.fits`.
_VERDICTS = {
    True: "It fits: {size} per device.",
    False: "It does NOT fit: {size} per device.",
    None: "It needs {size} per device; whether that fits is unknown.",
}


def run_compile(options: argparse.Namespace) -> tuple[str, int]:
    """Prints what a compiled step moves and needs. Returns one of the exit codes above."""
    _share_freed_memory()  # before a compiler has threads
    mesh = _mesh_for(options.mesh, options.topology)
    step, state, batch = _load_step(options.function, mesh)
    # XLA compiles without a word, for minutes.
    devices = f"{mesh.size:,} x {mesh.devices.flat[0].device_kind} ({describe_mesh(mesh)})"
    print(f"compiling {options.function} for {devices} ...", file=sys.stderr, flush=True)
    try:
        compiled = _call(options.function, step.compile, state, batch)
    except DoesNotFitError as error:
        if options.json:
            facts = {"plan": json.loads(step.plan.to_json()), "fits": False, "error": str(error)}
            return json.dumps(facts), _DOES_NOT_FIT
        return f"{step.plan}\n\nIt does NOT fit. {error}", _DOES_NOT_FIT
    memory = compiled.memory()
    code = _MOVES_OTHERS if compiled.communication().unplanned else _AS_PLANNED
    if memory.fits is False:  # what does not fit does not run, whatever it moves
        code = _DOES_NOT_FIT
    to_text = _as_json if options.json else _as_text
    return to_text(compiled, memory), code


def _share_freed_memory() -> None:
    """Has all threads of a compiler allocate from one arena. By default glibc gives threads arenas
    of their own, and memory that one thread has freed is of no use to the others."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl, of Alpine Linux, has none
        libc.mallopt(_M_ARENA_MAX, 1)


def _mesh_for(axes: str | None, topology: str | None) -> jax.sharding.Mesh:
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


# ------------------------------------------------------------------ the report


def _as_text(compiled: CompiledStep, memory: Memory) -> str:
    moved = compiled.communication()
    parts = [str(compiled.plan), f"communication:\n{moved}", f"memory:\n{memory}"]
    verdict = _VERDICTS[memory.fits].format(size=human_bytes(memory.total))
    return "\n\n".join([*parts, f"{verdict} {_what_it_moves(moved)}"])


def _what_it_moves(moved: Any) -> str:
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


def _as_json(compiled: CompiledStep, memory: Memory) -> str:
    moved = compiled.communication()
    report = {
        "plan": json.loads(compiled.plan.to_json()),
        "fits": memory.fits,
        "communication": {
            "rows": [asdict(row) for row in moved.rows],
            "unplanned": [_difference(x) for x in moved.unplanned],
            "by_compiler": [_difference(x) for x in moved.by_compiler],
        },
        # `asdict` has the fields of a record, and not its properties, such as the total.
        "memory": {
            "total": memory.total,
            **asdict(memory),
            "at_peak": [buffer._asdict() for buffer in memory.at_peak],
        },
    }
    return json.dumps(report)


def _difference(difference: Any) -> dict[str, Any]:
    collectives = [asdict(collective) for collective in difference.collectives]
    return {**difference._asdict(), "collectives": collectives}


# ------------------------------------------------------------------ the user's function

# What it raises is a mistake in the user's code, so it is told in one line with the place in that
# code, and not by a traceback through treeshard and JAX.

_FORM = (
    "{text!r} is not MODULE:FUNCTION, as in `train:make_step` for the function `make_step` in"
    " train.py.{hint}"
)
_NO_MODULE = (
    "{text}: there is no module {name!r} in {directory}, nor is one installed. Run the command in"
    " the directory that has it."
)
_EXPECTED = (
    "It gets the mesh, and must return (step, state, batch): a step of `jit_step` or"
    " `shard_map_step`, and the state and the batch that it takes, as arrays or as"
    " `jax.ShapeDtypeStruct`s: `return step, plan.structs, batch`."
)


def _load_step(text: str, mesh: jax.sharding.Mesh) -> tuple[Step, Any, Any]:
    """Calls `MODULE:FUNCTION` with a mesh, for a step and structs of its state and its batch."""
    result = _call(text, _load_function(text), mesh)
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], Step):
        return result
    shown = type(result).__name__
    if isinstance(result, tuple):
        shown = f"a tuple of {', '.join(type(x).__name__ for x in result) or 'nothing'}"
    raise FormatError(f"{text} returned {shown}. {_EXPECTED}")


def _load_function(text: str) -> Callable[..., Any]:
    """Imports `package.module:function`, also from the current directory."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", text)
    if match is None:
        file = re.fullmatch(r"(.*)\.py:(\w+)", text)  # `./shop/train.py:make_step`
        hint = f" Write {file[1].strip('./').replace('/', '.')}:{file[2]}." if file else ""
        raise FormatError(_FORM.format(text=text, hint=hint))
    module_name, name = match.groups()
    module = _import(text, module_name)
    function = getattr(module, name, None)
    if callable(function):
        return function
    names = [x for x, member in vars(module).items() if callable(member) and x[0] != "_"]
    what = "has no function" if function is None else "has something that is not a function as"
    hint = did_you_mean(name, names) or f" It has {', '.join(names[:10]) or 'none'}."
    raise FormatError(f"{text}: {module_name} {what} {name!r}.{hint}")


def _import(text: str, name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:  # a script's directory is, and not the current one
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module may raise anything
        # The module itself or a package that it is in, and not one that it imports.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            message = _NO_MODULE.format(text=text, name=error.name, directory=directory)
            raise FormatError(message) from error
        raise _failed(f"{text}: importing {name}", error) from error


def _call(text: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function `text`, or the step that it made."""
    try:
        return function(*arguments)
    except TreeShardError:
        raise
    except Exception as error:  # so may the user's function
        raise _failed(text, error) from error


def _failed(what: str, error: Exception) -> FormatError:
    frames = traceback.extract_tb(error.__traceback__)
    # Names in angle brackets, such as `<frozen importlib._bootstrap>`, are not files.
    users = [x for x in frames if not re.search(r"site-packages|/treeshard/|^<", x.filename)]
    innermost = (users or frames)[-1]
    raised = f"{type(error).__name__}: {error}"
    return FormatError(f"{what} failed at {innermost.filename}:{innermost.lineno}: {raised}")

"""Writes a lock: a file of what a step does with its leaves and communicates, for pull requests.

A lock has sums, because the text of a program changes with every edit. Numbers are compared
exactly: with a tolerance, small changes would add up unnoticed.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from difflib import unified_diff
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.mesh import describe_mesh
from treeshard._core.specs import entries
from treeshard._core.text import parse_json
from treeshard._planning.plan import Plan
from treeshard._trace.roles import Roles
from treeshard.communication._collectives import Collective, axes_text, total_bytes
from treeshard.errors import FormatError
from treeshard.programs._compiled_step import CompiledStep

_COMPUTED = "computed values"  # for communicated values that are not arguments, such as gradients


def lock_text(compiled: CompiledStep) -> str:
    """The lock of a compiled step: sorted JSON, the same in every process."""
    memory = compiled.memory()
    record = {
        "mesh": f"{describe_mesh(compiled.plan.mesh)} on {memory.device}",
        "leaves": _leaves(compiled.plan, compiled.roles),
        "batch": [_batch_leaf(x) for x in compiled.batch if has_shape(x)],
        "bytes moved": _sum_moved(compiled.communication().compiled),
        "memory": {
            "arguments": memory.arguments,
            "results": memory.results,
            "temporaries": memory.temporaries,
            "state on the host": memory.host,
        },
    }
    return _text(record)


def diff_of_locks(path: Path, text: str) -> str:
    """How a lock differs from the lock in a file; empty if they are equal.

    Raises `FormatError` if the file is not JSON.
    """
    try:
        stored = parse_json(path.read_bytes())
    except FormatError as error:
        raise FormatError(f"{path}: {error} Write it again with `update=True`.") from error
    lines = unified_diff(
        _text(stored).splitlines(), text.splitlines(), str(path), "this step", lineterm=""
    )
    return "\n".join(lines)


def write_lock(path: Path, text: str) -> None:
    """Writes a lock atomically: if the process is killed, the file keeps its old text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _text(record: Any) -> str:
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def _leaves(plan: Plan, roles: Roles) -> dict[str, str]:
    """Path -> `float32[64,8] P('fsdp',), trained, gathered`: each line of a diff is complete."""
    leaves: dict[str, str] = {}
    for leaf in plan.leaves:
        path = leaf.path
        while path in leaves:  # leaves of a tree may share a path
            path += " (again)"
        where = "" if leaf.memory is None else f" in {leaf.memory}"
        sharded = f"{array_text(leaf)} {_spec_text(leaf.given)}{where}"
        leaves[path] = f"{sharded}, {roles[leaf.path]}"
    return leaves


def _batch_leaf(x: Any) -> str | None:
    return None if x.sharding is None else f"{array_text(x)} {_spec_text(x.sharding.spec)}"


def _spec_text(spec: PartitionSpec) -> str:
    # `str(spec)` has sets of axes, whose order differs between processes.
    text = str(PartitionSpec(*entries(spec)))
    for word in ("reduced", "unreduced"):
        axes = getattr(spec, word)
        if axes:
            text += f" {word} over {', '.join(sorted(axes))}"
    return text


def _sum_moved(collectives: Iterable[Collective]) -> dict[str, int | None]:
    """The payload of a step by kind, axes and leaf; `None` if a collective's is unknown."""
    groups: dict[str, list[Collective]] = defaultdict(list)
    for moved in collectives:
        what = moved.path or _COMPUTED
        # CPUs communicate 16-bit floats as 32 bits. Without this mark, a step that stopped
        # casting to 16 bits would look the same.
        widened = " (widened)" if moved.is_widened else ""
        groups[f"{moved.kind} over {axes_text(moved.axes)}: {what}{widened}"].append(moved)
    return {name: total_bytes(group) for name, group in groups.items()}

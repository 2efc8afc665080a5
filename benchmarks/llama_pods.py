"""Compiles Llamas for pods, and writes the table of the page about pods.

    python -m benchmarks.llama_pods         # compiles, which takes minutes
    python -m benchmarks.llama_pods --page  # only the tables

It needs the compiler for TPUs (`pip install 'treeshard[tpu]'`). Reports are in llama_pods.json.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import treeshard as ts
from benchmarks.page import between_marks
from examples.compile_llama import make_llama
from treeshard.communication import Collective
from treeshard.communication._collectives import bytes_on_the_wire, total

HERE = Path(__file__).parent
RESULTS = HERE / "llama_pods.json"
PAGE = HERE.parent / "docs/guide/tpu-pods.md"


class Pod(NamedTuple):
    size: str
    topology: str
    mesh: str


PODS = [
    Pod("8b", "v5e-256", "fsdp=256"),
    Pod("8b", "v5e-256", "data=4,fsdp=64"),
    Pod("8b", "v5e-256", "fsdp=64,tensor=4"),
    Pod("70b", "v5p-1024", "fsdp=512"),
]


def program_of(pod: Pod) -> ts.programs.CompiledStep:
    mesh = ts.make_mesh(pod.mesh, topology=pod.topology, axis_types="explicit")
    step, state, batch = make_llama(mesh, size=pod.size)
    return step.compile(state, batch)


def sent_by(moved: Iterable[Collective]) -> int | None:
    """The bytes that a device sends in a step; `None` if some of them are unknown."""
    return total(
        None if x.wire_bytes is None or x.count is None else x.wire_bytes * x.count for x in moved
    )


def compile_one(pod: Pod) -> dict[str, Any]:
    """The figures of one program, per device."""
    program = program_of(pod)
    mesh = program.plan.mesh
    moved, memory = program.communication(), program.memory()
    gathers = [one for one in moved.planned if one.kind == "all-gather"]
    named = {(one.path, one.axes) for one in gathers}
    found = [one for one in moved.compiled if one.kind == "all-gather" and one.path is not None]
    assert {(one.path.removeprefix("state/"), one.axes) for one in found if one.path} == named
    wire = (
        bytes_on_the_wire(x.kind, x.total_bytes, math.prod(mesh.shape[axis] for axis in x.axes))
        for x in moved.planned
    )
    sends = sent_by(moved.compiled)
    assert sends is not None
    return {
        **pod._asdict(),
        "need": memory.total,
        "capacity": memory.capacity,
        "gathers_planned": sum(one.count for one in gathers),
        "gathers_found": total(one.count for one in found),
        "sends_planned": total(wire),
        "sends": sends,
        "findings": [one.code for one in moved.unplanned],
        "with": {name: version(name) for name in ("jax", "libtpu")},
    }


def table(results: list[dict[str, Any]]) -> str:
    """The rows, as Markdown."""
    heads = ["model", "slice, mesh", "memory of a chip", "sent: planned, compiled"]
    lines = [heads, ["---"] * len(heads)]
    for one in results:
        lines.append(
            [
                one["size"].upper(),
                f"{one['topology']}, `{one['mesh']}`",
                f"{one['need'] / 2**30:.1f} of {one['capacity'] / 2**30:.1f} GiB",
                f"{one['sends_planned'] / 2**30:.1f}, {one['sends'] / 2**30:.1f} GiB",
            ]
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def pages(results: list[dict[str, Any]]) -> dict[Path, str]:
    """The text of the page with its rows."""
    return {PAGE: between_marks(PAGE.read_text(), table(results))}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(compile_one(Pod(*sys.argv[2:]))))
        return
    if sys.argv[1:] != ["--page"]:
        results: list[dict[str, Any]] = []
        for pod in PODS:  # each in a process of its own: they take gigabytes
            print(f"== {' '.join(pod)}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.llama_pods", "--one", *pod]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for page, text in pages(json.loads(RESULTS.read_text())).items():
        page.write_text(text)


if __name__ == "__main__":
    main()

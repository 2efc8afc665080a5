"""Measures on an attached accelerator, and writes the section of the page about versions.

    python -m benchmarks.accelerators                     # prints what it measures
    python -m benchmarks.accelerators --save FILE.json
    python -m benchmarks.accelerators --page              # only the section, from accelerators.json

`make test-accelerators` runs it after the tests. Figures are absolute, and mean something only
beside the name of the card. Without an accelerator nothing is measured. Each case has a process and
a limit of its own, so that one that fails costs no other.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

# The processes of the cases come one after the other, and find the memory that they need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import peak_of
from benchmarks.page import between_marks
from examples import train_fsdp
from treeshard.training import jit_step

HERE = Path(__file__).parent
RESULTS = HERE / "accelerators.json"
PAGE = HERE.parent / "docs/versions.md"
PACKAGES = ("jax", "jaxlib", "numpy", "equinox", "optax", "orbax-checkpoint", "tensorstore")
SECONDS = {"memory 0.1B": 90, "memory 1B": 120, "dispatch": 60, "disk": 90, "gather": 60}
SHAPES = {"0.1B": (14, 768, 8), "1B": (20, 2048, 8), "tiny": (1, 32, 2)}  # layers, width, batch
_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*? ([a-z][a-z-]*)\(", re.MULTILINE)

# ------------------------------------------------------------------ memory


def transformer(mesh: jax.sharding.Mesh, size: str) -> Any:
    """The step of the demo, its plan, what makes its state, and a batch of zeros."""
    layers, width, batch = SHAPES[size]
    args = train_fsdp.parse(
        [f"--layers={layers}", f"--width={width}", f"--batch={batch}", "--time=512"]
    )
    optimizer = train_fsdp.make_optimizer(args)
    init = train_fsdp.make_init(args, optimizer)
    tokens = np.zeros((args.batch, args.time + 1), np.uint8)
    plan = ts.plan(eqx.filter_eval_shape(init, jax.random.key(0)), train_fsdp.RULES, mesh)
    step = jit_step(train_fsdp.make_train_step(optimizer), plan, batch=P("fsdp"))
    make_state = partial(ts.init_sharded, init, jax.random.key(0), rules=train_fsdp.RULES)
    return step, plan, lambda: make_state(mesh=mesh)[0], tokens


def program_of(step: Any, plan: ts.Plan, tokens: np.ndarray) -> dict[str, Any]:
    """What a compiled step needs, and the instructions of its program by kind."""
    program = step.compile(plan.structs, tokens)
    memory = program.memory()
    return {
        "planned": memory.total,
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "collectives": len(ts.communication.collectives(program.compiled)),
        "ops": dict(sorted(Counter(_OP.findall(program.text)).items())),
    }


def absent(size: str, topology: str) -> dict[str, Any]:
    """The same program, compiled by a process that sees no accelerator."""
    step, plan, _, tokens = transformer(ts.make_mesh("fsdp=1", topology=topology), size)
    return program_of(step, plan, tokens)


def memory(size: str, topology: str | None) -> dict[str, Any]:
    """The bytes that the compiler plans against those that a run needs, on one device."""
    mesh = ts.make_mesh("fsdp=1", devices=jax.devices()[:1])
    step, plan, make_state, tokens = transformer(mesh, size)
    found: dict[str, Any] = {"attached": program_of(step, plan, tokens)}
    state = jax.block_until_ready(make_state())
    found["parameters"] = sum(x.size for x in jax.tree.leaves(state.model) if hasattr(x, "size"))
    found["peak of the init"] = peak_in_use()
    for _ in range(3):
        state, loss = step(state, tokens)
        jax.block_until_ready(loss)
    found["peak"] = peak_in_use()
    if topology:
        found["topology"] = topology
        found["absent"] = run("absent", 45, size, topology, JAX_PLATFORMS="cpu")
    return found


def peak_in_use() -> int | None:
    """The most bytes so far; `None` where a device does not count them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


# ------------------------------------------------------------------ dispatch


def dispatch(counts: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Microseconds until a call returns, for trees of so many small arrays."""
    mesh = ts.make_mesh("fsdp=-1")
    found: dict[str, Any] = {}
    for count in counts:
        tree = {f"p{i:04}": np.ones(8, np.float32) for i in range(count)}
        plan = ts.plan(tree, [(".*", None)], mesh)
        step = jit_step(lambda s, b: (jax.tree.map(lambda x: x + 1, s), b), plan, batch=P())
        plus_one: Callable[[Any], Any] = lambda s: jax.tree.map(lambda x: x + 1, s)  # noqa: E731
        calls: dict[str, Callable[[Any], Any]] = {
            "jax.jit": jax.jit(plus_one, donate_argnums=0),
            "eqx.filter_jit": eqx.filter_jit(plus_one, donate="all"),
            "jit_step": lambda s, step=step: step(s, ())[0],
        }
        states = {name: ts.shard(tree, plan) for name in calls}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for round_ in range(rounds + 2):
            for name, call in calls.items():
                begin = time.perf_counter()
                states[name] = call(states[name])
                elapsed = time.perf_counter() - begin
                jax.block_until_ready(states[name])
                if round_ > 1:
                    seconds[name].append(elapsed)
        found[f"{count:,} arrays"] = {
            name: round(median(taken) * 1e6, 1) for name, taken in seconds.items()
        }
    return found


# ------------------------------------------------------------------ disk and host


def on_device(mib: int) -> dict[str, jax.Array]:
    """Random bits in 16 arrays, so that there is nothing to compress."""
    side = int(math.sqrt(mib * 2**20 / 16 / 4))
    mesh = ts.make_mesh("fsdp=-1")
    sharding = jax.sharding.NamedSharding(mesh, P("fsdp"))
    fill = jax.jit(lambda key: jax.random.normal(key, (side, side)), out_shardings=sharding)
    return jax.block_until_ready({f"w{i:02}": fill(jax.random.key(i)) for i in range(16)})


def disk(mib: int, rounds: int) -> dict[str, Any]:
    """GB/s of a save and of a restore of float32 arrays, from the page cache; Orbax beside."""
    from benchmarks.bench_checkpoint import load_by_orbax, save_by_orbax
    from treeshard.checkpoint import restore, save

    tree = on_device(mib)
    size = sum(x.nbytes for x in tree.values())
    ways: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "treeshard": (save, lambda path: restore(path, tree)),
        "Orbax": (save_by_orbax, lambda path: load_by_orbax(path, tree)),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for round_ in range(rounds + 1):
            for name, (write, read) in ways.items():
                path = Path(directory) / name
                shutil.rmtree(path, ignore_errors=True)
                for what, call in (
                    ("save", partial(write, path, tree)),
                    ("restore", partial(read, path)),
                ):
                    begin = time.perf_counter()
                    jax.block_until_ready(call())
                    if round_:
                        seconds.setdefault((what, name), []).append(time.perf_counter() - begin)
    return {"bytes": size} | {
        f"{what} by {name}, GB/s": round(size / median(taken) / 1e9, 3)
        for (what, name), taken in seconds.items()
    }


def gather(mib: int) -> dict[str, Any]:
    """Seconds of `gather`, and the most resident memory that it adds, in bytes."""
    tree = on_device(mib)
    seconds, added = peak_of(lambda: ts.gather(tree))
    size = sum(x.nbytes for x in tree.values())
    return {"bytes": size, "seconds": round(seconds, 3), "host peak": int(added * 2**20)}


# ------------------------------------------------------------------ all of it


def topology_of(kind: str) -> str | None:
    """The name for such a GPU where it is absent."""
    return next((f"{name.lower()}:1" for name in ("H100", "H200") if name in kind), None)


def measure(case: str, small: bool = False) -> dict[str, Any]:
    """The figures of a case; `small` finds out that it runs."""
    topology = None if small else topology_of(jax.devices()[0].device_kind)
    if case.startswith("memory"):
        return memory("tiny" if small else case.split()[1], topology)
    if case == "dispatch":
        return dispatch((10,), 3) if small else dispatch((10, 1_000), 200)
    if case == "disk":
        return disk(16, 1) if small else disk(4096, 2)
    return gather(16 if small else 8192)


def run(case: str, seconds: int, *args: str, **variables: str) -> dict[str, Any]:
    """What a process says about a case, or why it does not."""
    command = [sys.executable, "-m", "benchmarks.accelerators", "--case", case, *args]
    environment = os.environ | variables
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {seconds} s"}
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        return {"failed": (done.stderr.strip().splitlines() or ["it was killed"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def setting() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def section(results: dict[str, Any] | None) -> str:
    """The text of the page between its marks."""
    if results is None:
        return "treeshard has not been run on a real GPU or TPU yet.\n"
    with_ = ", ".join(f"{name} {of}" for name, of in results["with"].items())
    lines = [f"Measured on {results['count']} x {results['device']} on {results['date']}"]
    lines[0] += f", with {with_}.\n"
    lines += ["| case | figures |", "| --- | --- |"]
    for case, found in results["cases"].items():
        lines.append(f"| {case} | {', '.join(_figures(found))} |")
    return "\n".join(lines) + "\n"


def _figures(found: dict[str, Any]) -> list[str]:
    shown = []
    for name, value in found.items():
        if name == "ops":
            continue
        if isinstance(value, dict):
            shown.append(f"{name}: {'; '.join(_figures(value))}")
        elif isinstance(value, int) and name not in ("collectives", "parameters"):
            shown.append(f"{name} {value / 2**30:.2f} GiB")
        else:
            shown.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}")
    return shown


def page() -> str:
    """The page with the section of accelerators.json."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    return between_marks(PAGE.read_text(), section(results), "accelerator")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", nargs="+", help="one case, in this process")
    parser.add_argument("--save", type=Path, help="a file for the figures")
    parser.add_argument("--page", action="store_true", help="write the section of the page")
    chosen = parser.parse_args()
    if chosen.case:
        [case, *args] = chosen.case
        print(json.dumps(absent(*args) if case == "absent" else measure(case)))
        return 0
    if chosen.page:
        PAGE.write_text(page())
        return 0
    if os.environ.get("TREESHARD_ACCELERATORS") == "cpu" or jax.default_backend() == "cpu":
        print("JAX finds no accelerator: nothing is measured.")
        return 0
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "count": jax.device_count(),
        "date": date.today().isoformat(),
        "with": setting(),
        "cases": {},
    }
    for case, seconds in SECONDS.items():
        begin = time.perf_counter()
        found["cases"][case] = run(case, seconds)
        took = time.perf_counter() - begin
        print(f"{case} ({took:.0f} s): {json.dumps(found['cases'][case])}", flush=True)
        if chosen.save:  # also what was measured before a run that is stopped
            chosen.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in one for one in found["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())

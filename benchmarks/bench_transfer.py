"""Moving a tree of 1000 leaves, 1 GiB, to 8 simulated devices and back:
python -m benchmarks.bench_transfer

Cold figures are first calls, each in a fresh process.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import (
    Figure,
    Row,
    medians,
    options,
    peak_of,
    report,
    resident_mib,
    shuffled,
    trim,
)
from treeshard._placement.gather import gather, make_shard_and_gather_fns
from treeshard._placement.shard import shard

LEAVES, SHAPES, BYTES = 1000, 60, 2**30
LARGE = 16  # leaves of 2 GiB together
PEERS = ("eformer", "scalax")
Figures = dict[str, float]


def host_tree() -> dict[str, np.ndarray]:
    """Matrices of 60 shapes, up and down projections alike, of 1 GiB together."""
    shapes = [(64 * (4 + i % 10), 128 * (1 + i % 12)) for i in range(SHAPES)]
    size = sum(4 * rows * cols for rows, cols in shapes) * LEAVES / SHAPES
    rows_more = BYTES / size
    tree = {}
    for i in range(LEAVES):
        rows, cols = shapes[i % SHAPES]
        shape = (8 * round(rows * rows_more / 8), cols)
        tree[f"{i:04}"] = np.full(shape if i % 2 else shape[::-1], i, np.float32)
    return tree


def large_tree() -> dict[str, np.ndarray]:
    """Few leaves, 2 GiB together."""
    side = int((2**31 / LARGE / 4) ** 0.5)
    return {f"{i:04}": np.full((side, side + 8 * (i % 2)), i, np.float32) for i in range(LARGE)}


def specs_of(tree: dict[str, Any]) -> dict[str, P]:
    """FSDP: the largest dim is sharded, the last one if they are equal."""
    return {
        key: P("fsdp") if x.shape[0] > x.shape[1] else P(None, "fsdp") for key, x in tree.items()
    }


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def apply(fns: Any, tree: Any) -> Any:
    return jax.tree.map(lambda f, x: f(x), fns, tree)


# ------------------------------------------------------------------ each in a fresh process


def cold_put(mesh: jax.sharding.Mesh, make: Callable[[], Any] = host_tree) -> Figures:
    tree = make()
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs_of(tree).items()}
    return {"shard": seconds(lambda: jax.device_put(tree, shardings))[0]}


def cold_shard(mesh: jax.sharding.Mesh, make: Callable[[], Any] = host_tree) -> Figures:
    tree = make()
    specs = specs_of(tree)
    return {"shard": seconds(lambda: shard(tree, specs, mesh))[0]}


def warm(mesh: jax.sharding.Mesh) -> Figures:
    tree = host_tree()
    specs = specs_of(tree)
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    calls = {
        "put": lambda: jax.block_until_ready(jax.device_put(tree, shardings)),
        "shard": lambda: jax.block_until_ready(shard(tree, specs, mesh)),
    }
    found = medians(calls, options().rounds)
    found |= warm_small(mesh)
    placed = shard(tree, specs, mesh)
    calls = {
        "copy": lambda: [np.copy(x) for x in tree.values()],
        "gather": lambda: gather(placed),
        # It keeps its copy on the arrays, so each call gets new handles.
        "device_get": lambda: jax.device_get(jax.tree.map(second_handle, placed)),
    }
    return found | medians(calls, options().rounds)


def warm_small(mesh: jax.sharding.Mesh) -> Figures:
    """The time of leaves of 16 KiB is spent in Python."""
    tree = {f"{i:04}": np.full((64, 64), i, np.float32) for i in range(LEAVES)}
    specs = {key: P("fsdp") for key in tree}
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    shard_fns, _ = make_shard_and_gather_fns(specs, mesh)
    calls: dict[str, Callable[[], Any]] = {
        "small: put": lambda: jax.device_put(tree, shardings),
        "small: shard": lambda: shard(tree, specs, mesh),
        "small: put each": lambda: jax.tree.map(jax.device_put, tree, shardings),
        "small: functions": lambda: apply(shard_fns, tree),
    }
    ready = {name: lambda call=call: jax.block_until_ready(call()) for name, call in calls.items()}
    return medians(ready, options().rounds)


def second_handle(x: jax.Array) -> jax.Array:
    pieces = [piece.data for piece in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def cold_functions(mesh: jax.sharding.Mesh) -> Figures:
    return _mapped(lambda tree: make_shard_and_gather_fns(specs_of(tree), mesh), again=True)


def cold_eformer(mesh: jax.sharding.Mesh) -> Figures:
    from eformer.escale import make_shard_and_gather_fns as make

    return _mapped(lambda tree: make(specs_of(tree), mesh))


def cold_scalax(mesh: jax.sharding.Mesh) -> Figures:
    from scalax.sharding import MeshShardingHelper

    helper = MeshShardingHelper([8], ["fsdp"])
    return _mapped(lambda tree: helper.make_shard_and_gather_fns(tree, specs_of(tree)))


def _mapped(make: Callable[[Any], tuple[Any, Any]], again: bool = False) -> Figures:
    """The seconds of a first pass; with `again`, also of a second, which takes peers minutes."""
    # eformer leaves numpy arrays where they are, so all start on a device.
    tree = jax.block_until_ready(jax.device_put(host_tree()))
    start = time.perf_counter()
    shard_fns, gather_fns = make(tree)
    placed = jax.block_until_ready(apply(shard_fns, tree))
    middle = time.perf_counter()
    apply(gather_fns, placed)
    assert len(placed["0000"].sharding.device_set) == 8
    end = time.perf_counter()
    found = {"shard": middle - start, "gather": end - middle}
    if again:
        placed = jax.block_until_ready(apply(shard_fns, tree))
        apply(gather_fns, placed)
        found["second pass"] = time.perf_counter() - end
    return found


def compiles(mesh: jax.sharding.Mesh) -> Figures:
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    tree = [np.zeros((8, n + 1), np.float32) for n in range(100)]
    here = jax.device_put(tree, jax.devices()[0])
    jax.monitoring.register_event_duration_secs_listener(listen)
    shard(here, P("fsdp"), mesh)
    ours = len(seen)
    jax.device_put(here, NamedSharding(mesh, P("fsdp")))
    return {"ours": ours, "device_put": len(seen) - ours}


def memory(mesh: jax.sharding.Mesh) -> Figures:
    return _memory_of(mesh, gather)


def memory_of_device_get(mesh: jax.sharding.Mesh) -> Figures:
    return _memory_of(mesh, jax.device_get)


def _memory_of(mesh: jax.sharding.Mesh, read: Callable[[Any], Any]) -> Figures:
    tree = host_tree()
    placed = jax.block_until_ready(shard(tree, specs_of(tree), mesh))
    size = sum(x.nbytes for x in tree.values())
    del tree
    read(placed["0000"])
    trim()
    before = resident_mib()
    _, peak = peak_of(lambda: read(placed))
    trim()
    held = resident_mib() - before
    return {"peak": peak * 2**20 / size, "held": held * 2**20 / size}


# ------------------------------------------------------------------ the table


CASES: dict[str, Callable[[jax.sharding.Mesh], Figures]] = {
    "put": cold_put,
    "shard": cold_shard,
    "put_large": lambda mesh: cold_put(mesh, large_tree),
    "shard_large": lambda mesh: cold_shard(mesh, large_tree),
    "warm": warm,
    "functions": cold_functions,
    "eformer": cold_eformer,
    "scalax": cold_scalax,
    "compiles": compiles,
    "memory": memory,
    "memory_of_device_get": memory_of_device_get,
}


def run(case: str, rounds: int) -> dict[str, Figure]:
    command = [sys.executable, "-m", "benchmarks.bench_transfer", "--case", case]
    done = subprocess.run(
        [*command, "--rounds", str(rounds)],
        capture_output=True,
        text=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        raise RuntimeError(f"the case {case} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Figure(samples) for name, samples in found.items()}


def run_in_turn(cases: Sequence[str], rounds: int) -> dict[str, dict[str, Figure]]:
    """Cases that are measured once in a fresh process each, round by round."""
    found: dict[str, dict[str, list[float]]] = {case: {} for case in cases}
    for round_ in range(rounds):
        for case in shuffled(cases, round_):
            for name, figure in run(case, 1).items():
                found[case].setdefault(name, []).append(figure)
    return {
        case: {name: Figure(samples) for name, samples in figures.items()}
        for case, figures in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, help="one case, in this very process, as JSON")
    chosen = options(parser)
    if chosen.case:
        ts.simulate_devices(8)
        found = CASES[chosen.case](ts.make_mesh("fsdp=8"))
        print(json.dumps({name: getattr(one, "samples", (one,)) for name, one in found.items()}))
        return
    report(f"Moving {LEAVES} leaves, 1 GiB", rows(chosen.rounds), ("jax", "numpy", *PEERS))


def rows(rounds: int) -> list[Row]:
    hot, compiled = run("warm", min(rounds, 7)), run("compiles", 1)
    cold = run_in_turn(("put", "shard", "put_large", "shard_large"), min(rounds, 5))
    memories = run_in_turn(("memory", "memory_of_device_get"), 1)
    ours, theirs = memories["memory"], memories["memory_of_device_get"]
    return [
        Row(
            "shard, numpy tree, cold, x one device_put",
            cold["shard"]["shard"] / cold["put"]["shard"],
            "<= 1.15",
        ),
        Row(
            f"shard, {LARGE} leaves of 2 GiB, cold, x one device_put",
            cold["shard_large"]["shard"] / cold["put_large"]["shard"],
            "<= 1.1",
        ),
        Row("shard, numpy tree, warm, x one device_put", hot["shard"] / hot["put"], "<= 1.15"),
        Row(
            f"shard, {LEAVES} numpy leaves of 16 KiB, warm, x one device_put",
            hot["small: shard"] / hot["small: put"],
            "<= 1.05",
            {"device_put (ms)": hot["small: put"] * 1e3},
        ),
        Row(
            f"shard functions, {LEAVES} numpy leaves of 16 KiB, warm, x device_put of each",
            hot["small: functions"] / hot["small: put each"],
            "<= 1.2",
            {"device_put of each (ms)": hot["small: put each"] * 1e3},
        ),
        *_peer_rows(1),
        Row(
            "compiles to shard 100 shapes from one device",
            compiled["ours"].samples[0],
            "<= 1",
            {"jax.device_put": compiled["device_put"].samples[0]},
        ),
        Row(
            "gather, peak, x tree bytes",
            ours["peak"],
            "<= 1.05",
            {"jax.device_get": theirs["peak"]},
        ),
        Row(
            "gather, held when freed, x tree bytes",
            ours["held"],
            "<= 0.02",
            {"jax.device_get": theirs["held"]},
        ),
        Row(
            "gather, warm, x np.copy",
            hot["gather"] / hot["copy"],
            "<= 1.6",
            {"jax.device_get": hot["device_get"] / hot["copy"]},
        ),
    ]


def _peer_rows(rounds: int) -> list[Row]:
    there = [name for name in PEERS if importlib.util.find_spec(name)]
    found = run_in_turn(("functions", *there), rounds)
    for figures in found.values():
        figures["both"] = figures["shard"] + figures["gather"]
    parts = {name: f"{name}, cold" for name in ("shard", "gather", "both")}
    made = [
        Row(
            f"make_shard_and_gather_fns, {case}, s",
            found["functions"][name],
            "",
            {peer: found[peer][name] for peer in there if name in found[peer]},
        )
        for name, case in (parts | {"second pass": "both, second pass"}).items()
    ]
    if there:
        faster = {peer: found[peer]["both"] / found["functions"]["both"] for peer in there}
        case = "make_shard_and_gather_fns, both, cold, times faster than the best peer"
        made.append(Row(case, min(faster.values()), ">= 15", faster))
    return made


if __name__ == "__main__":
    main()

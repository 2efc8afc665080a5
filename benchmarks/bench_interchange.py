"""A tree of 512 MiB to one safetensors file and back, 2 x 4 simulated devices on this machine:
python -m benchmarks.bench_interchange

The ways are interleaved in one pair of processes, in another order each round. Ours has the file on
disk when it returns, so that `save_file` is followed by `fsync`; without it, it leaves that to the
system. Peaks are of resident memory above what was there before.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import treeshard as ts
from benchmarks._harness import Figure, Row, options, peak_of, report, shuffled
from benchmarks._processes import as_one_of_two, as_two
from treeshard._core.processes import exchange
from treeshard.interchange import load_safetensors, save_safetensors

Samples = dict[str, list[float]]


def placed_tree(mesh: Mesh) -> tuple[dict[str, jax.Array], dict[str, P]]:
    """512 MiB as FSDP: half of it on the last dim, where a shard is many short runs."""
    tree = {f"{i:02}": jax.ShapeDtypeStruct((4096, 4096), "float32") for i in range(8)}
    specs = {name: P("fsdp") if i % 2 else P(None, "fsdp") for i, name in enumerate(tree)}

    def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
        return np.random.default_rng(int(path)).random(
            [i.stop - i.start for i in index], np.float32
        )

    return jax.block_until_ready(ts.shard(tree, specs, mesh, read=read)), specs


# ------------------------------------------------------------------ what each process does


def ways(mesh: Mesh, directory: Path) -> dict[str, Callable[[], Any]]:
    tree, specs = placed_tree(mesh)
    ours, theirs = directory / "ours.safetensors", directory / "theirs.safetensors"
    first = jax.process_index() == 0

    def by_file(gather: Callable[[], Any], sync: bool) -> None:
        whole = gather()
        if first:
            save_file(whole, theirs)
        if first and sync:
            with theirs.open("rb") as file:
                os.fsync(file)

    gathers = {
        "process_allgather": lambda: multihost_utils.process_allgather(tree, tiled=True),
        "gather": lambda: ts.gather(tree, to=0),
    }

    def by_whole_file() -> Any:
        return jax.block_until_ready(ts.shard(load_file(ours), specs, mesh))

    return {
        "save": lambda: save_safetensors(ours, tree),
        **{f"{n}, save_file and fsync": partial(by_file, g, True) for n, g in gathers.items()},
        **{f"{n} and save_file": partial(by_file, g, False) for n, g in gathers.items()},
        "load": lambda: jax.block_until_ready(load_safetensors(ours, tree)),
        "load_file and shard": by_whole_file,
    }


def measured(directory: Path, rounds: int) -> Samples:
    """Seconds of each way until both processes are done, and the peaks in MiB."""
    found: Samples = {}
    calls = ways(ts.make_mesh("fsdp=8"), directory)
    calls["save"]()  # what the others load
    for round_ in range(rounds + 1):
        for name in shuffled(calls, round_):
            for file in directory.glob("theirs*"):
                file.unlink(missing_ok=True)
            os.sync()  # what the last one left to the system
            exchange("bench", b"")
            begin = time.perf_counter()
            _, peak = peak_of(calls[name])
            exchange("bench", b"")
            if round_:
                found.setdefault(name, []).append(time.perf_counter() - begin)
                found.setdefault(f"{name}, peak", []).append(peak)
    assert (directory / "ours.safetensors").stat().st_size > 2**29
    return found


# ------------------------------------------------------------------ the table


def rows(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as there:
        asked = (f"--rounds={rounds}", f"--directory={there}")
        first, second = as_two("benchmarks.bench_interchange", *asked)
    seconds = {name: Figure(found) for name, found in first.items() if "peak" not in name}
    peaks = {name: Figure(map(max, first[name], second[name])) for name in first if "peak" in name}
    usual = [name for name in seconds if "save_file" in name]
    return [
        *(
            Row(
                f"save, times faster than {name}",
                seconds[name] / seconds["save"],
                ">= 2",
            )
            for name in usual
            if "fsync" in name
        ),
        Row("save, s", seconds["save"], "", {name: seconds[name] for name in usual}),
        Row(
            "save, extra memory of a process, MiB",
            peaks["save, peak"],
            "<= 96",
            {name: peaks[f"{name}, peak"] for name in usual},
        ),
        Row(
            "load, times faster than load_file and shard",
            seconds["load_file and shard"] / seconds["load"],
        ),
        Row(
            "load, memory of a process, MiB (its shards have 256)",
            peaks["load, peak"],
            "<= 512",
            {"load_file and shard": peaks["load_file and shard, peak"]},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", help="run as one of the two processes")
    parser.add_argument("--index", type=int)
    parser.add_argument("--directory", type=Path)
    chosen = options(parser)
    if chosen.port:
        where = chosen.directory
        as_one_of_two(chosen.port, chosen.index, lambda: measured(where, chosen.rounds))
        return
    title = "512 MiB as safetensors, 2 processes x 4 devices"
    report(title, rows(min(chosen.rounds, 7)), ("jax", "numpy", "safetensors"))


if __name__ == "__main__":
    main()

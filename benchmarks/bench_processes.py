"""Moving trees among 2 processes of 4 simulated devices on this machine:
python -m benchmarks.bench_processes

Each figure is of fresh processes. Peaks are of resident memory above what was there before, and
count what JAX takes when it first compiles and connects.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Figure, Row, medians, options, peak_of, report, shuffled
from benchmarks._processes import as_one_of_two, as_two

_MODULE = "benchmarks.bench_processes"
LARGEST = 64  # MiB
SHARD = LARGEST // 8


def tree_of_a_gib(mesh: Mesh) -> dict[str, jax.Array]:
    """FSDP on either dim; large leaves and small ones. It is whole nowhere."""
    large = {f"large/{i:02}": (8192, 2048) if i % 2 else (2048, 8192) for i in range(12)}
    small = {f"small/{i:02}": (1024, 1024) for i in range(64)}
    structs = {name: jax.ShapeDtypeStruct(n, "float32") for name, n in (large | small).items()}
    specs = {name: P("fsdp") if x.shape[0] >= x.shape[1] else P(None, "fsdp")
             for name, x in structs.items()}  # fmt: skip

    def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
        return np.full([i.stop - i.start for i in index], index[0].start, np.float32)

    return jax.block_until_ready(ts.shard(structs, specs, mesh, read=read))


def tree_on_the_host() -> tuple[dict[str, np.ndarray], dict[str, P]]:
    """512 MiB, in memory already."""
    tree = {f"{i}": np.full((2048, 8192), i, np.float32) for i in range(8)}
    return tree, {name: P("fsdp") if i % 2 else P(None, "fsdp") for i, name in enumerate(tree)}


# ------------------------------------------------------------------ what each process does


def gather(mesh: Mesh) -> Callable[[], Any]:
    tree = tree_of_a_gib(mesh)
    return lambda: ts.gather(tree, to=0)


def iter_gather(mesh: Mesh) -> Callable[[], Any]:
    tree = tree_of_a_gib(mesh)

    def go_through() -> None:
        for _, x in ts.iter_gather(tree, to=0):
            del x

    return go_through


def gather_to_all(mesh: Mesh) -> Callable[[], Any]:
    tree = tree_of_a_gib(mesh)
    return lambda: ts.gather(tree)


def process_allgather(mesh: Mesh) -> Callable[[], Any]:
    tree = tree_of_a_gib(mesh)
    return lambda: multihost_utils.process_allgather(tree, tiled=True)


def shard(mesh: Mesh) -> Callable[[], Any]:
    tree, specs = tree_on_the_host()
    return lambda: ts.shard(tree, specs, mesh)


def device_put(mesh: Mesh) -> Callable[[], Any]:
    tree, specs = tree_on_the_host()
    into = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return lambda: jax.device_put(tree, into)


def from_callback(mesh: Mesh) -> Callable[[], Any]:
    """As `shard` of trees that the processes have alike; `device_put` also compares them."""
    tree, specs = tree_on_the_host()

    def place() -> Any:
        return {
            name: jax.make_array_from_callback(
                x.shape, NamedSharding(mesh, specs[name]), x.__getitem__
            )
            for name, x in tree.items()
        }

    return place


def join_batches(rounds: int, mesh: Mesh) -> dict[str, list[float]]:
    """The seconds of joining a batch of eight leaves, by `from_process_local` and by JAX."""
    part = {f"{i}": np.full((64, 256), i, np.float32) for i in range(8)}
    rows = NamedSharding(mesh, P("fsdp"))
    calls: dict[str, Callable[[], Any]] = {
        "jax": lambda: {
            name: jax.make_array_from_process_local_data(rows, x) for name, x in part.items()
        },
        "treeshard": lambda: ts.from_process_local(part, P("fsdp"), mesh),
    }
    found = medians({n: lambda f=f: jax.block_until_ready(f()) for n, f in calls.items()}, rounds)
    return {name: list(figure.samples) for name, figure in found.items()}


WAYS = (gather, iter_gather, gather_to_all, process_allgather, shard, device_put, from_callback)
CASES = {f.__name__: f for f in WAYS}


# ------------------------------------------------------------------ the table


def rows(rounds: int) -> list[Row]:
    found: dict[str, list[Any]] = {case: [] for case in CASES}
    for round_ in range(rounds):
        for case in shuffled(CASES, round_):
            found[case].append(as_two(_MODULE, f"--case={case}"))
    joined = {name: Figure(x) for name, x in as_two(_MODULE, "--batches")[0].items()}
    seconds = {case: Figure(one[0][0] for one in of) for case, of in found.items()}
    peaks = [{case: Figure(one[i][1] for one in of) for case, of in found.items()} for i in (0, 1)]
    less = zip(peaks[0]["device_put"].samples, peaks[0]["shard"].samples, strict=True)
    whole = "process_allgather"
    return [
        Row(
            "from_process_local, 8 leaves of 64 KiB, x JAX's function for each leaf",
            joined["treeshard"] / joined["jax"],
            "<= 1.1",
            {"jax.make_array_from_process_local_data (us)": joined["jax"] * 1e6},
        ),
        Row(
            "gather 1 GiB to process 0, peak on 1, MiB",
            peaks[1]["gather"],
            f"<= {2 * SHARD + 32}",
            {whole: peaks[1][whole]},
        ),
        Row(
            "gather 1 GiB to process 0, peak on 0, MiB",
            peaks[0]["gather"],
            f"<= {1024 + 256}",
            {whole: peaks[0][whole]},
        ),
        Row("gather 1 GiB to all, x process_allgather", seconds["gather_to_all"] / seconds[whole]),
        Row("gather 1 GiB to process 0, x process_allgather", seconds["gather"] / seconds[whole]),
        Row(
            "iter_gather 1 GiB to process 0, peak on 0, MiB",
            peaks[0]["iter_gather"],
            f"<= {2 * LARGEST + 128}",
            {whole: peaks[0][whole]},
        ),
        Row(
            "shard 512 MiB from the host, x make_array_from_callback",
            seconds["shard"] / seconds["from_callback"],
        ),
        Row(
            "shard 512 MiB from the host, times faster than device_put, which compares values too",
            seconds["device_put"] / seconds["shard"],
            ">= 5",
        ),
        Row(
            "shard 512 MiB from the host, peak less than device_put's by, MiB",
            Figure(theirs - ours for theirs, ours in less),
            ">= 400",
            {case: peaks[0][case] for case in ("shard", "device_put", "from_callback")},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, help="what to measure as one of two processes")
    parser.add_argument("--batches", action="store_true", help="join batches, as one of two")
    parser.add_argument("--port")
    parser.add_argument("--index", type=int)
    chosen = options(parser)
    if chosen.case:
        case = CASES[chosen.case]
        as_one_of_two(chosen.port, chosen.index, lambda: peak_of(case(ts.make_mesh("fsdp=8"))))
        return
    if chosen.batches:
        as_one_of_two(chosen.port, chosen.index, lambda: join_batches(200, ts.make_mesh("fsdp=8")))
        return
    report("Moving trees, 2 processes x 4 devices", rows(min(chosen.rounds, 5)))


if __name__ == "__main__":
    main()

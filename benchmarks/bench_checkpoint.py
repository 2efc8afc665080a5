"""A tree of 512 MiB to a checkpoint and back, 2 x 4 simulated devices on this machine:
python -m benchmarks.bench_checkpoint

Ours and Orbax alone, with the same settings, are interleaved in one pair of processes. Ours ends
with everything on disk, Orbax with the arrays. Peaks are of fresh processes, resident memory above
what was there before. Trees of many leaves have 512 bytes a leaf, sharded over all devices.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Figure, Row, options, peak_of, report, shuffled
from benchmarks._processes import as_one_of_two, as_two
from treeshard._core.processes import exchange
from treeshard.checkpoint import restore, save

LEAVES, MIB = 32, 512
MANY = (4_000, 20_000)
Samples = dict[str, list[float]]


def described(other: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """The tree as FSDP, half of it on the last dim; or the same as data x tensor."""
    side = int((MIB * 2**20 / LEAVES / 4) ** 0.5)
    fsdp, both = ts.make_mesh("fsdp=8"), ts.make_mesh("data=2,tensor=4")
    tree = {}
    for i in range(LEAVES):
        usual = NamedSharding(fsdp, P("fsdp") if i % 2 else P(None, "fsdp"))
        sharding = NamedSharding(both, P("tensor", "data")) if other else usual
        tree[f"{i:02}"] = jax.ShapeDtypeStruct((side, side), "float32", sharding=sharding)
    return tree


def placed_tree() -> dict[str, jax.Array]:
    """Random numbers, so that there is nothing to compress."""

    def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
        seed = np.random.default_rng([int(path), index[0].start, index[1].start])
        return seed.standard_normal([i.stop - i.start for i in index], np.float32)

    tree = described()
    placed = ts.shard(tree, {name: x.sharding for name, x in tree.items()}, read=read)
    return jax.block_until_ready(placed)


def many_leaves(count: int) -> dict[str, jax.Array]:
    values = {f"layers/{i}/bias": np.full((16, 8), i, np.float32) for i in range(count)}
    return jax.block_until_ready(ts.shard(values, P("fsdp"), ts.make_mesh("fsdp=8")))


# ------------------------------------------------------------------ the ways


def by_orbax() -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def save_by_orbax(path: Path, tree: Any) -> None:
    with by_orbax():
        ocp.save_checkpointables(path, {"state": tree})


def load_by_orbax(path: Path, like: Any) -> Any:
    with by_orbax():
        return jax.block_until_ready(ocp.load(path, like, checkpointable_name="state"))


def raw(path: Path, tree: Any) -> None:
    """The shards of this process, one after the other, into one file that is then on disk."""
    path.mkdir(exist_ok=True)
    with open(path / f"{jax.process_index()}", "wb") as file:
        for x in tree.values():
            for piece in x.addressable_shards:
                file.write(np.ascontiguousarray(piece.data))
        file.flush()
        os.fsync(file.fileno())


def savings(where: Path, tree: Any) -> dict[str, Callable[[], Any]]:
    return {
        "raw": lambda: raw(where / "raw", tree),
        "orbax": lambda: save_by_orbax(where / "orbax", tree),
        "save unflushed": lambda: unflushed(where / "unflushed", tree),
        "save": lambda: save(where / "ours", tree),
    }


def restorings(where: Path, like: Any, name: str) -> dict[str, Callable[[], Any]]:
    return {
        f"orbax, {name}": lambda: load_by_orbax(where / "orbax", like),
        f"restore, {name}": lambda: restore(where / "ours", like),
    }


def unflushed(path: Path, tree: Any) -> None:
    """A save that power loss may damage."""
    os.fsync, fsync = lambda handle: None, os.fsync
    try:
        save(path, tree)
    finally:
        os.fsync = fsync


# ------------------------------------------------------------------ what each process does


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int, before: Any) -> Samples:
    """The seconds of each call, until both processes are done, after a round to warm up.

    Each round has its own order, since what one call leaves behind weighs on the next.
    """
    found: Samples = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name in shuffled(calls, round_):
            before(name)
            exchange("ready", b"", timeout=600)
            begin = time.perf_counter()
            result = calls[name]()
            exchange("done", b"", timeout=600)
            if round_:
                found[name].append(time.perf_counter() - begin)
            del result
    return found


def timed(where: Path, rounds: int) -> Samples:
    tree = placed_tree()
    written = {"raw": "raw", "orbax": "orbax", "save unflushed": "unflushed", "save": "ours"}
    found = interleaved(savings(where, tree), rounds, lambda name: remove(where / written[name]))
    for name, other in (("same", False), ("other", True)):
        calls = restorings(where, described(other), name)
        found |= interleaved(calls, 2 * rounds, lambda name: None)  # what is short is noisy
    return found


def remove(path: Path) -> None:
    if jax.process_index() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()  # nothing of the last one is still on its way


def timed_many(where: Path, rounds: int) -> Samples:
    found: Samples = {}
    for count in MANY:
        tree = many_leaves(count)
        ours, other = where / f"{count}", where / f"orbax-{count}"
        saves = {f"save {count}": lambda tree=tree, ours=ours: save(ours, tree)}
        loads = {f"restore {count}": lambda tree=tree, ours=ours: restore(ours, tree)}
        if count == MANY[0]:  # more would take minutes
            saves["save by Orbax"] = lambda tree=tree, other=other: save_by_orbax(other, tree)
            loads["restore by Orbax"] = lambda tree=tree, other=other: load_by_orbax(other, tree)
        found |= interleaved(
            saves,
            min(rounds, 3),
            lambda name, ours=ours, other=other: remove(other if "Orbax" in name else ours),
        )
        found |= interleaved(loads, min(rounds, 3), lambda name: None)
    return found


def restored(where: Path, other: bool) -> Samples:
    like = described(other)
    _, peak = peak_of(lambda: restore(where / "ours", like))
    return {"peak": [peak]}


CASES: dict[str, Callable[[Path, int], Samples]] = {
    "timed": timed,
    "many": timed_many,
    "same": lambda where, rounds: restored(where, False),
    "other": lambda where, rounds: restored(where, True),
}


# ------------------------------------------------------------------ the table


def rows(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as where:

        def run(case: str) -> list[Samples]:
            given = (f"--case={case}", f"--directory={where}", f"--rounds={rounds}")
            return as_two("benchmarks.bench_checkpoint", *given)

        seconds = {name: Figure(found) for name, found in run("timed")[0].items()}
        seconds |= {name: Figure(found) for name, found in run("many")[0].items()}
        peaks = {}
        for name in ("same", "other"):
            first, second = run(name)
            peaks[name] = max(first["peak"][0], second["peak"][0])

    def over(name: str, floor: str) -> Figure:
        return seconds[name] / seconds[floor]

    made = [
        Row(
            "save, x Orbax",
            over("save", "orbax"),
            "<= 1.2",
            {
                "x raw write and fsync": over("save", "raw"),
                "without flushing": over("save unflushed", "orbax"),
            },
        ),
    ]
    for name in ("same", "other"):
        layout = f"to {'the same' if name == 'same' else 'another'} layout"
        made += [
            Row(
                f"restore {layout}, x Orbax",
                over(f"restore, {name}", f"orbax, {name}"),
                "<= 1.05",
            ),
            Row(f"restore {layout}, peak of a process, x its shards",
                peaks[name] / (MIB / 2), "<= 2"),
        ]  # fmt: skip
    for count in MANY:
        for what in ("save", "restore"):
            by_orbax_ = {"Orbax": seconds[f"{what} by Orbax"]} if count == MANY[0] else {}
            reach = "<= 30" if count == MANY[1] else "<= 6"
            made.append(
                Row(f"{what} {count:,} leaves, s", seconds[f"{what} {count}"], reach, by_orbax_)
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, help="one case, as one of the two processes")
    parser.add_argument("--port")
    parser.add_argument("--index", type=int)
    parser.add_argument("--directory", type=Path)
    chosen = options(parser)
    if chosen.case:
        case = CASES[chosen.case]
        as_one_of_two(chosen.port, chosen.index, lambda: case(chosen.directory, chosen.rounds))
        return
    title = f"{MIB} MiB as a checkpoint, 2 processes x 4 devices"
    report(title, rows(min(chosen.rounds, 16)), ("jax", "numpy", "orbax-checkpoint"))


if __name__ == "__main__":
    main()

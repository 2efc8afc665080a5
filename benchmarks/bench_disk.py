"""Checkpoints and safetensors files of one process, beside the formats' own libraries:
python -m benchmarks.bench_disk

Arrays of checkpoints are sharded over eight simulated devices; `save_file` and `save_safetensors`
get numpy arrays. The ways are interleaved. Each way that writes ends with its files on disk: the
files of Orbax and safetensors are flushed after they are written.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import treeshard as ts
from benchmarks._harness import Figure, Row, options, report
from benchmarks.bench_checkpoint import interleaved, many_leaves, raw, save_by_orbax
from treeshard.checkpoint import restore, save, verify
from treeshard.interchange import load_safetensors, save_safetensors

LEAF = 16  # MiB
FEW, MANY = 1_000, 100_000
PACKAGES = ("jax", "numpy", "orbax-checkpoint", "safetensors")
Calls = dict[str, Callable[[], Any]]


def tree_of(mib: int) -> dict[str, jax.Array]:
    """Random numbers in leaves of 16 MiB, sharded over all devices."""
    numbers = np.random.default_rng(0)
    shape = (LEAF * 256, 1024)
    tree = {f"{i:03}": numbers.standard_normal(shape, np.float32) for i in range(mib // LEAF)}
    return jax.block_until_ready(ts.shard(tree, P("fsdp"), ts.make_mesh("fsdp=8")))


def on_host(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in tree.items()}


def flush_all(path: Path) -> None:
    """Flushes all files and directories in a directory, and itself."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(Path(folder) / name)
        sync(folder)


def sync(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def timed(calls: Calls, rounds: int, written: Path | None = None) -> dict[str, Figure]:
    """The seconds of each call; before it, what it wrote to `written / name` is removed."""

    def before(name: str) -> None:
        if written:
            shutil.rmtree(written / name, ignore_errors=True)
            (written / f"{name}.safetensors").unlink(missing_ok=True)
        os.sync()  # the writes of the last call are done

    return {name: Figure(found) for name, found in interleaved(calls, rounds, before).items()}


# ------------------------------------------------------------------ what is compared


def saves(where: Path, tree: dict[str, Any], rounds: int) -> dict[str, Figure]:
    def by_orbax() -> None:
        save_by_orbax(where / "Orbax", tree)
        flush_all(where / "Orbax")

    ways: Calls = {
        "save": lambda: save(where / "save", tree),
        "Orbax": by_orbax,
        "raw": lambda: raw(where / "raw", tree),
    }
    return timed(ways, rounds, where)


def saves_of_files(where: Path, tree: dict[str, np.ndarray], rounds: int) -> dict[str, Figure]:
    def by_safetensors() -> None:
        save_file(tree, where / "safetensors.safetensors")
        sync(where / "safetensors.safetensors")

    ways: Calls = {
        "save": lambda: save_safetensors(where / "save.safetensors", tree),
        "safetensors": by_safetensors,
    }
    return timed(ways, rounds, where)


def rows(rounds: int) -> list[Row]:
    made: list[Row] = []
    with tempfile.TemporaryDirectory() as there:
        where = Path(there)
        found = saves(where, many_leaves(FEW), min(rounds, 5))
        case = f"checkpoint of {FEW:,} small leaves, x Orbax, all flushed"
        made.append(Row(case, found["save"] / found["Orbax"], "<= 0.05"))
        for mib in (256, 1024):
            tree = tree_of(mib)
            found = saves(where, tree, min(rounds, 9))
            size = f"{mib} MiB" if mib < 1024 else "1 GiB"
            made += [
                Row(f"checkpoint of {size}, x Orbax, both flushed",
                    found["save"] / found["Orbax"], "<= 0.7"),
                Row(f"checkpoint of {size}, x one raw file and fsync",
                    found["save"] / found["raw"], "<= 1.4"),
            ]  # fmt: skip
            if mib == 256:
                made += rows_of_files(where, on_host(tree), min(rounds, 9))
            del tree
        made += rows_of_restores(where, min(rounds, 7))
        made += rows_of_many(where)
    return made


def rows_of_files(where: Path, tree: dict[str, np.ndarray], rounds: int) -> list[Row]:
    small = {name: np.asarray(x) for name, x in many_leaves(FEW).items()}
    found = saves_of_files(where, small, rounds)
    path = where / "small.safetensors"
    save_safetensors(path, small)
    loads = timed(
        {"load": lambda: load_safetensors(path), "safetensors": lambda: load_file(path)}, rounds
    )
    large = saves_of_files(where, tree, rounds)
    return [
        Row(f"load_safetensors of {FEW:,} small leaves, x safetensors",
            loads["load"] / loads["safetensors"], "<= 2"),
        Row(f"save_safetensors of {FEW:,} small leaves, x safetensors and fsync",
            found["save"] / found["safetensors"], "<= 2"),
        Row("save_safetensors of 256 MiB, x safetensors and fsync",
            large["save"] / large["safetensors"], "<= 1.05"),
    ]  # fmt: skip


def rows_of_restores(where: Path, rounds: int) -> list[Row]:
    tree = tree_of(512)
    save(where / "512", tree)
    save_safetensors(where / "512.safetensors", tree)
    found = timed(
        {
            "restore": lambda: jax.block_until_ready(restore(where / "512", tree)),
            "load": lambda: jax.block_until_ready(
                load_safetensors(where / "512.safetensors", tree)
            ),
        },
        rounds,
    )
    ratio = found["restore"] / found["load"]
    return [Row("restore of 512 MiB to devices, x load_safetensors", ratio, "<= 1.2")]


def rows_of_many(where: Path) -> list[Row]:
    tree = many_leaves(MANY)
    path = where / "save"
    calls: Calls = {
        "restore": lambda: jax.block_until_ready(restore(path, tree)),
        "verify": lambda: verify(path),
    }
    found = timed({"save": lambda: save(path, tree)}, 1, where) | timed(calls, 1)
    goals = {"save": "<= 5", "restore": "<= 8", "verify": "<= 4"}
    return [Row(f"{name} of {MANY:,} small leaves, s", x, goals[name]) for name, x in found.items()]


def main() -> None:
    chosen = options()
    ts.simulate_devices(8)
    report("Files of one process on 8 simulated devices", rows(chosen.rounds), PACKAGES)


if __name__ == "__main__":
    main()

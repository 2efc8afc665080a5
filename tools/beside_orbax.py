"""Writes the table in docs/how-to/checkpoints.md: what Orbax and treeshard do when things go wrong.

    python -m tools.beside_orbax

Each row does the same to checkpoints of both libraries, in processes of their own, and counts what
came of it. Nothing in the table but what is done and what Orbax promises is written by hand.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "checkpoints.md"
LIBRARIES = ("orbax", "treeshard")
KILLS = 6
CUTS = 10
LONGEST = 120  # seconds for one row of a library
SHAPE = (256, 256)

RIGHT, WRONG, ERROR = "correct", "**silently wrong**", "raised"


class Row(NamedTuple):
    """What is done to a checkpoint.

    Attributes:
        what: As the table says it.
        promise: What Orbax's documentation says of it.
        run: Gets the name of a library and an empty directory, and returns what came of it. Runs
            in a process of its own.
        processes: How many run it together.
    """

    what: str
    promise: str
    run: Callable[[str, Path], str]
    processes: int = 1


# ------------------------------------------------------------------ the libraries


class Orbax:
    """A run's checkpoints by Orbax, as its guide on training loops saves them."""

    def __init__(self, directory: Path) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._manager = ocp, ocp.CheckpointManager(directory)

    def save(self, step: int, tree: Any) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(tree))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def restore(self, step: int, like: Any) -> Any:
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(like))

    def close(self) -> None:
        self._manager.close()


class Treeshard:
    """A run's checkpoints by treeshard."""

    def __init__(self, directory: Path) -> None:
        from treeshard.checkpoint import Checkpoints

        self._checkpoints = Checkpoints(directory, timeout=20)

    def save(self, step: int, tree: Any) -> None:
        self._checkpoints.save(step, tree)

    def wait(self) -> None:
        self._checkpoints.wait()

    def latest(self) -> int | None:
        return self._checkpoints.latest

    def restore(self, step: int, like: Any) -> Any:
        return self._checkpoints.restore(step, like)

    def close(self) -> None:
        self._checkpoints.close()


def run_of(library: str, directory: Path) -> Orbax | Treeshard:
    return Orbax(directory) if library == "orbax" else Treeshard(directory)


# ------------------------------------------------------------------ a state, and its values


def mesh() -> Any:
    return ts.make_mesh("data=-1")


def state(step: int) -> dict[str, Any]:
    """Random numbers, which no compression makes small, and a numpy array."""
    draw = np.random.default_rng(step)
    w = draw.standard_normal(SHAPE).astype(np.float32)
    return {"w": ts.shard(w, P("data"), mesh()), "counts": np.full(1000, step, np.int32)}


def is_right(tree: Any, step: int) -> bool:
    expected = state(step)
    return all(
        np.array_equal(ts.gather(tree[name]), ts.gather(expected[name])) for name in expected
    )


def restore_step(library: str, directory: Path, step: int) -> str:
    """What a restore gives: right or wrong values, or an error."""
    run = None
    try:
        run = run_of(library, directory)
        return RIGHT if is_right(run.restore(step, state(0)), step) else WRONG
    except Exception:
        return ERROR
    finally:
        if run:
            run.close()


def count_outcomes(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))


# ------------------------------------------------------------------ what is done


def kill_saves(library: str, directory: Path) -> str:
    """Kills runs that save step after step, and restores what is there."""
    draw = random.Random(0)
    outcomes: Counter[str] = Counter()
    for i in range(KILLS):
        folder = directory / f"{i}"
        command = [sys.executable, "-m", "tools.beside_orbax", "--loop", library, str(folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # the first step is saved
        time.sleep(draw.uniform(0.05, 0.6))
        process.kill()
        process.wait()
        run = run_of(library, folder)
        step = run.latest()
        run.close()
        outcomes["no step" if step is None else restore_step(library, folder, step)] += 1
    return count_outcomes(outcomes)


def save_on_and_on(library: str, directory: Path) -> None:
    run = run_of(library, directory)
    for step in range(1, 1000):
        run.save(step, state(step))
        run.wait()
        print(step, flush=True)


def power_cut(library: str, directory: Path) -> str:
    """Cuts the power of a disk, in turn while a step is saved and after it was."""
    from tests.power_loss import after_power_loss, new_disk

    if os.geteuid() != 0:
        return "not tried: only root can mount a disk"
    draw = random.Random(0)
    outcomes: Counter[str] = Counter()
    directory.mkdir()
    with new_disk(directory) as disk:
        run = run_of(library, disk / "run")
        took = _save_one(run, 1)
        for step in range(2, CUTS + 2):
            saving = threading.Thread(target=_save_one, args=[run, step])
            saving.start()
            has_returned = step % 2 == 0
            saving.join(None if has_returned else draw.uniform(0, took))
            with after_power_loss(disk) as later:
                outcomes[_found(library, later / "run", step if has_returned else None)] += 1
            saving.join()
        run.close()
    return count_outcomes(outcomes)


def _save_one(run: Orbax | Treeshard, step: int) -> float:
    begin = time.monotonic()
    run.save(step, state(step))
    run.wait()
    return time.monotonic() - begin


def _found(library: str, directory: Path, expected: int | None) -> str:
    """What the latest step gives; `expected` is the step whose save has returned."""
    run = run_of(library, directory)
    step = run.latest()
    run.close()
    if step is None or (expected is not None and step != expected):
        return "**lost a saved step**"
    return restore_step(library, directory, step)


def each_file(library: str, directory: Path, damage: Callable[[Path], None]) -> str:
    """Damages one file of a checkpoint at a time."""
    run = run_of(library, directory / "whole")
    run.save(1, state(1))
    run.close()
    files = [path for path in sorted((directory / "whole/1").rglob("*")) if path.is_file()]
    outcomes: Counter[str] = Counter()
    for i, file in enumerate(files):
        if not file.stat().st_size:
            continue
        folder = directory / f"{i}"
        shutil.copytree(directory / "whole", folder)
        damage(folder / file.relative_to(directory / "whole"))
        outcomes[restore_step(library, folder, 1)] += 1
    return count_outcomes(outcomes)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_a_leaf(library: str, directory: Path) -> str:
    """Changes a numpy array in place as soon as `save` has returned; many times."""
    outcomes: Counter[str] = Counter()
    for i in range(10):
        run = run_of(library, directory / f"{i}")
        tree = state(1)
        tree["counts"] = np.full(2_000_000, 1, np.int32)
        run.save(1, tree)
        tree["counts"][:] = -1
        run.close()
        again = run_of(library, directory / f"{i}").restore(1, tree)
        outcomes[RIGHT if (again["counts"] == 1).all() else WRONG] += 1
    return count_outcomes(outcomes)


def save_a_stale_replica(library: str, directory: Path) -> str:
    """Saves an array whose replicas differ: one device missed an update."""
    parts = [np.full(8, i == 0, np.float32) for i in range(jax.device_count())]
    buffers = [jax.device_put(x, device) for x, device in zip(parts, jax.devices(), strict=True)]
    sharding = NamedSharding(mesh(), P())
    x = jax.make_array_from_single_device_arrays((8,), sharding, buffers)
    try:
        run = run_of(library, directory)
        run.save(1, {"x": x})
        run.close()
    except Exception:
        return ERROR
    return "**silently saved one replica**"


def save_over_stale_shards(library: str, directory: Path) -> str:
    """Saves a step of which a killed run left files behind."""
    run = run_of(library, directory)
    run.save(1, state(1))
    run.close()
    (directory / "1").rename(directory / "2.orbax-checkpoint-tmp")
    run = run_of(library, directory)
    run.save(2, state(2))
    run.close()
    left = "" if not list(directory.glob("*tmp*")) else ", and the files stay"
    return f"{restore_step(library, directory, 2)}{left}"


def save_to_own_disks(library: str, directory: Path) -> str:
    """Two processes save to a path that is another directory for each of them."""
    own = directory / f"{jax.process_index()}"
    (own / "run").mkdir(parents=True)
    os.chdir(own)
    path = Path("/proc/self/cwd/run")  # one path on both, as on two hosts
    try:
        run = run_of(library, path)
        run.save(1, state(1))
        run.close()
    except Exception:
        return ERROR
    again = restore_step(library, path, 1)
    return f"**silently saved**; a restore is {again}"


# ------------------------------------------------------------------ the table

NO_PROMISE = "undocumented"
ROWS = [
    Row(
        f"Kill a run during a save, {KILLS} times",
        "a save is atomic",
        kill_saves,
    ),
    Row(
        f"Cut the power of the disk during or after a save, {CUTS} times",
        "a save is atomic",
        power_cut,
    ),
    Row(
        "Flip a bit, in each file once",
        NO_PROMISE,
        lambda library, directory: each_file(library, directory, flip),
    ),
    Row(
        "Cut a file in half, each once",
        NO_PROMISE,
        lambda library, directory: each_file(library, directory, cut),
    ),
    Row(
        "Remove a file, each once",
        NO_PROMISE,
        lambda library, directory: each_file(library, directory, Path.unlink),
    ),
    Row(
        "Change a numpy leaf once `save` has returned, 10 times",
        "a save copies the arrays first",
        change_a_leaf,
    ),
    Row("Save an array with a stale replica", NO_PROMISE, save_a_stale_replica),
    Row(
        "Save a step of which a killed run left shards",
        "unfinished saves are ignored",
        save_over_stale_shards,
    ),
    Row(
        "Save from two processes to unshared directories",
        "the directory must be shared",
        save_to_own_disks,
        processes=2,
    ),
]
HEAD = """| test | Orbax documents | Orbax {orbax} | treeshard |
|---|---|---|---|
"""
MARKS = ("<!-- beside orbax -->\n", "<!-- end of beside orbax -->")


def written() -> str:
    """What the page has between the marks."""
    return PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]


def outcome(index: int, library: str) -> str:
    """Runs a row in processes of their own."""
    from tests.multiprocess.launcher import end, free_port, start, wait_for_all

    processes, port = ROWS[index].processes, free_port()
    with tempfile.TemporaryDirectory() as where:
        logs = [Path(where) / f"{i}.log" for i in range(processes)]
        command = [sys.executable, "-m", "tools.beside_orbax", "--row", str(index), library, where]
        started = [
            start([*command, str(port), str(i)], log, {"PYTHONWARNINGS": "ignore"})
            for i, log in enumerate(logs)
        ]
        try:
            wait_for_all(started, LONGEST)
            hang = any(process.poll() is None for process in started)
        finally:
            end(started)
        said = {_outcome_in(log) for log in logs}
    if None in said:
        return f"**hung** for at least {LONGEST} s" if hang else "the process ended"
    return " / ".join(sorted(filter(None, said)))


def _outcome_in(log: Path) -> str | None:
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.startswith('{"outcome"')]
    return json.loads(lines[-1])["outcome"] if lines else None


def run_row(index: int, library: str, where: str, port: str, process: int) -> None:
    from tests.multiprocess.worker import join

    row = ROWS[index]
    if row.processes > 1:
        join(port, process, row.processes, 1)
    else:
        ts.simulate_devices(2)
    print(json.dumps({"outcome": row.run(library, Path(where) / "checkpoints")}), flush=True)


def write() -> None:
    from importlib.metadata import version

    lines = []
    for index, row in enumerate(ROWS):
        cells = [row.what, row.promise, *(outcome(index, library) for library in LIBRARIES)]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    table = HEAD.format(orbax=version("orbax-checkpoint")) + "\n".join(lines) + "\n"
    PAGE.write_text(PAGE.read_text().replace(written(), table))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--loop", library, directory]:
            ts.simulate_devices(2)
            save_on_and_on(library, Path(directory))
        case ["--row", index, library, where, port, process]:
            run_row(int(index), library, where, port, int(process))
        case _:
            write()

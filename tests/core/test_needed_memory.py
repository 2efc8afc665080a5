"""Each call that reads, saves or gathers needs no more host memory than it checks for.

The calls run in a process of their own, which measures each, and then limits what it may allocate.
"""

import gc
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import peak_of
from treeshard import _cli
from treeshard._core import hosts, memory
from treeshard._disk import untrusted
from treeshard._placement import shard
from treeshard.checkpoint import Checkpoints, restore, save, verify
from treeshard.interchange import _tensors, load_safetensors, save_safetensors

MIB = 2**20
# An array of 40 MiB, and 10 of 4 MiB. Those of less than 32 MiB are not always returned to the
# system.
TREES = {"large": {"w": (10240, 1024)}, "many": {f"{i}": (1024, 1024) for i in range(10)}}
# What else a call allocates: the interpreter's objects, pages of libraries that it is first to use.
BESIDE = 6 * MIB


def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
    return np.ones([i.stop - i.start for i in index], np.float32)


def calls_on(run: Path, name: str, mesh: Any) -> dict[str, Callable[[], Any]]:
    like = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in TREES[name].items()}
    half = {key: jax.ShapeDtypeStruct(shape, "bfloat16") for key, shape in TREES[name].items()}
    sharded, everywhere = [(".*", P("fsdp"))], [(".*", P())]
    two = ts.make_mesh("fsdp=2", devices=jax.devices()[:2])
    numbers = {key: np.ones(shape, np.float32) for key, shape in TREES[name].items()}
    state = ts.shard(numbers, P("fsdp"), mesh)
    save(run / name, state)
    save(run / f"{name} in one", numbers)
    tensors = run / f"{name}.safetensors"
    save_safetensors(tensors, numbers)
    del numbers
    out = run / "out"

    def again(write: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            shutil.rmtree(out, ignore_errors=True)
            write()

        return call

    def save_in_background() -> None:
        with Checkpoints(out) as checkpoints:
            checkpoints.save(1, state)

    def loop() -> None:
        for _, _x in ts.iter_gather(state):
            pass

    on = {"rules": sharded, "mesh": mesh}
    calls: dict[str, Callable[[], Any]] = {
        "save": again(lambda: save(out, state)),
        "save in the background": again(save_in_background),
        "restore": lambda: restore(run / name, like, **on),
        "restore what was saved in one": lambda: restore(run / f"{name} in one", like, **on),
        "restore to two": lambda: restore(run / name, like, rules=everywhere, mesh=two),
        "restore to one device": lambda: restore(run / name, like),
        "restore to the host": lambda: restore(run / name),
        "restore and cast": lambda: restore(run / name, half, cast="bfloat16", **on),
        "verify": lambda: verify(run / name),
        "gather": lambda: ts.gather(state),
        "iter_gather": loop,
        "shard what is read": lambda: ts.shard(like, P("fsdp"), mesh, read=read),
        "load": lambda: load_safetensors(tensors, like, **on),
        "load to the host": lambda: load_safetensors(tensors),
        "load and cast": lambda: load_safetensors(tensors, half, cast="bfloat16", **on),
        "save tensors": lambda: save_safetensors(run / "out.safetensors", state),
        "export": lambda: _cli.main(["export", str(run / name), str(run / "out.safetensors")]),
    }
    if name == "many":
        chosen = ("save", "save in the background", "restore", "verify", "iter_gather", "load")
        return {what: calls[what] for what in chosen}
    return calls


def main(run: Path) -> None:
    ts.simulate_devices(8)
    mesh = ts.make_mesh("fsdp=8")
    needed: list[int] = []
    lacking = memory.lacking_memory

    def recorded(bytes_: int, threads: int = 0) -> Any:
        needed.append(bytes_)
        return lacking(bytes_, threads)

    modules: list[Any] = [hosts, shard, _tensors, untrusted]
    for module in modules:
        module.lacking_memory = recorded

    def outcome(call: Callable[[], Any], spare: int) -> str:
        """What comes of a call that may allocate `spare` bytes."""
        gc.collect()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, -1))
        try:
            return "failed" if call() else "done"
        except ts.TreeShardError as error:
            return type(error).__name__
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

    for name in TREES:
        for what, call in calls_on(run, name, mesh).items():
            print(f"{name}: {what}", file=sys.stderr, flush=True)
            call = {"export": call}.get(what, lambda call=call: call() and None)
            call()
            needed.clear()
            peak = peak_of(call)[1] * MIB
            need = max(needed)
            if not need:  # and nothing to check
                print(json.dumps([name, what, need, peak, []]), flush=True)
                continue
            tries = [outcome(call, int(part * need)) for part in (0.5, 1)]
            # The space that threads reserve depends on the machine.
            tries.append(outcome(call, need + 2**31))
            print(json.dumps([name, what, need, peak, tries]), flush=True)


def test_calls_need_what_they_check_for_and_end_with_typed_errors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.test_needed_memory", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(rows) == 17 + 6
    needs = {(name, what): need / MIB for name, what, need, *_ in rows}
    over = {
        (name, what): (peak / MIB, need / MIB)
        for name, what, need, peak, _ in rows
        if peak > need + BESIDE
    }
    assert over == {}
    for name, what, need, _, tries in rows:
        if not need:
            continue
        assert tries[-1] == "done", (name, what, tries)
        error = "DoesNotFitError" if "gather" in what or "shard" in what else "CheckpointError"
        assert {*tries} <= {"done", "failed" if what == "export" else error}, (name, what, tries)
        assert tries[0] != "done" or what in ("save tensors", "gather", "iter_gather")
    # The tree, a shard on its way, and what is being read.
    assert needs["large", "restore to the host"] == 2 * 40 + 40
    assert needs["large", "load"] == 2 * 40 + 5
    assert needs["large", "save in the background"] == 40
    assert needs["large", "save"] == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))

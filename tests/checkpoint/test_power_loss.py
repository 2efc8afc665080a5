"""Cuts the power of a disk during and right after saves: what is left is whole.

Only root can mount disks, so this runs in `make soak`; `test_durability.py` reads the order of the
calls on any machine.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.power_loss import after_power_loss, new_disk
from treeshard.checkpoint import Checkpoints, _paths, verify
from treeshard.interchange import load_safetensors, save_safetensors

TRIES = 10  # for each of the cases, of which there are two

pytestmark = pytest.mark.skipif(
    not os.environ.get("TREESHARD_SOAK"), reason="takes minutes and root: see `make soak`"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    try:
        with new_disk(tmp_path) as where:
            yield where
    except OSError as error:
        pytest.skip(f"no disk can be made here: {error}")


@contextmanager
def flushing_elsewhere(disk: Path, is_on: bool) -> Iterator[None]:
    """Another program flushes its own file all the time, and with it names of ours."""
    stop = threading.Event()

    def flush() -> None:
        with (disk / "other").open("wb") as file:
            while not stop.is_set():
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())

    thread = threading.Thread(target=flush)
    if is_on:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if is_on:
            thread.join()


def state_at(step: int, mesh: Any) -> dict[str, Any]:
    large = np.random.default_rng(step).normal(size=(512, 512)).astype(np.float32)
    placed = ts.shard({"w": large, "b": np.full(64, step, np.float32)}, P("fsdp"), mesh)
    return placed | {"step": step}


def cut(disk: Path, save: Callable[[int], None], check: Callable[[Path, int, bool], None]) -> None:
    """Cuts the power at a random moment of every second save, and right after the others."""
    draw = random.Random(disk.name)
    began = time.monotonic()
    save(1)
    took = time.monotonic() - began
    for step in range(2, TRIES + 2):
        has_returned = step % 2 == 1
        thread = threading.Thread(target=save, args=[step])
        thread.start()
        if has_returned:
            thread.join()
        else:
            time.sleep(draw.uniform(0, took))
        with after_power_loss(disk) as later:
            thread.join()
            check(later, step, has_returned)


ALONE_OR_NOT = pytest.mark.parametrize(
    "is_on", [False, True], ids=["alone", "with flushes elsewhere"]
)


@ALONE_OR_NOT
@pytest.mark.parametrize("how", ["each is a step", "replaced", "replaced without an exchange"])
@pytest.mark.filterwarnings("ignore:Checkpoints. removed files of interrupted saves")
def test_checkpoints(is_on: bool, how: str, disk: Path, mesh, monkeypatch) -> None:
    """Each save is a step of its own, or the same step again."""
    replaces = how != "each is a step"
    if how == "replaced without an exchange":
        monkeypatch.setattr(_paths, "exchange_names", lambda *_: False)
    with Checkpoints(disk / "run", keep=1) as checkpoints:

        def save(step: int) -> None:
            checkpoints.save(7 if replaces else step, state_at(step, mesh))
            checkpoints.wait()

        def check(later: Path, step: int, has_returned: bool) -> None:
            with Checkpoints(later / "run") as found:
                number, state = found.restore_latest(state_at(0, mesh)) or (0, {})
                assert number == (7 if replaces else state["step"])
                assert state["step"] in ([step] if has_returned else [step - 1, step])
                expected = state_at(state["step"], mesh)
                assert (np.asarray(state["w"]) == np.asarray(expected["w"])).all()
                verify(later / "run" / str(number))

        with flushing_elsewhere(disk, is_on):
            cut(disk, save, check)


@ALONE_OR_NOT
def test_safetensors(is_on: bool, disk: Path, mesh) -> None:
    def save(step: int) -> None:
        state = state_at(step, mesh)
        save_safetensors(disk / "model.safetensors", {"w": state["w"], "b": state["b"]})

    def check(later: Path, step: int, has_returned: bool) -> None:
        found = load_safetensors(later / "model.safetensors")
        number = int(found["b"][0])
        assert number in ([step] if has_returned else [step - 1, step])
        assert (found["w"] == np.asarray(state_at(number, mesh)["w"])).all()

    with flushing_elsewhere(disk, is_on):
        cut(disk, save, check)

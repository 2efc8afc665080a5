"""Two processes save while a disk, another run, or one of them fails.

args: a disk with little room, or nothing where it could not be made; and a directory that another
run writes to.
"""

from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.states import AXES, RULES, differing, left_in, like, state_at
from tests.multiprocess.worker import Context, error_of, start_again
from treeshard.checkpoint import Checkpoints, restore, save
from treeshard.interchange import load_safetensors, save_safetensors


def assert_latest_is(checkpoints: Checkpoints, step: int) -> None:
    found = checkpoints.restore_latest(like(), rules=RULES, mesh=ts.make_mesh(AXES))
    assert found is not None
    assert found[0] == step
    assert not differing(found[1], step)


def check_a_full_disk(context: Context) -> None:
    if not context.args[0]:
        return
    run = Path(context.args[0]) / "run"
    rows = np.ones((4096, 1024), np.float32)  # 16 MiB
    large = ts.shard({"w": rows}, P("fsdp"), ts.make_mesh(AXES))
    with Checkpoints(run) as checkpoints:
        checkpoints.save(1, state_at(1))
        with pytest.raises(ts.CheckpointError) as told:
            _ = checkpoints.save(2, large), checkpoints.wait()
        said = f"{run}/2 was not saved; what existed before is unchanged. "
        assert str(told.value).startswith(said)
        assert "No space left on device" in str(told.value)
        assert_latest_is(checkpoints, 1)
        assert left_in(run) == [".treeshard-lock", "1"]


def check_another_run_that_is_writing_is_an_error(context: Context) -> None:
    held = Path(context.args[1])
    before = left_in(held)
    error = [ts.CheckpointError, ts.ProcessError][context.index]
    for do in (lambda: Checkpoints(held), lambda: save(held / "2", state_at(2))):
        with pytest.raises(error, match="another run is writing here: process "):
            do()
    assert left_in(held) == before
    assert_latest_is(Checkpoints(held, read_only=True), 1)


def check_a_process_that_raises_is_absent_from_later_calls(context: Context) -> None:
    """Each of these calls raises in time, and nothing is written. It is the last check, since the
    two processes make different calls from here on."""
    run, file = context.directory / "run", context.directory / "x.safetensors"
    state = state_at(1)
    tensors = {"w": state["w"], "half": state["half"]}
    save_safetensors(file, tensors)

    def go_on() -> None:
        with Checkpoints(run, timeout=20) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            checkpoints._timeout = 0.5
            if context.index == 1:
                raise ZeroDivisionError("mine")
            checkpoints.save(2, state)

    told = error_of(go_on, [ts.ProcessError, ZeroDivisionError][context.index])
    assert ["save: process 1 of 2 did not arrive within 0.5 s", "mine"][context.index] in told
    assert left_in(run) == ["1"]
    assert not differing(restore(run / "1"), 1)
    reader = Checkpoints(run, read_only=True, timeout=0.3)
    for what, do in [
        ("save", lambda: save(run / "2", state, timeout=0.3)),
        ("restore_latest", lambda: reader.restore_latest(state)),
        ("load_safetensors", lambda: load_safetensors(file, tensors, timeout=0.3)),
    ]:
        if context.index == 0:
            absent = f"{what}: process 1 of 2 did not arrive within 0.3 s. Nothing was done."
            assert absent in error_of(do)
        else:
            start_again()
        assert left_in(run) == ["1"]
    assert not differing(restore(run / "1"), 1)  # takes part in no exchange

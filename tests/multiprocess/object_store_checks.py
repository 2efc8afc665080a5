"""Two processes save to an object store, and restore. args: an address such as gs://bucket."""

from unittest.mock import Mock

import numpy as np
import pytest
from etils.epath.backend import fsspec_backend

import treeshard as ts
from tests.multiprocess.states import AXES, RULES, differing, like, state_at
from tests.multiprocess.worker import Context
from treeshard._core.processes import exchange
from treeshard.checkpoint import Checkpoints, _save, restore, save, verify


def check_a_checkpoint_is_restored_on_another_mesh(context: Context) -> None:
    path = f"{context.args[0]}/one"
    save(path, state_at(1))
    verify(path)
    assert not differing(restore(path, like(), rules=RULES, mesh="fsdp=2,data=2"), 1)
    error = [ts.CheckpointError, ts.ProcessError][context.index]
    with pytest.raises(error, match="already a checkpoint"):
        save(path, state_at(2))
    assert not differing(restore(path, like(), rules=RULES, mesh=AXES), 1)


def check_the_arrays_of_another_step_are_detected(context: Context) -> None:
    """A copy of one step over another, cut short before its last file: their leaves are alike."""
    one, other = (f"{context.args[0]}/mixed-{i}" for i in (1, 2))
    for i, path in enumerate((one, other)):
        save(path, {"w": np.full(9, i)})
    if context.index == 0:
        files = fsspec_backend.fs(other)
        for name in files.find(f"{other}/state"):
            if not name.endswith("/table.crc32"):
                files.pipe(name.replace("mixed-2", "mixed-1"), files.cat(name))
    exchange("mixed", b"", channel="of the test")
    for read in (restore, verify):
        with pytest.raises(ts.DamagedError, match="w: its file state/manifest.ocdbt has "):
            read(one)


def check_a_run_keeps_its_last_steps(context: Context) -> None:
    run = f"{context.args[0]}/run"
    with Checkpoints(run, read_only=True) as reader, Checkpoints(run, keep=2) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, state_at(step))
            checkpoints.wait()
            exchange("removed", b"", channel="of the test")  # process 0 removes the earlier steps
            assert reader.steps() == checkpoints.steps() == tuple(range(max(1, step - 1), step + 1))
        step, state = checkpoints.restore_latest(like(), rules=RULES, mesh=AXES) or (0, {})
        assert step == 4
        assert not differing(state, 4)


def check_a_save_that_failed_leaves_nothing(context: Context) -> None:
    """The same path can be saved to again."""
    path = f"{context.args[0]}/failed"
    with pytest.MonkeyPatch.context() as patch:
        if context.index == 1:
            patch.setattr(_save, "write_arrays", Mock(side_effect=OSError("no more space")))
        with pytest.raises(ts.CheckpointError, match="process 1 raised OSError: no more space"):
            save(path, state_at(1))
    save(path, state_at(2))
    assert not differing(restore(path, like(), rules=RULES, mesh=AXES), 2)

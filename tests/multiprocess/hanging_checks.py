"""A process that waits, and one that does something else meanwhile: both say where they are.

What processes print is read while one of them hangs, and ends that.
"""

import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.launcher import REPOSITORY
from tests.multiprocess.worker import Context
from treeshard import ProcessError
from treeshard._core import meetings, whereabouts
from treeshard._core.meetings import exchange
from treeshard.checkpoint import Checkpoints, _save

FILE = str(Path(__file__).relative_to(REPOSITORY))


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """What this process prints as errors, from any thread; printed after all."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        yield text
    print(text.getvalue(), flush=True)


def wait_for(text: io.StringIO, said: str) -> None:
    """Waits until it is printed, in this function."""
    until = time.monotonic() + 60
    while said not in text.getvalue():
        assert time.monotonic() < until, text.getvalue()
        time.sleep(0.02)


def check_all_say_where_they_are_when_one_does_not_come(context: Context) -> None:
    ts.make_mesh("data=2")  # from the first call on, a process answers
    with printed() as text, mock.patch.object(meetings, "ASKS_FROM", 0.0):
        if context.index == 0:
            with pytest.raises(ProcessError) as told:
                exchange("gather", b"", timeout=0.5)
            # It answers while the error is made.
            assert "process 1 of 2 did not arrive within 0.5 s." in str(told.value)
            assert f"Process 1 is at {FILE}:" in str(told.value)
            wait_for(text, "where the processes are:")
            for i in range(2):
                assert f"\n  process {i}: at {FILE}:" in text.getvalue()
            # They stay: an error that is made at the same time reads them after they were printed.
            assert whereabouts._answers(whereabouts._state.collected).keys() == {0, 1}
        else:
            wait_for(text, "has waited")
            time.sleep(2)  # the place is asked for twice
            with pytest.raises(ProcessError):
                exchange("gather", b"", timeout=0.5)
    head, *_ = text.getvalue().splitlines()
    called = f"treeshard: gather, called at {FILE}:"
    assert head.startswith(called), head
    assert " s for process 1 of 2. This is process " in head
    if context.index == 1:
        assert f". This is process 1, at {FILE}:" in head
        assert "(wait_for) < " in head


def check_a_background_save_says_who_does_not_come(context: Context) -> None:
    write = _save.write_arrays

    def write_later(*args) -> None:
        wait_for(text, "has waited")
        write(*args)

    with printed() as text, Checkpoints(context.directory / "run", timeout=3) as checkpoints:
        with mock.patch.object(_save, "write_arrays", write_later if context.index == 1 else write):
            checkpoints.save(1, {"w": np.ones(8, np.float32)})
        checkpoints.wait()
        assert checkpoints.steps() == (1,)
    line = next(x for x in text.getvalue().splitlines() if "has waited" in x)
    path = f"{context.directory}/run/1"
    assert line.startswith(f"treeshard: save {path}: written, called at {FILE}:"), line
    assert "for process 1 of 2. This is process" in line
    assert line.endswith("in Checkpoints.wait.")


def check_a_step_that_does_not_return_is_told_by_all(context: Context) -> None:
    mesh = ts.make_mesh("data=2")
    state = ts.shard({"w": np.zeros(8, "float32")}, P(), mesh)
    plan = ts.plan(state, [(".*", P())], mesh, min_size=0)

    def train(state, batch):
        return {"w": state["w"] + batch.mean(0)}, batch.sum()

    with printed() as text:
        step = ts.jit_step(train, plan, batch=P("data"), donate=False, watch=1.0)
        batch = ts.from_process_local(np.ones((4, 8), "float32"), P("data"), mesh)
        for _ in range(2):
            state, total = jax.block_until_ready(step(state, batch))
        if context.index == 1:
            wait_for(text, "has not returned")
            time.sleep(2)
        state, total = step(state, batch)
        if context.index == 0:
            wait_for(text, ", after step 2 of train")  # as process 1 answers
        jax.block_until_ready(total)
        assert float(total) == 64
    lines = text.getvalue().splitlines()
    head = next(x for x in lines if "has not returned" in x)
    assert head.startswith("treeshard: step 3 of train has not returned for 1."), head
    assert f" on process 0. This is process {context.index}, at {FILE}:" in head
    if context.index == 0:
        *_, title, mine, other = lines
        assert title == "treeshard: where the processes are:"
        assert mine.startswith(f"  process 0: at {FILE}:"), lines
        assert mine.endswith(", in step 3 of train")
        assert other.startswith(f"  process 1: at {FILE}:"), lines
        assert "(wait_for) < " in other or "(check_a_step" in other
        assert other.endswith(", after step 2 of train")


def check_checkpoints_compares_its_arguments(context: Context) -> None:
    with pytest.raises(ProcessError) as told:
        Checkpoints(context.directory / "other", keep=2 + context.index, every=10, timeout=20)
    assert "keep: 2 on process 0; 3 on process 1" in str(told.value)
    with pytest.raises(ProcessError, match="every: 1 on process 0; 2 on process 1"):
        Checkpoints(context.directory / "other", every=1 + context.index, timeout=20)
    with Checkpoints(context.directory / "other", keep=2, timeout=20) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})


def check_other_versions_are_told_at_once(context: Context) -> None:
    """Even if the other version calls its meetings by other names."""
    everyone = list(range(context.count))
    other = meetings._sequence(everyone, "of other versions")
    if context.index == 1:
        other._name += "-of-9.9"
    # As before the first meeting.
    exchange("about to meet anew", b"", timeout=20)
    key = f"treeshard-version/{context.index}"
    meetings._client().key_value_delete(key)
    exchange("about to meet anew", b"", timeout=20)
    version = ts.__version__ if context.index == 0 else "9.9"
    with mock.patch.object(ts, "__version__", version), pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=20, lane="of other versions")
    assert str(told.value) == (
        "save /runs/7: the processes have different versions of treeshard:"
        f" {ts.__version__} on process 0; 9.9 on process 1. Nothing was done. Install one version"
        " on all of them."
    )
    (context.directory / f"told-{context.index}").touch()
    while not all((context.directory / f"told-{i}").exists() for i in everyone):
        time.sleep(0.01)
    meetings._client().key_value_set(key, ts.__version__, allow_overwrite=True)
    exchange("going on", b"", timeout=20)

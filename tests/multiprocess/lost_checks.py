"""One of several processes is killed, stopped or late: the others end with an error that names it.

args: how many processes there are, and the cases, such as `save,kill,8`.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.forked import Forked, Say
from tests.multiprocess.worker import Context
from treeshard import ProcessError
from treeshard._core import meetings
from treeshard.checkpoint import _restore, _save, restore, save

SECONDS = 20.0  # for which a process is stopped, or late
LONG = 300.0
# In the middle of which function a process is lost.
INSIDE = {"save": (_save, "write_arrays"), "restore": (_restore, "_read_arrays")}


def lose(fault: str) -> None:
    if fault == "late":
        time.sleep(SECONDS)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def call_of(what: str, path: Path, count: int, timeout: float) -> Callable[[], Any]:
    """The call, all that it needs, and what it must have waited for before."""
    mesh = ts.make_mesh(f"fsdp={count}")
    tree = ts.shard({"w": np.ones((count, 8), "float32")}, P("fsdp"), mesh, timeout=LONG)
    save(path / "first", tree, timeout=LONG)
    if what == "save":
        return lambda: save(path / "second", tree, timeout=timeout)
    if what == "restore":
        return lambda: restore(path / "first", tree, timeout=timeout)
    plan = ts.plan(tree, [("w", P("fsdp"))], mesh, min_size=0)
    rows = ts.from_process_local(np.ones((1, 8), "float32"), P("fsdp"), mesh, timeout=LONG)

    def train_step(state: Any, batch: Any) -> Any:
        loss = (batch @ state["w"].T).mean()
        return jax.tree.map(lambda x: x + loss, state), loss

    step = ts.jit_step(train_step, plan, batch=P("fsdp"))
    state, _ = jax.block_until_ready(step(tree, rows))
    return lambda: jax.block_until_ready(step(state, rows))


def run_case(case: tuple[str, str, float], path: Path, count: int, index: int, say: Say) -> None:
    what, fault, timeout = case
    call = call_of(what, path, count, timeout)
    meetings.exchange("all are there", b"", timeout=LONG)
    say("begins")
    began = time.monotonic()
    try:
        if index != lost_of(count):
            call()
        elif fault == "late" or what not in INSIDE:
            lose(fault)
            call()
        else:
            inside = getattr(*INSIDE[what])

            def lost_inside(*args: Any, **options: Any) -> Any:
                lose(fault)
                return inside(*args, **options)

            with mock.patch.object(*INSIDE[what], lost_inside):
                call()
        told = "returned"
    except ProcessError as error:
        told = str(error)
    say(f"ends {time.monotonic() - began:.1f} {told}")
    meetings._end_if_broken()  # as at the end of a program


def lost_of(count: int) -> int:
    return count - 2


def check_the_others_name_it(context: Context) -> None:
    count = int(context.args[0])
    for number, text in enumerate(context.args[1:]):
        what, fault, timeout = text.split(",")
        case = what, fault, float(timeout)
        path = context.directory / f"lost-{number}"
        path.mkdir()
        body = partial(run_case, case, path, count)
        with Forked(body, path / "log", processes=count, devices=1, heartbeat=100) as runs:
            assert_case(runs, case, count)


def assert_case(runs: Forked, case: tuple[str, str, float], count: int) -> None:
    what, fault, timeout = case
    lost = lost_of(count)
    for _ in range(count):
        runs.hear("", LONG)
    if fault == "stop":
        time.sleep(SECONDS)
        runs.signal(lost, signal.SIGCONT)
    codes = runs.wait(3 * SECONDS)
    rows = [line.split(" ", 3) for line in runs.rest()]
    told = {int(i): (float(seconds), text) for i, _, seconds, text in rows}
    seen = f"{case}: {codes}, {told}\n{runs.printed()}"
    # A step has no timeout: it goes on when the others do.
    if fault != "kill" and (timeout > SECONDS or what == "step"):
        assert codes == [0] * count, seen
        assert {text for _, text in told.values()} == {"returned"}, seen
        return
    others = {*range(count)} - {lost}
    if what == "step":
        # A process fails as those end that it receives from. Process 0 ends last, and JAX then
        # ends whoever waits for it.
        assert {codes[i] for i in others - {*told}} <= {-signal.SIGABRT}, seen
        others &= {*told}
        assert others >= {0, lost - 1, lost + 1}, seen
        start = "jit_step: a collective failed: "
        missing = runs.printed().partition("missing at the end: ")[2].partition(" of ")[0]
        assert str(lost) in missing, seen
    else:
        start = f"process {lost} of {count} "
    for i in others:
        assert i in told, seen
        seconds, text = told[i]
        assert start in text, seen
        assert seconds <= timeout + 20, seen  # two cores run all processes
        assert codes[i] == 1, seen

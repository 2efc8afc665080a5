"""Runs that receive SIGTERM or Ctrl-C: all processes save the same step and end, and continue."""

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax

from examples import preemption
from tests.multiprocess.forked import Forked, Say
from tests.multiprocess.worker import Context
from treeshard.checkpoint import Checkpoints

PROCESSES = (1, 2, 4) if os.environ.get("TREESHARD_SOAK") else (1, 2)  # `make soak`


def trains(run: Path, index: int, say: Say) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells disable it
    preemption.train(run, 10**9, say)


def stop(runs: Forked, processes: int, signals: Sequence[tuple[int, int]]) -> int:
    """Sends signals to processes; returns the step after which all of them stop."""
    runs.hear("0 step ")
    for index, number in signals:
        runs.signal(index, number)
    assert runs.wait() == [0] * processes, runs.printed()
    stops = [line.split(" ", 1) for line in runs.rest() if "stops after step" in line]
    assert sorted(index for index, _ in stops) == [str(i) for i in range(processes)]
    [text] = {text for _, text in stops}
    return int(text.removeprefix("stops after step "))


TERM, CTRL_C = signal.SIGTERM, signal.SIGINT
# Of as many processes: the signals to each run, which goes on where the one before it has stopped.
# A Ctrl-C in a terminal reaches all processes, some more than once; elsewhere it is passed on.
SIGNALS = {
    1: [[(0, TERM)], [(0, CTRL_C)] * 3],
    2: [[(1, TERM)], [(0, CTRL_C), (1, CTRL_C)] * 2, [(1, CTRL_C)]],
    4: [[(3, TERM)]],  # which take long to start
}


def check_all_stop_at_one_step_and_continue(context: Context) -> None:
    """Whichever process receives a signal, of one, two, and in `make soak` four."""
    for processes in PROCESSES:
        name, step = f"run-of-{processes}", 0
        for i, signals in enumerate(SIGNALS[processes]):
            log = context.directory / f"{name}-{i}.log"
            body = partial(trains, context.directory / name)
            with Forked(body, log, processes=processes, devices=4 // processes) as runs:
                assert int(runs.hear("0 begins after step")) == step
                step = stop(runs, processes, signals)
            assert max(int(path.name) for path in (context.directory / name).iterdir()) == step


def check_a_second_ctrl_c_interrupts(context: Context) -> None:
    """A loop that never asks again is not locked in."""

    def hangs(index: int, say: Say) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with Checkpoints(context.directory / f"hangs-{jax.process_count()}") as checkpoints:
                checkpoints.preempted(1)
                say("asked")
                time.sleep(60)
        except KeyboardInterrupt:
            say(f"interrupted, {signal.getsignal(signal.SIGINT) is signal.default_int_handler}")

    for processes in (1, 2):
        log = context.directory / f"hangs-{processes}.log"
        with Forked(hangs, log, processes=processes) as runs:
            for _ in range(processes):
                runs.hear("")
            for _ in range(2):
                for i in range(processes):
                    runs.signal(i, signal.SIGINT)
                time.sleep(1.1)
            assert runs.wait() == [0] * processes, runs.printed()
            told = sorted(runs.rest())
            assert told == [f"{i} interrupted, True" for i in range(processes)], told
        assert log.read_text().count("Press it again to interrupt it at once.") == 1

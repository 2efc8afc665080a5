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
FOREVER = 10**9


def trains(run: Path, steps: int, index: int, say: Say) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells disable it
    state = preemption.train(run, steps, say)
    say(f"ends with {state['step']}")


def begin(context: Context, name: str, processes: int, steps: int = FOREVER) -> Forked:
    body = partial(trains, context.directory / name, steps)
    log = context.directory / f"{name}-{steps}.log"
    return Forked(body, log, processes=processes, devices=4 // processes)


def stop(runs: Forked, processes: int, signals: Sequence[tuple[int, int]]) -> int:
    """Sends signals to processes; returns the step after which all of them stop."""
    runs.hear("0 step 100")
    for index, number in signals:
        runs.signal(index, number)
    assert runs.wait() == [0] * processes, runs.printed()
    stops = [line.split(" ", 1) for line in runs.rest() if "stops after step" in line]
    assert sorted(index for index, _ in stops) == [str(i) for i in range(processes)]
    [text] = {text for _, text in stops}
    return int(text.removeprefix("stops after step "))


def check_all_stop_at_one_step_and_continue(context: Context) -> None:
    """Whichever process receives the signal, with one and two of them, and in `make soak` four."""
    for processes in PROCESSES:
        name = f"run-of-{processes}"
        with begin(context, name, processes) as runs:
            step = stop(runs, processes, [(processes - 1, signal.SIGTERM)])
        assert max(int(path.name) for path in (context.directory / name).iterdir()) == step
        if processes < 4:  # which take long to start
            with begin(context, name, processes, step + 30) as runs:
                assert int(runs.hear("0 begins after step")) == step
                assert runs.wait() == [0] * processes, runs.printed()


def check_a_ctrl_c_in_a_terminal_reaches_all_and_one_elsewhere_is_passed_on(
    context: Context,
) -> None:
    once = signal.SIGINT
    for name, processes, signals in [
        ("burst", 1, [(0, once)] * 3),
        ("terminal", 2, [(0, once), (1, once)] * 2),
        ("one", 2, [(1, once)]),
    ]:
        with begin(context, name, processes) as runs:
            stop(runs, processes, signals)


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

"""Kills runs that save continuously at any moment, and resumes them.

args: how many of two processes are killed, and how many that run alone.
"""

import random
import time
from functools import partial
from pathlib import Path

import treeshard as ts
from tests.multiprocess.forked import Forked, Say
from tests.multiprocess.states import RULES, differing, like, state_at
from tests.multiprocess.worker import Context
from treeshard.checkpoint import Checkpoints

TEMPORARY = ".orbax-checkpoint-tmp"
KEPT = 3
# A run is resumed on another mesh than it was saved on.
MESHES = ("fsdp=4", "fsdp=2,data=2")


# ------------------------------------------------------------------ the runs


def run_on(run: Path, axes: str, steps: int | None, twice: bool, index: int, say: Say) -> None:
    """Resumes a run and saves every step: `steps` of them, or until it is killed.

    `twice` says whether it saves each step again, which replaces what it has just saved.
    """
    mesh = ts.make_mesh(axes)
    with Checkpoints(run, keep=KEPT) as checkpoints:
        left = [path.name for path in run.iterdir() if TEMPORARY in path.name]
        assert not left, f"not swept: {left}"
        found = checkpoints.restore_latest(like(), rules=RULES, mesh=mesh)
        step = 0
        if found is not None:
            step, state = found
            assert not (wrong := differing(state, step)), f"step {step} came back wrong: {wrong}"
        say(f"restored {step}")
        while steps is None or steps:
            step += 1
            state = state_at(step, axes)
            say(f"saving {step}")
            checkpoints.save(step, state)
            checkpoints.wait()
            say(f"saved {step}")
            if twice:
                say(f"saving {step}")
                checkpoints.save(step, state)
                checkpoints.wait()
            steps = steps and steps - 1


# ------------------------------------------------------------------ killing them


def check_a_run_that_is_killed_again_and_again(context: Context) -> None:
    kill_again_and_again(context, "run", int(context.args[0]), 2)


def check_a_process_alone_that_is_killed_again_and_again(context: Context) -> None:
    kill_again_and_again(context, "run-of-one", int(context.args[1]), 1)


def kill_again_and_again(context: Context, name: str, kills: int, processes: int) -> None:
    draw = random.Random(kills)
    run = context.directory / name
    latest = while_it_wrote = 0
    how = {"processes": processes, "devices": 4 // processes}
    for i in range(kills):
        body = partial(run_on, run, MESHES[i % 2], None, i % 4 < 2)
        log = context.directory / f"{name}-{i}.log"
        with Forked(body, log, heartbeat=60, **how) as pair:
            saved = kill_during_a_save(pair, i // 2 % processes, draw, latest)
        while_it_wrote += any(TEMPORARY in path.name for path in run.iterdir())
        latest = latest_of(run)
        assert latest >= saved
    resume(context, name, latest, MESHES[kills % 2], 1, **how)
    # Of a few kills, by chance, most may come before or after the writing.
    assert while_it_wrote > (kills / 4 if kills > 100 else 0)


def kill_during_a_save(pair: Forked, victim: int, draw: random.Random, latest: int) -> int:
    """Kills a process during the second save of a resumed run; returns the step of the first."""
    assert int(pair.hear("0 restored")) == latest, f"of step {latest}:\n{pair.printed()}"
    pair.hear("0 saving")
    began = time.monotonic()
    saved = int(pair.hear("0 saved"))
    took = time.monotonic() - began
    pair.hear("0 saving")
    time.sleep(draw.uniform(0, took))
    pair.kill(victim)
    return saved


def latest_of(run: Path) -> int:
    return max(int(path.name) for path in run.iterdir() if path.name.isdecimal())


def resume(context: Context, name: str, latest: int, axes: str, steps: int, **how: int) -> None:
    body = partial(run_on, context.directory / name, axes, steps, False)
    with Forked(body, context.directory / f"{name}-last.log", **how) as pair:
        assert int(pair.hear("0 restored")) == latest
        assert pair.wait() == [0] * how["processes"], pair.printed()


def check_a_process_that_is_left_alone_finishes_no_save(context: Context) -> None:
    """Process 0 could, but for the shards of the other; heartbeats tell JAX to end it."""
    body = partial(run_on, context.directory / "run-left", MESHES[0], None, False)
    with Forked(body, context.directory / "run-left.log", heartbeat=5) as pair:
        kill_during_a_save(pair, 1, random.Random(0), 0)
        code = pair.wait()[0]
        assert code not in (0, None), f"it has {code}:\n{pair.printed()}"
    latest = latest_of(context.directory / "run-left")
    resume(context, "run-left", latest, MESHES[1], KEPT, processes=2, devices=2)

"""Trains on two processes with four devices each; one is killed midway, and training resumes.

    python examples/multiprocess.py             # starts both here, kills one, starts both again
    python examples/multiprocess.py --worker    # on a cluster: this, once per process

Several processes change four lines of a training script, all in `worker`. The model and the step
are those of `train_fsdp.py`.
"""

import argparse
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import equinox as eqx
import jax
from train_fsdp import ROWS, RULES, add_sizes, make_init, make_optimizer, make_train_step, read_text
from train_fsdp import batches as whole_batches

import treeshard as ts
from treeshard.checkpoint import Checkpoints
from treeshard.training import init_sharded, jit_step

PROCESSES, DEVICES = 2, 4

# ------------------------------------------------------------------ each process


def worker(args):
    join(args)
    optimizer = make_optimizer(args)
    kind = "explicit" if args.explicit else "auto"
    mesh = ts.make_mesh("data=2,fsdp=-1", axis_types=kind)
    init, key = make_init(args, optimizer), jax.random.key(args.seed)
    plan = ts.plan(eqx.filter_eval_shape(init, key), RULES, mesh)
    step = jit_step(make_train_step(optimizer), plan, batch=ROWS)
    with Checkpoints(args.directory, every=args.every, keep=2) as checkpoints:
        latest = checkpoints.restore_latest(plan)
        done, state = latest or (0, init_sharded(init, key, rules=RULES, mesh=mesh)[0])
        if done:
            say(f"resumes after step {done}")
        for i, part in my_batches(args, done):
            batch = ts.from_process_local(part, ROWS, mesh)
            state, loss = step(state, batch)
            stop = checkpoints.preempted(i)  # by SIGTERM or Ctrl-C, on all processes
            checkpoints.save(i, state, force=stop)
            say(f"step {i} loss {float(loss):.6f}")
            if stop:
                break


def join(args):
    """Connects to the other processes."""
    if args.coordinator is None:
        jax.distributed.initialize()  # SLURM, Open MPI, Kubernetes and Cloud TPU configure it
        return
    ts.simulate_devices(DEVICES)
    jax.distributed.initialize(
        args.coordinator, PROCESSES, args.process, heartbeat_timeout_seconds=10
    )


def my_batches(args, done):
    """`(step, this process's rows of its batch)` for all remaining steps."""
    text, _ = read_text(args.text_bytes)
    rows = args.batch // jax.process_count()
    mine = slice(rows * jax.process_index(), rows * (jax.process_index() + 1))
    for i, whole in zip(range(1, args.steps + 1), whole_batches(text, args), strict=False):
        if i > done:  # the same batches as in an uninterrupted run
            yield i, whole[mine]


def say(text):
    if jax.process_index() == 0:
        print(text, flush=True)


# ------------------------------------------------------------------ the driver


def drive(args):
    # By default SIGTERM ends this process alone, and leaves the others running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    start_empty(args.directory)
    victim = random.randrange(PROCESSES)
    print(f"== {PROCESSES} processes of {DEVICES} devices; process {victim} will be killed")
    before = run(args, kill=victim, at=args.kill_at)
    print(f"== killed process {victim} after step {max(before)}; starting both again")
    after = run(args)
    twice = before.keys() & after.keys()
    print(f"== {len(twice)} steps were trained twice, and", end=" ")
    if any(before[i] != after[i] for i in twice):
        sys.exit("their losses differ")
    print(f"their losses are the same; done after step {max(after)}")


def start_empty(directory):
    """Removes what an earlier run of this script left; exits if there is anything else."""
    if "://" in directory:
        sys.exit(f"{directory}: the driver runs here, on a local directory. Did you mean --worker?")
    mark = Path(directory) / ".made-by-multiprocess-example"
    if not mark.exists() and Path(directory).exists() and any(Path(directory).iterdir()):
        sys.exit(
            f"{directory}: this script did not make what is in it, and would remove it."
            " Pass an empty directory; or --worker, to continue a run."
        )
    shutil.rmtree(directory, ignore_errors=True)
    mark.parent.mkdir(parents=True)
    mark.touch()


def run(args, kill=None, at=None):
    """Runs the workers to their end, or until `at` and kills one; returns step -> loss."""
    started, losses = [], {}
    try:
        with sigterm_waits():  # otherwise a worker could start and never be ended
            started += start(args)
        for line in started[0].stdout:
            if not line.startswith("[Gloo]"):  # log lines of the network library
                print("  ", line, end="")
            if found := re.match(r"step (\d+) loss (\S+)", line):
                losses[int(found[1])] = found[2]
                if int(found[1]) == at:
                    os.kill(started[kill].pid, signal.SIGKILL)
                    break
        if (max(losses, default=0) != (at or args.steps)) or (
            kill is None and any(process.wait() for process in started)
        ):
            sys.exit("a process failed")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return losses


@contextmanager
def sigterm_waits():
    """A SIGTERM that comes in this block is handled at its end."""
    came = []
    handler = signal.signal(signal.SIGTERM, lambda *signal_: came.append(signal_))
    yield
    signal.signal(signal.SIGTERM, handler)
    for signal_ in came:
        handler(*signal_)


def start(args):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    given = [word for word in sys.argv[1:] if word != "--worker"]
    command = [sys.executable, __file__, "--worker", f"--coordinator={address}", *given]
    return [
        subprocess.Popen(
            [*command, f"--process={i}"],
            stdout=subprocess.DEVNULL if i else subprocess.PIPE,
            text=True,
        )
        for i in range(PROCESSES)
    ]


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    # Text, since a `Path` makes gs:/bucket of gs://bucket.
    parser.add_argument("--directory", default="out/multiprocess")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--kill-at", type=int, default=12, help="the step at which one is killed")
    add_sizes(parser, steps=30, layers=2)
    parser.add_argument("--worker", action="store_true", help="run as one of the processes")
    parser.add_argument("--coordinator", help="host:port of process 0; clusters provide it")
    parser.add_argument("--process", type=int, help="the index of this process")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    worker(args) if args.worker else drive(args)


if __name__ == "__main__":
    main()

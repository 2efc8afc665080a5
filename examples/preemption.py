"""Trains until SIGTERM or Ctrl-C, saves the step that it is at, and continues there next time.

    python examples/preemption.py                   # press Ctrl-C, and start it again
    python examples/preemption.py --distributed     # on a cluster: this, once per process

With several processes, all of them stop after the same step, whichever received the signal.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import Checkpoints
from treeshard.training import init_sharded, jit_step

RULES = [("w", ts.fsdp("fsdp", min_size=0)), (".*", None)]
ROWS = P("fsdp")


def init(key):
    return {"w": jax.random.normal(key, (16, 4)), "step": jnp.int32(0)}


def train_step(state, batch):
    def loss(w):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(ts.unshard(state["w"]))
    return {"w": state["w"] - 0.01 * gradient, "step": state["step"] + 1}, value


def batch_at(step, rows=32):
    """The rows of this process: the same in a run that was interrupted and in one that was not."""
    draw = np.random.default_rng(step)
    x = draw.normal(size=(rows, 16)).astype(np.float32)
    mine = rows // jax.process_count()
    part = slice(mine * jax.process_index(), mine * (jax.process_index() + 1))
    return {"x": x[part], "y": x[part, :4]}


def train(directory, steps, say=print):
    """Trains to the last step, or until the run is preempted; returns the state."""
    mesh = ts.make_mesh("fsdp=-1")
    key = jax.random.key(0)
    plan = ts.plan(jax.eval_shape(init, key), RULES, mesh)
    step = jit_step(train_step, plan, batch=ROWS)
    with Checkpoints(directory, every=1000, keep=2) as checkpoints:
        found = checkpoints.restore_latest(plan)
        done, state = found or (0, init_sharded(init, key, rules=RULES, mesh=mesh)[0])
        say(f"begins after step {done}")
        for i in range(done + 1, steps + 1):
            state, loss = step(state, ts.from_process_local(batch_at(i), ROWS, mesh))
            loss = float(loss)
            stop = checkpoints.preempted(i)
            checkpoints.save(i, state, force=stop or i == steps)
            if i % 100 == 0:
                say(f"step {i}: loss {loss:.4f}")
            if stop:
                say(f"stops after step {i}")
                break
    return state


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--directory", default="out/preemption", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--distributed", action="store_true", help="run as one of several")
    args = parser.parse_args(argv)
    if args.distributed:
        jax.distributed.initialize()  # SLURM, Open MPI, Kubernetes and Cloud TPU configure it
    else:
        ts.simulate_devices(8)
    train(args.directory, args.steps, print if jax.process_index() == 0 else lambda line: None)


if __name__ == "__main__":
    main()

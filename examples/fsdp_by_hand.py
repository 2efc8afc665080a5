"""Trains a small classifier on 8 devices with `shard_map`: data parallel, then fully sharded.

    python examples/fsdp_by_hand.py

The step below runs once per device, inside `jax.shard_map`, and itself gathers parameters and
averages gradients. Between the two runs only the rules change, which decide how parameters are
sharded; the losses are the same. The example is that of the UvA deep-learning tutorials, in
Equinox.

The data are random, labelled by a random linear teacher: one batch, which the model memorises in
15 steps. They replace a real data set, so the accuracy has no further meaning.
"""

import argparse
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.manual import fold_rng_over_axis, value_and_grad
from treeshard.training import (
    Metrics,
    accumulate_gradients,
    init_sharded,
    print_metrics,
    shard_map_step,
)

COMPUTE = jnp.bfloat16  # parameters and gradients stay in float32
DATA_PARALLEL = [(".*", None)]  # every leaf is replicated
# Shards the largest divisible dim. (Equinox stores weights as (out, in), Flax as (in, out).)
FULLY_SHARDED = [(".*", ts.fsdp("data", min_size=2**4))]


class Classifier(eqx.Module):
    input_dense: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    output_dense: eqx.nn.Linear

    def __init__(self, args, key):
        first, second = jax.random.split(key)
        self.input_dense = eqx.nn.Linear(args.inputs, args.hidden, key=first)
        self.dropout = eqx.nn.Dropout(args.dropout)
        self.output_dense = eqx.nn.Linear(args.hidden, args.classes, key=second)

    def __call__(self, x, key):
        x = jax.nn.silu(self.input_dense(x))
        return self.output_dense(self.dropout(x, key=key))


class State(eqx.Module):
    model: Classifier
    opt_state: optax.OptState
    step: jax.Array
    key: jax.Array


def make_init(args, optimizer):
    def init(key):
        model_key, key = jax.random.split(key)
        model = Classifier(args, model_key)
        return State(model, optimizer.init(eqx.filter(model, eqx.is_array)), jnp.int32(0), key)

    return init


def loss_fn(model, batch, key):
    """The mean loss of this device's rows, and metrics as sums and counts."""
    images, labels = batch
    keys = jax.random.split(key, len(labels))
    logits = jax.vmap(model)(images.astype(COMPUTE), keys).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (logits.argmax(-1) == labels).sum()
    pairs = {"loss": (losses.sum(), len(labels)), "accuracy": (right, len(labels))}
    return losses.mean(), Metrics(pairs)


def make_step(args, optimizer, plan):
    """A step that runs once per device, on its shards of the state and of the batch."""
    # Gathers the parameters in `COMPUTE`, differentiates, and reduce-scatters the gradients, which
    # come back in float32. Replicated leaves are not gathered; their gradients are averaged.
    grad = value_and_grad(loss_fn, "data", plan.specs.model, has_aux=True, dtype=COMPUTE)

    @shard_map_step(plan=plan, batch=P("data"))
    def step(state, batch):
        key, next_key = jax.random.split(state.key)

        def grad_fn(minibatch, key):
            (_, metrics), grads = grad(state.model, minibatch, key)
            return grads, metrics

        # Each device drops different units.
        key = fold_rng_over_axis(key, "data")
        grads, metrics = accumulate_gradients(grad_fn, batch, args.minibatches, key)
        updates, opt_state = optimizer.update(
            grads, state.opt_state, eqx.filter(state.model, eqx.is_array)
        )
        model = eqx.apply_updates(state.model, updates)
        return State(model, opt_state, state.step + 1, next_key), metrics.reduce("data")

    return step


def train(title, rules, args, batch):
    """Trains by one set of rules; returns the losses and the final state."""
    kind = "explicit" if args.explicit else "auto"
    mesh = ts.make_mesh("data=-1", axis_types=kind)
    optimizer = optax.adamw(args.lr)
    key = jax.random.key(args.seed)
    state, plan = init_sharded(make_init(args, optimizer), key, rules=rules, mesh=mesh)
    step = make_step(args, optimizer, plan)

    print(f"{title}: how each leaf is sharded\n{plan}\n")
    losses, metrics = [], None
    for _ in range(args.steps):
        state, step_metrics = step(state, batch)
        losses.append(step_metrics.means()["loss"])
        metrics = step_metrics + metrics
    print(f"{title}: losses", " ".join(f"{loss:.4f}" for loss in losses))
    print_metrics(metrics, f"{title}: means over {args.steps} steps")
    print_metrics(step_metrics, f"{title}: last step")
    print()
    return losses, state


def make_batch(args):
    """Random inputs, labelled by a random linear teacher."""
    rng = np.random.default_rng(args.seed)
    images = rng.normal(size=(args.batch, args.inputs)).astype(np.float32)
    teacher = rng.normal(size=(args.inputs, args.classes))
    return images, (images @ teacher).argmax(-1).astype(np.int32)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128, help="rows per step")
    parser.add_argument("--minibatches", type=int, default=4, help="minibatches per step")
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--explicit", action="store_true", help="a mesh with Explicit axes")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    ts.simulate_devices(8)  # JAX still prefers real accelerators
    batch = make_batch(args)
    replicated, _ = train("data parallel", DATA_PARALLEL, args, batch)
    sharded, _ = train("fully sharded", FULLY_SHARDED, args, batch)
    gap = max(abs(a - b) for a, b in zip(replicated, sharded, strict=True))
    print(f"the losses of the two differ by {gap:.1e} at most")
    if gap > 1e-2:  # bfloat16 has three digits, and the order of summation differs
        sys.exit("fully sharded training has other losses than data parallel training")


if __name__ == "__main__":
    main()

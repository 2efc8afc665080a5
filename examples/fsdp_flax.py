"""Trains a small Flax classifier on 8 devices with `shard_map`; boxes around its parameters carry
their specs.

    python examples/fsdp_flax.py

The same as `fsdp_by_hand.py`, in Linen and without a plan: a wrapped `nn.Dense` keeps this
device's shards of its parameters when it is initialised, in boxes (`nn.Partitioned`), and gathers
them when it is called. The specs of the state are then read from the boxes, as in the UvA
deep-learning tutorials. `--whole` trains data parallel instead.

The data are random, labelled by a random linear teacher: one batch, which the model memorises in
15 steps. They replace a real data set, so the accuracy has no further meaning.
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.manual import (
    fold_rng_over_axis,
    partition_specs,
    shard_module_params,
    sync_gradients,
    vary,
)
from treeshard.training import Metrics, accumulate_gradients, print_metrics


class Classifier(nn.Module):
    hidden: int
    classes: int
    dropout: float
    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x, train):
        x = self.dense(self.hidden, dtype=jnp.bfloat16, name="input_dense")(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.silu(x))
        x = self.dense(self.classes, dtype=jnp.bfloat16, name="output_dense")(x)
        return x.astype(jnp.float32)


def make_model(args):
    dense = nn.Dense
    if not args.whole:
        dense = shard_module_params(nn.Dense, axis_name="data", min_weight_size=2**4)
    return Classifier(args.hidden, args.classes, args.dropout, dense)


def make_init(args, model):
    """The init of one device: its shards of the parameters and of the optimizer's state."""
    optimizer = optax.adamw(args.lr)

    def init(key, x):
        params = model.init(key, x, train=False)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return init


def loss_fn(params, apply_fn, batch, key):
    """The mean loss of this device's rows, and metrics as sums and counts."""
    images, labels = batch
    logits = apply_fn({"params": params}, images, train=True, rngs={"dropout": key})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (logits.argmax(-1) == labels).sum()
    pairs = {"loss": (losses.sum(), len(labels)), "accuracy": (right, len(labels))}
    return losses.mean(), Metrics(pairs)


def step(state, batch, key, minibatches):
    """The step of one device, on its shards of the state and of the batch."""
    key = fold_rng_over_axis(jax.random.fold_in(key, state.step), "data")
    params = vary(state.params, "data")  # keeps gradients per device until `sync_gradients`

    def grad_fn(minibatch, key):
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (_, metrics), grads = grad(params, state.apply_fn, minibatch, key)
        return grads, metrics

    grads, metrics = accumulate_gradients(grad_fn, batch, minibatches, key)
    grads = sync_gradients(grads, "data")  # averages those of replicated leaves
    return state.apply_gradients(grads=grads), metrics.reduce("data")


def make_batch(args):
    """Random inputs, labelled by a random linear teacher."""
    rng = np.random.default_rng(args.seed)
    images = rng.normal(size=(args.batch, args.inputs)).astype(np.float32)
    teacher = rng.normal(size=(args.inputs, args.classes))
    return images, (images @ teacher).argmax(-1).astype(np.int32)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0].replace("\n", " "),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--whole", action="store_true", help="data parallel: nothing is sharded")
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
    kind = "explicit" if args.explicit else "auto"
    mesh = ts.make_mesh("data=-1", axis_types=kind)
    batch = ts.shard(make_batch(args), P("data"), mesh)
    init_key, key = jax.random.split(jax.random.key(args.seed))

    # Shapes first, then the specs from their boxes, then the sharded initialisation.
    init = make_init(args, make_model(args))
    on_mesh = partial(jax.shard_map, init, mesh=mesh, in_specs=(P(), P("data")))
    shapes = jax.eval_shape(on_mesh(out_specs=P(), check_vma=False), init_key, batch[0])
    specs = partition_specs(shapes)
    state = jax.jit(on_mesh(out_specs=specs))(init_key, batch[0])
    train_step = jax.jit(
        jax.shard_map(
            partial(step, minibatches=args.minibatches),
            mesh=mesh,
            in_specs=(specs, P("data"), P()),
            out_specs=(specs, P()),
        ),
        donate_argnums=0,
    )

    for path, spec in zip(ts.leaf_paths(specs), jax.tree.leaves(specs), strict=True):
        print(f"{path:<40} {spec}")
    losses, metrics = [], None
    for _ in range(args.steps):
        state, step_metrics = train_step(state, batch, key)
        losses.append(step_metrics.means()["loss"])
        metrics = step_metrics + metrics
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print_metrics(metrics, f"means over {args.steps} steps")
    print_metrics(step_metrics, "last step")
    return state, losses


if __name__ == "__main__":
    main()

"""Trains a small transformer on the source of Python's standard library, FSDP-sharded.

    python examples/train_fsdp.py
    python examples/train_fsdp.py --mesh "data=4,fsdp=2" --steps 50

It runs on the accelerators of this machine, or else on 8 simulated CPU devices. Sharding is in
three places: `main` makes the mesh, the state and the step, `Transformer` says where its weights
are gathered (`unshard`), and the step takes gradients that are sharded like them
(`value_and_grad`). With `--explicit`, the mesh has Explicit axes, as `jax.make_mesh` makes; for
these, `Transformer` looks up its embedding by `lookup`, and `make_train_step` shards the keys of
the rows like the rows. The rest is a model and a loop as you would write them for one device.
"""

import argparse
import math
import shutil
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.training import init_sharded, jit_step, value_and_grad

VOCAB = 256  # bytes

# The first pattern that matches a leaf's path decides. Optimizer state is sharded like its
# parameter, since its paths contain the parameter's: opt_state/0/mu/blocks/attn/q/weight.
RULES = [
    ("norm", None),  # replicate
    (".*", ts.fsdp("fsdp")),  # shard the largest divisible dim
]
ROWS = P(("data", "fsdp"))  # of a batch; constraints drop axes that a mesh does not have

# ------------------------------------------------------------------ the model


def rotate(x):
    """Rotary positions, for `(time, heads, head_width)`."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** -(jnp.arange(half) / half)
    angles = jnp.arange(len(x))[:, None, None] * speeds[None, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    heads: int

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 4)
        self.q, self.k, self.v, self.o = (
            eqx.nn.Linear(width, width, use_bias=False, key=k) for k in keys
        )
        self.heads = heads

    def __call__(self, x):
        q, k, v = (
            jax.vmap(linear)(x).reshape(len(x), self.heads, -1)
            for linear in (self.q, self.k, self.v)
        )
        out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return jax.vmap(self.o)(out.reshape(x.shape))


class Block(eqx.Module):
    attn: Attention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm
    dropout: eqx.nn.Dropout

    def __init__(self, width, heads, dropout, key):
        attn, up, down = jax.random.split(key, 3)
        self.attn = Attention(width, heads, attn)
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=False, key=up)
        self.down = eqx.nn.Linear(4 * width, width, use_bias=False, key=down)
        self.norm1 = eqx.nn.RMSNorm(width, use_bias=False)
        self.norm2 = eqx.nn.RMSNorm(width, use_bias=False)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x, key):
        key1, key2 = (None, None) if key is None else jax.random.split(key)
        x = x + self.dropout(self.attn(jax.vmap(self.norm1)(x)), key=key1, inference=key is None)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + self.dropout(jax.vmap(self.down)(hidden), key=key2, inference=key is None)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Block  # one Block whose arrays have a leading dim: the layers
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, layers, width, heads, dropout, key):
        embed, blocks, head = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, width, key=embed)
        self.blocks = eqx.filter_vmap(lambda k: Block(width, heads, dropout, k))(
            jax.random.split(blocks, layers)
        )
        self.norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.head = eqx.nn.Linear(width, VOCAB, use_bias=False, key=head)

    def __call__(self, tokens, key=None):
        """Logits `(time, VOCAB)` for tokens `(time,)`. Without a key there is no dropout."""
        # Without `unshard` the compiler may move activations instead of weights.
        embed, head = ts.unshard(self.embed), ts.unshard(self.head)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def layer(x, this):
            weights, key = this
            weights = ts.unshard(weights)  # only this layer's
            return eqx.combine(weights, static)(x, key), None

        keys = None if key is None else jax.random.split(key, len(arrays.norm1.weight))
        x, _ = jax.lax.scan(layer, ts.lookup(embed.weight, tokens), (arrays, keys))
        return jax.vmap(head)(jax.vmap(self.norm)(x))


def loss_fn(model, batch, keys=None):
    """The mean cross-entropy in nats per byte of a batch `(size, time + 1)` of bytes.

    For dropout there is a key per row, so that it is the same however the rows are split.
    """
    tokens = batch.astype(jnp.int32)
    if keys is None:
        logits = jax.vmap(model)(tokens[:, :-1])
    else:
        logits = jax.vmap(model)(tokens[:, :-1], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# ------------------------------------------------------------------ the training


class State(eqx.Module):
    model: Transformer
    opt_state: optax.OptState
    step: jax.Array
    key: jax.Array


def make_optimizer(args):
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.warmup, args.steps)
    return optax.adamw(schedule, weight_decay=0.01)


def make_init(args, optimizer):
    def init(key):
        model_key, key = jax.random.split(key)
        model = Transformer(args.layers, args.width, args.heads, args.dropout, model_key)
        return State(model, optimizer.init(eqx.filter(model, eqx.is_array)), jnp.int32(0), key)

    return init


def make_train_step(optimizer, plan=None):
    """Without a plan, that of the step is used, or none outside of one."""

    def train_step(state, batch):
        key, next_key = jax.random.split(state.key)
        keys = ts.with_sharding_constraint(jax.random.split(key, len(batch)), ROWS)
        # On Explicit axes, gradients wait for one sum after the layers.
        grad_fn = value_and_grad(loss_fn, plan, axis_names="fsdp")
        loss, grads = grad_fn(state.model, batch, keys)
        updates, opt_state = optimizer.update(
            grads, state.opt_state, eqx.filter(state.model, eqx.is_array)
        )
        model = eqx.apply_updates(state.model, updates)
        return State(model, opt_state, state.step + 1, next_key), loss

    return train_step


def read_text(limit):
    """The source of the standard library as bytes: (training part, held-out part)."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:limit], np.uint8)
    return np.split(text, [int(0.95 * len(text))])


def batches(text, args, seed=0):
    """Endless random windows `(batch, time + 1)`."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - args.time - 1, args.batch)
        yield text[starts[:, None] + np.arange(args.time + 1)]


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mesh", default="fsdp=-1", help="-1 takes the devices that are left")
    parser.add_argument("--other-mesh", default="data=4,fsdp=-1", help="to restore on")
    add_sizes(parser, steps=100, layers=6)
    parser.add_argument("--out", type=Path, default=Path("out/train_fsdp.png"))
    parser.add_argument("--no-check", action="store_true", help="skip the run on one device")
    return parser.parse_args(argv)


def add_sizes(parser, *, steps, layers):
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--time", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--explicit", action="store_true", help="a mesh with Explicit axes")
    parser.add_argument("--text-bytes", type=int, default=4_000_000)


def main(argv=None):
    args = parse(argv)
    ts.simulate_devices(8)  # JAX still prefers real accelerators
    train_text, held_out = read_text(args.text_bytes)
    optimizer = make_optimizer(args)
    init, key = make_init(args, optimizer), jax.random.key(args.seed)

    # All that the loop says about sharding.
    kind = "explicit" if args.explicit else "auto"
    mesh = ts.make_mesh(args.mesh, axis_types=kind)
    state, plan = init_sharded(init, key, rules=RULES, mesh=mesh)
    batch_specs = P(mesh.axis_names)
    step = jit_step(make_train_step(optimizer), plan, batch=batch_specs)

    print(plan, "\n")
    first = next(batches(train_text, args))
    with jax.set_mesh(mesh):
        grads = raw_gradients(state.model, ts.shard(first, batch_specs), plan)
    print("Communication of the compiled step, compared with the plan:")
    print(step.communication(state, first), "\n")
    before = bits_per_byte(state.model, held_out, args)

    losses, started = [], time.perf_counter()
    some = zip(range(args.steps), batches(train_text, args), strict=False)
    how = {}
    if not sys.stderr.isatty():
        # Drawn ten times. After `maxinterval` seconds without a step tqdm would draw every one.
        how = {"miniters": max(1, args.steps // 10), "maxinterval": math.inf}
    bar = tqdm(some, total=args.steps, **how)
    for i, batch in bar:
        state, loss = step(state, batch)
        losses.append(float(loss))
        if i == 0:
            started = time.perf_counter()  # the first step compiles
        else:
            rate = i * args.batch * args.time / (time.perf_counter() - started)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{rate:,.0f}", refresh=False)

    after = bits_per_byte(state.model, held_out, args)
    print(f"\nheld-out bits per byte: {before:.3f} before, {after:.3f} after {args.steps} steps")
    print_bytes_held(state)
    draw_losses(losses, args.out)
    go_on_elsewhere(state, step, plan, train_text, args)
    if not args.no_check:
        compare_with_one_device(make_train_step(optimizer), init, key, grads, losses, args)


# ------------------------------------------------------------------ reports


def raw_gradients(model, batch, plan):
    return ts.gather(eqx.filter_jit(value_and_grad(loss_fn, plan))(model, batch)[1])


def bits_per_byte(model, text, args):
    held_out = next(batches(text, argparse.Namespace(**{**vars(args), "batch": 64}), seed=1))
    return float(eqx.filter_jit(loss_fn)(ts.gather(model), held_out)) / np.log(2)


def print_bytes_held(state):
    arrays = [x for x in jax.tree.leaves(state) if eqx.is_array(x)]
    total = sum(x.nbytes for x in arrays)
    held = {device: 0 for device in jax.devices()}
    for x in arrays:
        for piece in x.addressable_shards:
            held[piece.device] += piece.data.nbytes
    even = total / len(held)
    print(f"bytes of the full state: {total:,}; an even share: {even:,.0f}")
    for device, count in held.items():
        print(f"  {device} holds {count:,} ({count / even:.3f} of an even share)")


def draw_losses(losses, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte", title="training loss")
    axes.plot(np.arange(1, len(losses) + 1), np.array(losses) / np.log(2))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"loss curve: {path}")


def go_on_elsewhere(state, step, plan, text, args):
    """Saves the state, restores it on another mesh, and continues training with both."""
    path = args.out.with_name("train_fsdp_state")
    shutil.rmtree(path, ignore_errors=True)  # from an earlier run
    save(path, state)
    kind = "explicit" if args.explicit else "auto"
    other_plan = plan.on(ts.make_mesh(args.other_mesh, axis_types=kind))
    other = restore(path, other_plan)
    other_step = jit_step(
        make_train_step(make_optimizer(args)),
        other_plan,
        batch=P(other_plan.mesh.axis_names),
    )
    moved = len(plan.diff(other_plan).changes)
    print(f"saved to {path}; restored on {args.other_mesh}; {moved} leaves are sharded differently")
    gaps = []
    for i, batch in zip(range(5), batches(text, args, seed=2), strict=False):
        state, here = step(state, batch)
        other, there = other_step(other, batch)
        gaps.append(abs(float(here) - float(there)))
        print(f"  step {args.steps + i + 1}: loss {float(here):.5f} here, {float(there):.5f} there")
    if max(gaps) > 2e-5:
        sys.exit("the restored run has other losses than the saved one")


def compare_with_one_device(train_step, init, key, grads, losses, args):
    """The same init, batches and step on one device, without treeshard."""
    text, _ = read_text(args.text_bytes)
    state = eqx.filter_jit(init)(key)
    reference = ts.gather(
        eqx.filter_jit(eqx.filter_grad(loss_fn))(state.model, next(batches(text, args)))
    )
    errors = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), grads, reference)
    step, gaps = eqx.filter_jit(train_step, donate="all-except-first"), []
    for batch, loss in zip(batches(text, args), losses[:20], strict=False):
        state, alone = step(state, batch)
        gaps.append(abs(float(alone) - loss))
    worst = max(jax.tree.leaves(errors))
    print(
        f"compared with one device: raw gradients differ by {worst:.1e} (relative, worst leaf), the"
    )
    print(f"losses of {len(gaps)} steps by {max(gaps):.1e} at most")
    if worst > 1e-5 or max(gaps) > 2e-5:
        sys.exit("the sharded run does not agree with the run on one device")


if __name__ == "__main__":
    main()

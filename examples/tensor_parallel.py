"""Splits a transformer layer over 2 x 2 devices: rows over one axis, weights over the other.

    python examples/tensor_parallel.py

The same layer is written in Equinox and in Flax nnx, and each runs in two ways. By jit, the
layer is written as for one device, and the compiler gets nothing but the specs of its weights.
By hand, the layer runs once per device, on its shards of the weights, and itself sums over the
devices: once after attention, and once after the MLP. Outputs and gradients are those of one
device.
"""

import argparse
import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.manual import column_parallel, row_parallel, value_and_grad

# A weight that produces heads or hidden units is split by them; so is one that consumes them.
EQUINOX_RULES = [  # Equinox stores weights as (out, in)
    ("(q|k|v|up)/weight", P("tensor", None)),
    ("(o|down)/weight", P(None, "tensor")),
    ("norm", None),
]
NNX_RULES = [  # and Flax as (in, out)
    ("(q|k|v|up)/kernel", P(None, "tensor")),
    ("(o|down)/kernel", P("tensor", None)),
    ("norm", None),
]


def attend(q, k, v):
    """Causal attention. Its scores are scaled by the width of a head, which is q's last dim."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def normalize(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


# ------------------------------------------------------------------ the layer, by hand


def parallel_mlp(x, up, down, axis, *, activation=jax.nn.gelu, dim=None):
    """A multilayer perceptron whose hidden units are split over the devices along `axis`.

    `x` is `(..., width)`, equal on all devices along the axis, or split on `dim`; `up` is this
    device's shard `(width, hidden / n)`, or a tuple of several for a gated activation, and `down`
    `(hidden / n, width)`. It costs one all-reduce forwards and one backwards. With `dim`, each is
    an all-gather and a reduce-scatter, and what is between the layers works on shards.
    """
    hidden = column_parallel(x, up, axis, dim=dim)
    hidden = activation(*hidden) if isinstance(hidden, tuple | list) else activation(hidden)
    return row_parallel(hidden, down, axis, dim=dim)


def parallel_attention(x, qkv, out, axis, *, head_width, attend=attend, dim=None):
    """Self-attention whose heads are split over the devices along `axis`.

    `x` is `(..., time, width)`; `qkv` are this device's shards `(width, heads / n * head_width)`
    of three weights, and `out` is `(heads / n * head_width, width)`. Keys and values may have
    fewer heads than queries, but at least one per device. Costs and `dim` as in `parallel_mlp`.
    """
    if any(w.shape[-1] % head_width for w in qkv):
        columns = ", ".join(str(w.shape[-1]) for w in qkv)
        raise ValueError(f"q, k, v have {columns} columns per device: heads would be split")
    q, k, v = column_parallel(x, qkv, axis, dim=dim)
    heads = attend(*(y.reshape(*y.shape[:-1], -1, head_width) for y in (q, k, v)))
    return row_parallel(heads.reshape(q.shape), out, axis, dim=dim)


def layer_by_hand(w, x, head_width):
    """The layer of one device: `w` has its shards of the weights, each (in, out)."""
    qkv = (w["q"], w["k"], w["v"])
    inner = normalize(x, w["norm1"])
    x = x + parallel_attention(inner, qkv, w["o"], "tensor", head_width=head_width)
    return x + parallel_mlp(normalize(x, w["norm2"]), w["up"], w["down"], "tensor")


# ------------------------------------------------------------------ the layer, in Equinox


class EquinoxLayer(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm1: jax.Array
    norm2: jax.Array
    heads: int = eqx.field(static=True)

    def __init__(self, args, key):
        linear = partial(eqx.nn.Linear, use_bias=False)
        keys = jax.random.split(key, 6)
        self.q, self.k, self.v, self.o = (linear(args.width, args.width, key=k) for k in keys[:4])
        self.up = linear(args.width, 4 * args.width, key=keys[4])
        self.down = linear(4 * args.width, args.width, key=keys[5])
        self.norm1, self.norm2 = jnp.ones(args.width), jnp.ones(args.width)
        self.heads = args.heads

    def __call__(self, x):
        def every(linear, x):
            return ts.matmul(x, linear.weight.T)

        inner = normalize(x, self.norm1)
        q, k, v = (every(linear, inner) for linear in (self.q, self.k, self.v))
        found = attend(*(y.reshape(*y.shape[:-1], self.heads, -1) for y in (q, k, v)))
        x = x + every(self.o, found.reshape(q.shape))
        return x + every(self.down, jax.nn.gelu(every(self.up, normalize(x, self.norm2))))

    def weights(self):
        linears = {name: getattr(self, name) for name in ("q", "k", "v", "o", "up", "down")}
        split = {name: linear.weight.T for name, linear in linears.items()}
        return split | {"norm1": self.norm1, "norm2": self.norm2}


def equinox_layer(args):
    """The layer as a pytree; how to call it; and its weights by name."""
    return EquinoxLayer(args, jax.random.key(0)), lambda m, x: m(x), lambda m: m.weights()


# ------------------------------------------------------------------ the layer, in nnx


class NnxLayer(nnx.Module):
    def __init__(self, args, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q, self.k, self.v, self.o = (linear(args.width, args.width) for _ in range(4))
        self.up = linear(args.width, 4 * args.width)
        self.down = linear(4 * args.width, args.width)
        self.norm1, self.norm2 = (nnx.Param(jnp.ones(args.width)) for _ in range(2))
        self.heads = args.heads

    def __call__(self, x):
        inner = normalize(x, self.norm1[...])
        q, k, v = (linear(inner) for linear in (self.q, self.k, self.v))
        found = attend(*(y.reshape(*y.shape[:-1], self.heads, -1) for y in (q, k, v)))
        # A row-parallel product is the one that Explicit axes do not type on their own.
        x = x + ts.matmul(found.reshape(q.shape), self.o.kernel[...])
        hidden = jax.nn.gelu(self.up(normalize(x, self.norm2[...])))
        return x + ts.matmul(hidden, self.down.kernel[...])


def nnx_layer(args):
    """The layer's state; how to call it; and its weights by name."""
    graph, state = nnx.split(NnxLayer(args, nnx.Rngs(0)))

    def weights(state):
        linears = {name: state[name] for name in ("q", "k", "v", "o", "up", "down")}
        split = {name: linear["kernel"][...] for name, linear in linears.items()}
        return split | {"norm1": state["norm1"][...], "norm2": state["norm2"][...]}

    return state, lambda state, x: nnx.merge(graph, state)(x), weights


# ------------------------------------------------------------------ one device, jit, by hand


def loss_of(layer):
    """A loss for `layer(params, x)`, beside what the layer returns."""

    def loss(params, x):
        out = layer(params, x)
        return jnp.mean(jnp.square(out)), out

    return loss


def by_jit(layer):
    """The layer as on one device: the compiler follows the shardings of its inputs."""
    return jax.jit(jax.value_and_grad(loss_of(layer), has_aux=True))


def by_hand(layer, plan):
    """The layer once per device, on its shards of the weights and on its rows."""
    # Gradients are averaged over rows; the layer itself sums over "tensor".
    grad = value_and_grad(loss_of(layer), "data", plan, has_aux=True)
    rows = P("data")
    in_specs, out_specs = (plan.specs, rows), ((P(), rows), plan.specs)
    return jax.jit(jax.shard_map(grad, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs))


def compare(title, params, call, weights, rules, x, args):
    """Runs the layer on one device and in both ways; returns the largest relative error."""
    kind = "explicit" if args.explicit else "auto"
    mesh = ts.make_mesh("data=2,tensor=2", devices=jax.devices()[:4], axis_types=kind)
    plan = ts.plan(params, rules, mesh, min_size=0)
    plan.check()
    print(f"{title}\n{plan}")

    hand = partial(layer_by_hand, head_width=args.width // args.heads)
    ways = {
        "by jit": by_jit(call),
        "by hand": by_hand(lambda params, x: hand(weights(params), x), plan),
    }
    (_, wanted), wanted_grads = ts.gather(by_jit(call)(params, x))
    placed, rows = ts.shard(params, plan), ts.shard(x, P("data"), mesh)
    worst = 0.0
    for way, f in ways.items():
        (_, out), grads = ts.gather(f(placed, rows))
        outputs = off(out, wanted)
        gradients = max(jax.tree.leaves(jax.tree.map(off, grads, wanted_grads)))
        worst = max(worst, outputs, gradients)
        print(f"{way}: outputs are off by {outputs:.1e}, gradients by {gradients:.1e}")
    print()
    return worst


def off(got, wanted):
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--time", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--explicit", action="store_true", help="a mesh with Explicit axes")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    ts.simulate_devices(8)  # JAX still prefers real accelerators
    x = np.random.default_rng(0).normal(size=(args.batch, args.time, args.width))
    x = x.astype(np.float32)
    worst = max(
        compare("Equinox", *equinox_layer(args), EQUINOX_RULES, x, args),
        compare("nnx", *nnx_layer(args), NNX_RULES, x, args),
    )
    if worst > 1e-5:
        sys.exit("the layer on several devices differs from the layer on one")


if __name__ == "__main__":
    main()

"""Compiles a training step of a Llama for accelerators that you do not have, and reads the program.

    python examples/compile_llama.py --size 8b --topology v5e-256
    python examples/compile_llama.py --size 70b --topology v5p-1024 --mesh "fsdp=128,tensor=4"
    python examples/compile_llama.py --size 1b --topology h100:8 --batch 32

It needs the compiler of these devices (`pip install 'treeshard[tpu]'` or `'treeshard[cuda]'`) and
neither the devices nor memory for the model: there are only shapes. `MALLOC_ARENA_MAX=1` in the
environment lets the threads of the compiler share the memory that they freed.
"""

import argparse
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, auto_axes
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import accumulate_gradients, jit_step, value_and_grad


class Size(NamedTuple):
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 128256


# Llama 3, https://arxiv.org/abs/2407.21783, table 3; 1b and 3b are those of Llama 3.2.
SIZES = {
    "1b": Size(16, 2048, 8192, 32, 8),
    "3b": Size(28, 3072, 8192, 24, 8),
    "8b": Size(32, 4096, 14336, 32, 8),
    "70b": Size(80, 8192, 28672, 64, 8),
    "405b": Size(126, 16384, 53248, 128, 8),
}

# ------------------------------------------------------------------ the model


def parameters(size):
    """Shapes of the parameters, in float32. Layers are stacked on dim 0, for a scan."""
    head = size.width // size.heads

    def weight(*shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    def stacked(*shape):
        return weight(size.layers, *shape)

    layers = {
        "attention_norm": stacked(size.width),
        "q": stacked(size.width, size.heads * head),
        "k": stacked(size.width, size.kv_heads * head),
        "v": stacked(size.width, size.kv_heads * head),
        "o": stacked(size.heads * head, size.width),
        "mlp_norm": stacked(size.width),
        "gate": stacked(size.width, size.hidden),
        "up": stacked(size.width, size.hidden),
        "down": stacked(size.hidden, size.width),
    }
    return {
        "embed": weight(size.vocabulary, size.width),
        "layers": layers,
        "norm": weight(size.width),
        "head": weight(size.width, size.vocabulary),
    }


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-5)
    return x32.astype(x.dtype) * scale


def rotate(x):
    """Rotary positions of `x`, (batch, tokens, heads, head width)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 500_000 ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def layer(x, w, size):
    batch, tokens, width = x.shape
    h = rms_norm(x, w["attention_norm"])
    q, k, v = ((h @ w[name]).reshape(batch, tokens, -1, width // size.heads) for name in "qkv")
    attended = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x += ts.matmul(attended.reshape(batch, tokens, width), w["o"])
    h = rms_norm(x, w["mlp_norm"])
    return x + ts.matmul(jax.nn.silu(h @ w["gate"]) * (h @ w["up"]), w["down"])


def cross_entropy(logits, labels):
    """The loss of each token. Of a device's only row, the lookup of labels would have a gradient
    that TPUs take from a copy of the logits; tokens in one dim have not."""
    tokens = logits.reshape(-1, logits.shape[-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(tokens, labels.reshape(-1))
    return losses.reshape(labels.shape)


# ------------------------------------------------------------------ the step


def default_rules(mesh):
    """FSDP, on any dim but that of the layers, which a scan runs over. With an axis `tensor`, also
    tensor parallelism: weights that expand are split by column, those that reduce by row.
    """
    return TENSOR_PARALLEL if "tensor" in mesh.shape else FSDP


FSDP = [("norm", None), ("layers", ts.fsdp("fsdp", skip=(0,))), (".*", ts.fsdp("fsdp"))]
TENSOR_PARALLEL = [
    ("norm", None),
    ("layers/(q|k|v|gate|up)$", P(None, "fsdp", "tensor")),
    ("layers/(o|down)$", P(None, "tensor", "fsdp")),
    ("head", P("fsdp", "tensor")),
    ("embed", P("tensor", "fsdp")),
    (".*", None),
]


def make_llama(
    mesh,
    rules=None,
    *,
    size="8b",
    remat=True,
    accumulate=1,
    global_batch=None,
    tokens=4096,
):
    """A training step on `mesh`, and shapes of its state and batch, for `step.compile`.

    Args:
        mesh: Axes `fsdp`, and perhaps `data` and `tensor`.
        rules: How the state is sharded; by default `default_rules`.
        size: A key of `SIZES`, or a `Size`.
        remat: Whether to keep only the input of each layer, and to compute the rest again.
        accumulate: The number of minibatches that a step runs one after another.
        global_batch: Sequences per step; by default one per device and minibatch, where the
            devices along `tensor` count as one.
        tokens: The length of a sequence.
    """
    size = SIZES.get(size, size)
    optimizer = optax.adamw(3e-4, weight_decay=0.1)
    params = parameters(size)
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    plan = ts.plan(state, default_rules(mesh) if rules is None else rules, mesh)
    row_axes = tuple(axis for axis in mesh.axis_names if axis != "tensor")
    rows = P(row_axes)
    losses = cross_entropy
    if AxisType.Explicit in mesh.axis_types:  # which do not type a lookup in logits that are split
        losses = auto_axes(cross_entropy, out_sharding=rows)

    def use(weights):
        """Casts weights, then gathers them for use: in this order half the bytes move."""
        return ts.unshard(jax.tree.map(lambda w: w.astype("bfloat16"), weights))

    def loss(params, batch):
        def body(x, weights):
            return ts.with_sharding_constraint(layer(x, use(weights), size), rows), None

        x = ts.lookup(use(params["embed"]), batch[:, :-1])
        x = ts.with_sharding_constraint(x, rows)
        x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, params["layers"])
        x = rms_norm(x, params["norm"].astype(x.dtype))
        logits = (x @ use(params["head"])).astype("float32")
        return losses(logits, batch[:, 1:]).mean()

    @jit_step(plan=plan, batch=rows)
    def step(state, batch):
        def grad(minibatch, key):
            grad_fn = value_and_grad(loss, axis_names=row_axes)
            value, grads = grad_fn(state["params"], minibatch)
            return grads, value

        if accumulate > 1:
            grads, value = accumulate_gradients(grad, batch, accumulate)
        else:
            grads, value = grad(batch, None)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    if global_batch is None:
        global_batch = accumulate * mesh.size // mesh.shape.get("tensor", 1)
    return step, plan.structs, jax.ShapeDtypeStruct((global_batch, tokens + 1), "int32")


# ------------------------------------------------------------------ the report


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--topology", help="such as v5e-256; without it, simulated CPUs")
    parser.add_argument("--mesh", default="fsdp=-1", help='such as "fsdp=64,tensor=4"')
    parser.add_argument("--batch", type=int, help="sequences per step; by default 1 per device")
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--explicit", action="store_true", help="a mesh with Explicit axes")
    return parser.parse_args(argv)


def main(argv=None, size=None):
    args = parse(argv)
    if args.topology is None:
        ts.simulate_devices(8)
    kind = "explicit" if args.explicit else "auto"
    mesh = ts.make_mesh(args.mesh, topology=args.topology, axis_types=kind)
    step, state, batch = make_llama(
        mesh,
        size=size or args.size,
        global_batch=args.batch,
        tokens=args.tokens,
    )
    print(f"{step.plan}\n")
    print(f"compiling for {mesh.devices.flat[0].device_kind} x {mesh.size:,} ...", file=sys.stderr)
    start = time.perf_counter()
    compiled = step.compile(state, batch)
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    compared, memory = compiled.communication(), compiled.memory()
    for title, part in (("communication", compared), ("memory", memory)):
        print(f"---- {title}\n{part}\n")
    return compared, memory


if __name__ == "__main__":
    main()

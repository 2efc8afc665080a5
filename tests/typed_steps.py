"""A step whose values are known, and the lines that make them, for several test files."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.programs import StepValue, Types

WIDTH, ROWS, TIME, VOCAB = 64, 16, 32, 512
ROW = P("fsdp")


def marked(mark: str, file: str = __file__) -> str:
    """The line of a file that ends in a comment, as `file:line`."""
    lines = Path(file).read_text().splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    return f"{file}:{number}"


def transformer(mesh: Any, layers: int = 4, batch: Any = ROW) -> tuple[Any, Any, Any]:
    """A step of a small language model, and structs of its state and batch."""
    shapes = {
        "embed": (VOCAB, WIDTH),
        "head": (WIDTH, VOCAB),
        "layers": {"down": (layers, 4 * WIDTH, WIDTH), "up": (layers, WIDTH, 4 * WIDTH)},
    }
    state = jax.tree.map(lambda shape: struct(*shape), shapes, is_leaf=lambda x: type(x) is tuple)
    rules = [("layers/", ts.fsdp("fsdp", skip=(0,))), (".*", ts.fsdp("fsdp"))]
    plan = ts.plan(state, rules, mesh, min_size=0)
    specs = ts.layer_specs(plan.specs["layers"])

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        weights = ts.unshard(weights, specs)  # gathered layer
        with jax.named_scope("mlp"):
            hidden = jax.nn.relu(x @ weights["up"])  # hidden
            return x + hidden @ weights["down"], None  # stream

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = ts.lookup(ts.unshard(params["embed"]), tokens)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = x @ ts.unshard(params["head"])  # logits
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    def update(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = ts.training.value_and_grad(loss)(state, tokens)
        return jax.tree.map(lambda x, g: x - 0.1 * g, state, grads), value

    return ts.jit_step(update, plan, batch=batch), plan.structs, struct(ROWS, TIME, dtype="int32")


def forward(types: Types, mark: str) -> StepValue:
    """The value of most elements that a line makes in the forward pass."""
    values = [x for x in types.at(marked(mark)) if x.part == "forward"]
    return max(values, key=lambda value: math.prod(value.shape))

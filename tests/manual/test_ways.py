"""Every way of training has the losses of one device, over 20 steps of SGD and of AdamW.

The model is a small transformer layer. Its loss is a squared error, which no rescaling of the
parameters leaves as it is.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from examples.tensor_parallel import parallel_attention, parallel_mlp
from treeshard import manual
from treeshard.training import jit_step, shard_map_step

WIDTH, HEAD_WIDTH, HIDDEN, TIME, ROWS, STEPS = 16, 4, 32, 4, 16, 20
OPTIMIZERS = {"SGD": optax.sgd(0.1), "AdamW": optax.adamw(3e-3)}
Tree = dict[str, Any]
# Most of the time goes to XLA, and code that runs once need not be fast.
pytestmark = pytest.mark.usefixtures("quick_compiles")


def normal(seed: int, *shape: int) -> np.ndarray:
    scale = 1 / math.sqrt(shape[-2])
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def make_params() -> Tree:
    shapes = {name: (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return {**weights, "norm": np.ones(WIDTH, np.float32)}


def batches() -> list[Tree]:
    parts = {"x": 100, "y": 200}
    return [
        {name: normal(seed + i, ROWS, TIME, WIDTH) * 2 for name, seed in parts.items()}
        for i in range(STEPS)
    ]


# ------------------------------------------------------------------ the model, twice


def normalized(x: Any, scale: Any) -> Any:
    root = lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    return x * root * jnp.broadcast_to(scale, x.shape)


def heads(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], -1, HEAD_WIDTH)


def layer(p: Tree, x: Any) -> Any:
    inner = normalized(x, p["norm"])
    mixed = jax.nn.dot_product_attention(*(heads(inner @ p[name]) for name in "qkv"))
    x = x + mixed.reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(normalized(x, p["norm"]) @ p["up"]) @ p["down"]


def parallel_layer(p: Tree, x: Any) -> Any:
    """The same on this device's part of the weights."""
    qkv = (p["q"], p["k"], p["v"])
    inner = normalized(x, p["norm"])
    x = x + parallel_attention(
        inner, qkv, p["o"], "tensor", head_width=HEAD_WIDTH, attend=jax.nn.dot_product_attention
    )
    return x + parallel_mlp(normalized(x, p["norm"]), p["up"], p["down"], "tensor")


def loss(layer: Callable[[Tree, Any], Any], params: Tree, batch: Tree) -> Any:
    return jnp.mean(jnp.square(layer(params, batch["x"]) - batch["y"]))


plain_loss = partial(loss, layer)
parallel_loss = partial(loss, parallel_layer)

# ------------------------------------------------------------------ the ways


FSDP = [("norm", None), (".*", ts.fsdp("fsdp"))]
BOTH = [
    ("norm", None),
    ("[qkv]$|up", P("fsdp", "tensor")),
    ("o$|down", P("tensor", "fsdp")),
]


class Way(NamedTuple):
    """How to train: the mesh, how parameters lie, the loss, and the kind of step."""

    mesh: str
    rules: Any
    by_hand: bool = False
    loss: Callable[[Tree, Tree], Any] = plain_loss
    axis_types: Any = "auto"


WAYS = {
    "data parallel": Way("fsdp=8", [(".*", None)], by_hand=True),
    "fsdp by jit": Way("fsdp=8", FSDP),
    "fsdp by hand": Way("fsdp=8", FSDP, by_hand=True),
    "fsdp x tp by jit": Way("fsdp=4,tensor=2", BOTH),
    "fsdp x tp by hand": Way("fsdp=2,tensor=4", BOTH, by_hand=True, loss=parallel_loss),
    "explicit axes": Way("fsdp=8", FSDP, axis_types="explicit"),
}


def updating(grad: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    def step(state: Tree, batch: Tree) -> Any:
        value, grads = grad(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    return step


def make_step(way: Way, plan: ts.Plan, optimizer: Any) -> Any:
    specs = plan.specs["params"]
    if way.by_hand:
        grad = manual.value_and_grad(way.loss, "fsdp", specs)
        return shard_map_step(updating(grad, optimizer), plan, batch=P("fsdp"))
    # Where axes are explicit, nobody else decides what is gathered.
    gathered = lambda p, batch: way.loss(ts.unshard(p, specs, "fsdp"), batch)  # noqa: E731
    return jit_step(updating(jax.value_and_grad(gathered), optimizer), plan, batch=P("fsdp"))


def trained(step: Any, state: Any) -> np.ndarray:
    losses: list[float] = []
    for batch in batches():
        state, value = step(state, batch)
        losses.append(float(value))
    return np.array(losses)


def make_state(optimizer: Any) -> Tree:
    params = make_params()
    return jax.device_get({"params": params, "moments": optimizer.init(params)})


def losses_on_one_device(optimizer: Any) -> np.ndarray:
    step = updating(jax.value_and_grad(plain_loss), optimizer)
    return trained(jax.jit(step), make_state(optimizer))


def losses(way: Way, optimizer: Any) -> np.ndarray:
    state = make_state(optimizer)
    mesh = ts.make_mesh(way.mesh, axis_types=way.axis_types)
    plan = ts.plan(state, way.rules, mesh, min_size=0)
    plan.check()
    return trained(make_step(way, plan, optimizer), ts.shard(state, plan))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_way_of_training_has_the_losses_of_one_device(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    with jax.numpy_dtype_promotion("standard"):  # optax mixes counts and floats
        alone = losses_on_one_device(optimizer)
        assert len(alone) == 20
        assert alone[-1] < alone[0] - 0.5
        for way, how in WAYS.items():
            off = np.abs(losses(how, optimizer) - alone).max()
            assert off <= 2e-5, f"{way}: {off}"

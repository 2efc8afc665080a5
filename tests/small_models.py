"""Small models and their training steps, by jit with weight hints and by hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.manual import gather_params, sync_gradients, vary
from treeshard.training import jit_step, shard_map_step

LAYERS, WIDTH = 3, 16
Params = Any


class Model(NamedTuple):
    layer: dict[str, tuple[int, ...]]
    rest: dict[str, tuple[int, ...]]
    start: Callable[[Params, jax.Array], jax.Array]
    block: Callable[[Params, jax.Array], jax.Array]
    end: Callable[[Params, jax.Array], jax.Array]
    batch: jax.ShapeDtypeStruct


def _mlp_block(p: Params, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["up"] + p["bias"][None]) @ p["down"]


def _attention_block(p: Params, x: jax.Array) -> jax.Array:
    h = x * p["norm"][None, None]
    q, k, v = (h @ p[name] for name in ("q", "k", "v"))
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 4, axis=-1)
    x = x + jnp.einsum("bts,bsd->btd", weights, v) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def _conv_block(p: Params, x: jax.Array) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=dims)
    return x + jnp.tanh(y + p["bias"][None, None, None])


MODELS = {
    "mlp": Model(
        {"up": (WIDTH, 32), "down": (32, WIDTH), "bias": (32,)},
        {"head": (WIDTH, 8)},
        lambda p, x: x,
        _mlp_block,
        lambda p, x: x @ p["head"],
        struct(16, WIDTH),
    ),
    "transformer": Model(
        {
            **{name: (WIDTH, WIDTH) for name in "qkvo"},
            "up": (WIDTH, 32),
            "down": (32, WIDTH),
            "norm": (WIDTH,),
        },
        {"embed": (64, WIDTH), "head": (WIDTH, 64)},
        lambda p, x: p["embed"][x],
        _attention_block,
        lambda p, x: x @ p["head"],
        jax.ShapeDtypeStruct((8, 4), "int32"),
    ),
    "conv": Model(
        {"kernel": (3, 3, WIDTH, WIDTH), "bias": (WIDTH,)},
        {"stem": (1, 1, 8, WIDTH), "head": (WIDTH, 8)},
        lambda p, x: jnp.einsum("bhwc,cd->bhwd", x, p["stem"][0, 0]),
        _conv_block,
        lambda p, x: x.mean((1, 2)) @ p["head"],
        struct(8, 4, 4, 8),
    ),
}


def plan_of(model: Model, mesh: Any, scan: bool, rule: Any = None) -> ts.Plan:
    """All matrices sharded over `fsdp`; layers stacked on dim 0 if they are scanned."""
    one = {name: struct(*shape) for name, shape in model.layer.items()}
    stacked = {name: struct(LAYERS, *shape) for name, shape in model.layer.items()}
    tree = {
        "layers": stacked if scan else [one] * LAYERS,
        **{name: struct(*shape) for name, shape in model.rest.items()},
    }
    rules = [
        ("bias|norm", None),
        ("layers", ts.fsdp("fsdp", skip=(0,) if scan else ())),
        (".*", ts.fsdp("fsdp")),
    ]
    return ts.plan(tree, rules if rule is None else [(".*", rule)], mesh, min_size=0)


def forward(
    model: Model, plan: ts.Plan, use: Callable[[Any, Any], Any], scan: bool, remat: bool
) -> Callable[[Params, jax.Array], jax.Array]:
    """The loss; `use(params, specs)` is what makes weights whole where they are used."""

    def loss(p: Params, x: jax.Array) -> jax.Array:
        specs = plan.specs
        rest = {name: use(p[name], specs[name]) for name in model.rest}
        x = model.start(rest, x)
        layer_specs = ts.layer_specs(specs["layers"]) if scan else specs["layers"][0]

        def layer(x: jax.Array, one: Params) -> tuple[jax.Array, None]:
            return model.block(use(one, layer_specs), x), None

        layer = jax.checkpoint(layer) if remat else layer
        if scan:
            x, _ = jax.lax.scan(layer, x, p["layers"])
        else:
            for one in p["layers"]:
                x, _ = layer(x, one)
        return jnp.mean(model.end(rest, x) ** 2)

    return loss


def step(
    model: Model, plan: ts.Plan, way: str, *, scan: bool = False, remat: bool = False
) -> tuple[Any, Any]:
    """The step, and its batch: `way` is `"jit"` or `"hand"`."""
    axes = tuple(ts.get_mesh_axis_names(plan.mesh))
    batch = P(axes)
    fsdp = "fsdp" if "fsdp" in axes else ()
    use = {
        "jit": lambda p, specs: ts.unshard(p, specs, fsdp),
        "hand": lambda p, specs: gather_params(p, fsdp, specs) if fsdp else p,
    }[way]
    loss = forward(model, plan, use, scan, remat)

    def by_jit(state: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    def by_hand(state: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(vary(state, axes), x)
        grads = sync_gradients(grads, axes, plan)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, jax.lax.pmean(value, axes)

    if way == "hand":
        return shard_map_step(by_hand, plan, batch=batch), model.batch
    return jit_step(by_jit, plan, batch=batch), model.batch


def compared(
    name: str, way: str, mesh: Any, *, scan: bool = False, remat: bool = False, rule: Any = None
) -> ts.Comparison:
    """What a model's compiled step communicates, beside its plan."""
    plan = plan_of(MODELS[name], mesh, scan, rule)
    run, batch = step(MODELS[name], plan, way, scan=scan, remat=remat)
    return run.communication(plan.structs, batch)

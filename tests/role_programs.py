"""Steps whose leaves have other roles than their names and shapes say, for several test files.

Each is an ordinary program with `unshard` where a layer begins: low-rank factors, experts, loops
over time, two optimizers, a target network, averages of the weights, a frozen base.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from helpers import struct
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import in_passes

WIDTH, LAYERS, ROWS, EXPERTS, TIME = 64, 2, 64, 4, 6


class Program(NamedTuple):
    """A step, and structs of its state and batch.

    `roles` has the role of some leaves, by a part of their path.
    """

    step: ts.Step
    plan: ts.Plan
    batch: Any
    roles: dict[str, str]


def _made(
    mesh: Any,
    init: Callable[[jax.Array], Any],
    step: Callable[[Any, Any], tuple[Any, Any]],
    batch: Any,
    roles: dict[str, str],
    rules: Any = None,
) -> Program:
    """The program on a mesh; rows are split over all its axes."""
    state = jax.eval_shape(init, jax.random.key(0))
    axis = "fsdp" if "fsdp" in mesh.shape else "expert"
    rules = rules or [(".*", ts.fsdp(axis))]
    plan = ts.plan(state, rules, mesh, min_size=256)
    made = ts.jit_step(step, plan, batch=P(tuple(mesh.shape)))
    return Program(made, plan, batch, roles)


def _differentiate(mesh: Any) -> Callable[..., Any]:
    """On Explicit axes, the gradients of all uses are added up before their sum over devices."""
    if AxisType.Explicit in mesh.axis_types:
        return partial(ts.training.value_and_grad, axis_names=mesh.axis_names)
    return jax.value_and_grad


def _trained(
    mesh: Any,
    init: Callable[[jax.Array], Any],
    loss: Callable[[Any, Any], jax.Array],
    batch: Any,
    rules: Any,
    roles: dict[str, str],
    optimizer: optax.GradientTransformation | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Program:
    """A step of one optimizer, by default Adam, whose state is only updated."""
    if optimizer is None:
        optimizer, roles = optax.adam(1e-3), {"opt/": "updated only", **roles}
    if differentiate is None:
        differentiate = _differentiate(mesh)

    def start(key: jax.Array) -> Any:
        params = init(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = differentiate(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return _made(mesh, start, step, batch, roles, rules)


def _dense(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def _mlp(key: jax.Array) -> Any:
    names = [f"layer{i}" for i in range(LAYERS)]
    keys = jax.random.split(key, LAYERS)
    return {
        name: {"w": _dense(k, WIDTH, WIDTH), "b": jnp.zeros(WIDTH)}
        for name, k in zip(names, keys, strict=True)
    }


def _apply(params: Any, x: jax.Array) -> jax.Array:
    for name in sorted(params):
        layer = ts.unshard(params[name])
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return x


def _loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((_apply(params, batch["x"]) - batch["y"]) ** 2)


BATCH = {"x": struct(ROWS, WIDTH), "y": struct(ROWS, WIDTH)}


def lora(mesh: Any) -> Program:
    """Low-rank factors on a frozen base."""
    optimizer = optax.adam(1e-3)

    def init(key: jax.Array) -> Any:
        base = _mlp(key)
        factors = {name: {"a": _dense(key, WIDTH, 8), "b": jnp.zeros((8, WIDTH))} for name in base}
        return {"base": base, "lora": factors, "opt": optimizer.init(factors)}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(factors: Any) -> jax.Array:
            x = batch["x"]
            for name in sorted(state["base"]):
                layer, low = ts.unshard(state["base"][name]), ts.unshard(factors[name])
                x = jnp.tanh(x @ layer["w"] + (x @ low["a"]) @ low["b"] + layer["b"][None])
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = _differentiate(mesh)(loss)(state["lora"])
        updates, opt = optimizer.update(grads, state["opt"])
        return {**state, "lora": optax.apply_updates(state["lora"], updates), "opt": opt}, value

    roles = {"base/": "frozen", "lora/": "trained", "opt/": "updated only"}
    return _made(mesh, init, step, BATCH, roles)


# ------------------------------------------------------------------ experts


def _experts(key: jax.Array) -> Any:
    return {
        "router": _dense(key, WIDTH, EXPERTS),
        "experts": {
            "up": _dense(key, EXPERTS, WIDTH, 2 * WIDTH),
            "up_b": jnp.zeros((EXPERTS, 2 * WIDTH)),
            "down": _dense(key, EXPERTS, 2 * WIDTH, WIDTH),
        },
        "head": _dense(key, WIDTH, WIDTH),
    }


_EXPERT_RULES = [("experts/.*", ts.shard_dim("expert", 0)), (".*", None)]


def experts_by_constraints(mesh: Any) -> Program:
    """Each group of rows sends an equal number to each expert, as compilers partition it."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]  # groups, rows, width
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
        sent = jnp.einsum("gsm,gse->egsm", x, chosen)
        sent = ts.with_sharding_constraint(sent, P("expert", "data"))
        up = jnp.einsum("egsm,emf->egsf", sent, params["experts"]["up"])
        hidden = jax.nn.relu(up + params["experts"]["up_b"][:, None, None])
        done = jnp.einsum("egsf,efm->egsm", hidden, params["experts"]["down"])
        done = ts.with_sharding_constraint(done, P("expert", "data"))
        back = jnp.einsum("egsm,gse->gsm", done, gates * chosen)
        back = ts.with_sharding_constraint(back, P(("data", "expert")))
        return jnp.mean((back @ params["head"] - batch["y"]) ** 2)

    shape = (ROWS, 8, WIDTH)
    batch = {"x": struct(*shape), "y": struct(*shape)}
    roles = {"params/experts": "trained, split", "params/router": "trained"}
    return _trained(mesh, _experts, loss, batch, _EXPERT_RULES, roles)


def experts_by_hand(mesh: Any) -> Program:
    """The same rows, sent by `all_to_all` inside `shard_map`."""

    def layer(x: jax.Array, gates: jax.Array, experts: Any) -> jax.Array:
        sent = jnp.einsum("sm,se->esm", x, gates)
        sent = jax.lax.all_to_all(sent, "expert", 0, 1, tiled=True)
        hidden = jax.nn.relu(
            jnp.einsum("esm,emf->esf", sent, experts["up"]) + experts["up_b"][:, None]
        )
        done = jnp.einsum("esf,efm->esm", hidden, experts["down"])
        done = jax.lax.all_to_all(done, "expert", 1, 0, tiled=True)
        return jnp.einsum("esm,se->sm", done, gates)

    rows = P(("data", "expert"))

    def loss(params: Any, batch: Any) -> jax.Array:
        gates = jax.nn.softmax(batch["x"] @ params["router"])
        run = jax.shard_map(layer, in_specs=(rows, rows, P("expert")), out_specs=rows)
        back = run(batch["x"], gates, params["experts"])
        return jnp.mean((back @ params["head"] - batch["y"]) ** 2)

    roles = {"params/experts": "trained, split", "params/router": "trained"}
    return _trained(mesh, _experts, loss, BATCH, _EXPERT_RULES, roles)


# ------------------------------------------------------------------ loops and ties


def tied_heads(mesh: Any) -> Program:
    """One table for embedding and head."""

    def init(key: jax.Array) -> Any:
        return {"embed": _dense(key, 128, WIDTH), "mlp": _mlp(key)}

    def loss(params: Any, batch: Any) -> jax.Array:
        table = ts.unshard(params["embed"])
        logits = _apply(params["mlp"], ts.lookup(table, batch["ids"])) @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    ids = jax.ShapeDtypeStruct((ROWS,), "int32")
    return _trained(mesh, init, loss, {"ids": ids, "next": ids}, None, {"params/": "trained"})


def gru(mesh: Any) -> Program:
    """A recurrent cell over time, whose weights are gathered once."""

    def init(key: jax.Array) -> Any:
        return {
            "ih": _dense(key, WIDTH, 3 * WIDTH),
            "hh": _dense(key, WIDTH, 3 * WIDTH),
            "b": jnp.zeros(3 * WIDTH),
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        cell = ts.unshard(params)

        def tick(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            r, z, n = jnp.split(x @ cell["ih"] + cell["b"][None], 3, -1)
            hr, hz, hn = jnp.split(h @ cell["hh"], 3, -1)
            r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
            return (1 - z) * jnp.tanh(n + r * hn) + z * h, None

        xs = jnp.moveaxis(batch["x"], 1, 0)
        h, _ = jax.lax.scan(tick, jnp.zeros_like(xs[0]), xs)
        return jnp.mean((h - batch["y"]) ** 2)

    batch = {"x": struct(ROWS, TIME, WIDTH), "y": struct(ROWS, WIDTH)}
    return _trained(mesh, init, loss, batch, None, {"params/": "trained"})


def accumulated_layers(mesh: Any) -> Program:
    """Gradients of two minibatches, of layers in a scan that are computed again."""

    def init(key: jax.Array) -> Any:
        return {"w": _dense(key, LAYERS, WIDTH, WIDTH), "b": jnp.zeros((LAYERS, WIDTH))}

    def loss(params: Any, batch: Any) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
            of_layer = ts.unshard(of_layer)
            return jnp.tanh(x @ of_layer["w"] + of_layer["b"][None]), None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    rules = [("w$", P(None, "fsdp")), (".*", None)]
    in_two = lambda loss: in_passes(loss, ("data", "fsdp"), 2)  # noqa: E731
    roles = {"params/": "trained"}
    return _trained(mesh, init, loss, BATCH, rules, roles, differentiate=in_two)


# ------------------------------------------------------------------ several optimizers


def muon(mesh: Any) -> Program:
    """Muon on matrices, Adam on the rest."""
    roles = {"params/": "trained", "opt/inner_states/muon/inner_state/0/mu": "updated only"}
    return _trained(mesh, _mlp, _loss, BATCH, None, roles, optax.contrib.muon(1e-2))


def actor_and_critic(mesh: Any) -> Program:
    """An actor, a critic, the target network that the critic follows, and an average of it. The
    actor's loss and a test use the critic that was just updated."""
    optimizer = optax.adam(1e-3)

    def init(key: jax.Array) -> Any:
        actor, critic = _mlp(key), _mlp(jax.random.split(key)[0])
        opts = {"actor": optimizer.init(actor), "critic": optimizer.init(critic)}
        critics = {"critic": critic, "target": critic, "average": critic}
        return {"actor": actor, "opts": opts, **critics}

    def updated(name: str, grads: Any, state: Any) -> tuple[Any, Any]:
        updates, opt = optimizer.update(grads, state["opts"][name])
        return optax.apply_updates(state[name], updates), opt

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        aim = 0.9 * _apply(state["target"], batch["x"]) + batch["y"]

        def critic_loss(critic: Any) -> jax.Array:
            return jnp.mean((_apply(critic, batch["x"]) - aim) ** 2)

        value, grads = _differentiate(mesh)(critic_loss)(state["critic"])
        critic, critic_opt = updated("critic", grads, state)

        def actor_loss(actor: Any) -> jax.Array:
            return -jnp.mean(_apply(critic, _apply(actor, batch["x"])))

        _, actor_grads = _differentiate(mesh)(actor_loss)(state["actor"])
        actor, actor_opt = updated("actor", actor_grads, state)
        critics = {
            "critic": critic,
            "target": optax.incremental_update(critic, state["target"], 0.005),
            "average": optax.incremental_update(critic, state["average"], 0.01),
        }
        opts = {"actor": actor_opt, "critic": critic_opt}
        return {"actor": actor, "opts": opts, **critics}, (value, _loss(critic, batch))

    roles = {
        "actor/": "trained",
        "critic/": "trained",
        "target/": "used, updated",
        "average/": "updated only",
        "opts/": "updated only",
    }
    return _made(mesh, init, step, BATCH, roles)


def self_distillation(mesh: Any) -> Program:
    """A teacher that is an average of its student, with a mean over the rows of its outputs; in a
    jitted function of the user's own."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def init(key: jax.Array) -> Any:
        student = _mlp(key)
        opt = optimizer.init(student)
        return {"student": student, "teacher": student, "opt": opt, "center": jnp.zeros((1, WIDTH))}

    @jax.jit
    def updated(state: Any, grads: Any) -> tuple[Any, Any, Any]:
        updates, opt = optimizer.update(grads, state["opt"], state["student"])
        student = optax.apply_updates(state["student"], updates)
        return student, opt, optax.incremental_update(student, state["teacher"], 0.01)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        aim = _apply(state["teacher"], batch["y"])

        def loss(student: Any) -> jax.Array:
            return jnp.mean((_apply(student, batch["x"]) - aim + state["center"]) ** 2)

        value, grads = _differentiate(mesh)(loss)(state["student"])
        student, opt, teacher = updated(state, grads)
        center = 0.9 * state["center"] + 0.1 * aim.mean(0, keepdims=True)
        return {"student": student, "teacher": teacher, "opt": opt, "center": center}, value

    roles = {
        "student/": "trained",
        "teacher/": "used, updated",
        "opt/": "updated only",
        "center": "used, updated",
    }
    return _made(mesh, init, step, BATCH, roles)


def batch_norm(mesh: Any) -> Program:
    """A convolutional net with a mean over the rows of the batch."""

    def init(key: jax.Array) -> Any:
        return {
            "conv": jax.random.normal(key, (3, 3, 8, WIDTH)),
            "scale": jnp.ones(WIDTH),
            "head": _dense(key, WIDTH, WIDTH),
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        params = ts.unshard(params)
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            batch["images"], params["conv"], (1, 1), "SAME", dimension_numbers=dims
        )
        mean = x.mean((0, 1, 2), keepdims=True)
        x = jax.nn.relu((x - mean) * params["scale"][None, None, None])
        return jnp.mean((x.mean((1, 2)) @ params["head"] - batch["y"]) ** 2)

    batch = {"images": struct(ROWS, 4, 4, 8), "y": struct(ROWS, WIDTH)}
    return _trained(mesh, init, loss, batch, None, {"params/": "trained"})


PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "low-rank factors": lora,
    "experts by constraints": experts_by_constraints,
    "experts by hand": experts_by_hand,
    "tied heads": tied_heads,
    "recurrent": gru,
    "accumulated layers": accumulated_layers,
    "muon": muon,
    "actor and critic": actor_and_critic,
    "self-distillation": self_distillation,
    "batch norm": batch_norm,
}


# JAX has no types for what optax's Muon does, nor for these constraints.
ONLY_AUTO = ("experts by constraints", "muon", "batch norm")
# What the programs do move more than once, or in the update, on Auto axes.
TRUE_FINDINGS = {
    "tied heads": {"again"},  # the gradients of lookup and head
    "muon": {"other"},
}


def made(name: str, kind: str = "auto", topology: str | None = None) -> Program:
    """A program on the mesh that it is for."""
    axes = ("data", "expert") if name.startswith("experts") else ("data", "fsdp")
    sizes = dict(zip(axes, (2, 4), strict=True))
    mesh = ts.make_mesh(sizes, topology=topology, axis_types=kind)
    return PROGRAMS[name](mesh)

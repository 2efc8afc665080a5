"""Five programs, written once for meshes of Auto, Explicit and mixed axes, and their plans."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts


class Model(NamedTuple):
    """Parameters, `loss(params, batch)` as a mean over rows, a batch, and rules of FSDP x TP."""

    params: dict[str, np.ndarray]
    loss: Callable[[Any, Any], Any]
    batch: tuple[np.ndarray, np.ndarray]
    rules: list[tuple[str, Any]]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (0.3 * drawn).astype("float32")


def mlp() -> Model:
    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        p = ts.unshard(p)
        return jnp.mean((ts.matmul(jnp.tanh(x @ p["up"] + p["b"]), p["down"]) - y) ** 2)

    params = {"up": numbers(16, 64), "b": numbers(64), "down": numbers(64, 16)}
    batch = numbers(16, 16), numbers(16, 16, seed=1)
    rules = [("up", P("fsdp", "tensor")), ("b", P("tensor")), ("down", P("tensor", "fsdp"))]
    return Model(params, loss, batch, rules)


def attention() -> Model:
    def one(p: Any, x: Any) -> Any:
        q, k, v = jnp.moveaxis(jnp.einsum("td,dnhk->tnhk", x, p["qkv"]), 1, 0)
        weights = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
        heads = jnp.einsum("hts,shk->thk", weights, v)
        mesh = jax.typeof(x).sharding.mesh
        # The type of a result over split heads is given on Explicit axes alone.
        is_typed = AxisType.Explicit in mesh.axis_types
        given = {"out_sharding": P(None, None)} if is_typed else {}
        return jnp.einsum("thk,hkd->td", heads, p["out"], **given)

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        p = ts.unshard(p)
        return jnp.mean((jax.vmap(lambda x: one(p, x))(x) - y) ** 2)

    params = {"qkv": numbers(16, 3, 4, 8), "out": numbers(4, 8, 16)}
    batch = numbers(16, 8, 16), numbers(16, 8, 16, seed=1)
    rules = [("qkv", P("fsdp", None, "tensor")), ("out", P("tensor", None, "fsdp"))]
    return Model(params, loss, batch, rules)


def layers() -> Model:
    def layer(x: Any, p: Any) -> Any:
        p = ts.unshard(p)
        return jnp.tanh(ts.matmul(jnp.tanh(x @ p["up"] + p["b"]), p["down"])), None

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.mean((jax.lax.scan(jax.checkpoint(layer), x, p)[0] - y) ** 2)

    params = {"up": numbers(4, 16, 32), "b": numbers(4, 32), "down": numbers(4, 32, 16)}
    batch = numbers(16, 16), numbers(16, 16, seed=1)
    rules = [
        ("up", P(None, "fsdp", "tensor")),
        ("b", P(None, "tensor")),
        ("down", P(None, "tensor", "fsdp")),
    ]
    return Model(params, loss, batch, rules)


def language() -> Model:
    def loss(p: Any, batch: Any) -> Any:
        ids, following = batch
        p = ts.unshard(p)
        x = ts.lookup(p["embedding"], ids)
        x = x + ts.matmul(jnp.tanh(x @ p["up"]), p["down"])
        x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * p["scale"]
        likely = jax.nn.log_softmax(x @ p["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(likely, following[..., None], -1))

    params = {
        "embedding": numbers(32, 16),
        "up": numbers(16, 32),
        "down": numbers(32, 16),
        "scale": numbers(16),
    }
    drawn = np.random.default_rng(0).integers(0, 32, (16, 9))
    rules = [
        ("embedding", P("fsdp")),
        ("up", P("fsdp", "tensor")),
        ("down", P("tensor", "fsdp")),
        ("scale", None),
    ]
    return Model(params, loss, (drawn[:, :-1], drawn[:, 1:]), rules)


def experts() -> Model:
    def combined(x: Any, gates: Any, each: Any) -> Any:
        """The sum of what the experts return, split as `x`: on Explicit axes its type is given."""
        spec = jax.typeof(x).sharding.spec
        is_typed = AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
        given = {"out_sharding": P(*spec)} if is_typed else {}
        return jnp.einsum("be,ebd->bd", gates, each, **given)

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        p = ts.unshard(p)
        gates = jax.nn.softmax(x @ p["gate"])
        inner = jnp.tanh(jnp.einsum("bd,edf->ebf", x, p["up"]))
        each = jnp.einsum("ebf,efd->ebd", inner, p["down"])
        return jnp.mean((combined(x, gates, each) - y) ** 2)

    params = {"gate": numbers(16, 4), "up": numbers(4, 16, 32), "down": numbers(4, 32, 16)}
    batch = numbers(16, 16), numbers(16, 16, seed=1)
    rules = [
        ("gate", P("fsdp")),
        ("up", P("tensor", "fsdp")),
        ("down", P("tensor", None, "fsdp")),
    ]
    return Model(params, loss, batch, rules)


OPTIMIZER = optax.sgd(0.1, momentum=0.9)
MODELS = {
    "mlp": mlp,
    "attention": attention,
    "layers": layers,
    "language": language,
    "experts": experts,
}
STRATEGIES = {
    "hsdp": "data=2,fsdp=4",
    "zero-1": "data=2,fsdp=4",
    "fsdp x tp": "fsdp=4,tensor=2",
}
KINDS = ("auto", "explicit", "first", "last")
LAYOUTS = [(strategy, kind) for strategy in STRATEGIES for kind in KINDS]


def mesh_of(strategy: str, kind: str, topology: str | None = None) -> Mesh:
    """The mesh of a strategy, of which all, the first, the last or no axis is Explicit."""
    axes = STRATEGIES[strategy]
    names = [axis.split("=")[0] for axis in axes.split(",")]
    explicit = {"auto": [], "explicit": names, "first": names[:1], "last": names[-1:]}[kind]
    kinds = ["explicit" if name in explicit else "auto" for name in names]
    return ts.make_mesh(axes, axis_types=kinds, topology=topology)


def state_of(model: Model) -> dict[str, Any]:
    """The parameters, and the state of their optimizer."""
    return {"params": model.params, "opt": OPTIMIZER.init(model.params)}


def plan_of(model: Model, strategy: str, mesh: Mesh) -> ts.Plan:
    by_fsdp = ts.fsdp("fsdp", min_size=0)
    rules = {
        "hsdp": [(".*", by_fsdp)],
        "zero-1": [("params/", None), ("opt/", by_fsdp)],
        "fsdp x tp": model.rules,
    }[strategy]
    return ts.plan(state_of(model), rules, mesh, min_size=0)


def rows_of(mesh: Mesh) -> P:
    return P(tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names))


def make_step(model: Model, plan: ts.Plan, differentiate: Any) -> Any:
    """A step of SGD with momentum."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = differentiate(model.loss)(state["params"], batch)
        updates, opt = OPTIMIZER.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return ts.jit_step(step, plan, batch=rows_of(plan.mesh))


def deferring(mesh: Mesh) -> Any:
    """`value_and_grad`, whose gradients wait over the axes of the rows on Explicit axes."""
    return partial(ts.training.value_and_grad, axis_names=rows_of(mesh)[0])


def watched_step(model: Model, plan: ts.Plan) -> tuple[Any, list[Any]]:
    """A step of a model, and a list of the types of each of its traces."""
    traced: list[Any] = []
    step = make_step(model, plan, deferring(plan.mesh))

    def watched(state: Any, batch: Any) -> Any:
        traced.append([jax.typeof(x).str_short() for x in jax.tree.leaves((state, batch))])
        return step.__wrapped__(state, batch)

    return ts.jit_step(watched, plan, batch=step.batch_specs), traced

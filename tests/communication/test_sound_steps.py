"""Sound steps, whose reports find nothing, or what is true of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import struct
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import value_and_grad

pytestmark = pytest.mark.usefixtures("standard_promotion")

N = 64
BATCH = {"x": struct(8 * N, N), "y": struct(8 * N, N)}
FSDP = ts.fsdp("fsdp", min_size=0)
SQUARE = struct(N, N)


class Case(NamedTuple):
    """A model, and what the report of its step finds, with the leaves.

    Attributes:
        tree: The weights.
        predict: `predict(weights, x)`.
        rules: What is not `FSDP`.
        found: The code of the finding and its leaves, if there is one.
        frozen: The leaves that are not trained.
        only_auto: Whether JAX has no types for it on Explicit axes with sums that wait.
    """

    tree: dict[str, Any]
    predict: Callable[[Any, jax.Array], jax.Array]
    rules: tuple[tuple[str, Any], ...] = ()
    found: tuple[tuple[str, tuple[str, ...]], ...] = ()
    frozen: tuple[str, ...] = ()
    only_auto: bool = False


def merged(p: Any, x: jax.Array) -> jax.Array:
    return x @ (p["w"] + p["a"] @ p["b"])


def joined(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(x @ jnp.concatenate([p["q"], p["k"], p["v"]], 1), 3, axis=1)
    return jnp.tanh(q) * k + v


def weight_norm(p: Any, x: jax.Array) -> jax.Array:
    return x @ (p["v"] * (p["g"] / jnp.linalg.norm(p["v"], axis=0))[None])


def residual(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w), None


def scanned(unroll: int) -> Callable[[Any, jax.Array], jax.Array]:
    return lambda p, x: lax.scan(residual, x, p["stack"], unroll=unroll)[0] @ p["z"]


def in_one_branch(p: Any, x: jax.Array) -> jax.Array:
    return lax.cond(p["s"] > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x, x) @ p["z"]


def in_both_branches(p: Any, x: jax.Array) -> jax.Array:
    return lax.cond(p["s"] > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x @ (2 * p["w"]), x)


def in_its_own_branch(p: Any, x: jax.Array) -> jax.Array:
    branches = [lambda x: jnp.tanh(x @ p["w"]), lambda x: x @ p["z"], lambda x: x]
    return lax.switch(p["s"].astype("int32"), branches, x)


def normed(x: jax.Array, scale: Any = 1.0, shift: Any = 0.0) -> jax.Array:
    """Batch norm."""
    mean = x.mean(0, keepdims=True)
    variance = ((x - mean) ** 2).mean(0, keepdims=True)
    return jnp.tanh((x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift)


def with_norms(p: Any, x: jax.Array) -> jax.Array:
    return normed(normed(x @ p["u"], p["s"], p["b"]) @ p["v"], p["t"], p["c"]) @ p["w"]


def with_norms_alone(p: Any, x: jax.Array) -> jax.Array:
    return normed(normed(x @ p["u"]) @ p["v"]) @ p["w"]


def norms_in_a_scan(p: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + normed(x @ p["w"], p["s"][None], p["b"][None]), None

    return lax.scan(layer, x, p)[0]


def over_pixels(p: Any, x: jax.Array) -> jax.Array:
    """As group norm scales images: `[rows, channels, height, width]`."""

    def of_one_row(x: jax.Array) -> jax.Array:
        image = (x @ p["w"]).reshape(8, 4, 2)
        scale, shift = (lax.broadcast_in_dim(p[i], image.shape, (0,)) for i in "sb")
        return (jnp.tanh(image) * scale + shift).reshape(-1)

    return jax.vmap(of_one_row)(x)


def attend(p: Any, x: jax.Array) -> jax.Array:
    """Grouped queries in scanned layers in bfloat16 that are computed again."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["norm"][None, None]
        q, k, v = ((h @ p[i]).reshape(*x.shape[:2], -1, 16) for i in "qkv")
        q = q.reshape(*q.shape[:2], k.shape[2], -1, 16)
        scores = jax.nn.softmax(jnp.einsum("btgrd,bsgd->bgrts", q, k))
        mixed = jnp.einsum("bgrts,bsgd->btgrd", scores, v).reshape(x.shape)
        return x + mixed @ p["o"], None

    p = jax.tree.map(lambda x: x.astype("bfloat16"), p)
    hidden = lax.scan(jax.checkpoint(layer), x.reshape(-1, 16, N).astype("bfloat16"), p)[0]
    return hidden.reshape(x.shape).astype("float32")


def route(p: Any, x: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(x @ p["gate"])
    hidden = jax.nn.relu(jnp.einsum("bn,enm->ebm", x, p["up"]))
    return jnp.einsum("ebn,be->bn", jnp.einsum("ebm,emn->ebn", hidden, p["down"]), gates)


def convolve(p: Any, x: jax.Array) -> jax.Array:
    """Images, with batch norm over their pixels too."""
    layout = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        x.reshape(-1, 8, 8, 1), p["kernel"], (1, 1), "SAME", dimension_numbers=layout
    )
    mean, variance = x.mean((0, 1, 2), keepdims=True), x.var((0, 1, 2), keepdims=True)
    x = (x - mean) * lax.rsqrt(variance + 1e-5) * p["s"].reshape(1, 1, 1, -1)
    return jax.nn.relu(x + p["b"].reshape(1, 1, 1, -1)).mean((1, 2)) @ p["w"]


def over_time(p: Any, x: jax.Array) -> jax.Array:
    """A learned position and a scalar temperature."""
    x = x.reshape(-1, 16, N) + p["position"][None]
    return (x @ p["w"]).reshape(-1, N) * jnp.exp(p["t"])


FACTORS = {"w": SQUARE, "a": struct(N, 8), "b": struct(8, N)}
STACK = {"stack": struct(4, N, N), "z": SQUARE}
KEPT = (("stack", P(None, "fsdp")),)
WHOLE = (("^[sbtc]$", None),)
MATRICES = {"u": SQUARE, "v": struct(N, 2 * N), "w": struct(2 * N, N)}
PRODUCT = "as-one-product"

CASES = {
    "low-rank factors": Case(FACTORS, merged, found=((PRODUCT, ("a", "b")),), only_auto=True),
    "low-rank factors of a frozen weight": Case(
        FACTORS, merged, found=((PRODUCT, ("a", "b")),), frozen=("w",), only_auto=True
    ),
    "a product of the size of another weight": Case(
        FACTORS,
        lambda p, x: jnp.tanh(x @ p["w"]) @ (p["a"] @ p["b"]),
        found=((PRODUCT, ("a", "b")),),
        only_auto=True,
    ),
    "weights that are joined": Case(
        dict.fromkeys("qkv", SQUARE), joined, found=((PRODUCT, ("k", "q", "v")),)
    ),
    "weight norm": Case(
        {"v": SQUARE, "g": struct(N)}, weight_norm, found=((PRODUCT, ("g",)),), only_auto=True
    ),
    "a stack gathered before its scan": Case(STACK, scanned(1), KEPT),
    "a stack of two layers a trip": Case(STACK, scanned(2), KEPT, only_auto=True),
    "a stack split over its layers": Case(
        STACK | {"stack": struct(8, N, N)}, scanned(1), (("stack", P("fsdp")),)
    ),
    "a weight in one branch": Case({"w": SQUARE, "z": SQUARE, "s": struct()}, in_one_branch),
    "a weight in both branches": Case({"w": SQUARE, "s": struct()}, in_both_branches),
    "weights in branches": Case({"w": SQUARE, "z": SQUARE, "s": struct()}, in_its_own_branch),
    "batch norm": Case(
        {**MATRICES, **dict.fromkeys("sb", struct(1, N)), **dict.fromkeys("tc", struct(1, 2 * N))},
        with_norms,
        WHOLE,
    ),
    "batch norm without weights": Case(MATRICES, with_norms_alone),
    "batch norm in a scan": Case(
        {"w": struct(4, N, N), **dict.fromkeys("sb", struct(4, N))},
        norms_in_a_scan,
        (*WHOLE, ("w", P(None, "fsdp"))),
    ),
    "grouped queries": Case(
        {
            **{i: struct(2, N, N) for i in "qo"},
            **{i: struct(2, N, 32) for i in "kv"},
            "norm": struct(2, N),
        },
        attend,
        (("", ts.fsdp("fsdp", min_size=0, skip=(0,))),),
        only_auto=True,
    ),
    "experts": Case(
        {"gate": struct(N, 8), "up": struct(8, N, 2 * N), "down": struct(8, 2 * N, N)}, route
    ),
    "images": Case(
        {"kernel": struct(3, 3, 1, 32), "w": struct(32, N), **dict.fromkeys("sb", struct(32))},
        convolve,
        WHOLE,
    ),
    "positions": Case(
        {"w": SQUARE, "position": struct(16, N), "t": struct()}, over_time, only_auto=True
    ),
    "scales of channels": Case({"w": SQUARE, **dict.fromkeys("sb", struct(8))}, over_pixels, WHOLE),
}


def differentiate(loss: Any, mesh: Any) -> Any:
    axes = mesh.axis_names if AxisType.Explicit in mesh.axis_types else ()
    return value_and_grad(loss, axis_names=axes)


def found(mesh: Any, step: Any, tree: Any, rules: Any, batch: Any = BATCH) -> ts.Comparison:
    plan = ts.plan(tree, [*rules, (".*", FSDP)], mesh, min_size=0)
    run = ts.jit_step(step, plan, batch=P(tuple(mesh.axis_names)), donate=False)
    return run.communication(plan.structs, batch)


@pytest.mark.parametrize("axes", ["fsdp=8", "data=2,fsdp=4"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "auto") for name in CASES]
    + [(name, "explicit") for name, case in CASES.items() if not case.only_auto],
)
def test_nothing_is_found_but_what_is_true(name: str, kind: Any, axes: str) -> None:
    case, mesh = CASES[name], ts.make_mesh(axes, axis_types=kind)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss(trained: Any, batch: Any) -> jax.Array:
            weights = ts.unshard({**state, **trained})
            return jnp.mean((case.predict(weights, batch["x"]) - batch["y"]) ** 2)

        trained = {k: v for k, v in state.items() if k not in case.frozen}
        value, grads = differentiate(loss, mesh)(trained, batch)
        return {**state, **jax.tree.map(lambda p, g: p - 0.1 * g, trained, grads)}, value

    compared = found(mesh, step, case.tree, case.rules)
    assert [(x.code, tuple(sorted(x.paths))) for x in compared.unplanned] == [*case.found]


# ------------------------------------------------------------------ updates


WEIGHTS = {"w": SQUARE, "z": SQUARE, "s": struct(N)}


def loss_of(p: Any, batch: Any) -> jax.Array:
    p = ts.unshard(p)
    hidden = jnp.tanh(batch["x"] @ p["w"]) * p["s"][None]
    return jnp.mean((hidden @ p["z"] - batch["y"]) ** 2)


def updated_by(optimizer: Any, rules: Any, mesh: Any) -> ts.Comparison:
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = differentiate(loss_of, mesh)(state["model"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["model"])
        return {"model": optax.apply_updates(state["model"], updates), "opt": opt}, value

    state = {"model": WEIGHTS, "opt": jax.eval_shape(optimizer.init, WEIGHTS)}
    return found(mesh, step, state, rules)


def preconditioned(params: Any) -> Any:
    """The state of `precondition`."""
    return jax.tree.map(lambda x: {"m": jnp.zeros_like(x), "l": jnp.eye(len(x))}, params)


def precondition(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """Multiplies by the inverse of an old statistic, as Shampoo and SOAP do."""
    leaves, treedef = jax.tree.flatten(grads)
    updates, new = [], []
    for grad, of_leaf in zip(leaves, treedef.flatten_up_to(state), strict=True):
        moment = 0.9 * of_leaf["m"] + grad
        outer = grad @ grad.T if grad.ndim > 1 else 0.0
        updates.append(jnp.linalg.inv(of_leaf["l"]) @ moment)
        new.append({"m": moment, "l": 0.9 * of_leaf["l"] + outer})
    return treedef.unflatten(updates), treedef.unflatten(new)


SHAMPOO = optax.masked(
    optax.GradientTransformation(preconditioned, precondition),
    lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))


@pytest.mark.parametrize(
    ("optimizer", "is_by_matrix"),
    [
        (CLIPPED, False),
        (optax.MultiSteps(optax.lion(1e-3), 2), False),
        (optax.sm3(1e-3), False),
        (SHAMPOO, True),
        (optax.contrib.muon(1e-3), True),
    ],
    ids=["lamb", "lion", "sm3", "shampoo", "muon"],
)
def test_nothing_is_found_in_sound_updates(optimizer: Any, is_by_matrix: bool) -> None:
    mesh = ts.make_mesh("fsdp=8")
    rules: list[Any] = []
    if is_by_matrix:
        of_weights = ts.plan(WEIGHTS, [(".*", FSDP)], mesh, min_size=0)
        optimizer = ts.training.by_matrix(optimizer, of_weights)
        rules = [("opt/matrices/", P("fsdp")), ("opt/", FSDP)]
    assert not updated_by(optimizer, rules, mesh).unplanned


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_replicated_optimizer_state_is_answered_with_follow(kind: Any) -> None:
    mesh = ts.make_mesh("data=2,fsdp=4", axis_types=kind)
    [difference] = updated_by(optax.adam(1e-3), [("^opt/", None)], mesh).unplanned
    assert difference.code == "state-unlike-weight"
    assert sorted(difference.paths) == [f"opt/0/{i}/{j}" for i in ("mu", "nu") for j in "swz"]
    assert difference.fact.startswith("all-gather of gradients for optimizer state that is sharded")
    assert "`Plan.follow`" in difference.hint
    assert not updated_by(optax.adam(1e-3), [], mesh).unplanned


@pytest.mark.parametrize(("kind", "rules"), [("auto", []), ("auto", [("^opt/", None)])])
def test_the_vectors_of_adafactor_are_no_product_of_matrices(kind: Any, rules: Any) -> None:
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    compared = updated_by(optimizer, rules, ts.make_mesh("fsdp=8", axis_types=kind))
    assert not compared.unplanned
    assert {x.bytes for x in compared.moments} == {4 * N}
    assert "of moments of rows or columns, such as Adafactor's, " in str(compared)


def averaged(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Weights in bfloat16, of master copies with an average, and dropout."""
    key, of_step = jax.random.split(state["key"])

    def loss(p: Any) -> jax.Array:
        p = ts.unshard(p)
        hidden = jnp.tanh(batch["x"].astype("bfloat16") @ p["w"])
        kept = jax.random.bernoulli(of_step, 0.9, hidden.shape)
        return jnp.mean((jnp.where(kept, hidden, 0) @ p["z"] - batch["y"]) ** 2)

    value, grads = value_and_grad(loss)({k: state["model"][k] for k in "wz"})
    masters = jax.tree.map(lambda m, g: m - 0.1 * g, state["masters"], grads)
    average = jax.tree.map(lambda a, m: 0.99 * a + 0.01 * m, state["average"], masters)
    model = jax.tree.map(lambda m: m.astype("bfloat16"), masters)
    return {"model": model, "masters": masters, "average": average, "key": key}, value


def accumulated(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def of_part(batch: Any, key: Any) -> tuple[Any, Any]:
        value, grads = value_and_grad(loss_of)(state, batch)
        return grads, {"loss": value}

    grads, metrics = ts.training.accumulate_gradients(
        of_part, batch, 4, axis_names=jax.sharding.get_abstract_mesh().axis_names
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), metrics["loss"]


def in_parts(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """A step of the optimizer for each part of the batch."""

    def one(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    parts = jax.tree.map(lambda x: x.reshape(-1, 4, N).swapaxes(0, 1), batch)
    rows = P(None, jax.sharding.get_abstract_mesh().axis_names)
    parts = ts.with_sharding_constraint(parts, rows)
    state, values = lax.scan(one, state, parts)
    return state, values.mean()


HALF = {k: struct(N, N, dtype="bfloat16") for k in "wz"}
AVERAGED = {
    "model": HALF,
    "masters": dict.fromkeys("wz", SQUARE),
    "average": dict.fromkeys("wz", SQUARE),
    "key": jax.eval_shape(lambda: jax.random.key(0)),
}


@pytest.mark.parametrize("axes", ["fsdp=8", "data=2,fsdp=4"])
@pytest.mark.parametrize(
    ("step", "tree"), [(averaged, AVERAGED), (accumulated, WEIGHTS), (in_parts, WEIGHTS)]
)
def test_nothing_is_found_in_sound_steps_of_other_forms(step: Any, tree: Any, axes: str) -> None:
    rules = [("key", None)] if step is averaged else []
    assert not found(ts.make_mesh(axes), step, tree, rules).unplanned


def test_steps_in_a_loop_that_ends_by_its_data_run_an_unknown_number_of_times() -> None:
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((batch["x"] @ ts.unshard(p)["w"] - batch["y"]) ** 2)

        def one(carry: Any) -> Any:
            value, grads = value_and_grad(loss)(carry[0])
            return jax.tree.map(lambda p, g: p - 0.1 * g, carry[0], grads), value

        start = state, jnp.array(jnp.inf, "float32")
        return lax.while_loop(lambda carry: carry[1] > 0.1, one, start)

    compared = found(ts.make_mesh("fsdp=8"), step, {"w": SQUARE}, [])
    assert not compared.unplanned
    assert None in {x.count for x in compared.compiled}

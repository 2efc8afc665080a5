"""`training.value_and_grad` computes what `jax.value_and_grad` computes, of any loss.

A loss that is not a mean over rows differs from the mean of the losses of parts of the batch, so
that a function that differentiated parts one by one would fail here.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import QUICK, assert_close, assert_same
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import HSDP, in_passes
from treeshard.errors import ShardingTypeError
from treeshard.training import Metrics, value_and_grad

ROWS, WIDTH, CLASSES = 48, 16, 8
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


PARAMS = {"w": drawn(WIDTH, WIDTH), "out": drawn(WIDTH, CLASSES), "bias": drawn(WIDTH)}
UNUSED = {"unused": np.ones((16, 4), "float32"), "scale": np.float32(1.5)}
BATCH = {
    "x": drawn(ROWS, WIDTH),
    "y": drawn(ROWS, CLASSES),
    "label": RNG.integers(0, CLASSES, ROWS).astype("int32"),
    # More of the last rows count, so that parts of the batch differ.
    "mask": (RNG.random(ROWS) < np.linspace(0.1, 0.9, ROWS)).astype("float32"),
    "partner": RNG.permutation(ROWS).astype("int32"),
}
RULES = [("w", P("fsdp")), ("out", P(None, "fsdp")), (".*", None)]
TENSOR = [("w", P("fsdp", "tensor")), ("out", P("tensor", "fsdp")), (".*", None)]


def hidden(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["bias"][None])


def errors(p: Any, b: Any) -> Any:
    """The squared error of each row."""
    return jnp.mean((hidden(p, b["x"]) @ p["out"] - b["y"]) ** 2, 1)


def mean(p: Any, b: Any) -> Any:
    return jnp.mean(errors(p, b))


def masked(p: Any, b: Any) -> Any:
    return jnp.sum(errors(p, b) * b["mask"]) / jnp.sum(b["mask"])


def batch_norm(p: Any, b: Any) -> Any:
    h = b["x"] @ p["w"]
    h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)
    return jnp.mean((jnp.tanh(h) @ p["out"] - b["y"]) ** 2)


def variance(p: Any, b: Any) -> Any:
    return jnp.mean(jax.nn.relu(1 - jnp.sqrt(hidden(p, b["x"]).var(0) + 1e-4)))


def by_softmax(p: Any, b: Any) -> Any:
    each = errors(p, b)
    return jnp.sum(jax.lax.stop_gradient(jax.nn.softmax(each)) * each)


def window_of_numpy(p: Any, b: Any) -> Any:
    """An array that NumPy makes while JAX traces has as many rows as it is told."""
    return jnp.mean(errors(p, b) * np.hanning(len(b["x"])).astype("float32"))


def meta(p: Any, b: Any) -> Any:
    inner = jax.grad(lambda w: jnp.mean(errors({**p, "w": w}, b)))(p["w"])
    return jnp.mean(errors({**p, "w": p["w"] - 0.5 * inner}, b))


@jax.custom_vjp
def of_unit_norm(x: Any) -> Any:
    """The identity, with a gradient that depends on all rows."""
    return x


of_unit_norm.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.sqrt(jnp.sum(g**2)),))


def clipped_backward(p: Any, b: Any) -> Any:
    return jnp.mean((of_unit_norm(hidden(p, b["x"])) @ p["out"] - b["y"]) ** 2)


def contrastive(p: Any, b: Any) -> Any:
    scores = (hidden(p, b["x"]) @ p["out"]) @ b["y"].T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


def partners(p: Any, b: Any) -> Any:
    h = hidden(p, b["x"])
    return jnp.mean(h * h[b["partner"]])


def over_rows(p: Any, b: Any) -> Any:
    step = lambda h, x: (jnp.tanh(x @ p["w"] + h), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, jnp.zeros(WIDTH), b["x"])[0])


TYPED: dict[str, Callable[[Any, Any], Any]] = {
    "mean": mean,
    "masked": masked,
    "root": lambda p, b: jnp.sqrt(mean(p, b)),
    "added up": lambda p, b: jnp.sum(errors(p, b)) / 10,
    "unbiased": lambda p, b: jnp.sum(errors(p, b)) / (len(b["x"]) - 1),
    "penalised": lambda p, b: mean(p, b) + jnp.sum(p["w"] ** 2) / len(b["x"]),
    "relative": lambda p, b: mean(p, b) / jnp.mean(b["y"] ** 2),
    "batch norm": batch_norm,
    "variance": variance,
    "by softmax": by_softmax,
    "window of NumPy": window_of_numpy,
    "meta": meta,
    "clipped backward": clipped_backward,
}
# On Explicit axes JAX has no types for what these do with rows that are split.
UNTYPED: dict[str, Callable[[Any, Any], Any]] = {
    "contrastive": contrastive,
    "hardest": lambda p, b: jnp.mean(jax.lax.top_k(errors(p, b), 6)[0]),
    "median": lambda p, b: jnp.median(errors(p, b)),
    "first rows": lambda p, b: jnp.mean(errors(p, b)[:4]),
    "partners": partners,
    "cumulated": lambda p, b: jnp.mean(jnp.cumsum(hidden(p, b["x"]), 0) ** 2) / ROWS,
    "groups": lambda p, b: jnp.max(jax.ops.segment_sum(errors(p, b), b["label"], CLASSES)),
    "over rows": over_rows,
}
LOSSES = TYPED | UNTYPED


def in_a_step(losses: Any, axes: str, kind: str = "auto", rules: Any = RULES) -> tuple[Any, Any]:
    """A step that returns value and raw gradients of each loss, and its plan."""
    mesh = ts.make_mesh(axes, axis_types=kind)
    plan = ts.plan(PARAMS | UNUSED, rules, mesh, min_size=0)

    def step(params: Any, batch: Any) -> Any:
        of_each = {name: value_and_grad(gathered(LOSSES[name])) for name in losses}
        return params, {name: of(params, batch) for name, of in of_each.items()}

    return ts.jit_step(step, plan, donate=False), plan


def gathered(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *args: loss(ts.unshard(params), *args)


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    """The value and the gradients of each loss."""

    def of_all(params: Any, batch: Any) -> Any:
        return {name: jax.value_and_grad(loss)(params, batch) for name, loss in LOSSES.items()}

    return jax.device_get(jax.jit(of_all, compiler_options=QUICK)(PARAMS | UNUSED, BATCH))


@pytest.mark.parametrize(
    ("axes", "kind", "rules", "losses"),
    [
        ("data=8,fsdp=1", "auto", RULES, ["masked", "contrastive"]),
        (HSDP, "auto", RULES, LOSSES),
        (HSDP, "explicit", RULES, TYPED),
        ("replica=2,data=2,fsdp=2", "auto", RULES, ["mean", "masked"]),
        ("data=2,fsdp=2,tensor=2", "auto", TENSOR, ["mean", "masked"]),
    ],
)
def test_values_and_raw_gradients_are_those_of_one_device(
    axes: str, kind: str, rules: Any, losses: Any, on_one_device: dict[str, Any]
) -> None:
    step, plan = in_a_step(losses, axes, kind, rules)
    found = step(ts.shard(PARAMS | UNUSED, plan), BATCH)[1]
    assert_close(found, {name: on_one_device[name] for name in losses})


def test_what_has_no_type_is_an_error_and_not_another_number() -> None:
    for name in UNTYPED:
        step, plan = in_a_step([name], HSDP, "explicit")
        with pytest.raises(ShardingTypeError, match=r"test_gradients\.py:\d+: "):
            step.lower(plan.structs, BATCH)


def plan_on(axes: str = HSDP, tree: Any = PARAMS, rules: Any = RULES) -> ts.Plan:
    return ts.plan(tree, rules, ts.make_mesh(axes), min_size=0)


def raw_gradients(plan: ts.Plan, f: Any, params: Any = PARAMS, batch: Any = BATCH) -> Any:
    """What `f` returns as `aux` of a step."""
    step = ts.jit_step(lambda state, batch: (state, f(state, batch)), plan, donate=False)
    return step(ts.shard(params, plan), batch)[1]


def test_aux_is_of_the_whole_batch_and_arguments_that_are_no_rows_are_not_split() -> None:
    """Weights of eight classes, and those of a teacher, on eight devices."""
    teacher = jax.tree.map(lambda x: x + 1, PARAMS)
    weights = np.linspace(0.2, 2, CLASSES).astype("float32")

    def distilled(p: Any, b: Any, of_classes: Any, teacher: Any) -> Any:
        wanted = jax.nn.softmax(hidden(teacher, b["x"]) @ teacher["out"])
        scores = jax.nn.log_softmax(hidden(p, b["x"]) @ p["out"])
        rows = len(scores)
        metrics = Metrics({"rows": (jnp.float32(rows), jnp.int32(rows))})
        aux = {"metrics": metrics, "scores": scores, "last": scores[-1], "none": None}
        return -jnp.mean(wanted * scores * of_classes[None]), {**aux, "gram": scores.T @ scores}

    def f(p: Any, b: Any) -> Any:
        return value_and_grad(gathered(distilled), has_aux=True)(p, b, weights, teacher)

    expected = jax.jit(jax.value_and_grad(distilled, has_aux=True), compiler_options=QUICK)
    assert_close(raw_gradients(plan_on(), f), expected(PARAMS, BATCH, weights, teacher))


def test_static_leaves_and_integers_have_no_gradient() -> None:
    model = eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))
    tree = {"model": model, "count": jnp.int32(3)}

    def of_model(tree: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(ts.unshard(tree["model"]))(x) ** 2)

    plan = plan_on(HSDP, tree, [(".*", ts.fsdp("fsdp", min_size=0))])
    _, grads = raw_gradients(plan, value_and_grad(of_model), tree, BATCH["x"])
    assert_close(
        grads["model"], eqx.filter_grad(lambda m: of_model({"model": m}, BATCH["x"]))(model)
    )
    assert grads["count"] is None


def test_half_precision_compiles_and_is_close() -> None:
    small = jax.tree.map(lambda x: 0.1 * x, PARAMS)
    half = jax.tree.map(lambda x: x.astype("bfloat16"), small)

    def of_half(p: Any, b: Any) -> Any:
        b = {name: b[name].astype("bfloat16") for name in ("x", "y")}
        return mean(ts.unshard(p), b).astype("float32")

    _, grads = raw_gradients(plan_on(HSDP, half), value_and_grad(of_half), half)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"bfloat16"}
    assert_close(jax.tree.map(np.float32, grads), jax.grad(mean)(small, BATCH), 0.05)


def test_outside_a_step_the_plan_is_given() -> None:
    plan = plan_on()
    params, batch = ts.shard(PARAMS, plan), ts.shard(BATCH, P(("data", "fsdp")), plan.mesh)
    of = jax.jit(value_and_grad(gathered(mean), plan), compiler_options=QUICK)
    value, grads = of(params, batch)
    assert_close((value, grads), jax.value_and_grad(mean)(PARAMS, BATCH))
    assert grads["w"].sharding == params["w"].sharding


def test_without_a_mesh_it_is_that_of_jax() -> None:
    of = value_and_grad(gathered(mean))
    assert_same(of(PARAMS, BATCH), jax.value_and_grad(mean)(PARAMS, BATCH))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_where_only_the_optimizer_state_is_sharded_gradients_are_like_it(minibatches: int) -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = {"opt": optimizer.init(PARAMS), "params": PARAMS}
    plan = plan_on("data=8", state, [("opt", ts.fsdp("data", min_size=0)), (".*", None)])
    of = in_passes(mean, None, minibatches)

    @ts.jit_step(plan=plan, donate=False)
    def step(state: Any, batch: Any) -> Any:
        _, grads = of(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"opt": opt, "params": optax.apply_updates(state["params"], updates)}, grads

    found, grads = step(ts.shard(state, plan), BATCH)
    expected = jax.grad(mean)(PARAMS, BATCH)
    assert_close(grads, expected)
    # The compiler has the whole reduction, and can scatter it: nothing is averaged by hand before.
    assert "manual_computation" not in step.lower(plan.structs, BATCH).as_text()
    assert found["params"]["w"].sharding.is_fully_replicated
    assert_close(found["params"], jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, expected))


def test_messages() -> None:
    plan = plan_on()
    with (
        jax.set_mesh(plan.mesh),
        pytest.raises(ts.SpecError, match=r"no plan is in force here\. Pass the plan, `value_and"),
    ):
        value_and_grad(mean)(PARAMS, BATCH)

    message = (
        r"value_and_grad: the plan has no subtree .* Pass its specs: `value_and_grad\(loss, specs"
    )
    with pytest.raises(ts.SpecError, match=message):
        raw_gradients(plan, lambda tree, batch: value_and_grad(mean)(tree["w"][:4], batch))

    step = ts.shard_map_step(lambda p, b: (p, value_and_grad(mean)(p, b)[0]), plan)
    with pytest.raises(ts.SpecError, match="`treeshard.manual.value_and_grad` there"):
        step(ts.shard(PARAMS, plan), BATCH)

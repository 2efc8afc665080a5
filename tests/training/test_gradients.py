"""`training.value_and_grad` returns the gradients of one device, and moves what the plan says."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import QUICK
from treeshard.training import Metrics, accumulate_gradients, value_and_grad

RNG = np.random.default_rng(0)
PARAMS = {
    "down": 0.1 * RNG.normal(size=(32, 16)).astype("float32"),
    "norm": 1 + 0.1 * RNG.normal(size=32).astype("float32"),
    "scale": np.float32(1.5),
    "up": 0.1 * RNG.normal(size=(16, 32)).astype("float32"),
}
X = RNG.normal(size=(16, 16)).astype("float32")
RULES = [("scale|norm", None), (".*", ts.fsdp("fsdp", min_size=0))]
HSDP = "data=2,fsdp=4"


def loss(p: Any, x: Any) -> Any:
    p = ts.unshard(p)
    return jnp.mean(((jnp.tanh(x @ p["up"]) * p["norm"][None]) @ p["down"] * p["scale"] - 1) ** 2)


def plan_on(mesh: Any, tree: Any = PARAMS, rules: Any = RULES) -> ts.Plan:
    return ts.plan(tree, rules, mesh)


def raw_gradients(plan: ts.Plan, f: Any, params: Any = PARAMS, *args: Any) -> Any:
    """What `f` returns as `aux` of a step, on the host."""
    step = ts.jit_step(lambda state, x: (state, f(state, *x)), plan, donate=False)
    return ts.gather(step(ts.shard(params, plan), args or (X,))[1])


def close(tree: Any, expected: Any, rtol: float = 1e-5) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


TENSOR = [("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp")), (".*", None)]


@pytest.mark.parametrize(
    ("mesh", "kind", "rules"),
    [
        (HSDP, "auto", RULES),
        (HSDP, "explicit", RULES),
        ("fsdp=8", "auto", RULES),
        ("data=8,fsdp=1", "auto", RULES),
        ("replica=2,data=2,fsdp=2", "auto", RULES),
        ("data=2,fsdp=2,tensor=2", "auto", TENSOR),
    ],
)
def test_raw_gradients_are_those_of_one_device(mesh, kind, rules) -> None:
    tree = {**PARAMS, "unused": np.ones((16, 4), "float32")}
    plan = ts.plan(tree, rules, ts.make_mesh(mesh, axis_types=kind), min_size=0)
    close(raw_gradients(plan, value_and_grad(loss), tree), jax.value_and_grad(loss)(tree, X))


def test_a_scan_with_remat_in_the_loss() -> None:
    params = {"w": 0.1 * RNG.normal(size=(4, 16, 16)).astype("float32")}

    def scanned(p: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ ts.unshard(w)["w"]), None

        return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)

    plan = plan_on(ts.make_mesh(HSDP), params, [("w", ts.fsdp("fsdp", min_size=0, skip=(0,)))])
    close(
        raw_gradients(plan, value_and_grad(scanned), params),
        jax.value_and_grad(scanned)(params, X),
    )


def test_static_leaves_and_integers_have_no_gradient() -> None:
    model = eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))
    tree = {"model": model, "count": jnp.int32(3)}

    def of_model(tree: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(ts.unshard(tree["model"]))(x) ** 2)

    plan = plan_on(ts.make_mesh(HSDP), tree, [(".*", ts.fsdp("fsdp", min_size=0))])
    _, grads = raw_gradients(plan, value_and_grad(of_model), tree)
    expected = eqx.filter_grad(lambda m: of_model({"model": m}, X))(model)
    close(grads["model"], expected)
    assert grads["count"] is None


def test_half_precision_compiles_and_is_close() -> None:
    half = jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)

    def of_half(p: Any, x: Any) -> Any:
        return loss(p, x.astype("bfloat16")).astype("float32")

    _, grads = raw_gradients(plan_on(ts.make_mesh(HSDP), half), value_and_grad(of_half), half)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"bfloat16"}
    expected = jax.grad(loss)(PARAMS, X)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(x), y, atol=0.05)


def test_aux_is_what_the_loss_returns_of_the_whole_batch() -> None:
    def with_aux(p: Any, x: Any) -> Any:
        rows = jnp.sum(x, 1)
        metrics = Metrics({"rows": (jnp.float32(len(x)), jnp.int32(len(x)))})
        aux = {"metrics": metrics, "rows": rows, "last": rows[-1], "n": jnp.int32(len(x))}
        return loss(p, x), {**aux, "gram": x.T @ x, "none": None}

    plan = plan_on(ts.make_mesh(HSDP))
    (_, aux), _ = raw_gradients(plan, value_and_grad(with_aux, has_aux=True))
    close(aux, with_aux(PARAMS, X)[1])


def test_within_accumulated_minibatches() -> None:
    def f(p: Any, x: Any) -> Any:
        def grad_fn(minibatch: Any, _: Any) -> Any:
            value, grads = value_and_grad(loss)(p, minibatch)
            return grads, value

        return accumulate_gradients(grad_fn, x, 2)[0]

    close(raw_gradients(plan_on(ts.make_mesh(HSDP)), f), jax.grad(loss)(PARAMS, X))


def test_outside_a_step_the_plan_is_given() -> None:
    plan = plan_on(ts.make_mesh(HSDP))
    params, x = ts.shard(PARAMS, plan), ts.shard(X, P(("data", "fsdp")), plan.mesh)
    value, grads = jax.jit(value_and_grad(loss, plan), compiler_options=QUICK)(params, x)
    close((value, grads), jax.value_and_grad(loss)(PARAMS, X))
    assert grads["up"].sharding == params["up"].sharding


def test_without_a_mesh_it_is_that_of_jax() -> None:
    expected = jax.value_and_grad(loss)(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, value_and_grad(loss)(PARAMS, X), expected)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_where_only_the_optimizer_state_is_sharded_gradients_are_like_it(minibatches: int) -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = {"opt": optimizer.init(PARAMS), "params": PARAMS}
    rules = [("opt", ts.fsdp("data", min_size=0)), (".*", None)]
    plan = plan_on(ts.make_mesh("data=8"), state, rules)

    @ts.jit_step(plan=plan, donate=False)
    def step(state: Any, x: Any) -> Any:
        def grad_fn(x: Any, _: Any) -> Any:
            value, grads = value_and_grad(loss)(state["params"], x)
            return grads, {"loss": value}

        grads = accumulate_gradients(grad_fn, x, minibatches)[0]
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"opt": opt, "params": optax.apply_updates(state["params"], updates)}, grads

    found, grads = step(ts.shard(state, plan), X)
    close(ts.gather(grads), jax.grad(loss)(PARAMS, X))
    # The compiler has the whole reduction, and can scatter it: nothing is averaged by hand before.
    assert "manual_computation" not in step.lower(plan.structs, X).as_text()
    assert found["params"]["up"].sharding.is_fully_replicated
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, jax.grad(loss)(PARAMS, X))
    close(ts.gather(found["params"]), expected)


# ------------------------------------------------------------------ messages


def test_no_plan_is_in_force() -> None:
    with (
        jax.set_mesh(ts.make_mesh(HSDP)),
        pytest.raises(ts.SpecError, match=r"no plan is in force here\. Pass the plan, `value_and"),
    ):
        value_and_grad(loss)(PARAMS, X)


def test_several_subtrees_are_like_the_parameters() -> None:
    tree = {"a": PARAMS, "b": jax.tree.map(np.copy, PARAMS)}
    plan = plan_on(ts.make_mesh(HSDP), tree, [("b/up", None), *RULES])
    message = r"value_and_grad: .*several subtrees .*b/down.*Pass the specs of the parameters"
    with pytest.raises(ts.SpecError, match=message):
        raw_gradients(plan, lambda tree, x: value_and_grad(loss)(tree["a"], x), tree)


def test_inside_shard_map_the_twin_is_named() -> None:
    plan = plan_on(ts.make_mesh(HSDP))
    step = ts.shard_map_step(lambda p, x: (p, value_and_grad(loss)(p, x)[0]), plan)
    with pytest.raises(ts.SpecError, match="`treeshard.manual.value_and_grad` there"):
        step(ts.shard(PARAMS, plan), X)

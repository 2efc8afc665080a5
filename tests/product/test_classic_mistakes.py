"""The field's classic mistakes, each in a small model: the report names it and its place, and
has nothing to say of the mended version."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts

pytestmark = pytest.mark.usefixtures("standard_promotion")

OPTIMIZER = optax.adam(1e-2)
RULES = [("weight", P("fsdp")), (".*", None)]
WEIGHTS = ("layers/0/weight", "layers/1/weight")


def make_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    layer = lambda: {  # noqa: E731  (two of a kind)
        "weight": rng.normal(size=(8, 8)).astype(np.float32),
        "bias": np.zeros(8, np.float32),
    }
    return {"layers": [layer(), layer()]}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"][None, :])
    return jnp.mean(x**2)


def train_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, loss


@pytest.fixture(scope="module")
def start(mesh: Mesh) -> tuple[Any, ts.Plan]:
    """A state that is placed as it should be, and its plan."""
    params = make_params()
    state = {"params": params, "opt": OPTIMIZER.init(params), "step": np.int32(0)}
    plan = ts.plan(state, RULES, mesh, min_size=0)
    return ts.shard(state, plan), plan


@pytest.fixture(scope="module")
def batch(mesh: Mesh) -> jax.Array:
    return ts.shard(np.ones((16, 8), np.float32), P(("data", "fsdp")), mesh)


def compiled_again(compiles: list[str], step: Any, state: Any, batch: jax.Array) -> bool:
    """Whether the second step compiles once more."""
    state, _ = step(state, batch)
    count = len(compiles)
    step(state, batch)
    return len(compiles) > count


def keeps(plan: ts.Plan) -> Any:
    """The step, jitted by hand, with its state pinned as the plan says."""
    # A function of its own, since JAX would find another test's program.
    return jax.jit(lambda *args: train_step(*args), out_shardings=(plan.shardings, None))


def test_the_mended_version_has_nothing_to_report(
    start: tuple[Any, ts.Plan], batch: jax.Array, compiles: list[str]
) -> None:
    state, plan = start
    step = keeps(plan)
    assert not ts.diff_shardings(state, plan)
    assert not ts.diff_shardings(state["params"], state["opt"][0].mu)
    new, _ = ts.assert_stable_step(step, state, batch)
    assert not ts.diff_shardings(new, plan)
    assert not compiled_again(compiles, step, state, batch)


def test_optimizer_state_on_one_device(
    start: tuple[Any, ts.Plan], batch: jax.Array, compiles: list[str]
) -> None:
    state, plan = start
    step = keeps(plan)
    # The moments are zeros, which say nothing of where the parameters lie.
    wrong = state | {"opt": jax.jit(OPTIMIZER.init)(state["params"])}
    found = ts.diff_shardings(wrong, plan)
    moments = {f"opt/0/{moment}/{path}" for moment in ("mu", "nu") for path in WEIGHTS}
    assert moments <= {difference.path for difference in found}
    assert all(difference.path.startswith("opt/0/") for difference in found)
    assert (
        "opt/0/mu/layers/{0..1}/weight: sharding one device (uncommitted) -> P('fsdp',)"
        in str(found).splitlines()
    )
    assert compiled_again(compiles, step, wrong, batch)
    with pytest.raises(ts.UnstableStepError) as caught:
        ts.assert_stable_step(step, wrong, batch)
    for path in moments:
        assert f"{path}: sharding one device (uncommitted) -> P('fsdp',)" in str(caught.value)
    assert "params/" not in str(caught.value)


def test_a_step_counter_on_one_device(
    start: tuple[Any, ts.Plan], batch: jax.Array, compiles: list[str]
) -> None:
    state, plan = start
    step = keeps(plan)
    wrong = state | {"step": jnp.int32(0)}
    assert {difference.path for difference in ts.diff_shardings(wrong, plan)} == {"step"}
    assert compiled_again(compiles, step, wrong, batch)
    with pytest.raises(ts.UnstableStepError) as caught:
        ts.assert_stable_step(step, wrong, batch)
    assert str(caught.value).startswith("step: sharding one device (uncommitted) -> P(); committed")
    assert "treeshard.shard(state, plan)" in str(caught.value)


def test_a_transposed_spec_in_the_step(
    mesh: Mesh, start: tuple[Any, ts.Plan], batch: jax.Array, compiles: list[str]
) -> None:
    state, plan = start

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        new, loss = train_step(state, x)
        new = jax.lax.with_sharding_constraint(new, plan.shardings)
        layer = new["params"]["layers"][1]
        transposed = NamedSharding(mesh, P(None, "fsdp"))
        layer["weight"] = jax.lax.with_sharding_constraint(layer["weight"], transposed)
        return new, loss

    assert compiled_again(compiles, step, state, batch)
    with pytest.raises(ts.UnstableStepError) as caught:
        ts.assert_stable_step(step, state, batch)
    lines = str(caught.value).splitlines()
    assert lines[0] == "params/layers/1/weight: sharding P('fsdp',) -> P(None, 'fsdp')"


def test_a_transposed_spec_in_the_rules(start: tuple[Any, ts.Plan], mesh: Mesh) -> None:
    state, plan = start
    rules = [("opt/.*weight", P(None, "fsdp")), *RULES]
    wrong = ts.plan(state, rules, mesh, min_size=0)
    # Every step would turn the gradients round to meet the moments.
    found = ts.diff_shardings(wrong.structs["params"], wrong.structs["opt"][0].mu)
    assert str(found) == "layers/{0..1}/weight: sharding P('fsdp',) -> P(None, 'fsdp')"
    assert {leaf.path for leaf in plan.diff(wrong).changes} == {
        f"opt/0/{moment}/{path}" for moment in ("mu", "nu") for path in WEIGHTS
    }


def test_a_transposed_spec_that_does_not_divide(mesh: Mesh) -> None:
    tree = {"embed": {"weight": np.ones((16, 6), np.float32)}}
    mended = ts.plan(tree, [("weight", P("fsdp"))], mesh, min_size=0)
    wrong = ts.plan(tree, [("weight", P(None, "fsdp"))], mesh, min_size=0)
    assert mended.findings == ()
    errors = [str(x) for x in wrong.findings if x.severity == "error"]
    assert len(errors) == 1
    assert errors[0].startswith("error indivisible: embed/weight: rule 0 'weight': P(None, 'fsdp')")
    live = ts.shard(tree, mended)
    assert str(ts.diff_shardings(live, mended)) == "No leaf differs."

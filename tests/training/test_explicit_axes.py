"""Programs on meshes of Explicit axes, which `jax.make_mesh` makes, equal one device.

`TREESHARD_SOAK=1` runs all programs on all meshes; without it, each mesh has at least two.
"""

import os
from typing import Any

import chex
import jax
import optax
import pytest

import treeshard as ts
from tests.training.explicit_programs import (
    KINDS,
    LAYOUTS,
    MODELS,
    OPTIMIZER,
    STRATEGIES,
    Model,
    make_step,
    mesh_of,
    plan_of,
    state_of,
)
from treeshard._planning.plan_report import type_text

pytestmark = pytest.mark.usefixtures("broadcasting")

WAYS = {"value_and_grad": ts.training.value_and_grad, "jax": jax.value_and_grad}


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    """What two steps of each program give on one device."""
    results = {}
    for name, make in MODELS.items():
        model = make()
        step = jax.jit(jax.value_and_grad(model.loss))
        params, opt = model.params, OPTIMIZER.init(model.params)
        for _ in range(2):
            value, grads = step(params, model.batch)
            updates, opt = OPTIMIZER.update(grads, opt)
            params = optax.apply_updates(params, updates)
        results[name] = params, float(value)
    return results


def trained(model: Model, strategy: str, kind: str, way: str) -> Any:
    plan = plan_of(model, strategy, mesh_of(strategy, kind))
    step = make_step(model, plan, WAYS[way])
    state = ts.shard(state_of(model), plan)
    for _ in range(2):
        state, value = step(state, model.batch)
    return ts.gather(state["params"]), float(value)


def meshes_of(name: str, way: str) -> list[tuple[str, str]]:
    """Those on which a program is run: a third of them, other ones for the next program."""
    meshes = LAYOUTS if way == "value_and_grad" else [m for m in LAYOUTS if m[1] == "explicit"]
    if "TREESHARD_SOAK" in os.environ:
        return meshes
    return meshes[list(MODELS).index(name) % 3 :: 3]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_each_program_equals_one_device(name: str, way: str, on_one_device: Any) -> None:
    for strategy, kind in meshes_of(name, way):
        got = trained(MODELS[name](), strategy, kind, way)
        chex.assert_trees_all_close(got, on_one_device[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_printed_plan_has_the_types_that_jax_prints(kind: str) -> None:
    model = MODELS["mlp"]()
    for strategy in STRATEGIES:
        plan = plan_of(model, strategy, mesh_of(strategy, kind))
        placed = jax.tree.leaves(ts.shard(state_of(model), plan))
        with jax.set_mesh(plan.mesh):
            types = [jax.typeof(x).str_short() for x in placed]
        for leaf, type_ in zip(plan.leaves, types, strict=True):
            assert type_text(leaf, plan.mesh) == type_
            assert type_ in str(plan)


def test_a_state_of_numpy_arrays_has_the_types_of_the_plan() -> None:
    """The first call and a later one run the program of a state that is placed."""
    model = MODELS["mlp"]()
    plan = plan_of(model, "hsdp", mesh_of("hsdp", "explicit"))
    traced: list[Any] = []

    def differentiate(loss: Any) -> Any:
        def run(params: Any, batch: Any) -> Any:
            traced.append(jax.tree.map(jax.typeof, params))
            return ts.training.value_and_grad(loss)(params, batch)

        return run

    step = make_step(model, plan, differentiate)
    step(state_of(model), model.batch)
    with jax.set_mesh(plan.mesh):
        expected = jax.tree.map(jax.typeof, ts.shard(state_of(model), plan)["params"])
    assert traced[0] == expected
    times = len(traced)
    step(ts.shard(state_of(model), plan), model.batch)
    assert len(traced) == times

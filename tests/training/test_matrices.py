"""Optimizers that multiply matrices: each device updates full ones."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.matrix_programs import (
    FSDP,
    PARAMS,
    TENSOR,
    assert_two_exchanges,
    batch,
    muon,
    setup,
    values,
)
from treeshard.checkpoint import restore, save
from treeshard.training import by_matrix, init_sharded

pytestmark = pytest.mark.usefixtures("standard_promotion")


def three_updates(setup: Any, state: Any) -> Any:
    for seed in range(1, 4):
        state, _ = setup.step(state, batch(seed))
    return state


def on_one_device(optimizer: Any) -> Any:
    params = values(0)
    opt, update = optimizer.init(params), jax.jit(optimizer.update)
    for seed in range(1, 4):
        updates, opt = update(values(seed), opt, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.fixture(scope="module")
def by_muon() -> Any:
    return on_one_device(muon())


def started(optimizer: Any, axes: str, kind: str = "auto", rules: Any = FSDP) -> tuple[Any, Any]:
    made = setup(optimizer, ts.make_mesh(axes, axis_types=kind), rules)
    return made, ts.pad_leaves(made.init(), made.plan)


@pytest.mark.parametrize(
    ("axes", "parts", "kind", "size"),
    [("fsdp=8", 8, "auto", "32.0 KiB"), ("data=2,fsdp=4", 4, "explicit", "48.0 KiB")],
)
def test_muon_moves_each_matrix_twice(
    axes: str, parts: int, kind: str, size: str, by_muon: Any
) -> None:
    made = setup(muon(), ts.make_mesh(axes, axis_types=kind))
    assert made.plan.findings == ()
    args = {"rules": made.rules, "mesh": made.plan.mesh, "min_size": 0, "pad": True}
    state, plan = init_sharded(made.init, **args)
    assert plan.specs == made.plan.specs
    compiled = made.step.compile(state, batch(1))
    assert_two_exchanges(compiled.compiled, ("fsdp",), parts)
    compared = compiled.communication()
    assert compared.unplanned == ()
    assert len(compared.matrices) == 4
    assert f"including 4 exchanges of matrices for their update, {size}" in str(compared)
    assert_close(three_updates(made, state)["params"], by_muon, 1e-6)


def test_matrices_that_are_split_in_three_ways(by_muon: Any) -> None:
    made, state = started(muon(), "fsdp=4,tensor=2", rules=TENSOR)
    assert_close(three_updates(made, state)["params"], by_muon, 1e-6)


def test_weight_decay_moves_the_weights_too() -> None:
    decaying = muon(weight_decay=0.1)
    made, state = started(decaying, "fsdp=8")
    compiled = made.step.compile(state, batch(1)).compiled
    assert sum(x.kind == "all-to-all" for x in ts.collectives(compiled)) == 6
    assert_close(three_updates(made, state)["params"], on_one_device(decaying), 1e-6)


def test_what_is_kept_of_a_matrix_stays_with_it() -> None:
    """Squares that are averaged over its columns and over its rows."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=16)
    made, state = started(factored, "fsdp=8")
    stacks = made.plan.structs["opt"].matrices["32x64_float32"]
    assert [x.shape for x in (stacks.v_row, stacks.v_col)] == [(8, 32), (8, 64)]
    compiled = made.step.compile(state, batch(1)).compiled
    assert_two_exchanges(compiled, ("fsdp",), 8)
    assert_close(three_updates(made, state)["params"], on_one_device(factored), 1e-5)


def test_a_state_goes_on_on_another_mesh(tmp_path: Path, by_muon: Any) -> None:
    made, state = started(muon(), "fsdp=8")
    padded = jax.tree.map(
        lambda x, leaf: x if leaf.unpadded is None else x.at[leaf.unpadded[0] :].set(1e30),
        state,
        jax.tree.unflatten(jax.tree.structure(state), made.plan.leaves),
    )
    state, updates = made.step(state, batch(1))
    assert_same(made.step(padded, batch(1))[1], updates)  # padding changes no matrix
    save(tmp_path / "state", ts.unpad_leaves(state, made.plan))
    other = setup(muon(), ts.make_mesh("data=2,fsdp=4", axis_types="explicit"))
    restored = restore(tmp_path / "state", other.plan.unpadded())
    state = ts.pad_leaves(restored, other.plan)
    for seed in (2, 3):
        state, _ = other.step(state, batch(seed))
    assert_close(state["params"], by_muon, 1e-6)


def test_experts_are_a_stack_where_they_are() -> None:
    mesh = ts.make_mesh("expert=2,fsdp=4")
    tree = {"moe": {"up": np.ones((8, 3, 32, 16), "float32")}}
    plan = ts.plan(tree, [(".*", P("expert", None, "fsdp"))], mesh, min_size=0)
    seen: list[Any] = []

    def update(g: Any, state: Any, _params: Any) -> Any:
        seen.extend(x.shape for x in jax.tree.leaves(g))
        return jax.tree.map(lambda x: x / jnp.linalg.norm(x), g), state

    optimizer = by_matrix(optax.GradientTransformation(lambda _: (), update), plan)
    update = jax.jit(lambda g: optimizer.update(g, optimizer.init(g))[0])
    grads = {"moe": {"up": np.random.default_rng(0).random((8, 3, 32, 16), "float32")}}
    with jax.set_mesh(mesh):
        updates = update(ts.shard(grads, plan))
    assert {*seen} == {(32, 16)}
    norms = np.linalg.norm(grads["moe"]["up"], axis=(-1, -2), keepdims=True)
    assert_close(updates, {"moe": {"up": grads["moe"]["up"] / norms}})
    assert optimizer.init(grads).matrices.keys() == {"moe.up"}


def test_leaves_that_are_left_to_the_optimizer() -> None:
    plan = ts.plan(PARAMS, FSDP, ts.make_mesh("fsdp=8"), min_size=0)
    optimizer = by_matrix(optax.adam(0.1), plan, is_matrix=lambda path, x: path != "down")
    state = jax.eval_shape(optimizer.init, PARAMS)
    assert state.matrices.keys() == {"32x64_float32"}
    rest = state.rest[0].mu
    assert {name: x is not None for name, x in rest.items()} == {
        name: name in ("bias", "down") for name in PARAMS
    }


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    mesh = ts.make_mesh("expert=4,fsdp=2")
    params = {"experts": struct(4, 32, 16), "w": struct(32, 16)}
    plan = ts.plan(params, [("w", None), (".*", P("expert", "fsdp"))], mesh, min_size=0)
    with pytest.raises(ts.SpecError) as caught:
        by_matrix(optax.sgd(0.1), plan).init({**params, "new": struct(3, 3)})
    assert str(caught.value) == (
        "by_matrix: leaves cannot be stacked:\n"
        "  experts: P('expert', 'fsdp') leaves 1 of dim 0 on a device, and 2 devices cannot share"
        " them.\n"
        "  new: float32[3,3] is not in the plan."
        " `is_matrix=` can leave them to the optimizer as they are."
    )
    with pytest.raises(ts.errors.ArgumentError, match="not an optax GradientTransformation"):
        by_matrix(plan, plan)
    with pytest.raises(ts.errors.ArgumentError, match="Plan the parameters first: `by_matrix"):
        by_matrix(optax.sgd(0.1), params)

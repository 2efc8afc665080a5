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
    STACKS,
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


def started(optimizer: Any, axes: str, kind: Any = "auto", rules: Any = FSDP) -> tuple[Any, Any]:
    made = setup(optimizer, ts.make_mesh(axes, axis_types=kind), rules)
    return made, made.init()


@pytest.mark.parametrize(
    ("axes", "parts", "kind", "size"),
    [
        ("fsdp=8", 8, "auto", "32.0 KiB"),
        ("data=2,fsdp=4", 4, "explicit", "48.0 KiB"),
        ("data=2,fsdp=4", 4, ["explicit", "auto"], "48.0 KiB"),
        ("data=2,fsdp=4", 4, ["auto", "explicit"], "48.0 KiB"),
    ],
)
def test_muon_moves_each_matrix_twice(
    axes: str, parts: int, kind: Any, size: str, by_muon: Any
) -> None:
    made = setup(muon(), ts.make_mesh(axes, axis_types=kind))
    assert made.plan.findings == ()
    args = {"rules": made.rules, "mesh": made.plan.mesh, "min_size": 0}
    state, plan = init_sharded(made.init, **args)
    assert plan.specs == made.plan.specs
    compiled = made.step.compile(state, batch(1))
    assert_two_exchanges(compiled.compiled, ("fsdp",), parts)
    compared = compiled.communication()
    assert compared.unplanned == ()
    assert len(compared.matrices) == 4
    assert f"including 4 exchanges of matrices for their update, {size}" in str(compared)
    assert_close(three_updates(made, state)["params"], by_muon, 1e-6)


@pytest.mark.parametrize("kind", ["auto", "explicit", ["auto", "explicit"], ["explicit", "auto"]])
def test_each_spec_of_a_shape_has_a_stack(kind: Any, by_muon: Any) -> None:
    made, state = started(muon(), "fsdp=4,tensor=2", kind, TENSOR)
    state = ts.shard(state, made.plan)
    assert len(state["opt"].matrices) == 3
    moved = [x for x in ts.collectives(made.step.compile(state, batch(1)).compiled) if x.rank]
    # With `P(("fsdp", "tensor"))`, XLA moves shards between a type over "tensor" and this spec.
    if kind != ["auto", "explicit"]:
        assert {x.kind for x in moved} == {"all-to-all"}
    assert_close(three_updates(made, state)["params"], by_muon, 1e-6)


def test_weight_decay_moves_the_weights_too() -> None:
    decaying = muon(weight_decay=0.1)
    made, state = started(decaying, "fsdp=8")
    compiled = made.step.compile(state, batch(1)).compiled
    assert sum(x.kind == "all-to-all" for x in ts.collectives(compiled)) == 6
    assert_close(three_updates(made, state)["params"], on_one_device(decaying), 1e-6)


def by_covariance() -> Any:
    """Shampoo of rows: each gradient times the inverse root of the sum of its covariances."""

    def init(params: Any) -> Any:
        of_rows = lambda x: jnp.broadcast_to(jnp.eye(x.shape[-2]), x.shape[:-1] + x.shape[-2:-1])  # noqa: E731
        return jax.tree.map(lambda x: of_rows(x) if x.ndim > 1 else None, params)

    def update(g: Any, state: Any, _params: Any) -> Any:
        def precondition(x: Any, covariance: Any) -> Any:
            variances, basis = jnp.linalg.eigh(covariance)
            return basis * variances[..., None, :] ** -0.5 @ basis.mT @ x

        summed = lambda x, old: old + x @ x.mT if x.ndim > 1 else None  # noqa: E731
        state = jax.tree.map(summed, g, state)
        each = lambda x, old: precondition(x, old) if x.ndim > 1 else x  # noqa: E731
        return jax.tree.map(each, g, state), state

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [
        (optax.scale_by_factored_rms(min_dim_size_to_factor=16), 1e-5),
        (by_covariance(), 1e-4),
    ],
    ids=["squares averaged over columns and rows", "eigenvectors"],
)
def test_what_is_kept_of_a_matrix_stays_with_it(optimizer: Any, tolerance: float) -> None:
    made, state = started(optimizer, "fsdp=8")
    for x in jax.tree.leaves(state["opt"].matrices):
        assert x.shape[0] == 8
    compiled = made.step.compile(state, batch(1)).compiled
    assert_two_exchanges(compiled, ("fsdp",), 8)
    assert_close(three_updates(made, state)["params"], on_one_device(optimizer), tolerance)


def resized(state: Any, plan: ts.Plan) -> Any:
    """The state with stacks as long as those of a plan for another number of devices."""

    def resize(x: Any, new: Any) -> Any:
        more = new.shape[0] - x.shape[0]
        return (
            x[: len(x) + more]
            if more < 0
            else jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1), "edge")
        )

    stacks = jax.tree.map(resize, state["opt"].matrices, plan.structs["opt"].matrices)
    return {**state, "opt": state["opt"]._replace(matrices=stacks)}


def test_a_state_goes_on_on_another_mesh(tmp_path: Path, by_muon: Any) -> None:
    made, state = started(muon(), "fsdp=8")
    [large, _] = made.plan.structs["opt"].matrices
    poisoned = state["opt"].matrices | {
        large: jax.tree.map(
            lambda x: x.at[STACKS[0] :].set(jnp.asarray(10**6, x.dtype)),
            state["opt"].matrices[large],
        )
    }
    padded = {**state, "opt": state["opt"]._replace(matrices=poisoned)}
    state, updates = made.step(state, batch(1))
    assert_same(made.step(padded, batch(1))[1], updates)  # padding changes no matrix
    save(tmp_path / "state", state)
    other = setup(muon(), ts.make_mesh("data=2,fsdp=4", axis_types="explicit"))
    restored = restore(tmp_path / "state", jax.tree.map(np.zeros_like, ts.gather(state)))
    state = ts.shard(resized(restored, other.plan), other.plan)
    for seed in (2, 3):
        state, _ = other.step(state, batch(seed))
    assert_close(state["params"], by_muon, 1e-6)


def test_experts_are_a_stack_where_they_are() -> None:
    mesh = ts.make_mesh("expert=2,fsdp=4")
    tree = {"moe": {"up": np.ones((8, 3, 32, 16), "float32"), "down": np.ones((32, 16), "float32")}}
    rules = [("up", P("expert", None, "fsdp")), ("down", P("fsdp"))]
    plan = ts.plan(tree, rules, mesh, min_size=0)
    seen: list[Any] = []

    def update(g: Any, state: Any, _params: Any) -> Any:
        seen.extend(x.shape for x in jax.tree.leaves(g))
        return jax.tree.map(lambda x: x / jnp.linalg.norm(x), g), state

    optimizer = by_matrix(optax.GradientTransformation(lambda _: (), update), plan)
    update = jax.jit(lambda g: optimizer.update(g, optimizer.init(g))[0])
    draw = np.random.default_rng(0).random
    grads = jax.tree.map(lambda x: draw(x.shape, "float32"), tree)
    with jax.set_mesh(mesh):
        compiled = update.lower(ts.shard(grads, plan)).compile()
        updates = update(ts.shard(grads, plan))
    assert {*seen} == {(32, 16)}
    moved = [x for x in ts.collectives(compiled) if x.rank]
    assert {(x.kind, x.axes) for x in moved} == {("all-to-all", ("fsdp",))}
    norm = lambda x: np.linalg.norm(x, axis=(-1, -2), keepdims=True)  # noqa: E731
    assert_close(updates, jax.tree.map(lambda x: x / norm(x), grads))
    assert len(optimizer.init(grads).matrices) == 2


def test_what_fills_up_a_stack_is_as_finite_as_its_matrices() -> None:
    mesh = ts.make_mesh("fsdp=8")
    grads = {"w": np.full((3, 16, 8), 2, "float32")}
    plan = ts.plan(grads, [("w", P(None, "fsdp"))], mesh, min_size=0)

    def by_norm(g: Any, _state: Any, _params: Any) -> Any:
        unit = jax.tree.map(lambda x: x / jnp.linalg.norm(x), g)
        return unit, unit

    optimizer = by_matrix(optax.GradientTransformation(lambda p: p, by_norm), plan)
    update = jax.jit(lambda g: optimizer.update(g, optimizer.init(g)))
    with jax.debug_nans(True):  # zeros would be divided by zero, and kept in the state
        updates, _ = update(ts.shard(grads, plan))
    assert_close(updates, {"w": grads["w"] / np.sqrt(16 * 8 * 4)})


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (2, 0, 16), (0, 16, 8), (0, 2, 16, 8)])
def test_empty_matrices_change_no_other(shape: tuple[int, ...], kind: str) -> None:
    grads = {"empty": np.zeros(shape, "float32"), "w": values(1)["first"]}
    mesh = ts.make_mesh("fsdp=8", axis_types=kind)
    plan = ts.plan(grads, [("w", P("fsdp")), ("empty", None)], mesh, min_size=0)
    optimizer = by_matrix(optax.sgd(0.5, momentum=0.9), plan)
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(optimizer.update)(ts.shard(grads, plan), optimizer.init(grads))
    assert updates["empty"].shape == shape
    assert_same(updates["w"], -0.5 * grads["w"])


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_numbers_go_to_each_matrix(kind: str) -> None:
    mesh = ts.make_mesh("fsdp=8", axis_types=kind)
    grads = {"w": np.ones((2, 16, 8), "float32"), "b": np.ones(8, "float32")}
    plan = ts.plan(grads, [("w", P(None, "fsdp")), ("b", None)], mesh, min_size=0)

    def update(g: Any, state: Any, _params: Any = None, *, value: Any = 0, scale: Any = 1) -> Any:
        return jax.tree.map(lambda x: x * value * scale, g), state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    optimizer = by_matrix(inner, plan)

    def run(g: Any, value: Any) -> Any:
        return optimizer.update(g, optimizer.init(g), value=value, scale=2)[0]

    with jax.set_mesh(mesh):
        updates = jax.jit(run)(ts.shard(grads, plan), jnp.float32(3))
    assert_close(updates, jax.tree.map(lambda x: 6 * x, grads))
    with pytest.raises(ts.errors.ArgumentError, match="update got value, .* share numbers. Pass"):
        run(grads, grads)


def test_a_state_is_never_that_of_other_matrices() -> None:
    """With other rules, stacks of the same shape may have other matrices."""
    params = {name: struct(32, 64) for name in "abcd"}
    states = []
    for pattern in ("a|b", "a|c"):
        rules = [(pattern, P("fsdp")), (".*", P(None, "fsdp"))]
        plan = ts.plan(params, rules, ts.make_mesh("fsdp=8"), min_size=0)
        states.append(jax.eval_shape(by_matrix(optax.sgd(0.1, momentum=0.9), plan).init, params))
    assert states[0].matrices.keys().isdisjoint(states[1].matrices.keys())


def test_leaves_that_are_left_to_the_optimizer() -> None:
    plan = ts.plan(PARAMS, FSDP, ts.make_mesh("fsdp=8"), min_size=0)
    optimizer = by_matrix(optax.adam(0.1), plan, is_matrix=lambda path, x: path != "down")
    state = jax.eval_shape(optimizer.init, PARAMS)
    [name] = state.matrices
    assert name.startswith("32x64_float32_")
    rest = state.rest[0].mu
    assert {name: x is not None for name, x in rest.items()} == {
        name: name in ("bias", "down") for name in PARAMS
    }


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    params = {"w": struct(32, 16)}
    plan = ts.plan(params, [("w", None)], ts.make_mesh("fsdp=8"), min_size=0)
    with pytest.raises(ts.SpecError) as caught:
        by_matrix(optax.sgd(0.1), plan).init({**params, "new": struct(3, 3)})
    assert str(caught.value) == (
        "by_matrix: new: float32[3,3] is not in the plan."
        " To leave them to the optimizer itself, pass `is_matrix=`."
    )
    with pytest.raises(ts.errors.ArgumentError, match="not an optax GradientTransformation"):
        by_matrix(plan, plan)
    with pytest.raises(ts.errors.ArgumentError, match="Make a plan first: `by_matrix"):
        by_matrix(optax.sgd(0.1), params)

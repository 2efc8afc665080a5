"""Gradients on Explicit axes: scattered where weights are gathered, and summed once a step."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import (
    CASES,
    FSDP,
    LAYERS,
    NAMES_AND_KINDS,
    SHARDS_OVER_DATA,
    assert_reduced,
    by_all_reduce,
    gradient_step,
    in_passes,
    layered,
    mesh_of_kind,
    state,
    step_of,
)
from treeshard._planning.plan_in_force import summed_later
from treeshard.communication import collectives
from treeshard.training import accumulate_gradients, value_and_grad

WIDTH = 64


def moved(step: Any, plan: Any, x: Any) -> list[tuple[Any, ...]]:
    """Kind, bytes, axes and runs of each collective of gradients."""
    compiled = step.lower(plan.structs, x).compile()
    return sorted(
        (found.kind, found.total_bytes, found.axes, found.count)
        for found in collectives(compiled)
        if found.kind != "all-gather" and found.bytes > 4
    )


@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS)
def test_each_gradient_is_summed_once_over_the_axes_that_do_not_split_it(
    name: str, kind: str
) -> None:
    case = CASES[name]
    step, plan, x = step_of(case, mesh_of_kind(case.axes, kind), WIDTH)
    compiled = step.compile(plan.structs, x).compiled
    expected = by_all_reduce(case.reduced) if kind == "auto" else case.reduced
    assert_reduced(compiled, expected, WIDTH)
    grads, value = step(ts.shard(state(WIDTH), plan), x)
    alone = jax.jit(jax.value_and_grad(case.loss))(state(WIDTH), x)
    chex.assert_trees_all_close((value, ts.gather(grads)), alone, rtol=1e-4, atol=1e-7)


def test_minibatches_need_no_names_of_axes() -> None:
    mesh = mesh_of_kind("data=2,fsdp=4", "explicit")
    step, plan, x = gradient_step(layered, mesh, FSDP, WIDTH, lambda loss: in_passes(loss, ()))
    compiled = step.compile(plan.structs, x).compiled
    assert_reduced(compiled, CASES["hsdp in passes"].reduced, WIDTH)


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "fsdp x tp"])
def test_without_value_and_grad_shards_are_summed_in_each_layer(name: str) -> None:
    case = CASES[name]
    mesh = mesh_of_kind(case.axes, "explicit")
    step, plan, x = gradient_step(case.loss, mesh, case.spec, WIDTH, jax.value_and_grad)
    in_each_layer = SHARDS_OVER_DATA._replace(runs=LAYERS, depth=1)
    expected = [in_each_layer if one == SHARDS_OVER_DATA else one for one in case.reduced]
    assert_reduced(step.compile(plan.structs, x).compiled, expected, WIDTH)


def test_what_has_no_type_that_waits_is_reduced_where_it_is_used() -> None:
    """A weight that is added to rows, beside one that is used in products."""
    both = {"w": state(WIDTH)["w"][0], "positions": np.zeros((32, WIDTH), "float32")}
    plan = ts.plan(
        both,
        [("w", P("fsdp")), (".*", None)],
        mesh_of_kind("data=2,fsdp=4", "explicit"),
        min_size=0,
    )

    def loss(params: Any, x: Any) -> Any:
        positions = jax.sharding.reshard(params["positions"], P(("data", "fsdp")))
        return jnp.mean(((x + positions) @ ts.unshard(params["w"], P("fsdp"))) ** 2)

    def step(params: Any, x: Any) -> Any:
        value, grads = value_and_grad(loss)(params, x)
        return grads, value

    run = ts.jit_step(step, plan, batch=P(("data", "fsdp")), donate=False)
    x = np.random.default_rng(1).standard_normal((32, WIDTH)).astype("float32")
    grads, _ = run(ts.shard(both, plan), x)
    alone = jax.grad(lambda p: jnp.mean(((x + p["positions"]) @ p["w"]) ** 2))(both)
    chex.assert_trees_all_close(ts.gather(grads), alone, rtol=1e-4, atol=1e-7)
    assert ("all-reduce", WIDTH * WIDTH, ("data",), 1) in moved(run, plan, x)


# What JAX 0.10 to 0.12 does wrong, or refuses to do, with weights whose gradients wait.
OTHER_USES: dict[str, Callable[[Any, Any], Any]] = {
    "plus one": lambda w, x: w + 1,
    "a square": lambda w, x: w * w,
    "remat": lambda w, x: jax.checkpoint(lambda w: jnp.tanh(jnp.sin(w)))(w),
    "auto_axes": lambda w, x: jax.sharding.auto_axes(jnp.tanh, out_sharding=P())(w),
    "auto_axes with rows": lambda w, x: jax.sharding.auto_axes(
        lambda w, x: x @ w, out_sharding=P()
    )(w, x),
    "some rows": lambda w, x: w.at[jnp.arange(5)].get(out_sharding=P()),
    "one row": lambda w, x: ts.lookup(w, 3),
    "rows of another number": lambda w, x: ts.lookup(w, jnp.arange(5)),
    "repeat": lambda w, x: jnp.repeat(w, 2, 1, out_sharding=P()),
    "scatter": lambda w, x: jnp.zeros((WIDTH, WIDTH)).at[jnp.arange(WIDTH)].add(w),
    "stack": lambda w, x: jnp.stack([w, 2 * w]),
    "the same for all rows": lambda w, x: jnp.ones((3, WIDTH)) @ w,
    "its own square": lambda w, x: w.T @ w,
    "a whole batch": lambda w, x: ts.with_sharding_constraint(x, P()) @ w,
    "cumsum": lambda w, x: jnp.cumsum(w, 1),
    "norm": lambda w, x: w / jnp.sqrt(jnp.sum(w**2)),
    "cast": lambda w, x: w.astype("bfloat16").astype("float32"),
    "where": lambda w, x: jnp.where(w > 0, w, 0.1 * w),
    "one layer": lambda w, x: x @ w.reshape(WIDTH, 4, -1)[:, 0],
    "branches": lambda w, x: jax.lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: 2 * (x @ w)),
}


# All four in `make soak`.
PAIRS = [(P(), jax.value_and_grad), (P("fsdp"), value_and_grad)]
if os.environ.get("TREESHARD_SOAK"):
    PAIRS += [(P(), value_and_grad), (P("fsdp"), jax.value_and_grad)]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("spec", "differentiate"), PAIRS)
@pytest.mark.parametrize("use", OTHER_USES.values(), ids=OTHER_USES.keys())
def test_other_uses_of_a_weight_have_right_gradients(use: Any, spec: P, differentiate: Any) -> None:
    """Beside a product: types must not count one device's part for all, or twice."""
    grads = gradients_of(use, mesh_of_kind("data=2,fsdp=4", "explicit"), spec, differentiate)
    chex.assert_trees_all_close(grads, on_one_device(use), rtol=1e-4, atol=1e-7)


def gradients_of(use: Any, mesh: Any, spec: P, differentiate: Any) -> Any:
    w = {"w": state(WIDTH)["w"][0]}
    x = np.random.default_rng(1).standard_normal((32, WIDTH)).astype("float32")

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            w = ts.unshard(params["w"])
            return jnp.mean(jnp.sin(use(w, x))) + jnp.mean((x @ w) ** 2)

        value, grads = differentiate(loss)(params, x)
        return grads, value

    plan = ts.plan(w, [("w", spec)], mesh, min_size=0)
    run = ts.jit_step(step, plan, batch=P(("data", "fsdp")), donate=False)
    return ts.gather(run(ts.shard(w, plan), x)[0])


@functools.cache
def on_one_device(use: Any) -> Any:
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.devices()[:1])
    return gradients_of(use, mesh, P(), jax.value_and_grad)


# ------------------------------------------------------------------ how often a loss is traced

KINDS = [f"{a}{b}" for a in "pqrst" for b in "abcdefghij"]


def many_kinds(added: list[str], use: Any = ts.unshard) -> tuple[dict[str, Any], Any, list[str]]:
    """50 weights that are used in products, but for those that are added; and its traces."""
    drawn = np.random.default_rng(0).standard_normal((50, 16, 16)) / 8
    traces: list[str] = []

    def loss(params: Any, x: Any) -> Any:
        traces.append("")
        for name, w in use(params).items():
            x = jnp.tanh(x + w.sum(0, keepdims=True) if name in added else x @ w)
        return jnp.mean(x**2)

    return dict(zip(KINDS, drawn.astype("float32"), strict=True)), loss, traces


def accumulating(loss: Any) -> Any:
    def run(params: Any, x: Any) -> Any:
        def grad_fn(rows: Any, key: Any) -> Any:
            value, grads = value_and_grad(loss)(params, rows)
            return grads, {"value": value}

        grads, metrics = accumulate_gradients(grad_fn, x, 2)
        return metrics["value"], grads

    return run


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("added", "sharded", "most"),
    [([], True, 1), ([], False, 1), (KINDS[::5], False, 3), (KINDS[17:18], True, 5)],
)
def test_a_loss_is_traced_a_few_times(added: list[str], sharded: bool, most: int) -> None:
    params, loss, traces = many_kinds(added, ts.unshard if sharded else lambda p: p)
    rules = [(".*", P("fsdp") if sharded else None)]
    plan = ts.plan(params, rules, mesh_of_kind("data=2,fsdp=4", "explicit"), min_size=0)

    def step(params: Any, x: Any) -> Any:
        return value_and_grad(loss)(params, x)[::-1]

    x = np.random.default_rng(1).standard_normal((16, 16)).astype("float32")
    run = ts.jit_step(step, plan, batch=P(("data", "fsdp")), donate=False)
    grads, _ = run(ts.shard(params, plan), x)
    assert len(traces) == most
    alone = jax.jit(jax.grad(loss))(params, x)
    chex.assert_trees_all_close(ts.gather(grads), alone, rtol=1e-4, atol=1e-7)


FIRST_STEP = """
import jax, numpy as np
import treeshard as ts

ts.simulate_devices(8)
mesh = ts.make_mesh("data=2,fsdp=4", axis_types={"data": "explicit", "fsdp": "explicit"})
plan = ts.plan({"w": np.ones((8, 8), "float32")}, [("w", ts.fsdp("fsdp"))], mesh, min_size=0)
traces = []


def step(state, x):
    traces.append("")
    loss = lambda p, x: ((x @ ts.unshard(p)["w"]) ** 2).mean()
    value, grads = ts.training.value_and_grad(loss)(state, x)
    return grads, value


ones = np.ones((8, 8), "float32")
ts.jit_step(step, plan)(ts.shard({"w": ones}, plan), ones)
print(len(traces))
"""


def test_the_first_step_of_a_process_is_traced_once() -> None:
    """In which modules are imported while it is traced."""
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_all_that_are_used_in_products_wait() -> None:
    """Beside weights that are added: the sums that are not in the forward pass come last."""
    params, loss, _ = many_kinds(KINDS[::5], lambda p: p)
    plan = ts.plan(params, [(".*", None)], mesh_of_kind("data=2,fsdp=4", "explicit"), min_size=0)
    names: list[set[str]] = []

    def step(params: Any, x: Any) -> Any:
        with summed_later(True):
            value, grads = value_and_grad(loss)(params, x)
        types = {name: jax.typeof(g).sharding.spec for name, g in grads.items()}
        names.append({name for name, spec in types.items() if spec.unreduced})
        return params, value

    x = np.zeros((16, 16), "float32")
    ts.jit_step(step, plan, batch=P(("data", "fsdp"))).lower(plan.structs, x)
    assert names == [set(KINDS) - set(KINDS[::5])]


@pytest.mark.parametrize("differentiate", [jax.value_and_grad, value_and_grad, accumulating])
def test_the_error_of_a_loss_comes_through_alone(differentiate: Any) -> None:
    def loss(params: Any, x: Any) -> Any:
        raise LookupError(f"of {len(params)} weights")

    mesh = mesh_of_kind("data=2,fsdp=4", "explicit")
    step, plan, x = gradient_step(loss, mesh, FSDP, WIDTH, differentiate)
    with pytest.raises(LookupError) as error:
        step(ts.shard(state(WIDTH), plan), x)
    assert str(error.value) == "of 1 weights"
    assert error.value.__context__ is None
    assert error.value.__cause__ is None


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell makes programs that it starts in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("differentiate", [jax.value_and_grad, value_and_grad, accumulating])
def test_an_interrupt_ends_the_first_trace_and_the_step_works_after_it(differentiate: Any) -> None:
    calls: list[str] = []

    def loss(params: Any, x: Any) -> Any:
        calls.append("")
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return layered(params, x)

    mesh = mesh_of_kind("data=2,fsdp=4", "explicit")
    step, plan, x = gradient_step(loss, mesh, FSDP, WIDTH, differentiate)
    placed = ts.shard(state(WIDTH), plan)
    with pytest.raises(KeyboardInterrupt):
        step(placed, x)
    assert len(calls) == 1
    grads, _ = step(placed, x)
    alone = jax.grad(layered)(state(WIDTH), x)
    chex.assert_trees_all_close(ts.gather(grads), alone, rtol=1e-4, atol=1e-7)


# ------------------------------------------------------------------ states of another mesh


@pytest.mark.parametrize("first", ["auto", "explicit"])
def test_a_state_on_a_mesh_with_other_types_of_axes_is_taken_without_a_copy(first: str) -> None:
    meshes = {
        "auto": ts.make_mesh("data=2,fsdp=4"),
        "explicit": mesh_of_kind("data=2,fsdp=4", "explicit"),
    }
    other = meshes["explicit" if first == "auto" else "auto"]
    plans = [
        ts.plan(state(WIDTH), [("w", P("fsdp"))], m, min_size=0) for m in (meshes[first], other)
    ]
    step = ts.jit_step(lambda s, x: (jax.tree.map(lambda w: w + 1, s), 0), plans[1], batch=P())
    for _ in range(2):  # at the first call, and when the step is compiled
        placed = ts.shard(state(WIDTH), plans[0])
        new, _ = step(placed, ())
        assert new["w"].sharding.mesh.axis_types == other.axis_types
        assert placed["w"].is_deleted()  # its memory was donated
        chex.assert_trees_all_equal(ts.gather(new)["w"], state(WIDTH)["w"] + 1)


def test_beside_a_state_of_another_mesh_an_array_may_be_nowhere_yet() -> None:
    axes = "data=2,fsdp=4"
    tree = {"count": np.float32(0), "w": np.ones((8, 8), "float32")}
    rules = [("w", P("fsdp")), ("count", None)]
    here, there = (
        ts.plan(tree, rules, mesh, min_size=0)
        for mesh in (ts.make_mesh(axes), mesh_of_kind(axes, "explicit"))
    )
    step = ts.jit_step(
        lambda s, x: (jax.tree.map(lambda w: w + 1, s), 0),
        here,
        batch=P(("data", "fsdp")),
        donate=False,
    )
    step(ts.shard(tree, here), ())
    state = {"count": jnp.zeros(()), "w": ts.shard(tree, there)["w"]}
    assert not state["count"].committed
    new, _ = step(state, ())
    chex.assert_trees_all_equal(ts.gather(new), jax.tree.map(lambda w: w + 1, tree))

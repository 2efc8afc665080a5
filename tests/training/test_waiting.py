"""Gradients on Explicit axes: scattered where weights are gathered, and summed once a step."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import (
    CASES,
    FSDP,
    HSDP,
    NAMES_AND_KINDS,
    assert_reduced,
    gradient_step,
    in_passes,
    layered,
    returning_gradients,
    state,
    step_of,
)
from treeshard._core.contexts import summed_later
from treeshard.communication import collectives
from treeshard.training import value_and_grad

WIDTH = 64
ROWS = "data", "fsdp"
X = np.random.default_rng(1).standard_normal((32, WIDTH)).astype("float32")


@pytest.fixture
def explicit() -> Any:
    return ts.make_mesh(HSDP, axis_types="explicit")


def named(loss: Any) -> Any:
    return value_and_grad(loss, axis_names=ROWS)


def passes(loss: Any) -> Any:
    return in_passes(loss, None, 2)


@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS)
def test_each_gradient_is_summed_once_over_the_axes_that_do_not_split_it(
    name: str, kind: str
) -> None:
    case = CASES[name]
    step, plan, x = step_of(case, ts.make_mesh(case.axes, axis_types=kind), WIDTH)
    compiled = step.compile(plan.structs, x).compiled
    expected = case.reduced
    if kind == "auto":  # the compiler for CPUs all-reduces what it could scatter
        expected = tuple(one._replace(kind="all-reduce") for one in expected)
    assert_reduced(compiled, expected, WIDTH)
    grads, value = step(ts.shard(state(WIDTH), plan), x)
    assert_close((value, grads), jax.jit(jax.value_and_grad(case.loss))(state(WIDTH), x))


def test_what_has_no_type_that_waits_is_reduced_where_it_is_used(explicit: Any) -> None:
    """A weight that is added to rows, beside one that is used in products."""
    both = {"w": state(WIDTH)["w"][0], "positions": np.zeros((32, WIDTH), "float32")}
    plan = ts.plan(both, [("w", P("fsdp")), (".*", None)], explicit, min_size=0)

    def loss(params: Any, x: Any) -> Any:
        positions = jax.sharding.reshard(params["positions"], P(("data", "fsdp")))
        return jnp.mean(((x + positions) @ ts.unshard(params["w"], P("fsdp"))) ** 2)

    run = returning_gradients(plan, value_and_grad(loss, axis_names=ROWS))
    grads, _ = run(ts.shard(both, plan), X)
    alone = jax.grad(lambda p: jnp.mean(((X + p["positions"]) @ p["w"]) ** 2))(both)
    assert_close(grads, alone)
    moved = collectives(run.lower(plan.structs, X).compile())
    [shards] = [x for x in moved if x.kind == "all-reduce" and x.axes == ("data",)]
    assert (shards.total_bytes, shards.count) == (WIDTH * WIDTH, 1)


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


# All in `make soak`.
PAIRS = [(P(), named), (P("fsdp"), named)]
if os.environ.get("TREESHARD_SOAK"):
    PAIRS += [(P(), value_and_grad), (P("fsdp"), jax.value_and_grad)]
# JAX has types for all others, and from 0.12 on for the first ones.
TYPED_LATER = ("plus one", "a square", "remat", "scatter", "cast", "where")
RAISE = {
    *((name, P("fsdp")) for name in TYPED_LATER if jax.__version_info__ < (0, 12)),
    *((name, P("fsdp")) for name in ("stack", "cumsum", "norm")),
    *product(("the same for all rows", "its own square", "a whole batch"), (P(), P("fsdp"))),
}
if jax.__version_info__ < (0, 10, 2):
    RAISE = (RAISE - {("scatter", P("fsdp"))}) | {*product(["one layer"], (P(), P("fsdp")))}


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", OTHER_USES)
def test_other_uses_of_a_weight_have_right_gradients(name: str, explicit: Any) -> None:
    """Beside a product: types must not count one device's part for all, or twice."""
    use = OTHER_USES[name]
    w = {"w": state(WIDTH)["w"][0]}

    def loss(params: Any, x: Any) -> Any:
        w = ts.unshard(params["w"])
        return jnp.mean(jnp.sin(use(w, x))) + jnp.mean((x @ w) ** 2)

    def gradients(mesh: Any, spec: P, differentiate: Any) -> Any:
        plan = ts.plan(w, [("w", spec)], mesh, min_size=0)
        return returning_gradients(plan, differentiate(loss))(ts.shard(w, plan), X)[0]

    one = jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.devices()[:1])
    alone = gradients(one, P(), jax.value_and_grad)
    for spec, differentiate in PAIRS:
        if differentiate is named and (name, spec) in RAISE:
            with pytest.raises(ts.errors.ShardingTypeError, match="Without `axis_names`"):
                gradients(explicit, spec, differentiate)
        else:
            assert_close(gradients(explicit, spec, differentiate), alone)


# ------------------------------------------------------------------ how often a loss is traced

KINDS = [f"{a}{b}" for a in "pqrst" for b in "abcd"]


def many_kinds(added: list[str], use: Any = ts.unshard) -> tuple[dict[str, Any], Any, list[str]]:
    """20 weights that are used in products, but for those that are added; and its traces."""
    drawn = np.random.default_rng(0).standard_normal((20, 16, 16)) / 8
    traces: list[str] = []

    def loss(params: Any, x: Any) -> Any:
        traces.append("")
        for name, w in use(params).items():
            x = jnp.tanh(x + w.sum(0, keepdims=True) if name in added else x @ w)
        return jnp.mean(x**2)

    return dict(zip(KINDS, drawn.astype("float32"), strict=True)), loss, traces


@pytest.mark.parametrize(
    ("added", "sharded", "named", "count"),
    [
        (KINDS[::5], False, (), 1),
        (KINDS[::5], False, ROWS, 2),
        ([], True, ROWS, 2),
        ([], True, ("fsdp",), 2),  # and over the other axis that splits the rows
        (KINDS[17:18], True, (), 1),
    ],
)
def test_a_loss_is_traced_once_and_again_for_axes_that_are_named(
    added: list[str], sharded: bool, named: tuple[str, ...], count: int, explicit: Any
) -> None:
    params, loss, traces = many_kinds(added, ts.unshard if sharded else lambda p: p)
    plan = ts.plan(params, [(".*", P("fsdp") if sharded else None)], explicit, min_size=0)
    run = returning_gradients(plan, value_and_grad(loss, axis_names=named))
    x = X[:16, :16]
    grads, _ = run(ts.shard(params, plan), x)
    assert len(traces) == count
    assert_close(grads, jax.jit(jax.grad(loss))(params, x))


def test_all_that_are_used_in_products_wait(explicit: Any) -> None:
    """Beside weights that are added: the sums that are not in the forward pass come last."""
    params, loss, _ = many_kinds(KINDS[::5], lambda p: p)
    plan = ts.plan(params, [(".*", None)], explicit, min_size=0)
    waiting: set[str] = set()

    def differentiated(params: Any, x: Any) -> Any:
        with summed_later(True):
            value, grads = value_and_grad(loss, axis_names=ROWS)(params, x)
        waiting.update(name for name, g in grads.items() if jax.typeof(g).sharding.spec.unreduced)
        return value, params

    returning_gradients(plan, differentiated).lower(plan.structs, X[:16, :16])
    assert waiting == set(KINDS) - set(KINDS[::5])


FIRST_STEP = """
import jax, numpy as np
import treeshard as ts

ts.simulate_devices(8)
mesh = ts.make_mesh("data=2,fsdp=4", axis_types="explicit")
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


@pytest.mark.parametrize("differentiate", [jax.value_and_grad, value_and_grad, named, passes])
def test_the_error_of_a_loss_comes_through_alone(differentiate: Any, explicit: Any) -> None:
    calls: list[str] = []

    def loss(params: Any, x: Any) -> Any:
        calls.append("")
        raise LookupError(f"of {len(params)} weights")

    step, plan, x = gradient_step(loss, explicit, FSDP, WIDTH, differentiate)
    with pytest.raises(LookupError) as error:
        step(ts.shard(state(WIDTH), plan), x)
    assert str(error.value) == "of 1 weights"
    assert error.value.__context__ is None
    assert error.value.__cause__ is None
    assert len(calls) == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell makes programs that it starts in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("differentiate", [value_and_grad, named, passes])
def test_an_interrupt_ends_the_first_trace_and_the_step_works_after_it(
    differentiate: Any, explicit: Any
) -> None:
    calls: list[str] = []

    def loss(params: Any, x: Any) -> Any:
        calls.append("")
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return layered(params, x)

    step, plan, x = gradient_step(loss, explicit, FSDP, WIDTH, differentiate)
    placed = ts.shard(state(WIDTH), plan)
    with pytest.raises(KeyboardInterrupt):
        step(placed, x)
    assert len(calls) == 1
    grads, _ = step(placed, x)
    assert_close(grads, jax.grad(layered)(state(WIDTH), x))


# ------------------------------------------------------------------ states of another mesh


def adding_one(plan: ts.Plan, **options: Any) -> Any:
    return ts.jit_step(lambda s, x: (jax.tree.map(lambda w: w + 1, s), 0), plan, **options)


@pytest.mark.parametrize(("first", "second"), [("auto", "explicit"), ("explicit", "auto")])
def test_a_state_on_a_mesh_with_other_types_of_axes_is_taken_without_a_copy(
    first: str, second: str
) -> None:
    rules = [("w", P(None, "fsdp"))]
    there, here = (
        ts.plan(state(WIDTH), rules, ts.make_mesh(HSDP, axis_types=kind), min_size=0)
        for kind in (first, second)
    )
    step = adding_one(here)
    for _ in range(2):  # at the first call, and when the step is compiled
        placed = ts.shard(state(WIDTH), there)
        new, _ = step(placed, ())
        assert new["w"].sharding.mesh.axis_types == here.mesh.axis_types
        assert placed["w"].is_deleted()  # its memory was donated
        assert_same(ts.gather(new)["w"], state(WIDTH)["w"] + 1)


def test_beside_a_state_of_another_mesh_an_array_may_be_nowhere_yet(explicit: Any) -> None:
    tree = {"count": np.float32(0), "w": np.ones((8, 8), "float32")}
    rules = [("w", P("fsdp")), ("count", None)]
    here, there = (ts.plan(tree, rules, m, min_size=0) for m in (ts.make_mesh(HSDP), explicit))
    step = adding_one(here, donate=False)
    step(ts.shard(tree, here), ())
    given = {"count": jnp.zeros(()), "w": ts.shard(tree, there)["w"]}
    assert not given["count"].committed
    new, _ = step(given, ())
    assert_same(ts.gather(new), jax.tree.map(lambda w: w + 1, tree))

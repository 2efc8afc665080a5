"""What a step is planned to move follows from what its trace does with each leaf, without options.

`role_programs` are ordinary steps that names and shapes mislead. `tests/targets` has the same for
TPUs and GPUs.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import role_programs
from helpers import struct
from jax.sharding import PartitionSpec as P
from role_programs import ONLY_AUTO, PROGRAMS, TRUE_FINDINGS

import treeshard as ts

pytestmark = pytest.mark.usefixtures("standard_promotion")

MERGED = "gathers once what the step gathers several times"
# A step keeps its compiled program: several tests read that of one program.
made = cache(role_programs.made)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_leaf_has_its_role_and_what_is_compiled_is_what_is_planned(name: str) -> None:
    program = made(name)
    planned = program.step.plan_of(program.plan.structs, program.batch)
    assert planned == program.plan
    for leaf in planned.leaves:
        for part, role in program.roles.items():
            if leaf.path.startswith(part):
                assert str(leaf.role).startswith(role), (leaf.path, leaf.role)
    compared = program.step.communication(program.plan.structs, program.batch)
    # CPUs, unlike TPUs and GPUs, reduce gradients in each trip of a loop over time.
    in_loops = {"inside-loop"} if name == "recurrent" else set()
    assert {each.code for each in compared.unplanned} == TRUE_FINDINGS.get(name, in_loops)
    # The CPU's compiler all-reduces full gradients.
    assert all(each.startswith("all-reduces full gradients") for each in compared.by_compiler)
    gathered = [row for row in compared.rows if row.kind == "all-gather" and row.planned_count]
    for row in gathered:
        assert (row.count, row.bytes) == (row.planned_count, row.planned_bytes)
    has_gathers = not name.startswith("experts")
    assert bool(gathered) == has_gathers


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ONLY_AUTO])
def test_on_explicit_axes_all_that_is_compiled_is_planned(name: str) -> None:
    program = made(name, "explicit")
    compared = program.step.communication(program.plan.structs, program.batch)
    if name in ("recurrent", "accumulated layers"):
        # Biases are no operands of products, so that their gradients do not wait for the last trip.
        assert {each.code for each in compared.unplanned} == {"inside-loop"}
        return
    assert not compared.unplanned
    assert not compared.by_compiler
    for row in compared.rows:
        if row.kind != "all-to-all":
            sums = [x for x in compared.batch_sums if (x.kind, x.axes) == (row.kind, row.axes)]
            assert row.count == row.planned_count + len(sums)
            assert row.bytes == row.planned_bytes + sum(x.bytes or 0 for x in sums)


def test_the_report_shows_roles_in_a_column() -> None:
    program = made("actor and critic")
    head, *rows, _, _ = str(program.step.plan_of(program.plan.structs, program.batch)).split("\n")
    assert head.split()[-4:] == ["in", "the", "step", "why"]
    roles = {row.split()[0]: row for row in rows}
    assert " trained, gathered " in roles["actor/layer{0..1}/w"]
    assert " used, updated, gathered " in roles["target/layer{0..1}/w"]
    assert " updated only " in roles["opts/actor/0/count"]


# ------------------------------------------------------------------ one leaf at a time


def roles_of(state: Any, fn: Any) -> Any:
    """The roles of a state's leaves in a step."""
    plan = ts.plan(state, [(".*", ts.fsdp("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)
    step = ts.jit_step(fn, plan, batch=P("fsdp"))
    return {leaf.path: leaf.role for leaf in step.plan_of(plan.structs, SQUARE).leaves}


def _loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


SQUARE = struct(16, 16)
SHARDED = ((".*", P("fsdp")),)


def planned_step(step: Any, state: Any, rules: Any = SHARDED) -> ts.Step:
    plan = ts.plan(state, [*rules], ts.make_mesh("fsdp=8"), min_size=0)
    return ts.jit_step(step, plan, batch=P("fsdp"))


def _compared(step: Any, state: Any, x: Any = SQUARE, rules: Any = SHARDED) -> ts.Comparison:
    run = planned_step(step, state, rules)
    return run.communication(run.plan.structs, x)


def _sgd(loss: Any) -> Any:
    def step(state: Any, x: jax.Array) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), value

    return step


def test_what_is_used_and_how_it_changes() -> None:
    def step(state: Any, x: jax.Array) -> tuple[Any, Any]:
        def loss(w: jax.Array, scale: jax.Array) -> jax.Array:
            return _loss(w * scale + state["frozen"], x) + jnp.sum(state["steps"])

        value, (grad, of_scale) = jax.value_and_grad(loss, (0, 1))(state["w"], state["scale"])
        moment = 0.9 * state["moment"] + grad
        w = state["w"] - 0.1 * moment
        return {
            "w": w,
            "scale": state["scale"] - of_scale,
            "frozen": state["frozen"],
            "moment": moment,
            "average": 0.9 * state["average"] + 0.1 * w,
            "lagging": state["w"],
            "copy": w,
            "unused": state["unused"],
            "steps": state["steps"] + 1,
        }, value

    names = ("w", "frozen", "moment", "average", "lagging", "copy", "unused")
    state = {name: SQUARE for name in names} | {"scale": struct(), "steps": struct()}
    assert roles_of(state, step) == {
        "w": "trained, gathered",
        "scale": "trained",
        "frozen": "frozen, gathered",
        "moment": "updated only",
        "average": "updated only",
        "lagging": "updated only",
        "copy": "updated only",
        "unused": "passed through",
        "steps": "used, updated",
    }


@pytest.mark.parametrize(
    ("update", "role"),
    [
        (lambda zeros, w: w + -0.1 * zeros, "frozen"),
        (lambda zeros, w: zeros * (1 + w) + w, "frozen"),
        (lambda zeros, w: w - -zeros, "frozen"),
        (lambda zeros, w: w + zeros / (1 + w), "frozen"),
        (lambda zeros, w: w + zeros - 0.1 * w, "used, updated"),
        (lambda zeros, w: w + w / (1 + zeros), "used, updated"),
        (lambda zeros, w: zeros - w, "used, updated"),
    ],
    ids=["scaled", "multiplied", "negated", "divided", "decayed", "divides", "subtracts"],
)
def test_an_update_of_zeros_leaves_a_weight_frozen(update: Any, role: str) -> None:
    """As optax makes it of what it masks: `multi_transform` with `set_to_zero`, and a scale."""

    def step(state: Any, x: jax.Array) -> tuple[Any, Any]:
        loss = lambda w: _loss(w, x @ state["masked"])  # noqa: E731
        value, grad = jax.value_and_grad(loss)(state["w"])
        zeros = jnp.zeros_like(state["masked"])
        return {"w": state["w"] - grad, "masked": update(zeros, state["masked"])}, value

    roles = roles_of({"w": SQUARE, "masked": SQUARE}, step)
    assert roles == {"w": "trained, gathered", "masked": f"{role}, gathered"}


def test_empty_arrays_in_a_step() -> None:
    """As `jnp.pad` makes them: of no rows, with the dims of a weight."""
    plan = ts.plan({"w": struct(8, 4)}, [("w", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)
    padded = lambda w: jnp.pad(w[None], [(0, 0)] * 3, mode="edge")[0]  # noqa: E731
    step = ts.jit_step(lambda s, b: ({"w": padded(s["w"]) * b.sum()}, 0), plan)
    [leaf] = step.plan_of(plan.structs, struct(8)).leaves
    assert str(leaf.role).startswith("used, updated")


@pytest.mark.parametrize(
    "use",
    [
        lambda _: 0.0,
        lambda x: x[:1].sum(),
        lambda x: sum(row.sum() for row in jnp.unstack(x)),
        lambda x: jax.lax.scan(lambda total, row: (total + row.sum(), row), 0.0, x)[0],
    ],
    ids=["unused", "sliced", "unstacked", "scanned"],
)
@pytest.mark.parametrize("shape", [(0, 8), (0, 1), (1, 0), (8, 0)])
def test_an_empty_leaf_moves_nothing(shape: tuple[int, ...], use: Any) -> None:
    """As adapters of rank 0, and the layers of an empty stack."""
    tree = {"w": SQUARE, "empty": struct(*shape)}
    plan = ts.plan(tree, [("w", P("fsdp")), (".*", None)], ts.make_mesh("fsdp=8"), min_size=0)

    def step(state: Any, x: jax.Array) -> tuple[Any, Any]:
        loss = lambda state: _loss(state["w"], x) + use(state["empty"])  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    compared = ts.jit_step(step, plan).communication(plan.structs, struct(16, SQUARE.shape[0]))
    assert not compared.unplanned
    assert sum(x.bytes for x in compared.planned if x.path == "empty") == 0


def test_what_all_gradients_decide_makes_no_leaf_trained() -> None:
    def step(state: Any, x: jax.Array) -> tuple[Any, Any]:
        loss = lambda w: _loss(w, x @ state["frozen"])  # noqa: E731
        value, grad = jax.value_and_grad(loss)(state["w"])
        frozen, scaled = state["frozen"], grad / jnp.maximum(1, jnp.linalg.norm(grad))
        is_finite = jnp.isfinite(grad).all()
        frozen = jax.lax.cond(is_finite, lambda: frozen + 0 * scaled[0, 0], lambda: 1 * frozen)
        return {"w": state["w"] - jnp.where(is_finite, scaled, 0), "frozen": frozen}, value

    roles = roles_of({"w": SQUARE, "frozen": SQUARE}, step)
    assert roles["w"] == "trained, gathered"
    assert roles["frozen"].startswith(("frozen", "used, updated"))


def test_the_dtype_of_a_gather_is_in_the_trace() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        w = ts.unshard(w.astype("bfloat16"))
        return jnp.mean((x.astype("bfloat16") @ w).astype("float32") ** 2)

    compared = _compared(_sgd(loss), SQUARE)
    dtypes = {x.kind: x.dtype for x in compared.planned if x.path is not None}
    assert dtypes == {"all-gather": "bfloat16", "reduce-scatter": "bfloat16"}


def test_positions_stay_split_like_the_sequences_that_they_are_added_to() -> None:
    tree = {"embed": struct(16, 32), "positions": struct(8, 32)}
    rules = [("pos", P("seq")), (".*", None)]
    plan = ts.plan(tree, rules, ts.make_mesh("data=2,seq=4"), min_size=0)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = ts.with_sharding_constraint(x, P("data", "seq"))
        return jnp.mean((x @ params["embed"] + params["positions"][None]) ** 2)

    step = ts.jit_step(_sgd(loss), plan, batch=P("data", "seq"))
    assert str(step.roles(plan.structs, struct(4, 8, 16))["positions"]) == "trained, split"


def test_keys_of_chains_stay_where_they_are() -> None:
    def transition(chain: Any) -> Any:
        key, draw = jax.random.split(chain["key"])
        return {"x": chain["x"] + jax.random.normal(draw, (8,)), "key": key}

    def step(state: Any, _: jax.Array) -> tuple[Any, Any]:
        return jax.lax.fori_loop(0, 3, lambda _, s: jax.vmap(transition)(s), state), None

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 32))
    run = planned_step(step, {"x": struct(32, 8), "key": keys})
    arguments = run.plan.structs, struct(8)
    roles = {leaf.path: leaf.role for leaf in run.plan_of(*arguments).leaves}
    assert roles == {"x": "updated only", "key": "used, updated, split"}
    compared = run.communication(*arguments)
    assert compared.compiled == compared.unplanned == ()


def test_several_steps_in_a_call_move_what_each_moves() -> None:
    optimizer = optax.adam(1e-3)

    def train(state: Any, x: jax.Array) -> tuple[Any, Any]:
        value, grad = jax.value_and_grad(lambda w: _loss(ts.unshard(w), x))(state["w"])
        updates, opt = optimizer.update(grad, state["opt"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value

    state = {"w": SQUARE, "opt": jax.eval_shape(optimizer.init, SQUARE)}
    plan = ts.plan(state, [(".*", ts.fsdp("fsdp"))], ts.make_mesh("fsdp=8"), min_size=256)
    run = ts.jit_step(lambda s, xs: jax.lax.scan(train, s, xs), plan, batch=P(None, "fsdp"))
    compared = run.communication(plan.structs, struct(4, 16, 16))
    assert not compared.unplanned
    moved = {(x.kind, x.count) for x in compared.planned if x.path == "w"}
    assert moved == {("all-gather", 4), ("reduce-scatter", 4)}


# ------------------------------------------------------------------ what is still found


def test_a_weight_that_is_gathered_for_each_use_is_found() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2)

    assert "again" in {each.code for each in _compared(_sgd(loss), SQUARE).unplanned}
    [again] = _compared(_sgd(lambda w, x: loss(ts.unshard(w), x)), SQUARE).unplanned
    assert again.code == "again"
    assert "compilers may reduce the gradient of each use" in again.hint


def test_a_gather_in_each_trip_that_the_compiler_makes_once_is_not_missing() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[Any, Any]:
        def of_minibatch(total: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
            value, grad = jax.value_and_grad(lambda w: _loss(ts.unshard(w), x))(w)
            return total + grad, value

        minibatches = jnp.moveaxis(x.reshape(-1, 4, 16), 1, 0)
        grad, values = jax.lax.scan(of_minibatch, jnp.zeros_like(w), minibatches)
        return w - grad, values.mean()

    compared = _compared(step, SQUARE, struct(64, 16))
    [row] = [row for row in compared.rows if row.kind == "all-gather"]
    assert (row.count, row.planned_count) == (1, 4)
    assert {each.code for each in compared.unplanned} == {"inside-loop"}
    assert MERGED in compared.by_compiler


def test_sums_over_all_rows_are_listed_apart_unless_they_replace_weights() -> None:
    program = made("batch norm")
    compared = program.step.communication(program.plan.structs, program.batch)
    # The mean of the forward pass, and what its gradients need.
    assert {x.kind for x in compared.batch_sums} == {"all-reduce"}
    assert {x.bytes for x in compared.batch_sums} == {64 * 4}
    assert "over all rows, such as batch norm's, " in str(compared)

    def over_classes(w: jax.Array, x: jax.Array) -> jax.Array:
        logits = ts.with_sharding_constraint(x @ w, P(None, "fsdp"))
        return jnp.mean(jax.nn.logsumexp(logits, axis=1))

    instead = _compared(_sgd(over_classes), SQUARE, rules=[(".*", P(None, "fsdp"))])
    found = {
        x.kind for each in instead.unplanned if each.code == "activation" for x in each.collectives
    }
    assert "all-reduce" in found
    assert not instead.batch_sums

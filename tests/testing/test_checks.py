"""Checks of gradients and steps: planted faults are found and measured."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checked import (
    BOTH,
    MULTIPLE,
    OFF,
    SPREAD,
    facts,
    mean_square,
    normal,
    planned,
    report_of,
    report_of_step,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, testing

pytestmark = pytest.mark.usefixtures("quick_compiles")
X = normal(16, 8, seed=1)


# ------------------------------------------------------------------ one wrong leaf


def own(g: Any) -> Any:
    """This device's rows of a full gradient."""
    length = g.shape[0] // lax.axis_size("fsdp")
    return lax.dynamic_slice_in_dim(g, lax.axis_index("fsdp") * length, length)


def mean(g: Any, axes: Any = BOTH) -> Any:
    return lax.pmean(g, axes)


def scattered(g: Any, axes: Any) -> Any:
    return lax.psum_scatter(g, axes, tiled=True)


WHOLE, ROWS = P(), P("fsdp")
IN_MESH = "in `unchecked mesh`"


class LeafFault(NamedTuple):
    """What is done with one device's full gradient of a leaf, and the words that name the fault."""

    spec: P
    reduce: Callable[[Any], Any]
    words: str


LEAF_FAULTS = {
    "psum": LeafFault(WHOLE, lambda g: lax.psum(g, BOTH), f"{MULTIPLE} (x 8.000).\n"),
    "psum along data": LeafFault(
        WHOLE,
        lambda g: lax.psum(mean(g, "fsdp"), "data"),
        f"{MULTIPLE} (x 2.000; x 4.000 {IN_MESH}).",
    ),
    "psum_scatter": LeafFault(
        ROWS,
        lambda g: scattered(mean(g, "data"), "fsdp"),
        f"{MULTIPLE} (x 4.000; x 2.000 {IN_MESH}).",
    ),
    "divided by data": LeafFault(
        WHOLE,
        lambda g: mean(g) / lax.axis_size("data"),
        f"{MULTIPLE} (x 0.500; x 0.250 {IN_MESH}).",
    ),
    "zero": LeafFault(ROWS, lambda g: own(0 * mean(g)), f"{MULTIPLE} (x 0).\n"),
    "unsynced": LeafFault(WHOLE, lambda g: g, OFF),
    "not scattered": LeafFault(ROWS, mean, "each device has a gradient of float32[16,4]"),
    "axes in another order": LeafFault(SPREAD, lambda g: scattered(g, ("fsdp", "data")) / 8, OFF),
    "dropped": LeafFault(WHOLE, lambda g: None, "by_hand returns no gradient for it"),
    "one replica": LeafFault(
        WHOLE, lambda g: jnp.where(lax.axis_index(BOTH) == 5, -1.0, 1.0) * mean(g), OFF
    ),
    "nan": LeafFault(
        ROWS,
        lambda g: jnp.where(lax.axis_index("fsdp") == 1, jnp.nan, own(mean(g))),
        "not finite on 2 of 8 devices",
    ),
}
# Minus one of eight is twice its size off, over the root of eight. The device counts come last.
CELLS = {"one replica": "off 71% on 1 of 8", "psum": "x 8.000", "zero": "x 0", "right": "ok"}
RIGHT = {
    "right": LeafFault(WHOLE, mean, ""),
    "right rows": LeafFault(ROWS, lambda g: own(mean(g)), ""),
    "right spread": LeafFault(SPREAD, lambda g: scattered(g, BOTH) / 8, ""),
}


def test_faults_of_leaves_are_found() -> None:
    cases = LEAF_FAULTS | RIGHT
    params = {name: normal(16, 4, seed=i) / 4 for i, name in enumerate(cases)}
    specs = {name: case.spec for name, case in cases.items()}
    plan = planned(params, *((f"^{name}$", spec) for name, spec in specs.items()))

    def full(w: Any, spec: P) -> Any:
        return lax.all_gather(w, spec[0], tiled=True) if spec else w

    def body(p: Any, x: Any) -> Any:
        whole = {name: full(w, specs[name]) for name, w in p.items()}
        value, grads = jax.value_and_grad(mean_square)(whole, x)
        return mean(value), {name: cases[name].reduce(g) for name, g in grads.items()}

    options = {"layouts": ["unchecked", "unchecked mesh"], "batch_specs": SPREAD}
    args = mean_square, params, normal(16, 16, seed=99), plan
    report = report_of(testing.check_gradients, *args, by_hand=body, **options)
    found = facts(report)
    assert {n for n, x in LEAF_FAULTS.items() if x.words not in found.get(n, "")} == set(), found
    assert not found.keys() & RIGHT.keys()
    rows = [re.split("  +", line) for line in report.splitlines()]
    cells = {row[0]: row[1] for row in rows if len(row) == 4}
    assert {name: cells[name] for name in CELLS} == CELLS


@pytest.mark.usefixtures("standard_promotion")
def test_complex_parameters() -> None:
    params = {"w": normal(8, 4) + 1j * normal(8, 4, seed=1), "activation": jnp.abs}
    plan = planned(params)

    def wave(p: Any, x: Any) -> Any:
        return jnp.mean(p["activation"](x @ p["w"]) ** 2)

    def body(p: Any, x: Any, factor: float) -> Any:
        value, grads = manual.value_and_grad(wave, BOTH, plan)(p, x)
        return value, grads | {"w": factor * grads["w"]}

    options = {"layouts": ["unchecked"], "batch_specs": SPREAD}
    report = ""
    for factor, said in {1: "All results are right.", 4: "1 result is wrong."}.items():
        options["by_hand"] = partial(body, factor=factor)
        report = report_of(testing.check_gradients, wave, params, X, plan, **options)
        assert report.startswith(f"check_gradients: {said}\n"), report
    assert facts(report)["w"].startswith(f"{MULTIPLE} (x 4.000).")


# ------------------------------------------------------------------ faults of steps


@pytest.mark.usefixtures("standard_promotion")
def test_a_moment_shows_the_factor_that_adam_hides() -> None:
    adam = optax.adam(1e-3)
    params = {"w": normal(8, 4)}
    state = {"params": params, "opt": adam.init(params)}

    def step(state: Any, x: Any) -> Any:
        local = manual.vary(state["params"], "data")
        value, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(local)
        grads = lax.psum(grads, "data")
        updates, opt = adam.update(grads, state["opt"])
        new = optax.apply_updates(state["params"], updates)
        aux = {"loss": lax.pmean(value, "data"), "one per device": jnp.ones(lax.axis_size("data"))}
        return {"params": new, "opt": opt}, aux

    plan = planned(state, mesh="data=8")
    report = report_of_step(step, state, X, plan, make=ts.shard_map_step, layouts=None)
    found = facts(report)
    assert found["step 1: opt/0/mu/w"].startswith(f"{MULTIPLE} (x 8.000; x 4.000 in `mesh`).")
    of_aux = "step 1: aux/one per device P(): has the shape (8,), where one device gives (1,)."
    assert of_aux in report
    assert not found.keys() & {"step 1: params/w", "step 1: aux/loss", "step 2: opt/0/mu/w"}
    assert "step 2 is not measured if step 1 is wrong" in report


def test_a_fault_of_the_second_step_is_found() -> None:
    state = {"w": normal(8, 4), "count": np.int32(0)}

    def step(state: Any, x: Any) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        again = (state["count"] > 0).astype("float32")
        grad = grad * (1 + again * (ts.get_axes_size_in_mesh("data") - 1))
        return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, value

    report = report_of_step(step, state, X, planned(state, mesh="data=8"), layouts=None)
    assert facts(report).keys() == {"step 2: w"}
    assert facts(report)["step 2: w"].startswith(f"{MULTIPLE} (x 8.000; x 4.000 in `mesh`).")


def test_a_narrow_sum_does_not_hide_behind_the_size_of_the_parameter() -> None:
    """An update of 1e-5 of the parameter is rounded to 1% by float32, and is off by 0.2%."""
    state = {"float32": 100 + normal(8, 4), "bfloat16": 100 + normal(8, 4, seed=2)}

    def step(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(mean_square)(manual.vary(state, "data"), x / 100)
        new = dict(state)
        for dtype, g in grads.items():
            g = g.astype(dtype) if lax.axis_size("data") > 1 else g
            new[dtype] = state[dtype] - 1e-2 * lax.pmean(g, "data").astype("float32")
        return new, lax.pmean(value, "data")

    plan = planned(state, mesh="data=8")
    report = report_of_step(step, state, X, plan, make=ts.shard_map_step)
    assert facts(report).keys() == {"step 1: bfloat16"}
    assert facts(report)["step 1: bfloat16"].startswith(OFF)
    assert re.search(r"step \{1..2\}: float32 +ok +\de-06%", report), report


@pytest.mark.usefixtures("unchecked")
def test_what_is_not_a_step_or_a_plan_is_named() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        return state, batch

    says = "check_step: the step is the function train_step. Pass what `jit_step` or"
    with pytest.raises(ts.errors.ArgumentError, match=re.escape(says)):
        testing.check_step(train_step, {}, {})
    mesh: Any = ts.make_mesh("fsdp=8")
    for call, wrong in (
        ("check_gradients(loss,", lambda: testing.check_gradients(train_step, {}, {}, mesh)),
        ("layouts(plan(", lambda: testing.layouts(mesh, {})),
        ("assert_same_plan(plan(", lambda: testing.assert_same_plan(mesh, "plan.txt")),
    ):
        says = f"{call.partition('(')[0]}: the plan is a mesh. Make a plan first: `{call}"
        with pytest.raises(ts.errors.ArgumentError, match=re.escape(says)):
            wrong()


def test_what_cannot_be_checked_is_an_error() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch @ params["w"])

    params = {"w": normal(8, 4)}
    plan = ts.plan(params, [(".*", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)
    one = plan.on(ts.make_mesh("fsdp=1", devices=jax.devices()[:1]))
    with pytest.raises(ts.MeshError, match="^check_gradients: the mesh has one device, so"):
        testing.check_gradients(loss, params, X, one)
    with pytest.raises(ts.SpecError, match="the plan is not one of this tree: it has w, and the"):
        testing.check_gradients(loss, {"v": normal(4)}, X, plan)
    with pytest.raises(ts.SpecError, match="^check_gradients: the batch is not split, and the"):
        testing.check_gradients(loss, params, X, plan, by_hand=loss, batch_specs=P())
    with pytest.raises(ts.StateError, match=r"by_hand must return \(loss, grads\), as"):
        testing.check_gradients(loss, params, X, plan, by_hand=lambda p, _: jnp.sum(p["w"]))


def test_a_step_whose_state_was_not_compared_is_not_ok() -> None:
    state = {"skipped": normal(8, 4), "frozen": normal(8, 4, seed=2), "count": np.int32(0)}

    def step(state: Any, x: Any) -> Any:
        of_weights = lambda w: jnp.mean((x @ (w["skipped"] + w["frozen"])) ** 2)  # noqa: E731
        weights = {name: state[name] for name in ("skipped", "frozen")}
        value, grads = jax.value_and_grad(of_weights)(weights)
        count = state["count"] + 1
        # As `optax.apply_if_finite` or accumulation over many steps do.
        skipped = state["skipped"] - 0.1 * jnp.where(count > 10, grads["skipped"], 0)
        frozen = state["frozen"] - 0.1 * jnp.zeros_like(grads["frozen"])
        return state | {"skipped": skipped, "frozen": frozen, "count": count}, value

    text = report_of_step(step, state, X, planned(state, mesh="data=8"))
    assert text.startswith("check_step: No result of the state was compared.\n"), text
    for name in ("skipped", "frozen"):
        assert re.search(rf"not compared: .*step {{1..2}}: {name}.* .zero on one device", text)
    assert re.search(r"step \{1..2\}: aux +ok", text)


@pytest.mark.parametrize("by_hand", ["shard_map_step", "own shard_map"])
def test_shards_taken_for_full_weights_are_found(by_hand: str) -> None:
    """In `shard_map_step`, and in one's own `shard_map` inside `jit_step`."""
    columns = P(None, "fsdp")
    specs = {"shard": columns, "permuted": SPREAD, "summed": WHOLE, "right": columns}
    state = {name: normal(16, 8, seed=i) / 4 for i, name in enumerate(specs)}
    plan = planned(state, *specs.items())

    def step(state: Any, x: Any) -> Any:
        full = {
            "shard": state["shard"],
            "permuted": lax.all_gather(state["permuted"], BOTH[::-1], tiled=True),
            "summed": state["summed"],
            "right": lax.all_gather(state["right"], "fsdp", axis=1, tiled=True),
        }
        value, grads = jax.value_and_grad(mean_square)(manual.vary(full, BOTH), x)
        of_right = lax.psum_scatter(grads["right"], "fsdp", scatter_dimension=1, tiled=True)
        reduced = {
            "shard": mean(grads["shard"], "data"),
            "permuted": scattered(grads["permuted"], BOTH) / lax.axis_size(BOTH),
            "summed": lax.psum(grads["summed"], BOTH),
            "right": mean(of_right, "data") / lax.axis_size("fsdp"),
        }
        return {name: state[name] - 0.1 * reduced[name] for name in state}, mean(value)

    def mapped(state: Any, x: Any) -> Any:
        out_specs = plan.specs, P()
        return jax.shard_map(step, in_specs=(plan.specs, SPREAD), out_specs=out_specs)(state, x)

    kinds = {"shard_map_step": (ts.shard_map_step, step), "own shard_map": (ts.jit_step, mapped)}
    make, fn = kinds[by_hand]
    report = report_of_step(fn, state, normal(16, 16, seed=9), plan, make=make, specs=SPREAD)
    found = facts(report)
    assert found.keys() == {"step 1: shard", "step 1: permuted", "step 1: summed", "step 1: aux"}
    assert found["step 1: summed"].startswith(f"{MULTIPLE} (x 8.000).")


# ------------------------------------------------------------------ minibatches


def weighted_step(rows_only: bool, key: Any = None, **options: Any) -> Any:
    """A step in minibatches, of a loss with as many classes as the batch has rows."""
    batch = {"x": normal(16, 8), "classes": np.arange(16) % 7, "weights": abs(normal(16, seed=4))}
    state = {"w": normal(8, 16, seed=5) / 4}

    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any, rows: Any, key: Any) -> Any:
            logits = rows["x"] @ w
            if key is not None:
                logits = jnp.where(jax.random.bernoulli(key, 0.5, logits.shape), logits, 0)
            weights = batch["weights"] if rows_only else rows["weights"]
            log_p = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), rows["classes"]]
            return -jnp.mean(log_p * weights[rows["classes"]])

        def grad_fn(rows: Any, key: Any) -> Any:
            if len(rows["x"]) > options.get("most", 16):
                raise ValueError("too many rows")
            value, grad = jax.value_and_grad(loss)(state["w"], rows, key)
            return grad, {"loss": value, "minibatches": (value, 1)}

        rows = {name: batch[name] for name in ("x", "classes")}
        rows = rows if rows_only else batch
        grad, metrics = ts.training.accumulate_gradients(grad_fn, rows, 2, key)
        return {"w": state["w"] - 0.1 * grad}, metrics

    specs = {"x": P("data"), "classes": P("data"), "weights": P()}
    return ts.jit_step(step, planned(state, mesh="data=8"), batch=specs), state, batch


def test_an_array_that_is_cut_and_is_no_row_is_found() -> None:
    text = report_of(testing.check_step, *weighted_step(rows_only=False), layouts=["plan"])
    assert facts(text) == {"step 1: w": f"{OFF}: the table says how far.\n  In: one pass.\n"}
    assert re.search(r"\nstep 1: w +ok +off \d+% ", text), text
    assert "it cuts an array that does not have rows, or the loss is not a mean over rows" in text


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, ""),
        ({"key": jax.random.key(0)}, "since the loss draws random numbers, and minibatches draw"),
        ({"most": 8}, "since it raised ValueError: too many rows"),
    ],
    ids=["plain", "dropout", "raises"],
)
def test_minibatches_of_rows_pass(options: dict[str, Any], note: str) -> None:
    """Also if one pass returns other sums and counts, or cannot be compared."""
    report = testing.check_step(*weighted_step(rows_only=True, **options), layouts=["plan"])
    assert [text.partition(":")[0] for text in report.layouts] == ["plan", "one pass"]
    assert ("one pass" in report.cells["step 1: w"]) == (not note)
    assert "one pass" not in report.cells["step 1: aux/loss"]
    assert not note or f"one pass: not compared, {note}" in str(report)


@pytest.mark.parametrize("is_mean", [True, False])
def test_a_mean_of_parts_is_named_where_the_loss_is_not_a_mean_over_rows(is_mean: bool) -> None:
    x, state = normal(32, 8), {"w": normal(8, seed=1)}

    def step(state, x):
        def loss(w, x):
            mask = (x[:, 0] > 0.5).astype("float32")
            return jnp.sum((x @ w - 1) ** 2 * mask) / (len(x) if is_mean else 1 + mask.sum())

        def grad_fn(x, key):
            return jax.grad(loss)(state["w"], x), ()

        grads, _ = ts.training.accumulate_gradients(grad_fn, x, 1, axis_names="fsdp")
        return {"w": state["w"] - 0.1 * grads}, ()

    plan = planned(state, ("w", P("fsdp")), mesh="fsdp=8")
    report = report_of_step(step, state, x, plan, specs=P("fsdp"))
    said = "which are the gradients of the batch only if the loss is a mean over rows"
    assert (said in report) == (not is_mean), report
    assert bool(facts(report)) == (not is_mean), report

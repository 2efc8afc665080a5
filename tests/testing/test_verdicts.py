"""Verdicts carry their evidence: what was not compared is not said to be right."""

import re
from typing import Any

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
    normal,
    planned,
    report_of,
    report_of_step,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, testing
from treeshard.errors import SpecError, WrongResultError

pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")
BATCH = normal(16, 8, seed=3)
PARAMS = {"up": normal(8, 16) / 3, "down": normal(16, 8, seed=2) / 4}


def loss(p: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


def checked(
    loss: Any,
    params: Any,
    batch: Any,
    body: Any = None,
    layout: str = "unchecked",
    specs: Any = SPREAD,
) -> str:
    """The report of a check in one layout."""
    options = {"by_hand": body, "batch_specs": specs, "layouts": [layout]}
    return report_of(testing.check_gradients, loss, params, batch, planned(params), **options)


def averaged(loss: Any, *unreduced: str) -> Any:
    """A body by hand that averages all gradients but those of some leaves."""

    def body(p: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(manual.vary(p, BOTH), batch)
        mean = lax.pmean(grads, BOTH)
        return lax.pmean(value, BOTH), mean | {name: grads[name] for name in unreduced}

    return body


# ------------------------------------------------------------------ random numbers


def dropout(p: Any, batch: Any) -> jax.Array:
    x, key = batch
    h = jnp.tanh(x @ p["up"])
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)
    return jnp.mean((h @ p["down"]) ** 2)


def masked(p: Any, batch: Any) -> jax.Array:
    x, mask = batch
    rows = jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2, axis=1)
    return jnp.sum(rows * mask) / jnp.sum(mask)


def folding(body: Any) -> Any:
    """A body whose devices draw their own numbers."""

    def folded(p: Any, batch: Any) -> Any:
        x, key = batch
        return body(p, (x, manual.fold_rng_over_axis(key, BOTH)))

    return folded


KEYED = (BATCH, jax.random.key(0))
OF_KEYED = (SPREAD, P())
MASK = (np.arange(16) % 2 < 1 + (np.arange(16) < 8)).astype("float32")


NOT_FOLDED = "the key is not folded along `data` and `fsdp`"
FOLDED = "the key is folded along `fsdp`, where devices have the same rows"
FAULTS: dict[str, Any] = {
    "masked": (masked, (BATCH, MASK), averaged(masked), SPREAD, "down", OFF),
    "not averaged": (dropout, KEYED, folding(averaged(dropout, "up")), OF_KEYED, "up", OFF),
    "not folded": (dropout, KEYED, averaged(dropout), OF_KEYED, "loss", NOT_FOLDED),
    "folded": (dropout, KEYED, folding(averaged(dropout)), (P("data"), P()), "loss", FOLDED),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_losses_are_found(fault: str) -> None:
    loss, batch, body, specs, leaf, words = FAULTS[fault]
    report = checked(loss, PARAMS, batch, body, specs=specs)
    assert words in facts(report)[leaf], report


def test_numbers_that_one_device_cannot_repeat_are_not_checked() -> None:
    def body(p: Any, batch: Any) -> Any:
        x, key = batch
        return averaged(dropout)(p, (x, jax.random.fold_in(key, 100 + lax.axis_index(BOTH))))

    report = checked(dropout, PARAMS, KEYED, body, specs=OF_KEYED)
    head = "check_gradients: No result was compared, 3 results are not checked.\n"
    assert report.startswith(head), report
    assert "\nup    not checked" in report
    assert "unchecked: not checked, since each device draws random numbers in a way that" in report


def test_a_key_in_the_state_is_repeated() -> None:
    """A step by hand whose key is in its state, split, and then folded."""
    state = {**PARAMS, "key": jax.random.key(1)}

    def step(state: Any, x: Any) -> Any:
        key, own = jax.random.split(state["key"])
        own = manual.fold_rng_over_axis(own, "data")
        params = manual.vary({"up": state["up"], "down": state["down"]}, "data")
        value, grads = jax.value_and_grad(dropout)(params, (x, own))
        up = state["up"] - 0.1 * lax.psum(grads["up"], "data")
        down = state["down"] - 0.1 * lax.pmean(grads["down"], "data")
        return {"up": up, "down": down, "key": key}, lax.pmean(value, "data")

    plan = planned(state, mesh="data=8")
    report = report_of_step(step, state, BATCH, plan, make=ts.shard_map_step)
    assert "(x 8.000)" in facts(report)["step 1: up"]
    assert "step 1: down" not in facts(report)
    assert re.search(r"step 1: down +ok", report)


# ------------------------------------------------------------------ what is not compared


def by_order(p: Any, x: Any) -> jax.Array:
    """A loss that depends on the order of its rows, and is not finite."""
    return jnp.mean(jnp.log(p["up"])) + loss(p, x * jnp.arange(len(x), dtype="float32")[:, None])


def test_what_cannot_be_compared_is_said() -> None:
    layouts, plan = ["minibatches"], planned(PARAMS)
    report = testing.check_gradients(by_order, PARAMS, BATCH, plan, layouts=layouts)
    assert report.not_compared["loss"] == "not finite on one device either"
    assert report.notes == (
        "the result depends on the order of the rows, so other orders are not noise",
        "minibatches: minibatches change the result on one device too, since the loss is"
        " not a mean of rows of equal weight; compared with minibatches on one device",
    )
    head = "check_gradients: No errors in 2 of 3 results; the others were not compared.\n"
    assert str(report).startswith(head)


def test_a_check_that_compared_nothing_does_not_pass() -> None:
    report = checked(dropout, PARAMS, KEYED, layout="minibatches", specs=OF_KEYED)
    assert report.startswith("check_gradients: No result was compared.\n")
    why = "the loss draws random numbers, and minibatches draw different ones"
    assert f"minibatches: not compared, since {why}" in report


def test_layouts_may_raise_if_the_caller_says_so_but_not_the_plans() -> None:
    def of_all_rows(p: Any, x: Any) -> jax.Array:
        if len(x) < 16 or ts.get_axes_size_in_mesh("data") == 8:
            raise ValueError("too few rows")
        return loss(p, x)

    def check(mesh: str, *expected: str) -> testing.Report:
        args = of_all_rows, PARAMS, BATCH, planned(PARAMS, mesh=mesh)
        layouts = ("plan", "mesh", "minibatches")
        return testing.check_gradients(*args, layouts=layouts, expected_to_raise=expected)

    mesh, head = "data=2,fsdp=4", "check_gradients: 1 layout raised.\n"
    with pytest.raises(WrongResultError) as raised:
        check(mesh)
    assert str(raised.value).startswith(f"{head}minibatches raised ValueError: too few rows\n")
    assert repr(raised.value.__cause__) == "ValueError('too few rows')"
    allowed = str(check(mesh, "minibatches"))
    assert allowed.startswith(
        "check_gradients: No errors in 2 of 3 layouts; the others were not compared.\n"
    )
    why = "minibatches: not compared, since it raised ValueError: too few rows, as expected"
    assert why in allowed
    of_plan = report_of(check, "data=8", "plan", "minibatches")
    assert of_plan.startswith(f"{head}plan raised ValueError: too few rows\n")


# ------------------------------------------------------------------ data


def test_zeros_hide_no_fault_of_the_layers_before_them() -> None:
    """LoRA, whose second factors are initialised with zeros."""
    faults = {"unsynchronised": OFF, "slightly": f"{MULTIPLE} (x 1.001)"}
    factors = {name: normal(8, 4, seed=5 + i) for i, name in enumerate(faults)}
    adapters = {"a": factors, "b": {name: np.zeros((4, 16), "float32") for name in factors}}

    def adapted(p: Any, x: Any) -> jax.Array:
        changes = [x @ p["a"][name] @ p["b"][name] for name in factors]
        return jnp.mean((jnp.tanh(x @ PARAMS["up"]) + sum(changes) - 1) ** 2)

    def body(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(adapted)(p, x)
        slightly = 1.001 * lax.pmean(grads["a"]["slightly"], BOTH)
        wrong = grads["a"] | {"slightly": slightly}
        return lax.pmean(value, BOTH), {"a": wrong, "b": lax.pmean(grads["b"], BOTH)}

    report = checked(adapted, adapters, BATCH, body)
    assert report.startswith("check_gradients: 2 results are wrong.\n"), report
    for name, words in faults.items():
        assert words in facts(report)[f"a/{name}"], report


def test_a_batch_of_equal_rows_is_refused() -> None:
    report = checked(loss, PARAMS, np.tile(BATCH[:1], (16, 1)), averaged(loss, "up"))
    assert report.startswith("check_gradients: No result was compared.\n")
    assert "All rows of the batch are equal" in report
    # Each device has the same rows.
    report = checked(loss, PARAMS, np.tile(BATCH[:2], (8, 1)), averaged(loss, "up"))
    assert report.startswith("check_gradients: No result was compared.\n"), report
    assert "\nup    alike" in report
    assert "all devices get the same result from their own rows" in report


def test_leaves_without_a_gradient_are_not_said_to_be_right() -> None:
    params = PARAMS | {"unused": normal(4, 4), "decayed": normal(4)}

    def decaying(p: Any, x: Any) -> jax.Array:
        return loss(p, x) + jnp.sum(p["decayed"] ** 2)

    report = checked(decaying, params, BATCH, averaged(decaying), layout="plan")
    assert report.startswith(
        "check_gradients: No errors in 3 of 5 results; the others were not compared.\n"
    ), report
    assert "not compared: decayed (all devices get the same result from their own rows" in report
    assert "not compared: unused (zero on one device" in report


# ------------------------------------------------------------------ precision


def narrow(p: Any, x: Any) -> jax.Array:
    """A loss in bfloat16, and two casts that have nothing to do with most leaves."""
    small = {name: w.astype("bfloat16") for name, w in p.items()}
    h = jnp.tanh(x.astype("bfloat16") @ small["up"]) @ small["down"]
    casts = [(x @ p["other"]).astype(dtype) for dtype in ("bfloat16", "float8_e4m3fn")]
    return sum((jnp.mean(y.astype("float32") ** 2) for y in [h, *casts]), jnp.float32(0))


OTHER = PARAMS | {"other": normal(8, 4, seed=7)}


def test_an_error_that_is_just_visible_is_seen() -> None:
    right = averaged(narrow)
    options = {"layouts": ["unchecked"], "batch_specs": SPREAD}
    args = narrow, OTHER, BATCH, planned(OTHER)
    report = testing.check_gradients(*args, by_hand=right, **options)
    assert set(report.visible) == {"loss", *OTHER}
    [finest] = re.findall("other errors are seen from (.*)%", "\n".join(report.notes))
    assert float(finest) < 1e-2, report
    factor = 1 + 2 * float(finest) / 100

    def wrong(p: Any, x: Any) -> Any:
        value, grads = right(p, x)
        return value, grads | {"down": factor * grads["down"]}

    found = facts(report_of(testing.check_gradients, *args, by_hand=wrong, **options))
    assert found.keys() == {"down"}


def test_what_cannot_be_widened_is_compared_in_its_own_dtype() -> None:
    def rounded(x: Any) -> Any:
        return x.astype("bfloat16")

    @jax.custom_vjp
    def called(x: Any) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, "bfloat16")
        return jax.pure_callback(rounded, result, x, vmap_method="sequential")

    called.defvjp(lambda x: (called(x), ()), lambda _, g: (g.astype("float32"),))

    def with_callback(p: Any, x: Any) -> jax.Array:
        return jnp.mean(called(jnp.tanh(x @ p["up"]) @ p["down"]).astype("float32") ** 2)

    report = checked(with_callback, PARAMS, BATCH, averaged(with_callback))
    note = "pure_callback: runs in its own dtypes while all other code is compared in float32"
    assert note in report
    assert "warning: errors of up to" in report, report


@pytest.mark.parametrize("rate", [0.1, 1e-4])
def test_a_sum_in_16_bits_is_not_said_to_be_seen(rate: float) -> None:
    """On one device too the step rounds to 16 bits: with wider floats nothing is wrong."""
    plan = planned(PARAMS, mesh="data=8")

    def step(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(manual.vary(state, "data"), x)
        narrow = jax.tree.map(lambda g: g.astype("bfloat16"), grads)
        grads = jax.tree.map(lambda g: g.astype("float32"), lax.pmean(narrow, "data"))
        return jax.tree.map(lambda p, g: p - rate * g, state, grads), lax.pmean(value, "data")

    run = ts.shard_map_step(step, plan, batch=P("data"), donate=False)
    report = testing.check_step(run, PARAMS, BATCH, layouts=["plan"])
    new, _ = run(ts.shard(PARAMS, plan), BATCH)
    exact = jax.grad(loss)(PARAMS, BATCH)
    for name, g in exact.items():
        change = (PARAMS[name] - np.asarray(ts.gather(new)[name])) / rate
        off = np.linalg.norm(change - g) / np.linalg.norm(g)
        assert off > 1e-3
        assert report.visible[f"step 1: {name}"] > off
    assert "such as a sum in bfloat16, hides errors of up to" in str(report) or rate < 0.1


def antisymmetric(p: Any, x: Any) -> jax.Array:
    return loss(p, x) + jnp.mean(x @ p["zero"])


def attention(p: Any, x: Any) -> jax.Array:
    """To which a bias of the keys adds the same number in each row of the scores."""
    h = x.reshape(-1, 4, 8)
    keys = h @ p["down"].T[:, :8] + p["zero"].reshape(1, 1, 8)
    scores = (h @ p["up"][:, :8]) @ keys.swapaxes(1, 2)
    return jnp.mean((jax.nn.softmax(scores) @ h) ** 2)


@pytest.mark.parametrize(
    ("loss", "zero", "batch", "factor"),
    [
        (antisymmetric, normal(8, 4), np.concatenate([BATCH[:8], -BATCH[:8]]), 8),
        (attention, normal(8), normal(32, 8), 1),
    ],
    ids=["antisymmetric", "attention"],
)
def test_the_sign_of_rounding_is_not_compared(
    loss: Any, zero: Any, batch: Any, factor: int
) -> None:
    optimizer = optax.lion(1e-3)
    params = PARAMS | {"zero": zero}
    state = {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(manual.vary(state["params"], "data"), x)
        grads = lax.pmean(grads, "data")
        grads["up"] = grads["up"] * (factor if lax.axis_size("data") > 1 else 1)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, lax.pmean(value, "data")

    plan = planned(state, mesh="data=8")
    report = report_of_step(step, state, batch, plan, make=ts.shard_map_step)
    moment = facts(report).get("step 1: opt/0/mu/up", "")
    assert (f"{MULTIPLE} (x 8.000)" in moment) == (factor == 8), report
    assert not any("zero" in path for path in facts(report)), report
    [missing] = re.findall("not compared: .*params/zero.*", report)
    assert "the sign of a gradient near zero" in missing
    assert re.search(r"params/down +ok", report), report


# ------------------------------------------------------------------ updates of whole leaves


def muon(g: Any) -> Any:
    """Newton-Schulz iterations, in a loop."""

    def iteration(_: Any, x: Any) -> Any:
        return 1.5 * x - 0.5 * (x @ x.T) @ x

    start = g / (jnp.sqrt(jnp.sum(g**2)) + 1e-7)
    return lax.fori_loop(0, 3, iteration, start)


def test_shards_in_place_of_whole_leaves_are_found() -> None:
    state = {"shards": PARAMS, "gathered": PARAMS}
    plan = planned(state, ("down", P("fsdp")), ("up", P(None, "fsdp")))

    def of_all(p: Any, x: Any) -> jax.Array:
        return loss(p["shards"], x) + loss(p["gathered"], x)

    def of_whole(g: Any, spec: P) -> Any:
        full = muon(manual.gather_params(g, "fsdp", spec))
        dim, size = [*spec].index("fsdp"), lax.axis_size("fsdp")
        return jnp.stack(jnp.split(full, size, dim))[lax.axis_index("fsdp")]

    def step(state: Any, x: Any) -> Any:
        value, grads = manual.value_and_grad(of_all, BOTH, plan.specs)(state, x)
        updates = {
            "shards": jax.tree.map(muon, grads["shards"]),
            "gathered": jax.tree.map(of_whole, grads["gathered"], plan.specs["gathered"]),
        }
        return jax.tree.map(lambda p, update: p - 0.01 * update, state, updates), value

    report = report_of_step(step, state, BATCH, plan, make=ts.shard_map_step, specs=SPREAD)
    for leaf in PARAMS:
        assert f"step 1: shards/{leaf}" in facts(report), report
        assert f"step 1: gathered/{leaf}" not in facts(report), report


# ------------------------------------------------------------------ steps


def sgd(state: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(state, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def test_a_division_by_the_number_of_devices_shows() -> None:
    def divided(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state, x)
        return {n: state[n] - 0.1 * g / jax.device_count() for n, g in grads.items()}, value

    report = report_of_step(divided, PARAMS, BATCH, planned(PARAMS), specs=SPREAD)
    assert f"{MULTIPLE} (x 0.125)" in facts(report)["step 1: up"]
    assert jax.device_count() == 8


def test_a_key_that_a_step_does_not_change_is_noted() -> None:
    def step(state: Any, x: Any) -> Any:
        params = {name: state[name] for name in PARAMS}
        value, grads = jax.value_and_grad(dropout)(params, (x, state["key"]))
        return state | {n: state[n] - 0.1 * g for n, g in grads.items()}, value

    state = {**PARAMS, "key": jax.random.key(1)}
    report = report_of_step(step, state, BATCH, planned(state), specs=SPREAD)
    note = (
        "key: the step returns this key unchanged, so every step draws the same random numbers"
        " unless it folds the key with a number that changes"
    )
    assert f"\n{note}" in report
    assert report.startswith("check_step: All results are right.\n")


def test_a_restored_state_goes_on() -> None:
    plan = planned(PARAMS, ("up", P("fsdp")), ("down", P("data", "fsdp")))

    def by_size(state: Any, x: Any) -> Any:
        new, value = sgd(state, x)
        grown = 2 if ts.get_axes_size_in_mesh("data") == 4 else 1
        return new | {"up": state["up"] + grown * (new["up"] - state["up"])}, value

    options = {"specs": SPREAD, "layouts": ["restored"], "restore_on": "data=4,fsdp=2"}
    report = report_of_step(by_size, PARAMS, BATCH, plan, **options)
    assert report.startswith("check_step: 1 result is wrong.\n")
    layout = "data=2, fsdp=4; batch P(('data', 'fsdp'),); step 2 restored on data=4, fsdp=2"
    assert f"\nrestored: {layout}\n" in report
    assert facts(report).keys() == {"step 2: up"}


def test_layouts_are_chosen_by_name() -> None:
    plan = planned(PARAMS)
    report = testing.check_gradients(loss, PARAMS, BATCH, plan, layouts=["axes"])
    assert [text.partition(":")[0] for text in report.layouts] == ["axes"]
    with pytest.raises(SpecError) as raised:
        testing.check_gradients(loss, PARAMS, BATCH, plan, layouts=["axis"])
    assert str(raised.value).startswith("check_gradients: there is no layout 'axis'. Did you mean")
    step = ts.jit_step(sgd, plan, batch=SPREAD)
    with pytest.raises(SpecError, match="There are plan, mesh, axes, batch"):
        testing.check_step(step, PARAMS, BATCH, layouts=["remat"])

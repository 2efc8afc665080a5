"""Checks of gradients and steps: planted faults are found and measured."""

import io
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, testing
from treeshard.errors import WrongResultError
from treeshard.testing._findings import axes_of

BOTH = ("data", "fsdp")
pytestmark = pytest.mark.usefixtures("quick_compiles")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# ------------------------------------------------------------------ one wrong leaf


def own(g: Any, axes: Any = "fsdp", dim: int = 0, at: Any = None) -> Any:
    """This device's shard of a full gradient."""
    length = g.shape[dim] // lax.axis_size(axes)
    at = lax.axis_index(axes) if at is None else at
    return lax.dynamic_slice_in_dim(g, at * length, length, dim)


def mean(g: Any, axes: Any = BOTH) -> Any:
    return lax.pmean(g, axes)


def shifted(x: Any) -> Any:
    n = lax.axis_size("fsdp")
    return lax.ppermute(x, "fsdp", [(i, (i + 1) % n) for i in range(n)])


def scattered(g: Any, axes: Any) -> Any:
    return lax.psum_scatter(g, axes, tiled=True)


WHOLE, ROWS, COLUMNS, SPREAD = P(), P("fsdp"), P(None, "fsdp"), P(BOTH)
MULTIPLE, OFF = "a multiple of the right result", "differs by more than rounding"
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
        f"{MULTIPLE} (x 2.000; x 4.000 {IN_MESH}): the size of `data`.",
    ),
    "psum_scatter": LeafFault(
        ROWS,
        lambda g: scattered(mean(g, "data"), "fsdp"),
        f"{MULTIPLE} (x 4.000; x 2.000 {IN_MESH}): the size of `fsdp`.",
    ),
    "divided by data": LeafFault(
        WHOLE,
        lambda g: mean(g) / lax.axis_size("data"),
        f"{MULTIPLE} (x 0.500; x 0.250 {IN_MESH}): 1 / the size of `data`.",
    ),
    "zero": LeafFault(ROWS, lambda g: own(0 * mean(g)), f"{MULTIPLE} (x 0).\n"),
    "unsynced": LeafFault(WHOLE, lambda g: g, OFF),
    "not along data": LeafFault(WHOLE, lambda g: mean(g, "fsdp"), OFF),
    "not scattered": LeafFault(ROWS, mean, "each device has a gradient of float32[16,4]"),
    "axes in another order": LeafFault(SPREAD, lambda g: scattered(g, ("fsdp", "data")) / 8, OFF),
    "passed on": LeafFault(ROWS, lambda g: shifted(own(mean(g))), OFF),
    "dropped": LeafFault(WHOLE, lambda g: None, "by_hand returns no gradient for it"),
    "one shard": LeafFault(
        ROWS, lambda g: jnp.where(lax.axis_index("fsdp") == 2, 0, own(mean(g))), OFF
    ),
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
    "right columns": LeafFault(COLUMNS, lambda g: own(mean(g), dim=1), ""),
    "right spread": LeafFault(SPREAD, lambda g: scattered(g, BOTH) / 8, ""),
}


def many(p: Any, x: Any) -> jax.Array:
    """A loss in which each leaf has a gradient of its own."""
    return jnp.stack([jnp.mean(jnp.tanh(x @ w) ** 2) for w in p.values()]).sum()


def facts_of(error: Any) -> dict[str, str]:
    """What the message says of each leaf: facts, and what to change."""
    facts: dict[str, str] = {}
    for text in str(error.value).split("\n\n")[2:]:
        leaves, _, fact = text.partition("): ")
        for leaf in leaves.split("; "):
            path = leaf.partition(" P(")[0].strip()
            facts[path] = f"{facts.get(path, '')}{fact}\n"
    return facts


def test_faults_of_leaves_are_found() -> None:
    cases = LEAF_FAULTS | RIGHT
    params = {name: normal(16, 4, seed=i) / 4 for i, name in enumerate(cases)}
    specs = {name: case.spec for name, case in cases.items()}
    rules = [(f"^{name}$", spec) for name, spec in specs.items()]
    plan = ts.plan(params, rules, ts.make_mesh("data=2,fsdp=4"), min_size=0)

    def full(w: Any, spec: P) -> Any:
        dim = len(spec) - 1
        return w if dim < 0 else lax.all_gather(w, spec[dim], axis=dim, tiled=True)

    def body(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(many)({n: full(w, specs[n]) for n, w in p.items()}, x)
        return mean(value), {name: cases[name].reduce(g) for name, g in grads.items()}

    batch = normal(16, 16, seed=99)
    layouts = [chosen(plan, batch, name) for name in ("unchecked", "unchecked mesh")]
    with pytest.raises(WrongResultError) as raised:
        testing.check_gradients(many, params, batch, plan, layouts=layouts, by_hand=body)
    facts = facts_of(raised)
    missed = {n: facts.get(n) for n, x in LEAF_FAULTS.items() if x.words not in facts.get(n, "")}
    assert missed == {}
    assert not facts.keys() & RIGHT.keys()
    rows = [re.split("  +", line) for line in str(raised.value).splitlines()]
    cells = {row[0]: row[1] for row in rows if len(row) == 4}
    assert {name: cells[name] for name in CELLS} == CELLS


def chosen(plan: ts.Plan, batch: Any, name: str, specs: Any = SPREAD) -> testing.Layout:
    layouts = testing.layouts(plan, batch, specs, by_hand=True)
    return next(layout for layout in layouts if layout.name == name)


# ------------------------------------------------------------------ faults of losses

PARAMS = {
    "up": normal(8, 16) / 3,
    "bias": normal(16, seed=1) / 9,
    "down": normal(16, 8, seed=2) / 4,
    "activation": jnp.tanh,
}
BATCH = normal(16, 8, seed=3)
RULES = [("up", COLUMNS), ("down", ROWS), ("bias", WHOLE)]
SPECS = {"up": COLUMNS, "bias": WHOLE, "down": ROWS, "activation": None}


def hidden(p: Any, x: Any) -> jax.Array:
    return p["activation"](x @ p["up"] + p["bias"][None])


def loss(p: Any, x: Any) -> jax.Array:
    return jnp.mean((hidden(p, x) @ p["down"]) ** 2)


def masked(p: Any, batch: Any) -> jax.Array:
    x, mask = batch
    rows = jnp.mean((hidden(p, x) @ p["down"]) ** 2, axis=1)
    return jnp.sum(rows * mask) / jnp.sum(mask)


def dropout(p: Any, batch: Any) -> jax.Array:
    x, key = batch
    h = hidden(p, x)
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)
    return jnp.mean((h @ p["down"]) ** 2)


def by_library(loss: Any) -> Any:
    return manual.value_and_grad(loss, BOTH, SPECS)


def folding(*axes: str) -> Any:
    """A body that folds the key by the index over some axes."""

    def body(p: Any, batch: Any) -> Any:
        x, key = batch
        key = jax.random.fold_in(key, lax.axis_index(axes)) if axes else key
        return manual.value_and_grad(dropout, BOTH, SPECS)(p, (x, key))

    return body


class LossFault(NamedTuple):
    """A body by hand, what it should compute, and what is said of a leaf."""

    body: Any
    loss: Any
    batch: Any
    leaf: str
    words: str
    specs: Any = P(BOTH)


KEYED = (BATCH, np.array([0, 7], "uint32"))
SPLIT = (P(BOTH), P())
LOSS_FAULTS = {
    "masked mean of each device": LossFault(
        by_library(masked),
        masked,
        (BATCH, (np.arange(16) % 2 < 1 + (np.arange(16) < 8)).astype("float32")),
        "down",
        OFF,
    ),
    "key not folded": LossFault(
        folding(), dropout, KEYED, "loss", "the key is not folded along `data` and `fsdp`", SPLIT
    ),
    "key folded where it must not be": LossFault(
        folding(*BOTH),
        dropout,
        KEYED,
        "loss",
        "the key is folded along `fsdp`, where devices have the same rows",
        (P("data"), P()),
    ),
}


@pytest.mark.parametrize("name", LOSS_FAULTS)
def test_faults_of_losses_are_found(name: str) -> None:
    case = LOSS_FAULTS[name]
    plan = ts.plan(PARAMS, RULES, ts.make_mesh("data=2,fsdp=4"), min_size=0)
    layouts = [chosen(plan, case.batch, "unchecked", case.specs)]
    with pytest.raises(WrongResultError) as raised:
        testing.check_gradients(
            case.loss, PARAMS, case.batch, plan, layouts=layouts, by_hand=case.body
        )
    assert case.words in facts_of(raised)[case.leaf]


def test_devices_may_draw_their_own_numbers() -> None:
    plan = ts.plan(PARAMS, RULES, ts.make_mesh("data=2,fsdp=4"), min_size=0)
    layouts = [chosen(plan, KEYED, "unchecked", SPLIT)]
    report = testing.check_gradients(
        dropout, PARAMS, KEYED, plan, layouts=layouts, by_hand=folding(*BOTH)
    )
    assert report.notes[-1] == (
        "unchecked: each device draws its own random numbers; compared with keys folded by"
        " axis_index(('data', 'fsdp')) on one device"
    )


def by_order(p: Any, x: Any) -> jax.Array:
    """A loss that depends on the order of its rows, and is not finite."""
    return jnp.mean(jnp.log(p["bias"])) + loss(p, x * jnp.arange(len(x), dtype="float32")[:, None])


def test_what_cannot_be_compared_is_said() -> None:
    plan = ts.plan(PARAMS, RULES, ts.make_mesh("data=2,fsdp=4"), min_size=0)
    layouts = [chosen(plan, BATCH, "minibatches", SPREAD)]
    report = testing.check_gradients(by_order, PARAMS, BATCH, plan, layouts=layouts)
    assert report.not_compared == {"loss": "not finite on one device either"}
    assert report.notes == (
        "the result depends on the order of the rows, so other orders are not noise",
        "minibatches: minibatches change the result on one device too, since the loss is"
        " not a mean of rows of equal weight; compared with minibatches on one device",
    )
    head = "check_gradients: Nothing is wrong in 3 of 4 results; the others were not compared.\n"
    assert str(report).startswith(head)


def test_a_check_that_compared_nothing_does_not_pass() -> None:
    plan = ts.plan(PARAMS, RULES, ts.make_mesh("data=2,fsdp=4"), min_size=0)
    layouts = [chosen(plan, KEYED, "minibatches", SPLIT)]
    with pytest.raises(WrongResultError) as error:
        testing.check_gradients(dropout, PARAMS, KEYED, plan, layouts=layouts)
    message = str(error.value)
    assert message.startswith("check_gradients: Nothing was compared.\n")
    why = "the loss draws random numbers, and minibatches draw others"
    assert f"minibatches: not compared, since {why}" in message


@pytest.mark.parametrize("quiet_seconds", [0.0, 1000.0])
def test_a_terminal_gets_a_bar_once_a_check_is_long(
    quiet_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("treeshard.testing._checks._QUIET_SECONDS", quiet_seconds)
    params = {"w": normal(8, 4)}
    plan = ts.plan(params, [("w", ROWS)], ts.make_mesh("data=2,fsdp=4"), min_size=0)
    layouts = [chosen(plan, BATCH, name) for name in ("plan", "axes")]
    squares = lambda p, x: jnp.mean((x @ p["w"]) ** 2)  # noqa: E731
    testing.check_gradients(squares, params, BATCH, plan, layouts=layouts)
    assert ("check_gradients: 100%" in stream.getvalue()) == (quiet_seconds == 0)


def test_axes_that_others_would_explain_as_well_are_not_proven() -> None:
    shapes = [{"data": n, "fsdp": n, "tensor": 1} for n in (2, 4)]
    assert axes_of([2.0, 4.0], shapes) == ()
    assert axes_of([4.0, 16.0], shapes) == ("data", "fsdp")


@pytest.mark.usefixtures("standard_promotion")
def test_complex_parameters() -> None:
    params = {"w": normal(8, 4) + 1j * normal(8, 4, seed=1)}
    plan = ts.plan(params, [("w", ROWS)], ts.make_mesh("data=2,fsdp=4"), min_size=0)
    wave = lambda p, x: jnp.mean(jnp.abs(x @ p["w"]) ** 2)  # noqa: E731
    layouts = [chosen(plan, BATCH, "axes")]
    assert testing.check_gradients(wave, params, BATCH, plan, layouts=layouts).ok

    @jax.custom_vjp
    def wrong(p: Any, x: Any) -> Any:
        return wave(p, x)

    def backward(inputs: Any, g: Any) -> Any:
        grads = jax.grad(wave)(*inputs)
        return {"w": g * grads["w"] * ts.get_axes_size_in_mesh("fsdp")}, jnp.zeros_like(inputs[1])

    wrong.defvjp(lambda p, x: (wave(p, x), (p, x)), backward)
    with pytest.raises(WrongResultError, match=f"w P.*: {MULTIPLE} .x 4.000"):
        testing.check_gradients(wrong, params, BATCH, plan, layouts=layouts)


# ------------------------------------------------------------------ faults of steps


@pytest.mark.usefixtures("standard_promotion")
def test_a_moment_shows_the_factor_that_adam_hides() -> None:
    adam = optax.adam(1e-3)
    params = {"w": normal(8, 4)}
    state = {"params": params, "opt": adam.init(params)}
    plan = ts.plan(state, [(".*", None)], ts.make_mesh("data=8"), min_size=0)

    def step(state: Any, x: Any) -> Any:
        local = manual.vary(state["params"], "data")
        value, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(local)
        grads = lax.psum(grads, "data")
        updates, opt = adam.update(grads, state["opt"])
        new = optax.apply_updates(state["params"], updates)
        aux = {"loss": lax.pmean(value, "data"), "one per device": jnp.ones(lax.axis_size("data"))}
        return {"params": new, "opt": opt}, aux

    with pytest.raises(WrongResultError) as raised:
        testing.check_step(
            ts.shard_map_step(step, plan, batch=P("data")), state, normal(16, 8, seed=1)
        )
    facts = facts_of(raised)
    assert facts["step 1: opt/0/mu/w"].startswith(
        f"{MULTIPLE} (x 8.000; x 4.000 in `mesh`): the size of `data`."
    )
    of_aux = "step 1: aux/one per device P(): has the shape (8,), where one device gives (1,)."
    assert of_aux in str(raised.value)
    assert not facts.keys() & {"step 1: params/w", "step 1: aux/loss", "step 2: opt/0/mu/w"}
    assert "step 2 is not measured where step 1 is wrong already" in str(raised.value)


def test_a_fault_of_the_second_step_is_found() -> None:
    plan = ts.plan(
        {"w": normal(8, 4), "count": np.int32(0)}, [(".*", None)], ts.make_mesh("data=8")
    )

    def step(state: Any, x: Any) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        again = (state["count"] > 0).astype("float32")
        grad = grad * (1 + again * (ts.get_axes_size_in_mesh("data") - 1))
        return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, value

    state = {"w": normal(8, 4), "count": np.int32(0)}
    with pytest.raises(WrongResultError) as raised:
        testing.check_step(ts.jit_step(step, plan, batch=P("data")), state, normal(16, 8, seed=1))
    facts = facts_of(raised)
    assert facts.keys() == {"step 2: w"}
    assert facts["step 2: w"].startswith(
        f"{MULTIPLE} (x 8.000; x 4.000 in `mesh`): the size of `data`."
    )


def test_a_narrow_sum_does_not_hide_behind_the_size_of_the_parameter() -> None:
    """An update of 1e-5 of the parameter is rounded to 1% by float32, and is off by 0.2%."""
    state = {"float32": 100 + normal(8, 4), "bfloat16": 100 + normal(8, 4, seed=2)}
    plan = ts.plan(state, [(".*", None)], ts.make_mesh("data=8"), min_size=0)

    def step(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(many)(manual.vary(state, "data"), x / 100)
        new = dict(state)
        for dtype, g in grads.items():
            g = g.astype(dtype) if lax.axis_size("data") > 1 else g
            new[dtype] = state[dtype] - 1e-2 * lax.pmean(g, "data").astype("float32")
        return new, lax.pmean(value, "data")

    with pytest.raises(WrongResultError) as raised:
        testing.check_step(
            ts.shard_map_step(step, plan, batch=P("data")),
            state,
            normal(16, 8, seed=1),
            layouts=["plan"],
        )
    assert facts_of(raised).keys() == {"step 1: bfloat16"}
    assert facts_of(raised)["step 1: bfloat16"].startswith(OFF)
    assert re.search(r"step \{1..2\}: float32 +ok +\de-06%", str(raised.value)), str(raised.value)


def test_a_step_whose_state_was_not_compared_is_not_ok() -> None:
    counts = {"count": np.int32(0), "still": np.int32(0)}
    state = {"skipped": normal(8, 4), "frozen": normal(8, 4, seed=2), **counts}
    plan = ts.plan(state, [(".*", None)], ts.make_mesh("data=8"), min_size=0)

    def step(state: Any, x: Any) -> Any:
        of_weights = lambda w: jnp.mean((x @ (w["skipped"] + w["frozen"])) ** 2)  # noqa: E731
        weights = {name: state[name] for name in ("skipped", "frozen")}
        value, grads = jax.value_and_grad(of_weights)(weights)
        count = state["count"] + 1
        # As `optax.apply_if_finite` or accumulation over many steps do.
        skipped = state["skipped"] - 0.1 * jnp.where(count > 10, grads["skipped"], 0)
        frozen = state["frozen"] - 0.1 * jnp.zeros_like(grads["frozen"])
        return state | {"skipped": skipped, "frozen": frozen, "count": count}, value

    with pytest.raises(WrongResultError) as raised:
        testing.check_step(
            ts.jit_step(step, plan, batch=P("data")), state, normal(16, 8, seed=1), layouts=["plan"]
        )
    text = str(raised.value)
    assert text.startswith("check_step: Nothing of the state was compared.\n"), text
    for name in ("skipped", "frozen"):
        assert re.search(rf"not compared: .*step {{1..2}}: {name}.* .zero on one device", text)
    assert re.search(r"step \{1..2\}: aux +ok", text)


@pytest.mark.parametrize("is_mean", [True, False])
def test_a_mean_of_parts_is_named_where_the_loss_is_not_a_mean_over_rows(is_mean: bool) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 8)).astype("float32")
    state = {"w": random.normal(size=8).astype("float32")}
    plan = ts.plan(state, [("w", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)

    def step(state, x):
        def loss(w, x):
            mask = (x[:, 0] > 0.5).astype("float32")
            return jnp.sum((x @ w - 1) ** 2 * mask) / (len(x) if is_mean else 1 + mask.sum())

        def grad_fn(x, key):
            return jax.grad(loss)(state["w"], x), ()

        grads, _ = ts.training.accumulate_gradients(grad_fn, x, 1, axis_names="fsdp")
        return {"w": state["w"] - 0.1 * grads}, ()

    run = ts.jit_step(step, plan, donate=False)
    if is_mean:
        assert "accumulate_gradients" not in str(
            testing.check_step(run, state, x, layouts=["plan"])
        )
        return
    with pytest.raises(WrongResultError) as caught:
        testing.check_step(run, state, x, layouts=["plan"])
    said = "by `accumulate_gradients(axis_names=)`: those of the batch, only if the loss is a mean"
    assert said in str(caught.value)

"""Checks of gradients and steps on several processes: all of them find the same."""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.worker import Context
from treeshard import manual, testing
from treeshard.errors import WrongResultError

AXES = ("fsdp", "data")
SPLIT = P(AXES)
RULES = [("bias", None), (".*", P("fsdp"))]
RANDOM = np.random.default_rng(0)
PARAMS = {
    "w": RANDOM.normal(size=(16, 8)).astype("float32"),
    "bias": np.zeros(8, "float32"),
}
BATCH = RANDOM.normal(size=(16, 16)).astype("float32")


def planned(tree: Any) -> ts.Plan:
    """On two processes with 4 devices each, the last two shards along `fsdp` are on process 1."""
    return ts.plan(tree, RULES, ts.make_mesh("fsdp=4,data=2"), min_size=0)


def loss(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ p["w"] + p["bias"]) ** 2)


def check_right_gradients_pass(context: Context) -> None:
    plan = planned(PARAMS)
    params = ts.shard(PARAMS, plan)  # no process has all of it
    assert not params["w"].is_fully_addressable
    layouts = testing.layouts(plan, BATCH, SPLIT, by_hand=True)
    some = [x for x in layouts if x.name in ("axes", "by hand")]
    body = manual.value_and_grad(loss, AXES, plan)
    report = testing.check_gradients(loss, params, BATCH, plan, layouts=some, by_hand=body)
    assert len(report.cells["w"]) == len(some) == 2, report
    assert_same_on_all(str(report))


def assert_same_on_all(text: str) -> None:
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), "uint8")
    first, *others = multihost_utils.process_allgather(digest)
    assert all((first == other).all() for other in others), text


def check_faults_are_found_on_all(context: Context) -> None:
    """Of one process, of the replicas of one process, and of all."""
    params = {name: RANDOM.normal(size=(16, 8)).astype("float32") for name in FAULTS}
    rules = [("replicas|summed", None), (".*", P("fsdp"))]
    plan = ts.plan(params, rules, ts.make_mesh("fsdp=4,data=2"), min_size=0)

    def loss(p: Any, x: Any) -> Any:
        return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in p.values())

    def body(p: Any, x: Any) -> Any:
        value, grads = manual.value_and_grad(loss, AXES, plan)(p, x)
        return value, {name: FAULTS[name][0](g) for name, g in grads.items()}

    chosen = [x for x in testing.layouts(plan, BATCH, SPLIT, by_hand=True) if x.name == "unchecked"]
    with pytest.raises(WrongResultError) as raised:
        testing.check_gradients(loss, params, BATCH, plan, layouts=chosen, by_hand=body)
    text = str(raised.value)
    assert_same_on_all(text)
    for name, (_, words) in FAULTS.items():
        lines = [line for line in text.splitlines() if words in line]
        assert any(f"{name} P(" in line for line in lines), text
    assert re.search(r"replicas +off 141% on 4 of 8", text), text


OFF = "differs by more than rounding"
FAULTS = {
    "lost": (lambda g: jnp.where(lax.axis_index("fsdp") == 3, 0, g), OFF),
    "replicas": (lambda g: g * jnp.where(lax.axis_index("fsdp") < 2, 1.0, -1.0), OFF),
    "summed": (
        lambda g: lax.psum(manual.vary(g, "data"), "data"),
        "a multiple of the right result (x 2.000)",
    ),
}


def check_a_wrong_factor_in_a_step_is_found_on_all(context: Context) -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = {"params": PARAMS, "opt": optimizer.init(PARAMS)}
    plan = planned(state)

    def sgd(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        grads["w"] = grads["w"] * ts.get_axes_size_in_mesh("data")
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    step = ts.jit_step(sgd, plan, batch=SPLIT)
    with pytest.raises(WrongResultError) as raised:
        testing.check_step(step, ts.shard(state, plan), BATCH)
    text = str(raised.value)
    assert_same_on_all(text)
    both = "step 1: opt/0/trace/w P('fsdp',); step 1: params/w P('fsdp',): a multiple of"
    assert both in text, text
    assert "(x 2.000; x 4.000 in `mesh`)." in text, text
    assert "step 2 is not measured if step 1 is wrong" in text, text
    assert "\nstep 2: aux" in text, text

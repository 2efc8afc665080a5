"""Checks of gradients and steps on several processes: all of them find the same."""

import hashlib
import os
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

jax.config.update("jax_disable_most_optimizations", True)
SOAK = os.environ.get("TREESHARD_SOAK", "0") not in ("", "0")
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


def by_hand(change: Any) -> Any:
    def body(p: Any, x: Any) -> Any:
        value, grads = manual.value_and_grad(loss, AXES, planned(PARAMS))(p, x)
        return value, change(grads)

    return body


def check_right_gradients_pass(context: Context) -> None:
    plan = planned(PARAMS)
    params = ts.shard(PARAMS, plan)  # no process has all of it
    assert not params["w"].is_fully_addressable
    layouts = testing.layouts(plan, BATCH, SPLIT, by_hand=True)
    some = [x for x in layouts if SOAK or x.name in ("axes", "minibatches", "by hand")]
    body = by_hand(lambda grads: grads)
    report = testing.check_gradients(loss, params, BATCH, plan, layouts=some, by_hand=body)
    assert len(report.cells["w"]) == len(some) == (10 if SOAK else 3), report
    assert_same_on_all(str(report))


def assert_same_on_all(text: str) -> None:
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), "uint8")
    first, *others = multihost_utils.process_allgather(digest)
    assert all((first == other).all() for other in others), text


def report_of(change: Any) -> str:
    plan = planned(PARAMS)
    layouts = testing.layouts(plan, BATCH, SPLIT, by_hand=True)
    chosen = [layout for layout in layouts if layout.name == "unchecked"]
    with pytest.raises(WrongResultError) as raised:
        testing.check_gradients(loss, PARAMS, BATCH, plan, layouts=chosen, by_hand=by_hand(change))
    assert_same_on_all(str(raised.value))
    return str(raised.value)


def check_a_fault_of_one_process_is_found_on_all(context: Context) -> None:
    def lost(grads: Any) -> Any:
        return grads | {"w": jnp.where(lax.axis_index("fsdp") == 3, 0, grads["w"])}

    assert "rows 12 to 15 are zero: 1 of 4 shards, and the others are right" in report_of(lost)


def check_replicas_that_differ_between_processes_are_found_on_all(context: Context) -> None:
    def own(grads: Any) -> Any:
        sign = jnp.where(lax.axis_index("fsdp") < 2, 1.0, -1.0)
        return grads | {"bias": grads["bias"] * sign}

    text = report_of(own)
    assert "bias P(): wrong on 4 of 8 devices, right on the others." in text, text


def check_faults_are_named(context: Context) -> None:
    def faults(grads: Any) -> Any:
        n = lax.axis_size("fsdp")
        moved = lax.ppermute(grads["w"], "fsdp", [(i, (i + 1) % n) for i in range(n)])
        return {"w": moved, "bias": lax.psum(manual.vary(grads["bias"], "data"), "data")}

    text = report_of(faults)
    assert "summed instead of averaged along `data` (x 2.000)" in text, text
    assert "permuted: 4 of 4 shards are on the wrong devices" in text, text


def check_steps(context: Context) -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = {"params": PARAMS, "opt": optimizer.init(PARAMS)}

    def sgd(scaled: bool) -> Any:
        def step(state: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(state["params"], x)
            if scaled:
                grads["w"] = grads["w"] * ts.get_axes_size_in_mesh("data")
            updates, opt = optimizer.update(grads, state["opt"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        return ts.jit_step(step, planned(state), batch=SPLIT)

    report = testing.check_step(sgd(False), state, BATCH)
    assert report.ok
    assert_same_on_all(str(report))
    with pytest.raises(WrongResultError) as raised:
        testing.check_step(sgd(True), ts.shard(state, planned(state)), BATCH)
    assert_same_on_all(str(raised.value))
    assert "step 1: opt/0/trace/w P('fsdp',): summed instead of averaged along `data`" in str(
        raised.value
    )

"""Errors of JAX about the user's code name the user's function, and not the one that calls it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import (
    accumulate_gradients,
    init_sharded,
    jit_step,
    shard_map_step,
    value_and_grad,
)

MESH = ts.make_mesh("fsdp=8")
STATE = {"w": jnp.ones((16, 8))}
PLAN = ts.plan(STATE, [(".*", P("fsdp"))], MESH, min_size=0)
X = np.ones((16, 16), "float32")


def loss(params: Any, x: jax.Array) -> jax.Array:
    value = jnp.mean((x @ params["w"]) ** 2)
    return value if value > 0 else -value  # an error of JAX in every trace


def by_jax(state: Any, x: jax.Array) -> Any:
    return state, jax.value_and_grad(loss)(state, x)[0]


def by_treeshard(state: Any, x: jax.Array) -> Any:
    return state, value_and_grad(loss)(state, x)[0]


def by_hand(state: Any, x: jax.Array) -> Any:
    return state, loss(ts.unshard(state), x)


def rows_of(rows: jax.Array, _: Any) -> Any:
    return STATE, {"loss": loss(STATE, rows)}


def accumulating(state: Any, x: jax.Array) -> Any:
    return state, accumulate_gradients(rows_of, x, 2)


def accumulating_by_axis(state: Any, x: jax.Array) -> Any:
    return state, accumulate_gradients(rows_of, x, 2, axis_names="fsdp")


class InClass:
    def __call__(self, state: Any, x: jax.Array) -> Any:
        return by_jax(state, x)

    def method(self, state: Any, x: jax.Array) -> Any:
        return by_jax(state, x)


def make(key: jax.Array) -> Any:
    w = jax.random.normal(key, (16, 8))
    return {"w": w if w.sum() > 0 else -w}


without_name = lambda state, x: by_jax(state, x)  # noqa: E731
STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    "jax": (by_jax, "by_jax"),
    "treeshard": (by_treeshard, "by_treeshard"),
    "lambda": (without_name, "<lambda>"),
    "partial": (partial(by_jax), "by_jax"),
    "partial of a partial": (partial(partial(by_jax)), "by_jax"),
    "object": (InClass(), "__call__"),
    "method": (InClass().method, "method"),
    "jax.jit": (jax.jit(by_jax), "by_jax"),
    "accumulate": (accumulating, "rows_of"),
    "accumulate by axis": (accumulating_by_axis, "rows_of"),
}


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(("fn", "name"), STEPS.values(), ids=STEPS)
def test_a_step(fn, name) -> None:
    text = error_of(lambda: jit_step(fn, PLAN)(ts.shard(STATE, PLAN), X))
    assert f"while tracing the function {name} at {__file__}:" in text


def test_a_step_by_hand() -> None:
    text = error_of(lambda: shard_map_step(by_hand, PLAN)(ts.shard(STATE, PLAN), X))
    assert f"while tracing the function by_hand at {__file__}:" in text


@pytest.mark.parametrize("rules", [[(".*", P("fsdp"))], {"w": P("fsdp")}])
def test_the_function_that_makes_a_state(rules) -> None:
    key = jax.random.key(0)
    text = error_of(lambda: init_sharded(make, key, rules=rules, mesh=MESH))
    assert f"while tracing the function make at {__file__}:" in text


def test_the_arguments_of_a_program_keep_their_names() -> None:
    step = jit_step(lambda s, b: (s, jnp.sum(b)), PLAN)
    jaxpr = step.trace(PLAN.structs, jax.ShapeDtypeStruct(X.shape, X.dtype)).jaxpr
    assert jaxpr.jaxpr.debug_info.arg_names[:2] == ("state['w']", "data[0]")


def test_a_module_of_equinox_as_a_step() -> None:
    class Trainer(eqx.Module):
        rate: float

        def __call__(self, state: Any, x: jax.Array) -> Any:
            return by_jax(state, x)

    text = error_of(lambda: jit_step(Trainer(0.1), PLAN)(ts.shard(STATE, PLAN), X))
    assert "while tracing the function __call__ at" in text
    assert "_program.py" not in text

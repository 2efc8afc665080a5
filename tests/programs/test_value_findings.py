"""Faults planted in the values of a step are found, and their twins have no finding."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import struct
from jax.sharding import PartitionSpec as P
from value_faults import CASES, PLANTED, ROWS, WIDTH, check, mesh_of_type, on, types_of

import treeshard as ts


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_a_planted_fault_is_found_and_its_twin_is_not(name: str, axes: str) -> None:
    planted = PLANTED[name]
    check(planted, mesh_of_type(axes, planted.mesh))


def narrowed(p: Any, x: jax.Array) -> jax.Array:
    narrow = on(jnp.tanh(x).astype(jnp.bfloat16), None, "fsdp")
    return jnp.sum(jnp.tanh(jnp.cumsum(narrow, axis=0)))


def scattered_and_gathered(p: Any, x: jax.Array) -> jax.Array:
    unreduced = P(unreduced=frozenset({"fsdp"}))
    product = jnp.einsum("bi,bj->ij", x, jnp.tanh(x), out_sharding=unreduced)
    return jnp.sum(jnp.cumsum(on(on(product, "fsdp")), axis=0) ** 2)


@pytest.mark.parametrize(
    ("right", "shape", "code"),
    [
        (narrowed, (8 * ROWS, WIDTH), "widened"),
        (scattered_and_gathered, (ROWS, 4 * WIDTH), "resharded-twice"),
    ],
)
def test_what_looks_like_a_fault_is_none(right: Any, shape: tuple[int, ...], code: str) -> None:
    types = types_of(right, mesh_of_type("explicit", "fsdp=8"), shape=shape)
    assert code not in {finding.code for finding in types.findings}, f"{types}"


def test_a_replicated_leaf_that_the_batch_changes_is_as_the_plan_says() -> None:
    plan = ts.plan({"rows": struct(ROWS, WIDTH)}, [(".*", P())], mesh_of_type("explicit", "fsdp=8"))

    @ts.jit_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, x: jax.Array) -> Any:
        return {"rows": 0.9 * state["rows"] + jnp.mean(x, axis=0, keepdims=True)}, ()

    types = step.types(plan.structs, struct(ROWS, WIDTH))
    assert [value.axes for value in types] == [()] * len(types) != []
    assert types.findings == (), f"{types}"

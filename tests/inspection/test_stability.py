"""`diff_shardings` and `assert_stable_step` report what makes a step compile again."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import jit_step


def put(mesh: Mesh, spec: P, memory_kind: str = "device", dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(
        np.ones((8, 8), dtype), NamedSharding(mesh, spec, memory_kind=memory_kind)
    )


def said(a: Any, b: Any) -> list[str]:
    return [str(difference) for difference in ts.diff_shardings({"w": a}, {"w": b})]


AUTO = "AxisType.Auto, AxisType.Auto"
EXPLICIT = "AxisType.Explicit, AxisType.Explicit"


# What a jitted function is given after an array of P("data"): with a line, it compiles again.
OTHERS: dict[str, tuple[Callable[[Mesh], jax.Array], list[str]]] = {
    "the same": (lambda mesh: put(mesh, P("data")), []),
    "another spec": (
        lambda mesh: put(mesh, P(None, "data")),
        ["w: sharding P('data',) -> P(None, 'data')"],
    ),
    "another mesh": (
        lambda _: put(ts.make_mesh("fsdp=4,data=2"), P("data")),
        ["w: mesh data=2, fsdp=4 -> fsdp=4, data=2"],
    ),
    "another order of devices": (
        lambda _: put(ts.make_mesh("data=2,fsdp=4", devices=jax.devices()[::-1]), P("data")),
        ["w: devices 0,1,2,3,4,5,6,7 -> 7,6,5,4,3,2,1,0"],
    ),
    "other axis types": (
        lambda _: put(ts.make_mesh("data=2,fsdp=4", axis_types="explicit"), P("data")),
        [f"w: axis types {AUTO} -> {EXPLICIT}"],
    ),
    "another memory": (
        lambda mesh: put(mesh, P("data"), "pinned_host"),
        ["w: memory kind device -> pinned_host"],
    ),
}


@pytest.mark.parametrize(("other_of", "lines"), OTHERS.values(), ids=OTHERS)
def test_differences_are_what_makes_jit_compile_again(
    mesh: Mesh, compiles: list[str], other_of: Callable[[Mesh], jax.Array], lines: list[str]
) -> None:
    one, other = put(mesh, P("data")), other_of(mesh)
    assert said(one, other) == lines
    f = jax.jit(lambda x: x * 2)
    f(one)
    count = len(compiles)
    f(other)
    assert (len(compiles) > count) == bool(lines)


def test_single_devices(mesh: Mesh, compiles: list[str]) -> None:
    free, bound = jnp.ones((8, 8)), jax.device_put(np.ones((8, 8), np.float32), jax.devices()[0])
    assert not free.committed
    assert said(free, np.ones((8, 8), np.float32)) == []
    assert said(free, bound) == [
        f"w: sharding one device (uncommitted) -> only {jax.devices()[0]}",
        "w: committed no -> yes",
    ]
    assert said(bound, put(mesh, P("data")))[0].endswith("-> P('data',)")
    assert said(bound, jax.device_put(bound, jax.devices()[1])) == [
        f"w: sharding only {jax.devices()[0]} -> only {jax.devices()[1]}"
    ]


def test_numbers_and_leaves_that_are_not_arrays(mesh: Mesh) -> None:
    assert said(1.0, jnp.asarray(1.0)) == []  # both weak, both uncommitted
    assert said(1.0, jnp.float32(1.0)) == ["w: weak type yes -> no"]
    assert said(0, 1) == ["w: value 0 -> 1"]
    assert said(np.float64(1), jnp.float32(1)) == []  # what jit makes of it
    assert said(jnp.ones(2), jnp.ones(3)) == ["w: shape (2,) -> (3,)"]
    assert said("adam", "sgd") == ["w: value 'adam' -> 'sgd'"]
    assert said(jax.nn.relu, jax.nn.relu) == []
    assert said("adam", np.ones(2)) == ["w: value 'adam' -> an array"]
    assert said(NamedSharding(mesh, P()), "adam") == ["w: value an array -> 'adam'"]

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise TypeError

        __hash__ = None

    assert len(said(Odd(), Odd())) == 1


def test_leaves_in_one_tree_only() -> None:
    found = ts.diff_shardings({"a": 1, "b": 2}, {"b": 2, "c": 3})
    assert list(map(str, found)) == ["a: leaf present -> gone", "c: leaf absent -> new"]


def test_plans_and_structs_are_compared_in_what_they_know(mesh: Mesh) -> None:
    plan = ts.plan({"w": np.ones((8, 8), np.float32)}, [("w", P("data"))], mesh, min_size=0)
    assert said(put(mesh, P("data")), plan.structs["w"]) == []
    assert said(put(mesh, P()), plan.structs["w"]) == ["w: sharding P() -> P('data',)"]
    assert not ts.diff_shardings({"w": put(mesh, P("data"))}, plan)
    assert not ts.diff_shardings(plan, plan.on(mesh.abstract_mesh))
    bare = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert said(put(mesh, P("data")), bare) == []
    assert said(NamedSharding(mesh, P("data")), put(mesh, P())) == ["w: sharding P('data',) -> P()"]


def test_repeated_layers_are_folded(mesh: Mesh) -> None:
    whole, split = ([{"w": put(mesh, spec)} for _ in range(3)] for spec in (P(), P("fsdp")))
    found = ts.diff_shardings(whole, split)
    assert (len(found), str(found)) == (3, "{0..2}/w: sharding P() -> P('fsdp',)")
    assert str(ts.diff_shardings(whole, whole)) == "No leaf differs."


@jax.jit
def plain_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    w = state["w"] - 0.1 * x
    return {"w": w, "step": state["step"] + 1}, w.sum()


def test_the_error_for_a_drifting_step_has_the_fix(mesh: Mesh) -> None:
    x = put(mesh, P("data"))
    state = {"w": put(mesh, P("data")), "step": 0}
    with pytest.raises(ts.UnstableStepError) as caught:
        ts.assert_stable_step(plain_step, state, x)
    assert isinstance(caught.value, AssertionError)
    lines = str(caught.value).splitlines()
    assert lines[0] == "step: sharding one device (uncommitted) -> P(); committed no -> yes"
    assert lines[1] == "Each such change can make the next step compile again."
    assert lines[2].startswith("Place the state before the first step as it should stay:")
    assert len(lines) == 3


def test_a_stable_step_returns_its_result(mesh: Mesh, compiles: list[str]) -> None:
    x = put(mesh, P("data"))
    start = ts.shard({"w": np.ones((8, 8), np.float32), "step": np.int32(0)}, P(), mesh)
    plan = ts.plan(start, [(".*", None)], mesh)
    step = jit_step(plain_step, plan, batch=P(("data", "fsdp")))
    state, loss = ts.assert_stable_step(step, start, x)
    assert start["w"].is_deleted()  # donated, but still compared
    assert (int(state["step"]), loss.shape) == (1, ())
    count = len(compiles)
    ts.assert_stable_step(step, state, x)
    assert len(compiles) == count


def test_dtypes_weak_types_and_structure() -> None:
    state = {"w": jnp.zeros(2, jnp.bfloat16), "rate": 0.1, "n": jnp.zeros(2)}
    with pytest.raises(ts.UnstableStepError) as caught:
        ts.assert_stable_step(lambda s: {"w": jnp.zeros(2), "rate": jnp.float32(0.1)}, state)
    text = str(caught.value)
    assert text.startswith("The step changed 3 leaves of its state:\n  n: leaf")
    assert "  rate: weak type yes -> no\n  w: dtype bfloat16 -> float32\n" in text
    assert "Convert in the step, `new.astype(old.dtype)`" in text
    assert "`jnp.float32(0.1)` instead of `0.1`" in text
    assert "Keep the shapes and the structure" in text


class Counter(eqx.Module):
    w: jax.Array
    label: str = eqx.field(static=True)


def test_static_fields_that_change() -> None:
    with pytest.raises(ts.UnstableStepError, match="or a static field, changed."):
        ts.assert_stable_step(lambda s: (Counter(s.w, "b"), 0), Counter(jnp.ones(1), "a"))


def test_a_state_that_is_a_tuple_itself() -> None:
    state = (jnp.ones(2), jnp.ones(3))
    assert ts.assert_stable_step(lambda s: s, state) is state
    assert ts.assert_stable_step(lambda s: (s, "aux"), state)[1] == "aux"

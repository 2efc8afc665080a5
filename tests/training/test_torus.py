"""Gradients along an axis that covers all dims of a torus, which is made up here: CPUs have none.

What compilers for TPUs make of it is in `tests/targets/test_torus.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import (
    CASES,
    Case,
    returning_gradients,
    state,
    step_of,
)
from treeshard import manual, training
from treeshard._trace.uses import is_last_step
from treeshard.communication import Collective, collectives
from treeshard.communication._collectives import join_steps

WIDTH, ROWS = 64, 32


@pytest.fixture(autouse=True)
def _torus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes of 8 devices cover a torus of 4x2, and those of 4 one of 2x2."""
    dims = {8: (4, 2), 4: (2, 2)}

    def made_up(mesh: Mesh, axis: str) -> tuple[int, ...]:
        return dims.get(mesh.shape[axis], ()) if axis == "fsdp" else ()

    monkeypatch.setattr("treeshard._core.torus.torus_dims", made_up)


def parts(compiled: Any) -> set[tuple[str, tuple[int, int] | None]]:
    """The kinds of collectives along a part of an axis, and which part."""
    return {(x.kind, x.part) for x in collectives(compiled) if x.within}


OF_8 = {("reduce-scatter", part) for part in ((4, 2), (2, 1))}
OF_4 = {("reduce-scatter", part) for part in ((2, 2), (2, 1))}


def one_device(loss: Any, *args: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(*args)


def on_explicit() -> Mesh:
    return ts.make_mesh("fsdp=8", axis_types="explicit")


def mean(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ ts.unshard(params)["w"]) ** 2)


@pytest.mark.parametrize(
    ("case", "kind", "expected"),
    [
        (CASES["fsdp x tp"], "explicit", OF_4),
        (CASES["fsdp in passes"], "explicit", OF_8),
        (CASES["fsdp in passes"]._replace(passes=("fsdp",)), "auto", OF_8),
    ],
    ids=["fsdp x tp", "in passes", "in passes over fsdp"],
)
def test_numbers_are_those_of_one_device(case: Case, kind: str, expected: Any) -> None:
    step, plan, x = step_of(case, ts.make_mesh(case.axes, axis_types=kind), WIDTH)
    found = parts(step.compile(plan.structs, x).compiled)
    grads, value = step(ts.shard(state(WIDTH), plan), x)
    assert_close((value, grads), one_device(CASES["fsdp"].loss, state(WIDTH), x))
    assert {part for part in found if part[0] != "all-reduce"} == expected


@pytest.mark.parametrize("check", [False, True])
def test_by_hand_too(check: bool) -> None:
    mesh = ts.make_mesh("fsdp=8")
    specs, w = {"w": P(None, "fsdp")}, jax.tree.map(jnp.asarray, state(WIDTH))
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype("float32")

    def loss(params: Any, x: Any) -> Any:
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)

    step = jax.jit(
        jax.shard_map(
            manual.value_and_grad(loss, "fsdp", specs),
            mesh=mesh,
            in_specs=(specs, P("fsdp")),
            out_specs=(P(), specs),
            check_vma=check,
        )
    )
    with jax.set_mesh(mesh):
        args = (ts.shard(w, specs), jax.device_put(x, P("fsdp")))
        assert_close(step(*args), one_device(loss, w, x))
        assert parts(step.lower(*args).compile()) == OF_8


def test_small_gathers_go_over_one_dim_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeshard._core.torus._MANY_DEVICES", 8)
    plan = ts.plan(
        {"w": np.ones((24, 64), "float32")}, [("w", P("fsdp"))], on_explicit(), min_size=0
    )
    x = np.random.default_rng(1).standard_normal((ROWS, 24)).astype("float32")
    step = returning_gradients(plan, training.value_and_grad(mean, axis_names="fsdp"))
    params = {"w": jax.random.normal(jax.random.key(1), (24, 64))}
    compiled = step.compile(plan.structs, x)
    grads, value = step(ts.shard(params, plan), x)
    assert_close((value, grads), one_device(mean, params, x))
    assert parts(compiled.compiled) == OF_8 | {("all-gather", part) for _, part in OF_8}
    compared = compiled.communication()
    assert compared.unplanned == ()
    assert {x.axes for x in compared.compiled if x.rank} == {("fsdp",)}
    assert all(row.bytes == row.planned_bytes for row in compared.rows)


def test_a_step_by_dims_is_as_planned() -> None:
    case = CASES["fsdp"]
    step, plan, x = step_of(case, on_explicit(), WIDTH)
    compared = step.communication(plan.structs, x)
    assert compared.unplanned == ()
    assert compared.by_compiler == ()
    assert all(row.count == row.planned_count for row in compared.rows)
    assert {row.axes for row in compared.rows} == {("fsdp",)}
    assert {role.name for role in step.roles(plan.structs, x).values()} == {"trained"}


@pytest.mark.parametrize(
    ("groups", "is_last"),
    [
        (None, True),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], True),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], False),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], False),
    ],
)
def test_the_last_step_of_a_gather_is_between_the_farthest(groups: Any, is_last: bool) -> None:
    assert is_last_step(groups) == is_last


def joined(
    steps: list[tuple[int, tuple[int, int]]], *last: tuple[int, tuple[int, int]], devices: int = 256
) -> list[Collective]:
    """Scatters of some bytes over parts of an axis, and then all-reduces, as one where they are."""
    kinds = ["reduce-scatter"] * len(steps) + ["all-reduce"] * len(last)
    moved = [
        Collective(kind, "float32", size, 0, None, 1, within=("fsdp",), part=part)
        for kind, (size, part) in zip(kinds, [*steps, *last], strict=True)
    ]
    return join_steps(moved, {"fsdp": devices})


def test_steps_that_leave_something_are_not_one() -> None:
    [whole] = joined([(1024, (4, 64)), (256, (16, 4)), (16, (4, 1))])
    assert (whole.axes, whole.bytes, whole.within) == (("fsdp",), 1024, None)
    assert whole.wire_bytes == 1024 * 255 // 256
    assert [x.part for x in joined([(1024, (16, 16))])] == [(16, 16)]
    assert [x.part for x in joined([(1024, (16, 16)), (32, (16, 1))])] == [(16, 16), (16, 1)]


def test_a_scatter_that_the_compiler_ends_with_an_all_reduce_is_one() -> None:
    """As on v5e:4x4, of two gradients of `float32[64,64]`."""
    two = joined([(16384, (4, 4))] * 2, *[(4096, (4, 1))] * 2, devices=16)
    assert [(x.kind, x.axes, x.bytes) for x in two] == [("reduce-scatter", ("fsdp",), 16384)] * 2
    # 3/4 of all bytes, then twice 3/4 of a quarter of them
    assert {x.wire_bytes for x in two} == {12288 + 2 * 3072}
    apart = joined([(16384, (4, 4))], (2048, (4, 1)), devices=16)
    assert [x.kind for x in apart] == ["reduce-scatter", "all-reduce"]

"""The values between arguments and results of a step: by types on Explicit axes, else compiled."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import typed_steps
from helpers import struct
from jax.sharding import PartitionSpec as P
from typed_steps import forward, marked, transformer

import treeshard as ts
from treeshard.programs import Types

# ------------------------------------------------------------------ on Explicit axes


@pytest.fixture(scope="module")
def explicit() -> Types:
    step, state, batch = transformer(jax.make_mesh((8,), ("fsdp",)), layers=80)
    return step.types(state, batch)


def test_types_tell_before_compiling(explicit: Types) -> None:
    assert not explicit.is_compiled
    hidden = forward(explicit, "hidden")
    assert (hidden.name, hidden.shape, hidden.spec) == ("mlp", (16, 32, 256), P("fsdp"))
    assert (hidden.local_shape, hidden.bytes, hidden.times) == ((2, 32, 256), 2**16, 80)
    assert (hidden.where, hidden.at_peak) == ("", None)
    weight = forward(explicit, "gathered layer")
    assert (weight.name, weight.local_shape) == ("layers/down", (256, 64))
    assert weight.spec == P(reduced=frozenset({"fsdp"}))
    assert forward(explicit, "logits").times == 1
    assert {value.line.rpartition(":")[0] for value in explicit} == {typed_steps.__file__}


def test_the_backward_pass_has_the_lines_of_the_forward_pass(explicit: Types) -> None:
    """The gradient of a gathered weight waits for its sum, and ends scattered."""
    backward = [x for x in explicit.at(marked("gathered layer")) if x.part == "backward"]
    scattered = [x for x in backward if x.axes == ("fsdp",)]
    assert {x.shape for x in scattered} == {(256, 64), (64, 256)}
    assert {x.local_shape for x in scattered} == {(32, 64), (64, 32)}


# ------------------------------------------------------------------ on Auto axes


@pytest.fixture(scope="module")
def auto() -> Types:
    step, state, batch = transformer(ts.make_mesh("data=2,fsdp=4"), batch=P(("data", "fsdp")))
    return step.types(state, batch)


def test_the_program_tells_what_the_compiler_chose(auto: Types) -> None:
    """XLA splits the rows over both axes of the batch."""
    assert auto.is_compiled
    logits = forward(auto, "logits")
    assert (logits.shape, logits.axes, logits.by_hand) == ((16, 32, 512), ("data", "fsdp"), ())
    assert (logits.bytes, logits.times) == (2 * 32 * 512 * 4, 1)
    hidden = forward(auto, "hidden")
    assert (hidden.axes, hidden.by_hand, hidden.times) == (("data", "fsdp"), (), 4)
    assert hidden.bytes == 2 * 32 * 256 * 4


def test_what_a_scan_keeps_is_found_in_every_program_of_a_process(auto: Types) -> None:
    """JAX gives the slices of all scans the line of the first one that it traced."""
    step, state, batch = transformer(ts.make_mesh("data=2,fsdp=4"), batch=P(("data", "fsdp")))
    for types in (auto, step.types(state, batch)):
        [kept] = [x for x in types if x.ops == ("scan",) and x.part == "forward"]
        assert (kept.shape, kept.axes, kept.where) == ((4, 16, 32, 64), ("data", "fsdp"), "memory")


def compiled_types(fn: Any, spec: Any, mesh: str, *shape: int) -> Types:
    """The values of a step whose state is one weight, and whose aux is what `fn` returns."""
    plan = ts.plan({"w": struct(64, 64)}, [("w", None)], ts.make_mesh(mesh))
    step = ts.jit_step(lambda state, x: (state, fn(state["w"], x)), plan, batch=spec)
    return step.types(plan.structs, struct(*shape), min_size=0)


def test_whether_what_has_unknown_bytes_is_live_at_the_peak_is_unknown() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        both = x @ w, w[:32] @ w  # either
        return jnp.sum(both[0]) + jnp.sum(both[1])

    types = compiled_types(fn, P(("data", "fsdp")), "data=2,fsdp=4", 64, 64)
    found = types.at(marked("either", __file__))
    unknown = [value for value in found if value.where == "memory" and value.bytes is None]
    assert unknown
    assert all(value.at_peak is None for value in unknown)
    assert "memory, peak ?" in str(types)


def test_a_value_that_the_compiler_fused_or_removed_is_said_to_be_so() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        same = jnp.transpose(jnp.transpose(x))  # removed
        hidden = same @ w  # stored
        act = jnp.tanh(hidden)  # fused
        return jnp.sum(act * 3.0)

    types = compiled_types(fn, P("fsdp"), "fsdp=8", 64, 64)
    where = {mark: types.at(marked(mark, __file__))[0] for mark in ("removed", "stored", "fused")}
    assert {mark: value.where for mark, value in where.items()} == {
        "removed": "absent",
        "stored": "memory",
        "fused": "fused",
    }
    assert (where["removed"].bytes, where["removed"].spec) == (None, None)
    assert where["fused"].local_shape == (8, 64)
    text = str(types)
    assert "fused: computed inside of another op, and never in memory" in text
    assert "absent: the compiler removed it, or made it part of what has another line" in text


@pytest.mark.parametrize(
    ("mesh", "batch", "axes", "spec", "local"),
    [
        ("data=2,fsdp=4", P("data", "fsdp"), ("data", "fsdp"), P("data", "fsdp"), (32, 16)),
        ("data=2,fsdp=2,tensor=2", P("data"), None, None, None),
    ],
    ids=["two dims", "alike axes"],
)
@pytest.mark.filterwarnings("ignore:jit_step")
def test_the_axes_follow_from_the_shapes(mesh, batch, axes, spec, local) -> None:
    """Two axes of one size leave two answers: then there is none."""

    def constrained(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(ts.with_sharding_constraint(x, batch)) * 3.0)

    types = compiled_types(constrained, batch, mesh, 64, 64)
    [value] = [x for x in types if "tanh" in x.ops]
    assert (value.axes, value.spec, value.local_shape) == (axes, spec, local)
    assert value.bytes is not None


# ------------------------------------------------------------------ by hand


def test_in_shard_map_types_tell_too() -> None:
    """Each device computes with its own rows: nothing has to be compiled, on axes of any type."""
    plan = ts.plan({"w": struct(64, 256)}, [("w", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)

    @ts.shard_map_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, x: jax.Array) -> Any:
        full = ts.manual.gather_params(state, "fsdp", plan.specs)  # gathered by hand
        hidden = jnp.tanh(x @ full["w"])  # hidden by hand
        return state, jax.lax.pmean(jnp.sum(hidden), "fsdp")

    types = step.types(plan.structs, struct(512, 64))
    assert not types.is_compiled
    [hidden] = types.at(marked("hidden by hand", __file__))
    assert (hidden.shape, hidden.local_shape, hidden.by_hand) == ((64, 256), (64, 256), ("fsdp",))
    [full] = types.at(marked("gathered by hand", __file__))
    assert (full.name, full.shape, full.spec) == ("w", (64, 256), P())


# ------------------------------------------------------------------ what people see


def test_how_often_a_loop_runs_may_depend_on_data() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(carry: Any) -> Any:
            x, i = carry
            return x @ w, i + 1  # in a while

        return jnp.sum(jax.lax.while_loop(lambda c: jnp.sum(c[0]) > c[1], body, (x, 0))[0])

    [value] = compiled_types(fn, P("fsdp"), "fsdp=8", 64, 64).at(marked("in a while", __file__))
    assert (value.times, value.total_bytes, value.bytes) == (None, None, 8 * 64 * 4)
    assert value.axes == ("fsdp",)


def test_the_table(explicit: Types) -> None:
    lines = str(explicit).split("\n")
    assert lines[0] == "values of a step on fsdp=8, by its types, before compiling"
    assert re.sub(" +", " ", lines[1]) == "line pass name value spec on a device times where"
    [hidden] = [line for line in lines if f"{marked('hidden')[-3:]} " in line and "forward" in line]
    assert re.sub(" {2,}", "  ", hidden).split("  ")[1:] == [
        *("forward", "mlp", "float32[16,32,256]", "P('fsdp',)"),
        *("[2,32,256] 64.0 KiB", "80"),
    ]
    assert re.fullmatch(
        r"\d+ values of fewer than 16,384 elements \(`min_size`\) left out", lines[-1]
    )


def test_a_notebook_has_the_rows_of_the_table(explicit: Types) -> None:
    assert explicit._repr_html_().count("<tr>") == len(explicit) + 1


def test_rows_of_a_line(explicit: Types) -> None:
    """By the whole path or the name of a file, and not by a part of its name."""
    found = explicit.at(marked("hidden"))
    assert found
    assert explicit.at(f"typed_steps.py:{marked('hidden').rpartition(':')[2]}") == found
    assert not explicit.at("steps.py")
    assert not explicit.at("typed_steps.py:1")


def test_what_has_no_types_is_unknown_and_not_compiled(compiles: list[str]) -> None:
    mesh = jax.make_mesh((8,), ("fsdp",))
    plan = ts.plan({"w": struct(64, 64)}, [("w", P())], mesh)

    @ts.jit_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, x: jax.Array) -> Any:
        def sine(x: jax.Array) -> jax.Array:
            return jnp.sin(x.reshape(-1)).reshape(x.shape)

        hidden = jnp.tanh(x @ state["w"])
        return state, jnp.sum(jax.sharding.auto_axes(sine, out_sharding=P("fsdp"))(hidden))

    types = step.types(plan.structs, struct(512, 64))
    by_op = {op: value for value in types for op in value.ops}
    assert compiles == []
    assert by_op["tanh"].spec == P("fsdp")
    assert (by_op["sin"].axes, by_op["sin"].bytes) == (None, None)
    assert "?: the compiler decides, as inside of `auto_axes`" in str(types)
    looked_up = step.compile(plan.structs, struct(512, 64)).types()
    assert len(compiles) == 1
    assert [x.bytes for x in looked_up if "sin" in x.ops] == [512 * 64 * 4 // 8]

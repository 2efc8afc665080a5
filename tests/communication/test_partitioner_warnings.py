"""The partitioner's warnings are captured and parsed, and all other output is kept."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.communication._partitioner_warnings import (
    capture_partitioner_warnings,
    read_warning,
)

# The formats of XLA over the years. The operation and its source came later.
TODAY = (
    "W1120 11:21:51.290537 8361 spmd_partitioner.cc:656] [SPMD] Involuntary full"
    " rematerialization. The compiler cannot go from sharding {devices=[2,1,4]<=[8]} to"
    " {devices=[1,8,1]<=[2,4]T(1,0)} efficiently for HLO operation %sharding_constraint.0 ="
    " f32[4,8,2]{2,1,0} copy(%param), sharding={devices=[2,1,4]<=[8]},"
    ' metadata={op_name="jit(a)/sharding_constraint" stack_frame_id=2}. As the last resort, ...'
)
WITH_SOURCE = (
    "2025-04-14 17:55:24.092274: E external/xla/xla/service/spmd/spmd_partitioner.cc:621] [spmd]"
    " Involuntary full rematerialization. The compiler was not able to go from sharding"
    ' {devices=[1,1,2,4]<=[8] last_tile_dim_replicate metadata={op_name="other"}} to'
    " {devices=[2,4]<=[8]} without doing a full rematerialization of the tensor for HLO"
    " operation: %get-tuple-element = bf16[96]{0} get-tuple-element((token[], f32[2]) %t),"
    ' index=1, metadata={op_name="jit(f)/get" source_file="/home/me/model.py" source_line=95}.'
)
WITHOUT_OPERATION = (
    "[spmd] Involuntary full rematerialization. The compiled was not able to go from sharding"
    " {devices=[2,4]0,1,2,3,4,5,6,7} to {maximal device=0} without doing a full"
    " rematerialization of the tensor. You probably want to enrich the sharding annotations."
)


def three_dims_moved(mesh: Mesh, before: P, after: P) -> Any:
    """A function whose value has to be resharded from one spec to the other."""

    def move(x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, before)) * 2
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, after))

    return jax.jit(move).lower(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32))


def test_a_real_warning_is_captured_and_parsed(mesh: Mesh) -> None:
    bad = three_dims_moved(mesh, P("data", None, "fsdp"), P(None, ("fsdp", "data")))
    with capture_partitioner_warnings(mesh) as warnings:
        bad.compile()
        assert warnings == []  # filled at the end of the block
    assert len(warnings) == 1
    assert warnings[0].op_name == "jit(move)/sharding_constraint"
    assert (warnings[0].dtype, warnings[0].shape) == ("f32", (4, 8, 2))
    assert warnings[0].from_spec == P("data", None, "fsdp")
    assert warnings[0].to_spec == P(None, ("fsdp", "data"))
    assert str(warnings[0]) == (
        "jit(move)/sharding_constraint: copy f32[4,8,2] per device is resharded from"
        " P('data', None, 'fsdp') to P(None, ('fsdp', 'data')) through a full copy on every"
        " device."
    )


def test_the_mesh_may_be_text(mesh: Mesh) -> None:
    bad = three_dims_moved(mesh, P("data", None, "fsdp"), P(None, ("fsdp", "data")))
    with capture_partitioner_warnings("data=2,fsdp=4") as warnings:
        bad.compile()
    assert [warning.to_spec for warning in warnings] == [P(None, ("fsdp", "data"))]


def test_an_efficient_program_has_no_warnings(mesh: Mesh) -> None:
    good = three_dims_moved(mesh, P("data", None, "fsdp"), P(None, None, "fsdp"))
    with jax.set_mesh(mesh), capture_partitioner_warnings() as warnings:
        good.compile()
    assert warnings == []


def test_the_current_format(mesh: Mesh) -> None:
    warning = read_warning(TODAY, mesh)
    assert warning.text == TODAY
    assert warning[1:6] == (
        *("copy", "f32", (4, 8, 2)),
        *("{devices=[2,1,4]<=[8]}", "{devices=[1,8,1]<=[2,4]T(1,0)}"),
    )
    assert warning[6:] == (
        *(P("data", None, "fsdp"), P(None, ("fsdp", "data"))),
        *("jit(a)/sharding_constraint", None),
    )
    assert read_warning(TODAY, None).from_spec is None


def test_an_older_format_with_a_source(mesh: Mesh) -> None:
    warning = read_warning(WITH_SOURCE, mesh)
    assert (warning.op, warning.dtype, warning.shape) == ("get-tuple-element", "bf16", (96,))
    assert (warning.op_name, warning.source) == ("jit(f)/get", "/home/me/model.py:95")
    assert warning.to_spec == P("data", "fsdp")
    assert "jit(f)/get at /home/me/model.py:95: get-tuple-element bf16[96]" in str(warning)


def test_fields_that_a_warning_lacks_are_none(mesh: Mesh) -> None:
    warning = read_warning(WITHOUT_OPERATION, mesh)
    assert (warning.op, warning.shape, warning.op_name, warning.source) == (None,) * 4
    assert (warning.from_spec, warning.to_spec) == (P("data", "fsdp"), None)
    assert str(warning) == (
        "unknown location: an operation per device is resharded from P('data', 'fsdp') to {maximal"
        " device=0} through a full copy on every device."
    )
    strange = read_warning("Involuntary full rematerialization, in another format", mesh)
    assert strange[1:] == (None,) * 9
    assert str(strange).startswith("partitioner warning in an unknown format: Involuntary")


def test_all_other_output_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with capture_partitioner_warnings() as outer:
        with capture_partitioner_warnings() as inner:
            os.write(2, b"before\n" + TODAY.encode() + b"\nafter")
        os.write(2, b" all\n" + TODAY.encode() + b"\n")
    assert capfd.readouterr().err == "before\nafter all\n"
    assert (len(inner), len(outer)) == (1, 1)


def test_an_error_inside_restores_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lists: list[Any] = []

    def fail() -> None:
        with capture_partitioner_warnings() as warnings:
            lists.append(warnings)
            os.write(2, TODAY.encode() + b"\n")
            print("said before", file=sys.stderr)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    os.write(2, b"said after\n")
    assert capfd.readouterr().err.splitlines()[-1] == "said after"
    assert [len(warnings) for warnings in lists] == [1]


def test_a_process_without_standard_error_raises() -> None:
    code = (
        "import os, sys, treeshard as ts; os.close(2)\n"
        "try:\n  with ts.capture_partitioner_warnings(): pass\n"
        "except ts.TreeShardError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "file descriptor 2 is closed" in done.stdout
    assert ts.capture_partitioner_warnings is capture_partitioner_warnings


def test_a_log_level_that_suppresses_warnings_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    with (
        pytest.warns(ts.ShardingWarning, match="TF_CPP_MIN_LOG_LEVEL=2 suppresses the compiler"),
        capture_partitioner_warnings(),
    ):
        pass

"""Gradients along an axis that covers all dims of a torus: scattered, and read as planned.

`make test-targets` runs this with the compilers of these devices; other runs skip it. That numbers
stay the same is in `tests/training/test_torus.py`.
"""

import os
from functools import partial
from typing import Any

import jax
import pytest
from programs import ADAMW, by_hand, by_jit

import treeshard as ts
from treeshard._core.torus import torus_dims
from treeshard.communication import collectives
from treeshard.communication._collectives import bytes_on_the_wire

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)

WAYS = {
    "explicit": (
        "explicit",
        by_jit,
        {"gradient": partial(ts.training.value_and_grad, axis_names="fsdp")},
    ),
    "by hand": ("auto", by_hand, {}),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("programs.LAYERS", 2)


def compiled(topology: str, way: str, **more: Any) -> Any:
    kind, make, options = WAYS[way]
    mesh = ts.make_mesh("fsdp=-1", topology=topology, axis_types=kind)
    case = make(mesh, dtype="bfloat16", optimizer=ADAMW, **options, **more)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return case.step.compile(case.plan.structs, case.batch)


@pytest.mark.parametrize("topology", ["v5e:4x4", "v4:2x2x2", "v5p:4x4x4"])
@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_is_reduced_whole(topology: str, way: str) -> None:
    step = compiled(topology, way)
    compared = step.communication()
    assert {x.kind for x in collectives(step.compiled) if x.part} >= {"reduce-scatter"}
    size = step.plan.mesh.size
    planned = sum(bytes_on_the_wire(x.kind, x.total_bytes, size) or 0 for x in compared.planned)
    sent = sum(x.wire_bytes * x.count for x in compared.compiled)
    assert sent <= 1.03 * planned
    assert compared.unplanned == ()
    counts = {(row.kind, row.axes): (row.count, row.bytes) for row in compared.rows}
    counts.pop(("collective-permute", ("fsdp",)), None)  # what shifts padded results into place
    of_all_weights = (4, 4 * 2 * 1024 * 4096)
    assert counts == {
        ("all-gather", ("fsdp",)): of_all_weights,
        ("reduce-scatter", ("fsdp",)): of_all_weights,
    }


@pytest.mark.parametrize(
    ("axes", "topology", "dims"),
    [
        ("fsdp=16", "v5e:4x4", (4, 4)),
        ("fsdp=128", "v5e:8x16", (8, 16)),
        ("fsdp=256", "v6e:16x16", (16, 16)),
        ("fsdp=8", "v4:2x2x2", (2, 2, 2)),
        ("fsdp=64", "v5p:4x4x4", (4, 4, 4)),
        # One scatter is enough elsewhere: on a ring, and along a part of a dim.
        ("fsdp=8", "v5e:2x4", ()),
        ("fsdp=8", "h100:8", ()),
        ("data=4,fsdp=64", "v5e:16x16", ()),
    ],
)
def test_the_dims_of_a_torus_are_those_of_its_coordinates(
    axes: str, topology: str, dims: tuple[int, ...]
) -> None:
    mesh = ts.make_mesh(axes, topology=topology)
    assert {torus_dims(mesh, axis) for axis in mesh.axis_names} == {dims}


def test_the_report_says_what_scatters() -> None:
    mesh = ts.make_mesh("fsdp=16", topology="v5e:4x4")
    case = by_jit(mesh, dtype="bfloat16", optimizer=ADAMW, gradient=WAYS["explicit"][2]["gradient"])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step = case.step.compile(case.plan.structs, case.batch)
    [difference] = step.communication().unplanned
    assert difference.code == "all-reduce"
    assert "On Explicit axes" in difference.hint

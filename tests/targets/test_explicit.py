"""Steps on Explicit axes of devices that are not attached: what is traced, and dry runs.

`make test-targets` runs this with the compilers of these devices; other runs skip it.
"""

import json
import os
from typing import Any

import jax
import pytest

import treeshard as ts
from tests.training.explicit_programs import (
    MODELS,
    STRATEGIES,
    make_step,
    mesh_of,
    plan_of,
    state_of,
    watched_step,
)
from treeshard._cli import main

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)

TARGETS = ["v5e:2x4", "h100:8"]
# All models on one strategy, and one on the others.
MADE = [("hsdp", name) for name in MODELS]
MADE += [(strategy, "layers") for strategy in STRATEGIES if strategy != "hsdp"]
COMPILED = [("hsdp", "language"), *((strategy, "layers") for strategy in STRATEGIES)]


@pytest.fixture(scope="module", autouse=True)
def broadcasting() -> Any:
    """Allows biases to be added to rows."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(("strategy", "name"), MADE)
def test_absent_devices_trace_what_a_call_traces(strategy: str, name: str) -> None:
    model = MODELS[name]()
    plan = plan_of(model, strategy, mesh_of(strategy, "explicit"))
    step, called = watched_step(model, plan)
    step.lower(ts.shard(state_of(model), plan), model.batch)
    for target in TARGETS:
        absent = plan_of(model, strategy, mesh_of(strategy, "explicit", target))
        step, traced = watched_step(model, absent)
        step.lower(absent.structs, model.batch)
        step.lower(state_of(model), model.batch)
        assert traced == called


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("strategy", "name"), COMPILED)
def test_absent_devices_can_be_compiled_for(strategy: str, name: str, target: str) -> None:
    model = MODELS[name]()
    plan = plan_of(model, strategy, mesh_of(strategy, "explicit", target))
    step = make_step(model, plan, ts.training.value_and_grad)
    compiled = step.compile(plan.structs, model.batch)
    assert compiled.memory().fits
    assert [row for row in compiled.communication().rows if row.count]


def dry(mesh: jax.sharding.Mesh) -> Any:
    """HSDP on Explicit axes of the devices of a mesh, for `treeshard compile`."""
    model = MODELS["layers"]()
    kinds = dict.fromkeys(mesh.axis_names, "explicit")
    mesh = ts.make_mesh(dict(mesh.shape), devices=list(mesh.devices.flat), axis_types=kinds)
    plan = plan_of(model, "hsdp", mesh)
    return make_step(model, plan, ts.training.value_and_grad), plan.structs, model.batch


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_is_of_that_program(target: str, capsys: Any) -> None:
    options = ["--topology", target, "--mesh=data=2,fsdp=4", "--json"]
    main(["compile", f"{__name__}:dry", *options])
    found = json.loads(capsys.readouterr().out)["communication"]["rows"]
    step, state, batch = dry(ts.make_mesh("data=2,fsdp=4", topology=target))
    rows = step.compile(state, batch).communication().rows
    assert [(x["kind"], x["count"], x["bytes"]) for x in found] == [
        (row.kind, row.count, row.bytes) for row in rows
    ]
    assert {row.kind for row in rows} == {"all-gather", "reduce-scatter", "all-reduce"}

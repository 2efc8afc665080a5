"""Programs that other tests run on CPUs, compiled for TPUs and GPUs that are not attached.

`make test-targets` runs this with the compilers of these devices; other runs skip it. On CPUs, with
the numbers, they run in `tests/training` and in `tests/communication/test_roles.py`.
"""

import os

import pytest

import treeshard as ts
from tests import role_programs
from tests.targets.counting import count_bytes
from tests.training import explicit_programs, gradient_programs, matrix_programs

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("standard_promotion", "broadcasting")
TARGETS = ["v5e:2x4", "h100:8"]
ON_TARGETS = pytest.mark.parametrize("target", TARGETS)

# ------------------------------------------------------------------ Explicit axes

# All models on one strategy, and one on the others.
MADE = [("hsdp", name) for name in explicit_programs.MODELS]
MADE += [(each, "layers") for each in explicit_programs.STRATEGIES if each != "hsdp"]
COMPILED = [("hsdp", "language"), *((each, "layers") for each in explicit_programs.STRATEGIES)]


def explicit_plan(model: explicit_programs.Model, strategy: str, target: str | None) -> ts.Plan:
    mesh = explicit_programs.mesh_of(strategy, "explicit", target)
    return explicit_programs.plan_of(model, strategy, mesh)


@pytest.mark.parametrize(("strategy", "name"), MADE)
def test_absent_devices_trace_what_a_call_traces(strategy: str, name: str) -> None:
    model = explicit_programs.MODELS[name]()
    state = explicit_programs.state_of(model)
    plan = explicit_plan(model, strategy, None)
    step, called = explicit_programs.watched_step(model, plan)
    step.lower(ts.shard(state, plan), model.batch)
    for target in TARGETS:
        absent = explicit_plan(model, strategy, target)
        step, traced = explicit_programs.watched_step(model, absent)
        step.lower(absent.structs, model.batch)
        step.lower(state, model.batch)
        assert traced == called


@ON_TARGETS
@pytest.mark.parametrize(("strategy", "name"), COMPILED)
def test_absent_devices_can_be_compiled_for(strategy: str, name: str, target: str) -> None:
    model = explicit_programs.MODELS[name]()
    plan = explicit_plan(model, strategy, target)
    step = explicit_programs.make_step(model, plan, explicit_programs.deferring(plan.mesh))
    compiled = step.compile(plan.structs, model.batch)
    assert compiled.memory().fits
    assert [row for row in compiled.communication().rows if row.count]


# ------------------------------------------------------------------ gradients and matrices

WIDTH = 512


@ON_TARGETS
@pytest.mark.parametrize(("name", "kind"), gradient_programs.NAMES_AND_KINDS)
def test_each_gradient_is_summed_once_over_the_axes_that_do_not_split_it(
    name: str, target: str, kind: str
) -> None:
    case = gradient_programs.CASES[name]
    mesh = ts.make_mesh(case.axes, topology=target, axis_types=kind)
    step, plan, x = gradient_programs.step_of(case, mesh, WIDTH)
    compiled = step.compile(plan.structs, x)
    gradient_programs.assert_reduced(compiled.compiled, case.reduced, WIDTH)
    if case.passes is not None:
        return
    compared = compiled.communication()
    assert compared.unplanned == ()
    for row in compared.rows:
        if not row.planned_count:  # activations, along `tensor`
            assert row.axes == ("tensor",)
        elif row.kind == "all-gather" and target == "v5e:2x4":
            # Its matrix products round to bfloat16, so that is what is gathered.
            assert row.bytes == row.planned_bytes / 2
        else:
            assert row.bytes == row.planned_bytes


@ON_TARGETS
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_an_update_of_matrices_has_two_exchanges(target: str, kind: str) -> None:
    mesh = ts.make_mesh("fsdp=8", topology=target, axis_types=kind)
    made = matrix_programs.setup(matrix_programs.muon(), mesh)
    compiled = made.step.compile(made.plan.structs, matrix_programs.batch(1))
    matrix_programs.assert_two_exchanges(compiled.compiled, ("fsdp",), 8)
    stacks = len(matrix_programs.STACKS)
    assert count_bytes(compiled.text, trips=1) == {"all-to-all": 2 * stacks * 32 * 64 * 4}
    assert len(compiled.communication().matrices) == 2 * stacks


# ------------------------------------------------------------------ roles


@ON_TARGETS
@pytest.mark.parametrize("name", role_programs.PROGRAMS)
def test_what_is_compiled_is_what_is_planned(name: str, target: str) -> None:
    program = role_programs.made(name, topology=target)
    compiled = program.step.compile(program.plan.structs, program.batch)
    for leaf in compiled.plan.leaves:
        for part, role in program.roles.items():
            if leaf.path.startswith(part):
                assert str(leaf.role).startswith(role), (leaf.path, leaf.role)
    compared = compiled.communication()
    # Without `training.value_and_grad`, these compilers all-reduce full gradients.
    found = {each.code for each in compared.unplanned} - {"all-reduce"}
    assert found == role_programs.TRUE_FINDINGS.get(name, set())
    is_merged = any(each.startswith("gathers once") for each in compared.by_compiler)
    assert is_merged == ("critic" in name and target == "v5e:2x4")
    for row in compared.rows if not is_merged else ():
        if row.kind == "all-gather" and row.planned_count:
            # The matrix products of a TPU round to bfloat16, so that this is what is gathered.
            part = 2 if target == "v5e:2x4" else 1
            assert row.bytes == row.planned_bytes // part

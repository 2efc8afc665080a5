"""What reduces gradients in programs for TPUs and GPUs: how often, over which axes, in which loops.

`make test-targets` runs this with the compilers of these devices; other runs skip it. The same on
CPUs is in `tests/training/test_waiting.py`.
"""

import os

import jax
import pytest

import treeshard as ts
from tests.training.gradient_programs import (
    CASES,
    LAYERS,
    NAMES_AND_KINDS,
    SHARDS_OVER_DATA,
    assert_reduced,
    gradient_step,
    step_of,
)

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)

TARGETS = ["v5e:2x4", "h100:8"]
WIDTH = 512


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS)
def test_each_gradient_is_summed_once_over_the_axes_that_do_not_split_it(
    name: str, target: str, kind: str
) -> None:
    case = CASES[name]
    step, plan, x = step_of(case, ts.make_mesh(case.axes, topology=target, axis_types=kind), WIDTH)
    compiled = step.compile(plan.structs, x)
    assert_reduced(compiled.compiled, case.reduced, WIDTH)
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["fsdp", "hsdp", "fsdp x tp"])
def test_without_value_and_grad_shards_are_summed_in_each_layer(name: str, target: str) -> None:
    case = CASES[name]
    mesh = ts.make_mesh(case.axes, topology=target, axis_types="explicit")
    step, plan, x = gradient_step(case.loss, mesh, case.spec, WIDTH, jax.value_and_grad)
    in_each_layer = SHARDS_OVER_DATA._replace(runs=LAYERS, depth=1)
    expected = [in_each_layer if one == SHARDS_OVER_DATA else one for one in case.reduced]
    assert_reduced(step.compile(plan.structs, x).compiled, expected, WIDTH)

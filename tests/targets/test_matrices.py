"""Matrix optimizers in programs for TPUs and GPUs: each matrix moves to its device and back.

`make test-targets` runs this with the compilers of these devices; other runs skip it. The same on
CPUs, with the numbers, is in `tests/training/test_matrices.py`.
"""

import os

import jax
import pytest

import treeshard as ts
from tests.targets.counting import count_bytes
from tests.training.matrix_programs import STACKS, assert_two_exchanges, batch, muon, setup

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_an_update_has_two_exchanges(target: str, kind: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        made = setup(muon(), ts.make_mesh("fsdp=8", topology=target, axis_types=kind))
        compiled = made.step.compile(made.plan.structs, batch(1))
    assert_two_exchanges(compiled.compiled, ("fsdp",), 8)
    stacks = len(STACKS) * 32 * 64 * 4
    assert count_bytes(compiled.text, trips=1) == {"all-to-all": 2 * stacks}
    assert len(compiled.communication().matrices) == 2 * len(STACKS)

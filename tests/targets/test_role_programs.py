"""The programs of `tests/role_programs.py`, as compilers for TPUs and GPUs make them.

`make test-targets` runs this with the compilers of these devices; other runs skip it. The same on
CPUs is in `tests/communication/test_roles.py`.
"""

import os

import pytest

from tests.role_programs import PROGRAMS, TRUE_FINDINGS, made

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("standard_promotion")
TARGETS = ["v5e:2x4", "h100:8"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_compiled_is_what_is_planned(name: str, target: str) -> None:
    program = made(name, topology=target)
    compiled = program.step.compile(program.plan.structs, program.batch)
    for leaf in compiled.plan.leaves:
        for part, role in program.roles.items():
            if leaf.path.startswith(part):
                assert str(leaf.role).startswith(role), (leaf.path, leaf.role)
    compared = compiled.communication()
    # Without `training.value_and_grad`, these compilers all-reduce full gradients.
    found = {each.code for each in compared.unplanned} - {"all-reduce"}
    assert found == TRUE_FINDINGS.get(name, set())
    is_merged = "merged" in {each.code for each in compared.by_compiler}
    assert is_merged == ("critic" in name and target == "v5e:2x4")
    for row in compared.rows if not is_merged else ():
        if row.kind == "all-gather" and row.planned_count:
            # The matrix products of a TPU round to bfloat16, so that this is what is gathered.
            part = 2 if target == "v5e:2x4" else 1
            assert row.bytes == row.planned_bytes // part

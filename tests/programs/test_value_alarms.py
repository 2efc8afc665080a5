"""Programs that are right have no finding of their values, however small these are."""

import pytest
from role_programs import ONLY_AUTO, PROGRAMS, made

from treeshard.programs import _value_findings

# On Explicit axes types tell what findings need, and nothing has to be compiled.
CASES = [
    *((name, "explicit") for name in PROGRAMS if name not in ONLY_AUTO),
    *((name, "auto") for name in ("experts by constraints", "experts by hand", "batch norm")),
]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_right_program_has_no_finding(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_value_findings, "LEAST", 2**10)
    program = made(name, kind)
    types = program.step.types(program.plan.structs, program.batch, min_size=0)
    assert len(types) > 0
    assert types.findings == (), f"{types}"

"""Faults planted in the values of a step are found, and their twins have no finding."""

import pytest
from value_faults import CASES, PLANTED, check, mesh_of_type


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_a_planted_fault_is_found_and_its_twin_is_not(name: str, axes: str) -> None:
    planted = PLANTED[name]
    check(planted, mesh_of_type(axes, planted.mesh))

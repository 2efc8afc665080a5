"""The measurements of `benchmarks/accelerators.py` run, on small sizes."""

import math
from typing import Any

import pytest

from benchmarks import accelerators


def numbers(found: Any) -> list[float]:
    if isinstance(found, dict):
        return [x for value in found.values() for x in numbers(value)]
    return [found] if isinstance(found, int | float) else []


@pytest.mark.parametrize("case", ["memory tiny", "dispatch", "disk", "gather"])
def test_a_case_gives_numbers(case: str) -> None:
    if case == "disk":
        pytest.importorskip("orbax.checkpoint.experimental.v1")
    found = accelerators.measure(case, small=True)
    assert found
    assert "failed" not in found
    assert all(math.isfinite(x) and x >= 0 for x in numbers(found)), found

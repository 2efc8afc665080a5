"""Deprecations are errors, on the newest versions too; the exceptions stand in one table."""

from datetime import date

import pytest

from tests.deprecations import TOLERATED


@pytest.mark.parametrize("name", TOLERATED)
def test_the_day_of_an_exception_has_not_passed(name: str) -> None:
    one = TOLERATED[name]
    assert date.today() <= one.until, f"Does this still hold? {one.reason}"

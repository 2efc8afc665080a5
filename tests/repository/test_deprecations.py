"""Deprecations are errors, on the newest versions too; the exceptions stand in one table."""

import warnings
from datetime import date

import pytest

from tests.deprecations import TOLERATED, tolerated


@pytest.mark.parametrize("name", TOLERATED)
def test_the_day_of_an_exception_has_not_passed(name: str) -> None:
    one = TOLERATED[name]
    assert date.today() <= one.until, f"Does this still hold? {one.reason}"


def test_only_the_message_of_the_table_is_tolerated() -> None:
    with tolerated("with mesh"):
        warnings.warn("`with mesh:` context manager is old", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match="another"):
            warnings.warn("another", DeprecationWarning, stacklevel=1)

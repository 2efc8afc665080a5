"""The tests find nothing of the user's."""

import uuid
from pathlib import Path

import pytest


@pytest.mark.parametrize("folder", ["/var/tmp", "~"])
def test_a_write_elsewhere_is_an_error_at_its_line(folder: str) -> None:
    elsewhere = Path(folder).expanduser() / f"treeshard-{uuid.uuid4()}"
    message = f"a test writes to {elsewhere}; give it a directory of its own"
    with pytest.raises(PermissionError, match=message):
        elsewhere.write_text("")
    with pytest.raises(PermissionError, match=message):
        elsewhere.mkdir()
    assert not elsewhere.exists()

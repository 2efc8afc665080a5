"""The file that tests of safetensors write and read."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"

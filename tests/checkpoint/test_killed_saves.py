"""kill -9 of any process at any moment of a save loses no saved checkpoint."""

import os
from pathlib import Path

import pytest

from tests.multiprocess import killed_saves_checks, launcher
from tests.multiprocess.killed_saves_checks import KEPT
from tests.multiprocess.states import differing
from treeshard.checkpoint import restore, verify

# Of two processes and of one; many in `make soak`.
KILLS, KILLS_OF_ONE = (300, 300) if os.environ.get("TREESHARD_SOAK") else (8, 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def killed(directory: Path) -> launcher.Verdicts:
    args = [str(KILLS), str(KILLS_OF_ONE)]
    timeout = 120.0 + 30 * (KILLS + KILLS_OF_ONE)
    return launcher.launch(killed_saves_checks, directory, processes=1, args=args, timeout=timeout)


@pytest.mark.parametrize("check", launcher.checks_of(killed_saves_checks))
def test_killed(check: str, killed: launcher.Verdicts) -> None:
    killed.assert_passed(check)


@pytest.mark.parametrize("name", ["run", "run-of-one", "run-left"])
def test_the_remaining_checkpoints_are_complete(
    name: str, killed: launcher.Verdicts, directory: Path
) -> None:
    steps = sorted(int(path.name) for path in (directory / name).iterdir())
    assert len(steps) == KEPT  # and there are no leftovers
    for step in steps:
        verify(directory / name / str(step))
        assert not differing(restore(directory / name / str(step)), step)

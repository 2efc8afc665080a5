"""kill -9 of any process at any moment of a save loses no saved checkpoint."""

import json
import os
from pathlib import Path

import pytest

from tests.multiprocess import killed_saves_checks, launcher
from tests.multiprocess.killed_saves_checks import KEPT
from tests.multiprocess.states import differing
from treeshard.checkpoint import restore, verify

SOAK = bool(os.environ.get("TREESHARD_SOAK"))  # `make soak`
KILLS, KILLS_OF_ONE = (300, 300) if SOAK else (8, 4)
# Of a few kills, by chance, most may come before or after the writing.
LEAST = 1 / 4 if SOAK else 0


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


def test_processes_were_killed_during_saves(
    killed: launcher.Verdicts, directory: Path, record_property
) -> None:
    one = json.loads((directory / "run-of-one.json").read_text())
    record_property("killed alone", ", ".join(f"{n} {name}" for name, n in one.items()))
    assert one["in all"] == one["process 0"] == KILLS_OF_ONE
    assert one["while it wrote"] > LEAST * KILLS_OF_ONE
    counts = json.loads((directory / "run.json").read_text())
    record_property("processes killed", ", ".join(f"{n} {name}" for name, n in counts.items()))
    assert counts["in all"] == KILLS
    assert min(counts["process 0"], counts["process 1"]) > KILLS / 10
    assert counts["while it wrote"] > LEAST * KILLS


def test_some_writers_met_another_one(
    killed: launcher.Verdicts, directory: Path, record_property
) -> None:
    counts = json.loads((directory / "at-once.json").read_text())
    record_property("writers refused", ", ".join(f"{n} {name}" for name, n in counts.items()))
    assert counts["while another wrote"]


@pytest.mark.parametrize("name", ["run", "run-of-one", "run-left"])
def test_the_remaining_checkpoints_are_complete(
    name: str, killed: launcher.Verdicts, directory: Path
) -> None:
    steps = sorted(int(path.name) for path in (directory / name).iterdir())
    assert len(steps) == KEPT  # and there are no leftovers
    for step in steps:
        verify(directory / name / str(step))
        assert not differing(restore(directory / name / str(step)), step)

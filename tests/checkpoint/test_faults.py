"""Failing disks, other runs and failing processes: all processes raise, and nothing is lost."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.multiprocess import faults_checks, launcher
from tests.multiprocess.killed_saves_checks import host_state
from treeshard._disk.files import Lock
from treeshard.checkpoint import Checkpoints, save


def mounted(where: Path, options: str, held: ExitStack) -> bool:
    """Mounts a file system in memory, which only root can do."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(where)]
    if subprocess.run(command, capture_output=True).returncode:
        return False
    held.callback(subprocess.run, ["umount", "--lazy", str(where)], check=True)
    return True


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A small disk, and a read-only one that holds a checkpoint."""
    where = tmp_path_factory.mktemp("disks")
    with ExitStack() as held:
        if not mounted(where / "small", "size=8m", held):
            yield ["", ""]
            return
        mounted(where / "read-only", "size=8m", held)
        save(where / "read-only" / "1", host_state(1))
        command = ["mount", "-o", "remount,ro", str(where / "read-only")]
        subprocess.run(command, check=True)
        yield [str(where / "small"), str(where / "read-only")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, disks: list[str]) -> launcher.Verdicts:
    where = tmp_path_factory.mktemp("faults")
    with Checkpoints(where / "held") as held:
        held.save(1, host_state(1))
        held.wait()
        with Lock(where / "held" / ".2.treeshard-lock", "2"):  # as if it was being saved
            args = [*disks, str(where / "held")]
            return launcher.launch(faults_checks, where / "two", devices=2, args=args)


@pytest.mark.parametrize("check", launcher.checks_of(faults_checks))
def test_two_processes(check: str, two: launcher.Verdicts, disks: list[str]) -> None:
    if "disk" in check and not all(disks):
        pytest.skip("only root can make a disk that is full or read-only")
    two.assert_passed(check)

"""Disks that fail or are not shared, other runs, failing processes: all raise, nothing is lost."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.multiprocess import faults_checks, launcher
from tests.multiprocess.states import host_state
from treeshard._disk.files import Lock
from treeshard.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small disk in memory, which only root can mount."""
    where = tmp_path_factory.mktemp("small")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(where)]
    if subprocess.run(command, capture_output=True).returncode:
        yield ""
        return
    yield str(where)
    subprocess.run(["umount", "--lazy", str(where)], check=True)


# Runs a command that sees a disk in memory of its own in the place of a directory.
MOUNTED = 'mount --make-rprivate / && mount -t tmpfs none {} && exec "$@"'


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A directory over which process 1 can mount a disk, which only root can."""
    where = tmp_path_factory.mktemp("own")
    command = ["unshare", "--mount", "sh", "-c", MOUNTED.format(where), "sh", "true"]
    if not shutil.which("unshare") or subprocess.run(command, capture_output=True).returncode:
        return None
    return where


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, small: str, own: Path | None
) -> launcher.Verdicts:
    where = tmp_path_factory.mktemp("faults")
    prefixes = {1: ["unshare", "--mount", "sh", "-c", MOUNTED.format(own), "sh"]} if own else {}
    with Checkpoints(where / "held") as held:
        held.save(1, host_state(1))
        held.wait()
        with ExitStack() as saving:
            Lock(where / "held" / ".2.treeshard-lock", "2", saving)  # as if it was being saved
            return launcher.launch(
                faults_checks,
                where / "two",
                devices=2,
                args=[small, str(where / "held"), str(own or "")],
                prefixes=prefixes,
            )


@pytest.mark.parametrize("check", launcher.checks_of(faults_checks))
def test_two_processes(check: str, two: launcher.Verdicts, small: str, own: Path | None) -> None:
    if ("disk" in check and not small) or ("not_shared" in check and own is None):
        pytest.skip("only root can make a disk that is full, or of one process")
    two.assert_passed(check)

"""Disks that fail or are not shared, other runs, failing processes: all raise, nothing is lost."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.multiprocess import faults_checks, launcher, unshared_checks
from tests.multiprocess.states import host_state
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
def memory() -> Iterator[str]:
    if not os.access("/dev/shm", os.W_OK):
        yield ""
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        yield where


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, disks: list[str], own: Path | None, memory: str
) -> launcher.Verdicts:
    where = tmp_path_factory.mktemp("faults")
    prefixes = {1: ["unshare", "--mount", "sh", "-c", MOUNTED.format(own), "sh"]} if own else {}
    with Checkpoints(where / "held") as held:
        held.save(1, host_state(1))
        held.wait()
        with Lock(where / "held" / ".2.treeshard-lock", "2"):  # as if it was being saved
            return launcher.launch(
                [unshared_checks, faults_checks],
                where / "two",
                devices=2,
                args=[*disks, str(where / "held"), memory, str(own or "")],
                prefixes=prefixes,
            )


@pytest.mark.parametrize("check", launcher.checks_of(unshared_checks, faults_checks))
def test_two_processes(
    check: str, two: launcher.Verdicts, disks: list[str], own: Path | None
) -> None:
    if ("disk" in check and not all(disks)) or ("not_shared" in check and own is None):
        pytest.skip("only root can make a disk that is full or read-only, or of one process")
    two.assert_passed(check)

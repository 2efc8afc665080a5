"""A directory that the processes do not share: both raise, and no earlier step is lost."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess import launcher, unshared_checks

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
    tmp_path_factory: pytest.TempPathFactory, own: Path | None, memory: str
) -> launcher.Verdicts:
    where = tmp_path_factory.mktemp("unshared")
    args, prefixes = [str(where), memory, str(own or "")], {}
    if own:
        prefixes[1] = ["unshare", "--mount", "sh", "-c", MOUNTED.format(own), "sh"]
    return launcher.launch(
        unshared_checks, where / "two", devices=2, args=args, prefixes=prefixes, timeout=120
    )


@pytest.mark.parametrize("check", launcher.checks_of(unshared_checks))
def test_two_processes(check: str, two: launcher.Verdicts, own: Path | None) -> None:
    if "not_shared" in check and own is None:
        pytest.skip("only root can give a process a disk of its own")
    two.assert_passed(check)

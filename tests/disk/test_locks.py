"""Locks: one writer at a time, and no lock outlives its process."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import treeshard as ts
from treeshard._disk.files import Lock

HOLD = """
import sys, time
from pathlib import Path
from treeshard._disk.files import Lock
lock = Lock(Path(sys.argv[1]), "it")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds a lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_the_error_names_the_holding_process(holder, tmp_path: Path) -> None:
    with pytest.raises(ts.CheckpointError) as told:
        Lock(tmp_path / "lock", "/runs/7")
    who = f"process {holder.pid} on {platform.node()}, since 20"
    assert str(told.value).startswith(f"/runs/7: another run is writing here: {who}")
    assert str(told.value).endswith("Wait for it, end it, or write to another path.")


def test_a_lock_ends_with_its_process(holder, tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock").exists()
    with Lock(tmp_path / "lock", "it"):
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_the_error_tells_this_process_from_others(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock", "it"), pytest.raises(ts.CheckpointError, match="this process"):
        Lock(tmp_path / "lock", "it")


def test_release_removes_the_file(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock", "it")
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ts.CheckpointError, match="/runs/7: cannot be written to: No such file"):
        Lock(tmp_path / "missing" / "lock", "/runs/7")


FORK = """
import os, sys, time
from pathlib import Path
from treeshard._disk.files import Lock
lock = Lock(Path(sys.argv[1]), "it")
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
os._exit(0)  # as if killed, without releasing anything
"""


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.wait()
            os.kill(child, 0)  # it is there
            Lock(tmp_path / "lock", "it").release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(handle: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(ts.ShardingWarning, match="it: this file system does not support locks"):
        Lock(tmp_path / "lock", "it").release()

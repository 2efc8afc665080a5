"""Locks: one writer at a time, and no lock outlives its process."""

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctrl_c import is_interrupted
from full_disk import files_of_at_most

import treeshard as ts
from treeshard._disk import files
from treeshard._disk.files import Lock
from treeshard.checkpoint import Checkpoints, restore, save
from treeshard.interchange import load_safetensors, save_safetensors

HOLD = """
import os, sys, time
from contextlib import ExitStack
from pathlib import Path
from treeshard._disk.files import Lock
held = ExitStack()
Lock(Path(sys.argv[1]), "it", held)
if os.fork() == 0:  # here its copy of the lock is closed, which takes time on a busy machine
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_until_its_process_ends_and_the_error_names_it(tmp_path: Path) -> None:
    """Whatever it has forked."""
    command = [sys.executable, "-W", "ignore", "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with ExitStack() as held, pytest.raises(ts.CheckpointError) as told:
                Lock(tmp_path / "lock", "/runs/7", held)
            process.kill()
            process.wait()
            os.kill(child, 0)  # it is there
            with ExitStack() as held:
                Lock(tmp_path / "lock", "it", held)
                assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
                with pytest.raises(ts.CheckpointError, match="this process is already writing"):
                    Lock(tmp_path / "lock", "it", held)
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)
    who = f"process {process.pid} on {platform.node()}, since 20"
    assert str(told.value).startswith(f"/runs/7: another run is writing here: {who}")
    assert str(told.value).endswith("Wait for it, end it, or write to another path.")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def thesis(tmp_path: Path):
    """A file of the user's, which no link at a name of ours may change."""
    file = tmp_path / "thesis.tex"
    file.write_text("years of work")
    yield file
    assert file.read_text() == "years of work"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda file: os.symlink("/dev/null", file)])
def test_what_is_no_file_at_the_name_of_a_lock_is_an_error_at_once(make, tmp_path) -> None:
    make(tmp_path / "lock")
    says = pytest.raises(ts.CheckpointError, match="it: cannot be written to: ")
    with ExitStack() as held, says:
        Lock(tmp_path / "lock", "it", held)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_saves_change_no_file_that_a_link_names(link, thesis, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".c.treeshard-lock", ".other.treeshard-lock", ".w.safetensors.part"):
        link(thesis, run / name)
    tree = {"w": np.ones(3, np.float32)}
    with Checkpoints(run) as checkpoints:
        checkpoints.save(1, tree)
    with pytest.raises(ts.CheckpointError, match="lock is a link or not a regular file. Remove"):
        save(run / "c", tree)
    with pytest.warns(ts.ShardingWarning, match="interrupted saves from .*: .w.safetensors.part"):
        save_safetensors(run / "w.safetensors", tree)
    assert restore(run / "1")["w"].tolist() == [1, 1, 1]
    assert load_safetensors(run / "w.safetensors")["w"].tolist() == [1, 1, 1]


def test_a_lock_on_a_full_disk_is_held_without_a_name_and_released(tmp_path: Path) -> None:
    with files_of_at_most(0), ExitStack() as held:
        lock = Lock(tmp_path / "lock", "it", held)
        lock.check()
        with pytest.raises(ts.CheckpointError, match="writing here: an unknown process"):
            Lock(tmp_path / "lock", "it", held)
    assert list(tmp_path.iterdir()) == []
    with files_of_at_most(0), pytest.raises(ts.CheckpointError, match="run/c was not saved"):
        save(tmp_path / "run" / "c", {"w": np.ones(3)})
    assert list((tmp_path / "run").iterdir()) == []
    save(tmp_path / "run" / "c", {"w": np.ones(3)})
    assert restore(tmp_path / "run" / "c")["w"].tolist() == [1, 1, 1]


def test_a_lock_on_a_dead_disk_is_a_typed_error(tmp_path: Path, monkeypatch) -> None:
    stat = os.stat

    def fail(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("lock"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, **options)

    with ExitStack() as held:
        lock = Lock(tmp_path / "lock", "it", held)
        monkeypatch.setattr(os, "stat", fail)
        with pytest.raises(ts.CheckpointError, match="lock cannot be read: Stale file handle"):
            lock.check()


def test_a_lock_whose_file_its_holder_has_just_removed_is_taken_anew(tmp_path, monkeypatch) -> None:
    file = tmp_path / "lock"
    flock = fcntl.flock

    def after_a_release(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        file.unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", after_a_release)
    with ExitStack() as held:
        lock = Lock(file, "it", held)
        lock.check()  # it is the file that others find


def save_a_step(run: Path) -> None:
    with Checkpoints(run) as checkpoints:
        checkpoints.save(7, {"w": np.ones(3)})


def sweep_a_run(run: Path) -> None:
    (run / "7.orbax-checkpoint-tmp-0-removed").mkdir(parents=True, exist_ok=True)
    Checkpoints(run).close()


@pytest.mark.filterwarnings("ignore:.*removed files of interrupted saves")
@pytest.mark.parametrize(
    "write",
    [
        save_a_step,
        sweep_a_run,
        lambda run: save_safetensors(run / "w.safetensors", {"w": np.ones(3)}),
    ],
)
def test_a_ctrl_c_at_any_moment_leaves_no_lock(write, tmp_path: Path) -> None:
    """So the same process can write there again."""
    at = 1
    while is_interrupted(lambda: write(tmp_path), at, files):
        write(tmp_path)
        at += 1
    assert at > 10

"""What killed writers left is removed, and told; what living ones hold is not touched."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from full_disk import fill, small_disk
from helpers import files_in

import treeshard as ts
from treeshard.checkpoint import Checkpoints, save
from treeshard.interchange import save_safetensors

TREE = {"w": np.ones((512, 256), np.float32)}  # 512 KiB
# Writes all of three things, and gives none of them its name.
WRITER = """
import os, sys, threading, time
import numpy as np
from treeshard.checkpoint import Checkpoints, _save, save
from treeshard.interchange import _files, save_safetensors

def stop(*args, **options):
    os.write(1, b"written\\n")  # at once, as two threads may be here
    time.sleep(600)

_save.merge = _files._put_in_place = stop
where, tree = sys.argv[1], {"w": np.ones((512, 256), np.float32)}
Checkpoints(where + "/run").save(7, tree)
threading.Thread(target=save, args=[where + "/saves/step_7", tree]).start()
save_safetensors(where + "/tensors/model.safetensors", tree)
"""


def test_what_a_writer_left_is_removed_once_it_is_dead(tmp_path: Path) -> None:
    """By the next save of the same path, or the next run in the same directory."""
    run, saves, tensors = (tmp_path / name for name in ("run", "saves", "tensors"))
    tensors.mkdir()
    (tensors / ".mine.part").write_text("mine")
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert [writer.stdout.readline() for _ in range(3)] == ["written\n"] * 3
            before = {file: file.stat() for file in tmp_path.rglob("*") if file.is_file()}
            save(run / "1", TREE)
            save(saves / "1", TREE)
            Checkpoints(saves).close()
            save_safetensors(tensors / "1.safetensors", TREE)
            for path in (saves / "step_7", tensors / "model.safetensors"):
                with pytest.raises(ts.CheckpointError, match="another run is writing here"):
                    (save if path.parent == saves else save_safetensors)(path, TREE)
            for file, stat in before.items():
                now = file.stat()
                assert (now.st_ino, now.st_size) == (stat.st_ino, stat.st_size), file
        finally:
            writer.kill()
    left = f"removed files of interrupted saves from {tmp_path}"
    with pytest.warns(ts.ShardingWarning, match=rf"^Checkpoints: {left}/run: 7\.orbax\S+ \(51\d"):
        Checkpoints(run).close()
    assert files_in(run) == ["1"]
    says = rf"^save: {left}/saves: step_7\.orbax-checkpoint-tmp \(51\d\.\d KiB\)\.$"
    with pytest.warns(ts.ShardingWarning, match=says):
        save(saves / "step_7", TREE)
    assert files_in(saves) == ["1", "step_7"]
    says = rf"^save_safetensors: {left}/tensors: \.model\.safetensors\.part \(512\.1 KiB"
    with pytest.warns(ts.ShardingWarning, match=says):
        save_safetensors(tensors / "model.safetensors", TREE)
    assert files_in(tensors) == [".mine.part", "1.safetensors", "model.safetensors"]


@pytest.mark.parametrize(
    ("left", "write"),
    [
        ("2.orbax-checkpoint-tmp/state/x", lambda run: Checkpoints(run).close()),
        ("2.orbax-checkpoint-tmp-0-removed/state/x", lambda run: Checkpoints(run).close()),
        ("2.orbax-checkpoint-tmp/state/x", lambda run: save(run / "2", TREE)),
        (".w.safetensors.part/x", lambda run: save_safetensors(run / "w.safetensors", TREE)),
    ],
)
def test_what_fills_the_disk_is_removed(left, write, tmp_path: Path) -> None:
    with small_disk(tmp_path) as is_there:
        if not is_there:
            pytest.skip("only root can mount a disk that is full")
        fill(tmp_path / left)
        with pytest.warns(ts.ShardingWarning, match="removed files of interrupted saves"):
            write(tmp_path)
        assert not (tmp_path / left).exists()
        assert [x for x in files_in(tmp_path) if x.startswith(".")] == []


def test_a_disk_that_stays_full_is_told_and_keeps_no_mark(tmp_path: Path) -> None:
    with small_disk(tmp_path) as is_there:
        if not is_there:
            pytest.skip("only root can mount a disk that is full")
        fill(tmp_path / "mine" / "x")
        with pytest.raises(ts.CheckpointError, match="cannot be written: No space left on device"):
            Checkpoints(tmp_path)
        assert files_in(tmp_path) == ["mine"]


def test_names_like_those_of_leftovers_are_not_removed(tmp_path: Path) -> None:
    """They begin with the suffix, name no step, or are files."""
    mine = [".orbax-checkpoint-tmp-x", ".x.treeshard-lock", "model.orbax-checkpoint-tmp"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / "5.orbax-checkpoint-tmp-0").write_text("mine")
    for name in ("5.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-removed"):
        (tmp_path / name / "state").mkdir(parents=True)
    with pytest.warns(ts.ShardingWarning, match=r"4\S+-removed \(0 B\), 5\S+-tmp \(0 B\)\.$"):
        Checkpoints(tmp_path).close()
    assert files_in(tmp_path) == sorted([*mine, "5.orbax-checkpoint-tmp-0"])


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody can tell whether a writer is alive."""
    (tmp_path / "7.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    for name in (".7.treeshard-lock", ".x.treeshard-files-lock", ".x.part"):
        (tmp_path / name).write_text("process 9")
    before = files_in(tmp_path)

    def fail(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    for write in (
        lambda: save(tmp_path / "next", TREE),
        lambda: Checkpoints(tmp_path).close(),
        lambda: save_safetensors(tmp_path / "next.safetensors", TREE),
    ):
        with pytest.warns(ts.ShardingWarning, match="does not support locks"):
            write()
    assert set(before) <= set(files_in(tmp_path))

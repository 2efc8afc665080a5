"""What killed writers left is removed, and told; what living ones hold is not touched."""

import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers import files_in

import treeshard as ts
from treeshard.checkpoint import Checkpoints, save
from treeshard.interchange import save_safetensors

TREE = {"w": np.ones((512, 256), np.float32)}  # 512 KiB

KILLED = """
import os, signal, sys, time
import numpy as np
from treeshard._disk import files
from treeshard.checkpoint import Checkpoints, _save, save
from treeshard.interchange import save_safetensors

def stop(*args, **options):
    if "--alive" in sys.argv:
        print("writing", flush=True)
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)

_save.merge = files._rename = stop
tree = {"w": np.ones((512, 256), np.float32)}
for what, path in zip(sys.argv[1::2], sys.argv[2::2]):
    if what == "save":
        save(path, tree)
    if what == "run":
        with Checkpoints(path) as run:
            run.save(7, tree)
    if what == "file":
        save_safetensors(path, tree)
"""


def killed(what: str, path: Path) -> None:
    """A writer that is killed once everything is written, and has no name yet."""
    command = [sys.executable, "-c", KILLED, what, str(path)]
    assert subprocess.run(command, check=False).returncode == -9


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """A writer that is at work meanwhile."""
    command = [sys.executable, "-c", KILLED, what, str(path), "--alive"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            yield
        finally:
            process.kill()


def begin(what: str, where: Path) -> None:
    if what == "save":
        save(where / "next", TREE)
    elif what == "file":
        save_safetensors(where / "next.safetensors", TREE)
    else:
        Checkpoints(where).close()


@pytest.mark.parametrize(("before", "after"), [("save", "run"), ("run", "save")])
def test_a_killed_save_is_removed_by_the_next_one(before: str, after: str, tmp_path: Path) -> None:
    name = {"save": "step_7", "run": "7"}[before]
    killed(before, tmp_path / name if before == "save" else tmp_path)
    left = files_in(tmp_path)
    assert {f".{name}.treeshard-lock", f"{name}.orbax-checkpoint-tmp"} <= set(left)
    with pytest.warns(ts.ShardingWarning) as told:
        begin(after, tmp_path)
    function = {"save": "save", "run": "Checkpoints"}[after]
    [message] = [str(x.message) for x in told]
    says = f"{function}: removed what killed saves had left in {tmp_path}: {name}.orbax-checkpoint"
    assert message.startswith(f"{says}-tmp (51")
    assert message.endswith(" KiB).")
    assert files_in(tmp_path) == (["next"] if after == "save" else [])


def test_killed_saves_of_tensors_are_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".mine.part").write_text("mine")
    killed("file", tmp_path / "model.safetensors")
    assert set(files_in(tmp_path)) == {
        ".mine.part", ".model.safetensors.part", ".model.safetensors.treeshard-files-lock"
    }  # fmt: skip
    says = r"save_safetensors: removed what .* left in .*: \.model\.safetensors\.part \(512\.1 KiB"
    with pytest.warns(ts.ShardingWarning, match=says):
        begin("file", tmp_path)
    assert files_in(tmp_path) == [".mine.part", "next.safetensors"]


@pytest.mark.parametrize("what", ["save", "file"])
def test_what_a_living_writer_holds_is_not_touched(what: str, tmp_path: Path) -> None:
    """From another process; another host of a shared file system is kept out by the same lock."""
    path = {"save": tmp_path / "7", "file": tmp_path / "x.safetensors"}[what]
    with writing(what, path):
        before = {file: file.stat() for file in tmp_path.rglob("*") if file.is_file()}
        assert len(before) >= 2
        begin(what, tmp_path)
        if what == "save":
            begin("run", tmp_path)
        for file, stat in before.items():
            assert (file.stat().st_ino, file.stat().st_size) == (stat.st_ino, stat.st_size), file


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody can tell whether a writer is alive."""
    (tmp_path / "7.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    for name in (
        ".7.treeshard-lock",
        ".x.treeshard-files-lock",
        ".x.part",
    ):
        (tmp_path / name).write_text("process 9")
    before = files_in(tmp_path)

    def fail(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    for what in ("save", "run", "file"):
        with pytest.warns(ts.ShardingWarning, match="does not support locks"):
            begin(what, tmp_path)
    assert set(before) <= set(files_in(tmp_path))

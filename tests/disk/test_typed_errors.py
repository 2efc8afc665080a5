"""Paths and texts of any kind, and files that change or are withheld: what is raised is typed."""

import errno
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import checkpoint
from treeshard._disk import untrusted
from treeshard.checkpoint import (
    Checkpoints,
    _array_store,
    _checkpoints,
    _restore,
    inspect,
    restore,
    save,
)
from treeshard.interchange import save_safetensors

TREE = {"w": np.ones((8, 4), np.float32)}


def replace_by(way: str, run: Path) -> None:
    """Does to step 1 what its writer may do at any time."""
    if not (run / "1").exists():
        return
    with Checkpoints(run, keep=1) as writer:
        writer.save(1 if way == "replaced" else 2, {"w": 2 * TREE["w"]})


MOMENTS = {
    "restore": [
        (_restore, "seal"),
        (_array_store.ArrayStore, "read"),
        (_restore, "changed_files"),
        (_restore, "unpack"),
    ],
    "verify": [
        (_restore, "seal"),
        (_restore, "changed_files"),
        (_array_store.ArrayStore, "read"),
    ],
    "inspect": [(_restore, "seal")],
}
CASES = [(call, moment) for call, moments in MOMENTS.items() for moment in moments]


def remove_at(moment: tuple[Any, str], way: str, directory: Path, monkeypatch: Any) -> None:
    """Removes step 1 when a function is called first: it reads the step."""
    owner, name = moment
    real = getattr(owner, name)

    def remove_first(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        replace_by(way, directory)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, remove_first)


@pytest.mark.parametrize("way", ["removed", "replaced"])
@pytest.mark.parametrize(("call", "moment"), CASES, ids=lambda x: x if isinstance(x, str) else x[1])
def test_a_checkpoint_that_its_writer_removes_is_not_damaged(
    call: str, moment: tuple[Any, str], way: str, tmp_path: Path, monkeypatch
) -> None:
    save(tmp_path / "1", TREE)
    remove_at(moment, way, tmp_path, monkeypatch)
    read = getattr(checkpoint, call)
    if moment[1] == "unpack":  # all arrays are read
        assert read(tmp_path / "1")["w"].max() == 1
        return
    with pytest.raises(ts.errors.RemovedError, match=f"{tmp_path}/1 was {way} while it was read"):
        read(tmp_path / "1")


@pytest.mark.parametrize("moment", CASES[:3], ids=lambda x: x[1][1])
@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_the_latest_is_read_again_if_its_writer_removes_it(
    way: str, moment: Any, tmp_path: Path, monkeypatch
) -> None:
    save(tmp_path / "1", TREE)
    remove_at(moment[1], way, tmp_path, monkeypatch)
    step, tree = Checkpoints(tmp_path, read_only=True).restore_latest()
    assert (step, tree["w"].max()) == (1 if way == "replaced" else 2, 2)


def test_a_step_that_is_removed_while_files_are_counted_is_not_said_to_lack_some(
    tmp_path: Path, monkeypatch
) -> None:
    save(tmp_path / "1", TREE)
    real = _checkpoints._lacking_files

    def remove_first(path: Path) -> list[str]:
        replace_by("removed", tmp_path)
        return real(path)

    monkeypatch.setattr(_checkpoints, "_lacking_files", remove_first)
    with warnings.catch_warnings(action="error"):
        assert Checkpoints(tmp_path, read_only=True).latest == 2


# Where the disk is gone, as a network file system whose server has ended.
DEAD = ("stat", "fstat", "open", "mkdir", "rename", "fsync", "remove", "listdir")


@pytest.mark.parametrize("name", DEAD)
@pytest.mark.filterwarnings("ignore::treeshard.ShardingWarning")
def test_a_dead_disk_is_a_typed_error(name: str, tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    checkpoints = Checkpoints(run, keep=1)
    checkpoints.save(1, TREE)
    checkpoints.wait()
    real = getattr(os, name)

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, int) or str(path).startswith(str(tmp_path)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **options)

    for call in [
        lambda: (checkpoints.save(2, TREE), checkpoints.wait()),
        lambda: (checkpoints.save(1, TREE), checkpoints.wait()),
        lambda: checkpoints.remove_after(0),
        lambda: checkpoints.latest,
        lambda: checkpoints.restore_latest(TREE),
        lambda: inspect(run / "1"),
        lambda: Checkpoints(tmp_path / "new").close(),
        lambda: save(tmp_path / "x", TREE),
        checkpoints.close,
    ]:
        with monkeypatch.context() as dead, suppress(ts.TreeShardError):
            dead.setattr(os, name, fail)
            call()


def test_empty_arrays_are_gathered_after_they_were_resharded(mesh) -> None:
    empty = {"e": np.zeros((8, 0), np.float32), "k": jax.random.split(jax.random.key(0), (8, 0))}
    moved = ts.reshard(ts.shard(empty, P("fsdp"), mesh), P("data"), mesh)
    for full in (ts.gather(moved), ts.gather(moved, to=0), dict(ts.iter_gather(moved))):
        assert {name: x.shape for name, x in full.items()} == {"e": (8, 0), "k": (8, 0)}


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    red = "\x1b[31mw\n9 leaves\u202e"
    save(tmp_path / "x", {red: np.ones(2, np.float32)})
    shown = str(inspect(tmp_path / "x"))
    assert r"\x1b[31mw\n9 leaves\u202e" in shown
    assert shown.replace("\n", "").isprintable()
    with pytest.raises(ts.MismatchError) as told:
        restore(tmp_path / "x", {"w": np.ones(2, np.float32)})
    assert "\x1b" not in str(told.value)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"w": np.ones((1,) * 33, np.float32)}, "Rank 33"),
        ({"w" * 70_000: np.ones(2, np.float32)}, "[Kk]ey"),
    ],
    ids=["33 dims", "a long path"],
)
def test_leaves_beyond_the_limits_of_the_array_store_are_told(tree, says, tmp_path: Path) -> None:
    with pytest.raises(ts.CheckpointError, match=f"was not saved; .*{says}"):
        save(tmp_path / "x", tree)
    assert not list(tmp_path.iterdir())


def test_headers_that_could_not_be_read_are_not_written(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "m.safetensors"
    monkeypatch.setattr(untrusted, "MOST_ITEMS", 20)
    with pytest.raises(
        ts.FormatError, match=r"^The header would be JSON of about 24 values.*Split"
    ):
        save_safetensors(file, {f"{i}": TREE["w"] for i in range(3)})
    many = {f"{i}": TREE["w"] for i in range(20)}
    with pytest.raises(ts.FormatError, match=r"The index would be JSON of about 23 values"):
        save_safetensors(file, many, max_file_size=128)
    monkeypatch.setattr(untrusted, "MOST_BYTES", 2**10)
    with pytest.raises(ts.FormatError, match="header would be JSON of 1.0 KiB. At most 1.0 KiB"):
        save_safetensors(file, {"x" * 10**3: TREE["w"]})
    assert not list(tmp_path.iterdir())

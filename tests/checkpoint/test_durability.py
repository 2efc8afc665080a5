"""What is saved survives power loss: everything is flushed before it gets its name.

Here the calls to the operating system are recorded, on any machine. `test_power_loss.py` cuts the
power of a disk.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._disk.files import flush
from treeshard.checkpoint import Checkpoints, _paths, restore, save
from treeshard.interchange import load_safetensors, save_safetensors

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="the names of open files are read from /proc"
)
Call = tuple[str, str]


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The flushes, renames and removals of this process, with real paths, in order."""
    calls: list[Call] = []
    kept = {name: getattr(os, name) for name in ("fsync", "rename", "replace", "unlink", "rmdir")}

    def fsync(handle: int) -> None:
        kept["fsync"](handle)
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))

    def noting(name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            folder = options.get("dir_fd")
            where = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}") + "/"
            calls.append((name, where + os.fspath(path)))
            return kept[name](path, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in kept:
            patch.setattr(os, name, fsync if name == "fsync" else noting(name))
        yield calls


def flushed(calls: list[Call]) -> set[str]:
    return {path for name, path in calls if name == "fsync"}


def entries(path: Path) -> set[str]:
    return {str(path), *map(str, path.rglob("*"))}


def test_a_checkpoint_is_flushed_before_it_gets_its_name(mesh, tmp_path: Path) -> None:
    tree = {"small": np.ones(3), "w": ts.shard(np.ones((512, 1024)), P("fsdp"), mesh), "n": 7}
    path = tmp_path / "new" / "inner" / "x"
    with recorded() as calls:
        save(path, tree)
    temporary = str(path.with_name("x.orbax-checkpoint-tmp"))
    renamed = calls.index(("rename", temporary))
    before, after = calls[:renamed], calls[renamed:]
    written = {name.replace(str(path), temporary) for name in entries(path)}
    assert written <= flushed(before)
    assert {str(tmp_path), str(tmp_path / "new")} <= flushed(before)
    assert str(path.parent) in flushed(after)


def test_old_steps_are_removed_once_the_new_one_is_durable(tmp_path: Path) -> None:
    with recorded() as calls, Checkpoints(tmp_path / "run", keep=1) as run:
        for step in (1, 2):
            run.save(step, {"w": np.ones(3)})
        run.wait()
    names = [(name, path.removeprefix(f"{tmp_path}/")) for name, path in calls]
    renamed = names.index(("rename", "run/2.orbax-checkpoint-tmp"))
    durable = names.index(("fsync", "run"), renamed)
    assert names.index(("rename", "run/1")) > durable
    assert all(i > durable for i, (name, _) in enumerate(names) if name == "rmdir")


def test_no_index_names_tensors_of_two_saves(tmp_path: Path) -> None:
    """The new index comes once its files are durable, and the earlier files go once it is."""
    path, tensors = tmp_path / "model.safetensors", {"a": np.ones(300), "b": np.ones(300)}
    save_safetensors(path, tensors, max_file_size=2400)
    with recorded() as calls:
        save_safetensors(path, tensors, max_file_size=2400)
    names = [(name, Path(file).name) for name, file in calls]
    index = "model.safetensors.index.json"
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    first, last = (names.index(("rename", part)) for part in parts)
    assert {("fsync", part) for part in parts} <= {*names[:first]}
    new = names.index(("replace", index))
    assert ("fsync", index) in names[last:new]  # as it names the files now
    assert ("fsync", tmp_path.name) in names[last:new]
    removed = names.index(("unlink", parts[0]))
    assert ("fsync", tmp_path.name) in names[new:removed]
    assert ("fsync", tmp_path.name) in names[removed:]
    assert load_safetensors(path).keys() == tensors.keys()


def test_a_name_that_cannot_be_flushed_is_told_of_a_complete_checkpoint(
    tmp_path: Path, monkeypatch
) -> None:
    def fail(path: Path) -> int:
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        return flush(path)

    with monkeypatch.context() as dead:
        dead.setattr("treeshard.checkpoint._save.flush", fail)
        with pytest.raises(ts.CheckpointError) as told:
            save(tmp_path / "2", {"w": np.ones(3)})
    assert str(told.value) == (
        f"{tmp_path}/2 is complete and can be read, but it may not survive a power cut: {tmp_path}"
        " could not be flushed: [Errno 5] Input/output error."
    )
    assert restore(tmp_path / "2")["w"].tolist() == [1, 1, 1]
    with recorded() as calls, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, {"w": np.ones(3)})
    assert ("fsync", str(tmp_path)) in calls
    with pytest.raises(ts.CheckpointError, match="There is already a checkpoint at"):
        save(tmp_path / "2", {"w": np.ones(3)})


@pytest.mark.parametrize("exchange", [True, False])
def test_a_replaced_step_is_removed_once_the_new_one_is_durable(
    exchange: bool, tmp_path: Path, monkeypatch
) -> None:
    run, place = tmp_path / "run", "2.orbax-checkpoint-tmp"
    with Checkpoints(run) as checkpoints:
        checkpoints.save(2, {"w": np.ones(3)})
        checkpoints.wait()
        real = _paths.exchange_names
        with recorded() as calls:

            def exchanged(one: Path, other: Path) -> bool:
                calls.append(("exchange", str(one)))
                return exchange and real(one, other)

            monkeypatch.setattr(_paths, "exchange_names", exchanged)
            checkpoints.save(2, {"w": np.zeros(3)})
            checkpoints.wait()
    names = [(name, path.removeprefix(f"{run}/")) for name, path in calls]
    placed = names.index(("exchange", place))
    if ("rename", "2") in names:
        assert names[placed + 1 : placed + 3] == [("rename", "2"), ("rename", place)]
        placed += 2
    durable = names.index(("fsync", str(run)), placed)
    assert {path for name, path in names[:placed] if name == "fsync"} >= {place, f"{place}/leaves"}
    assert all(i > durable for i, (name, _) in enumerate(names) if name == "rmdir")
    assert restore(run / "2")["w"].tolist() == [0, 0, 0]


def test_steps_are_removed_durably(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": np.ones(3)})
        checkpoints.wait()
        with recorded() as calls:
            checkpoints.remove_after(1)
    names = [(name, path.removeprefix(f"{tmp_path}/")) for name, path in calls]
    first, last = names.index(("rename", "run/3")), names.index(("rename", "run/2"))
    assert first < last < names.index(("fsync", "run"))

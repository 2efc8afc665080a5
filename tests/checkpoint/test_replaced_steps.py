"""A run that goes back to an earlier step replaces the later ones, or removes them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import files_in, flip_in

import treeshard as ts
from treeshard._disk import files
from treeshard.checkpoint import Checkpoints, _paths, _save, restore, save, verify


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.full((64, 32), step, np.float32), "step": step}


def values(run: Path) -> dict[int, int]:
    """The step that each checkpoint of a run says it is of, which are all as saved."""
    found: dict[int, int] = {}
    for step in Checkpoints(run, read_only=True).steps():
        verify(run / f"{step}")
        state = restore(run / f"{step}")
        assert (state["w"] == state["step"]).all()
        found[step] = state["step"]
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The steps 2, 4 and 6 of a run."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, state_at(step))
    return tmp_path / "run"


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.filterwarnings("ignore:save. .*has later steps")
def test_later_steps_are_replaced_as_the_run_reaches_them(
    background: bool, exchange: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:  # as NFS
        monkeypatch.setattr(_paths, "exchange_names", lambda *_: False)
    with Checkpoints(run, keep=3, background=background) as checkpoints:
        for step in (3, 4, 5, 6, 7):
            with pytest.warns(ts.ShardingWarning) if step < 6 else pytest.MonkeyPatch.context():
                assert checkpoints.save(step, state_at(100 + step))
    assert values(run) == {5: 105, 6: 106, 7: 107}
    assert files_in(run) == ["5", "6", "7"]


@pytest.mark.parametrize("lost", ["", "table", "arrays"])
def test_a_damaged_step_is_replaced_by_equal_values(lost: str, run: Path) -> None:
    if lost == "table":
        (run / "6" / "leaves" / "table.json").unlink()
    elif lost == "arrays":
        (run / "6" / "state" / "manifest.ocdbt").unlink()
    else:
        flip_in(run / "6", state_at(6)["w"].tobytes()[:64])
    with Checkpoints(run) as checkpoints:
        if lost != "arrays":
            with pytest.raises(ts.DamagedError):
                checkpoints.restore_latest()
        assert checkpoints.save(6, state_at(6))
        assert checkpoints.restore_latest()[0] == 6
    assert values(run) == {2: 2, 4: 4, 6: 6}


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("killed_after", ["nothing", "set aside", "in place"])
def test_a_kill_leaves_the_old_step_or_the_new_one(
    exchange: bool, killed_after: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    put_in_place, rename = _paths.put_in_place, os.rename

    def stop(*args: Any, **options: Any) -> None:
        if killed_after == "in place":
            put_in_place(*args, **options)
        raise Killed

    def rename_once(old: Any, new: Any, **options: Any) -> None:
        rename(old, new, **options)
        if str(old) == f"{run}/6":
            raise Killed

    with Checkpoints(run) as checkpoints, monkeypatch.context() as patch:
        if not exchange:
            patch.setattr(_paths, "exchange_names", lambda *_: False)
        if killed_after == "set aside":
            patch.setattr(os, "rename", rename_once)
        else:
            patch.setattr(_save, "put_in_place", stop)
        patch.setattr(_save, "sweep", lambda path: {})  # which a killed process does not reach
        checkpoints.save(6, state_at(106))
        if exchange and killed_after == "set aside":
            checkpoints.wait()  # there is no such moment
        else:
            with pytest.raises(Killed):
                checkpoints.wait()
    if exchange or killed_after != "set aside":  # a reader sees one of the two at any moment
        assert values(run)[6] == (106 if (killed_after != "nothing") else 6)
    with pytest.warns(ts.ShardingWarning, match="removed files of interrupted saves"):
        Checkpoints(run).close()
    is_new = killed_after == "in place" or (exchange and killed_after == "set aside")
    assert values(run) == {2: 2, 4: 4, 6: 106 if is_new else 6}
    assert files_in(run) == ["2", "4", "6"]


def test_names_are_exchanged_at_once_where_the_system_can(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert not files.exchange_names(tmp_path / "a", tmp_path / "absent")
    if files.exchange_names(tmp_path / "a", tmp_path / "b"):
        assert ((tmp_path / "a" / "b").exists(), (tmp_path / "b" / "a").exists()) == (True, True)


def test_a_link_to_a_step_is_replaced_and_what_it_names_stays(run: Path, tmp_path: Path) -> None:
    (run / "6").rename(tmp_path / "elsewhere")
    (run / "6").symlink_to(tmp_path / "elsewhere")
    with Checkpoints(run, keep=1) as checkpoints:
        checkpoints.save(6, state_at(106))
    assert values(run) == {6: 106}
    assert restore(tmp_path / "elsewhere")["step"] == 6
    assert files_in(run) == ["6"]


def test_only_a_run_replaces_and_only_what_treeshard_wrote(run: Path) -> None:
    with pytest.raises(ts.CheckpointError, match="already a checkpoint at .*6, and `save` d"):
        save(run / "6", state_at(6))
    for name in ("7", "8"):
        (run / name).mkdir()
    (run / "7" / "mine").touch()
    (run / "9").write_text("mine")
    with Checkpoints(run) as checkpoints:
        for step in (7, 8, 9):
            with pytest.raises(ts.CheckpointError, match=f"already a (director|fil).*/{step}"):
                checkpoints.save(step, state_at(step))
    assert values(run) == {2: 2, 4: 4, 6: 6}
    assert (run / "7" / "mine").exists()


def test_a_failed_replacement_leaves_the_old_step(run: Path, monkeypatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    with Checkpoints(run) as checkpoints:
        monkeypatch.setattr(_save, "put_in_place", fail)
        checkpoints.save(6, state_at(106))
        with pytest.raises(ts.CheckpointError, match="6 was not saved; what existed before is"):
            checkpoints.wait()
    assert values(run) == {2: 2, 4: 4, 6: 6}
    assert files_in(run) == ["2", "4", "6"]


def test_later_steps_are_removed_on_request(run: Path) -> None:
    save(run / "notes" / "9", state_at(9))
    (run / "8").mkdir()
    with Checkpoints(run) as checkpoints:
        checkpoints.save(10, state_at(10))  # in the background
        says = r"save\(3\): .*/run has later steps, up to 10, .* `checkpoints.remove_after\(3\)`"
        with pytest.warns(ts.ShardingWarning, match=says):
            checkpoints.save(3, state_at(3))
        assert checkpoints.remove_after(3) == (4, 6, 10)
        assert checkpoints.restore_latest()[0] == 3
        assert checkpoints.remove_after(np.int64(3)) == ()
        checkpoints.save(4, state_at(104))
        assert checkpoints.remove_after(0) == (2, 3, 4)
        assert files_in(run) == [".treeshard-lock", "8", "notes"]
        with pytest.raises(ValueError, match=r"remove_after\(step=-1\): the step must not be"):
            checkpoints.remove_after(-1)
    assert files_in(run / "notes") == ["9"]
    for closed in (checkpoints, Checkpoints(run, read_only=True)):
        with pytest.raises(ts.CheckpointError, match=r"this Checkpoints is (closed|read-only)\."):
            closed.remove_after(0)


def test_a_step_that_cannot_be_removed_is_an_error(run: Path, monkeypatch) -> None:
    rename = os.rename

    def fail(old: Any, new: Any, **options: Any) -> None:
        if str(old) == f"{run}/4":
            raise OSError(5, "Input/output error")
        rename(old, new, **options)

    monkeypatch.setattr(os, "rename", fail)
    with Checkpoints(run) as checkpoints:
        with pytest.raises(ts.CheckpointError, match="steps of .*/run cannot be removed: .*Input"):
            checkpoints.remove_after(0)
        assert checkpoints.steps() == (2, 4)  # from the latest on


def test_a_step_is_saved_whatever_every_says(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=100) as checkpoints:
        assert not checkpoints.save(257, state_at(257))
        assert checkpoints.save(257, state_at(257), force=True)
        assert checkpoints.save(300, state_at(300), force=True)
    assert values(tmp_path) == {257: 257, 300: 300}

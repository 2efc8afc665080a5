"""What could not be looked at is an error, and never an older step or none."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import treeshard as ts
from treeshard.checkpoint import Checkpoints, restore, save, verify

TREE = {"w": np.ones((1024, 4), np.float32), "step": 0}


@pytest.fixture
def run() -> Iterator[Path]:
    """A run with two steps, in a directory that another user may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for step in (1, 2):
        save(folder / "run" / str(step), {**TREE, "step": step})
    yield folder / "run"
    os.seteuid(os.getuid())
    for path in [folder / "run", *(x for x in folder.rglob("*") if x.is_dir())]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def forbid(run: Path, name: str) -> None:
    for path in run.glob(name) if name else [run]:
        path.chmod(0)
    if os.getuid() == 0:  # root may read everything
        os.seteuid(65534)


@pytest.mark.parametrize(
    ("name", "says"),
    [("2", "/run/2/leaves/table.json cannot be read"), ("", "/run cannot be listed")],
)
def test_a_step_that_cannot_be_looked_at_is_an_error(run: Path, name: str, says: str) -> None:
    reader = Checkpoints(run, read_only=True)
    assert reader.steps() == (1, 2)
    forbid(run, name)
    for look in (reader.steps, lambda: reader.latest, lambda: reader.restore_latest(TREE)):
        with pytest.raises(ts.CheckpointError, match=f"{says}: Permission denied.") as told:
            look()
        assert not isinstance(told.value, ts.DamagedError)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("state", "2: its seal cannot be read: .*denied"),
        ("state/manifest.ocdbt", "Permission|PERMISSION_DENIED"),
        # TensorStore writes one file of data or two, of which reading may need only one.
        ("state/ocdbt.process_0/d/*", "Permission|PERMISSION_DENIED"),
    ],
)
def test_files_that_may_not_be_read_are_not_damaged(run: Path, name: str, says: str) -> None:
    forbid(run, f"2/{name}")
    for read in (verify, restore, lambda _: Checkpoints(run, read_only=True).restore_latest(TREE)):
        with pytest.raises(ts.CheckpointError, match=says) as told:
            read(run / "2")
        assert not isinstance(told.value, ts.DamagedError)


def test_a_step_without_its_table_still_counts(run: Path) -> None:
    (run / "2" / "leaves" / "table.json").unlink()
    reader = Checkpoints(run, read_only=True)
    assert reader.steps() == (1, 2)
    with pytest.raises(ts.DamagedError, match="2: its table of leaves is missing"):
        reader.restore_latest(TREE)


def test_what_is_absent_is_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "3").symlink_to(run / "nowhere")
    (run / "4").write_text("mine")
    reader = Checkpoints(run, read_only=True)
    assert reader.restore_latest(TREE) is None
    assert reader.steps() == ()
    shutil.rmtree(run)
    run.write_text("mine")
    with pytest.raises(ts.CheckpointError, match="run cannot be listed: Not a directory."):
        Checkpoints(tmp_path / "run", read_only=True).restore_latest(TREE)


def test_a_listing_while_steps_are_replaced_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listed step is gone by now; or the system read the name of the new one too early, and
    that of the old one too late."""
    real = os.listdir
    for step in (2, 4):
        save(tmp_path / f"{step}", TREE)
    listings = [["1"], [".treeshard-lock", "1.orbax-checkpoint-tmp-removed"], ["2", "3"]]
    monkeypatch.setattr(os, "listdir", lambda path: listings.pop(0) if listings else real(path))
    assert Checkpoints(tmp_path, read_only=True).latest == 4

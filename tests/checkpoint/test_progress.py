"""`progress=` of `save` and `restore`."""

import sys

import numpy as np
import pytest

from treeshard.checkpoint import Checkpoints, restore, save

TREE = {f"w{i}": np.ones((64, 64), np.float32) for i in range(40)}


def test_logs_get_a_line_for_each_tenth(tmp_path, capfd) -> None:
    save(tmp_path / "1", TREE, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("save: 10%, 10/100 %", "save: 100%, 100/100 %", 10)
    restore(tmp_path / "1", progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert (lines[0], len(lines)) == ("restore: 10%, 4/40 leaf", 10)
    Checkpoints(tmp_path, read_only=True).restore_latest(progress=True)
    assert len(capfd.readouterr().err.splitlines()) == 10
    restore(tmp_path / "1")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("background", [True, False])
def test_a_run_shows_its_saves_and_restores(background, tmp_path, capfd) -> None:
    with Checkpoints(tmp_path, background=background, progress=True) as run:
        run.save(1, TREE)
        run.wait()
        saved = capfd.readouterr().err.splitlines()
        run.restore_latest()
        restored = capfd.readouterr().err.splitlines()
        run.restore(1, progress=False)
    assert (len(saved), saved[-1]) == (10, "save: 100%, 100/100 %")
    assert (len(restored), restored[-1]) == (10, "restore: 100%, 40/40 leaf")
    assert capfd.readouterr().err == ""


def test_large_and_small_arrays_share_a_bar(tmp_path, capfd) -> None:
    save(tmp_path / "1", TREE | {"large": np.ones((1024, 1024), np.float32)})
    restore(tmp_path / "1", progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert (len(lines), lines[-1]) == (10, "restore: 100%, 41/41 leaf")


def test_without_tqdm_nothing_is_written(tmp_path, monkeypatch) -> None:
    save(tmp_path / "1", TREE)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"save\(progress=True\) needs tqdm"):
        save(tmp_path / "2", TREE, progress=True)
    assert not (tmp_path / "2").exists()
    with pytest.raises(ImportError, match=r"Checkpoints\(progress=True\) needs tqdm"):
        Checkpoints(tmp_path / "run", progress=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ImportError, match=r"restore\(progress=True\) needs tqdm"):
        restore(tmp_path / "1", progress=True)

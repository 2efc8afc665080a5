"""`progress=` of `save` and `restore`."""

import sys

import numpy as np
import pytest

from treeshard.checkpoint import Checkpoints, restore, save

TREE = {f"w{i}": np.ones((64, 64), np.float32) for i in range(40)}


@pytest.mark.parametrize("background", [True, False])
def test_a_run_shows_its_saves_and_restores(background, tmp_path, capfd) -> None:
    with Checkpoints(tmp_path, background=background, progress=True) as run:
        run.save(1, TREE)
        run.wait()
        saved = capfd.readouterr().err.splitlines()
        run.restore_latest()
        restored = capfd.readouterr().err.splitlines()
        run.restore(1, progress=False)
    assert (len(saved), saved[0], saved[-1]) == (10, "save: 10%, 10/100 %", "save: 100%, 100/100 %")
    assert (len(restored), restored[-1]) == (10, "restore: 100%, 40/40 leaf")
    assert capfd.readouterr().err == ""


def test_save_and_restore_show_their_progress_on_request(tmp_path, capfd) -> None:
    save(tmp_path / "1", TREE | {"large": np.ones((1024, 1024), np.float32)}, progress=True)
    assert capfd.readouterr().err.splitlines()[-1] == "save: 100%, 100/100 %"
    restore(tmp_path / "1")
    assert capfd.readouterr().err == ""
    restore(tmp_path / "1", progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert (len(lines), lines[-1]) == (10, "restore: 100%, 41/41 leaf")


def test_without_tqdm_nothing_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"save\(progress=True\) needs tqdm"):
        save(tmp_path / "2", TREE, progress=True)
    with pytest.raises(ImportError, match=r"Checkpoints\(progress=True\) needs tqdm"):
        Checkpoints(tmp_path / "run", progress=True)
    assert not list(tmp_path.iterdir())
    save(tmp_path / "1", TREE)
    with pytest.raises(ImportError, match=r"restore\(progress=True\) needs tqdm"):
        restore(tmp_path / "1", progress=True)

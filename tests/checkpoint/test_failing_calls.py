"""Every file call of a save and of a read fails once: what was acknowledged is whole.

A process with a library before libc runs them, see `tests/failing_calls.py`.
"""

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

import treeshard as ts
from tests import failing_calls
from treeshard._disk.files import flush_tree
from treeshard.checkpoint import Checkpoints, restore, save
from treeshard.interchange import load_safetensors, save_safetensors

SOAK = bool(os.environ.get("TREESHARD_SOAK"))


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler"
)
def test_any_call_may_fail(tmp_path: Path, record_property) -> None:
    """All calls and all ways in `make soak`."""
    stride, ways = (1, [*failing_calls.WAYS]) if SOAK else (83, ["EIO", "dead disk"])
    report = failing_calls.run(tmp_path, stride, ways)
    wrong = ["\n".join(map(str, case.values())) for case in report["wrong"]]
    assert not wrong, "\n\n".join(wrong)
    for what in ("counts", "outcomes"):
        of_each = ", ".join(f"{n:,} {name}" for name, n in report[what].items())
        told = f"{sum(report[what].values()):,}: {of_each}"
        record_property(f"failing calls, {what}", told)
    assert {*report["counts"]} == {x.__name__ for x in failing_calls.OPERATIONS}
    assert report["outcomes"]["CheckpointError"]


def fail(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EIO, "Input/output error")


def test_a_folder_that_cannot_be_listed_is_not_flushed(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        flush_tree(tmp_path)


def test_a_checkpoint_is_read_whose_folder_cannot_be_closed(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path / "7", {"w": np.ones(3, np.float32)})
    close = os.close

    def close_and_fail(handle: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{handle}")
        close(handle)
        if is_folder:
            fail()

    monkeypatch.setattr(os, "close", close_and_fail)
    assert restore(tmp_path / "7")["w"].tolist() == [1, 1, 1]


def test_a_save_succeeds_whose_directory_cannot_be_listed(tmp_path: Path, monkeypatch) -> None:
    """Only the warning of later steps and the removal of old ones need the list."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)})
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr(os, "listdir", fail)
            assert checkpoints.save(2, {"w": np.ones(3)})
            with pytest.warns(ts.ShardingWarning, match="latest 1 cannot be removed: .*be listed"):
                checkpoints.wait()
        assert checkpoints.steps() == (1, 2)


def test_a_name_that_cannot_be_looked_at_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    """The earlier save has a file of this name, which must stay until the new index is there."""
    first, second = ({"a": np.full(9, n), "b": np.full(9, -n)} for n in (1.0, 2.0))
    save_safetensors(tmp_path / "model", first, max_file_size=80)
    lstat = os.lstat

    def fail_for_shards(path: os.PathLike[str], **options: int) -> os.stat_result:
        return fail() if "model-0000" in os.fspath(path) else lstat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", fail_for_shards)
        with pytest.raises(ts.CheckpointError, match="What was saved before is unchanged"):
            save_safetensors(tmp_path / "model", second, max_file_size=80)
    assert load_safetensors(tmp_path / "model")["a"].tolist() == [1.0] * 9

"""The example with several processes is killed, resumes, and trains as one process does."""

import os
import re
import subprocess
import sys

import pytest

from examples import multiprocess
from tests.multiprocess.launcher import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "multiprocess.py"
TINY = ["--layers=1", "--width=32", "--heads=2", "--batch=16", "--time=8", "--warmup=2"]
TINY += ["--text-bytes=100000", "--every=2"]
QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def losses_of(printed: str) -> dict[int, float]:
    return {int(i): float(loss) for i, loss in re.findall(r"step (\d+) loss (\S+)", printed)}


@pytest.mark.usefixtures("quick_compiles", "standard_promotion")
def test_it_resumes_and_trains_as_one_process_does(tmp_path, monkeypatch, capfd) -> None:
    """One process is killed after step 5 of 8, on Explicit axes, and both are started again."""
    directory = tmp_path / "run"
    command = [sys.executable, SCRIPT, *TINY, f"--directory={directory}", "--kill-at=5"]
    done = subprocess.run(
        [*command, "--steps=8", "--explicit"],
        env={key: x for key, x in os.environ.items() if key != "PYTHONPATH"} | QUICK,
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    assert re.search(r"== killed process [01] after step 5; starting both again", printed)
    again = int(re.search(r"resumes after step (\d)", printed)[1])
    assert again in (2, 4)  # the save of step 4 may not have been complete
    assert f"== {5 - again} steps were trained twice, and their losses are the same" in printed
    assert "done after step 8" in printed
    assert sorted(path.name for path in directory.iterdir() if path.name.isdigit()) == ["6", "8"]

    monkeypatch.setattr(multiprocess, "join", lambda args: None)
    multiprocess.main([*TINY, "--worker", f"--directory={tmp_path}/alone", "--steps=8"])
    alone = losses_of(capfd.readouterr().out)
    assert alone.keys() == {*range(1, 9)}
    assert losses_of(printed) == pytest.approx(alone, abs=1e-5)


def test_it_removes_only_what_it_made(tmp_path) -> None:
    kept = tmp_path / "run" / "results.txt"
    kept.parent.mkdir()
    kept.write_text("of weeks")
    with pytest.raises(SystemExit, match="this script did not make what is in it"):
        multiprocess.drive(multiprocess.parse([f"--directory={kept.parent}"]))
    assert kept.read_text() == "of weeks"
    with pytest.raises(SystemExit, match="Did you mean --worker"):
        multiprocess.drive(multiprocess.parse(["--directory=gs://bucket/run"]))
    multiprocess.start_empty(str(tmp_path / "new"))
    (tmp_path / "new" / "8").mkdir()
    multiprocess.start_empty(str(tmp_path / "new"))  # its own, from an earlier run
    assert not (tmp_path / "new" / "8").exists()

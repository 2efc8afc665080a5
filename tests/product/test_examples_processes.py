"""The example with several processes runs: started by itself, and as a cluster starts it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples import multiprocess
from tests.multiprocess.launcher import REPOSITORY, end, free_port, wait_for_all

SCRIPT = REPOSITORY / "examples" / "multiprocess.py"
TINY = ["--layers=1", "--width=32", "--heads=2", "--batch=16", "--time=8", "--warmup=2"]
TINY += ["--text-bytes=100000", "--every=2"]


@pytest.fixture(scope="module")
def env():
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return kept | {"JAX_PLATFORMS": "cpu"} | quick


@pytest.fixture(scope="module")
def run(env, tmp_path_factory):
    """One process killed after step 5 of 8, both started again."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    command = [sys.executable, SCRIPT, *TINY, f"--directory={directory}", "--kill-at=5"]
    done = subprocess.run(
        [*command, "--steps=8"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory, done.stdout


def test_it_resumes_from_the_last_checkpoint(run) -> None:
    directory, printed = run
    assert re.search(r"== killed process [01] after step 5; starting both again", printed)
    again = int(re.search(r"resumes after step (\d)", printed)[1])
    assert again in (2, 4)  # the save of step 4 may not have been complete
    assert f"== {5 - again} steps were trained twice, and their losses are the same" in printed
    assert "done after step 8" in printed
    assert sorted(path.name for path in directory.iterdir() if path.name.isdigit()) == ["6", "8"]


def test_its_processes_end_with_it(env, tmp_path) -> None:
    command = [sys.executable, SCRIPT, *TINY, f"--directory={tmp_path}/run"]
    driver = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    while not (workers := children(driver.pid)):
        assert driver.poll() is None
        time.sleep(0.1)
    driver.terminate()
    driver.stdout.close()
    assert driver.wait(60) == 1
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def children(pid: int) -> list[str]:
    """The processes that a process has started: on Linux only."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


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


def losses_of(printed: str) -> dict[int, float]:
    return {int(i): float(loss) for i, loss in re.findall(r"step (\d+) loss (\S+)", printed)}


def test_slurm_configures_it_and_on_explicit_axes_the_losses_are_the_same(
    run, env, tmp_path
) -> None:
    port = str(free_port())
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    job |= {"JAX_NUM_CPU_DEVICES": "4", "JAX_COORDINATOR_PORT": port, "SLURM_STEP_NUM_NODES": "1"}
    command = [sys.executable, SCRIPT, *TINY, "--worker", f"--directory={tmp_path}/run"]
    started = []
    for i in range(2):
        task = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
        with (tmp_path / f"{i}").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [*command, "--steps=4", "--explicit"],
                    env=env | job | task,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    wait_for_all(started, 200)
    end(started)
    printed = [(tmp_path / f"{i}").read_text() for i in range(2)]
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)
    assert "step" not in printed[1]
    explicit = losses_of(printed[0])
    assert explicit.keys() == {1, 2, 3, 4}
    assert explicit == pytest.approx({i: losses_of(run[1])[i] for i in explicit}, abs=1e-5)

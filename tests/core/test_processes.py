"""Messages between real processes, and the launcher that starts these processes and ends them."""

import sys
from pathlib import Path

import pytest

import treeshard as ts
from tests.helpers import runs, wait_until
from tests.multiprocess import exchange_checks, launcher
from treeshard._core.meetings import _absent, _client, exchange

*CHECKS, FAILING = launcher.checks_of(exchange_checks)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> launcher.Verdicts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "GRACE", 0.5)  # since one of them fails
        return launcher.launch(exchange_checks, tmp_path_factory.mktemp("exchange"), devices=1)


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, two: launcher.Verdicts) -> None:
    two.assert_passed(check)


def test_a_failure_shows_what_every_process_said(two: launcher.Verdicts) -> None:
    with pytest.raises(AssertionError, match="process 1 has something to complain about"):
        two.assert_passed(FAILING)
    assert two.codes[1] == 1
    with pytest.raises(AssertionError, match="not reached"):
        two.assert_passed("check_nothing")


def test_whoever_sleeps_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(99)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    sleeper = launcher.start([sys.executable, "-c", parent], tmp_path / "log")
    wait_until(lambda: pid.exists() and pid.read_text().endswith("."))
    launcher.wait_for_all([sleeper], timeout=0.1)
    launcher.end([sleeper])
    wait_until(lambda: not runs(int(pid.read_text()[:-1])))


def test_without_the_service_the_error_names_the_fix() -> None:
    assert exchange("talking to itself", b"yes", timeout=0.01) == [b"yes"]
    with pytest.raises(ts.ProcessError, match=r"Call `jax\.distributed\.initialize\(\)` first"):
        _client()


def test_a_lost_process_is_told_by_the_time_waited() -> None:
    error = RuntimeError("INTERNAL: Barrier failed because: Task 1 heartbeat timeout.\nmore")
    assert _absent("gather", [1], 7.4, error, lost=True) == (
        "gather: process 1 of 1 ended or cannot be reached, as was noticed after 7 s of waiting"
        " (INTERNAL: Barrier failed because: Task 1 heartbeat timeout.). Nothing was done. See the"
        " log of the missing process."
    )

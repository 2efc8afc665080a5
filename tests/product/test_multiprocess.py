"""The launcher of real processes: it reports what they found, and ends them all."""

import sys

import pytest

from tests.helpers import runs, wait_until
from tests.multiprocess import launcher, starting_checks


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return launcher.launch(starting_checks, tmp_path_factory.mktemp("start"), args=["--loud"])


@pytest.mark.parametrize("check", launcher.checks_of(starting_checks)[:2])
def test_passed(check, verdicts) -> None:
    verdicts.assert_passed(check)


def test_a_failure_shows_what_every_process_said(verdicts) -> None:
    with pytest.raises(AssertionError, match="process 1 has something to complain about"):
        verdicts.assert_passed("check_that_fails_where_it_is_told_to")
    assert verdicts.codes[1] == 1


def test_a_check_that_does_not_exist_is_not_passed(verdicts) -> None:
    with pytest.raises(AssertionError, match="not reached"):
        verdicts.assert_passed("check_nothing")


def test_whoever_sleeps_is_ended_with_what_it_started(tmp_path) -> None:
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(99)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    sleeper = launcher.start([sys.executable, "-c", parent], tmp_path / "log")
    wait_until(lambda: pid.exists() and pid.read_text().endswith("."))
    launcher.wait_for_all([sleeper], timeout=0.1)
    launcher.end([sleeper])
    wait_until(lambda: not runs(int(pid.read_text()[:-1])))

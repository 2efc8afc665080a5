"""Calls that a process skips, and calls of several threads: two and four processes."""

import pytest

from tests.multiprocess import launcher, skipping_checks


@pytest.fixture(scope="module", params=[2, 4])
def processes(request, tmp_path_factory):
    where = tmp_path_factory.mktemp("skipping")
    return launcher.launch(skipping_checks, where, processes=request.param, devices=1)


@pytest.mark.parametrize("check", launcher.checks_of(skipping_checks))
def test_processes(check, processes) -> None:
    processes.assert_passed(check)

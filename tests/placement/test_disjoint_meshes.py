"""Trees between a trainer's mesh and a sampler's, in one process and among 2 and 4."""

import sys

import pytest

from tests.multiprocess import disjoint_checks, launcher
from tests.multiprocess.worker import Context

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")


@pytest.mark.parametrize("check", launcher.checks_of(disjoint_checks))
def test_one_process(check: str, tmp_path) -> None:
    getattr(disjoint_checks, check)(Context(0, 1, tmp_path, []))


two, test_two_processes = launcher.tests_of(disjoint_checks)
four, test_four_processes = launcher.tests_of(disjoint_checks, processes=4, devices=2)

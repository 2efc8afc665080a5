"""Trees between a trainer's mesh and a sampler's, in one process and among 2 and 4."""

import sys

import pytest

from tests.multiprocess import disjoint_checks, launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")


EXACT = launcher.EXACT_MEMORY

one, test_one_process = launcher.tests_of(disjoint_checks, processes=1, devices=8, env=EXACT)
two, test_two_processes = launcher.tests_of(disjoint_checks, processes=2, devices=4, env=EXACT)
four, test_four_processes = launcher.tests_of(disjoint_checks, processes=4, devices=2, env=EXACT)

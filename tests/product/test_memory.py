"""Peaks of host memory on two processes, by the same bars as the benchmarks."""

import sys

import pytest

from tests.multiprocess import launcher, memory_checks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")

two, test_two_processes = launcher.tests_of(memory_checks, env=launcher.EXACT_MEMORY)

"""Placing and gathering among real processes, and calls of theirs that differ.

Moves are the same checks on 1 x 8 and 4 x 2 devices, between a trainer's mesh and a sampler's too.
"""

import math
import sys

import pytest

from tests.multiprocess import (
    disagreeing_checks,
    launcher,
    memory_checks,
    moving_checks,
    skipping_checks,
)
from tests.multiprocess.worker import Context
from treeshard._core.arrays import lengths
from treeshard._placement.transport import CHUNK_BYTES, _pieces

MOVING = launcher.checks_of(moving_checks)


@pytest.mark.parametrize("check", MOVING)
def test_one_process(check, tmp_path) -> None:
    getattr(moving_checks, check)(Context(0, 1, tmp_path, []))


# What measures memory comes first.
ON_LINUX = [memory_checks] if sys.platform == "linux" else []
four, test_four_processes = launcher.tests_of(
    *ON_LINUX, moving_checks, processes=4, devices=2, env=launcher.EXACT_MEMORY
)
three, test_three_processes_that_disagree = launcher.tests_of(
    disagreeing_checks, skipping_checks, processes=3, devices=2
)


def test_large_parts_go_in_pieces_that_fit_a_chunk() -> None:
    part = ((2, 5), (0, 3), (7, CHUNK_BYTES))
    sizes = [4 * math.prod(lengths(piece)) for piece in _pieces(part, 4)]
    assert max(sizes) <= CHUNK_BYTES
    assert sum(sizes) == 4 * math.prod(lengths(part))

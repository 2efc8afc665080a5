"""Trees that move between real processes, to files and back, and calls of theirs that differ.

Moves are the same checks on 1 x 8 and 4 x 2 devices, between a trainer's mesh and a sampler's too.
"""

import math
import sys

import pytest

from tests.multiprocess import (
    disagreeing_checks,
    equal_values_checks,
    interchange_checks,
    launcher,
    memory_checks,
    moving_checks,
    restoring_checks,
    skipping_checks,
)
from tests.multiprocess.checkpoint_checks import saved_state
from tests.multiprocess.worker import Context
from treeshard._core.arrays import region_shape
from treeshard._placement.transport import CHUNK_BYTES, _pieces
from treeshard.checkpoint import save

# What measures memory comes first.
ON_LINUX = [memory_checks] if sys.platform == "linux" else []
FOUR = [
    *ON_LINUX,
    moving_checks,
    restoring_checks,
    interchange_checks,
    equal_values_checks,
]


@pytest.mark.parametrize("check", launcher.checks_of(moving_checks))
def test_one_process(check, tmp_path) -> None:
    getattr(moving_checks, check)(Context(0, 1, tmp_path, []))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> launcher.Verdicts:
    where = tmp_path_factory.mktemp("four")
    save(where / "of-one", saved_state())
    args = [str(where / "of-one")]
    return launcher.launch(
        FOUR, where / "four", processes=4, devices=2, args=args, env=launcher.EXACT_MEMORY
    )


@pytest.mark.parametrize("check", launcher.checks_of(*FOUR))
def test_four_processes(check: str, four: launcher.Verdicts) -> None:
    four.assert_passed(check)


three, test_three_processes_that_disagree = launcher.tests_of(
    disagreeing_checks, skipping_checks, processes=3, devices=2
)


def test_large_parts_go_in_pieces_that_fit_a_chunk() -> None:
    part = ((2, 5), (0, 3), (7, CHUNK_BYTES))
    pieces = [*_pieces(part, 4, CHUNK_BYTES)]
    assert len(set(pieces)) == len(pieces)
    sizes = [4 * math.prod(region_shape(piece)) for piece in pieces]
    assert max(sizes) <= CHUNK_BYTES
    assert sum(sizes) == 4 * math.prod(region_shape(part))

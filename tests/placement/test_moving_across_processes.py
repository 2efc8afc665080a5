"""Placing and gathering among real processes, and calls of theirs that differ.

Moves are the same checks on 1 x 8 and 4 x 2 devices, between a trainer's mesh and a sampler's too.
"""

import math
import sys

import pytest

from tests.multiprocess import (
    disagreeing_checks,
    disjoint_checks,
    launcher,
    memory_checks,
    moving_checks,
    skipping_checks,
)
from tests.multiprocess.worker import Context
from treeshard._core.arrays import lengths
from treeshard._core.processes import _differences
from treeshard._placement.transport import CHUNK_BYTES, _pieces

MOVING = launcher.checks_of(moving_checks)


@pytest.mark.parametrize("check", MOVING)
def test_one_process(check, tmp_path) -> None:
    getattr(moving_checks, check)(Context(0, 1, tmp_path, []))


# Those that measure memory come first.
ON_LINUX = [memory_checks, disjoint_checks] if sys.platform == "linux" else []
four, test_four_processes = launcher.tests_of(
    *ON_LINUX, moving_checks, processes=4, devices=2, env=launcher.EXACT_MEMORY
)
three, test_three_processes_that_disagree = launcher.tests_of(
    disagreeing_checks, skipping_checks, processes=3, devices=2
)


# ------------------------------------------------------------------ what needs no processes


@pytest.mark.parametrize(
    ("who", "text"),
    [
        ([0, 1], "processes 0, 1"),
        ([0, 1, 2, 3], "processes 0 to 3"),
        ([0, 2, 3], "processes 0, 2, 3"),
    ],
)
def test_processes_are_named_shortly(who, text) -> None:
    said = {i: {"w": "P()"} for i in who} | {9: {"w": "P('fsdp')"}}
    assert _differences(said) == [f"w: P() on {text}; P('fsdp') on process 9"]


@pytest.mark.parametrize(
    "part",
    [
        (),
        ((3, 5),),
        ((2, 5), (0, 3), (7, CHUNK_BYTES)),
        ((0, 100_000), (0, 1000)),
    ],
    ids=str,
)
def test_pieces_cover_a_part_once_and_fit_a_chunk(part) -> None:
    pieces = _pieces(part, 4)
    sizes = [4 * math.prod(lengths(piece)) for piece in pieces]
    assert max(sizes) <= CHUNK_BYTES
    assert sum(sizes) == 4 * math.prod(lengths(part))
    assert len(set(pieces)) == len(pieces)
    for piece in pieces:
        ends = zip(part, piece, strict=True)
        assert all(start <= first and last <= stop for (start, stop), (first, last) in ends)

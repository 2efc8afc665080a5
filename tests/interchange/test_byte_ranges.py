"""Parts of arrays are written to a file and read back, however the array is split."""

import itertools
import os
from collections import Counter

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from saved_tensors import random_array

from treeshard._core.arrays import lengths
from treeshard.interchange import _byte_ranges
from treeshard.interchange._byte_ranges import Piece, read, write

DTYPES = [np.dtype(x) for x in (bool, np.int8, ml_dtypes.bfloat16, np.float32, np.complex64)]


@pytest.fixture
def file(tmp_path):
    opened = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def every_second(x: np.ndarray) -> np.ndarray:
    """The same values with gaps between them in memory."""
    return x[..., None].repeat(2, -1)[..., 0]


@st.composite
def split_arrays(draw):
    """An array, and the regions of any grid that splits it, in any order."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    spans = []
    for length in shape:
        edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
        spans.append(list(itertools.pairwise(edges)) or [(0, 0)])
    regions = draw(st.permutations(list(itertools.product(*spans))))
    return random_array(draw(st.sampled_from(DTYPES)), shape), regions


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(split_arrays(), st.sampled_from([8, 64, 2**23]), st.data())
def test_what_was_written_is_read_back(file, monkeypatch, split, block, data) -> None:
    monkeypatch.setattr(_byte_ranges, "BLOCK", block)
    x, regions = split
    pieces = []
    for region in regions:
        part = x[tuple(slice(*span) for span in region)]
        ways = [np.asarray, np.array, np.asfortranarray, every_second]
        if x.dtype == np.float32:
            ways.append(lambda y: y.astype(">f4"))
        pieces.append(Piece(region, np.asarray(data.draw(st.sampled_from(ways))(part))))
    os.ftruncate(file, 0)
    half = data.draw(st.integers(0, len(regions)))
    for mine in (pieces[:half], pieces[half:]):  # as two processes would
        write(file, 5, x.shape, mine)
    assert os.pread(file, 2 * x.nbytes + 5, 5) == x.tobytes()
    back = [Piece(region, np.empty(lengths(region), x.dtype)) for region in regions[:half]]
    read(file, 5, x.shape, back)
    for region, items in back:
        assert items.tobytes() == x[tuple(slice(*span) for span in region)].tobytes()


def test_bytes_between_pieces_stay(file) -> None:
    os.pwrite(file, b"\xff" * 16, 0)  # of another process
    x = np.arange(16, dtype="uint8").reshape(4, 4)
    write(
        file, 0, x.shape, [Piece(((i, i + 1), (i, i + 1)), x[i : i + 1, i : i + 1]) for i in (0, 3)]
    )
    assert os.pread(file, 16, 0) == b"\x00" + b"\xff" * 14 + b"\x0f"


def test_every_byte_is_written_once_and_neighbours_in_one_call(file, monkeypatch) -> None:
    x = random_array(np.dtype("float32"), (64, 64))
    columns = [Piece(((0, 64), (i, i + 8)), x[:, i : i + 8]) for i in (24, 0, 16, 8)]
    calls: Counter[int] = Counter()
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: calls.update([len(args[1])]) or pwrite(*args))
    write(file, 0, x.shape, columns)
    assert calls == {32 * 4: 64}  # one call for a row, not four
    calls.clear()
    write(file, 0, x.shape, [*columns, Piece(((0, 64), (32, 64)), x[:, 32:])])
    assert calls == {64 * 64 * 4: 1}


def test_pieces_with_the_order_of_the_file_are_not_copied(file, monkeypatch) -> None:
    x = random_array(np.dtype("float32"), (512, 1024))
    monkeypatch.setattr(np, "empty", None)
    write(file, 0, x.shape, [Piece(((0, 512), (0, 1024)), x)])
    monkeypatch.undo()
    into = np.empty_like(x)
    monkeypatch.setattr(np, "empty", None)
    read(file, 0, x.shape, [Piece(((0, 512), (0, 1024)), into)])
    assert into.tobytes() == x.tobytes()


def test_short_reads_and_writes_are_continued(file, monkeypatch) -> None:
    x = random_array(np.dtype("int8"), (100,))
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: pwrite(f, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda f, into, at: preadv(f, [into[0][:7]], at))
    write(file, 0, x.shape, [Piece(((0, 100),), x)])
    into = np.empty_like(x)
    read(file, 0, x.shape, [Piece(((0, 100),), into)])
    assert into.tobytes() == x.tobytes()


def test_a_file_that_ends_too_early_raises(file) -> None:
    os.pwrite(file, b"x" * 10, 0)
    with pytest.raises(EOFError, match="the file ends at byte 10"):
        read(file, 0, (11,), [Piece(((0, 11),), np.empty(11, np.int8))])

"""Parts of arrays in a file: which bytes are moved, in how many calls, and without which copies."""

import os
from collections import Counter

import numpy as np
import pytest
from saved_tensors import random_array

from treeshard.interchange._byte_ranges import Piece, read, write


@pytest.fixture
def file(tmp_path):
    opened = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


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


def test_pieces_in_another_order_are_filled(file) -> None:
    x = random_array(np.dtype("int8"), (4, 8))
    write(file, 0, x.shape, [Piece(((0, 4), (0, 8)), x)])
    into = np.zeros((8, 4), np.int8).T
    read(file, 0, x.shape, [Piece(((0, 4), (0, 8)), into)])
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

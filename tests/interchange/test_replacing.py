"""A save replaces all files of an earlier one, or none: after an error, or a kill, anywhere."""

import errno
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import files_in

import treeshard as ts
from treeshard.interchange import _files, load_safetensors, save_safetensors

CALLS = (
    "open",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "unlink",
)  # of the system, which change files
UNCHANGED = "What was saved before is unchanged."


def save_as(path: Path, kind: str, number: int) -> None:
    """Saves as a single file, or as so many with an index; `number` is in every element."""
    tensors = {name: np.full(8, number, np.float32) for name in "abcdef"}
    size = {"one": None, "two": 96, "three": 64}[kind]
    save_safetensors(path, tensors, max_file_size=size)


def number_in(path: Path) -> int:
    """The number of the save that is read; it must be one save."""
    numbers = set()
    for given in (path, path.parent) if path.name == "model.safetensors" else (path,):
        found = load_safetensors(given)
        assert sorted(found) == list("abcdef")
        numbers |= {float(x) for values in found.values() for x in values}
    assert len(numbers) == 1, f"of two saves: {numbers}"
    return int(numbers.pop())


@contextmanager
def failing_at(
    call: int, fail: Callable[[], None], calls: Sequence[str] = CALLS
) -> Iterator[list[str]]:
    """Fails at a system call that changes files; yields the names of those that were made."""
    made: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def one(*args: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == call:
                fail()
            return real(*args, **options)

        return one

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, counting(name))
        yield made


def io_error() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


NAMES = {
    "one": ["model.safetensors"],
    "two": [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)],
    "three": [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)],
}


def assert_is_alone(file: Path, kind: str, *others: str) -> None:
    """Asserts that there are the files of one save, under the usual names or numbered ones."""
    found = [name for name in files_in(file.parent) if name not in others]
    index = [] if kind == "one" else ["model.safetensors.index.json"]
    usual = [re.sub(r"-\d\.safetensors$", ".safetensors", name) for name in found]
    assert sorted(usual) == sorted(NAMES[kind] + index), found


@pytest.mark.parametrize(("before", "after"), [("two", "two"), ("one", "two"), ("three", "one")])
def test_an_error_anywhere_leaves_one_of_two_saves(before: str, after: str, file: Path) -> None:
    call, outcomes = 0, set()
    mine = file.with_name("model-of-mine.safetensors")
    while True:
        call += 1
        for left in file.parent.iterdir():
            left.unlink()
        mine.touch()
        save_as(file, before, 1)
        error: Exception | None = None
        with failing_at(call, io_error) as made:
            try:
                save_as(file, after, 2)
            except ts.CheckpointError as raised:
                error = raised
        if len(made) < call:
            break
        where = f"call {call}, {made[call - 1]}: {error}"
        outcomes.add(number_in(file))
        # Without an error, nobody needed what failed, or a lock could not be removed.
        is_saved = error is None or f"save_safetensors: {file} is saved, but " in str(error)
        assert number_in(file) == (2 if is_saved else 1), where
        told = bool(re.search(rf"{UNCHANGED}|cannot be written( to)?: Input", str(error)))
        assert told != is_saved, where
        with warnings.catch_warnings(action="ignore", category=ts.ShardingWarning):
            save_as(file, after, 3)  # it says what could not be removed, and now is
        assert number_in(file) == 3, where
        assert_is_alone(file, after, mine.name)
    assert number_in(file) == 2
    assert_is_alone(file, after, mine.name)
    assert outcomes == {1, 2}


KILLED = """
import os, shutil, sys
from pathlib import Path
from test_replacing import failing_at, save_as
for call in range(1, 100):
    where = Path(sys.argv[1]) / f"killed-{call}"
    shutil.copytree(Path(sys.argv[1]) / "before", where)
    child = os.fork()
    if not child:
        with failing_at(call, lambda: os._exit(9), ("mkdir", "rename", "replace", "unlink")):
            save_as(where / "model.safetensors", "two", 2)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""


def test_a_kill_anywhere_leaves_one_of_two_saves(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    save_as(tmp_path / "before" / "model.safetensors", "two", 1)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2])
    found = sorted(tmp_path.glob("killed-*"), key=lambda path: int(path.name[7:]))
    assert len(found) >= 9
    numbers = [number_in(where / "model.safetensors") for where in found]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2}
    for where in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ts.ShardingWarning)  # it says what it removes
            save_as(where / "model.safetensors", "two", 3)
        assert number_in(where / "model.safetensors") == 3
        assert_is_alone(where / "model.safetensors", "two")


def test_a_reader_meanwhile_reads_one_of_two_saves(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are replaced after the index was read, and before the first tensor is."""
    save_as(file, "two", 1)
    real, numbers = _files._open_one, [2, 3]

    def then_replaced(*args: Any) -> Any:
        opened = real(*args)
        if numbers:
            save_as(file, "two", numbers.pop(0))
        return opened

    monkeypatch.setattr(_files, "_open_one", then_replaced)
    assert number_in(file) == 3


@pytest.mark.parametrize("index", ["{", '{"weight_map": {"a": "x"}}', None], ids=str)
def test_a_damaged_save_is_replaced(index: str | None, file: Path) -> None:
    save_as(file, "two", 1)
    if index is None:
        file.with_name("model-00001-of-00002.safetensors").unlink()
    else:
        file.with_name("model.safetensors.index.json").write_text(index)
    save_as(file, "two", 2)
    assert number_in(file) == 2
    assert_is_alone(file, "two")


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    for name in ("mark", ".mark", "mark.mark"):
        save_as(tmp_path / name, "one", 1)
        assert number_in(tmp_path / name) == 1
    assert files_in(tmp_path) == [".mark", "mark", "mark.mark"]

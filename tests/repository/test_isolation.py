"""The tests find nothing of the user's, and what one of them leaves behind fails the run."""

import importlib
import os
import shutil
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import annotations
import isolation
import pytest
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintViolation

ROOT = Path(__file__).parents[2]


def run_alone(code: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Runs a test with an isolation of its own, as `pytest` from a shell does in a new clone."""
    file, temporary = folder / "test_alone.py", folder / "temporary"
    file.write_text(code)
    copy = folder / "tests" / "isolation.py"
    copy.parent.mkdir()
    shutil.copyfile(isolation.__file__, copy)
    temporary.mkdir()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != isolation.STARTED and not name.startswith("PYTEST")
    }
    env = {**inherited, "PYTHONPATH": str(copy.parent), "TMPDIR": str(temporary), **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "isolation", "-W", "error"]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", file], env=env, cwd=folder, capture_output=True, text=True
    )
    assert done.stderr == "", done.stderr
    return done.returncode, done.stdout


def test_variables_and_the_home_of_the_user_are_not_seen(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "notes").write_text("of the user")
    code = """
import os, subprocess
from pathlib import Path

def test_alone():
    assert list(Path.home().iterdir()) == []
    assert not {"MIN_SHARDING_SIZE", "JAX_ENABLE_X64", "XDG_CACHE_HOME", "COLUMNS"} & {*os.environ}
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["TREESHARD_SOAK"] == "1"
    # What a program caches of fonts does not fail the run.
    subprocess.run("mkdir -p ~/.cache/fontconfig && touch ~/.cache/fontconfig/a", shell=True)
"""
    code, printed = run_alone(
        code,
        tmp_path,
        HOME=str(home),
        XDG_CACHE_HOME=str(home),
        MIN_SHARDING_SIZE="0",
        JAX_ENABLE_X64="1",
        JAX_PLATFORMS="cpu",
        COLUMNS="20",
        TREESHARD_SOAK="1",
    )
    assert code == 0, printed
    assert "1 passed" in printed
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_a_test_leaves_behind_fails_the_run(tmp_path: Path) -> None:
    code = """
import subprocess, tempfile

def test_alone():
    subprocess.run("mkdir -p ~/.cache/of-a-program", shell=True, check=True)
    tempfile.mkdtemp(prefix="forgotten-")
"""
    code, printed = run_alone(code, tmp_path)
    assert code == 1
    assert "1 passed" in printed
    assert "a test left something in the home: .cache/of-a-program" in printed
    assert "a test left something in the directory for temporary files: forgotten-" in printed
    [kept] = (tmp_path / "temporary").iterdir()
    assert f"The files of this run are in {kept}." in printed


@pytest.mark.parametrize("folder", ["/var/tmp", "~", ROOT / "docs"])
def test_a_write_elsewhere_is_an_error_at_its_line(folder: str | Path, tmp_path: Path) -> None:
    # A name of its own: what an earlier run left decides nothing.
    elsewhere = Path(folder).expanduser() / f"treeshard-{uuid.uuid4()}"
    message = f"a test writes to {elsewhere}; give it a directory of its own"
    inside = tmp_path / "inside"
    inside.touch()
    with pytest.raises(PermissionError, match=message):
        elsewhere.write_text("")
    with pytest.raises(PermissionError, match=message):
        elsewhere.mkdir()
    with pytest.raises(PermissionError, match=message):
        inside.rename(elsewhere)
    assert not elsewhere.exists()
    assert inside.read_text() == ""


def test_beartype_reads_nothing_in_a_background_thread() -> None:
    def double(x: int) -> int:
        return 2 * x

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(annotations.checked, double).result() is double
    with pytest.raises(BeartypeCallHintParamViolation):
        annotations.checked(double)("2")


def test_every_annotation_of_a_package_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_test.py").write_text("""
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nowhere import Missing

Nested = int | list["Nested"]

@dataclass
class Point:
    x: int

    @property
    def shown(self) -> int:
        return str(self.x)

def of_an_int(x: int, y: "Missing" = None) -> int:
    def half() -> int:
        return x / 2
    return half()

def deep(x: Nested) -> None:
    pass
""")
    monkeypatch.syspath_prepend(tmp_path)
    with annotations.checking("of_a_test"):
        module = importlib.import_module("of_a_test")
    module.deep([1, [2]])
    for wrong in (
        lambda: module.of_an_int("2"),
        lambda: module.of_an_int(2),  # the function inside returns a float
        lambda: module.Point("2"),
        lambda: module.Point(2).shown,
        lambda: module.deep(["2"]),
    ):
        with pytest.raises(BeartypeCallHintViolation):
            wrong()
    with annotations.off():
        assert module.of_an_int(2) == 1.0
    assert list((tmp_path / "__pycache__").glob("of_a_test*")) == []

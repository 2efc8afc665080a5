"""The tests find nothing of the user's, and what one of them leaves behind fails the run."""

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import isolation
import pytest


def run_alone(code: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Runs a test with an isolation of its own."""
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


@pytest.mark.parametrize("folder", ["/var/tmp", "~"])
def test_a_write_elsewhere_is_an_error_at_its_line(folder: str) -> None:
    elsewhere = Path(folder).expanduser() / f"treeshard-{uuid.uuid4()}"
    message = f"a test writes to {elsewhere}; give it a directory of its own"
    with pytest.raises(PermissionError, match=message):
        elsewhere.write_text("")
    with pytest.raises(PermissionError, match=message):
        elsewhere.mkdir()
    assert not elsewhere.exists()

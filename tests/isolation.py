"""Tests find nothing of the user's, and leave nothing behind.

The home is new and stays empty, temporary files have a directory of their own, and variables that
change results are gone. A write by Python elsewhere is an error at its line, except for what git
ignores. For what other programs and libraries in C++ write, the end of the run looks at the home
and at the directory for temporary files.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STARTED = "TREESHARD_TESTS"  # the directory of a run, for the processes that it starts
CHANGES_RESULTS = re.compile(
    "(JAX|XLA|TF|TPU|LIBTPU|XDG|EQX|JAXTYPING|PYTHONWARNINGS|MIN_SHARDING_SIZE|LOG_SHARDING_MOVE"
    "|TREESHARD_UPDATE_PLANS|COLUMNS|LINES|NO_COLOR|FORCE_COLOR)(_|$)"
)
KEPT = {"JAX_PLATFORMS"}
# What other programs would keep in the home, or in /tmp/tpu_logs. pip asks rustc for its version.
OF_LIBRARIES = {
    "MPLCONFIGDIR": "matplotlib",
    "IPYTHONDIR": "ipython",
    "RUSTUP_HOME": "rustup",
    "TPU_LOG_DIR": "libtpu",
}
# One LLVM module for a program takes a fifth less time than many, which would be compiled beside
# each other.
ONE_MODULE = "--xla_cpu_parallel_codegen_split_count=1"
# OpenBLAS starts a thread for each core, and each of them waits busily for the others, which share
# their core with another worker: a norm takes four times as long. Numpy reads it once, so it holds
# for the workers and processes that a run starts.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
# XLA's older code generator for the CPU compiles the same HLO in half the time; 0.11 lacks it.
QUICK_CODE = "--xla_cpu_use_fusion_emitters=false"
# matplotlib asks fontconfig for fonts, which keeps what it reads and has no variable to say where.
CACHE_OF_FONTS = ".cache/fontconfig"
_OPENED = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_WRITES = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}  # event -> which argument


def start() -> Path:
    """Isolates this process and those that it starts. Returns the directory of the run."""
    if STARTED in os.environ:
        return Path(os.environ[STARTED])
    for name in list(os.environ):
        if CHANGES_RESULTS.match(name) and name not in KEPT:
            del os.environ[name]
    directory = Path(tempfile.mkdtemp(prefix="treeshard-tests-"))
    home, temporary = directory / "home", directory / "tmp"
    for new in (home, temporary):
        new.mkdir()
    directory.chmod(0o755)  # tests of permissions enter it as another user
    of_libraries = {variable: str(temporary / name) for variable, name in OF_LIBRARIES.items()}
    os.environ |= {STARTED: str(directory), "HOME": str(home), "TMPDIR": str(temporary)}
    os.environ |= ONE_THREAD
    older = [QUICK_CODE] if version("jaxlib") < "0.11" else []
    os.environ["XLA_FLAGS"] = " ".join([ONE_MODULE, *older])
    # In the virtual environment, so that the next run need not download again.
    os.environ |= {**of_libraries, "PIP_CACHE_DIR": str(Path(sys.prefix) / "pip-cache")}
    tempfile.tempdir = None  # which Python has read already
    return directory


def forbid_writes_outside(directory: Path) -> None:
    """Makes a write of Python's an error, but for those to the run's directory for temporary
    files, to what git ignores and to devices."""
    ignored = (sys.prefix, ROOT / ".hypothesis", ROOT / ".pytest_cache")
    allowed = (
        *(f"{path}/" for path in (directory / "tmp", *ignored, "/dev", "/proc")),
        f"{ROOT}/pytest-cache-files-",  # pytest renames it to .pytest_cache, where there is none
    )

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if not arguments[2] & _OPENED:
                return
            path = arguments[0]
        elif event in _WRITES:
            path = arguments[_WRITES[event]]
        else:
            return
        if isinstance(path, int):
            return
        absolute = os.path.abspath(os.fsdecode(path))
        if not f"{absolute}/".startswith(allowed) and "__pycache__" not in absolute:
            raise PermissionError(f"a test writes to {absolute}; give it a directory of its own")

    sys.addaudithook(check)


def left_behind(directory: Path) -> Iterator[str]:
    """What a run wrote that it should not have."""
    for path in sorted((directory / "home").rglob("*")):
        name = f"{path.relative_to(directory / 'home')}"
        is_parent = path.is_dir() and any(path.iterdir())
        if not is_parent and not name.startswith(CACHE_OF_FONTS):
            yield f"in the home: {name}"
    for path in sorted((directory / "tmp").iterdir()):
        if not path.name.startswith("pytest-of-") and path.name not in OF_LIBRARIES.values():
            yield f"in the directory for temporary files: {path.name}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that left something behind, and removes the directory of one that passed."""
    if hasattr(session.config, "workerinput"):  # the run ends where it started
        return
    left = list(left_behind(DIRECTORY))
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    for fact in left:
        terminal.write_line(f"a test left something {fact}", red=True)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(DIRECTORY)
    else:
        terminal.write_line(f"The files of this run are in {DIRECTORY}.")


DIRECTORY = start()
forbid_writes_outside(DIRECTORY)

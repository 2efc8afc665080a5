"""Starts real processes that find each other through JAX's runtime, and ends them all.

A worker module has functions `check_*(context)`, which every process runs in the order in which
they stand. A test module launches it once and reads the verdicts one by one.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]
# For workers that measure their memory. glibc gives memory above this size, in bytes, back as soon
# as it is freed. By default the size grows as a process runs, and what is kept of it depends on how
# the threads took turns.
EXACT_MEMORY = MappingProxyType({"MALLOC_MMAP_THRESHOLD_": "65536"})
# Programs of tests are compiled more often than they run. Their collectives are the same.
QUICK_COMPILES = MappingProxyType({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
PYTHON = (sys.executable, "-W", "error::DeprecationWarning")
GRACE = 5.0  # seconds that the others have to end once one process has failed


class Verdicts(NamedTuple):
    """What the processes of one launch reported.

    Attributes:
        codes: Their exit codes; negative for a signal, as in `subprocess`.
        logs: What each printed.
        checks: For each process, check -> `"passed"` or its traceback.
    """

    codes: list[int]
    logs: list[str]
    checks: list[dict[str, str]]

    def assert_passed(self, check: str) -> None:
        """Fails, with what every process printed, unless every process passed the check."""
        found = [one.get(check, "not reached") for one in self.checks]
        if any(verdict != "passed" for verdict in found):
            told = "\n".join(f"--- process {i}: {text}" for i, text in enumerate(found))
            raise AssertionError(f"{check}:\n{told}\n{self.everything_printed()}")

    def everything_printed(self) -> str:
        pairs = zip(self.codes, self.logs, strict=True)
        return "\n".join(f"=== process {i}, exit {c}:\n{log}" for i, (c, log) in enumerate(pairs))


def checks_of(*modules: ModuleType) -> list[str]:
    """The checks of worker modules, in the order in which they stand."""
    return [name for module in modules for name in vars(module) if name.startswith("check_")]


def launch(
    modules: ModuleType | Sequence[ModuleType],
    directory: Path,
    *,
    processes: int = 2,
    devices: int = 4,
    args: Sequence[str] = (),
    timeout: float = 300.0,
    env: Mapping[str, str] = MappingProxyType({}),
    prefixes: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> Verdicts:
    """Runs the checks of worker modules in fresh processes.

    Args:
        modules: One or several; have functions `check_*`.
        directory: Where logs go, and what the workers may write to.
        processes: How many.
        devices: Simulated devices per process.
        args: What the workers find as `context.args`.
        timeout: Seconds until everything is ended.
        env: What is added to the environment, or replaces `QUICK_COMPILES` in it.
        prefixes: What the commands of some processes begin with, as `unshare` does.
    """
    several = [modules] if isinstance(modules, ModuleType) else modules
    names = ",".join(module.__name__ for module in several)
    directory.mkdir(parents=True, exist_ok=True)
    logs = [directory / f"process-{i}.log" for i in range(processes)]
    reports = [directory / f"process-{i}.jsonl" for i in range(processes)]

    def launch_once() -> Verdicts:
        port = free_port()
        started = []
        try:
            for i in range(processes):
                reports[i].unlink(missing_ok=True)
                where = map(str, (port, i, processes, devices, directory))
                worker = [*PYTHON, "-m", "tests.multiprocess.worker", names, *where, *args]
                command = [*prefixes.get(i, ()), *worker]
                started.append(start(command, logs[i], {**QUICK_COMPILES, **env}))
            wait_for_all(started, timeout)
        finally:
            end(started)
        codes = [process.returncode for process in started]
        texts = [log.read_text(errors="replace") for log in logs]
        return Verdicts(codes, texts, [_read(report) for report in reports])

    verdicts = launch_once()
    if any("address already in use" in log.lower() for log in verdicts.logs):
        return launch_once()  # somebody took the port between its choice and its use
    return verdicts


def tests_of(*modules: ModuleType, **options: Any) -> tuple[Any, Any]:
    """A fixture that launches worker modules with `options`, and a test of each of their checks."""
    import pytest  # benchmarks launch processes too, where pytest is not installed

    name = f"{[module.__name__ for module in modules]}{sorted(options.items())}"

    @pytest.fixture(scope="module", name=name)
    def launched(tmp_path_factory: Any) -> Verdicts:
        return launch(modules, tmp_path_factory.mktemp("launched"), **options)

    @pytest.mark.parametrize("check", checks_of(*modules))
    def test(check: str, request: Any) -> None:
        request.getfixturevalue(name).assert_passed(check)

    return launched, test


def _read(report: Path) -> dict[str, str]:
    if not report.exists():
        return {}
    # A process that was killed may have left half a line.
    lines = [line for line in report.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return dict(map(json.loads, lines))


# ------------------------------------------------------------------ for tests with their own ways


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(
    command: Sequence[str], log: Path, more: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.Popen[bytes]":
    """Starts a process in a session of its own, so that what it starts can be ended with it."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
        **more,
    }
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for_all(started: Sequence["subprocess.Popen[bytes]"], timeout: float) -> None:
    """Waits until all have ended, the time is over, or the grace after a failure is."""
    until = time.monotonic() + timeout
    failed = False
    while time.monotonic() < until:
        codes = [process.poll() for process in started]
        if None not in codes:
            return
        if not failed and any(code not in (None, 0) for code in codes):
            failed, until = True, min(until, time.monotonic() + GRACE)
        time.sleep(0.02)


def end(started: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""Runs a benchmark as two processes of four simulated devices each."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from tests.multiprocess.launcher import end, free_port, start, wait_for_all
from tests.multiprocess.worker import join


def as_two(module: str, *args: str, timeout: float = 900.0) -> list[Any]:
    """Starts `python -m module --port=... --index=... args` twice.

    Returns:
        What each wrote as its last line, read as JSON.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as where:
        logs = [Path(where) / f"{i}.log" for i in range(2)]
        command = [sys.executable, "-m", module, f"--port={port}", *args]
        started = [start([*command, f"--index={i}"], log) for i, log in enumerate(logs)]
        try:
            wait_for_all(started, timeout)
        finally:
            end(started)
        if any(process.returncode for process in started):
            raise RuntimeError("it failed:\n" + "\n".join(log.read_text() for log in logs))
        return [json.loads(log.read_text().strip().splitlines()[-1]) for log in logs]


def as_one_of_two(port: str, index: int, measure: Callable[[], Any]) -> None:
    """Joins the other process, measures, and writes what was measured as the last line."""
    join(port, index, 2, 4)
    found = measure()
    jax.distributed.shutdown()
    print(json.dumps(found), flush=True)

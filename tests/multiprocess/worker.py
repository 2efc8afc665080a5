"""One process of a launch: joins the others, runs the checks, reports each as it ends.

python -m tests.multiprocess.worker MODULE[,MODULE] PORT INDEX COUNT DEVICES DIRECTORY [ARG ...]
"""

import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

import treeshard as ts
from treeshard._core import meetings


class Context(NamedTuple):
    """What a check is given.

    Attributes:
        index: This process among the others.
        count: How many there are.
        directory: One that all share.
        args: What the launch passed.
    """

    index: int
    count: int
    directory: Path
    args: list[str]


@contextmanager
def arriving_last(context: Context, last: int, what: str) -> Iterator[None]:
    """One process makes the call inside only after all others have given it up.

    Args:
        context: Of the check.
        last: The process that waits for the others.
        what: Another word for each use, of which files are named.
    """
    marks = [context.directory / f"{what}-given-up-by-{i}" for i in range(context.count)]
    if context.index != last:
        try:
            yield
        finally:
            marks[context.index].touch()
        return
    while not all(mark.exists() for i, mark in enumerate(marks) if i != last):
        time.sleep(0.01)
    yield


def start_again(check: str = "") -> None:
    """Forgets all meetings and failures, as a run that starts again. All processes call it."""
    # This module is imported twice, so the count is kept in the name.
    name, _, number = meetings._process.names.rstrip("/").partition(" ")
    meetings._process.start_again(
        f"treeshard-after-{check} 0/" if check else f"{name} {int(number) + 1}/"
    )


def without_lines(text: str) -> str:
    """A message without the lines of the calls that it names."""
    return re.sub(r", tests/multiprocess/\w+\.py:\d+ \([^()]*\)", "", text)


def error_of(call: Callable[[], Any], kind: type[Exception] = ts.ProcessError) -> str:
    """What a call says as it fails; after that the processes start again."""
    import pytest  # benchmarks join processes too, where pytest is not installed

    with pytest.raises(kind) as raised:
        call()
    start_again()
    return str(raised.value)


def join(port: str, index: int, count: int, devices: int, heartbeat: int = 20) -> None:
    """Joins the other processes, with timeouts that suit a test."""
    ts.simulate_devices(devices)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=count,
        process_id=index,
        initialization_timeout=60,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=20,
    )


def main(names: str, port: str, index: str, count: str, devices: str, where: str, *args: str):
    context = Context(int(index), int(count), Path(where), list(args))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells disable it in background jobs
    with open(context.directory / f"process-{index}.jsonl", "w", buffering=1) as report:
        try:
            if context.count > 1:
                join(port, context.index, context.count, int(devices))
            else:
                ts.simulate_devices(int(devices))
            for module in map(importlib.import_module, names.split(",")):
                start_again(module.__name__)
                for check in [check for check in vars(module) if check.startswith("check_")]:
                    try:
                        getattr(module, check)(context)
                    except BaseException:
                        report.write(json.dumps([check, traceback.format_exc()]) + "\n")
                        raise
                    report.write(json.dumps([check, "passed"]) + "\n")
                    start_again(check)
            if context.count > 1:
                jax.distributed.shutdown()
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)  # the way out through Python would wait for the others


if __name__ == "__main__":
    main(*sys.argv[1:])

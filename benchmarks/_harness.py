"""Times callables side by side on a noisy machine, and prints what came out.

Calls are interleaved, so that a slow minute hits all of them, and compared as ratios of
medians, so that the machine's speed cancels.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One line of a benchmark's table.

    Attributes:
        case: What was done, and in which unit.
        measured: The figure.
        reach: The figure to reach, such as `"<= 0.6"`.
        vs: Other ways of doing the same, and their figures.
    """

    case: str
    measured: float
    reach: str = ""
    vs: str = ""


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """The median seconds of each named call, over interleaved rounds after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            gc.collect()
            start = time.perf_counter()
            result = call()
            elapsed = time.perf_counter() - start
            del result  # not on the clock, and not alive during the next call
            if round_:
                seconds[name].append(elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}


def ratios(
    calls: Mapping[str, Callable[[], Any]], floor: str, rounds: int = 15
) -> dict[str, float]:
    """The median of each call over the median of the call named `floor`."""
    found = medians(calls, rounds)
    return {name: found[name] / found[floor] for name in calls}


def report(
    title: str, rows: list[Row], packages: tuple[str, ...] = ("jax", "jaxlib", "numpy")
) -> None:
    """Prints the table, or JSON with `--json`, with versions and machine at the end."""
    setting = _setting(packages)
    if options().json:
        print(json.dumps({"title": title, "rows": [r._asdict() for r in rows], "on": setting}))
        return
    cells = [("case", "measured", "reach", "vs.")]
    cells += [(row.case, f"{row.measured:.3g}", row.reach, row.vs) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    cells.insert(1, tuple("-" * width for width in widths))
    print(title)
    for line in cells:
        print(" | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    print(", ".join(f"{name} {text}" for name, text in setting.items()))


def options(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The command line: `--json` and `--rounds`, and what `parser` adds."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one line of JSON, for scripts")
    parser.add_argument("--rounds", type=int, default=15, help="how often each case is timed")
    return parser.parse_known_args(sys.argv[1:])[0]


def _setting(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    cores = f"{os.cpu_count()} cores"
    return found | {"machine": f"{platform.system()} {platform.machine()}", "cpu": cores}

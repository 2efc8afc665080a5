"""Times callables side by side on a noisy machine, and prints what came out.

Calls are interleaved, so that a slow minute hits all of them, in another order each round, since
what one call leaves behind weighs on the next. They are compared round by round, so that the
machine's speed cancels.
"""

import argparse
import ctypes
import gc
import json
import operator
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Figure(float):
    """The median of what was measured several times, which it keeps.

    One figure over another is the median of the ratios round by round.

    Attributes:
        samples: What was measured, in order.
    """

    samples: tuple[float, ...]

    def __new__(cls, samples: Iterable[float]) -> "Figure":
        samples = tuple(samples)
        figure = super().__new__(cls, statistics.median(samples))
        figure.samples = samples
        return figure

    @property
    def spread(self) -> tuple[float, float] | None:
        """The quartiles; of a single sample, nothing."""
        if len(self.samples) < 2:
            return None
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def __add__(self, other: float) -> "Figure":
        return Figure(map(operator.add, self.samples, self._beside(other)))

    def __mul__(self, other: float) -> "Figure":
        return Figure(map(operator.mul, self.samples, self._beside(other)))

    def __truediv__(self, other: float) -> "Figure":
        return Figure(map(operator.truediv, self.samples, self._beside(other)))

    def _beside(self, other: float) -> tuple[float, ...]:
        if not isinstance(other, Figure):
            return (other,) * len(self.samples)
        if len(other.samples) != len(self.samples):  # not of the same rounds
            return (float(other),) * len(self.samples)
        return other.samples


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
    vs: str | Mapping[str, float] = ""


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int = 15) -> dict[str, Figure]:
    """The median seconds of each named call, over shuffled rounds after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name in shuffled(calls, round_):
            gc.collect()
            start = time.perf_counter()
            result = calls[name]()
            elapsed = time.perf_counter() - start
            del result  # not on the clock, and not alive during the next call
            if round_:
                seconds[name].append(elapsed)
    return {name: Figure(times) for name, times in seconds.items()}


def shuffled(names: Iterable[str], round_: int) -> list[str]:
    """The names in the order of one round, which is the same on every process."""
    names = list(names)
    return random.Random(round_).sample(names, len(names))


def ratios(
    calls: Mapping[str, Callable[[], Any]], floor: str, rounds: int = 15
) -> dict[str, Figure]:
    """Each call over the call named `floor`: the median of the ratios round by round."""
    found = medians(calls, rounds)
    return {name: found[name] / found[floor] for name in calls}


# ------------------------------------------------------------------ memory


def trim() -> None:
    """Gives freed memory back to the system, so that what is resident is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peak_of(call: Callable[[], Any]) -> tuple[float, float]:
    """The seconds that a call takes, and the MiB of resident memory that it adds at most."""
    trim()
    before = resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    begin = time.perf_counter()
    result = call()
    jax.block_until_ready(result)
    return time.perf_counter() - begin, resident_mib("VmHWM") - before


def resident_mib(field: str = "VmRSS") -> float:
    """The MiB of this process that are resident, or that were at most (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+)", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) / 1024


# ------------------------------------------------------------------ what came out


def report(
    title: str, rows: list[Row], packages: tuple[str, ...] = ("jax", "jaxlib", "numpy")
) -> None:
    """Prints the table, or JSON with `--json`, with versions and machine at the end.

    With `--save` the JSON also goes to a file.
    """
    chosen = options()
    found = {
        "title": title,
        "command": _command(),
        "commit": _commit(),
        "date": date.today().isoformat(),
        "rows": [_as_json(row) for row in rows],
        "on": _setting(packages),
    }
    if chosen.save:
        chosen.save.parent.mkdir(parents=True, exist_ok=True)
        chosen.save.write_text(_lines(found), encoding="utf-8")
    if chosen.json:
        print(json.dumps(found))
        return
    cells = [("case", "measured", "quartiles", "reach", "vs.")]
    cells += [as_cells(row) for row in found["rows"]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    cells.insert(1, tuple("-" * width for width in widths))
    print(title)
    for line in cells:
        print(" | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    print(", ".join(f"{name} {text}" for name, text in found["on"].items()))


def options(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The command line: `--json`, `--save` and `--rounds`, and what `parser` adds."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one line of JSON, for scripts")
    parser.add_argument("--save", type=Path, help="a file for the JSON, beside what is printed")
    parser.add_argument("--rounds", type=int, default=15, help="how often each case is timed")
    return parser.parse_known_args(sys.argv[1:])[0]


def as_cells(row: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """A row of the JSON as it stands in a table."""
    vs = row["vs"]
    if not isinstance(vs, str):
        vs = ", ".join(f"{name} {_with_quartiles(one)}" for name, one in vs.items())
    reach = ", ".join(filter(None, [row["reach"], verdict(row)]))
    return row["case"], shown(row["measured"]), _quartiles(row), reach, vs


def _quartiles(figure: Mapping[str, Any]) -> str:
    return "" if figure["spread"] is None else " to ".join(map(shown, figure["spread"]))


def _with_quartiles(figure: Mapping[str, Any]) -> str:
    quartiles = _quartiles(figure)
    return shown(figure["measured"]) + (f" ({quartiles})" if quartiles else "")


def shown(figure: float) -> str:
    """Three digits, or all of a large number."""
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"


def verdict(row: Mapping[str, Any]) -> str:
    """`missed`, or `unclear` if the quartiles are on both sides of the figure to reach.

    Empty if the figure is reached, or there is none to reach.
    """
    if not row["reach"]:
        return ""
    wanted = re.fullmatch(r"(<=|>=|<|>|)\s*([\d.e-]+)", row["reach"])
    if wanted is None:
        raise ValueError(f"{row['reach']!r} is not a figure to reach, such as '<= 1.05'.")
    compare = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
    reached = {
        compare.get(wanted[1], operator.eq)(figure, float(wanted[2]))
        for figure in (row["measured"], *(row["spread"] or ()))
    }
    return "unclear" if len(reached) == 2 else "" if reached == {True} else "missed"


def _lines(found: Mapping[str, Any]) -> str:
    """JSON with a line for each row, so that a change of one figure is one changed line."""
    head = [f" {json.dumps(key)}: {json.dumps(found[key])}," for key in found if key != "rows"]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["rows"])
    return "\n".join(["{", *head, ' "rows": [', rows, " ]", "}"]) + "\n"


def _as_json(row: Row) -> dict[str, Any]:
    vs = row.vs
    if not isinstance(vs, str):
        vs = {name: _figure_as_json(one) for name, one in vs.items()}
    return {"case": row.case, **_figure_as_json(row.measured), "reach": row.reach, "vs": vs}


def _figure_as_json(figure: float) -> dict[str, Any]:
    spread = figure.spread if isinstance(figure, Figure) else None
    rounds = len(figure.samples) if isinstance(figure, Figure) else 1
    return {
        "measured": _digits(figure),
        "spread": None if spread is None else [*map(_digits, spread)],
        "rounds": rounds,
    }


def _digits(figure: float) -> float:
    """Four digits of a measurement; all of a count."""
    return int(figure) if float(figure).is_integer() else float(f"{figure:.4g}")


def _command() -> str:
    """What to type for the same, less what only says where it goes."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    chosen = " ".join(sys.argv[1:])
    chosen = re.sub(r"--json|--save[ =]\S+", "", chosen)
    return " ".join(["python -m", spec.name if spec else Path(sys.argv[0]).stem, *chosen.split()])


def _commit() -> str:
    """The commit that was measured; with a `+` if what it measures was changed since."""
    here = Path(__file__).parent.parent

    def git(*args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", "treeshard", "benchmarks/*.py").returncode
    return git("rev-parse", "--short=10", "HEAD").stdout.strip() + "+" * bool(changed)


def _setting(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("treeshard", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    machine = f"{platform.system()} {platform.machine()}"
    return found | {"machine": machine, "cpu": f"{os.cpu_count()} cores{_processor()}"}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f" of {' '.join(found[1].split())}" if found else ""

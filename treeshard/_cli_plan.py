"""`treeshard plan`. Starts no backend and needs no devices."""

import argparse
import json
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from treeshard._describe import human_bytes
from treeshard._errors import ShardingRuleError
from treeshard._literals import parse_bytes
from treeshard._logical import logical_axis_rules
from treeshard._plan import Plan, plan
from treeshard._plan_files import read_rules_file, read_shapes
from treeshard._rules import read_rules

# How long one pattern may take over all paths. Real ones take milliseconds.
PATTERN_SECONDS = 5.0


def run_plan(options: argparse.Namespace) -> tuple[str, int]:
    """Prints how a tree is sharded. Returns 1 if the plan has errors or does not fit."""
    memory = None if options.memory is None else parse_bytes(options.memory)
    shapes = read_shapes(options.shapes)
    rules, min_size, logical = read_rules_file(options.rules)
    min_size = min_size if options.min_size is None else options.min_size
    _check_patterns(rules, shapes)
    with nullcontext() if logical is None else logical_axis_rules(logical):
        decided = plan(shapes, rules, options.mesh, min_size=min_size)
    fits = None if memory is None else decided.bytes_per_device() <= memory
    errors = any(finding.severity == "error" for finding in decided.findings)
    text = _as_json(decided, memory) if options.json else _as_text(decided, memory)
    return text, int(errors or fits is False)


def _as_text(decided: Plan, memory: int | None) -> str:
    parts = [str(decided)]
    if decided.findings:
        parts.append("\n" + "\n".join(map(str, decided.findings)))
    if memory is not None:
        needed = decided.bytes_per_device()
        verb = "It fits" if needed <= memory else "It does NOT fit"
        parts.append(f"\n{verb}: {human_bytes(needed)} of {human_bytes(memory)} on a device.")
    return "\n".join(parts)


def _as_json(decided: Plan, memory: int | None) -> str:
    needed = decided.bytes_per_device()
    report: dict[str, Any] = {
        "plan": json.loads(decided.to_json()),
        "findings": [finding._asdict() for finding in decided.findings],
        "bytes_per_device": needed,
    }
    if memory is not None:
        report |= {"memory": memory, "fits": needed <= memory}
    return json.dumps(report)


# ------------------------------------------------------------------ patterns without end


def _check_patterns(rules: Sequence[tuple[Any, Any]], paths: Iterable[str]) -> None:
    """Tries every pattern on every path, on a clock: some regular expressions take years."""
    for index, (pattern, _) in enumerate(read_rules(rules)):
        path = ""
        try:
            with _at_most(PATTERN_SECONDS):
                for path in paths:
                    pattern.search(path)
        except TimeoutError:
            raise ShardingRuleError(
                f"rule {index}: the pattern {pattern.pattern!r} takes more than"
                f" {PATTERN_SECONDS:g} s, on the path {path!r}. Avoid repeats inside of repeats,"
                " such as (a+)+."
            ) from None


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` when the time is over, even inside of `re`, which heeds signals.
    (Windows and other threads have none, and there is no limit there.)"""
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

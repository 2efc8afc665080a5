"""Patterns from the command line and from files of rules: one that explodes is ended, and named.

Python matches by backtracking: `(a+)+$` takes twice as long for each further `a` of a path that
ends otherwise, which is years for a long one. Nothing tells beforehand which patterns do.
"""

import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from treeshard.errors import FormatError

SECONDS = 10.0


@contextmanager
def in_time(what: str) -> Iterator[None]:
    """Raises `FormatError` if its block, which matches one pattern, takes more than `SECONDS`.

    Only the main thread receives signals: elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # While it matches, `re` lets handlers of signals run, and ends if one raises.
    def end(number: int, frame: Any) -> NoReturn:
        raise FormatError(
            f"{what} takes more than {SECONDS:g} s to match the paths: it backtracks. A repeated"
            " group that has a repetition at its end, such as (a+)+, takes twice as long for each"
            " character: write a+."
        )

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_rules(file: Path, rules: Sequence[tuple[str, Any]], paths: Iterable[str]) -> None:
    """Matches the patterns of rules as `plan` does, each in time. Malformed ones are left to it."""
    left = list(paths)
    for index, (pattern, _) in enumerate(rules):
        try:
            search = re.compile(pattern).search
        except (re.error, OverflowError, RecursionError):
            continue
        with in_time(f"{file}: rules[{index}].pattern {pattern!r}"):
            left = [path for path in left if not search(path)]

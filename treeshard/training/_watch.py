"""Says where all processes are when a step does not return.

JAX starts a program and returns before it ends, so the line at which a hang shows is often the one
that first reads a result. The arrays that a step returned say whether its program has ended.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import tree_leaves

from treeshard._core.whereabouts import listen, raise_alarm, set_step, shown_seconds


class Watch:
    """Watches the calls of one step of a training loop.

    Args:
        name: Of the step, for messages.
        seconds: After how many, since the last step that ended, all processes say where they are.
    """

    def __init__(self, name: str, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"{name}: watch={seconds!r} must be a positive number of seconds.")
        self._name, self._seconds = name, seconds
        self._started = 0  # steps, of which the last may be running
        self._is_inside = False  # of the call of the last
        # The steps that were called and may not have ended: number, and a small result.
        self._running: deque[tuple[int, Any]] = deque()
        self._since = time.monotonic()  # when the step that runs now began, at the earliest
        self._lock = threading.Lock()
        self._told = 0  # the last step of which an alarm was raised
        listen(self._look)

    @contextmanager
    def call(self) -> Iterator[list[Any]]:
        """For the time of a call. What it returned is appended to the list."""
        self._end_steps()
        if not self._running:
            self._since = time.monotonic()
        self._started += 1
        self._is_inside = True
        set_step(self._text)
        returned: list[Any] = []
        try:
            yield returned
            small = _smallest(returned)
            if small is not None:
                self._running.append((self._started, small))
        finally:
            self._is_inside = False

    def _end_steps(self) -> int:
        """Forgets the steps that have ended; returns the number of the one that runs, or 0."""
        with self._lock:  # the thread that looks calls this too
            while self._running and _has_ended(self._running[0][1]):
                self._running.popleft()
                self._since = time.monotonic()
            if self._running:
                return self._running[0][0]
            return self._started if self._is_inside else 0

    def _text(self) -> str:
        number = self._end_steps()
        if number:
            return f"in step {number} of {self._name}"
        return f"after step {self._started} of {self._name}"

    def _look(self, now: float) -> None:
        number = self._end_steps()
        if not number or number == self._told or now - self._since < self._seconds:
            return
        self._told = number
        me = jax.process_index()
        seconds = shown_seconds(now - self._since)
        compiles = " (which compiles first)" if number == 1 else ""
        what = f"step {number} of {self._name}{compiles} has not returned for {seconds}"
        raise_alarm(f"{self._name}/{number}", f"{what} on process {me}")


def _smallest(tree: Any) -> Any:
    """A live array of few bytes: it is kept until its program has ended."""
    live = filter(_is_live, tree_leaves(tree))
    return min(live, key=lambda x: x.nbytes, default=None)


def _is_live(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _has_ended(x: Any) -> bool:
    try:
        return x.is_ready()
    except RuntimeError:  # deleted: it was donated to a later step, which then tells
        return True

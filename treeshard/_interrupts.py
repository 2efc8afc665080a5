"""Defers Ctrl-C to the end of a block, so that background threads are not orphaned."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Raises a Ctrl-C that arrives during the block after it; a second one is raised at once.

    Outside the main thread, which alone receives signals, it does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[Any] = []

    def later(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        came.append(frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(signal.SIGINT, came[0])

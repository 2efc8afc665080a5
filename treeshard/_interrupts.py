"""Ctrl-C at a moment that suits: what threads have begun would go on without whoever is gone."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """Lets Ctrl-C come after its block, not in the middle; a second one comes at once.

    In a thread, where signals do not come, it does nothing.
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

"""Threads that may begin at any time, and that end before the process does; and Ctrl-C beside them.

Those of `concurrent.futures` do not begin once the main thread has ended. Its `Future`, and each
`threading.Condition`, also takes a lock in Python code: a Ctrl-C between taking it and entering the
`with` block leaves it taken, and the thread that would end waits for it forever.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_AGAIN = 0.2  # seconds


class Outcome(Generic[T]):
    """What a call returns or raises, perhaps in a thread. A Ctrl-C may interrupt any of its waits.

    Attributes:
        done: Whether the call has ended.
    """

    def __init__(self) -> None:
        self.done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._running = threading.Lock()  # released once, when the call ends
        self._running.acquire()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Makes the call, once."""
        try:
            self._value = function(*args, **kwargs)
        except BaseException as error:
            self._error = error
        self.done = True
        self._running.release()

    def wait(self) -> None:
        """Returns once the call has ended."""
        while not self.done:
            # A waiter that is interrupted between the two calls keeps the lock: others look again.
            if self._running.acquire(timeout=_LOOK_AGAIN):
                self._running.release()

    def error(self) -> BaseException | None:
        """What the call has raised. Waits for its end."""
        self.wait()
        return self._error

    def result(self) -> T:
        """What the call has returned, or raises what it has raised. Waits for its end."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


def in_thread(
    running: list[Any], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Outcome[T]:
    """Calls a function in a thread, which Python joins before the process ends.

    The outcome is added to `running` first, so that whoever catches a Ctrl-C can wait for it. Where
    there cannot be a thread, as in `atexit`, the function is called here.
    """
    outcome: Outcome[T] = Outcome()
    here = threading.current_thread()
    has_ended = here is threading.main_thread() and not here.is_alive()
    name = f"treeshard-{function.__name__}"
    thread = threading.Thread(
        target=outcome.run, args=(function, *args), kwargs=kwargs, name=name, daemon=False
    )
    with interrupts_deferred():
        running.append(outcome)
        try:
            if not has_ended:
                thread.start()
        except RuntimeError:  # there are no more threads
            has_ended = True
    if has_ended:
        outcome.run(function, *args, **kwargs)
    return outcome


@contextmanager
def interrupts_deferred(*, at_most: int | None = None) -> Iterator[None]:
    """Handles a Ctrl-C that arrives during the block after it.

    If more than `at_most` arrive, the last one is handled at once instead. Outside the main thread,
    which alone receives signals, it does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    # A handler that C code installed is `None`, and ignoring the signal is a number.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[Any] = []

    def are_too_many() -> bool:
        return at_most is not None and len(frames) > at_most

    def defer(number: int, frame: Any) -> None:
        frames.append(frame)
        if are_too_many():
            handler(number, frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if frames and not are_too_many():
            handler(signal.SIGINT, frames[0])

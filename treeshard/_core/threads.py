"""Threads that may begin at any time, Ctrl-C beside them, and the end of the process.

Threads of `concurrent.futures` do not begin once the main thread has ended. Its `Future`, and each
`threading.Condition`, also takes a lock in Python code: a Ctrl-C between taking it and entering the
`with` block leaves it taken, and the thread that would end waits for it forever.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_AGAIN = 0.2  # seconds


class Outcome(Generic[T]):
    """What a call returns or raises, perhaps in a thread. A Ctrl-C may interrupt its waits."""

    def __init__(self) -> None:
        self.done = False  # whether the call has ended
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


def start_thread(
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


class HeldInterrupts:
    """A Ctrl-C that arrives between `hold` and `release` is handled by `release`.

    If more than `at_most` arrive, the last one is handled at once instead. In threads other than
    the main thread, which alone receives signals, nothing is held.
    """

    def __init__(self, at_most: int | None = 1) -> None:
        self._at_most = at_most
        self._handler: Any = None  # the one that was there, once `install` has put another there
        self._is_holding = False
        self._frames: list[Any] = []  # in which the signals arrived that are held

    def install(self) -> None:
        """Must be called before `hold`. Later calls do nothing."""
        handler = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        # A handler that C code installed is `None`, and ignoring the signal is a number.
        if is_main and callable(handler) and self._handler is None:
            self._handler = handler
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_holding and (self._at_most is None or len(self._frames) < self._at_most):
            self._frames.append(frame)
        else:
            self._frames.clear()  # this one stands for all
            self._handler(number, frame)

    def hold(self) -> None:
        self._is_holding = True

    def release(self) -> None:
        self._is_holding = False
        frames, self._frames = self._frames, []
        if frames:
            self._handler(signal.SIGINT, frames[0])

    def close(self) -> None:
        """Releases, and restores the handler that was there before `install`."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self.release()


@contextmanager
def interrupts_deferred(*, at_most: int | None = None) -> Iterator[None]:
    """Handles a Ctrl-C that arrives during the block after it, as `HeldInterrupts` does."""
    held = HeldInterrupts(at_most)
    try:
        held.hold()
        held.install()
        yield
    finally:
        held.close()


def wait_in_thread(function: Callable[[], T]) -> T:
    """Calls a function that waits in C++, so that Ctrl-C interrupts this thread but not the call.

    Python runs signal handlers only once such a function has returned. Only the main thread gets
    signals: in others the function is called directly.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    outcome: Outcome[T] = Outcome()
    try:
        threading.Thread(
            target=outcome.run, args=(function,), name="treeshard-wait", daemon=True
        ).start()
    except RuntimeError:  # there are no more threads, or Python has joined them
        return function()
    return outcome.result()


def end_process() -> NoReturn:
    """Ends the process with status 1 now. For `atexit` functions, which cannot set the status.

    `atexit` functions that were registered earlier do not run, such as the ones of JAX that wait
    for other processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()  # it may be a file of the user's
    os._exit(1)

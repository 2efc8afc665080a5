"""Threads that may start at any time, deferred Ctrl-C, and the end of the process.

Threads of `concurrent.futures` cannot start once the main thread has ended. Its `Future`, like each
`threading.Condition`, takes a lock in Python code. After a Ctrl-C between taking the lock and
entering the `with` block, the lock stays taken, and the ending thread waits for it forever.
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
    """The result or error of a call, perhaps in a thread. A Ctrl-C may interrupt its waits."""

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
            # A waiter that is interrupted between the two calls keeps the lock: others retry.
            if self._running.acquire(timeout=_LOOK_AGAIN):
                self._running.release()

    def error(self) -> BaseException | None:
        """Waits for the end of the call, and returns its error, if any."""
        self.wait()
        return self._error

    def result(self) -> T:
        """Waits for the end of the call, and returns its result or raises its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


def start_thread(
    running: list[Any], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Outcome[T]:
    """Calls a function in a thread, which Python joins before the process ends.

    The outcome is added to `running` first, so that a handler of Ctrl-C can wait for it. If a
    thread cannot start, as in `atexit`, the function is called directly.
    """
    outcome: Outcome[T] = Outcome()
    here = threading.current_thread()
    has_ended = here is threading.main_thread() and not here.is_alive()
    name = f"treeshard-{function.__name__}"
    thread = threading.Thread(
        target=outcome.run, args=(function, *args), kwargs=kwargs, name=name, daemon=False
    )
    with defer_interrupts():
        running.append(outcome)
        try:
            if not has_ended:
                thread.start()
        except RuntimeError:  # threads can no longer start
            has_ended = True
    if has_ended:
        outcome.run(function, *args, **kwargs)
    return outcome


class HeldInterrupts:
    """A Ctrl-C that arrives between `hold` and `release` is handled by `release`.

    If more than `at_most` arrive, the last one is handled immediately. Only the main thread
    receives signals, so this class has no effect in other threads.
    """

    def __init__(self, at_most: int | None = 1) -> None:
        self._at_most = at_most
        self._handler: Any = None  # the previous handler, once `install` has replaced it
        self._is_holding = False
        self._frames: list[Any] = []  # the frames of the held signals

    def install(self) -> None:
        """Must be called before `hold`. Later calls have no effect."""
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
            self._frames.clear()  # this signal represents all
            self._handler(number, frame)

    def hold(self) -> None:
        self._is_holding = True

    def release(self) -> None:
        self._is_holding = False
        frames, self._frames = self._frames, []
        if frames:
            self._handler(signal.SIGINT, frames[0])

    def close(self) -> None:
        """Releases, and restores the handler from before `install`."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self.release()


@contextmanager
def defer_interrupts(*, at_most: int | None = None) -> Iterator[None]:
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

    Python runs signal handlers only after such a function has returned. Only the main thread gets
    signals, so other threads call the function directly.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    outcome: Outcome[T] = Outcome()
    try:
        threading.Thread(
            target=outcome.run, args=(function,), name="treeshard-wait", daemon=True
        ).start()
    except RuntimeError:  # threads can no longer start
        return function()
    return outcome.result()


def end_process() -> NoReturn:
    """Ends the process with status 1 now. For `atexit` functions, which cannot set the status.

    `atexit` functions that were registered earlier do not run, such as JAX's functions that wait
    for other processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()  # it may be a buffered file
    os._exit(1)

"""Threads that may begin at any time, waits that Ctrl-C interrupts, and the end of the process.

Threads of `concurrent.futures` do not begin once the main thread has ended.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Calls a function in a thread, which Python joins before the process ends.

    Where there cannot be a thread, as in `atexit`, the function is called here.
    """
    end: Future[T] = Future()

    def run() -> None:
        try:
            end.set_result(function(*args, **kwargs))
        except BaseException as error:
            end.set_exception(error)

    here = threading.current_thread()
    if here is threading.main_thread() and not here.is_alive():  # Python has joined the threads
        run()
        return end
    try:
        threading.Thread(target=run, name=f"treeshard-{function.__name__}", daemon=False).start()
    except RuntimeError:  # there are no more threads
        run()
    return end


class HeldInterrupts:
    """A Ctrl-C that arrives between `hold` and `release` is handled by `release`.

    A second one is handled at once. In threads other than the main thread, which alone receives
    signals, nothing is held.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # the one that was there, once `install` has put another there
        self._is_holding = False
        self._frame: Any = None

    def install(self) -> None:
        """Must be called before `hold`. Later calls do nothing."""
        handler = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        # A handler that C code installed is `None`, and ignoring the signal is a number.
        if is_main and callable(handler) and self._handler is None:
            self._handler = handler
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_holding and self._frame is None:
            self._frame = frame
        else:
            self._handler(number, frame)

    def hold(self) -> None:
        self._is_holding = True

    def release(self) -> None:
        self._is_holding = False
        frame, self._frame = self._frame, None
        if frame is not None:
            self._handler(signal.SIGINT, frame)

    def close(self) -> None:
        """Releases, and restores the handler that was there before `install`."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self.release()


def wait_in_thread(function: Callable[[], None]) -> None:
    """Calls a function that waits in C++, so that Ctrl-C interrupts this thread but not the call.

    Python runs signal handlers only once such a function has returned. Only the main thread gets
    signals: in others the function is called directly.
    """
    if threading.current_thread() is not threading.main_thread():
        function()
        return
    # A Ctrl-C inside `Future` or `threading.Event` may leave their locks locked; not in this queue.
    end: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            end.put(error)
        else:
            end.put(None)

    try:
        threading.Thread(target=run, name="treeshard-wait", daemon=True).start()
    except RuntimeError:  # there are no more threads, or Python has joined them
        function()
        return
    error = end.get()
    if error is not None:
        raise error


def end_process() -> NoReturn:
    """Ends the process with status 1 now. For `atexit` functions, which cannot set the status.

    `atexit` functions that were registered earlier do not run, and so not those of JAX, which wait
    for other processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

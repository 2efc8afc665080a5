"""Threads that may begin at any time, waits that Ctrl-C interrupts, and the end of the process.

Threads of `concurrent.futures` do not begin once the main thread has ended.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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


def wait_in_thread(function: Callable[..., object], *args: Any) -> None:
    """Calls a function that waits in C++, so that Ctrl-C interrupts this thread but not the call.

    Python runs signal handlers only once such a function has returned. Only the main thread gets
    signals: in others the function is called directly.
    """
    if threading.current_thread() is not threading.main_thread():
        function(*args)
        return
    # A Ctrl-C inside `Future` or `threading.Event` may leave their locks locked; not in this queue.
    end: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            function(*args)
        except BaseException as error:
            end.put(error)
        else:
            end.put(None)

    try:
        threading.Thread(target=run, name="treeshard-wait", daemon=True).start()
    except RuntimeError:  # there are no more threads, or Python has joined them
        function(*args)
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

"""Threads that may begin at any time, and that end before the process does.

Those of `concurrent.futures` do not begin once the main thread has ended.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

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

"""Checks the annotations of treeshard's functions as they are called, with beartype."""

import threading
from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its checks, but for what a background thread defines.

    While beartype reads a function it records warnings. Python has one such record for all threads,
    so the warnings that a test waits for would be lost in the meantime.
    """
    if threading.current_thread() is threading.main_thread():
        return beartype(fn)
    return fn

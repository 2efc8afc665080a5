"""Sends a Ctrl-C to this process at each moment at which Python would handle it."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any


def is_interrupted(call: Callable[[], Any], at: int, *modules: ModuleType) -> bool:
    """Calls a function, with a Ctrl-C at a moment in the code of modules, if it has so many.

    Returns whether it had. Python handles signals after calls of C functions, and before the first
    line of other functions.
    """
    left, files = at, [module.__file__ for module in modules]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        where = {"c_return": frame, "call": frame.f_back}.get(event)
        if where and where.f_code.co_filename in files:
            left -= 1
            if not left:
                signal.raise_signal(signal.SIGINT)

    # Shells ignore SIGINT for background jobs.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(profile)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
    return left <= 0

"""A Ctrl-C at any point of a wait leaves nothing that a thread would wait for."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from treeshard._core.threads import Outcome, defer_interrupts, start_thread


def is_interrupted(call: Callable[[], Any], at: int) -> bool:
    """Calls a function; raises `KeyboardInterrupt` at an instruction of it, if it has so many."""
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if not left:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_wait_may_be_interrupted_at_any_instruction() -> None:
    at = 1
    while True:
        running: list[Outcome[None]] = []
        outcome = start_thread(running, time.sleep, 0.01)
        was_interrupted = is_interrupted(outcome.result, at)
        waiter = threading.Thread(target=outcome.wait, daemon=True)
        waiter.start()
        waiter.join(5)
        assert not waiter.is_alive(), f"instruction {at}"
        assert running == [outcome]
        assert outcome.done
        if not was_interrupted:
            break
        at += 1
    assert at > 10


def test_an_outcome_is_a_value_or_an_error() -> None:
    running: list[Outcome[Any]] = []
    assert start_thread(running, int, "7").result() == 7
    failed = start_thread(running, int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
    assert isinstance(failed.error(), ValueError)
    assert [outcome.done for outcome in running] == [True, True]


@pytest.mark.parametrize(("signals", "at_most", "raised_at"), [(3, None, 3), (1, 1, 1), (2, 1, 1)])
def test_interrupts_are_deferred(signals: int, at_most: int | None, raised_at: int) -> None:
    """To the end of the block; or up to one too many."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    came: list[int] = []

    def interrupt() -> None:
        with defer_interrupts(at_most=at_most):
            for i in range(signals):
                signal.raise_signal(signal.SIGINT)
                came.append(i)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(came) == raised_at

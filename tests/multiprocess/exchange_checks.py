"""Every process receives every message, or all processes raise."""

from unittest import mock

import jax
import pytest

import treeshard as ts
from tests.multiprocess.worker import Context, arriving_last, start_again, without_lines
from treeshard import ProcessError
from treeshard._core import meetings
from treeshard._core.meetings import AS_LONG_AS_IT_TAKES, exchange
from treeshard._core.processes import all_or_none

FILE = "tests/multiprocess/exchange_checks.py"


def check_other_versions_are_told_at_once(context: Context) -> None:
    version = ts.__version__ if context.index == 0 else "9.9"
    with mock.patch.object(ts, "__version__", version), pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=20)
    assert str(told.value) == (
        "save /runs/7: the processes have different versions of treeshard:"
        f" {ts.__version__} on process 0; 9.9 on process 1. Nothing was done. Install one version"
        " on all of them."
    )
    start_again()
    exchange("going on", b"", timeout=20)


def check_every_process_receives_every_message(context: Context) -> None:
    for length in (1, 1, 3_000_000):
        messages = exchange("counting", bytes([context.index]) * length, timeout=20)
        assert messages == [bytes([i]) * length for i in range(context.count)]
    assert exchange("thinking", b"x", among=[context.index], timeout=0.01) == [b"x"]


def check_one_message_at_most_stays_in_the_service(context: Context) -> None:
    """The one of the last meeting, since the others may not have read it yet."""
    exchange("looking", b"x" * 100, timeout=20)
    exchange("looking again", b"", timeout=20)
    kept = meetings._process.client().key_value_dir_get_bytes(f"{meetings._process.names}0-1/")
    mine = [value for key, value in kept if key.endswith(f"/{jax.process_index()}")]
    assert len([value for value in mine if value.startswith(b"[")]) == 1
    assert not any(value.partition(b"\n")[2] for value in mine)


def check_a_late_process_is_named_and_gets_the_error_too(context: Context) -> None:
    with arriving_last(context, 1, "late"), pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=0.5)
    if context.index == 0:
        assert str(told.value).startswith(
            "save /runs/7: process 1 of 2 did not arrive within 0.5 s. Nothing was done. Every"
            " process must make this call. See the log of the missing process, or wait longer"
            f" with `timeout=`. This process called it at {FILE}:"
        )
    else:
        assert "a process arrived more than 0.5 s after another" in str(told.value)
    with pytest.raises(ProcessError) as told, all_or_none("gather", timeout=20):
        pass
    first = f"gather: nothing was done. The processes are out of step since save /runs/7, {FILE}:"
    assert str(told.value).startswith(first)
    assert str(told.value).endswith("; start the run again, from its last checkpoint.")
    start_again()


def check_an_agreed_call_ends_although_another_one_failed(context: Context) -> None:
    """Such as a save in the background, for which the others wait without an end."""
    with pytest.raises(ProcessError) as told:
        exchange("save" if context.index else "gather", b"", timeout=20)
    assert without_lines(str(told.value)).endswith(
        ": the processes do not make the same call, and nothing was done: gather on process 0; save"
        " on process 1. A process skipped a call, or made one more. All of them must make the same"
        " calls in the same order."
    )
    messages = exchange("saving", b"x", timeout=AS_LONG_AS_IT_TAKES, channel="save")
    assert messages == [b"x"] * context.count
    start_again()


def check_that_fails_where_it_is_told_to(context: Context) -> None:
    """The last one: it is for the test of what a failure shows."""
    assert context.index != 1, "process 1 has something to complain about"

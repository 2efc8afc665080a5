"""Every process receives every message, or all processes raise."""

import threading
import time

import jax
import pytest

from tests.multiprocess.worker import Context, arriving_last, start_again
from treeshard import ProcessError
from treeshard._core import meetings
from treeshard._core.meetings import AS_LONG_AS_IT_TAKES, count_step, exchange
from treeshard._core.processes import together

FILE = "tests/multiprocess/exchange_checks.py"


def check_every_process_receives_every_message(context: Context) -> None:
    for _ in range(3):
        messages = exchange("counting", b"%d" % context.index, timeout=20)
        assert messages == [b"%d" % i for i in range(context.count)]


def check_long_messages_arrive(context: Context) -> None:
    messages = exchange("telling", bytes([context.index]) * 3_000_000, timeout=20)
    assert [len(message) for message in messages] == [3_000_000] * context.count


def check_a_single_process_does_not_wait(context: Context) -> None:
    assert exchange("thinking", b"x", among=[context.index], timeout=0.01) == [b"x"]


def check_a_late_process_is_named_and_gets_the_error_too(context: Context) -> None:
    with arriving_last(context, 1, "late"), pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=0.5)
    if context.index == 0:
        assert str(told.value).startswith(
            "save /runs/7: process 1 of 2 did not arrive within 0.5 s. Nothing was done. Every"
            " process must make this call. See the log of the missing process, or wait longer"
            " with `timeout=`. This process called it at tests/multiprocess/exchange_checks.py:"
        )
    else:
        assert "a process arrived more than 0.5 s after another" in str(told.value)
    assert_out_of_step("save /runs/7")


def assert_out_of_step(first: str) -> None:
    """Every later call raises at once and names the first that failed, on all processes."""
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(ProcessError) as told, together("gather", timeout=20):
            pass
        assert str(told.value).startswith(
            f"gather: nothing was done. The processes are out of step since {first}, {FILE}:"
        ), told.value
        assert str(told.value).endswith("; start the run again, from its last checkpoint.")
    assert time.monotonic() - began < 1
    start_again()


def check_an_error_on_one_process_is_raised_on_all(context: Context) -> None:
    kind = OSError if context.index == 1 else ProcessError
    with pytest.raises(kind, match="the disk is gone"), together("save", timeout=20):
        lose_the_disk(context.index == 1)


def lose_the_disk(really: bool) -> None:
    if really:
        raise OSError("the disk is gone")


def check_without_errors_no_process_raises(context: Context) -> None:
    with together("save", timeout=20):
        pass


def check_one_message_at_most_stays_in_the_service(context: Context) -> None:
    """The one of the last meeting, since the others may not have read it yet."""

    exchange("looking", b"x" * 100, timeout=20)
    exchange("looking again", b"", timeout=20)
    kept = meetings._client().key_value_dir_get_bytes(f"{meetings._NAMES}0-1/")
    mine = [value for key, value in kept if key.endswith(f"/{jax.process_index()}")]
    assert len([value for value in mine if value.startswith(b"[")]) == 1
    assert not any(value.partition(b"\n")[2] for value in mine)


# ------------------------------------------------------------------ calls that differ


def check_other_calls_are_named(context: Context) -> None:
    for _ in range(3):
        with pytest.raises(ProcessError) as told:
            exchange("save" if context.index else "gather", b"", timeout=20)
        what = "save" if context.index else "gather"
        assert str(told.value) == (
            f"{what}: the processes do not make the same call, and nothing was done: gather on"
            " process 0; save on process 1. A process skipped a call, or made one more. All of"
            " them must make the same calls in the same order."
        )
        start_again()


def check_a_skipped_call_is_told(context: Context) -> None:
    """Process 1 skips a call: it is told at the next one, and neither waits for long."""
    if context.index == 0:
        with pytest.raises(ProcessError, match="process 1 of 2 did not arrive within 0.1 s"):
            exchange("gather", b"", timeout=0.1)
        (context.directory / "skipped").touch()
    while not (context.directory / "skipped").exists():
        time.sleep(0.01)
    if context.index == 1:
        with pytest.raises(ProcessError, match="gather on process 0; save on process 1"):
            exchange("save", b"", timeout=20)
    assert_out_of_step("gather")


def check_an_agreed_call_ends_although_another_one_failed(context: Context) -> None:
    """Such as a save in the background, for which the others wait without an end."""
    with pytest.raises(ProcessError):
        exchange("save" if context.index else "gather", b"", timeout=20)
    messages = exchange("saving", b"x", timeout=AS_LONG_AS_IT_TAKES, lane="save")
    assert messages == [b"x"] * context.count
    start_again()


def check_two_threads_are_told_or_in_order(context: Context) -> None:
    """Each thread's messages meet those of the thread of its name, or both are told."""
    names = ["a", "b"] if context.index else ["b", "a"]
    outcomes: dict[str, str] = {}

    def talk(name: str) -> None:
        for turn in range(5):
            try:
                got = exchange("talking", f"{name}{turn}".encode(), timeout=5)
            except ProcessError as error:
                outcomes[name] = str(error)
            else:
                assert len({message[:1] for message in got}) == 1, got

    threads = [threading.Thread(target=talk, args=[name], name=name) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text in outcomes.values():
        known = ("in the thread 'a'", "did not arrive", "arrived more", "out of step since talking")
        assert any(words in text for words in known), text
    start_again()
    with together("going on", timeout=20):
        pass


def check_steps_that_differ_are_named(context: Context) -> None:
    everybody = list(range(context.count))
    before = int(count_step(everybody).split()[1])
    for i in range(3 + context.index):
        assert count_step(everybody) == f"step {before + i + 1}"
    exchange("shard", b"", timeout=20, moves=False)  # no data follows
    with pytest.raises(ProcessError) as told:
        exchange("gather", b"", timeout=20)
    assert (
        f"gather after {before + 3} steps on process 0; gather after {before + 4} steps on"
        " process 1. A process skipped a step, or made one more." in str(told.value)
    )

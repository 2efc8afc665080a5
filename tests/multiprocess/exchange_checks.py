"""Every process receives every message, or all processes raise."""

import time

import jax
import pytest

from tests.multiprocess.worker import Context
from treeshard import ProcessError
from treeshard._core.processes import exchange, together


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
    if context.index == 1:
        time.sleep(1.5)
    with pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=0.5)
    if context.index == 0:
        assert str(told.value) == (
            "save /runs/7: process 1 of 2 did not arrive within 0.5 s. Nothing was done. Every"
            " process must make this call. See the log of the missing process, or wait longer"
            " with `timeout=`."
        )
    else:
        assert "a process arrived more than 0.5 s after another" in str(told.value)


def check_the_next_exchange_works_after_a_timeout(context: Context) -> None:
    assert exchange("save /runs/7", b"ok", timeout=20) == [b"ok"] * context.count


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


def check_no_message_stays_in_the_service(context: Context) -> None:
    from jax._src import distributed

    exchange("looking", b"", timeout=20)
    left = distributed.global_state.client.key_value_dir_get_bytes("treeshard/looking")
    assert [key for key, _ in left if key.endswith(f"/{jax.process_index()}")] == []

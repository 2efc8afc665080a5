"""What processes say reaches all of them, or all raise."""

import time

import jax
import pytest

from tests.multiprocess.worker import Context
from treeshard import ProcessError
from treeshard._processes import exchange, together


def check_everybody_hears_everybody(context: Context) -> None:
    for _ in range(3):
        said = exchange("counting", b"%d" % context.index, timeout=20)
        assert said == [b"%d" % i for i in range(context.count)]


def check_long_words_arrive(context: Context) -> None:
    said = exchange("telling", bytes([context.index]) * 3_000_000, timeout=20)
    assert [len(one) for one in said] == [3_000_000] * context.count


def check_alone_nothing_is_waited_for(context: Context) -> None:
    assert exchange("thinking", b"x", among=[context.index], timeout=0.01) == [b"x"]


def check_one_that_comes_late_is_named_and_hears_of_it(context: Context) -> None:
    if context.index == 1:
        time.sleep(1.5)
    with pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=0.5)
    if context.index == 0:
        assert str(told.value) == (
            "save /runs/7: process 1 of 2 did not come within 0.5 s. Nothing was done. Every"
            " process must make this call; see the log of whoever is missing, or give it more"
            " time with `timeout=`."
        )
    else:
        assert "missed each other by more than 0.5 s" in str(told.value)


def check_afterwards_they_meet_again(context: Context) -> None:
    assert exchange("save /runs/7", b"ok", timeout=20) == [b"ok"] * context.count


def check_what_one_raises_all_raise(context: Context) -> None:
    kind = OSError if context.index == 1 else ProcessError
    with pytest.raises(kind, match="the disk is gone"), together("save", timeout=20):
        lose_the_disk(context.index == 1)


def lose_the_disk(really: bool) -> None:
    if really:
        raise OSError("the disk is gone")


def check_what_nobody_raises_nobody_raises(context: Context) -> None:
    with together("save", timeout=20):
        pass


def check_nothing_is_left_with_the_service(context: Context) -> None:
    from jax._src import distributed

    exchange("looking", b"", timeout=20)
    left = distributed.global_state.client.key_value_dir_get_bytes("treeshard/looking")
    assert [key for key, _ in left if key.endswith(f"/{jax.process_index()}")] == []

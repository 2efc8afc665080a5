"""Messages between real processes."""

import pytest

import treeshard as ts
from tests.multiprocess import exchange_checks, launcher
from treeshard._core.meetings import _absent, _client, exchange

two, test_two_processes = launcher.tests_of(exchange_checks, devices=1)


def test_a_single_process_gets_its_own_message() -> None:
    assert exchange("talking to itself", b"yes", timeout=0.01) == [b"yes"]


def test_without_the_service_the_error_names_the_fix() -> None:
    with pytest.raises(ts.ProcessError, match=r"Call `jax\.distributed\.initialize\(\)` first"):
        _client()


def test_a_lost_process_is_told_by_the_time_waited() -> None:
    error = RuntimeError("INTERNAL: Barrier failed because: Task 1 heartbeat timeout.\nmore")
    assert _absent("gather", [1], 7.4, error, lost=True) == (
        "gather: process 1 of 1 ended or cannot be reached, as was noticed after 7 s of waiting"
        " (INTERNAL: Barrier failed because: Task 1 heartbeat timeout.). Nothing was done. See the"
        " log of the missing process."
    )

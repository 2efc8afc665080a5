"""Messages between real processes."""

import jax
import pytest

import treeshard as ts
from tests.multiprocess import exchange_checks, launcher
from treeshard._core.processes import _client, exchange, processes_of

two, test_two_processes = launcher.tests_of(exchange_checks, devices=1)


def test_a_single_process_gets_its_own_message() -> None:
    assert exchange("talking to itself", b"yes", timeout=0.01) == [b"yes"]


def test_processes_of() -> None:
    assert processes_of(jax.devices()) == [0]


def test_without_the_service_the_error_names_the_fix() -> None:
    with pytest.raises(ts.ProcessError, match=r"Call `jax\.distributed\.initialize\(\)` first"):
        _client()

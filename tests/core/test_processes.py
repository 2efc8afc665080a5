"""Messages between real processes, and the launcher that starts these processes and ends them."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

import treeshard as ts
from tests.core.simulated_service import Client
from tests.helpers import runs, wait_until
from tests.multiprocess import exchange_checks, launcher
from treeshard._core import meetings
from treeshard._core.meetings import exchange

*CHECKS, FAILING = launcher.checks_of(exchange_checks)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> launcher.Verdicts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "GRACE", 0.5)  # since one of them fails
        return launcher.launch(exchange_checks, tmp_path_factory.mktemp("exchange"), devices=1)


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, two: launcher.Verdicts) -> None:
    two.assert_passed(check)


def test_a_failure_shows_what_every_process_said(two: launcher.Verdicts) -> None:
    with pytest.raises(AssertionError, match="process 1 has something to complain about"):
        two.assert_passed(FAILING)
    assert two.codes[1] == 1
    with pytest.raises(AssertionError, match="not reached"):
        two.assert_passed("check_nothing")


def test_whoever_sleeps_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(99)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    sleeper = launcher.start([sys.executable, "-c", parent], tmp_path / "log")
    wait_until(lambda: pid.exists() and pid.read_text().endswith("."))
    launcher.wait_for_all([sleeper], timeout=0.1)
    launcher.end([sleeper])
    wait_until(lambda: not runs(int(pid.read_text()[:-1])))


def test_without_the_service_the_error_names_the_fix() -> None:
    assert exchange("talking to itself", b"yes", timeout=0.01).messages == [b"yes"]
    with pytest.raises(ts.ProcessError, match=r"Call `jax\.distributed\.initialize\(\)` first"):
        meetings._process.client()


def test_each_thread_has_batches_of_its_own() -> None:
    """Loaders make them in advance, and are at another one on each process."""
    channel = meetings._Channel((0, 1), "")
    channel.batches.add("batch 1")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(channel.batches.entries).result() == {}
        pool.submit(channel.batches.add, "batch 2").result()
        assert pool.submit(channel.batches.entries).result() == {"0": "batch 2"}
    assert channel.batches.entries() == {"0": "batch 1"}


@pytest.mark.parametrize(
    ("own", "other", "first"),
    [
        (["a", "b"], ["a", "c"], "b on process 0; c on process 1"),
        (["a"], ["a", "b"], "nothing on process 0; b on process 1"),
        (["a"] * 600, [*["a"] * 599, "b"], "a on process 0; b on process 1"),
        # The first process no longer has its entries from before the last 500.
        (["a"] * 600, ["b"] * 50, "a on process 0; nothing on process 1"),
        ([*["b"] * 50, *["a"] * 550], ["a"] * 600, ""),
        ([], [], ""),
    ],
)
def test_the_first_difference_of_two_histories_is_named(
    own: list[str], other: list[str], first: str
) -> None:
    histories = meetings._History(), meetings._History()
    for history, entries in zip(histories, (own, other), strict=True):
        for entry in entries:
            history.add(entry)
    assert (histories[0].hash != histories[1].hash) == (own != other)
    found = meetings._first_other({i: [x.entries()] for i, x in enumerate(histories)})
    assert found == (first and f" The first: {first}.")


# ------------------------------------------------------------------ a service that is gone

CALLS = (
    "key_value_set_bytes",
    "key_value_increment",
    "blocking_key_value_get_bytes",
    "key_value_dir_get_bytes",
    "key_value_delete",
)


@pytest.mark.parametrize("call", CALLS)
def test_a_service_that_is_gone_is_a_typed_error(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its calls fails first; and as with any failed meeting, later ones raise."""
    gone: list[str] = []

    def before(name: str, _key: str) -> None:
        gone.extend([call] * (name == call))
        if gone:
            raise jax.errors.JaxRuntimeError(
                "UNAVAILABLE: failed to connect to all addresses\nmore"
            )

    # Process 1 makes the same call, and has read the answer.
    key = f"treeshard/{meetings._hash_participants([0, 1])}/0"
    keys = {f"{key}/said/1": b"\0" * 24, f"{key}/came": b"1", f"{key}/read": b"1"}
    client = Client(keys)
    client.before = before  # type: ignore[method-assign]
    monkeypatch.setattr(meetings, "coordination_client", lambda: client)
    monkeypatch.setattr(meetings, "_process", meetings._Process())
    monkeypatch.setattr(meetings._Call, "hashes", lambda _: b"\0" * 24)
    with pytest.raises(ts.ProcessError) as told:
        exchange("save", b"", among=[0, 1])
    assert "UNAVAILABLE: failed to connect to all addresses)" in str(told.value)
    with pytest.raises(ts.ProcessError, match="gather: the call was cancelled. The processes are"):
        exchange("gather", b"", among=[0, 1])


# ------------------------------------------------------------------ the end of the process

ENDS = """
import atexit, sys
from treeshard._core import meetings
meetings._process.broken = "save, train.py:3"
atexit.register(print, "the user's own function")
print("unflushed", end=" ")
sys.stderr = open(2, "w")  # which is not flushed at the end of a line
{}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "1 / 0"])
def test_a_process_that_is_out_of_step_ends_with_status_1(end: str) -> None:
    """However its program ends, and after what it has registered itself."""
    command = [sys.executable, "-c", ENDS.format(end)]
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert process.returncode == 1
    assert process.stdout == "unflushed the user's own function\n"
    assert process.stderr.endswith(
        "treeshard: the processes are out of step since save, train.py:3. This process ends now"
        " with status 1. Start the run again from its last checkpoint.\n"
    )


@pytest.mark.parametrize(("leaves", "end"), [(1, "3"), (0, "raise")])
def test_all_end_soon_after_one_is_out_of_step(leaves: int, end: str, tmp_path: Path) -> None:
    """Although the other one is in a step that waits for it. JAX would wait five minutes."""
    port = launcher.free_port()
    module = [sys.executable, "-m", "tests.multiprocess.out_of_step"]
    logs = [tmp_path / f"{i}.log" for i in (0, 1)]
    started = [
        launcher.start([*module, *map(str, (port, i, 2, leaves, end))], logs[i]) for i in (0, 1)
    ]
    try:
        until = time.monotonic() + 60
        while None in [process.poll() for process in started] and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        launcher.end(started)
    texts = [log.read_text(errors="replace") for log in logs]
    told = (
        "treeshard: the processes are out of step since gather, tests/multiprocess/out_of_step.py:"
    )
    assert started[leaves].returncode == 1, texts
    assert told in texts[leaves]
    assert ("ProcessError: gather: process" in texts[leaves]) == (end == "raise")
    # The other one hears of it, unless it ends because process 0 did, which has the service.
    assert started[1 - leaves].returncode in ((1,) if leaves else (1, -6)), texts
    assert told in texts[1 - leaves] or leaves == 0
    assert texts[leaves].count("the user's own function at exit") == 1

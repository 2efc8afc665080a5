"""Every process receives every message, or all raise, also if one leaves a call in its middle."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import wait_until
from tests.multiprocess.worker import Context, arriving_last, start_again, without_lines
from treeshard import ProcessError
from treeshard._core import meetings, processes
from treeshard._core.meetings import breaking_if_left, exchange
from treeshard._core.processes import all_or_none
from treeshard.checkpoint import Checkpoints, restore, save
from treeshard.interchange import load_safetensors, save_safetensors

FILE = "tests/multiprocess/exchange_checks.py"


def check_other_versions_are_told_at_once(context: Context) -> None:
    version = ts.__version__ if context.index == 0 else "9.9"
    with mock.patch.object(ts, "__version__", version), pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=20)
    assert str(told.value) == (
        "save /runs/7: the processes have different versions of treeshard:"
        f" {ts.__version__} on process 0; 9.9 on process 1. The call was cancelled. Install the"
        " same version on all processes."
    )
    start_again()
    exchange("going on", b"", timeout=20)


def check_every_process_receives_every_message(context: Context) -> None:
    for length in (1, 1, 3_000_000):
        answer = exchange("counting", bytes([context.index]) * length, timeout=20)
        messages = [bytes([i]) * length for i in range(context.count)]
        assert answer == (b"".join(messages), [] if context.index else messages)
    assert exchange("thinking", b"x", among=[context.index], timeout=0.01) == (b"x", [b"x"])


def check_no_key_stays_in_the_service(context: Context) -> None:
    for _ in range(3):
        exchange("looking", b"x" * 100, timeout=20)
    exchange("saving", b"", timeout=20, channel="save")
    wait_for(context, "looked")
    client, names = meetings._process.client(), meetings._process.names
    wait_until(lambda: not client.key_value_dir_get_bytes(names))


def check_a_late_process_is_named_and_gets_the_error_too(context: Context) -> None:
    with arriving_last(context, 1, "late"), pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=0.5)
    assert str(told.value).startswith(
        "save /runs/7: process 1 of 2 did not arrive within 0.5 s. The call was cancelled. Every"
        " process must make this call, at about the same time. See the log of that process, or wait"
        f" longer with `timeout=`. This process called it at {FILE}:"
    )
    with pytest.raises(ProcessError) as told, all_or_none("gather", timeout=20):
        pass
    first = "gather: the call was cancelled. The processes are out of step since save /runs/7, "
    assert str(told.value).startswith(f"{first}{FILE}:")
    assert str(told.value).endswith(". Start the run again from its last checkpoint.")
    start_again()


def check_an_agreed_call_ends_although_another_one_failed(context: Context) -> None:
    """Such as a save in the background, for which the others wait without an end."""
    with pytest.raises(ProcessError) as told:
        exchange("save" if context.index else "gather", b"", timeout=20)
    assert without_lines(str(told.value)).endswith(
        ": the processes make different calls, which were cancelled: gather on process 0; save on"
        " process 1. A process skipped a call, or made one more. All processes must make the same"
        " calls in the same order."
    )
    answer = exchange("saving", b"x", works=True, channel="save")
    assert answer.combined == b"xx"
    start_again()


# ------------------------------------------------------------------ one leaves a call


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def raise_in_place(kind: type[BaseException] | None) -> None:
    if kind is not None:
        raise kind


@breaking_if_left()
def load_and_leave(kind: type[BaseException] | None) -> None:
    exchange("load", b"", timeout=20)
    raise_in_place(kind)
    exchange("load", b"", phase="read", works=True)


def wait_for(context: Context, mark: str) -> None:
    """Returns once all processes have called it."""
    (context.directory / f"{mark}-{context.index}").touch()
    while not all((context.directory / f"{mark}-{i}").exists() for i in range(context.count)):
        time.sleep(0.005)


def assert_out_of_step(since: str) -> None:
    """Every later call raises at once, whatever it is, and names the first that failed."""
    for what, works in [("gather", False), ("restore", True)]:
        with pytest.raises(ProcessError) as told:
            exchange(what, b"", timeout=20, works=works)
        assert str(told.value).startswith(
            f"{what}: the call was cancelled. The processes are out of step since {since}, {FILE}:"
        )
    start_again()


def check_whatever_a_block_raises_is_told_and_the_next_call_works(context: Context) -> None:
    for kind in (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        leaves = context.index == 1
        with (
            pytest.raises(kind if leaves else ProcessError) as told,
            all_or_none("save", timeout=20),
        ):
            raise_in_place(kind if leaves else None)
        if not leaves:
            assert str(told.value) == (
                f"save: the call was cancelled, because process 1 raised {kind.__name__}"
            )
        assert exchange("go on", b"x", timeout=20).combined == b"xx"


def check_a_ctrl_c_while_waiting_is_raised_at_once_and_told(context: Context) -> None:
    for number, works in enumerate((False, True)):
        exchange("begin", b"", timeout=20)
        if context.index == 1:
            threading.Timer(0.2, interrupt).start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                exchange("save", b"", timeout=30, works=works)
            assert time.monotonic() - began < 10
        wait_for(context, f"interrupted-{number}")
        if context.index == 0:
            with pytest.raises(ProcessError) as told:
                exchange("save", b"", timeout=30, works=works)
            text = str(told.value)
            start = f"save: the call was cancelled, because process 1 left save, {FILE}:"
            assert text.startswith(start)
            assert text.endswith(
                " with a KeyboardInterrupt. The processes are out of step. Start the run again from"
                " its last checkpoint."
            )
        assert_out_of_step("save")


def check_who_waits_for_the_next_meeting_of_a_call_that_one_has_left(context: Context) -> None:
    """Is told at once, although it would wait without an end."""
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind if context.index == 1 else ProcessError) as told:
            load_and_leave(kind if context.index == 1 else None)
        if context.index == 0:
            assert "because process 1 left load" in str(told.value), told.value
            assert f" with a {kind.__name__}. " in str(told.value), told.value
        assert_out_of_step("load")


def check_a_call_that_begins_anew_does_not_meet_with_its_middle(context: Context) -> None:
    exchange("load", b"", timeout=20)
    with pytest.raises(ProcessError) as told:
        exchange("load", b"", phase=["read", ""][context.index], timeout=20)
    assert without_lines(str(told.value)).startswith(
        "load: the processes make different calls, which were cancelled: load (read) on process 0;"
        " load (begin) on process 1. A process left this call before its end, and made it again. "
    )
    start_again()


# ------------------------------------------------------------------ every meeting of every call


@contextmanager
def leaving(at: int, how: str) -> Iterator[list[str]]:
    """Makes this process leave its exchange of this number, or come to it with a Ctrl-C.

    Yields the phases of the exchanges that it has come to.
    """
    phases: list[str] = []

    def exchange_or_leave(*args: Any, phase: str = "", **options: Any) -> Any:
        phases.append(phase)
        do = how if len(phases) - 1 == at else ""
        if do == "raise before":
            raise KeyboardInterrupt
        if do == "signal before":
            interrupt()
        answer = exchange(*args, phase=phase, **options)
        if do == "raise after":
            raise SystemExit
        if do == "signal after":
            interrupt()
        return answer

    with mock.patch.object(processes, "exchange", exchange_or_leave):
        yield phases


# A file that process 0 has removed, since it left, may be what another one waits for.
TOLD = (ProcessError, ts.CheckpointError)


# One call that writes a file, and one that reads: left in every way. The others are left at each of
# their meetings in one way.
REPRESENTATIVE = ("save_safetensors", "restore")


def check_a_call_left_at_any_meeting_leaves_files_and_values_whole(context: Context) -> None:
    """The table: each call, each of its meetings, each way to leave, each process."""
    mesh = ts.make_mesh("data=2")
    host = {"w": np.arange(64, dtype=np.float32).reshape(16, 4), "v": np.ones((8, 2), np.float32)}
    new = ts.shard(host, P("data"), mesh)
    old = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree))(new)
    values = {name: {"old": x * 0 - 1, "new": x} for name, x in host.items()}
    file, source = (context.directory / f"{name}.safetensors" for name in ("file", "source"))
    saved, run = context.directory / "saved", context.directory / "run"
    save_safetensors(source, new)
    save(saved, new)
    with Checkpoints(run) as checkpoints:
        checkpoints.save(1, new)
    structs = {"w": jax.ShapeDtypeStruct((16, 4), "float32"), "v": host["v"]}

    def read(_: str, index: Any) -> Any:
        return host["w"][index]

    def latest() -> Any:
        return Checkpoints(run, read_only=True, timeout=2).restore_latest(new)[1]  # type: ignore[index]

    calls: dict[str, Callable[[], Any]] = {
        "save_safetensors": lambda: save_safetensors(file, new, timeout=2),
        "load_safetensors": lambda: load_safetensors(source, new, timeout=2),
        "restore": lambda: restore(saved, new, timeout=2),
        "restore_latest": latest,
        "shard": lambda: ts.shard(structs, P("data"), mesh, read=read, timeout=2),
    }
    soak = bool(os.environ.get("TREESHARD_SOAK"))  # `make soak`
    tried = 0
    for name, call in calls.items():
        with leaving(-1, "") as phases:
            call()
        assert len(set(phases)) >= 2, phases
        # Who leaves before the first meeting of a call can make the call anew.
        ways = [(0, "raise after"), (0, "signal after")] + [
            (at, f"{what} {when}")
            for at in range(1, len(phases))
            for what in ("raise", "signal")
            for when in ("before", "after")
        ]
        for (at, how), who in product(ways, [{0}, {1}, {0, 1}]):
            if len(who) == 2 and how != "signal after":
                continue
            if not (soak or name in REPRESENTATIVE or (how, who) == ("raise after", {1})):
                continue
            if name == "save_safetensors":
                save_safetensors(file, old)
            result = None
            try:
                with leaving(at if context.index in who else -1, how):
                    result = call()
            except TOLD:
                pass
            except (KeyboardInterrupt, SystemExit):
                assert context.index in who
            if how == "signal after" and at == len(phases) - 1:
                # It waits for the end of the call, which the others end too.
                assert not meetings._process.broken, (name, who, phases)
            with suppress(*TOLD):  # as somebody who has caught it
                result = call()
            for path, x in (result or {}).items():
                for piece in x.addressable_shards:
                    np.testing.assert_array_equal(piece.data, host[path][piece.index])
            wait_for(context, f"tried-{tried}")
            if name == "save_safetensors":
                found = load_safetensors(file)
                [whole] = [
                    age
                    for age in ("old", "new")
                    if all(np.array_equal(found[path], values[path][age]) for path in host)
                ]
                assert whole == "new" or result is None
            wait_for(context, f"looked-{tried}")
            tried += 1
            start_again()
    assert tried > (100 if soak else 40)


def check_that_fails_where_it_is_told_to(context: Context) -> None:
    """The last one: it is for the test of what a failure shows."""
    assert context.index != 1, "process 1 has something to complain about"

"""Processes that are forked and not started anew, so that many can be killed in little time.

What forks them has imported all that they need, and has started no backend: then it has no
threads that a fork would lose. `worker` is such a process, in a launch of one.
"""

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax
from jax._src import xla_bridge

import treeshard as ts
from tests.deprecations import tolerated
from tests.multiprocess.launcher import free_port
from tests.multiprocess.worker import join

Say = Callable[[str], None]
Body = Callable[[int, Say], None]


class Forked:
    """Processes that have joined each other (a single one has not), and run one function.

    In a `with` statement: at its end they are killed.

    Args:
        body: Gets the index of its process, and a function that tells a line to this process.
        log: What they print; it is shown if one of them fails.
        processes: How many.
        devices: Simulated devices per process.
        heartbeat: Seconds after which a process that is lost ends the others.
    """

    def __init__(
        self, body: Body, log: Path, *, processes: int = 2, devices: int = 2, heartbeat: int = 30
    ) -> None:
        assert not xla_bridge.backends_are_initialized(), "it has threads, which a fork would lose"
        self._log = log
        self._told = b""
        self._reading, writing = os.pipe()
        self._pids: list[int] = []
        self.codes: list[int | None] = [None] * processes
        port = free_port()
        for i in range(processes):
            with tolerated("fork"):
                pid = os.fork()
            if not pid:
                os.close(self._reading)
                how = (str(port), i, processes, devices, heartbeat)
                _run(body, log, writing, how)
            self._pids.append(pid)
        os.close(writing)

    def hear(self, start: str, timeout: float = 120.0) -> str:
        """Waits until a process tells a line with such a start, and returns the rest of it.

        Lines before it are dropped.
        """
        until = time.monotonic() + timeout
        while True:
            *lines, self._told = self._told.split(b"\n")
            for i, line in enumerate(lines):
                if line.startswith(start.encode()):
                    self._told = b"\n".join([*lines[i + 1 :], self._told])
                    return line.decode().removeprefix(start).strip()
            left = max(0.0, until - time.monotonic())
            ready = select.select([self._reading], [], [], left)[0]
            more = os.read(self._reading, 2**16) if ready else b""
            if not more:
                why = "they have ended" if ready else f"it is {timeout:g} s"
                raise AssertionError(f"nobody told {start!r}, and {why}:\n{self.printed()}")
            self._told += more

    def kill(self, index: int) -> None:
        """Ends a process as `kill -9` does."""
        if self.codes[index] is None:
            os.kill(self._pids[index], signal.SIGKILL)
            self._reap(index, 0)

    def signal(self, index: int, number: int) -> None:
        """Sends a signal to a process that has not ended."""
        os.kill(self._pids[index], number)

    def wait(self, timeout: float = 120.0) -> list[int | None]:
        """Waits until all have ended, and returns their exit codes; negative for a signal."""
        until = time.monotonic() + timeout
        while None in self.codes and time.monotonic() < until:
            for i in range(len(self._pids)):
                self._reap(i, os.WNOHANG)
            time.sleep(0.005)
        return self.codes

    def rest(self) -> list[str]:
        """What they tell until they have ended."""
        while more := os.read(self._reading, 2**16):
            self._told += more
        return self._told.decode().splitlines()

    def printed(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def __enter__(self) -> "Forked":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for i in range(len(self._pids)):
            self.kill(i)
        os.close(self._reading)

    def _reap(self, index: int, options: int) -> None:
        if self.codes[index] is None:
            pid, status = os.waitpid(self._pids[index], options)
            if pid:
                self.codes[index] = os.waitstatus_to_exitcode(status)


def _run(body: Body, log: Path, writing: int, how: tuple[str, int, int, int, int]) -> NoReturn:
    """What a forked process does; how it joins the others is as in `join`."""
    _, index, processes, devices, _ = how
    code = 1
    try:
        with log.open("ab") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        if processes > 1:
            join(*how)
        else:
            ts.simulate_devices(devices)
        body(index, lambda line: _tell(writing, f"{index} {line}\n"))
        if processes > 1:
            jax.distributed.shutdown()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the way out through Python is not ours to take


def _tell(writing: int, line: str) -> None:
    os.write(writing, line.encode())  # so few bytes arrive together

"""A coordination service in this process, with the calls of JAX's client that meetings make.

Its clients are threads. As in the real one: a key is set once unless it may be overwritten, a wait
for a key ends at a deadline, and to delete a key deletes all keys below it.

A `World` runs processes as threads, one at a time: at each call of the service a seeded generator
draws who goes on, and whom to delay, interrupt or kill. Its clock is simulated, too.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

from jax.errors import JaxRuntimeError

from treeshard._core import meetings


class Client:
    """What one process calls, on keys that all clients share.

    `before` and `after` are called with the name and the key of each call, and may raise.
    """

    def __init__(self, keys: dict[str, bytes], received: list[int] | None = None) -> None:
        self.keys = keys
        self.received = [] if received is None else received  # the bytes, by call

    def before(self, call: str, key: str) -> None: ...

    def after(self, call: str, key: str) -> None: ...

    def wait_for(self, key: str, seconds: float) -> bool:
        return key in self.keys

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        self.before("key_value_set_bytes", key)
        if key in self.keys and not allow_overwrite:
            raise JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
        self.keys[key] = value
        self.after("key_value_set_bytes", key)

    def key_value_set(self, key: str, value: str) -> None:
        self.key_value_set_bytes(key, value.encode())

    def key_value_increment(self, key: str, increment: int) -> int:
        self.before("key_value_increment", key)
        number = int(self.keys.get(key, b"0")) + increment
        self.keys[key] = str(number).encode()
        self.after("key_value_increment", key)
        return number

    def key_value_try_get_bytes(self, key: str) -> bytes:
        self.before("key_value_try_get_bytes", key)
        if key not in self.keys:
            raise JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        value = self.keys[key]
        self.after("key_value_try_get_bytes", key)
        return value

    def key_value_try_get(self, key: str) -> str:
        return self.key_value_try_get_bytes(key).decode()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        self.before("blocking_key_value_get_bytes", key)
        if not self.wait_for(key, timeout_in_ms / 1000):
            raise JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
        value = self.keys[key]
        self.received.append(len(value))
        self.after("blocking_key_value_get_bytes", key)
        return value

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        self.before("key_value_dir_get_bytes", key)
        start = key.rstrip("/") + "/"
        rows = [(name, value) for name, value in self.keys.items() if name.startswith(start)]
        self.received.append(sum(len(name) + len(value) for name, value in rows))
        self.after("key_value_dir_get_bytes", key)
        return rows

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value.decode()) for name, value in self.key_value_dir_get_bytes(key)]

    def key_value_delete(self, key: str) -> None:
        self.before("key_value_delete", key)
        for name in [name for name in self.keys if f"{name}/".startswith(f"{key}/")]:
            del self.keys[name]
        self.after("key_value_delete", key)


class Killed(BaseException):
    """Ends the thread of a process that is killed, and whatever it still calls."""


class World:
    """Processes as threads, in an order that a seed decides."""

    def __init__(self, seed: int, count: int, faults: list[str]) -> None:
        self.random = random.Random(seed)
        self.keys: dict[str, bytes] = {}
        self.clock = 0.0  # seconds
        self.log: list[str] = []
        # What is still to happen, each at a call that is drawn.
        self.faults = faults
        self.turn = threading.Semaphore(0)  # of this object
        self.processes = [Process(self, i, count) for i in range(count)]

    def run(self, program: Callable[["Process"], None]) -> None:
        """Runs the program on every process to its end."""
        threads = [
            threading.Thread(target=process.run, args=(program,), name="the process", daemon=True)
            for process in self.processes
        ]
        for thread in threads:
            thread.start()
            self.turn.acquire()
        while waiting := [process for process in self.processes if not process.has_ended]:
            ready = [process for process in waiting if process.is_ready()]
            if ready:
                process = self.random.choice(ready)
                process.fault = self._draw_fault()
                process.go.release()
                self.turn.acquire()
            else:
                self.clock = min(process.next_time() for process in waiting)
        for thread in threads:
            thread.join()

    def _draw_fault(self) -> str:
        if self.faults and self.random.random() < 0.03:
            return self.faults.pop()
        return ""


class Process(meetings._Process):
    """One of the processes, and the client that it calls."""

    index = 0
    count = 0

    def __init__(self, world: World, index: int, count: int) -> None:
        super().__init__()
        self.world, self.index, self.count = world, index, count
        self.go = threading.Semaphore(0)
        self.fault = ""  # what happens at the call that goes on now
        self.faults: list[tuple[str, str]] = []  # what has happened to it, and at which call
        self.awaits: tuple[str, float] | None = None  # a key, and until when
        self.sleeps_until = 0.0
        self.slept = 0.0
        self.has_ended = self.is_killed = False
        self.received: list[int] = []  # bytes, by call of the service

    def run(self, program: Callable[["Process"], None]) -> None:
        _here.process = self
        self._pause()
        try:
            program(self)
        except Killed:
            pass
        finally:
            self.has_ended = True
            self.world.turn.release()

    def is_ready(self) -> bool:
        if self.world.clock < self.sleeps_until:
            return False
        return self.awaits is None or self.awaits[0] in self.world.keys or self._is_late()

    def _is_late(self) -> bool:
        return self.awaits is not None and self.awaits[1] <= self.world.clock

    def next_time(self) -> float:
        return max(self.sleeps_until, self.awaits[1] if self.awaits else 0.0)

    def client(self) -> Any:
        client = Client(self.world.keys, self.received)
        client.before = self._before  # type: ignore[method-assign]
        client.after = self._after  # type: ignore[method-assign]
        client.wait_for = self._wait_for  # type: ignore[method-assign]
        return client

    def _pause(self) -> None:
        self.world.turn.release()
        self.go.acquire()

    def _before(self, call: str, key: str) -> None:
        if self.is_killed:
            raise Killed
        self._pause()
        self._log(f"{call} {key}")
        if self.fault == "delay":
            self._suffer(call)
            delay = self.world.random.choice([1.0, 9.0, 30.0])
            self.sleeps_until = self.world.clock + delay
            self.slept += delay
            self._pause()
        if self.fault.endswith("before"):
            self._suffer(call)

    def _after(self, call: str, key: str) -> None:
        if self.fault:  # one that was to come before a call came while it waited
            self._suffer(call)

    def _suffer(self, call: str) -> None:
        fault, self.fault = self.fault, ""
        self._log(f"{fault}!")
        self.faults.append((fault, call))
        if fault.startswith("kill"):
            self.is_killed = True
            raise Killed
        if fault.startswith("interrupt"):
            raise KeyboardInterrupt
        if fault.startswith("exit"):
            raise SystemExit

    def _log(self, text: str) -> None:
        self.world.log.append(f"{self.world.clock:6.1f} s  process {self.index}  {text}")

    def _wait_for(self, key: str, seconds: float) -> bool:
        self.awaits = key, self.world.clock + seconds
        self._pause()
        self.awaits = None
        return key in self.world.keys


_here = threading.local()


class Here:
    """Stands for `meetings._process`: the process of the thread that asks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_here.process, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_here.process, name, value)

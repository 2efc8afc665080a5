"""A coordination service in this process, with the calls of JAX's client that meetings make.

Its clients are threads. As in the real one: a key is set once unless it may be overwritten, a wait
for a key ends at a deadline, and to delete a key deletes all keys below it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax.errors import JaxRuntimeError


class Service:
    """The keys, which all clients share."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.changed = threading.Condition()


class Client:
    """What one process calls. `before` is called with the name of each call, and may raise."""

    def __init__(self, service: Service, before: Callable[[str], None] = lambda _: None) -> None:
        self._service = service
        self._before = before

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._keys("key_value_set_bytes") as keys:
            if key in keys and not allow_overwrite:
                raise JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            keys[key] = value

    def key_value_set(self, key: str, value: str) -> None:
        self.key_value_set_bytes(key, value.encode())

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._keys("key_value_increment") as keys:
            number = int(keys.get(key, b"0")) + increment
            keys[key] = str(number).encode()
            return number

    def key_value_try_get_bytes(self, key: str) -> bytes:
        with self._keys("key_value_try_get_bytes") as keys:
            if key not in keys:
                raise JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
            return keys[key]

    def key_value_try_get(self, key: str) -> str:
        return self.key_value_try_get_bytes(key).decode()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._keys("blocking_key_value_get_bytes") as keys:
            if not self._service.changed.wait_for(lambda: key in keys, timeout_in_ms / 1000):
                raise JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return keys[key]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        start = key.rstrip("/") + "/"
        with self._keys("key_value_dir_get_bytes") as keys:
            return [(name, value) for name, value in keys.items() if name.startswith(start)]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value.decode()) for name, value in self.key_value_dir_get_bytes(key)]

    def key_value_delete(self, key: str) -> None:
        with self._keys("key_value_delete") as keys:
            for name in [name for name in keys if f"{name}/".startswith(f"{key}/")]:
                del keys[name]

    @contextmanager
    def _keys(self, call: str) -> Iterator[Any]:
        self._before(call)
        with self._service.changed:
            yield self._service.keys
            self._service.changed.notify_all()

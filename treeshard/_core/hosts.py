"""The memory of hosts on which several processes run, which share the same free bytes."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from treeshard._core.meetings import MeetingOptions
from treeshard._core.memory import lacking_memory, shared_memory
from treeshard._core.processes import TIMEOUT, all_or_none
from treeshard._core.text import human_bytes


def check_memory_of_hosts(
    what: str,
    needed: int,
    error: Callable[[str, int], Exception],
    *,
    threads: int = 0,
    among: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Raises unless each host has the memory that its processes need together. All processes call
    it.

    Args:
        what: As in `all_or_none`.
        needed: The bytes that this process needs.
        error: Makes the error from a text with the needed and available bytes, and the available
            bytes.
        threads: As in `lacking_memory`.
        among: As in `all_or_none`.
        timeout: As in `all_or_none`.
    """
    options: MeetingOptions = {"phase": "memory", "among": among, "timeout": timeout}
    with all_or_none(what, _lacking_on_a_host, **options) as messages:
        if lacking := lacking_memory(needed, threads):
            raise error(*lacking)
        host = hashlib.sha256(host_id().encode()).hexdigest()[:16]
        messages.own = json.dumps([host, needed, shared_memory()]).encode()
    if messages.answer:
        raise error(*json.loads(messages.answer))


def _lacking_on_a_host(messages: list[bytes]) -> bytes:
    """The needed and available bytes of a host that lacks memory, as text, and the available bytes.

    Each process alone needs less than the free bytes. Together they may need more.
    """
    hosts = defaultdict[str, list[tuple[int, int | None]]](list)
    for host, there, free in map(json.loads, messages):
        hosts[host].append((there, free))
    for rows in hosts.values():
        total = sum(there for there, _ in rows)
        # The processes read the free bytes at different times, while others took some.
        free = min((free for _, free in rows if free is not None), default=total)
        if len(rows) > 1 and total > free:
            fact = f"{human_bytes(total)} of host memory in {len(rows)} processes of one host"
            text = f"{fact}, and {human_bytes(max(free, 0))} are available."
            return json.dumps([text, free]).encode()
    return b""


def host_id() -> str:
    """An id that processes share if they share memory: the boot of a kernel, and the cgroup.

    In containers of one host, the path of the cgroup is often `/`, so the id includes the namespace
    of the path.
    """
    proc = Path("/proc")
    parts: list[str] = []
    with suppress(OSError):
        parts.append((proc / "sys/kernel/random/boot_id").read_text())
        parts.append((proc / "self/cgroup").read_text())
        parts.append(os.readlink(proc / "self/ns/cgroup"))
    return "".join(parts)

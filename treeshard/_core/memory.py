"""The host memory that this process can still allocate.

If an array does not fit, the system, the container, or a C++ library that does not handle a failed
allocation ends the process. Calls therefore compare their memory with the free memory first.
"""

import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from treeshard._core.text import human_bytes

NOT_WORTH_A_LOOK = 2**20  # bytes
_FOR_PYTHON = 2**22  # bytes for small objects


class Meter:
    """Adds up what a call will allocate and free, in order. `peak` is the most at one time."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def kept_by_allocator(buffers: Iterable[tuple[int, int]], most: int) -> int:
    """The bytes of freed buffers that may stay allocated, from pairs of one buffer's bytes and all
    equal buffers' bytes.

    glibc returns freed blocks of at least 32 MiB to the system. Smaller blocks may stay in the
    heaps of the threads that allocated them.
    """
    return min(most, sum(total for size, total in buffers if size < 2**25))


def lacking_memory(needed: int, threads: int = 0) -> tuple[str, int] | None:
    """If this process cannot allocate `needed` bytes, that fact as text, and the available bytes.

    `threads` is the number of threads that the call may start.
    """
    if needed < NOT_WORTH_A_LOOK:
        return None
    free, beside_threads = available_memory(), available_memory(threads=threads)
    if free is None or beside_threads is None or needed <= beside_threads:
        return None
    fact = f"{human_bytes(needed)} of host memory in this process, and {human_bytes(max(free, 0))}"
    reserved = ""
    if needed <= free:
        reserved = f"; its threads reserve {human_bytes(free - beside_threads)} of them"
    return f"{fact} are available{reserved}.", free


def available_memory(root: Path = Path("/"), threads: int = 0) -> int | None:
    """The bytes that this process can still allocate, less the bytes that new threads reserve;
    `None` if unknown.

    `root` is the directory that has `proc` and `sys`.
    """
    shared = shared_memory(root)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if shared is None or limit == resource.RLIM_INFINITY:
        return shared
    status = _amounts(root / "proc/self/status")
    reserved = _address_space(threads, status["Threads"])
    return min(shared, limit - 1024 * status["VmSize"] - reserved - _FOR_PYTHON)


def shared_memory(root: Path = Path("/")) -> int | None:
    """The bytes that are free on this host or in this container, for all its processes."""
    try:
        amounts = _amounts(root / "proc/meminfo")
        free = [1024 * (amounts["MemAvailable"] + amounts["SwapFree"])]
    except (OSError, KeyError):
        return None
    with suppress(OSError):  # without cgroups
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            # `0::/user.slice/app`; other lines are of version 1, which kernels still mount.
            if line.startswith("0::"):
                free += _free_in_groups(root / "sys/fs/cgroup", line.removeprefix("0::"))
    return min(free)


def _address_space(threads: int, running: int) -> int:
    """The address space that new threads reserve. Only `RLIMIT_AS` counts it, as threads use
    little.

    A thread has a stack, and glibc gives it an arena of 64 MiB, up to eight arenas per core. If a
    C++ library starts a thread without space for its stack, the process ends.
    """
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack == resource.RLIM_INFINITY:
        stack = 2**21  # glibc's default
    arenas = 8 * (os.cpu_count() or 1) - running
    return threads * stack + max(0, min(threads, arenas)) * 2**26


def _free_in_groups(mounted: Path, path: str) -> Iterator[int]:
    """The free bytes in a cgroup (version 2), and in the groups that contain it.

    In a container, the path may be a path of the host. The container's group is then at the root.
    """
    # `..` leads out of the namespace, to groups that are not visible.
    inner = Path(*(part for part in path.split("/") if part not in ("", "..")))
    for group in (inner, *inner.parents):
        # A group without a limit has no such file, or the word `max` in it.
        with suppress(OSError, KeyError, ValueError):
            limit = int((mounted / group / "memory.max").read_text())
            used = int((mounted / group / "memory.current").read_text())
            # The page cache is freed when memory is needed. Shared memory is not, and is not
            # counted as cache.
            caches = _amounts(mounted / group / "memory.stat")
            yield limit - used + caches["active_file"] + caches["inactive_file"]


def _amounts(file: Path) -> dict[str, int]:
    """The amounts in a file of Linux, by name.

    A line is `MemAvailable:   16231040 kB` below `/proc`, `file 1204224` in bytes below `/sys`.
    """
    words = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdigit()}

"""Simulates a full disk."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Makes writes beyond a file size fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def small_disk(where: Path) -> Iterator[bool]:
    """Mounts a disk of 4 MiB in memory. Yields whether it is there: only root can mount."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(where)]
    if subprocess.run(command, capture_output=True).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(file: Path) -> None:
    """Writes a file until the disk is full."""
    file.parent.mkdir(parents=True)
    with file.open("wb", buffering=0) as opened, suppress(OSError):
        while True:
            opened.write(bytes(2**12))

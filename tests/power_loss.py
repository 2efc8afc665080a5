"""A disk that loses its power.

The disk is an ext4 image on a loop device. Its file holds what the device was given; what only the
system's memory holds is lost in a copy of it, as in a power cut. The file is on a disk of its own,
which is frozen while it is copied: a power cut is one moment. Only root can mount disks.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 48


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    """Mounts an image; without `fsync`, nothing reaches it by itself within minutes."""
    where.mkdir(exist_ok=True)
    run("mount", "-o", "loop,commit=900", image, where)
    try:
        yield where
    finally:
        unmount(where)


@contextmanager
def new_disk(directory: Path) -> Iterator[Path]:
    """A disk of 48 MiB; an `OSError` where none can be mounted."""
    with (
        mounted(new_image(directory / "below.img", 2 * MIB), directory / "below") as below,
        mounted(new_image(below / "disk.img", MIB), directory / "disk") as where,
    ):
        yield where


def unmount(where: Path) -> None:
    """A disk is busy until the last of its files is closed, which may be a moment after a read."""
    for _ in range(50):
        try:
            return run("umount", where)
        except OSError:
            time.sleep(0.1)
    run("umount", where)


def new_image(file: Path, size: int) -> Path:
    with file.open("wb") as image:
        image.truncate(size * 2**20)
    run("mkfs.ext4", "-q", "-F", file)
    return file


@contextmanager
def after_power_loss(disk: Path) -> Iterator[Path]:
    """The disk as it is found when the power comes back."""
    image, below = disk.parent / "later.img", disk.parent / "below"
    run("fsfreeze", "--freeze", below)
    try:
        shutil.copyfile(below / "disk.img", image)
    finally:
        run("fsfreeze", "--unfreeze", below)
    with mounted(image, disk.parent / "later") as where:
        yield where
    image.unlink()

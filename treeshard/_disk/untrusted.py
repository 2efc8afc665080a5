"""Reads files of unknown origin: only regular files, and only up to a limit.

A FIFO would block its reader forever, and `/dev/zero` has no end. A limit of all memory would end
the process without naming the file. Checkpoints are trusted, and read without these limits.
"""

import os
import stat
from typing import Any, BinaryIO

from treeshard._core.memory import lacking_memory
from treeshard._core.text import human_bytes, parse_json
from treeshard.errors import CheckpointError, FormatError

# Of a plan, an index or a header. 100,000 leaves take about 20 MB.
MOST_BYTES = 2**26
# Brackets and commas in JSON, which become objects or entries in memory.
MOST_ITEMS = 2_000_000

_KINDS = [
    ("a directory", stat.S_ISDIR),
    ("a FIFO", stat.S_ISFIFO),
    ("a socket", stat.S_ISSOCK),
    ("a device", lambda mode: True),
]


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading. Never blocks."""
    _check_regular(path, os.stat(path))  # opening a device may have an effect
    # Without `O_NONBLOCK`, opening a FIFO waits for its writer.
    file = open(  # noqa: SIM115  (the caller closes it)
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    )
    try:  # another program may have replaced the file since
        _check_regular(path, os.fstat(file.fileno()))
    except CheckpointError:
        file.close()
        raise
    return file


def _check_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next(kind for kind, is_it in _KINDS if is_it(found.st_mode))
        raise CheckpointError(f"{path} is {kind}, and only regular files are read.")


def read_file(
    path: str | os.PathLike[str], most: int = MOST_BYTES, *, pipes: bool = False
) -> bytes:
    """The bytes of a regular file, or with `pipes` of any file, such as a shell's `<(...)`.

    Raises `FormatError` if it has more than `most` bytes.
    """
    with open(path, "rb") if pipes else open_file(path) as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = max(len(data), os.fstat(file.fileno()).st_size)
            raise FormatError(f"{path} has {human_bytes(size)}. {_limit_text(most)}")
    return data


def parse(text: bytes) -> Any:
    """Parses JSON of unknown origin, within the limits of `check_size`."""
    check_size(text)
    return parse_json(text)


def check_size(text: bytes) -> None:
    """Raises `FormatError` if JSON has too many bytes or values."""
    if len(text) > MOST_BYTES:
        raise FormatError(f"JSON of {human_bytes(len(text))}. {_limit_text(MOST_BYTES)}")
    items = text.count(b",") + text.count(b"[") + text.count(b"{")
    if items > MOST_ITEMS:
        raise FormatError(f"JSON of about {items:,} values. At most {MOST_ITEMS:,} are read.")


def _limit_text(most: int) -> str:
    return f"At most {human_bytes(most)} are read."


# ------------------------------------------------------------------ memory


_READ_LESS = "Read fewer leaves (`partial=True`), or shard them over more processes."


def check_memory(
    path: str | os.PathLike[str],
    needed: int,
    threads: int = 0,
    way_out: str = _READ_LESS,
) -> None:
    """Raises `CheckpointError` unless the host has `needed` bytes of memory to read arrays from
    `path`, and space for new threads."""
    if lacking := lacking_memory(needed, threads):
        raise no_memory_to_read(path, *lacking, way_out)


def no_memory_to_read(
    path: str | os.PathLike[str], fact: str, _free: int, way_out: str = _READ_LESS
) -> CheckpointError:
    return CheckpointError(f"{path}: the arrays and their reader need {fact} {way_out}")

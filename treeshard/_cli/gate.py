"""`treeshard gate`: does a step still mean and cost what its lock says?

A pull request is compared with a file in its own repository, and not with its parent: the parent
need not compile with today's JAX, and a review sees what a change does to the file.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from treeshard._cli.compile import compile_function
from treeshard.errors import DoesNotFitError, FormatError, counted
from treeshard.programs._lock import Change, compare_locks, lock_of, read_lock, write_lock

# Exit codes; 2 is that of invalid input.
_AS_LOCKED = 0
_DIFFERS = 1

_ABSENT = "{path} does not exist. Add --write to write it, and commit it."
_OTHER_SIZE = "{path} has values of at least {size} elements. Add --write to change --min-size."
_WAY_OUT = "If this is intended, run the command with --write, and commit {path}."


def run_gate(options: argparse.Namespace) -> tuple[str, int]:
    """Compares a step with its lock, or writes it. Returns one of the exit codes above."""
    path: Path = options.against
    locked = None
    if not options.write:
        if not path.exists():  # before minutes of compiling
            raise FormatError(_ABSENT.format(path=path))
        locked = read_lock(path)
        size = locked.record["min_size"]
        if options.min_size not in (None, size):
            raise FormatError(_OTHER_SIZE.format(path=path, size=size))
    try:
        compiled = compile_function(options)
    except DoesNotFitError as error:
        return _report([Change(f"It does NOT fit. {error}")], path, options.github), _DIFFERS
    if locked is None:
        lock = lock_of(compiled, options.min_size)
        write_lock(lock, path)
        return f"wrote {path}: {lock}", _AS_LOCKED
    lock = lock_of(compiled, locked.record["min_size"])
    changes, notes = compare_locks(locked, lock, str(path))
    if not changes:
        return "\n".join([*notes, f"as in {path}: {lock}"]), _AS_LOCKED
    way_out = _WAY_OUT.format(path=path)
    return "\n".join([*notes, _report(changes, path, options.github), way_out]), _DIFFERS


def _report(changes: Sequence[Change], path: Path, github: bool) -> str:
    head = f"{counted(len(changes), 'difference')} from {path}:"
    line_of = _annotation if github else _line
    lines = [line_of(change, path) for change in changes]
    return "\n".join([head, *lines])


def _line(change: Change, path: Path) -> str:
    return f"  {change.text}" + (f" ({_relative(change.line)})" if change.line else "")


def _annotation(change: Change, path: Path) -> str:
    """`::error file=model.py,line=31::...`, which GitHub shows at the line of a pull request."""
    file, _, number = _relative(change.line).rpartition(":")
    where = f"file={_escaped(file, ',:')},line={number}" if file else f"file={_escaped(path, ',:')}"
    return f"::error {where},title=treeshard gate::{_escaped(change.text)}"


def _escaped(text: object, more: str = "") -> str:
    """The text with what GitHub reads as its own written as `%0A`."""
    return "".join(f"%{ord(x):02X}" if x in f"%\r\n{more}" else x for x in str(text))


def _relative(line: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return line.removeprefix(here)

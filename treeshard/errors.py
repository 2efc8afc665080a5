"""The errors and warnings of treeshard, and the helpers that build their messages.

Each error also subclasses a built-in exception, so code that catches `ValueError` or `KeyError`
around a call keeps working. `except TreeShardError` catches all of them.
"""

import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import TypeVar

import jax

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CommunicationError",
    "DamagedError",
    "DeletedLeafError",
    "DoesNotFitError",
    "FormatError",
    "LeafError",
    "MeshError",
    "MismatchError",
    "NoDevicesError",
    "NoMeshError",
    "ProcessError",
    "RemovedError",
    "ShardingRuleError",
    "ShardingTypeError",
    "ShardingWarning",
    "SpecError",
    "StateError",
    "TreeShardError",
    "UnexpectedShardingError",
    "UnknownAxisError",
    "UnstableStepError",
    "WrongResultError",
]


E = TypeVar("E", bound="SpecError | ShardingRuleError")


# Messages quote names from files, which may be longer than anybody can read.
_LONGEST_LINE, _LONGEST_MESSAGE = 2_000, 50_000
# Names that are compared with a misspelt one, and the longest of them.
_MOST_NAMES, _LONGEST_NAME = 10_000, 200
# Control characters are commands to terminals, and some others reverse the order of letters.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def __dir__() -> list[str]:
    return __all__


class TreeShardError(Exception):
    """Base class of the errors that treeshard raises.

    Messages quote names from files: unprintable characters are escaped, long lines shortened.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(readable(x) if isinstance(x, str) else x for x in args))


class ArgumentError(TreeShardError, TypeError):
    """An argument has the wrong type, or two arguments are swapped."""


class NoMeshError(TreeShardError, RuntimeError):
    """A mesh is needed, and neither an argument nor a context provides one."""


class MeshError(TreeShardError, ValueError):
    """A mesh cannot be built, or cannot be used here."""


class NoDevicesError(MeshError, NoMeshError):
    """Arrays must be placed, and the mesh is abstract: it has no devices."""


class UnknownAxisError(TreeShardError, ValueError, KeyError):
    """A name is not an axis of the mesh."""

    # `KeyError.__str__` would print the `repr` of the message, on one line.
    __str__ = Exception.__str__


class SpecError(TreeShardError, ValueError):
    """Specs do not fit the arrays or the tree that they are for."""


class ShardingRuleError(TreeShardError, ValueError):
    """A list of rules is malformed, no rule matches some leaf, or a spec does not fit its leaf."""


class UnknownAxisInRuleError(ShardingRuleError, UnknownAxisError):
    """Rules name an axis that the mesh does not have. The message may list other misfits too."""


class UnknownAxisInSpecError(SpecError, UnknownAxisError):
    """Specs name an axis that the mesh does not have. The message may list other misfits too."""


class FormatError(TreeShardError, ValueError):
    """Text is malformed: a plan as JSON, a file of shapes or rules, a spec or a dtype."""


class DeletedLeafError(TreeShardError, RuntimeError):
    """A leaf was deleted, or donated to a compiled function."""


class DoesNotFitError(TreeShardError, MemoryError):
    """A program needs more memory than a device has, or a tree more than its host.

    Attributes:
        need: The bytes that it needs per device or of the host. `None` if they are unknown.
        capacity: The bytes that the device has, or that are free on the host.
    """

    def __init__(self, message: str, need: int | None = None, capacity: int | None = None) -> None:
        super().__init__(message)
        self.need, self.capacity = need, capacity


class LeafError(TreeShardError, TypeError):
    """A leaf has no values to move or save: a tracer, a `ShapeDtypeStruct`, a mutable reference, a
    class that JAX does not know."""


class StateError(TreeShardError, TypeError):
    """A training state changed in a way that one compiled step cannot express."""


class ShardingTypeError(TreeShardError, TypeError):
    """JAX cannot derive how the result of an operation is sharded over Explicit axes."""


class ProcessError(TreeShardError, RuntimeError):
    """A process did not arrive at a collective call, left it, or disagrees with the others."""


class CheckpointError(TreeShardError, RuntimeError):
    """A checkpoint or a file of tensors cannot be written or read."""


class DamagedError(CheckpointError):
    """The bytes on the disk differ from the saved bytes."""


class RemovedError(CheckpointError):
    """A checkpoint was removed or replaced by its writer while it was read."""


class MismatchError(TreeShardError, ValueError):
    """The requested leaves, shapes or dtypes differ from the stored ones."""


class UnstableStepError(TreeShardError, AssertionError):
    """A step returns its state in a different form than it received it, so it recompiles."""


class CommunicationError(TreeShardError, AssertionError):
    """A program communicates in another way than a test expects."""


class UnexpectedShardingError(TreeShardError, AssertionError):
    """A plan or a tree of arrays is not sharded as a test expects."""


class WrongResultError(TreeShardError, AssertionError):
    """A computation gives different numbers in different layouts, by more than rounding."""


class ShardingWarning(UserWarning):
    """Something is not sharded as requested. Turn the warning into an error with
    `warnings.simplefilter("error", treeshard.ShardingWarning)`."""


def misfit_error(kinds: Iterable[str], error: type[E]) -> type[E]:
    """The class to raise for misfits of these kinds, as `Adjustment.kind` names them.

    It is `error`, which is `SpecError` or `ShardingRuleError`; if the mesh lacks an axis, the
    subclass of it that is an `UnknownAxisError` too.
    """
    if "axis-not-in-mesh" not in kinds:
        return error
    return next(kind for kind in error.__subclasses__() if issubclass(kind, UnknownAxisError))


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`" Did you mean 'fsdp'?"`, or `""` if no known name is similar. 1 as `cutoff` is equality."""
    if len(name) > _LONGEST_NAME:
        return ""
    known = [x for x in islice(known, _MOST_NAMES) if len(x) <= _LONGEST_NAME]
    similar = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def printable(text: str) -> str:
    """Escapes control characters except newlines, as in `\\x1b`."""
    return _UNPRINTABLE.sub(lambda c: c[0].encode("unicode_escape").decode(), text)


def short(text: str, most: int = _LONGEST_NAME) -> str:
    """A name on one line, escaped as in `printable`, without its middle if it is long."""
    return printable(_cut_middle(text, most).replace("\n", "\\n"))


def readable(message: str) -> str:
    """A message as in `printable`, without the middle of lines that are too long to read."""
    message = _cut_middle(message, _LONGEST_MESSAGE)
    lines = message.split("\n") if len(message) > _LONGEST_LINE else [message]
    return printable("\n".join(_cut_middle(line, _LONGEST_LINE) for line in lines))


def _cut_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    left_out = f" ... {len(text) - most:,} characters ... "
    return text[: most - most // 2] + left_out + text[len(text) - most // 2 :]


def counted(count: int, noun: str) -> str:
    """`1 leaf`, `2,000 leaves`."""
    many = {"leaf": "leaves", "entry": "entries"}.get(noun, f"{noun}s")
    return f"{count:,} {noun if count == 1 else many}"


def listed(headline: str, facts: Sequence[str], shown: int = 10, headed: bool = False) -> str:
    """One message for many facts: the first `shown` in full, then a count of the rest.

    A single fact is returned without the headline, unless `headed`.
    """
    if len(facts) == 1 and not headed:
        return facts[0]
    lines = [headline, *(f"  {fact}" for fact in facts[:shown])]
    if len(facts) > shown:
        lines.append(f"  ... and {len(facts) - shown} more")
    return "\n".join(lines)


# ------------------------------------------------------------------ the user's line

# Messages name the line to look at: the innermost one that the user wrote. Stacks come from Python,
# from a traceback, and from the text of a compiled program, so a line is text: `file:line`.
#
# 1. Never: treeshard and JAX.
_HIDDEN = tuple(os.path.join(path, "") for path in (os.path.dirname(__file__), *jax.__path__))
# 2. Only if there is no other: Python's own library, commands such as `ipython`, packages, and code
#    without a file, which is the user's in a console, but a package's where that writes functions.
_INSTALLED = ("stdlib", "platstdlib", "scripts")
_STANDARD = tuple(os.path.join(sysconfig.get_path(x), "") for x in _INSTALLED)
_PACKAGES = re.compile(r"/(site|dist)-packages/|^<")


def select_own_lines(lines: Iterable[str]) -> list[str]:
    """The lines, as `file:line`, that are in the user's code."""
    not_own = _HIDDEN + _STANDARD
    return [x for x in lines if not x.startswith(not_own) and not _PACKAGES.search(x)]


def user_line(stack: Iterable[str]) -> str:
    """The line of a call stack, innermost first, that is the user's: neither treeshard's nor, if
    others remain, a package's."""
    lines = list(stack)
    outside = [line for line in lines if not line.startswith(_HIDDEN)]
    return next(iter(select_own_lines(outside) or outside or lines), "")


def calling_line(stack: Iterable[str]) -> str:
    """The line of a call stack, innermost first, that called JAX or treeshard: the user's, or a
    package's."""
    lines = list(stack)
    return next((line for line in lines if not line.startswith(_HIDDEN)), user_line(lines))


def walk_calls(innermost: FrameType) -> list[tuple[str, str]]:
    """The calls that led to a frame, itself the first: the line of each, and the name of the
    function there."""
    frames = walk_stack(innermost)
    return [(f"{x.f_code.co_filename}:{line}", x.f_code.co_name) for x, line in frames]


def warn(message: str) -> None:
    """Warns at the user's line, so that Python's own registry shows a message once per line."""
    # `skip_file_prefixes=` of `warnings.warn`, from Python 3.12 on, takes no packages in the middle
    # of a path. Level 1 is the line of this call.
    lines = [line for line, _ in walk_calls(sys._getframe())]
    level = 1 + lines.index(user_line(lines))
    warnings.warn(readable(message), ShardingWarning, stacklevel=level)

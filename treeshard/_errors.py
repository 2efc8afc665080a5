"""What treeshard raises and warns, and how its messages are put together."""

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class TreeShardError(Exception):
    """The base of every error that treeshard raises on purpose."""


class NoMeshError(TreeShardError, RuntimeError):
    """A mesh was needed, and neither an argument nor a context gave one."""


class MeshError(TreeShardError, ValueError):
    """A mesh was asked for that cannot be built."""


class UnknownAxisError(TreeShardError, ValueError, KeyError):
    """An axis was named that the mesh does not have."""

    # KeyError's own would print the message escaped, on one line.
    __str__ = Exception.__str__


class SpecError(TreeShardError, ValueError):
    """Specs do not fit the arrays, or the tree, that they were given for."""


class ShardingRuleError(TreeShardError, ValueError):
    """A list of rules is malformed, or does not decide every leaf."""


class UnknownAxisInRuleError(ShardingRuleError, UnknownAxisError):
    """Rules name an axis that the mesh does not have (other misfits may be listed too)."""


class UnknownAxisInSpecError(SpecError, UnknownAxisError):
    """Specs name an axis that the mesh does not have (other misfits may be listed too)."""


class FormatError(TreeShardError, ValueError):
    """Text is not what it should be: a plan as JSON, or a file of shapes or rules."""


class DeletedLeafError(TreeShardError, RuntimeError):
    """A leaf's memory is gone: it was deleted, or donated to a compiled function."""


class LeafError(TreeShardError, TypeError):
    """A leaf holds nothing that could be moved: it is traced, or only describes an array."""


class StateError(TreeShardError, TypeError):
    """A training state changed in a way that one compiled step cannot express."""


class ProcessError(TreeShardError, RuntimeError):
    """Processes that must go on together did not all come, or do not agree."""


class CheckpointError(TreeShardError, RuntimeError):
    """A checkpoint or a file of tensors cannot be written, or cannot be read."""


class DamagedError(CheckpointError):
    """What is on disk is not what was saved there."""


class MismatchError(TreeShardError, ValueError):
    """What was saved is not what is asked for: other leaves, shapes or dtypes."""


class UnstableStepError(TreeShardError, AssertionError):
    """A step hands its state back in another form than it took it, and compiles again."""


class CommunicationError(TreeShardError, AssertionError):
    """A program moves other data between devices than a test says."""


class ShardingWarning(UserWarning):
    """Something was not sharded as it was asked for. Turn it into an error with
    `warnings.simplefilter("error", treeshard.ShardingWarning)`."""


def _say_where_to_import(kinds: Iterable[type]) -> None:
    """Makes tracebacks name classes as users import them."""
    for kind in kinds:
        kind.__module__ = "treeshard"


_say_where_to_import((ShardingWarning, TreeShardError, *TreeShardError.__subclasses__()))
_say_where_to_import(CheckpointError.__subclasses__())


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`" Did you mean 'fsdp'?"`, or nothing if no known name is near (1 is the same name)."""
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def listed(headline: str, facts: Sequence[str], shown: int = 10, headed: bool = False) -> str:
    """One message for many facts: the first ten in full, then a count of the rest.

    A single fact needs no headline, unless it says more than how many there are (`headed`).
    """
    if len(facts) == 1 and not headed:
        return facts[0]
    lines = [headline, *(f"  {fact}" for fact in facts[:shown])]
    if len(facts) > shown:
        lines.append(f"  ... and {len(facts) - shown} more")
    return "\n".join(lines)


def warn(message: str) -> None:
    """Warns at the nearest line outside treeshard, so that Python's own registry shows
    a message once per place."""
    here = os.path.join(os.path.dirname(__file__), "")
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ShardingWarning, stacklevel=level)

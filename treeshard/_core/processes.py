"""What several processes do together: they fail together and agree.

JAX starts a program on each process and never asks whether it is the same one. A process that
raises before it, or starts another, leaves the rest waiting in a collective without an end or a
word. So calls that move data exchange a message first.

Callers use `all_or_none` and `require_agreement`: if one process raises, all raise. Both are made
of `exchange` and `exchange_outcomes`. Only the stages of a save call `exchange_outcomes`
themselves, since they raise a `CheckpointError` that lists the errors of all processes.

What one process receives must not grow with their number, so messages go to the first process, and
an answer comes back: see `meetings`.
"""

import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar, Unpack

import jax
from jax.sharding import Mesh

from treeshard._core.arrays import is_spread, processes_of
from treeshard._core.facts import UNKNOWN, Differences, Facts, differences
from treeshard._core.meetings import (
    TIMEOUT,
    Answer,
    Combine,
    MeetingOptions,
    check_lines,
    exchange,
    indices,
    mark_broken,
    release_interrupts,
    set_told,
    showing_life,
)
from treeshard._core.mesh import AnyMesh
from treeshard._core.replicas import shared_parts
from treeshard._core.text import group_by_fact, limit_to_eight
from treeshard.errors import ProcessError, listed

# ------------------------------------------------------------------ failing together, agreeing


class Messages:
    """What the block of `all_or_none` says to the other processes, and after it, what was heard."""

    def __init__(self) -> None:
        self.own = b""  # set by the block
        self.answer = b""  # the same on all processes
        self.received: list[bytes] = []  # from all processes, on the first of them alone


def to_first(_messages: list[bytes]) -> bytes:
    """The answer to messages that the first process alone needs."""
    return b""


@contextmanager
def all_or_none(
    what: str, combine: Combine = b"".join, **options: Unpack[MeetingOptions]
) -> Iterator[Messages]:
    """Runs its block on every process; if it raises on one, all raise. Arguments as in `exchange`.

    Yields `Messages`, in which the block may set the one of this process; after the block, they
    have the answer. By default, it is all messages one after the other, for a message of one
    process. The error of the block is raised here; on the others, a `ProcessError` quotes it. A
    Ctrl-C in the block is raised here only after the others were told; another one, while this
    process waits for them, is raised at once, and the break is final.
    """
    messages = Messages()
    own_error: BaseException | None = None  # told to the others before it is raised here
    with showing_life(options):
        try:
            release_interrupts()
            yield messages
            release_interrupts()
        except BaseException as error:  # a Ctrl-C too
            own_error = error
        try:
            told, failures = exchange_outcomes(what, own_error, messages.own, combine, **options)
        except ProcessError as absent:
            # The user's own error says more than that the others did not hear of it.
            raise (own_error or absent) from None
    if own_error is not None:
        raise own_error
    if len(failures) == 1:
        raise ProcessError(f"{what}: nothing was done, since {failures[0]}")
    if failures:
        headline = f"{what}: nothing was done, since other processes failed:"
        raise ProcessError(listed(headline, failures, headed=True))
    messages.answer, messages.received = told


def exchange_outcomes(
    what: str,
    error: BaseException | None,
    message: bytes,
    combine: Combine = b"".join,
    **options: Unpack[MeetingOptions],
) -> tuple[Answer, list[str]]:
    """Tells the other processes the message of this one, or its error. Arguments as in `exchange`.

    Returns the answer, and in words which errors processes have raised.
    """
    # The first byte says which it is: an error of one process is a message to the others.
    outcome = b"+" + message
    if error is not None:
        outcome = f"-{type(error).__name__}: {error}".removesuffix(": ").encode()

    def combine_outcomes(outcomes: list[bytes]) -> bytes:
        by_process = zip(indices(options.get("among")), outcomes, strict=True)
        failures = {i: text[1:].decode() for i, text in by_process if text[:1] == b"-"}
        if failures:
            return b"-" + json.dumps(name_failures(failures)).encode()
        return b"+" + combine([text[1:] for text in outcomes])

    answer, outcomes = exchange(what, outcome, combine_outcomes, **options)
    set_told(error)
    if answer[:1] == b"-":
        return Answer(b"", []), json.loads(answer[1:])
    return Answer(answer[1:], [text[1:] for text in outcomes]), []


def name_failures(failures: Mapping[int, str]) -> list[str]:
    """`process 1 raised OSError: disk full`, for each error; eight at most."""
    return limit_to_eight(f"{on} raised {text}" for text, on in group_by_fact(failures).items())


@contextmanager
def require_agreement(
    what: str, *, reads: bool = True, **options: Unpack[MeetingOptions]
) -> Iterator[Facts]:
    """Runs its block on every process; if the blocks record different facts, all raise.

    Yields `Facts` for the block to fill, in order. The processes exchange hashes of the facts, and
    the facts themselves only if hashes differ. Otherwise as `all_or_none`. The caller compares the
    values of `Facts.unread` itself unless this `reads` them.
    """
    facts = Facts()
    with all_or_none(what, _differing_groups, **options) as hashes:
        yield facts
        hashes.own = json.dumps(facts.hashes()).encode()
    _raise_differences(what, facts, hashes, options)
    if facts.unread and reads:
        # Not before: a process that waits for a program which others have not started would not
        # come to the meeting in which that is noticed.
        options["phase"] = "values"
        values = Facts()
        with all_or_none(what, _differing_groups, **options) as hashes:
            for name, x in facts.unread.items():
                values.share(name, shared_parts(x, indices(options.get("among"))))
            hashes.own = json.dumps(values.hashes()).encode()
        _raise_differences(what, values, hashes, options)
    elif not facts.unread and UNKNOWN in facts.values():
        check_lines(what, **options)


def _raise_differences(what: str, facts: Facts, hashes: Messages, options: MeetingOptions) -> None:
    lines = _differences(what, facts, hashes, options).lines()
    if lines:
        headline = (
            f"{what}: the processes do not agree, and nothing was done. All of them must make the"
            " same call. The differences:"
        )
        mark_broken(what, options.get("among"))
        raise ProcessError(listed(headline, lines, headed=True))


def compare_copies(
    what: str, arrays: Mapping[str, Any], *, timeout: float = TIMEOUT
) -> dict[str, tuple[str, str]]:
    """The arrays whose copies differ on the devices and processes that hold them, by path.

    All processes must make this call, and all get the same answer: the first part that differs, and
    its checksums. An array that is on no other process is one that each process has a copy of.
    """
    options: MeetingOptions = {"phase": "replicas", "timeout": timeout}
    facts = Facts()
    with all_or_none(what, _differing_groups, **options) as hashes:
        among = indices(None)
        for path, x in arrays.items():
            facts.share(path, shared_parts(x, among))
        hashes.own = json.dumps(facts.hashes()).encode()
    return _differences(what, facts, hashes, options).values


def _differing_groups(hashes: list[bytes]) -> bytes:
    """The groups of facts whose hashes differ between processes; empty if there are none.

    A process has sent an empty hash of a part that is not the same on its own devices.
    """
    found = defaultdict[str, set[str]](set)
    for message in hashes:
        for group, text in json.loads(message).items():
            found[group].add(text)
    differing = [group for group, texts in found.items() if len(texts) > 1 or "" in texts]
    return json.dumps(differing).encode() if differing else b""


def _differences(what: str, facts: Facts, hashes: Messages, options: MeetingOptions) -> Differences:
    """In what processes differ. They send their facts only if the hashes of these differ."""
    if not hashes.answer:
        return Differences({}, {})

    def combine(messages: list[bytes]) -> bytes:
        told = (json.loads(zlib.decompress(message)) for message in messages)
        by_process = dict(zip(indices(options.get("among")), told, strict=True))
        return zlib.compress(json.dumps(differences(by_process)).encode())

    groups = facts.select_groups(json.loads(hashes.answer))
    payload = zlib.compress(json.dumps(groups).encode())
    phase = f"{options.get('phase', '')} differences"
    answer = exchange(what, payload, combine, **{**options, "phase": phase})
    differing, values = json.loads(zlib.decompress(answer.combined))
    return Differences(differing, {leaf: (part, text) for leaf, (part, text) in values.items()})


# ------------------------------------------------------------------ participants


def participating_processes(
    leaves: Iterable[Any], meshes: Iterable[AnyMesh] = (), more: Iterable[int] = ()
) -> list[int]:
    """The processes that own devices of spread leaves or of meshes, and `more`; ascending.

    Empty if this process is the only one, or is not among them: then there is no exchange.
    """
    if jax.process_count() == 1:
        return []
    shardings = {x.sharding for x in leaves if is_spread(x)}
    owners = frozenset[int]().union(*map(processes_of, shardings))
    owners |= {d.process_index for m in meshes if isinstance(m, Mesh) for d in m.devices.flat}
    participants = sorted({*owners, *more}) if owners else []
    me = jax.process_index()
    return participants if me in participants and participants != [me] else []


# ------------------------------------------------------------------ progress

T = TypeVar("T")


def wants_bar() -> bool:
    """Whether to show a bar that was not asked for: on a terminal, if `tqdm` is installed."""
    return sys.stderr.isatty() and find_spec("tqdm") is not None


def show_progress(
    items: Sequence[T], what: str, *, unit: str = "leaf", show: bool = True, after: float = 0.0
) -> Iterator[T]:
    """Iterates over `items`, and shows a progress bar on process 0 once `after` seconds are over.

    Raises `ImportError` in the name of `what`, on every process, if `show` is true and `tqdm` is
    not installed.
    """
    if not show:
        return iter(items)
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            f"{what}(progress=True) needs tqdm. Install it with `pip install 'treeshard[show]'`."
        ) from None
    # tqdm shows a bar of no items as "0it".
    if not items or jax.process_index() != 0:
        return iter(items)
    return iter(tqdm(items, desc=what, unit=unit, delay=after))

"""Makes the processes of a call agree, and fail together.

JAX starts a program on each process and never checks that all start the same program. If a process
raises before the program, or starts another program, the other processes wait in a collective
forever, without an error. So calls that move data exchange a message first.

Callers use `all_or_none` and `require_agreement`: if one process raises, all raise. Both use
`exchange` and `exchange_outcomes`. Only the stages of a save call `exchange_outcomes` directly,
because they raise a `CheckpointError` that lists the errors of all processes.

The bytes that a process receives must not grow with the number of processes. So all processes send
their messages to the first process, which returns one answer: see `meetings`.
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
    """The message that a block of `all_or_none` sends, and afterwards the received messages."""

    def __init__(self) -> None:
        self.own = b""  # set by the block
        self.answer = b""  # equal on all processes
        self.received: list[bytes] = []  # from all processes, but only on the first process


def to_first(_messages: list[bytes]) -> bytes:
    """An empty answer, for messages that only the first process needs."""
    return b""


@contextmanager
def all_or_none(
    what: str, combine: Combine = b"".join, **options: Unpack[MeetingOptions]
) -> Iterator[Messages]:
    """Runs its block on every process; if it raises on one, all raise. Arguments as in `exchange`.

    Yields `Messages`. The block may set this process's message, and after the block, `Messages`
    holds the answer. By default, the answer concatenates all messages. If the block raises, this
    process raises the same error, and the others raise a `ProcessError` that quotes it. A Ctrl-C in
    the block is raised after the other processes have received it. If a second Ctrl-C interrupts
    this exchange, it is raised at once, and every later call raises.
    """
    messages = Messages()
    own_error: BaseException | None = None  # sent to the others before this process raises it
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
            # The user's own error explains more than the failure to report it to the others.
            raise (own_error or absent) from None
    if own_error is not None:
        raise own_error
    if len(failures) == 1:
        raise ProcessError(f"{what}: the call was cancelled, because {failures[0]}")
    if failures:
        headline = f"{what}: the call was cancelled, because other processes failed:"
        raise ProcessError(listed(headline, failures, headed=True))
    messages.answer, messages.received = told


def exchange_outcomes(
    what: str,
    error: BaseException | None,
    message: bytes,
    combine: Combine = b"".join,
    **options: Unpack[MeetingOptions],
) -> tuple[Answer, list[str]]:
    """Sends this process's message, or its error, to the others. Arguments as in `exchange`.

    Returns the answer, and a text for each error that processes have raised.
    """
    # The first byte distinguishes a message from an error.
    outcome = b"+" + message
    if error is not None:
        text = f"-{type(error).__name__}: {error}".removesuffix(": ")
        outcome = text.encode(errors="backslashreplace")  # paths may have half a surrogate pair

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
    """Returns texts such as `process 1 raised OSError: disk full`, at most eight."""
    return limit_to_eight(f"{on} raised {text}" for text, on in group_by_fact(failures).items())


@contextmanager
def require_agreement(
    what: str, *, reads: bool = True, **options: Unpack[MeetingOptions]
) -> Iterator[Facts]:
    """Runs its block on every process; if the blocks record different facts, all raise.

    Yields `Facts` for the block to fill, in order. The processes exchange hashes of the facts, and
    exchange the facts only if hashes differ. Errors of the block are handled as in `all_or_none`.
    If `reads` is false, the caller must compare the values of `Facts.unread`.
    """
    facts = Facts()
    with all_or_none(what, _differing_groups, **options) as hashes:
        yield facts
        hashes.own = json.dumps(facts.hashes()).encode()
    _raise_differences(what, facts, hashes, options)
    if facts.unread and reads:
        # Read values only now. A process that reads the result of a program waits for it, and if
        # another process has not started the program, the first meeting must report that.
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
            f"{what}: the call differs between processes and was cancelled. All processes must make"
            " the same call. The differences:"
        )
        mark_broken(what, options.get("among"))
        raise ProcessError(listed(headline, lines, headed=True))


def compare_copies(
    what: str, arrays: Mapping[str, Any], *, timeout: float = TIMEOUT
) -> dict[str, tuple[str, str]]:
    """The arrays whose copies differ between devices or processes, by path.

    All processes must make this call, and receive the same answer: the first part that differs, and
    its checksums. Each process must have its own copy of an array that is not spread over several.
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
    """The groups of facts whose hashes differ between processes, or empty bytes.

    A process sends an empty hash for a part that differs between its own devices.
    """
    found = defaultdict[str, set[str]](set)
    for message in hashes:
        for group, text in json.loads(message).items():
            found[group].add(text)
    differing = [group for group, texts in found.items() if len(texts) > 1 or "" in texts]
    return json.dumps(differing).encode() if differing else b""


def _differences(what: str, facts: Facts, hashes: Messages, options: MeetingOptions) -> Differences:
    """The differences between processes. They exchange facts only if hashes differ."""
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

    The list is empty, so no messages are exchanged, if this process is the only one or is not in
    the list.
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
    """Whether to show a bar by default: on a terminal, if `tqdm` is installed."""
    return sys.stderr.isatty() and find_spec("tqdm") is not None


def show_progress(
    items: Sequence[T], what: str, *, unit: str = "leaf", show: bool = True, after: float = 0.0
) -> Iterator[T]:
    """Iterates over `items`; process 0 shows a progress bar after `after` seconds.

    Raises `ImportError` on every process, in the name of `what`, if `show` is true and `tqdm` is
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
    # Without items, tqdm would show "0it".
    if not items or jax.process_index() != 0:
        return iter(items)
    return iter(tqdm(items, desc=what, unit=unit, delay=after))

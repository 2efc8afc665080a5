"""What several processes do together: they fail together and agree.

JAX starts a program on each process and never asks whether it is the same one. A process that
raises before it, or starts another, leaves the rest waiting in a collective without an end or a
word. So calls that move data exchange a message first.

Callers use `all_or_none` and `require_agreement`: if one process raises, all raise. Both are made
of `exchange` and `exchange_outcomes`. Only the stages of a save call `exchange_outcomes`
themselves, since they raise a `CheckpointError` that lists the errors of all processes.
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
from treeshard._core.meetings import AS_LONG_AS_IT_TAKES as AS_LONG_AS_IT_TAKES
from treeshard._core.meetings import (
    TIMEOUT,
    MeetingOptions,
    check_lines,
    exchange,
    indices,
    mark_broken,
    release_interrupts,
    set_told,
)
from treeshard._core.mesh import AnyMesh
from treeshard._core.replicas import shared_parts
from treeshard.errors import ProcessError, listed

# ------------------------------------------------------------------ failing together, agreeing


@contextmanager
def all_or_none(what: str, **options: Unpack[MeetingOptions]) -> Iterator[list[bytes]]:
    """Runs its block on every process; if it raises on one, all raise. Arguments as in `exchange`.

    Yields a list, to which the block may append the message of this process; after the block, it
    has the message of each process. The error of the block is raised here; on the others, a
    `ProcessError` quotes it. A Ctrl-C in the block is raised here only after the others were told;
    another one, while this process waits for them, is raised at once, and the break is final.
    """
    messages: list[bytes] = []
    own_error: BaseException | None = None  # told to the others before it is raised here
    try:
        release_interrupts()
        yield messages
        release_interrupts()
    except BaseException as error:  # a Ctrl-C too
        own_error = error
    try:
        told, failures = exchange_outcomes(what, own_error, messages, **options)
    except ProcessError as absent:
        # The user's own error says more than that the others did not hear of it.
        raise (own_error or absent) from None
    if own_error is not None:
        raise own_error
    facts = [f"process {i} raised {text}" for i, text in failures.items()]
    if len(facts) == 1:
        raise ProcessError(f"{what}: nothing was done, since {facts[0]}")
    if facts:
        headline = f"{what}: nothing was done, since other processes failed:"
        raise ProcessError(listed(headline, facts, 4, headed=True))
    messages[:] = told


def exchange_outcomes(
    what: str,
    error: BaseException | None,
    messages: Sequence[bytes],
    **options: Unpack[MeetingOptions],
) -> tuple[list[bytes], dict[int, str]]:
    """Tells the other processes the messages of this one, or its error. Arguments as in `exchange`.

    Returns the message of each process, and the errors, by process.
    """
    # The first byte says which it is: an error of one process is a message to the others.
    outcome = b"+" + b"".join(messages)
    if error is not None:
        outcome = f"-{type(error).__name__}: {error}".removesuffix(": ").encode()
    outcomes = exchange(what, outcome, **options)
    set_told(error)
    failures: dict[int, str] = {}
    for i, text in zip(indices(options.get("among")), outcomes, strict=True):
        if text[:1] == b"-":
            failures[i] = text[1:].decode()
    return [text[1:] for text in outcomes], failures


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
    with all_or_none(what, **options) as hashes:
        yield facts
        hashes.append(json.dumps(facts.hashes()).encode())
    _raise_differences(what, facts, hashes, options)
    if facts.unread and reads:
        # Not before: a process that waits for a program which others have not started would not
        # come to the meeting in which that is noticed.
        options["phase"] = "values"
        values = Facts()
        with all_or_none(what, **options) as hashes:
            for name, x in facts.unread.items():
                values.share(name, shared_parts(x, indices(options.get("among"))))
            hashes.append(json.dumps(values.hashes()).encode())
        _raise_differences(what, values, hashes, options)
    elif not facts.unread and UNKNOWN in facts.values():
        check_lines(what)


def _raise_differences(
    what: str, facts: Facts, hashes: Sequence[bytes], options: MeetingOptions
) -> None:
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
    with all_or_none(what, **options) as hashes:
        for path, x in arrays.items():
            facts.share(path, shared_parts(x, indices(None)))
        hashes.append(json.dumps(facts.hashes()).encode())
    return _differences(what, facts, hashes, options).values


def _differences(
    what: str, facts: Facts, hashes: Sequence[bytes], options: MeetingOptions
) -> Differences:
    """In what processes differ. They exchange their facts only if the hashes of these do."""
    found = defaultdict[str, set[str]](set)
    for message in hashes:
        for group, text in json.loads(message).items():
            found[group].add(text)
    # A process has sent an empty hash of a part that is not the same on its own devices.
    differing = {group for group, texts in found.items() if len(texts) > 1 or "" in texts}
    if not differing:
        return Differences({}, {})
    payload = zlib.compress(json.dumps(facts.select_groups(differing)).encode())
    phase = f"{options.get('phase', '')} differences"
    messages = exchange(what, payload, **{**options, "phase": phase})
    told = (json.loads(zlib.decompress(message)) for message in messages)
    return differences(dict(zip(indices(options.get("among")), told, strict=True)))


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

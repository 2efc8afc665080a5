"""Do all processes mean the same thing? To be asked before they go on together."""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from treeshard._errors import ProcessError, listed
from treeshard._processes import TIMEOUT, exchange, indices, together


@contextmanager
def agreeing(
    what: str, *, among: Sequence[int] | None = None, timeout: float = TIMEOUT
) -> Iterator[dict[str, str]]:
    """Runs its block on every process, and all must come to the same facts; or all raise.

    What goes around is a hash. Only if these differ do the facts follow, for the message.

    Args:
        what: What is being done, as in `exchange`.
        among: As in `exchange`.
        timeout: Seconds that the others are waited for.

    Yields:
        The facts, for the block to fill, in order: what this process is about to do, by leaf path
        or by another name.

    Raises:
        ProcessError: If the facts differ: it says which, on which processes, and how. If a
            process did not come in time: it is named. If the block raised on others.
        Exception: Whatever the block raised here.
    """
    facts: dict[str, str] = {}
    told = b""
    with together(what, among=among, timeout=timeout) as said:
        yield facts
        told = json.dumps(list(facts.items())).encode()
        said.mine = hashlib.sha256(told).digest()
    if len(set(said.every)) == 1:
        return
    every = exchange(what, zlib.compress(told), among=among, timeout=timeout)
    read = [dict(json.loads(zlib.decompress(one))) for one in every]
    found = _differences(dict(zip(indices(among), read, strict=True)))
    headline = (
        f"{what}: the processes do not agree, and nothing was done. All of them must make the"
        " same call. They differ in:"
    )
    raise ProcessError(listed(headline, found, headed=True))


def _differences(said: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line for each fact that is not the same everywhere; else the first in another place."""
    names = dict.fromkeys(name for facts in said.values() for name in facts)
    rows = {name: {i: facts.get(name, "nothing") for i, facts in said.items()} for name in names}
    if found := [_line(name, row) for name, row in rows.items() if len(set(row.values())) > 1]:
        return found
    places = enumerate(zip(*said.values(), strict=True))
    place, names_there = next((i, row) for i, row in places if len(set(row)) > 1)
    return [_line(f"leaf {place}", dict(zip(said, map(repr, names_there), strict=True)))]


def _line(name: str, row: Mapping[int, str]) -> str:
    """`w: P('fsdp',) on processes 0, 1; P() on process 2`."""
    by_fact: dict[str, list[int]] = {}
    for i, fact in row.items():
        by_fact.setdefault(fact, []).append(i)
    return f"{name}: " + "; ".join(f"{fact} on {_named(on)}" for fact, on in by_fact.items())


def _named(processes: Sequence[int]) -> str:
    if len(processes) == 1:
        return f"process {processes[0]}"
    first, last = processes[0], processes[-1]
    if len(processes) > 2 and last - first + 1 == len(processes):
        return f"processes {first} to {last}"
    return "processes " + ", ".join(map(str, processes))

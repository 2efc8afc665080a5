"""Checks that all processes are about to do the same thing."""

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
    """Runs its block on every process; if the blocks record different facts, all raise.

    The processes exchange a hash of the facts, and the facts themselves only if hashes differ.

    Args:
        what: The operation, as in `exchange`.
        among: As in `exchange`.
        timeout: Seconds to wait for the other processes.

    Yields:
        A dict for the block to fill, in order: what this process is about to do, by leaf path
        or another name.

    Raises:
        ProcessError: If the facts differ; the message says which, how, and on which processes.
            If a process did not arrive in time. If the block raised on other processes.
        Exception: The error that the block raised on this process.
    """
    facts: dict[str, str] = {}
    encoded = b""
    with together(what, among=among, timeout=timeout) as said:
        yield facts
        encoded = json.dumps(list(facts.items())).encode()
        said.mine = hashlib.sha256(encoded).digest()
    if len(set(said.every)) == 1:
        return
    every = exchange(what, zlib.compress(encoded), among=among, timeout=timeout)
    decoded = [dict(json.loads(zlib.decompress(message))) for message in every]
    differences = _differences(dict(zip(indices(among), decoded, strict=True)))
    headline = (
        f"{what}: the processes do not agree, and nothing was done. All of them must make the"
        " same call. The differences:"
    )
    raise ProcessError(listed(headline, differences, headed=True))


def _differences(by_process: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line per fact that differs; if none does, one for the first that is out of order."""
    names = dict.fromkeys(name for facts in by_process.values() for name in facts)
    rows = {
        name: {i: facts.get(name, "nothing") for i, facts in by_process.items()} for name in names
    }
    if lines := [_line(name, row) for name, row in rows.items() if len(set(row.values())) > 1]:
        return lines
    positions = enumerate(zip(*by_process.values(), strict=True))
    position, order = next((i, row) for i, row in positions if len(set(row)) > 1)
    return [_line(f"leaf {position}", dict(zip(by_process, map(repr, order), strict=True)))]


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

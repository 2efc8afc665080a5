"""Do all processes mean the same thing? To be asked before they go on together."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence

import jax

from treeshard._errors import ProcessError, listed
from treeshard._processes import TIMEOUT, exchange


def agree(
    what: str,
    facts: Mapping[str, str],
    *,
    among: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Returns once all processes have given the same facts in the same order; or all raise.

    What goes around is a hash. Only if these differ do the facts follow, for the message.

    Args:
        what: What is being done, as in `exchange`.
        facts: What this process is about to do, by leaf path or by another name.
        among: The indices of the processes that take part; by default all.
        timeout: Seconds that the others are waited for.

    Raises:
        ProcessError: If the facts differ: it says which, on which processes, and how. If a
            process did not come in time: it is named.
    """
    there = sorted(set(range(jax.process_count()) if among is None else among))
    told = json.dumps(list(facts.items())).encode()
    hashes = exchange(what, hashlib.sha256(told).digest(), among=there, timeout=timeout)
    if len(set(hashes)) == 1:
        return
    said = exchange(what, zlib.compress(told), among=there, timeout=timeout)
    read = {i: dict(json.loads(zlib.decompress(one))) for i, one in zip(there, said, strict=True)}
    found = _differences(read)
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
    for place, row in enumerate(zip(*said.values(), strict=True)):
        if len(set(row)) > 1:
            names_here = [repr(name) for name in row]
            return [_line(f"leaf {place}", dict(zip(said, names_here, strict=True)))]
    return ["the hash alone"]  # pragma: no cover (equal facts have equal hashes)


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

"""What processes tell each other before they go on together.

It goes through the coordination service of JAX's own runtime: no device takes part, nothing is
compiled, and a process that does not come is named instead of waited for without end.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed  # the service has no public name that knows timeouts

from treeshard._errors import ProcessError, listed

# Seconds that the others are waited for, where a function says nothing else.
TIMEOUT = 60.0
# Where all are at work: that may take long, and if one is lost JAX itself ends the others.
AS_LONG_AS_IT_TAKES = 7 * 86400.0

_calls: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


def exchange(
    what: str, mine: bytes, *, among: Sequence[int] | None = None, timeout: float = TIMEOUT
) -> list[bytes]:
    """Gives every process what every other one has to say.

    All of them return, or all raise: a process that comes too late gets the error too.

    Args:
        what: What is being done, such as `"save /runs/7/step_100"`: the same on every process,
            and what messages say. Calls of one name meet in their order.
        mine: What this process says.
        among: The indices of the processes that take part; by default all. If there are none, this
            one is alone.
        timeout: Seconds that the others are waited for.

    Returns:
        What each said, in the order of their indices.

    Raises:
        ProcessError: If a process did not come in time: it is named.
    """
    there = indices(among)
    if there == [jax.process_index()]:
        return [mine]
    client = _client()
    call = f"{what}#{','.join(map(str, there))}"
    meeting = f"treeshard/{call}/{next(_calls[call])}"
    client.key_value_set_bytes(f"{meeting}/{jax.process_index()}", mine)
    try:
        client.wait_at_barrier(meeting, _milliseconds(timeout), there)
        told = dict(client.key_value_dir_get_bytes(f"{meeting}/"))
        # Whoever takes its words back must know that all have read them.
        client.wait_at_barrier(f"{meeting}/read", _milliseconds(timeout), there)
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(_absent(client, what, meeting, there, timeout, error)) from None
    client.key_value_delete(f"{meeting}/{jax.process_index()}")
    return [told[f"{meeting}/{i}"] for i in there]


class Said:
    """What the processes say at the end of a block that they run together.

    Attributes:
        mine: What this one says; its block sets it.
        every: After the block, what each said, in the order of their indices.
    """

    def __init__(self) -> None:
        self.mine = b""
        self.every: list[bytes] = []


@contextmanager
def together(
    what: str, *, among: Sequence[int] | None = None, timeout: float = TIMEOUT
) -> Iterator[Said]:
    """Runs its block on every process; where it raises on one, all raise.

    Args:
        what: As in `exchange`.
        among: As in `exchange`.
        timeout: As in `exchange`.

    Raises:
        ProcessError: If a process did not come, or if the block raised on others but not here:
            it says what they said.
        Exception: Whatever the block raised here.
    """
    said = Said()
    mine: Exception | None = None
    try:
        yield said
    except Exception as error:
        mine = error
    told = b"+" + said.mine if mine is None else f"-{type(mine).__name__}: {mine}".encode()
    try:
        every = exchange(what, told, among=among, timeout=timeout)
    except ProcessError as absent:
        raise (mine or absent) from None
    if mine is not None:
        raise mine
    pairs = zip(indices(among), every, strict=True)
    facts = [f"process {i} raised {one[1:].decode()}" for i, one in pairs if one[:1] == b"-"]
    if len(facts) == 1:
        raise ProcessError(f"{what}: nothing was done, since {facts[0]}")
    if facts:
        headline = f"{what}: nothing was done, since others failed:"
        raise ProcessError(listed(headline, facts, 4, headed=True))
    said.every = [one[1:] for one in every]


def processes_of(devices: Iterable[Any]) -> list[int]:
    """The processes that hold devices, by index."""
    return sorted({device.process_index for device in devices})


def indices(among: Sequence[int] | None) -> list[int]:
    """The processes that take part, as in `exchange`."""
    if among is None:
        return list(range(jax.process_count()))
    return sorted(set(among)) or [jax.process_index()]


def _milliseconds(timeout: float) -> int:
    return max(1, round(1000 * timeout))


def _absent(
    client: Any, what: str, meeting: str, there: Sequence[int], timeout: float, error: Exception
) -> str:
    absent = []
    for i in there:
        try:
            client.key_value_try_get_bytes(f"{meeting}/{i}")
        except jax.errors.JaxRuntimeError:
            absent.append(i)
    if not absent:  # all have come, and one too late, or the service itself is gone
        told = str(error).splitlines()[0]
        return (
            f"{what}: the processes missed each other by more than {timeout:g} s, or one was lost"
            f" ({told}). Nothing was done. See the logs of the others."
        )
    names = ", ".join(map(str, absent))
    return (
        f"{what}: {'process' if len(absent) == 1 else 'processes'} {names} of"
        f" {jax.process_count()} did not come within {timeout:g} s. Nothing was done. Every"
        " process must make this call; see the log of whoever is missing, or give it more time"
        " with `timeout=`."
    )


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ProcessError(
            f"There are {jax.process_count()} processes, and this one cannot talk to the others."
            " Call `jax.distributed.initialize()` first, on each of them."
        )
    return client

"""Exchanges messages between processes.

Uses the coordination service of JAX's own runtime: no device is involved and nothing is
compiled. A process that does not arrive is named in an error after a timeout.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed  # the public functions have no timeouts

from treeshard._errors import ProcessError, listed

# Seconds to wait for other processes, by default.
TIMEOUT = 60.0
# For waits while others do work of unknown length. If one of them dies, JAX itself ends the rest.
AS_LONG_AS_IT_TAKES = 7 * 86400.0

_calls: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


def exchange(
    what: str, mine: bytes, *, among: Sequence[int] | None = None, timeout: float = TIMEOUT
) -> list[bytes]:
    """Sends a message to every participating process and returns all messages.

    Either all processes return or all raise: a process that arrives late gets the error too.

    Args:
        what: The operation, such as `"save /runs/7/step_100"`; the same on every process.
            Messages name it. Calls with the same name are matched in order.
        mine: The message of this process.
        among: The indices of the participating processes; all by default. If it is empty, only
            this one participates.
        timeout: Seconds to wait for the other processes.

    Returns:
        The message of each process, in the order of their indices.

    Raises:
        ProcessError: If a process did not arrive in time. The message names it.
    """
    participants = indices(among)
    if participants == [jax.process_index()]:
        return [mine]
    client = _client()
    call = f"{what}#{','.join(map(str, participants))}"
    meeting = f"treeshard/{call}/{next(_calls[call])}"
    client.key_value_set_bytes(f"{meeting}/{jax.process_index()}", mine)
    try:
        client.wait_at_barrier(meeting, _milliseconds(timeout), participants)
        messages = dict(client.key_value_dir_get_bytes(f"{meeting}/"))
        # A message may be deleted only after all processes have read it.
        client.wait_at_barrier(f"{meeting}/read", _milliseconds(timeout), participants)
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(_absent(client, what, meeting, participants, timeout, error)) from None
    client.key_value_delete(f"{meeting}/{jax.process_index()}")
    return [messages[f"{meeting}/{i}"] for i in participants]


class Said:
    """The messages that processes exchange at the end of a block of `together`.

    Attributes:
        mine: The message of this process, set inside the block.
        every: After the block, the message of each process, in the order of their indices.
    """

    def __init__(self) -> None:
        self.mine = b""
        self.every: list[bytes] = []


@contextmanager
def together(
    what: str, *, among: Sequence[int] | None = None, timeout: float = TIMEOUT
) -> Iterator[Said]:
    """Runs its block on every process; if it raises on one, all raise.

    Args:
        what: As in `exchange`.
        among: As in `exchange`.
        timeout: As in `exchange`.

    Raises:
        ProcessError: If a process did not arrive, or if the block raised on other processes but
            not here; the message quotes their errors.
        Exception: The error that the block raised on this process.
    """
    said = Said()
    own_error: Exception | None = None
    try:
        yield said
    except Exception as error:
        own_error = error
    failed = own_error is not None
    outcome = f"-{type(own_error).__name__}: {own_error}".encode() if failed else b"+" + said.mine
    try:
        outcomes = exchange(what, outcome, among=among, timeout=timeout)
    except ProcessError as absent:
        raise (own_error or absent) from None
    if own_error is not None:
        raise own_error
    pairs = zip(indices(among), outcomes, strict=True)
    facts = [f"process {i} raised {text[1:].decode()}" for i, text in pairs if text[:1] == b"-"]
    if len(facts) == 1:
        raise ProcessError(f"{what}: nothing was done, since {facts[0]}")
    if facts:
        headline = f"{what}: nothing was done, since other processes failed:"
        raise ProcessError(listed(headline, facts, 4, headed=True))
    said.every = [text[1:] for text in outcomes]


def processes_of(devices: Iterable[Any]) -> list[int]:
    """The indices of the processes that own some devices, ascending."""
    return sorted({device.process_index for device in devices})


def indices(among: Sequence[int] | None) -> list[int]:
    """The indices of the participating processes; `among` is that of `exchange`."""
    if among is None:
        return list(range(jax.process_count()))
    return sorted(set(among)) or [jax.process_index()]


def _milliseconds(timeout: float) -> int:
    return max(1, round(1000 * timeout))


def _absent(
    client: Any,
    what: str,
    meeting: str,
    participants: Sequence[int],
    timeout: float,
    error: Exception,
) -> str:
    absent = []
    for i in participants:
        try:
            client.key_value_try_get_bytes(f"{meeting}/{i}")
        except jax.errors.JaxRuntimeError:
            absent.append(i)
    if not absent:  # all arrived, one of them too late; or the service itself is gone
        reason = str(error).splitlines()[0]
        return (
            f"{what}: a process arrived more than {timeout:g} s after another, or was lost"
            f" ({reason}). Nothing was done. See the logs of the other processes."
        )
    names = ", ".join(map(str, absent))
    return (
        f"{what}: {'process' if len(absent) == 1 else 'processes'} {names} of"
        f" {jax.process_count()} did not arrive within {timeout:g} s. Nothing was done. Every"
        " process must make this call. See the log of the missing process, or wait longer with"
        " `timeout=`."
    )


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ProcessError(
            f"There are {jax.process_count()} processes, and this one is not connected to the"
            " others. Call `jax.distributed.initialize()` first, on each of them."
        )
    return client

"""Meetings: calls in which processes wait for each other and exchange a message.

Messages go through the coordination service of JAX's own runtime, so no device is involved and
nothing is compiled. `jax.experimental.multihost_utils` does the same by a program on all devices:
if one process does not start it, the others wait forever, and nobody says for whom.

The meetings of the same processes are numbered, and each process says there which call it makes, in
which thread, and how many steps it has started. If these differ, a process skipped a call, or two
threads of one process call at once: then all processes raise, before any data moves.

There is no repair after that, nor after a call that some processes gave up: as a broken
`threading.Barrier`, every later call raises, and names the first failure. What goes on is a call on
which all had agreed before, such as a save in the background.

At each meeting the processes also say how many steps and batches of treeshard they have made, of
which shapes (as a hash of all of them), and at which lines of the user's code they are. So a
process that skips one of several calls that look the same is noticed if its arrays are treeshard's,
which are known by the call and the path that made them; or if a step or a batch was made since.
Arrays of programs of `jax.jit` are not known: calls at different lines are a warning, and an error
once all make one of these calls together, or had done so before. What is not noticed: a call that
is skipped in a loop around it, if all else in the loop is JAX's.
"""

import hashlib
import json
import os
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from types import FrameType
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from treeshard._core.jax_private import coordination_client
from treeshard._core.text import in_groups
from treeshard.errors import HIDDEN, ProcessError, counted

# Seconds to wait for other processes, by default.
TIMEOUT = 60.0
# For waits while others do work of unknown length. If one of them dies, JAX itself ends the rest.
AS_LONG_AS_IT_TAKES = 7 * 86400.0


def indices(among: Sequence[int] | None) -> list[int]:
    """The indices of the participating processes; `among` is that of `exchange`."""
    if among is None:
        return list(range(jax.process_count()))
    return sorted(set(among)) or [jax.process_index()]


def exchange(
    what: str,
    mine: bytes,
    *,
    among: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
    moves: bool = True,
    lane: str = "",
) -> list[bytes]:
    """Sends a message to every participating process; returns those of all, in order of their
    indices.

    Either all processes return or all raise a `ProcessError`, which says who is missing or makes
    another call: a process that arrives late gets the error too.

    Args:
        what: The operation, such as `"save /runs/7/step_100"`; the same on every process.
        mine: The message of this process.
        among: The indices of the participating processes; all by default. If it is empty, only
            this one participates.
        timeout: Seconds to wait for the other processes.
        moves: Whether data travels after this meeting. Then all threads and all started steps
            must be in one order. Other calls of threads in the background meet on their own.
        lane: Names a sequence of meetings of its own.
    """
    participants = indices(among)
    if participants == [jax.process_index()]:
        return [mine]
    if timeout < AS_LONG_AS_IT_TAKES:  # others wait for what goes on, and would never end
        check_in_step(what, participants)
    if not (moves or threading.current_thread() is threading.main_thread()):
        lane = lane or "background"
    return _sequence(participants, lane).meet(what, mine, timeout, moves=moves)


def in_turn(among: Sequence[int]) -> AbstractContextManager[Any]:
    """For the whole of a call that moves data: the calls of other threads wait until it ends."""
    return _sequence(among).lock if among else nullcontext()


def check_in_step(what: str, among: Sequence[int]) -> None:
    """Raises if a call of this process has timed out, or was another one than that of others."""
    if _broken and among:
        raise ProcessError(
            f"{what}: nothing was done. The processes are out of step since {_broken[0]}; start the"
            " run again, from its last checkpoint."
        )


def get_out_of_step(call: str, among: Sequence[int] | None) -> None:
    """From now on every call of this process raises, and names the first that failed."""
    key = _sequence(indices(among)).out_of_step_key
    client = coordination_client()
    # The first process to say so decides what all of them name. Without the service: this one.
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(key, call)
    with suppress(jax.errors.JaxRuntimeError):
        call = client.key_value_try_get(key)
    if not _broken:
        _broken.append(call)


def last_call(what: str) -> str:
    """Names a call by its line, which is that of the last meeting of this thread."""
    return _at(what, _last.place)


def count_step(among: Sequence[int]) -> str:
    """Counts a program that these processes have started without a meeting, and names it."""
    sequence = _sequence(among)
    sequence.steps += 1
    return f"step {sequence.steps}"


def count_batch(among: Sequence[int]) -> None:
    """Counts a batch that these processes made without a meeting.

    Threads that make batches in advance are at another batch on each process.
    """
    if among and threading.current_thread() is threading.main_thread():
        _sequence(among).batches += 1


def note(among: Sequence[int], entry: str) -> None:
    """Adds what all processes must have done alike to what they compare at each later meeting."""
    if among and threading.current_thread() is threading.main_thread():
        _sequence(among).history.add(entry)


def tell_batch(among: Sequence[int], number: int, form: str) -> None:
    """Tells the others the form of a batch, if it is another one than before, for their errors."""
    sequence = _sequence(among)
    if sequence.batch is not None and sequence.batch[1] == form:
        return
    sequence.batch = number, form
    text = json.dumps(sequence.batch)
    _client().key_value_set(sequence.own_batch_key, text, allow_overwrite=True)


def lines_differ(among: Sequence[int] | None) -> str:
    """The lines at which the processes made the last call, if they are new ones and differ."""
    return _sequence(indices(among)).new_lines(_last.places)


def last_meeting() -> str:
    """Names the last meeting of this thread."""
    return _last.meeting


# Set on global arrays: the participants, and the call that made them.
_ORIGIN = "_treeshard_made_in"


def set_origin(
    arrays: Iterable[Any], among: Sequence[int], call: str, names: Iterable[str] | None = None
) -> None:
    """Notes on arrays which call of these processes made them, and as which leaf."""
    if among:
        participants = tuple(among)
        for x, name in zip(arrays, map(str, count()) if names is None else names, strict=False):
            if isinstance(x, jax.Array) and not isinstance(x, Tracer):
                setattr(x, _ORIGIN, (participants, call, name))


def origin(x: Any, among: Sequence[int]) -> str:
    """The call of these processes that made an array; empty if it is not known."""
    participants, call, name = getattr(x, _ORIGIN, ((), "", ""))
    return f"{call} as leaf {name}" if participants == tuple(among) else ""


_last = threading.local()


class _Call(NamedTuple):
    """What a process says at a meeting: all but the place must be the same on all.

    Attributes:
        history: A hash of the forms of all batches so far.
    """

    what: str
    thread: str
    steps: int
    batches: int
    history: str
    place: str

    @property
    def compared(self) -> tuple[Any, ...]:
        return self[:-1]


_NAMES = "treeshard/"  # of all keys of meetings in the service


class _History:
    """What this process has done: a hash of all, and the last entries."""

    def __init__(self) -> None:
        self.digest = ""
        self.entries: deque[str] = deque(maxlen=500)

    def add(self, entry: str) -> None:
        self.digest = hashlib.sha256(f"{self.digest}{entry}".encode()).hexdigest()[:16]
        self.entries.append(entry)


class _Sequence:
    """The meetings of some processes, and how many programs this one has started without a
    meeting."""

    def __init__(self, participants: tuple[int, ...], lane: str) -> None:
        self._participants, self._lane = participants, lane
        named = "." + hashlib.sha256(lane.encode()).hexdigest()[:16] if lane else ""
        self._name = f"{_NAMES}{'-'.join(map(str, participants))}{named}"
        self.out_of_step_key = f"{self._name}-out-of-step"
        self._own_keys: list[str] = []  # to be deleted, once all have read them
        self._me = jax.process_index()
        self.lock = threading.RLock()
        self.number, self.steps, self.batches = 0, 0, 0
        self.history = _History()
        self.batch: tuple[int, str] | None = None  # the last that had another form than before
        self._batch_keys = f"{self._name}-batch/"
        self.own_batch_key = f"{self._batch_keys}{self._me}"
        self._place = ""  # of the last call that the user's code made
        self._have_one_version = False
        self._common: set[str] = set()  # places of calls that all processes have made together
        # Places of calls that some made while others were at another: of these alone, and together.
        self._apart: set[str] = set()
        self._warned: set[frozenset[str]] = set()

    def meet(self, what: str, mine: bytes, timeout: float, *, moves: bool) -> list[bytes]:
        client = _client()
        _last.places = {}
        thread = "" if self._lane else threading.current_thread().name
        # A thread in the background goes on with a call that the user's code has made.
        self._place = _last.place = _user_place(sys._getframe()) or self._place
        with self.lock:
            done = (self.steps, self.batches, self.history.digest) if moves else (0, 0, "")
            call = _Call(what, thread, *done, self._place)
            try:
                messages = self._attend(client, call, mine, timeout)
                calls = {i: call for i, (call, _) in messages.items()}
                if _differ(calls):
                    raise ProcessError(_different(what, calls) + self._first_other(calls, timeout))
                if moves:
                    _last.places = {i: call.place for i, call in calls.items()}
                    self._check_places(what, _last.places)
            except ProcessError:
                get_out_of_step(_at(what, self._place), self._participants)
                raise
        return [messages[i][1] for i in self._participants]

    def _check_places(self, what: str, places: dict[int, str]) -> None:
        """Raises if the processes are at other lines, each of which all had made together before.

        Other lines alone are no mistake: `if process_index() == 0:` has one in each branch.
        """
        together = set(places.values())
        if len(together) == 1 and together <= self._apart:
            raise ProcessError(
                f"{what}: all processes make this call at {together.pop()}, and nothing was done."
                " Before, some of them had made it at another line while others made it here. A"
                " process skipped a call, or made one more. All of them must make the same calls in"
                " the same order."
            )
        if len(together) == 1:
            self._common |= together
        elif set(places.values()) <= self._common:
            raise ProcessError(
                f"{what}: the processes make this call at other lines, and nothing was done:"
                f" {in_groups(places)}. Before, all of them had made it at one line together, and"
                " then at the other. A process skipped a call, or made one more. All of them must"
                " make the same calls in the same order."
            )

    def new_lines(self, places: Mapping[int, str]) -> str:
        """The places of the last call, if they differ and were not told before."""
        lines = frozenset(places.values())
        if len(lines) < 2 or "" in lines:
            return ""
        self._apart |= lines
        is_new = lines not in self._warned
        self._warned.add(lines)
        return in_groups(places) if is_new else ""

    def _first_other(self, calls: Mapping[int, _Call], timeout: float) -> str:
        """Names the first batch of another form, if that is all in which the processes differ."""
        if len({call.compared[:-1] for call in calls.values()}) > 1:
            return ""
        call = _Call("comparing batches", *next(iter(calls.values()))[1:-2], "", "")
        mine = zlib.compress(json.dumps(list(self.history.entries)).encode())
        messages = self._attend(_client(), call, mine, timeout)
        entries = {i: json.loads(zlib.decompress(text)) for i, (_, text) in messages.items()}
        for entry in zip(*entries.values(), strict=False):
            if len(set(entry)) > 1:
                return f" The first: {in_groups(dict(zip(entries, entry, strict=True)))}."
        return ""

    def _batches_of(self, client: Any, absent: Sequence[int]) -> str:
        """Names the last batch of this process and of absent ones, if they differ."""
        if self.batch is None:
            return ""
        number, form = self.batch
        told = {int(k.rpartition("/")[2]): v for k, v in client.key_value_dir_get(self._batch_keys)}
        rows = {i: json.loads(told[i]) for i in absent if i in told}
        others = [
            f" on process {i}, {other} since batch {since}"
            for i, (since, other) in rows.items()
            if other != form
        ]
        if not others:
            return ""
        return f" Batch {number} here is {form};{';'.join(others[:4])}."

    def _attend(
        self, client: Any, call: _Call, mine: bytes, timeout: float
    ) -> dict[int, tuple[_Call, bytes]]:
        """The calls and messages of one meeting, by process."""
        meeting = f"{self._name}/{self.number}"
        key = f"{meeting}/{self._me}"
        self.number += 1
        client.key_value_set_bytes(key, json.dumps(call).encode() + b"\n" + mine)
        self._own_keys.append(key)
        began = time.monotonic()
        try:
            self._check_versions(client, call.what, began + timeout)
            left = began + timeout - time.monotonic()
            # The service decides once how a barrier ends. A process that comes to one that has
            # failed gets the same error at once, so all processes count the same meetings.
            client.wait_at_barrier(meeting, max(1, round(1000 * left)), self._participants)
            messages = self._messages(client, meeting)
        except jax.errors.JaxRuntimeError as error:
            calls = {i: made for i, (made, _) in self._messages(client, meeting).items()}
            raise ProcessError(self._failure(client, call, calls, error, began, timeout)) from None
        _last.meeting = f"meeting {self.number - 1}{self._lane and f' ({self._lane})'}"
        # The service keeps values until they are deleted. All have come to this meeting, so they
        # have read the messages of those before.
        for old in self._own_keys[:-1]:
            client.key_value_delete(old)
        self._own_keys = [key]
        return messages

    def _check_versions(self, client: Any, what: str, until: float) -> None:
        """Raises, at the first meeting, if the processes have other versions of treeshard.

        Meetings of other versions may have other names, so that the processes would wait for each
        other. How versions are told here must therefore never change.
        """
        if self._have_one_version:
            return
        # `treeshard-version/3` is `0.4.0`
        own = sys.modules["treeshard"].__version__
        client.key_value_set(f"treeshard-version/{self._me}", own, allow_overwrite=True)
        pause, longest = 0.005, max(0.2, len(self._participants) / 500)
        while time.monotonic() < until:
            pairs = client.key_value_dir_get("treeshard-version/")
            versions = {int(key.rpartition("/")[2]): version for key, version in pairs}
            told = {i: versions[i] for i in self._participants if i in versions}
            if len(set(told.values())) > 1:
                raise ProcessError(
                    f"{what}: the processes have different versions of treeshard:"
                    f" {in_groups(told)}. Nothing was done. Install one version on all of them."
                )
            if len(told) == len(self._participants):
                self._have_one_version = True
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _messages(self, client: Any, meeting: str) -> dict[int, tuple[_Call, bytes]]:
        messages = {}
        for key, value in client.key_value_dir_get_bytes(f"{meeting}/"):
            call, _, message = value.partition(b"\n")
            messages[int(key.rpartition("/")[2])] = _Call(*json.loads(call)), message
        return messages

    def _failure(
        self,
        client: Any,
        call: _Call,
        calls: Mapping[int, _Call],
        error: Exception,
        began: float,
        timeout: float,
    ) -> str:
        if _differ(calls):
            return _different(call.what, calls)
        absent = [i for i in self._participants if i not in calls]
        # The status of a barrier whose time is over; any other is of a process or service lost.
        lost = "DEADLINE_EXCEEDED" not in str(error)
        after = time.monotonic() - began if lost else timeout
        where = f" This process called it at {call.place}." if call.place and absent else ""
        batches = "" if lost else self._batches_of(client, absent)
        return _absent(call.what, absent, after, error, lost=lost) + where + batches


_sequences: dict[Any, _Sequence] = {}
_broken: list[str] = []  # the first call that failed, if there is one


def _sequence(among: Sequence[int], lane: str = "") -> _Sequence:
    key = (*among, lane)
    known = _sequences.get(key)  # of two threads that come first, both get the same
    return known or _sequences.setdefault(key, _Sequence(key[:-1], lane))


def _client() -> Any:
    client = coordination_client()
    if client is None:
        raise ProcessError(
            f"There are {jax.process_count()} processes, and this one is not connected to the"
            " others. Call `jax.distributed.initialize()` first, on each of them."
        )
    return client


# ------------------------------------------------------------------ lines of the user's code

_STANDARD = tuple(os.path.join(sysconfig.get_path(x), "") for x in ("stdlib", "platstdlib"))
_SHOWN = 3  # lines of one place, from the innermost


def _user_place(frame: FrameType | None) -> str:
    """The lines of the user's code that lead to a frame: `train.py:41 (log) < train.py:60 (main)`.

    Empty if there are none, as in a thread of treeshard.
    """
    lines: list[str] = []
    while frame is not None and len(lines) < _SHOWN:
        if _is_of_user(frame.f_code.co_filename):
            name = frame.f_code.co_name
            where = f"{_from_here(frame.f_code.co_filename)}:{frame.f_lineno}"
            lines.append(where if name == "<module>" else f"{where} ({name})")
        frame = frame.f_back
    return " < ".join(lines)


def _from_here(file: str) -> str:
    """The path of a file, relative if it is in the current directory."""
    with suppress(OSError):  # the current directory was removed
        return file.removeprefix(os.path.join(os.getcwd(), ""))
    return file


def _is_of_user(file: str) -> bool:
    if "/site-packages/" in file or file.startswith(("<frozen", *HIDDEN)):
        return False
    return not file.startswith(_STANDARD)


def _at(what: str, place: str) -> str:
    """`gather, train.py:31 (evaluate)`"""
    line = place.partition(" < ")[0]
    return f"{what}, {line}" if line else what


# ------------------------------------------------------------------ messages


def _absent(what: str, absent: Sequence[int], after: float, error: Exception, *, lost: bool) -> str:
    reason = str(error).splitlines()[0]
    if not absent:  # all arrived, one of them too late; or the service itself is gone
        return (
            f"{what}: a process arrived more than {after:g} s after another, or was lost"
            f" ({reason}). Nothing was done. See the logs of the other processes."
        )
    names = ", ".join(map(str, absent))
    who = f"{'process' if len(absent) == 1 else 'processes'} {names} of {jax.process_count()}"
    if lost:
        return (
            f"{what}: {who} ended or cannot be reached, as was noticed after {after:.0f} s of"
            f" waiting ({reason}). Nothing was done. See the log of the missing process."
        )
    return (
        f"{what}: {who} did not arrive within {after:g} s. Nothing was done. Every process must"
        " make this call. See the log of the missing process, or wait longer with `timeout=`."
    )


def _differ(calls: Mapping[int, _Call]) -> bool:
    return len({call.compared for call in calls.values()}) > 1


def _lines(calls: Mapping[int, _Call]) -> str:
    """Says at which line each process makes its call, if they are at different ones."""
    lines = {i: call.place.partition(" < ")[0] for i, call in calls.items()}
    if len(set(lines.values())) == 1 or "" in lines.values():
        return ""
    return f" Their lines: {in_groups(lines)}."


_THREADS = (
    "Calls from several threads may come in another order on each process: make them from one"
    " thread."
)


def _different(what: str, calls: Mapping[int, _Call]) -> str:
    columns = zip(*calls.values(), strict=True)
    several = [len(set(column)) > 1 for column in columns]
    whats, threads, steps, batches, *_ = several
    if several[:-1] == [False, False, False, False, True]:
        return (
            f"{what}: the processes have passed batches of other shapes or of other small values,"
            " and nothing was done."
        )
    rows: dict[int, str] = {}
    for i, call in calls.items():
        rows[i] = call.what
        if threads:
            rows[i] += f" in the thread {call.thread!r}"
        if steps and not whats:
            rows[i] += f" after {counted(call.steps, 'step')}"
        elif batches and not whats:
            rows[i] += f" after {call.batches:,} calls of from_process_local"
    why = "A process skipped a call, or made one more."
    if threads:
        why = _THREADS
    elif steps and not whats:
        why = "A process skipped a step, or made one more."
    return (
        f"{what}: the processes do not make the same call, and nothing was done: {in_groups(rows)}."
        f" {why} All of them must make the same calls in the same order."
        f"{_lines(calls)}"
    )

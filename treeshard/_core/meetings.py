"""Meetings: calls in which processes wait for each other and exchange a message.

Messages go through the coordination service of JAX's own runtime, so no device is involved and
nothing is compiled. `jax.experimental.multihost_utils` does the same by a program on all devices:
if one process does not start it, the others wait forever, and nobody says for whom.

The meetings of the same processes are numbered, and each process says there which call it makes, in
which thread, and how many steps it has started. If these differ, a process skipped a call, or two
threads of one process call at once: then all processes raise, before any data moves.

There is no repair after that, nor after a call that some processes left, for lack of time or for a
Ctrl-C: as a broken `threading.Barrier`, every later call raises, and names the first failure.
What goes on is a call on which all had agreed before, such as a save in the background. When such a
process ends, it does not wait for the others, which may wait for it.

At each meeting the processes also say how many steps and batches of treeshard they have made, by
which programs and of which shapes (as a hash of all of them), and at which lines of the user's code
they are. So a process that skips one of several calls that look the same is noticed if its arrays
are treeshard's, which are known by the call and the path that made them; or if a step or a batch
was made since.
Arrays of programs of `jax.jit` are not known. If no values can be compared either, calls at
different lines are a warning, and an error once all make one of these calls together, or had done
so before. What is not noticed then: a call that is skipped in a loop around it, if all else in the
loop is JAX's.

Steps count in whichever thread they are called. Batches count in the thread that comes to the
meeting: others may make them in advance, and are at another batch on each process. A thread besides
the main one may belong to a pool, whose tasks go to other threads on each process. So its batches
count from the moment since which no other such thread has done anything, and are compared if that
moment was the same on all processes.
"""

import atexit
import hashlib
import json
import os
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import count, islice
from traceback import walk_stack
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from treeshard._core.jax_private import coordination_client
from treeshard._core.text import in_groups
from treeshard._core.threads import HeldInterrupts, end_process, wait_in_thread
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
    phase: str = "",
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
        phase: What the operation does now, such as `"read"`, if it is not its first meeting: so
            that a process that left the operation, and began it again, does not meet with others
            that are in the middle of it.
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
        check_not_broken(what, participants)
    if not (moves or is_main_thread()):
        lane = lane or "background"
    return _sequence(participants, lane).meet(what, phase, mine, timeout, moves=moves)


def exclusive(among: Sequence[int]) -> AbstractContextManager[Any]:
    """For the whole of a call that moves data: the calls of other threads wait until it ends."""
    return _sequence(among).lock if among else nullcontext()


def check_not_broken(what: str, among: Sequence[int]) -> None:
    """Raises if a call of this process has timed out, or was another one than that of others."""
    if _broken and among:
        raise ProcessError(
            f"{what}: nothing was done. The processes are out of step since {_broken[0]}; start the"
            " run again, from its last checkpoint."
        )


def mark_broken(what: str, among: Sequence[int] | None) -> None:
    """From now on every call of this process raises, and names the first that failed.

    `what` is the call of the last meeting of this thread.
    """
    if _broken:
        return
    _broken.append(_with_line(what, _last.place))
    # The first process to say so decides what all of them name. Without the service: this one.
    key = _OUT_OF_STEP + "-".join(map(str, indices(among)))
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        _client().key_value_set(_NAMES + key, _broken[0])
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        _broken[0] = _client().key_value_try_get(_NAMES + key)


# ------------------------------------------------------------------ leaving a call


@contextmanager
def breaking_if_left() -> Iterator[None]:
    """For the whole of a call that has several meetings, or moves data after one.

    After a meeting the others go on with the call, and may wait for this process in a collective.
    So a Ctrl-C waits until the next block whose outcome is told, or for the end of the call.
    Whatever else leaves the call and is not an `Exception` makes the break final, since the next
    call of this process would meet with the middle of this one.
    """
    met, outer = _last.count, _last.interrupts
    interrupts = _last.interrupts = outer or HeldInterrupts()
    try:
        yield
    except Exception:  # of all processes, or told at a meeting
        raise
    except BaseException as error:
        if _last.count > met and error is not _last.told:
            _last.sequence.leave(error)
        raise
    finally:  # what has waited until here leaves a call that is over
        _last.interrupts = outer
        if outer is None:
            interrupts.close()


def release_interrupts() -> None:
    """Raises a Ctrl-C that has waited: from here on the others are told of it."""
    if _last.interrupts is not None:
        _last.interrupts.release()


def set_told(error: BaseException | None) -> None:
    """Notes the error of this process that the last meeting of this thread told the others."""
    _last.told = error


# ------------------------------------------------------------------ the end of the process

_SECONDS_TO_END = 5.0  # that process 0 gives the others


@atexit.register
def _end_if_out_of_step() -> None:
    """Ends a process that is out of step, or hears that others are, with status 1.

    At exit JAX waits five minutes for the other processes, which may be in a step that waits for
    this one.
    """
    since = _broken or _broken_of_others()
    if since:
        print(_AT_EXIT.format(since=since[0]), file=sys.stderr, flush=True)
        with suppress(jax.errors.JaxRuntimeError, ProcessError):
            _let_others_end()
        end_process()


def _broken_of_others() -> list[str]:
    """The calls that failed on other processes with which this one had a meeting."""
    participants = {"-".join(map(str, among)) for *among, _ in _sequences}
    if not participants:
        return []
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        keys = _client().key_value_dir_get(_NAMES + _OUT_OF_STEP)
        return [call for key, call in keys if key.rpartition("/")[2] in participants]
    return []


def _let_others_end() -> None:
    """Waits on process 0, which has the service: without it JAX aborts the others, which could not
    say why they end."""
    client, me = _client(), jax.process_index()
    client.key_value_set(f"{_NAMES}ends/{me}", "")
    if me != 0:
        return
    until = time.monotonic() + _SECONDS_TO_END
    while len(client.key_value_dir_get(f"{_NAMES}ends/")) < jax.process_count():
        if time.monotonic() > until:
            return
        time.sleep(0.05)
    time.sleep(0.3)  # between saying so and the end


# ------------------------------------------------------------------ between meetings


def count_step(among: Sequence[int]) -> str:
    """Counts a program that these processes have started without a meeting, and names it."""
    sequence = _sequence(among)
    sequence.steps += 1
    return f"step {sequence.steps}"


def count_program(among: Sequence[int]) -> int:
    """Counts a program that these processes call for the first time; returns its number."""
    sequence = _sequence(among)
    sequence.programs += 1
    return sequence.programs


def count_batch(among: Sequence[int]) -> int:
    """Counts a batch that these processes made without a meeting; returns its number."""
    sequence = _sequence(among)
    batches = sequence.batches_of_thread()  # before this one
    batches.count += 1
    sequence.all_batches += 1
    return sequence.all_batches


def note_batch(among: Sequence[int], entry: str) -> None:
    """Adds a batch to the history of this thread, which processes compare at its later meetings."""
    _sequence(among).batches_of_thread().note(entry)


def note_step(among: Sequence[int], entry: str) -> None:
    """Adds a step, and what it was given, to what processes compare at each later meeting."""
    sequence = _sequence(among)
    sequence.batches_of_thread()
    sequence.history.note(entry)


def tell_batch(among: Sequence[int], number: int, form: str) -> None:
    """Tells the others the form of a batch, if it is another one than before, for their errors."""
    sequence = _sequence(among)
    if sequence.batch is None or sequence.batch[1] != form:
        sequence.batch = number, form
        key = sequence.key(f"batch/{jax.process_index()}")
        with _typed_errors("from_process_local"):
            _client().key_value_set(key, json.dumps(sequence.batch), allow_overwrite=True)


def is_main_thread() -> bool:
    """Whether this is the thread that also makes its first batches in the order of all calls."""
    return threading.current_thread() is threading.main_thread()


# Set on global arrays: the participants, the call that made them, and the leaf that they were.
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


_CHECKSUM = "_treeshard_checksum"  # set on small arrays that every process has passed in full


def set_checksum(x: jax.Array, text: str) -> None:
    """Notes on an array the checksum of its values, which steps then need not read again."""
    setattr(x, _CHECKSUM, text)


def known_checksum(x: Any) -> str:
    """The checksum that was noted on an array; empty if there is none."""
    return getattr(x, _CHECKSUM, "")


# ------------------------------------------------------------------ the last meeting


class _Last(threading.local):
    """The last meeting of this thread.

    Attributes:
        count: How many meetings this thread has come to.
        told: The error of this process that it told the others at the last one.
        interrupts: Those of the call that this thread makes.
        place: The place of this process.
        places: Those of all of them, if data moved after it.
    """

    count = 0
    told: BaseException | None = None
    interrupts: HeldInterrupts | None = None
    sequence: "_Sequence"
    call: "_Call"
    meeting: str
    place: str
    places: Mapping[int, str]


_last = _Last()


def last_meeting() -> str:
    """Names the last meeting of this thread."""
    return _last.meeting


def lines_differ(what: str, among: Sequence[int] | None) -> str:
    """The lines at which the processes made the last call, if they are new ones and differ.

    Raises if these lines say that a process skipped a call.
    """
    places = frozenset(_last.places.values())
    sequence = _sequence(indices(among))
    try:
        sequence.check_places(what, _last.places)
    except ProcessError:
        mark_broken(what, among)
        raise
    if len(places) < 2 or "" in places or places in sequence.apart:
        return ""
    sequence.apart.add(places)
    return in_groups(_last.places)


# ------------------------------------------------------------------ a meeting


class _Call(NamedTuple):
    """What a process says at a meeting: all but the place must be the same on all.

    Attributes:
        history: A hash of all steps so far.
        since: From when on the batches of this thread count.
        made: A hash of the forms of these batches.
        left: The type of what made the process leave, and not come to meetings any more.
    """

    what: str
    phase: str
    thread: str
    steps: int
    batches: int
    history: str
    since: str
    made: str
    left: str
    place: str


class _History:
    """What a thread or a process has done, in order.

    Attributes:
        thread, since: Whose it is, and from when on; see `_Sequence.batches_of_thread`.
    """

    def __init__(self, thread: threading.Thread | None = None, since: str = "") -> None:
        self.thread, self.since = thread, since
        self.count, self.hash, self.noted = 0, "", deque[str](maxlen=500)

    def note(self, entry: str) -> None:
        self.hash = _hash(self.hash + entry)
        self.noted.append(entry)


_NAMES = "treeshard/"  # of all keys of meetings in the service
_OUT_OF_STEP = "out-of-step/"  # and of those that say that a call has failed


class _Sequence:
    """The meetings of some processes, and what this one has done between them.

    Attributes:
        lock: Of the thread whose turn it is.
        programs: How many steps with a program of their own this process has called.
        steps, all_batches: How many this process has made without a meeting, in any thread.
        history: The steps.
        batch: The number and form of the last batch that had another form than the one before.
        apart: Places at which the processes were in one meeting, and were allowed to be.
    """

    def __init__(self, participants: tuple[int, ...], lane: str) -> None:
        self._participants, self._lane = participants, lane
        self._name = _NAMES + "-".join(map(str, participants))
        if lane:
            self._name += "." + _hash(lane)
        self.lock = threading.RLock()
        self.number = self.programs = self.steps = self.all_batches = 0
        self._is_over = False  # a meeting has failed, and so will all later ones
        self.history, self._of_main, self._of_another = _History(), _History(), _History()
        self.batch: tuple[int, str] | None = None
        self._place = ""  # of the last call that the user's code made
        self._have_one_version = False
        self._common: set[str] = set()  # places of calls that all processes have made together
        self.apart: set[frozenset[str]] = set()

    def key(self, of: str) -> str:
        """A key in the service."""
        return f"{self._name}-{of}"

    def batches_of_thread(self) -> _History:
        """The batches of this thread; called whenever it makes one, a step or a meeting."""
        if is_main_thread():
            return self._of_main
        thread = threading.current_thread()
        if self._of_another.thread is not thread:
            since = f"step {self.steps}, batch {self.all_batches}, meeting {self.number}"
            self._of_another = _History(thread, since)
        return self._of_another

    def meet(
        self, what: str, phase: str, mine: bytes, timeout: float, *, moves: bool
    ) -> list[bytes]:
        self._client = _client()
        thread = "" if self._lane else threading.current_thread().name
        # A thread in the background goes on with a call that the user's code has made.
        self._place = _user_place() or self._place
        _last.place, _last.places = self._place, {}
        with self.lock:
            if self._is_over:
                check_not_broken(what, self._participants)
            made = self.batches_of_thread()
            done = (self.steps, made.count, self.history.hash, made.since, made.hash)
            done = done if moves else (0, 0, "", "", "")
            call = _Call(what, phase, thread, *done, "", self._place)
            _last.count, _last.sequence, _last.call = _last.count + 1, self, call
            try:
                release_interrupts()
                with _typed_errors(what):
                    messages = self._attend(call, mine, timeout)
                    calls = _comparable({i: call for i, (call, _) in messages.items()})
                    if _differ(calls):
                        other = self._first_other(calls, timeout)
                        raise ProcessError(_different(what, calls) + other)
                if moves:
                    _last.places = {i: call.place for i, call in calls.items()}
            except ProcessError:  # of all processes that come to this meeting
                self._is_over = True
                mark_broken(what, self._participants)
                raise
            except BaseException as error:
                self.leave(error)
                raise
        return [messages[i][1] for i in self._participants]

    def leave(self, error: BaseException) -> None:
        """Tells the others that this process will come to no meeting any more, because of an error.

        They may be at the last meeting of this process or on their way to the next one.
        """
        self._is_over = True
        mark_broken(_last.call.what, self._participants)
        me = jax.process_index()
        call = _last.call._replace(left=type(error).__name__)
        others = [i for i in self._participants if i != me]
        for number in (self.number - 1, self.number):
            with suppress(jax.errors.JaxRuntimeError):
                self._say(number, call, b"")
            # The service fails a barrier, on all processes and at once, that one of them calls with
            # other participants. (If this process is waiting at it, this call fails alone, and the
            # others read the message above.)
            with suppress(jax.errors.JaxRuntimeError):
                self._client.wait_at_barrier(f"{self._name}/{number}", 1, others)

    def _attend(self, call: _Call, mine: bytes, timeout: float) -> dict[int, tuple[_Call, bytes]]:
        """The calls and messages of one meeting, by process."""
        number, self.number = self.number, self.number + 1
        me = jax.process_index()
        self._say(number, call, mine)
        began = time.monotonic()
        try:
            self._check_versions(call.what, began + timeout)
            left = began + timeout - time.monotonic()
            # The service decides once how a barrier ends. A process that comes to one that has
            # failed gets the same error at once, so all processes count the same meetings.
            self._wait(number, left)
            messages = self._messages(number)
        except jax.errors.JaxRuntimeError as error:
            calls = _comparable({i: made for i, (made, _) in self._messages(number).items()})
            waited = time.monotonic() - began
            raise ProcessError(self._failure(call, calls, error, waited, timeout)) from None
        _last.meeting = f"meeting {number}{self._lane and f' ({self._lane})'}"
        # The service keeps values until they are deleted. All have come to this meeting, so they
        # have read the messages of the one before.
        if number:
            self._client.key_value_delete(f"{self._name}/{number - 1}/{me}")
        return messages

    def _wait(self, number: int, seconds: float) -> None:
        interrupts = _last.interrupts

        def wait() -> None:
            self._client.wait_at_barrier(
                f"{self._name}/{number}", max(1, round(1000 * seconds)), self._participants
            )
            if interrupts is not None:  # the others go on with the call
                interrupts.hold()

        if interrupts is not None:
            interrupts.install()
        wait_in_thread(wait)

    def _say(self, number: int, call: _Call, message: bytes) -> None:
        self._client.key_value_set_bytes(
            f"{self._name}/{number}/{jax.process_index()}",
            json.dumps(call).encode() + b"\n" + message,
            allow_overwrite=True,  # by `leave`
        )

    def _messages(self, number: int) -> dict[int, tuple[_Call, bytes]]:
        messages = {}
        for key, value in self._client.key_value_dir_get_bytes(f"{self._name}/{number}/"):
            call, _, message = value.partition(b"\n")
            messages[_process_of(key)] = _Call(*json.loads(call)), message
        return messages

    def _check_versions(self, what: str, until: float) -> None:
        """Raises, at the first meeting, if the processes have other versions of treeshard.

        Meetings of other versions may have other names, so that the processes would wait for each
        other. How versions are told here must therefore never change.
        """
        if self._have_one_version:
            return
        # `treeshard-version/3` is `0.4.0`
        own = sys.modules["treeshard"].__version__
        key = f"treeshard-version/{jax.process_index()}"
        self._client.key_value_set(key, own, allow_overwrite=True)
        pause, longest = 0.005, max(0.2, len(self._participants) / 500)
        while time.monotonic() < until:
            pairs = self._client.key_value_dir_get("treeshard-version/")
            versions = {_process_of(key): version for key, version in pairs}
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

    def check_places(self, what: str, places: Mapping[int, str]) -> None:
        """Raises if the processes are at other lines, each of which all had made together before.

        Other lines alone are no mistake: `if process_index() == 0:` has one in each branch.
        """
        here = frozenset(places.values())
        if len(here) == 1 and here <= frozenset().union(*self.apart):
            raise ProcessError(_AT_ONE_LINE.format(what=what, line=places[self._participants[0]]))
        if len(here) == 1:
            self._common |= here
        elif here <= self._common:
            raise ProcessError(_AT_OTHER_LINES.format(what=what, lines=in_groups(places)))

    # -------------------------------------------------------------- for errors

    def _first_other(self, calls: Mapping[int, _Call], timeout: float) -> str:
        """Names the first batch of another form, or the first other step, if the processes differ
        in nothing else."""
        if not _differ_in_history_alone(calls):
            return ""
        call = calls[self._participants[0]]._replace(
            what="comparing batches", history="", since="", made="", place=""
        )
        batches_differ = len({call.made for call in calls.values()}) > 1
        history = self.batches_of_thread() if batches_differ else self.history
        mine = zlib.compress(json.dumps(list(history.noted)).encode())
        messages = self._attend(call, mine, timeout)
        noted = {i: json.loads(zlib.decompress(text)) for i, (_, text) in messages.items()}
        for entry in zip(*noted.values(), strict=False):
            if len(set(entry)) > 1:
                return f" The first: {in_groups(dict(zip(noted, entry, strict=True)))}."
        return ""

    def _failure(
        self,
        call: _Call,
        calls: Mapping[int, _Call],
        error: Exception,
        waited: float,
        timeout: float,
    ) -> str:
        """Why not all processes came to a meeting; `calls` has those that did."""
        if _differ(calls):
            return _different(call.what, calls)
        absent = [i for i in self._participants if i not in calls]
        # The status of a barrier whose time is over; any other is of a process or service lost.
        lost = "DEADLINE_EXCEEDED" not in str(error)
        text = _absent(call.what, absent, waited if lost else timeout, error, lost=lost)
        if absent and call.place:
            text += f" This process called it at {call.place}."
        return text if lost else text + self._other_batches(absent)

    def _other_batches(self, absent: Sequence[int]) -> str:
        """Names the last batch of this process and of absent ones, if they differ."""
        told = _sequence(self._participants)
        if told.batch is None:
            return ""
        number, form = told.batch
        others: list[str] = []
        for key, text in self._client.key_value_dir_get(told.key("batch/")):
            since, other = json.loads(text)
            if _process_of(key) in absent and other != form:
                others.append(f" on process {_process_of(key)}, {other} since batch {since}")
        return f" Batch {number} here is {form};{';'.join(others[:4])}." if others else ""


_sequences: dict[Any, _Sequence] = {}
_broken: list[str] = []  # the first call that failed, if there is one
# A forked process is not one of the processes that meet.
os.register_at_fork(after_in_child=_sequences.clear)
os.register_at_fork(after_in_child=_broken.clear)


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


@contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(_UNREACHABLE.format(what=what, error=_reason(error))) from None


def _process_of(key: str) -> int:
    return int(key.rpartition("/")[2])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------ lines of the user's code

_STANDARD = tuple(os.path.join(sysconfig.get_path(x), "") for x in ("stdlib", "platstdlib"))
_NOT_OF_USER = ("<frozen", *HIDDEN, *_STANDARD)
_SHOWN = 3  # lines of one place, from the innermost


def _user_place() -> str:
    """The lines of the user's code that led here: `train.py:41 (log) < train.py:60 (main)`.

    Empty if there are none, as in a thread of treeshard.
    """
    return " < ".join(islice(_user_lines(), _SHOWN))


def _user_lines() -> Iterator[str]:
    for frame, number in walk_stack(sys._getframe()):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/site-packages/" in file or file.startswith(_NOT_OF_USER):
            continue
        with suppress(OSError):  # the current directory was removed
            file = file.removeprefix(os.path.join(os.getcwd(), ""))
        yield f"{file}:{number}" if name == "<module>" else f"{file}:{number} ({name})"


def _first_line(place: str) -> str:
    return place.partition(" < ")[0]


def _with_line(what: str, place: str) -> str:
    """`save, train.py:12 (main)`"""
    return ", ".join(filter(None, (what, _first_line(place))))


# ------------------------------------------------------------------ messages


def _absent(what: str, absent: Sequence[int], after: float, error: Exception, *, lost: bool) -> str:
    reason = _reason(error)
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


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]


_UNREACHABLE = (
    "{what}: the coordination service of JAX, which is in process 0, cannot be reached ({error})."
    " Nothing was done. See the log of process 0."
)
_AT_EXIT = (
    "treeshard: the processes are out of step since {since}. This one ends with status 1 now, and"
    " does not wait for the others. Start the run again, from its last checkpoint."
)
_SKIPPED_A_CALL = "A process skipped a call, or made one more."
_THE_SAME_CALLS = "All of them must make the same calls in the same order."
_AT_ONE_LINE = (
    "{what}: all processes make this call at {line}, and nothing was done. Before, some of them had"
    f" made it at another line while others made it here. {_SKIPPED_A_CALL} {_THE_SAME_CALLS}"
)
_AT_OTHER_LINES = (
    "{what}: the processes make this call at other lines, and nothing was done: {lines}. Before,"
    " all of them had made it at one line together, and then at the other."
    f" {_SKIPPED_A_CALL} {_THE_SAME_CALLS}"
)


def _comparable(calls: Mapping[int, _Call]) -> dict[int, _Call]:
    """The calls, without the batches of their threads if these do not count from one moment on."""
    if len({call.since for call in calls.values()}) == 1:
        return dict(calls)
    return {i: call._replace(batches=0, since="", made="") for i, call in calls.items()}


def _differ(calls: Mapping[int, _Call]) -> bool:
    return len({call._replace(place="") for call in calls.values()}) > 1


def _differ_in_history_alone(calls: Mapping[int, _Call]) -> bool:
    return _differ(calls) and not _differ(
        {i: call._replace(history="", made="") for i, call in calls.items()}
    )


def _different(what: str, calls: Mapping[int, _Call]) -> str:
    """What processes say that make different calls."""
    left = {
        i: f"{_with_line(call.what, call.place)} was left by a {call.left}"
        for i, call in calls.items()
        if call.left
    }
    if left:
        return (
            f"{what}: the call could not be made together: {in_groups(left)}. The processes are out"
            " of step: start the run again, from its last checkpoint."
        )
    if _differ_in_history_alone(calls):
        return (
            f"{what}: the processes have passed batches of other shapes or of other small values,"
            " or called other steps, and nothing was done."
        )
    columns = zip(*calls.values(), strict=True)
    whats, phases, threads, steps, batches, *_ = (len(set(column)) > 1 for column in columns)
    rows: dict[int, str] = {}
    for i, call in calls.items():
        rows[i] = call.what
        if phases and not whats:
            rows[i] += f" ({call.phase or 'begin'})"
        if threads:
            rows[i] += f" in the thread {call.thread!r}"
        if steps and not whats:
            rows[i] += f" after {counted(call.steps, 'step')}"
        elif batches and not whats:
            rows[i] += f" after {call.batches:,} calls of from_process_local"
    why = _SKIPPED_A_CALL
    if threads:
        why = (
            "Calls from several threads may come in another order on each process: make them from"
            " one thread."
        )
    elif phases and not whats:
        why = "A process left this call before its end, and made it again."
    elif steps and not whats:
        why = "A process skipped a step, or made one more."
    text = (
        f"{what}: the processes do not make the same call, and nothing was done: {in_groups(rows)}."
        f" {why} {_THE_SAME_CALLS}"
    )
    lines = {i: _first_line(call.place) for i, call in calls.items()}
    if "" in lines.values() or len(set(lines.values())) == 1:
        return text
    return f"{text} Their lines: {in_groups(lines)}."

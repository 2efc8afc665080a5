"""Meetings: calls in which processes wait for each other and exchange a message.

Messages go through the coordination service of JAX's own runtime, so no device is involved and
nothing is compiled. `jax.experimental.multihost_utils` does the same by a program on all devices:
if one process does not start it, the others wait forever, and nobody says for whom.

1. The meetings of the same processes are numbered. At each, every process sends hashes of which
   call it makes, in which thread, and of which steps and batches it has made since the start. The
   first participant compares them and gives one answer, which all the others wait for. So what a
   process receives does not grow with their number. If hashes differ, a process skipped a call, or
   two threads of one process call at once: then all say in another meeting what they do, and all
   raise, before any data moves.
2. The answer is a key that the service keeps as it was first set. Whoever has waited too long, or
   leaves, sets it too, so a meeting has one outcome, also for a process that comes later.
3. There is no repair after that, nor after a call that some processes left, for lack of time or for
   a Ctrl-C: as a broken `threading.Barrier`, every later call raises, and names the first failure.
   What goes on is a call on which all had agreed before, such as a save in the background.
4. When such a process ends, it does not wait for the others, which may wait for it.
5. Some calls wait as long as others read or write. These show from time to time that they are
   alive, in a key each, so that a killed or stopped one is noticed within the timeout. JAX notices
   it by its own heartbeats, later, and aborts all processes.

A process that skips one of two calls that look the same, with neither a step nor a batch of
treeshard between them, is not noticed here, but by its arrays: `set_origin` notes which call of
treeshard made them, and `Facts` compares small values of the arrays that JAX made. If neither is
possible, `check_lines` compares the user's lines. What is not noticed then: a call that is skipped
in a loop around it.
"""

import atexit
import hashlib
import json
import os
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
from jax.core import Tracer

from treeshard._core.jax_private import coordination_client
from treeshard._core.text import describe_groups, named_processes
from treeshard._core.threads import HeldInterrupts, end_process, wait_in_thread
from treeshard.errors import ProcessError, select_own_lines, walk_calls, warn

# Seconds to wait for other processes, by default.
TIMEOUT = 60.0

# Makes the answer from the messages of all participants, on the first of them.
Combine = Callable[[list[bytes]], bytes]


class MeetingOptions(TypedDict, total=False):
    """The keyword arguments of `exchange`, for the functions that pass them on to it."""

    phase: str
    among: Sequence[int] | None
    timeout: float | None
    works: bool
    moves: bool
    channel: str


class Answer(NamedTuple):
    """What a process receives at a meeting."""

    combined: bytes  # the same on all participants
    messages: list[bytes]  # of all participants, on the first one alone; empty on the others


def indices(among: Sequence[int] | None) -> list[int]:
    """The indices of the participating processes; `among` is that of `exchange`."""
    if among is None:
        return list(range(_process.count))
    return sorted(set(among)) or [_process.index]


def exchange(
    what: str,
    payload: bytes,
    combine: Combine = b"".join,
    *,
    phase: str = "",
    among: Sequence[int] | None = None,
    timeout: float | None = None,
    works: bool = False,
    moves: bool = True,
    channel: str = "",
) -> Answer:
    """Sends a message to the first participating process; returns its answer.

    Either all processes return or all raise a `ProcessError`, which says who is missing or makes
    another call: a process that arrives late gets the error too.

    Args:
        what: The operation, such as `"save /runs/7/step_100"`; the same on every process.
        payload: The message of this process.
        combine: Makes the answer from all messages, in the order of the processes' indices. Every
            process receives the answer, so it should not grow with their number.
        phase: What the operation does now, such as `"read"`, if it is not its first meeting: so
            that a process that left the operation, and began it again, does not meet with others
            that are in the middle of it.
        among: The indices of the participating processes; all by default. If it is empty, only
            this one participates.
        timeout: Seconds to wait for the other processes. `None` waits as long as by default, for
            operations that have no argument of this name.
        works: Whether processes come only after work of unknown length, during which they are
            `showing_life`. Then `timeout` is how long they may be without a sign of life.
        moves: Whether data travels after this meeting. Then all threads and all started steps
            must be in one order. Other calls of threads in the background meet on their own.
        channel: Names a sequence of meetings of its own.
    """
    participants = indices(among)
    if participants == [_process.index]:
        return Answer(combine([payload]), [payload])
    # Others wait for what goes on, and would never end.
    if not works:
        check_not_broken(what, participants)
    if not (moves or is_main_thread()):
        channel = channel or "background"
    return _channel(participants, channel).meet(
        what, phase, payload, combine, timeout, works=works, moves=moves
    )


@contextmanager
def exclusive(among: Sequence[int], channel: str = "") -> Iterator[None]:
    """For the whole of a call that moves data: the calls of other threads wait until it ends."""
    if not among:
        yield
        return
    with _channel(among, channel).lock:
        try:
            yield
        except (ValueError, RuntimeError) as error:
            check_ran(_thread.call.what, among, error)
            raise


# ------------------------------------------------------------------ a call that failed


def check_not_broken(what: str, among: Sequence[int]) -> None:
    """Raises if a call of this process has failed, or was not the same as on other processes."""
    if _process.broken and among:
        raise ProcessError(
            f"{what}: nothing was done. The processes are out of step since {_process.broken};"
            " start the run again, from its last checkpoint."
        )


def mark_broken(what: str, among: Sequence[int] | None) -> None:
    """From now on every call of this process raises, and names the first that failed.

    `what` is the call of the last meeting of this thread.
    """
    if _process.broken:
        return
    _process.broken = _thread.call._replace(what=what).with_line()
    # The first process to say so decides what all of them name. Without the service: this one.
    key = f"{_process.names}{_BROKEN}{_hash_participants(indices(among))}"
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        _process.client().key_value_set(key, _process.broken)
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        _process.broken = _process.client().key_value_try_get(key)


def check_ran(what: str, among: Sequence[int], error: Exception) -> None:
    """Raises if an error is the end of a program in which processes wait for each other.

    Its collectives fail if a process is killed, or ends. JAX raises the text of a status, as a
    `JaxRuntimeError` or, on CPUs, as a `ValueError`, and cannot name the process.
    """
    if among and str(error).startswith(_OF_COLLECTIVES):
        _thread.call = _Call(what, line=_user_lines())
        mark_broken(what, among)
        raise ProcessError(_PROGRAM_FAILED.format(what=what, error=_reason(error))) from error


# What the text of a status begins with that a collective may end with.
_OF_COLLECTIVES = ("ABORTED:", "CANCELLED:", "DEADLINE_EXCEEDED:", "UNAVAILABLE:", "UNKNOWN: Gloo")


@contextmanager
def breaking_if_left() -> Iterator[None]:
    """For the whole of a call that has several meetings, or moves data after one.

    After a meeting the others go on with the call, and may wait for this process in a collective.
    So a Ctrl-C waits until the next block whose outcome is told, or for the end of the call.
    Whatever else leaves the call and is not an `Exception` makes the break final, since the next
    call of this process would meet with the middle of this one.
    """
    met, outer = _thread.meetings, _thread.interrupts
    interrupts = _thread.interrupts = outer or HeldInterrupts()
    try:
        yield
    except BaseException as error:
        # An `Exception` is raised by all processes, or was told to them at a meeting.
        is_told = isinstance(error, Exception) or error is _thread.told
        if _thread.meetings > met and not is_told:
            _thread.channel.leave(error)
        raise
    finally:  # what has waited until here leaves a call that is over
        _thread.interrupts = outer
        if outer is None:
            interrupts.close()


def release_interrupts() -> None:
    """Raises a Ctrl-C that has waited: from here on the others are told of it."""
    if _thread.interrupts is not None:
        _thread.interrupts.release()


def set_told(error: BaseException | None) -> None:
    """Notes the error of this process that the last meeting of this thread told the others."""
    _thread.told = error


# ------------------------------------------------------------------ the end of the process

_SECONDS_TO_END = 5.0  # that process 0 gives the others, once more whenever one ends


@atexit.register
def _end_if_broken() -> None:
    """Ends a process that is out of step, or hears that others are, with status 1.

    At exit JAX waits five minutes for the other processes, which may be in a step that waits for
    this one.
    """
    since = _process.broken or _broken_of_others()
    if since:
        print(_AT_EXIT.format(since=since), file=sys.stderr)
        with suppress(jax.errors.JaxRuntimeError, ProcessError):
            _let_others_end()
        end_process()


def _broken_of_others() -> str:
    """The call that failed on other processes with which this one had a meeting."""
    participants = {_hash_participants(channel.participants) for channel in _process.all_channels()}
    if not participants:
        return ""
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        for key, call in _process.client().key_value_dir_get(_process.names + _BROKEN):
            if key.rpartition("/")[2] in participants:
                return call
    return ""


def _let_others_end() -> None:
    """Waits on process 0, which has the service: without it JAX aborts the others, which could not
    say why they end. Prints which of them do not end so."""
    client, ends = _process.client(), f"{_process.names}ends/"
    client.key_value_set(f"{ends}{_process.index}", "")
    if _process.index != 0:
        return
    ended, until = 0, 0.0
    while ended < _process.count:
        rows = client.key_value_dir_get(ends)
        if len(rows) > ended:
            ended, until = len(rows), time.monotonic() + _SECONDS_TO_END
        elif time.monotonic() > until:
            others = {*range(_process.count)} - {int(key.rpartition("/")[2]) for key, _ in rows}
            names = f"{named_processes(sorted(others))} of {_process.count}"
            print(_NOT_ENDED.format(names=names), file=sys.stderr)
            return
        time.sleep(0.05)
    time.sleep(0.3)  # between saying so and the end


# ------------------------------------------------------------------ between meetings


def count_step(among: Sequence[int]) -> str:
    """Counts a program that these processes have started without a meeting, and names it."""
    return f"step {_channel(among).count('step')}"


def count_program(among: Sequence[int]) -> int:
    """Counts a program that these processes call for the first time; returns its number."""
    return _channel(among).count("program")


def count_batch(among: Sequence[int]) -> int:
    """Counts a batch that these processes made without a meeting; returns its number."""
    return _channel(among).count("batch")


def record_step(among: Sequence[int], entry: str) -> None:
    """Adds a step, and what it was given, to what processes compare at each later meeting.

    Whichever thread calls it: steps wait for each other in collectives, so their order must be one.
    """
    _channel(among).steps.add(entry)


def record_batch(among: Sequence[int], entry: str) -> None:
    """Adds a batch to what processes compare at each later meeting of this thread.

    At those of other threads it may not have been made yet, if a thread makes batches in advance.
    Whichever thread made it, it is compared when a step receives it.
    """
    _channel(among).batches.add(entry)


def agreed_forms(among: Sequence[int]) -> dict[Any, str]:
    """The forms of trees that these processes have compared, by a key of the caller's.

    They grow with the shapes of batches, and for each of these JAX keeps a compiled program.
    """
    return _channel(among).agreed_forms


def is_main_thread() -> bool:
    """Whether this is the thread whose calls are in the same order on all processes."""
    return threading.current_thread() is threading.main_thread()


# Notes are attributes of the arrays, and go with them. Arrays have no hash, so that a weak
# dictionary cannot have them as keys. JAX makes new arrays from them without these attributes.
_ORIGIN = "_treeshard_made_in"  # the participants, the call that made an array, and as which leaf
_CHECKSUM = "_treeshard_checksum"  # of a small array that every process has passed in full


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
    if participants != tuple(among):
        return ""
    return f"{call} as leaf {name}" if name else call  # of an array alone


def set_checksum(x: jax.Array, text: str) -> None:
    """Notes on an array the checksum of its values, which steps then need not read again."""
    setattr(x, _CHECKSUM, text)


def known_checksum(x: Any) -> str:
    """The checksum that was noted on an array; empty if there is none."""
    return getattr(x, _CHECKSUM, "")


def last_meeting() -> str:
    """Names the last meeting of this thread."""
    return _thread.last_meeting


def check_lines(what: str, **options: Unpack[MeetingOptions]) -> None:
    """Compares the lines at which the processes made the call of this thread's last meeting.

    Other lines alone are no mistake: `if process_index() == 0:` has one in each branch. So they are
    a warning, and an error if all processes have made this call at each of these lines together.
    """
    channel, line = _thread.channel, _thread.call.line
    if _thread.at_one_line:
        channel.common_lines |= {line} - {""}
        return

    def combine(lines: list[bytes]) -> bytes:
        by_process = dict(zip(channel.participants, map(bytes.decode, lines), strict=True))
        return json.dumps([sorted({*by_process.values()}), describe_groups(by_process)]).encode()

    answer = exchange(what, line.encode(), combine, **{**options, "phase": "lines"})
    lines, groups = json.loads(answer.combined)
    if "" in lines:
        return
    text = f"{what}: the processes make this call at different lines: {groups}."
    if channel.common_lines.issuperset(lines):
        mark_broken(what, channel.participants)
        raise ProcessError(f"{text} {_AT_COMMON_LINES} {_THE_SAME_CALLS}")
    warn(f"{text} {_AT_OTHER_LINES}")


# ------------------------------------------------------------------ a meeting


class _Call(NamedTuple):
    """What a process does as it comes to a meeting. All but the line must be the same on all."""

    what: str  # the operation
    phase: str = ""  # what it does now
    thread: str = ""  # the name of the thread that makes the call
    history: str = ""  # a hash of the steps and batches so far
    line: str = ""  # of the user's code: `train.py:41 (log) < train.py:60 (main)`
    version: str = ""  # of treeshard

    def with_line(self) -> str:
        """`save, train.py:41 (log)`"""
        return ", ".join(filter(None, (self.what, self.line.partition(" < ")[0])))

    def hashes(self) -> bytes:
        """What others compare: a hash of the call, of its history, and of its line."""
        call = self._replace(history="", line="")
        if self.phase == _COMPARING_CALLS:
            call = _Call("", self.phase)  # the calls are not the same
        texts = json.dumps(call), self.history, self.line
        return b"".join(bytes.fromhex(_hash(text)) for text in texts)


_HASH_BYTES = 8
_COMPARING_CALLS = "comparing calls"  # a phase


class _History:
    """What a process has done in order, without a meeting: a hash of it, and its end in words."""

    def __init__(self) -> None:
        self.hash = ""
        self.count = 0
        self._latest = deque[str](maxlen=500)  # only to name the first difference

    def add(self, entry: str) -> None:
        self.hash = _hash(self.hash + entry)
        self.count += 1
        self._latest.append(entry)

    def entries(self) -> dict[str, str]:
        """The last entries, by their numbers; as texts, which are the keys of JSON."""
        first = self.count - len(self._latest)
        return {str(number): entry for number, entry in enumerate(self._latest, first)}


class _HistoryOfThread(threading.local, _History):
    """A history of each thread, which goes with the thread: some programs start one per batch."""


_BROKEN = "out-of-step/"  # in the keys of the service that say that a call has failed

# The first byte of an answer says how a meeting ended.
_AGREED = b"="  # the rest is what `combine` has returned
_AGREED_AT_OTHER_LINES = b"~"  # as before, and the call is at different lines of the user's code
_OTHER_CALLS = b"?"
_OTHER_HISTORIES = b"#"
_ABSENT = b"-"  # the rest says who did not come in time, and to which call
_SILENT = b"."  # the rest says who has shown no sign of life
_LEFT = b"!"  # the rest is what a process has left, and why

# What those that have come give each other to answer.
_SECONDS_TO_ANSWER = 5.0


class _Channel:
    """A sequence of meetings of some processes, and what this one has done between them."""

    def __init__(self, participants: tuple[int, ...], name: str) -> None:
        self.participants = participants
        self.lock = threading.RLock()  # of the thread whose turn it is
        self.steps, self.batches = _History(), _HistoryOfThread()
        self.agreed_forms: dict[Any, str] = {}  # see the function of this name
        self.common_lines = set[str]()  # where all have made a call together; see `check_lines`
        self._counts = Counter[str]()  # of steps, batches and programs, in all threads
        self._name = name
        self._key = _process.names + _hash_participants(participants)
        if name:
            self._key += "." + _hash(name)
        self._number = 0  # of the next meeting
        self._is_over = False  # a meeting has failed, and so will all later ones
        self._line = ""  # of the last call that the user's code made

    def count(self, kind: str) -> int:
        self._counts[kind] += 1
        return self._counts[kind]

    def meet(
        self,
        what: str,
        phase: str,
        payload: bytes,
        combine: Combine,
        timeout: float | None,
        *,
        works: bool,
        moves: bool,
    ) -> Answer:
        thread = "" if self._name else threading.current_thread().name
        # A thread in the background goes on with a call that the user's code has made.
        self._line = _user_lines() or self._line
        with self.lock:
            if self._is_over:
                check_not_broken(what, self.participants)
            history = self.steps.hash + self.batches.hash if moves else ""
            version = sys.modules["treeshard"].__version__
            call = _Call(what, phase, thread, history, self._line, version)
            _thread.meetings, _thread.channel, _thread.call = _thread.meetings + 1, self, call
            try:
                release_interrupts()
                with _typed_errors(what):
                    return self._attend(call, payload, combine, timeout, works=works)
            except ProcessError:  # of all processes that come to this meeting
                self._is_over = True
                mark_broken(what, self.participants)
                raise
            except BaseException as error:  # such as a Ctrl-C
                self.leave(error)
                raise

    def leave(self, error: BaseException) -> None:
        """Tells the others that this process will come to no meeting any more, because of an error.

        They may be at the last meeting of this process or on their way to the next one.
        """
        self._is_over = True
        call = _thread.call
        mark_broken(call.what, self.participants)
        left = [call.with_line(), type(error).__name__, _process.index]
        for number in (self._number - 1, self._number):
            # The keys of the last meeting may be deleted meanwhile: all have read its answer.
            with suppress(jax.errors.JaxRuntimeError):
                self._meeting(number, call, seconds=0.0).end(_LEFT + json.dumps(left).encode())

    def _meeting(
        self, number: int, call: _Call, seconds: float, *, works: bool = False
    ) -> "_Meeting":
        return _Meeting(f"{self._key}/{number}", self.participants, call, seconds, works)

    def _attend(
        self,
        call: _Call,
        payload: bytes,
        combine: Combine,
        timeout: float | None,
        *,
        works: bool = False,
    ) -> Answer:
        """Comes to the next meeting, and raises unless all have come to it with the same call."""
        number, self._number = self._number, self._number + 1
        seconds = TIMEOUT if timeout is None else timeout
        meeting = self._meeting(number, call, seconds, works=works)
        interrupts = _thread.interrupts
        meeting.send(payload)

        def wait() -> tuple[bytes, list[bytes]]:
            answer, messages = meeting.wait(combine)
            if interrupts is not None and answer[:1] in (_AGREED, _AGREED_AT_OTHER_LINES):
                interrupts.hold()  # the others go on with the call
            return answer, messages

        if interrupts is not None:
            interrupts.install()
        answer, messages = wait_in_thread(wait)
        kind, rest = answer[:1], answer[1:]
        if kind == _ABSENT:
            raise ProcessError(_absent(call, timeout, *json.loads(rest)))
        if kind == _SILENT:
            raise ProcessError(f"{call.what}: {rest.decode()}")
        if kind == _LEFT:
            raise ProcessError(f"{call.what}: {_left(*json.loads(rest))}")
        if kind == _OTHER_CALLS:
            raise ProcessError(f"{call.what}: {self._compare_calls(call)}")
        if kind == _OTHER_HISTORIES:
            raise ProcessError(f"{call.what}: {self._compare_histories(call)}")
        meeting.forget()
        _thread.at_one_line = kind == _AGREED
        _thread.last_meeting = f"meeting {number}{self._name and f' ({self._name})'}"
        return Answer(rest, messages)

    def _compare_calls(self, call: _Call) -> str:
        """Names the calls that processes make, in another meeting, to which all of them come."""

        def combine(messages: list[bytes]) -> bytes:
            rows = zip(self.participants, map(json.loads, messages), strict=True)
            return _different({i: _Call(*fields) for i, fields in rows}).encode()

        own = json.dumps(call).encode()
        asking = call._replace(phase=_COMPARING_CALLS, history="")
        return self._attend(asking, own, combine, _SECONDS_TO_ANSWER).combined.decode()

    def _compare_histories(self, call: _Call) -> str:
        """Names the first step, or the first batch, in which processes differ that make one call.

        They exchange what they have done in another meeting, to which all of them come.
        """

        def combine(messages: list[bytes]) -> bytes:
            histories = (json.loads(zlib.decompress(text)) for text in messages)
            first = _first_other(dict(zip(self.participants, histories, strict=True)))
            return f"{_OTHER_HISTORY}{first} {_THE_SAME_CALLS}".encode()

        entries = json.dumps([self.steps.entries(), self.batches.entries()])
        own = zlib.compress(entries.encode())
        asking = call._replace(phase="comparing histories", history="")
        return self._attend(asking, own, combine, _SECONDS_TO_ANSWER).combined.decode()


class _Meeting(NamedTuple):
    """One meeting: where its keys are in the service, and with which call this process comes.

    The keys below `key`, in the order in which they are set:

        said/3   the hashes and the message of process 3
        came     how many have sent theirs
        all      wakes the first participant, once all have
        late     how many have given up
        answer   how the meeting ended: the service keeps the first value
        read     how many have read it
    """

    key: str
    participants: tuple[int, ...]
    call: _Call
    seconds: float  # to wait for the others, or if they work for a sign of life
    works: bool = False  # see `exchange`

    def send(self, payload: bytes) -> None:
        message = self.call.hashes() + payload
        _process.client().key_value_set_bytes(f"{self.key}/said/{_process.index}", message)

    def come(self) -> None:
        """Counts this process, whose message is there."""
        came = _process.client().key_value_increment(f"{self.key}/came", 1)
        if came == len(self.participants):
            self._wake_first()

    def wait(self, combine: Combine) -> tuple[bytes, list[bytes]]:
        """The answer; and all messages, on the first participant, which gives it."""
        self.come()
        first, *others = self.participants
        if self.works:
            is_first = _process.index == first
            silent = self._silent(*(("all", others) if is_first else ("answer", [first])))
            if silent:
                return self.end(self._silence(silent)), []
        if _process.index != first:
            with _suppress_timeout():
                return self.get("answer", self.seconds), []
            return self._give_up(), []
        with _suppress_timeout():
            self.get("all", self.seconds)
        said = self._said()
        if len(said) < len(self.participants):
            return self.end(self._absence(said)), []
        messages = [said[i] for i in self.participants]
        return self.end(_compare(messages, combine)), [_payload(x) for x in messages]

    def end(self, answer: bytes) -> bytes:
        """Ends the meeting with an answer, unless it has one; returns the one that it has."""
        client = _process.client()
        try:
            client.key_value_set_bytes(f"{self.key}/answer", answer)
        except jax.errors.JaxRuntimeError:  # there is one, or the service cannot be reached
            answer = client.key_value_try_get_bytes(f"{self.key}/answer")
        if _process.index != self.participants[0] or answer[:1] == _LEFT:
            self._wake_first()  # not before: it would say that others are absent
        return answer

    def forget(self) -> None:
        """Deletes the keys, which the service would keep, once all have read the answer."""
        client = _process.client()
        if client.key_value_increment(f"{self.key}/read", 1) == len(self.participants):
            client.key_value_delete(self.key)

    def _silent(self, name: str, whom: Sequence[int]) -> list[int]:
        """Waits for a key as long as processes show that they are alive; returns who does not.

        Looks are counted, and no seconds: if all processes stop for a while, and then go on, this
        one may be the first to look.
        """
        signs, looks = dict.fromkeys(whom, b""), Counter[int]()
        while True:
            with _suppress_timeout():
                self.get(name, _seconds_between_signs(self.seconds))
                return []
            rows = _process.client().key_value_dir_get_bytes(_process.names + _ALIVE)
            now = {int(key.rpartition("/")[2]): sign for key, sign in rows}
            said = self._said() if name == "all" else {}
            for i in whom:
                looks[i] = 0 if signs[i] != now.get(i, b"") or i in said else looks[i] + 1
                signs[i] = now.get(i, b"")
            if silent := [i for i in whom if looks[i] == _LOOKS]:
                return silent

    def _silence(self, silent: Sequence[int]) -> bytes:
        names = f"{named_processes(silent)} of {_process.count}"
        seconds = _LOOKS * _seconds_between_signs(self.seconds)
        fact = f"{names} showed no sign of life for {seconds:g} s, while others waited for it."
        return _SILENT + f"{fact} {_SEE_ITS_LOG}".encode()

    def _give_up(self) -> bytes:
        # All who wait give up at about the same time. One of them reads who has come.
        if _process.client().key_value_increment(f"{self.key}/late", 1) == 1:
            said = self._said()
            if len(said) < len(self.participants):
                return self.end(self._absence(said))
        with _suppress_timeout():
            return self.get("answer", _SECONDS_TO_ANSWER)
        return self.end(self._absence({}))

    def _absence(self, said: Mapping[int, bytes]) -> bytes:
        """The answer of a meeting to which not all came in time, if `said` is what was said there.
        If it was not read: of one that the first participant did not answer."""
        absent = [i for i in self.participants if i not in said] if said else self.participants[:1]
        names = f"{named_processes(absent)} of {_process.count}"
        seconds = self.seconds if said else self.seconds + _SECONDS_TO_ANSWER
        fact = f"{names} did not {'arrive' if said else 'answer'} within {seconds:g} s"
        return _ABSENT + json.dumps([fact, self.call.what, self.call.with_line()]).encode()

    def get(self, name: str, seconds: float) -> bytes:
        milliseconds = max(1, round(1000 * seconds))
        return _process.client().blocking_key_value_get_bytes(f"{self.key}/{name}", milliseconds)

    def _said(self) -> dict[int, bytes]:
        """The messages that have come, by process."""
        rows = _process.client().key_value_dir_get_bytes(f"{self.key}/said/")
        return {int(name.rpartition("/")[2]): value for name, value in rows}

    def _wake_first(self) -> None:
        _process.client().key_value_set_bytes(f"{self.key}/all", b"", allow_overwrite=True)


# ------------------------------------------------------------------ signs of life

_ALIVE = "alive/"  # in the keys of the service by which processes show that they are
_LOOKS = 3  # at the sign of a process, after which one that has not changed is the last


def _seconds_between_signs(timeout: float) -> float:
    """So that `_LOOKS` end within the timeout; a loaded machine may take seconds for a sign."""
    return max(timeout / (_LOOKS + 1), 2.0)


@contextmanager
def showing_life(options: MeetingOptions) -> Iterator[None]:
    """Shows the others that this process is alive while the block runs, before a meeting.

    The options are those of the meeting, and only if it `works`, anything is shown. A block that
    takes less than some seconds sends nothing.
    """
    if not options.get("works") or indices(options.get("among")) == [_process.index]:
        yield
        return
    end, timeout = threading.Event(), options.get("timeout")
    seconds = _seconds_between_signs(TIMEOUT if timeout is None else timeout)
    thread = threading.Thread(
        target=_show_life, args=(end, seconds), name="treeshard-alive", daemon=True
    )
    with suppress(RuntimeError):  # at the end of the process there are no new threads
        thread.start()
    try:
        yield
    finally:
        end.set()
        if thread.ident is not None:
            thread.join(_SECONDS_TO_ANSWER)


def _show_life(end: threading.Event, seconds: float) -> None:
    key, shows = f"{_process.names}{_ALIVE}{_process.index}", False
    while not end.wait(seconds):
        with suppress(jax.errors.JaxRuntimeError, ProcessError):
            sign = str(time.monotonic_ns())  # any other than before
            _process.client().key_value_set(key, sign, allow_overwrite=True)
            shows = True
    if shows:
        with suppress(jax.errors.JaxRuntimeError, ProcessError):
            _process.client().key_value_delete(key)


# ------------------------------------------------------------------ waits, and comparing


@contextmanager
def _suppress_timeout() -> Iterator[None]:
    """Goes on after a wait for a key whose time is over."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise


def _compare(messages: Sequence[bytes], combine: Combine) -> bytes:
    """The answer to the messages of all participants."""
    if _differ(messages, 0):
        return _OTHER_CALLS
    if _differ(messages, 1):
        return _OTHER_HISTORIES
    kind = _AGREED_AT_OTHER_LINES if _differ(messages, 2) else _AGREED
    return kind + combine([_payload(x) for x in messages])


def _differ(messages: Iterable[bytes], number: int) -> bool:
    """Whether messages differ in one of their `_Call.hashes`."""
    start = number * _HASH_BYTES
    return len({x[start : start + _HASH_BYTES] for x in messages}) > 1


def _payload(message: bytes) -> bytes:
    return message[3 * _HASH_BYTES :]


# ------------------------------------------------------------------ the process, and its threads


class _Process:
    """This process among the others: what it asks JAX, and what it remembers from call to call.

    It has to be a global: the calls of a program share nothing else, and a later one, of whichever
    function, must know that an earlier one has failed.
    """

    def __init__(self, names: str = "treeshard/") -> None:
        self.start_again(names)

    def start_again(self, names: str = "treeshard/") -> None:
        """Forgets all meetings and failures."""
        self.names = names  # what all keys in the service begin with
        self.broken = ""  # the first call that failed, if there is one
        self._channels: dict[tuple[tuple[int, ...], str], _Channel] = {}

    def channel(self, among: Sequence[int], name: str) -> _Channel:
        key = tuple(among), name
        known = self._channels.get(key)  # of two threads that come first, both get the same
        return known or self._channels.setdefault(key, _Channel(*key))

    def all_channels(self) -> list[_Channel]:
        return list(self._channels.values())

    # The three things that meetings ask JAX. No other function of this module does.

    @property
    def index(self) -> int:
        return jax.process_index()

    @property
    def count(self) -> int:
        return jax.process_count()

    def client(self) -> Any:
        """The client of the coordination service, through which all messages go."""
        client = coordination_client()
        if client is None:
            raise ProcessError(
                f"There are {self.count} processes, and this one is not connected to the others."
                " Call `jax.distributed.initialize()` first, on each of them."
            )
        return client


class _Thread(threading.local):
    """The last meeting of this thread."""

    meetings = 0  # how many this thread has come to
    told: BaseException | None = None  # the error that this process told the others there
    interrupts: HeldInterrupts | None = None  # of the call that this thread makes
    channel: _Channel  # of the meeting
    call = _Call("")  # what this process said there
    at_one_line = False  # whether all processes made the call at one line of the user's code
    last_meeting: str  # its name, for the user


_process = _Process()
_thread = _Thread()
# A forked process is not one of the processes that meet.
os.register_at_fork(after_in_child=_process.start_again)


def _channel(among: Sequence[int], name: str = "") -> _Channel:
    return _process.channel(among, name)


@contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(_UNREACHABLE.format(what=what, error=_reason(error))) from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * _HASH_BYTES]


def _hash_participants(participants: Sequence[int]) -> str:
    return _hash(",".join(map(str, participants)))


def _user_lines() -> str:
    """The lines of the user's code that led here: `train.py:41 (log) < train.py:60 (main)`.

    A function that makes the call may itself be called from several lines, so it is the innermost
    three. Empty if there are none, as in a thread of treeshard.
    """
    functions = dict(walk_calls(sys._getframe()))
    # A line of a package would not help: the user looks for what this process does and others not.
    lines = select_own_lines(functions)[:3]
    return " < ".join(_describe_line(line, functions[line]) for line in lines)


def _describe_line(line: str, function: str) -> str:
    """`train.py:41 (log)`"""
    with suppress(OSError):  # the current directory was removed
        line = line.removeprefix(os.path.join(os.getcwd(), ""))
    return line if function == "<module>" else f"{line} ({function})"


# ------------------------------------------------------------------ messages


def _absent(call: _Call, timeout: float | None, fact: str, what: str, waiting: str) -> str:
    longer = "" if timeout is None else ", or wait longer with `timeout=`"
    here = f" This process called it at {call.line}." if call.line else ""
    if what != call.what:  # it has come later
        here = f" It was at {waiting}: this process skipped that call, or made one more."
    return (
        f"{call.what}: {fact}. Nothing was done. Every process must make this call, at about the"
        f" same time. See the log of that process{longer}.{here}"
    )


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]


_UNREACHABLE = (
    "{what}: the coordination service of JAX, which is in process 0, cannot be reached ({error})."
    " Nothing was done. See the log of process 0."
)
_SEE_ITS_LOG = (
    "A process that is killed, stopped or cut off shows none: see its log. Start the run again,"
    " from its last checkpoint."
)
_PROGRAM_FAILED = (
    "{what}: a program failed in which the processes wait for each other: {error}. Look for a"
    " process that was killed or has ended: process 0 prints, as it ends, which are missing. Start"
    " the run again, from its last checkpoint."
)
_AT_EXIT = (
    "treeshard: the processes are out of step since {since}. This one ends with status 1 now, and"
    " does not wait for the others. Start the run again, from its last checkpoint."
)
_NOT_ENDED = (
    "treeshard: missing at the end: {names}. A process that was killed or stopped, or that still"
    " waits for another one, does not say that it ends. See its log."
)
_THE_SAME_CALLS = "All of them must make the same calls in the same order."
_AT_OTHER_LINES = (
    "That is right for two branches of one `if`, and wrong if a process skipped a call or made one"
    " more: then the values are of different arrays. A program of `jax.jit` made these, so they"
    " cannot be compared."
)
_AT_COMMON_LINES = (
    "Nothing was done. Before, all of them have made it at each of these lines together. A process"
    " skipped a call, or made one more."
)
_OTHER_HISTORY = (
    "before this call the processes have called different steps, or made batches of different"
    " shapes or small values, and nothing was done."
)


def _left(call: str, error: str, process: int) -> str:
    return (
        f"the call could not be made together: {call} was left by a {error} on process {process}."
        " The processes are out of step: start the run again, from its last checkpoint."
    )


def _different(calls: Mapping[int, _Call]) -> str:
    """What processes say that make different calls."""
    versions = {i: call.version for i, call in calls.items()}
    if len(set(versions.values())) > 1:
        return (
            f"the processes have different versions of treeshard: {describe_groups(versions)}."
            " Nothing was done. Install one version on all of them."
        )
    rows = {i: call.with_line() for i, call in calls.items()}
    why = "A process skipped a call, or made one more."
    if len({call.thread for call in calls.values()}) > 1:
        rows = {i: f"{rows[i]}, in the thread {call.thread!r}" for i, call in calls.items()}
        why = (
            "Calls from several threads may come in another order on each process: make them from"
            " one thread."
        )
    elif len({call.what for call in calls.values()}) == 1:
        rows = {i: f"{rows[i]} ({call.phase or 'begin'})" for i, call in calls.items()}
        why = "A process left this call before its end, and made it again."
    return (
        f"the processes do not make the same call, and nothing was done: {describe_groups(rows)}."
        f" {why} {_THE_SAME_CALLS}"
    )


def _first_other(by_process: Mapping[int, list[dict[str, str]]]) -> str:
    """The first entry in which histories of processes differ; empty if it was long ago.

    Each process has sent the entries of its steps, and of its batches, by number.
    """
    for histories in zip(*by_process.values(), strict=True):
        # What one of them no longer has is not known to differ.
        oldest = max(min(map(int, entries), default=0) for entries in histories)
        numbers = sorted({int(number) for entries in histories for number in entries})
        for number in numbers:
            row = [entries.get(str(number), "nothing") for entries in histories]
            if number >= oldest and len(set(row)) > 1:
                return f" The first: {describe_groups(dict(zip(by_process, row, strict=True)))}."
    return ""

"""Meetings: calls in which processes wait for each other and exchange a message.

Messages go through the coordination service of JAX's runtime, without devices or compilation.
`jax.experimental.multihost_utils` runs a program on all devices instead. If a process does not
start this program, the others wait forever, without an error.

1. The meetings of the same processes are numbered. At each meeting, every process sends hashes: of
   its call and thread, and of its steps and batches since the start. The first participant compares
   the hashes and sets one answer, for which the others wait. So the bytes that a process receives
   do not grow with the number of processes. If hashes differ, a process skipped a call, or two
   threads of a process call at once. All processes then describe their calls in another meeting,
   and raise before any data moves.
2. The answer is a key of the service, which keeps the first value that is set. A process that has
   waited too long, or leaves, also sets the answer. So a meeting has one outcome, even for a
   process that arrives later.
3. A failed meeting is final. The same holds if a process leaves a call, by a timeout or a Ctrl-C.
   As with a broken `threading.Barrier`, every later call raises, and names the first failure. Calls
   on which all processes agreed before, such as a save in the background, continue.
4. When such a process ends, it does not wait for the others, which may wait for it.
5. Some calls wait while other processes read or write. Each of these processes sets a key from time
   to time, as a sign of life. So a killed or stopped process is found within the timeout. JAX's own
   heartbeats find it later, and abort all processes.

If two calls look the same, with no step or batch of treeshard between them, a meeting does not see
that a process skipped one of them. Arrays show the difference: `set_origin` records which call of
treeshard made an array, and `Facts` compares small values of arrays that JAX made. As a last
resort, `check_lines` compares the lines of the user's code. A skipped call in a loop, at one line,
stays unnoticed.
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

# A function that makes the answer from all messages, on the first participant.
Combine = Callable[[list[bytes]], bytes]


class MeetingOptions(TypedDict, total=False):
    """The keyword arguments of `exchange`, for functions that pass them on."""

    phase: str
    among: Sequence[int] | None
    timeout: float | None
    works: bool
    moves: bool
    channel: str


class Answer(NamedTuple):
    """The answer of a meeting, and its messages."""

    combined: bytes  # equal on all participants
    messages: list[bytes]  # all messages on the first participant; empty on the others


def indices(among: Sequence[int] | None) -> list[int]:
    """The indices of the participating processes, from the argument `among` of `exchange`."""
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

    Either all processes return, or all raise a `ProcessError` that names the missing process or the
    different call. A process that arrives late raises the same error.

    Args:
        what: The operation, such as `"save /runs/7/step_100"`; the same on every process.
        payload: The message of this process.
        combine: A function that makes the answer from all messages, in the order of the processes'
            indices. Every process receives the answer, so its size should not grow with their
            number.
        phase: The stage of the operation, such as `"read"`, for all but its first meeting. A
            process that left the operation and began it again then does not meet with processes
            that are in the middle of it.
        among: The indices of the participating processes. The default is all. If it is empty, only
            this process participates.
        timeout: Seconds to wait for the other processes. `None` waits for the default time, and
            stands for operations that have no argument `timeout`.
        works: Whether processes arrive after work of unknown length, during which they are
            `showing_life`. If so, `timeout` limits the time without a sign of life.
        moves: Whether data moves after this meeting. If so, all threads and started steps must have
            the same order on all processes. Other calls from background threads use their own
            channel.
        channel: The name of a separate sequence of meetings.
    """
    participants = indices(among)
    if participants == [_process.index]:
        return Answer(combine([payload]), [payload])
    # A call that `works` continues after a failure, because other processes wait for it.
    if not works:
        check_not_broken(what, participants)
    if not (moves or is_main_thread()):
        channel = channel or "background"
    return _channel(participants, channel).meet(
        what, phase, payload, combine, timeout, works=works, moves=moves
    )


@contextmanager
def exclusive(among: Sequence[int], channel: str = "") -> Iterator[None]:
    """Makes the calls of other threads wait until a call that moves data has ended."""
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
    """Raises if an earlier call of this process has failed."""
    if _process.broken and among:
        raise ProcessError(
            f"{what}: the call was cancelled. The processes are out of step since"
            f" {_process.broken}. Start the run again from its last checkpoint."
        )


def mark_broken(what: str, among: Sequence[int] | None) -> None:
    """Makes every later call of this process raise, and name the first call that failed.

    `what` is the call of this thread's last meeting.
    """
    if _process.broken:
        return
    _process.broken = _thread.call._replace(what=what).with_line()
    # The first process that sets the key decides which call all processes name. If the service
    # cannot be reached, this process names its own call.
    key = f"{_process.names}{_BROKEN}{_hash_participants(indices(among))}"
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        _process.client().key_value_set(key, _process.broken)
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        _process.broken = _process.client().key_value_try_get(key)


def check_ran(what: str, among: Sequence[int], error: Exception) -> None:
    """Raises a `ProcessError` if an error comes from a collective that failed.

    Collectives fail if a process is killed, or ends. JAX raises the text of a status, as a
    `JaxRuntimeError` or, on CPUs, as a `ValueError`, and cannot name the process.
    """
    if among and str(error).startswith(_OF_COLLECTIVES):
        _thread.call = _Call(what, line=_user_lines())
        mark_broken(what, among)
        raise ProcessError(_PROGRAM_FAILED.format(what=what, error=_reason(error))) from error


# The beginnings of the statuses with which collectives fail.
_OF_COLLECTIVES = ("ABORTED:", "CANCELLED:", "DEADLINE_EXCEEDED:", "UNAVAILABLE:", "UNKNOWN: Gloo")


@contextmanager
def breaking_if_left() -> Iterator[None]:
    """Protects a call that has several meetings, or moves data after a meeting.

    After a meeting, the other processes continue the call, and may wait for this process in a
    collective. So a Ctrl-C waits for the next block that reports its outcome, or for the end of the
    call. If another `BaseException` leaves the call and is not an `Exception`, every later call
    raises, because the next call of this process would meet with the middle of this call.
    """
    met, outer = _thread.meetings, _thread.interrupts
    interrupts = _thread.interrupts = outer or HeldInterrupts()
    try:
        yield
    except BaseException as error:
        # All processes raise an `Exception`, or have received it at a meeting.
        is_told = isinstance(error, Exception) or error is _thread.told
        if _thread.meetings > met and not is_told:
            _thread.channel.leave(error)
        raise
    finally:  # the call is over, so a waiting Ctrl-C can be raised
        _thread.interrupts = outer
        if outer is None:
            interrupts.close()


def release_interrupts() -> None:
    """Raises a Ctrl-C that has waited, because from here on other processes receive it."""
    if _thread.interrupts is not None:
        _thread.interrupts.release()


def set_told(error: BaseException | None) -> None:
    """Records the error that this process sent to the others at this thread's last meeting."""
    _thread.told = error


# ------------------------------------------------------------------ the end of the process

_SECONDS_TO_END = 5.0  # process 0 waits this long for the next of the others to end


@atexit.register
def _end_if_broken() -> None:
    """Ends this process with status 1 if it, or a process that it met, is out of step.

    Otherwise JAX waits at exit for five minutes for the other processes, which may be in a step
    that waits for this process.
    """
    since = _process.broken or _broken_of_others()
    if since:
        print(_AT_EXIT.format(since=since), file=sys.stderr)
        with suppress(jax.errors.JaxRuntimeError, ProcessError):
            _let_others_end()
        end_process()


def _broken_of_others() -> str:
    """The call that failed on other processes that this process has met."""
    participants = {_hash_participants(channel.participants) for channel in _process.all_channels()}
    if not participants:
        return ""
    with suppress(jax.errors.JaxRuntimeError, ProcessError):
        for key, call in _process.client().key_value_dir_get(_process.names + _BROKEN):
            if key.rpartition("/")[2] in participants:
                return call
    return ""


def _let_others_end() -> None:
    """Makes process 0 wait for the others, and print which of them are missing.

    Process 0 runs the service. Without the service, JAX aborts the others before they can print why
    they end.
    """
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
    time.sleep(0.3)  # the others end shortly after they have set their keys


# ------------------------------------------------------------------ between meetings


def count_step(among: Sequence[int]) -> str:
    """Counts a program that these processes have started without a meeting; returns its name."""
    return f"step {_channel(among).count('step')}"


def count_program(among: Sequence[int]) -> int:
    """Counts a program that these processes call for the first time; returns its number."""
    return _channel(among).count("program")


def count_batch(among: Sequence[int]) -> int:
    """Counts a batch that these processes made without a meeting; returns its number."""
    return _channel(among).count("batch")


def record_step(among: Sequence[int], entry: str) -> None:
    """Adds a step and its arguments to the history that processes compare at each later meeting.

    All threads share this history: steps wait for each other in collectives, so they must have the
    same order on all processes.
    """
    _channel(among).steps.add(entry)


def record_batch(among: Sequence[int], entry: str) -> None:
    """Adds a batch to the history that processes compare at each later meeting of this thread.

    Meetings of other threads leave it out, because a thread may make batches in advance. A step
    that receives the batch compares it in any case.
    """
    _channel(among).batches.add(entry)


def agreed_forms(among: Sequence[int]) -> dict[Any, str]:
    """The forms of trees that these processes have compared, by a key that the caller chooses.

    The number of forms grows with the shapes of batches. For each shape, JAX keeps a compiled
    program, which is larger.
    """
    return _channel(among).agreed_forms


def is_main_thread() -> bool:
    """Whether this is the thread whose calls are in the same order on all processes."""
    return threading.current_thread() is threading.main_thread()


# These facts are attributes of arrays. They cannot be in a weak dictionary, because arrays have no
# hash. Arrays that JAX makes from other arrays do not have the attributes.
_ORIGIN = "_treeshard_made_in"  # the participants, the call that made the array, and its leaf
_CHECKSUM = "_treeshard_checksum"  # the checksum of a small array that every process has in full


def set_origin(
    arrays: Iterable[Any], among: Sequence[int], call: str, names: Iterable[str] | None = None
) -> None:
    """Records on arrays which call of these processes made them, and as which leaf."""
    if among:
        participants = tuple(among)
        for x, name in zip(arrays, map(str, count()) if names is None else names, strict=False):
            if isinstance(x, jax.Array) and not isinstance(x, Tracer):
                setattr(x, _ORIGIN, (participants, call, name))


def origin(x: Any, among: Sequence[int]) -> str:
    """The call of these processes that made an array, or `""` if it is unknown."""
    participants, call, name = getattr(x, _ORIGIN, ((), "", ""))
    if participants != tuple(among):
        return ""
    return f"{call} as leaf {name}" if name else call  # without a name if it made one array


def set_checksum(x: jax.Array, text: str) -> None:
    """Records the checksum of an array's values on the array, so that steps read it only once."""
    setattr(x, _CHECKSUM, text)


def known_checksum(x: Any) -> str:
    """The checksum that was recorded on an array, or `""`."""
    return getattr(x, _CHECKSUM, "")


def last_meeting() -> str:
    """The name of this thread's last meeting."""
    return _thread.last_meeting


def check_lines(what: str, **options: Unpack[MeetingOptions]) -> None:
    """Compares the lines at which the processes made the call of this thread's last meeting.

    Different lines may be correct: `if process_index() == 0:` has a line in each branch. So
    different lines are a warning, and an error only if all processes have made this call together
    at each of these lines before.
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
    """The call with which a process comes to a meeting. All fields but the line must be equal."""

    what: str  # the operation
    phase: str = ""  # the stage of the operation
    thread: str = ""  # the name of the thread that makes the call
    history: str = ""  # a hash of the steps and batches so far
    line: str = ""  # in the user's code: `train.py:41 (log) < train.py:60 (main)`
    version: str = ""  # the version of treeshard

    def with_line(self) -> str:
        """A text such as `save, train.py:41 (log)`."""
        return ", ".join(filter(None, (self.what, self.line.partition(" < ")[0])))

    def hashes(self) -> bytes:
        """The hashes to compare: of the call, of its history, and of its line."""
        call = self._replace(history="", line="")
        if self.phase == _COMPARING_CALLS:
            call = _Call("", self.phase)  # the calls differ, which is why they are compared
        texts = json.dumps(call), self.history, self.line
        return b"".join(bytes.fromhex(_hash(text)) for text in texts)


_HASH_BYTES = 8
_COMPARING_CALLS = "comparing calls"  # a phase


class _History:
    """The steps or batches of a process, in order: a hash of all entries, and the last entries."""

    def __init__(self) -> None:
        self.hash = ""
        self.count = 0
        self._latest = deque[str](maxlen=500)  # only to name the first difference

    def add(self, entry: str) -> None:
        self.hash = _hash(self.hash + entry)
        self.count += 1
        self._latest.append(entry)

    def entries(self) -> dict[str, str]:
        """The last entries, by number. Numbers are text, because keys of JSON are text."""
        first = self.count - len(self._latest)
        return {str(number): entry for number, entry in enumerate(self._latest, first)}


class _HistoryOfThread(threading.local, _History):
    """A history for each thread. It ends with the thread: some programs start one per batch."""


_BROKEN = "out-of-step/"  # the part of a key that records a failed call

# The first byte of an answer says how a meeting ended.
_AGREED = b"="  # the rest is the result of `combine`
_AGREED_AT_OTHER_LINES = b"~"  # as `_AGREED`, with calls at different lines of the user's code
_OTHER_CALLS = b"?"
_OTHER_HISTORIES = b"#"
_ABSENT = b"-"  # the rest names the absent processes, and the call
_SILENT = b"."  # the rest names the processes without a sign of life
_LEFT = b"!"  # the rest names the call that a process left, and the reason

# The time that present processes give each other to set an answer.
_SECONDS_TO_ANSWER = 5.0


class _Channel:
    """A sequence of meetings of some processes, and this process's history between them."""

    def __init__(self, participants: tuple[int, ...], name: str) -> None:
        self.participants = participants
        self.lock = threading.RLock()  # held by the thread whose call runs
        self.steps, self.batches = _History(), _HistoryOfThread()
        self.agreed_forms: dict[Any, str] = {}  # see the function `agreed_forms`
        self.common_lines = set[str]()  # at which all processes made a call; see `check_lines`
        self._counts = Counter[str]()  # counts steps, batches and programs of all threads
        self._name = name
        self._key = _process.names + _hash_participants(participants)
        if name:
            self._key += "." + _hash(name)
        self._number = 0  # the number of the next meeting
        self._is_over = False  # whether a meeting has failed, so that all later ones fail
        self._line = ""  # the line of the last call in the user's code

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
        # A background thread continues a call that the user's code has made.
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
            except ProcessError:  # raised by all processes of this meeting
                self._is_over = True
                mark_broken(what, self.participants)
                raise
            except BaseException as error:  # such as a Ctrl-C
                self.leave(error)
                raise

    def leave(self, error: BaseException) -> None:
        """Tells the others that this process will not come to another meeting, because of an error.

        The others may still be at the last meeting, or on their way to the next meeting.
        """
        self._is_over = True
        call = _thread.call
        mark_broken(call.what, self.participants)
        left = [call.with_line(), type(error).__name__, _process.index]
        for number in (self._number - 1, self._number):
            # If all processes have read the answer of the last meeting, its keys are deleted.
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
        """Comes to the next meeting, and raises unless all processes come with the same call."""
        number, self._number = self._number, self._number + 1
        seconds = TIMEOUT if timeout is None else timeout
        meeting = self._meeting(number, call, seconds, works=works)
        interrupts = _thread.interrupts
        meeting.send(payload)

        def wait() -> tuple[bytes, list[bytes]]:
            answer, messages = meeting.wait(combine)
            if interrupts is not None and answer[:1] in (_AGREED, _AGREED_AT_OTHER_LINES):
                interrupts.hold()  # the others continue the call
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
        """Describes the processes' calls, which they exchange in another meeting."""

        def combine(messages: list[bytes]) -> bytes:
            rows = zip(self.participants, map(json.loads, messages), strict=True)
            return _different({i: _Call(*fields) for i, fields in rows}).encode()

        own = json.dumps(call).encode()
        asking = call._replace(phase=_COMPARING_CALLS, history="")
        return self._attend(asking, own, combine, _SECONDS_TO_ANSWER).combined.decode()

    def _compare_histories(self, call: _Call) -> str:
        """Names the first step or batch that differs between processes that make the same call.

        The processes exchange their histories in another meeting.
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
    """One meeting: its keys in the service, and the call with which this process comes.

    The keys below `key`, in the order in which processes set them:

        said/3   the hashes and the message of process 3
        came     how many processes have sent their message
        all      wakes the first participant, after all have sent their message
        late     how many processes have given up
        answer   how the meeting ended; the service keeps the first value
        read     how many processes have read the answer
    """

    key: str
    participants: tuple[int, ...]
    call: _Call
    seconds: float  # the time to wait for the others, or, if they work, for a sign of life
    works: bool = False  # see `exchange`

    def send(self, payload: bytes) -> None:
        message = self.call.hashes() + payload
        _process.client().key_value_set_bytes(f"{self.key}/said/{_process.index}", message)

    def come(self) -> None:
        """Counts this process, after it has sent its message."""
        came = _process.client().key_value_increment(f"{self.key}/came", 1)
        if came == len(self.participants):
            self._wake_first()

    def wait(self, combine: Combine) -> tuple[bytes, list[bytes]]:
        """Returns the answer, and all messages on the first participant, which makes the answer."""
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
        """Ends the meeting with an answer, unless it already has one; returns its answer."""
        client = _process.client()
        try:
            client.key_value_set_bytes(f"{self.key}/answer", answer)
        except jax.errors.JaxRuntimeError:  # it has an answer, or the service cannot be reached
            answer = client.key_value_try_get_bytes(f"{self.key}/answer")
        if _process.index != self.participants[0] or answer[:1] == _LEFT:
            self._wake_first()  # after the answer, or it would report others as absent
        return answer

    def forget(self) -> None:
        """Deletes the keys from the service, after all processes have read the answer."""
        client = _process.client()
        if client.key_value_increment(f"{self.key}/read", 1) == len(self.participants):
            client.key_value_delete(self.key)

    def _silent(self, name: str, whom: Sequence[int]) -> list[int]:
        """Waits for a key while processes show signs of life; returns the processes without one.

        The method counts looks instead of seconds: if all processes are stopped and continued, this
        process may be the first to look.
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
        # All waiting processes give up at about the same time. One of them reads which have come.
        if _process.client().key_value_increment(f"{self.key}/late", 1) == 1:
            said = self._said()
            if len(said) < len(self.participants):
                return self.end(self._absence(said))
        with _suppress_timeout():
            return self.get("answer", _SECONDS_TO_ANSWER)
        return self.end(self._absence({}))

    def _absence(self, said: Mapping[int, bytes]) -> bytes:
        """The answer of a meeting to which not all processes came, whose messages are `said`.

        If `said` is empty, the first participant did not answer.
        """
        absent = [i for i in self.participants if i not in said] if said else self.participants[:1]
        names = f"{named_processes(absent)} of {_process.count}"
        seconds = self.seconds if said else self.seconds + _SECONDS_TO_ANSWER
        fact = f"{names} did not {'arrive' if said else 'answer'} within {seconds:g} s"
        return _ABSENT + json.dumps([fact, self.call.what, self.call.with_line()]).encode()

    def get(self, name: str, seconds: float) -> bytes:
        milliseconds = max(1, round(1000 * seconds))
        return _process.client().blocking_key_value_get_bytes(f"{self.key}/{name}", milliseconds)

    def _said(self) -> dict[int, bytes]:
        """The messages that were sent, by process."""
        rows = _process.client().key_value_dir_get_bytes(f"{self.key}/said/")
        return {int(name.rpartition("/")[2]): value for name, value in rows}

    def _wake_first(self) -> None:
        _process.client().key_value_set_bytes(f"{self.key}/all", b"", allow_overwrite=True)


# ------------------------------------------------------------------ signs of life

_ALIVE = "alive/"  # the part of a key by which a process shows that it is alive
_LOOKS = 3  # a process is silent if its sign stays the same for so many looks


def _seconds_between_signs(timeout: float) -> float:
    """The time between signs. `_LOOKS` fit into the timeout, and a busy machine may be slow."""
    return max(timeout / (_LOOKS + 1), 2.0)


@contextmanager
def showing_life(options: MeetingOptions) -> Iterator[None]:
    """Shows the others that this process is alive while the block runs, before a meeting.

    `options` are the options of the meeting, and only a meeting that `works` has signs of life. The
    first sign is sent after a few seconds.
    """
    if not options.get("works") or indices(options.get("among")) == [_process.index]:
        yield
        return
    end, timeout = threading.Event(), options.get("timeout")
    seconds = _seconds_between_signs(TIMEOUT if timeout is None else timeout)
    thread = threading.Thread(
        target=_show_life, args=(end, seconds), name="treeshard-alive", daemon=True
    )
    with suppress(RuntimeError):  # a process that is ending cannot start threads
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
            sign = str(time.monotonic_ns())  # any new value
            _process.client().key_value_set(key, sign, allow_overwrite=True)
            shows = True
    if shows:
        with suppress(jax.errors.JaxRuntimeError, ProcessError):
            _process.client().key_value_delete(key)


# ------------------------------------------------------------------ waits, and comparing


@contextmanager
def _suppress_timeout() -> Iterator[None]:
    """Suppresses the error of a wait for a key that has timed out."""
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
    """Whether messages differ in the hash with this number: see `_Call.hashes`."""
    start = number * _HASH_BYTES
    return len({x[start : start + _HASH_BYTES] for x in messages}) > 1


def _payload(message: bytes) -> bytes:
    return message[3 * _HASH_BYTES :]


# ------------------------------------------------------------------ the process, and its threads


class _Process:
    """What this process asks JAX about the other processes, and remembers between calls.

    The object must be global: a call of any function must know that an earlier call has failed.
    """

    def __init__(self, names: str = "treeshard/") -> None:
        self.start_again(names)

    def start_again(self, names: str = "treeshard/") -> None:
        """Forgets all meetings and failures."""
        self.names = names  # the beginning of all keys in the service
        self.broken = ""  # the first call that failed, if any
        self._channels: dict[tuple[tuple[int, ...], str], _Channel] = {}

    def channel(self, among: Sequence[int], name: str) -> _Channel:
        key = tuple(among), name
        known = self._channels.get(key)  # two threads that come first get the same channel
        return known or self._channels.setdefault(key, _Channel(*key))

    def all_channels(self) -> list[_Channel]:
        return list(self._channels.values())

    # Meetings ask JAX only these three things.

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
                f"This process is not connected to the other {self.count - 1} processes. Call"
                " `jax.distributed.initialize()` first, on each process."
            )
        return client


class _Thread(threading.local):
    """The last meeting of this thread."""

    meetings = 0  # the number of meetings to which this thread has come
    told: BaseException | None = None  # the error that this process sent at the meeting
    interrupts: HeldInterrupts | None = None  # interrupts that the current call holds back
    channel: _Channel  # the channel of the meeting
    call = _Call("")  # the call with which this process came
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

    The text has the innermost three lines, because several lines may call the function that makes
    the call. It is empty in threads of treeshard.
    """
    functions = dict(walk_calls(sys._getframe()))
    # Lines of packages are left out: the user looks for a difference in the user's own code.
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
    if what != call.what:  # this process came later, with another call
        here = f" It was at {waiting}: this process skipped that call, or made one more."
    return (
        f"{call.what}: {fact}. The call was cancelled. Every process must make this call, at about"
        f" the same time. See the log of that process{longer}.{here}"
    )


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]


_UNREACHABLE = (
    "{what}: the call was cancelled, because JAX's coordination service, which process 0 runs,"
    " cannot be reached ({error}). See the log of process 0."
)
_SEE_ITS_LOG = (
    "A process that is killed, stopped or disconnected shows no sign of life: see its log. Start"
    " the run again from its last checkpoint."
)
_PROGRAM_FAILED = (
    "{what}: a collective failed: {error}. Look for a process that was killed or has ended: when"
    " process 0 ends, it prints which processes are missing. Start the run again from its last"
    " checkpoint."
)
_AT_EXIT = (
    "treeshard: the processes are out of step since {since}. This process ends now with status 1."
    " Start the run again from its last checkpoint."
)
_NOT_ENDED = (
    "treeshard: missing at the end: {names}. A missing process was killed or stopped, or still"
    " waits for another process. See its log."
)
_THE_SAME_CALLS = "All processes must make the same calls in the same order."
_AT_OTHER_LINES = (
    "Two branches of one `if` are right. It is wrong if a process skipped a call or made one more,"
    " because the processes then pass different arrays. A program of `jax.jit` made these arrays,"
    " so their values cannot be compared."
)
_AT_COMMON_LINES = (
    "The call was cancelled, because earlier all processes made it together at each of these lines."
    " A process skipped a call, or made one more."
)
_OTHER_HISTORY = (
    "the call was cancelled, because before it the processes called different steps, or made"
    " batches of different shapes or small values."
)


def _left(call: str, error: str, process: int) -> str:
    return (
        f"the call was cancelled, because process {process} left {call} with a {error}. The"
        " processes are out of step. Start the run again from its last checkpoint."
    )


def _different(calls: Mapping[int, _Call]) -> str:
    """Describes the different calls of processes."""
    versions = {i: call.version for i, call in calls.items()}
    if len(set(versions.values())) > 1:
        return (
            f"the processes have different versions of treeshard: {describe_groups(versions)}."
            " The call was cancelled. Install the same version on all processes."
        )
    rows = {i: call.with_line() for i, call in calls.items()}
    why = "A process skipped a call, or made one more."
    if len({call.thread for call in calls.values()}) > 1:
        rows = {i: f"{rows[i]}, in the thread {call.thread!r}" for i, call in calls.items()}
        why = (
            "Calls from several threads may have a different order on each process. Make them from"
            " one thread."
        )
    elif len({call.what for call in calls.values()}) == 1:
        rows = {i: f"{rows[i]} ({call.phase or 'begin'})" for i, call in calls.items()}
        why = "A process left this call before its end, and made it again."
    return (
        f"the processes make different calls, which were cancelled: {describe_groups(rows)}. {why}"
        f" {_THE_SAME_CALLS}"
    )


def _first_other(by_process: Mapping[int, list[dict[str, str]]]) -> str:
    """The first entry that differs between histories, or `""` if no process keeps it any more.

    `by_process` has the entries of each process's steps and batches, by number.
    """
    for histories in zip(*by_process.values(), strict=True):
        # Entries that a process no longer has are not compared.
        oldest = max(min(map(int, entries), default=0) for entries in histories)
        numbers = sorted({int(number) for entries in histories for number in entries})
        for number in numbers:
            row = [entries.get(str(number), "nothing") for entries in histories]
            if number >= oldest and len(set(row)) > 1:
                return f" The first: {describe_groups(dict(zip(by_process, row, strict=True)))}."
    return ""

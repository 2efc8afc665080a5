"""Where each process is, said by all of them when one has waited too long.

A process that waits cannot see why another does not come, and one that hangs in a program cannot
look. So a thread of each process looks about once a second whether a call of this process has
waited too long, or whether another process says so; then it says where its own main thread is, here
and to the others. It needs no device, and answers as long as Python runs: not while other code
holds Python's lock.

Texts go through the coordination service of JAX's own runtime, as those of `meetings` do.
"""

import atexit
import hashlib
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax

from treeshard._core.jax_private import coordination_client
from treeshard._core.text import grouped, named_processes
from treeshard.errors import HIDDEN

# Seconds between two looks of the thread; more for many processes, so that the service has at most
# a hundred to answer in a second.
_TICK, _LOOKS_A_SECOND = 1.0, 100
_PATIENCE = 5  # looks for which an answer is waited for

# ------------------------------------------------------------------ places in the user's code

_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = tuple(os.path.join(sysconfig.get_path(x), "") for x in ("stdlib", "platstdlib"))
_SHOWN = 3  # lines of one place, from the innermost


def user_place(frame: FrameType | None) -> str:
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


def _call_of_ours(frame: FrameType | None) -> str:
    """The function of treeshard that the user's code is in, such as `gather`; or empty."""
    name = ""
    while frame is not None and not _is_of_user(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_OURS):
            name = frame.f_code.co_qualname
        frame = frame.f_back
    return name


def whereabouts() -> str:
    """Where the main thread of this process is: `at train.py:41 (log), in gather, in step 7`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    parts = [f"at {user_place(frame) or 'no line of its own code'}"]
    call = _call_of_ours(frame)
    if call:
        parts.append(f"in {call}")
    if _state.step is not None:
        parts.append(_state.step())
    return ", ".join(parts)


def set_step(text: Callable[[], str]) -> None:
    """Sets what `whereabouts` says of the step of a training loop."""
    _state.step = text


# ------------------------------------------------------------------ waits


@dataclass
class Wait:
    """A call of this process that waits for others.

    Attributes:
        what: The call.
        place: Where the user's code makes it.
        meeting: Names it, the same on every process.
        participants: The processes that take part.
        patience: Seconds after which all processes say where they are.
        arrived: Returns the processes that have come.
    """

    what: str
    place: str
    meeting: str
    participants: Sequence[int]
    patience: float
    arrived: Callable[[], set[int]]
    began: float = field(default_factory=time.monotonic)
    is_told: bool = False

    def tell(self) -> None:
        """Says here and on all other processes how long this waits, and for whom, once."""
        with _state.lock:
            if self.is_told:
                return
            self.is_told = True
        absent = [i for i in self.participants if i not in self.arrived()]
        if absent:
            called = f", called at {self.place}," if self.place else ""
            seconds = shown_seconds(time.monotonic() - self.began)
            for_whom = f"{named_processes(absent)} of {jax.process_count()}"
            raise_alarm(self.meeting, f"{self.what}{called} has waited {seconds} for {for_whom}")


@contextmanager
def waiting(wait: Wait) -> Iterator[None]:
    """For the time of a wait: after its patience, it is told."""
    listen()
    _state.waits.append(wait)
    try:
        yield
    finally:
        _state.waits.remove(wait)


def raise_alarm(name: str, headline: str) -> None:
    """Says what is late, and where this process is; all other processes say where they are.

    What is late has one name on all processes. If another one has raised the alarm, it collects the
    answers.
    """
    key = hashlib.sha256(name.encode()).hexdigest()[:16]
    if key in _state.seen:
        return
    _state.seen.add(key)
    _say(headline)
    client = coordination_client()
    if client is None:
        return
    with suppress(jax.errors.JaxRuntimeError):
        _answer(client, key)
        client.key_value_set(f"{_ALARMS}{key}", headline)  # an error if there is one
        _state.asked[key] = _PATIENCE


def answers_to(name: str, among: Sequence[int], seconds: float) -> dict[int, str]:
    """What other processes answer to an alarm within some time: where they are."""
    key = hashlib.sha256(name.encode()).hexdigest()[:16]
    until = time.monotonic() + seconds
    answers: dict[int, str] = {}
    while not answers.keys() >= set(among) and time.monotonic() < until:
        time.sleep(0.05)
        with suppress(jax.errors.JaxRuntimeError):  # the service ended meanwhile
            answers = _answers(key)
    return answers


def shown_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _say(headline: str) -> None:
    me = f"process {jax.process_index()}"
    print(f"treeshard: {headline}. This is {me}, {whereabouts()}.", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the thread

_ALARMS, _ANSWERS = "treeshard-alarms/", "treeshard-answers/"


class _State:
    """What the thread looks at.

    Attributes:
        waits: The calls of this process that wait.
        checks: What else is called at each look, with the time.
        seen: The alarms that this process has answered.
        asked: Of its own alarms, for how many looks answers are still waited for.
        collected: The last of its own alarms whose answers were printed; empty before.
        step: As `set_step` says.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waits: list[Wait] = []
        self.checks: list[weakref.WeakMethod[Callable[[float], None]]] = []
        self.seen: set[str] = set()
        self.asked: dict[str, int] = {}
        self.collected = ""
        self.step: Callable[[], str] | None = None
        self.thread: threading.Thread | None = None
        self.ends = threading.Event()


_state = _State()


def listen(check: Callable[[float], None] | None = None) -> None:
    """Starts the thread, unless it runs. It calls the method `check` while its object lives."""
    with _state.lock:
        if check is not None:
            _state.checks.append(weakref.WeakMethod(check))
        if _state.thread is not None and _state.thread.is_alive():  # not in a forked process
            return
        client = coordination_client()
        if client is not None:  # what was said before this process took part
            with suppress(jax.errors.JaxRuntimeError):
                _state.seen |= {_key_of(path) for path, _ in client.key_value_dir_get(_ALARMS)}
        _state.ends.clear()
        _state.thread = threading.Thread(target=_look_again, name="treeshard-look", daemon=True)
        _state.thread.start()
        atexit.register(_end)


def listen_to_others() -> None:
    """Starts the thread if there are other processes, so that it can answer them."""
    if _state.thread is None and coordination_client() is not None:
        listen()


def _end() -> None:
    _state.ends.set()
    thread, _state.thread = _state.thread, None
    if thread is not None:
        thread.join(timeout=5)


def _look_again() -> None:
    interval = max(_TICK, jax.process_count() / _LOOKS_A_SECOND)
    while not _state.ends.wait(interval):
        # The service may end before this process does. The thread never ends the program.
        with suppress(Exception):
            _look()


def _look() -> None:
    now = time.monotonic()
    for wait in list(_state.waits):
        if now - wait.began > wait.patience:
            wait.tell()
    for reference in list(_state.checks):
        check = reference()
        if check is not None:
            check(now)
    client = coordination_client()
    if client is None:
        return
    for path, headline in client.key_value_dir_get(_ALARMS):
        key = _key_of(path)
        if key not in _state.seen:
            _state.seen.add(key)
            _say(headline)
            _answer(client, key)
    for key in list(_state.asked):
        _collect(client, key)


def _collect(client: Any, key: str) -> None:
    """Prints what the processes answered to an alarm of this one, once all have or time is over."""
    everyone = range(jax.process_count())
    answers = _answers(key)
    _state.asked[key] -= 1
    if len(answers) < len(everyone) and _state.asked[key] > 0:
        return
    del _state.asked[key]
    silent = "no answer: it has ended, or has made no call of treeshard"
    rows = grouped({i: answers.get(i, silent) for i in everyone})
    lines = ["treeshard: where the processes are:", *(f"  {who}: {where}" for who, where in rows)]
    print("\n".join(lines), file=sys.stderr, flush=True)
    client.key_value_delete(f"{_ALARMS}{key}")
    # An error that is being made may still read these answers, but none reads those before.
    if _state.collected:
        client.key_value_delete(f"{_ANSWERS}{_state.collected}/")
    _state.collected = key


def _answer(client: Any, key: str) -> None:
    answer = f"{_ANSWERS}{key}/{jax.process_index()}"
    client.key_value_set(answer, whereabouts(), allow_overwrite=True)


def _answers(key: str) -> dict[int, str]:
    client = coordination_client()
    if client is None:
        return {}
    pairs = client.key_value_dir_get(f"{_ANSWERS}{key}/")
    return {int(_key_of(path)): text for path, text in pairs}


def _key_of(path: str) -> str:
    return path.rpartition("/")[2]

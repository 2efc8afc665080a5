"""Detects that a run should end, by SIGTERM from a scheduler or by Ctrl-C.

An exception in the middle of a step loses the state, because the old state is donated and the new
one is not assigned yet. So the handlers only set a flag, and the loop reads it between two steps.

Processes receive a signal at different steps. With several processes, JAX receives SIGTERM, and its
preemption service chooses the step after which all stop. A Ctrl-C is passed on as a SIGTERM, since
a terminal sends it only to its own processes, and `srun` or `ssh` may run the others elsewhere.
"""

import os
import signal
import threading
import time
import weakref
from typing import Any

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

from treeshard.errors import CheckpointError, ProcessError

# Seconds in which several Ctrl-C count as one, because launchers pass on a signal that the terminal
# has already sent to their children.
_SAME_CTRL_C = 1.0
_NOTE = b"Ctrl-C: the run stops after this step. Press it again to interrupt it at once.\n"


class Preemption:
    """The handlers of SIGTERM and SIGINT of a run, and whether they were called.

    A single process must create it in the main thread. With several processes, another thread may
    create it too. Then only SIGTERM is detected, because a Ctrl-C does not interrupt that thread.
    """

    def __init__(self, step: int) -> None:
        self._noticed_at: float | None = None
        self._stops_at: int | None = None
        self._before: dict[int, Any] = {}
        self._released = False
        self._has_others, self._is_first = jax.process_count() > 1, jax.process_index() == 0
        if self._has_others:
            self.is_reached(step)  # raises before a handler passes on a signal to JAX
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main or self._has_others):
            raise CheckpointError(
                "preempted: only the main thread can install handlers of signals. Call"
                " `checkpoints.preempted(0)` there, before the thread of the loop begins."
            )
        if is_main:
            _installed.add(self)
            for number in [signal.SIGINT] if self._has_others else [signal.SIGTERM, signal.SIGINT]:
                self._install(number)

    def _install(self, number: int) -> None:
        before = signal.getsignal(number)
        # An ignored signal, as under `nohup`, stays ignored. A handler in C cannot be restored.
        if before not in (signal.SIG_IGN, None):
            self._before[number] = before
            signal.signal(number, self._notice)

    def is_reached(self, step: int) -> bool:
        """Whether to stop after this step."""
        if not self._has_others:
            return self._noticed_at is not None
        try:
            if self._stops_at is None and reached_preemption_sync_point(step):
                self._stops_at = step
        except RuntimeError as error:
            raise ProcessError(
                "preempted: JAX's preemption service is not running. Enable it before"
                " `jax.distributed.initialize()`:"
                f" `jax.config.update('jax_enable_preemption_service', True)`. ({error})"
            ) from None
        return self._stops_at is not None

    def _notice(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        is_new, self._noticed_at = self._noticed_at is None, self._noticed_at or now
        before = self._handler_before(number)
        is_ctrl_c = number == signal.SIGINT
        if self._released or (is_ctrl_c and now - self._noticed_at >= _SAME_CTRL_C):
            _handle(number, frame, before)
            return
        if is_ctrl_c and self._has_others:
            signal.raise_signal(signal.SIGTERM)
        if is_ctrl_c and is_new and self._is_first:
            os.write(2, _NOTE)  # `print` may have been interrupted, and cannot be entered again
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _handler_before(self, number: int) -> Any:
        """The previous handler. Those of runs that have ended since are left out."""
        before = self._before[number]
        run = getattr(before, "__self__", None)
        if isinstance(run, Preemption) and run._released:
            return run._handler_before(number)
        return before

    def release(self) -> None:
        """Restores the previous handlers, unless others were installed since."""
        self._released = True
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if signal.getsignal(number) == self._notice:
                    signal.signal(number, self._handler_before(number))


def _handle(number: int, frame: Any, handler: Any) -> None:
    """Calls another handler."""
    if callable(handler):
        handler(number, frame)
    else:
        signal.signal(number, handler)
        signal.raise_signal(number)


# A fork must end at SIGTERM, as `multiprocessing.Process.terminate` expects.
_installed: "weakref.WeakSet[Preemption]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [preemption.release() for preemption in _installed])

"""The checkpoints of a training run: a directory with a checkpoint for each saved step.

The names in the directory are the list of steps. Older checkpoints are removed once a later one is
durable. Each is first renamed, so that readers never see half of it, and then a thread removes its
files.
"""

import atexit
import json
import operator
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import SupportsIndex, Unpack

import jax
from etils import epath

from treeshard._core.meetings import breaking_if_left
from treeshard._core.paths import PyTree
from treeshard._core.processes import (
    TIMEOUT,
    all_or_none,
    name_failures,
    require_agreement,
    show_progress,
)
from treeshard._core.threads import Outcome, defer_interrupts, end_process, start_thread
from treeshard._disk.files import (
    Lock,
    PathLike,
    check_mark,
    flush,
    make_directory,
    new_mark,
    remove_mark,
    warn_of_removed,
)
from treeshard.checkpoint._paths import (
    ARRAYS,
    MARK,
    SEAL,
    checkpoint_path,
    is_local,
    lacking_files,
    lock_in,
    mark_removed,
    reading,
    seal,
    steps_in,
    sweep_run,
)
from treeshard.checkpoint._preemption import Preemption
from treeshard.checkpoint._restore import RestoreOptions, restore, table_at
from treeshard.checkpoint._save import Writing, begin, untold
from treeshard.errors import (
    CheckpointError,
    ProcessError,
    RemovedError,
    TreeShardError,
    counted,
    listed,
    warn,
)

LATEST, REMOVE_AFTER = "restore_latest", "remove_after"


@atexit.register
def _tell_at_exit() -> None:
    """Ends the process with status 1 if a save has failed whose error was never raised.

    Python has joined the threads by now, unless a Ctrl-C interrupted it. Python prints an exception
    of an `atexit` function, but keeps the exit status, so the process is ended here.
    """
    failures = [f"failed: {error}" for writing in untold if (error := writing.error())]
    failures += ["was interrupted." for writing in untold if not writing.has_ended]
    if failures:
        for failure in failures:
            print(f"A save in the background {failure}", file=sys.stderr)
        end_process()


class Checkpoints:
    """Saves and restores the checkpoints of a training run, by step, in one directory.

    Saves run in the background. `save` returns once the state may change or be donated. Until
    `close`, a lock keeps other runs from writing to the directory. Unfinished checkpoints of killed
    runs are removed, with a `ShardingWarning` that names them. Object stores have no locks, so the
    unfinished checkpoint of a run that is still alive is removed there too.

    Use it in a `with` statement, with the same arguments on every process. Several threads may use
    it: their saves run one after another.

    Args:
        directory: A directory that all processes share. It is created if it does not exist.
        keep: How many of the latest checkpoints to keep. `None` keeps all. Older checkpoints are
            removed once a new one is complete, so the disk must hold `keep + 1`. The checkpoint
            that was just saved, and files that treeshard did not write, are never removed.
        every: Only steps that are multiples of it are saved.
        background: Whether to write in the background, from a copy of the state in host memory. If
            a write fails, the next `save`, `wait` or `close` raises the error. Otherwise the
            process prints it at exit, and ends with status 1.
        read_only: Whether to read only. Then the directory is not locked, and another run may be
            writing.
        on_divergence: As in `save`.
        timeout: Seconds to wait for other processes. Waits for their reads and writes have no
            limit.
        progress: Whether to show progress bars, as `save` and `restore` do. The bar of a save in
            the background is shown while a call waits for the save.

    Raises:
        CheckpointError: If another run is writing to the directory. The message names the run. If
            the directory cannot be written to, or a process does not see the files that process 0
            creates in it.
        ProcessError: If the processes pass different directories, `keep` or `every`, or if a
            process fails or does not arrive.
        TypeError: If `keep` or `every` is not a whole number.
        ValueError: If `keep` or `every` is not positive.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Examples:
        >>> state = {"w": np.zeros(8), "step": 0}
        >>> with tempfile.TemporaryDirectory() as run, Checkpoints(run, keep=2) as checkpoints:
        ...     for step in range(1, 5):
        ...         saved = checkpoints.save(step, {"w": state["w"] + step, "step": step})
        ...     step, restored = checkpoints.restore_latest(state)
        ...     checkpoints.wait()
        ...     steps = checkpoints.steps()
        >>> steps, step, restored["step"]
        ((3, 4), 4, 4)

    Source:
        Orbax's `CheckpointManager`.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep: SupportsIndex | None = None,
        every: SupportsIndex = 1,
        background: bool = True,
        read_only: bool = False,
        on_divergence: str = "error",
        timeout: float = TIMEOUT,
        progress: bool = False,
    ) -> None:
        arguments = f"Checkpoints: keep={keep}, every={every}"
        try:
            every, keep = operator.index(every), None if keep is None else operator.index(keep)
        except TypeError:
            raise TypeError(f"{arguments}: both must be whole numbers.") from None
        if every < 1 or (keep is not None and keep < 1):
            raise ValueError(f"{arguments}: both must be positive.")
        self._directory = checkpoint_path(directory)
        self._keep, self._every, self._background = keep, every, background
        self._timeout, self._read_only, self._progress = timeout, read_only, progress
        show_progress((), "Checkpoints", show=progress)  # raises without tqdm, before all else
        self._begin = partial(begin, on_divergence=on_divergence, in_background=background)
        self._writing: list[Writing] = []
        self._removing: list[Outcome[None]] = []
        self._preemption: Preemption | None = None
        self._closed, self._process = False, os.getpid()
        self._one_writer = threading.RLock()  # threads save, wait and remove one after another
        self._lock: Lock | None = None
        with ExitStack() as held:
            with breaking_if_left():  # its end raises a Ctrl-C that has waited
                if not read_only:
                    with require_agreement("Checkpoints", timeout=timeout) as facts:
                        facts["the directory"] = str(self._directory)
                        facts["keep"], facts["every"] = str(keep), str(every)
                    self._open(held)
            self._held = held.pop_all()

    def _open(self, held: ExitStack) -> None:
        """Locks the directory, and checks that all processes share it."""
        mark = self._directory / f".{MARK}"
        with ExitStack() as until_seen:
            with all_or_none("Checkpoints", phase="lock", timeout=self._timeout) as marks:
                if jax.process_index() == 0:
                    self._lock = _lock(self._directory, held)
                    until_seen.callback(remove_mark, mark)  # even half of it, on a full disk
                    marks.own = new_mark(mark)
            with all_or_none("Checkpoints", phase="look", timeout=self._timeout):
                if jax.process_index() != 0:
                    check_mark(mark, marks.answer, self._timeout)

    def save(self, step: SupportsIndex, state: PyTree, *, force: bool = False) -> bool:
        """Saves a state if its step is a multiple of `every`.

        An existing checkpoint of this step is replaced once the new one is complete. A killed save
        leaves the old or the new checkpoint. In an object store, an existing step is an error.

        Args:
            step: The step, from 0 on.
            state: Any pytree, as in `treeshard.checkpoint.save`.
            force: Whether to save a step that is not a multiple of `every`, for example before the
                run ends.

        Returns:
            Whether the state is being saved. `False` if the step is skipped.

        Raises:
            CheckpointError: If the name of the step is taken by files that are not a checkpoint of
                treeshard, or in an object store by any file. If this object is closed or read-only.
                If this state or an earlier one cannot be written, for example because the disk is
                full. Existing checkpoints are unchanged.
            ValueError: If the step is negative.
            LeafError, DeletedLeafError, ProcessError: As `treeshard.checkpoint.save`.

        Warns:
            ShardingWarning: If the directory has later steps.

        Examples:
            >>> with tempfile.TemporaryDirectory() as run, Checkpoints(run, every=10) as steps:
            ...     [steps.save(step, {"w": np.ones(8)}) for step in (9, 10)]
            [False, True]
        """
        with self._one_writer:
            number = self._step_to_write("save", step)
            if number % self._every and not force:
                return False
            self.wait()
            path = self._directory / str(number)
            self._begin(
                self._writing, path, state, timeout=self._timeout, run=self._lock, replace=True
            )
            if jax.process_index() == 0:
                self._warn_of_later_steps(number)
            if not self._background:
                self.wait()
        return True

    def _step_to_write(self, call: str, step: SupportsIndex) -> int:
        """The number of a step, for a call of a writer."""
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"{call}(step={number}): the step must not be negative.")
        if self._read_only or self._closed:
            why = "read-only" if self._read_only else "closed"
            raise CheckpointError(f"{self._directory}: this Checkpoints is {why}.")
        return number

    def _warn_of_later_steps(self, step: int) -> None:
        steps: tuple[int, ...] = ()
        with suppress(CheckpointError):  # the save has begun, and process 0 alone looks
            steps = self.steps()
        latest = max(steps, default=step)
        if latest > step:
            warn(
                f"save({step}): {self._directory} has later steps, up to {latest}, which"
                " `restore_latest` restores. To go on from this step, remove them:"
                f" `checkpoints.remove_after({step})`. Or save to another directory."
            )

    @breaking_if_left()
    def remove_after(self, step: SupportsIndex) -> tuple[int, ...]:
        """Removes all later steps, so that a run can go on from an earlier one.

        The call first waits for writes in progress. It returns once the removal would survive a
        power cut. The step itself is kept.

        Args:
            step: The step, from 0 on, and the same on all processes.

        Returns:
            The removed steps, ascending.

        Raises:
            CheckpointError: If this object is closed or read-only. If a step cannot be removed:
                steps after it are removed by then. If an earlier save could not be written.
            ProcessError: If the processes pass different steps, or a process does not arrive.
            ValueError: If the step is negative.

        Examples:
            >>> with tempfile.TemporaryDirectory() as run, Checkpoints(run) as checkpoints:
            ...     for step in (100, 200, 300):
            ...         saved = checkpoints.save(step, {"w": np.full(8, step)})
            ...     state = checkpoints.restore(100)
            ...     removed = checkpoints.remove_after(100)
            ...     steps = checkpoints.steps()
            >>> removed, steps
            ((200, 300), (100,))
        """
        with self._one_writer:
            number = self._step_to_write(REMOVE_AFTER, step)
            self.wait()
            with require_agreement(REMOVE_AFTER, timeout=self._timeout) as facts:
                facts["the directory"], facts["the step"] = str(self._directory), str(number)
            with all_or_none(
                REMOVE_AFTER, phase="remove", timeout=self._timeout, works=True
            ) as removed:
                if jax.process_index() == 0:
                    later = [x for x in self.steps() if x > number]
                    self._remove_durably(reversed(later))
                    removed.own = json.dumps(later).encode()
        return tuple(json.loads(removed.answer))

    def _remove_durably(self, steps: Iterable[int]) -> None:
        """Removes steps in this order; a kill leaves the later ones."""
        try:
            for step in steps:
                self._remove(step)
            if is_local(self._directory):
                flush(self._directory)
        except OSError as error:
            raise CheckpointError(
                f"{REMOVE_AFTER}: steps of {self._directory} cannot be removed: {error}."
            ) from None
        self._wait_for_removals()

    def preempted(self, step: SupportsIndex) -> bool:
        """Returns whether to save this step and stop, after SIGTERM or Ctrl-C.

        Schedulers send SIGTERM some seconds before they kill a process. Call it once in each step,
        on all processes. All processes get `True` at the same step, whichever received the signal.
        JAX's `reached_preemption_sync_point` chooses the step.

        The first call installs signal handlers that only set a flag, and `close` restores the
        previous handlers. Your own handlers are still called. A second Ctrl-C, at least a second
        after the first signal, interrupts as usual.

        Args:
            step: The number of the step that has just run.

        Returns:
            Whether to stop. It stays true at later steps.

        Raises:
            CheckpointError: If this object is closed or read-only. If a single process makes the
                first call outside of the main thread: only that thread can install handlers.
            ProcessError: If there are several processes, and JAX's preemption service is disabled.
            ValueError: If the step is negative.

        Examples:
            >>> with tempfile.TemporaryDirectory() as run, Checkpoints(run, every=8) as checkpoints:
            ...     for step in range(1, 101):
            ...         stop = checkpoints.preempted(step)
            ...         saved = checkpoints.save(step, {"w": np.ones(8)}, force=stop)
            ...         if stop:
            ...             break
            ...         if step == 10:  # as a scheduler does
            ...             signal.raise_signal(signal.SIGTERM)
            ...     checkpoints.wait()
            ...     steps = checkpoints.steps()
            >>> steps
            (8, 11)

        Source:
            `jax.experimental.multihost_utils.reached_preemption_sync_point`.
        """
        number = self._step_to_write("preempted", step)
        if self._preemption is None:
            self._preemption = Preemption(number)
        return self._preemption.is_reached(number)

    @breaking_if_left()
    def restore_latest(
        self, like: PyTree = None, **options: Unpack[RestoreOptions]
    ) -> tuple[int, PyTree] | None:
        """Restores the checkpoint of the latest step, after waiting for writes in progress.

        Initialise a state only if it returns `None`, so that a restart holds the state once:

            plan = ts.plan(eqx.filter_eval_shape(init, key), rules, mesh)
            latest = checkpoints.restore_latest(plan)
            done, state = latest or (0, init_sharded(init, key, rules=rules, mesh=mesh)[0])

        All processes return the same step, or all raise. If another run removes this step during
        the call, a read-only reader restores the next latest step.

        Args:
            like: The tree to restore, as in `treeshard.checkpoint.restore`.
            **options: `rules`, `mesh`, `min_size`, `cast`, `partial`, `timeout` and
                `progress`, as in `treeshard.checkpoint.restore`.

        Returns:
            The step and the state, or `None` if there is no checkpoint yet. A directory that cannot
            be read raises.

        Raises:
            CheckpointError, DamagedError, MismatchError, ProcessError: As `wait` and
                `treeshard.checkpoint.restore`.

        Examples:
            >>> with tempfile.TemporaryDirectory() as run, Checkpoints(run) as checkpoints:
            ...     before = checkpoints.restore_latest()
            ...     saved = checkpoints.save(7, {"w": np.ones(8)})
            ...     step, state = checkpoints.restore_latest()
            >>> before, step, state["w"].shape
            (None, 7, (8,))
        """
        self.wait()
        step = self._agreed_latest()
        while step is not None:
            state, error = self._read_by_all(step, like, options)
            if error is None:
                return step, state
            # Its writer may have replaced it by a later one.
            later = self._agreed_latest() if self._read_only else step
            if later is None or (later == step and not isinstance(error, RemovedError)):
                raise error
            step = later
        return None

    def _read_by_all(
        self, step: int, like: PyTree, options: RestoreOptions
    ) -> tuple[PyTree, TreeShardError | None]:
        """The state of a step, or an error on every process if one cannot read the checkpoint.

        If one process returned its state, the others would wait for it. An error that another step
        would not change is raised.
        """
        state: PyTree = None
        error: TreeShardError | None = None
        with all_or_none(
            LATEST, _unread, phase="read", timeout=self._timeout, works=True
        ) as outcomes:
            try:
                state = self.restore(step, like, **options)
            except (CheckpointError, ProcessError) as raised:
                error = raised
                outcomes.own = f"{type(raised).__name__}: {raised}".encode()
        if not outcomes.answer:
            return state, None
        kinds, facts = json.loads(outcomes.answer)
        failures = f"{LATEST}: {listed('Several processes failed:', facts)}"
        if RemovedError.__name__ in kinds:
            return None, RemovedError(failures)
        error = error or ProcessError(failures)
        # A `ProcessError` alone is about the call, and not about the checkpoint.
        if kinds == [ProcessError.__name__]:
            raise error
        return None, error

    def _agreed_latest(self) -> int | None:
        """The latest step as process 0 sees it: others may see changes to the directory later."""
        with all_or_none(LATEST, timeout=self._timeout) as of_first:
            if jax.process_index() == 0:
                of_first.own = json.dumps(self.latest).encode()
        return json.loads(of_first.answer)

    def restore(
        self, step: SupportsIndex, like: PyTree = None, **options: Unpack[RestoreOptions]
    ) -> PyTree:
        """Restores the checkpoint of a step, after waiting for writes in progress.

        Args:
            step: The step, one of `steps()`.
            like: The tree to restore, as in `treeshard.checkpoint.restore`.
            **options: `rules`, `mesh`, `min_size`, `cast`, `partial`, `timeout` and
                `progress`, as in `treeshard.checkpoint.restore`.

        Returns:
            The state.

        Raises:
            CheckpointError, RemovedError, DamagedError, MismatchError, ProcessError: As `wait` and
                `treeshard.checkpoint.restore`.

        Examples:
            >>> with tempfile.TemporaryDirectory() as run, Checkpoints(run) as checkpoints:
            ...     saved = checkpoints.save(7, {"w": np.ones(8)})
            ...     state = checkpoints.restore(7)
            >>> state["w"].shape
            (8,)
        """
        self.wait()
        path = self._directory / str(operator.index(step))
        by_default: RestoreOptions = {"timeout": self._timeout, "progress": self._progress}
        return restore(path, like, **{**by_default, **options})

    def steps(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints, ascending.

        Raises:
            CheckpointError: If the directory, or a checkpoint in it, cannot be read.
        """
        return steps_in(self._directory)

    @property
    def latest(self) -> int | None:
        """The latest step with a complete checkpoint, or `None` if there is no such step.

        A step that lacks files, for example while `rsync` copies it, does not count. A
        `ShardingWarning` names it.
        """
        while True:
            with suppress(RemovedError):  # look again: the directory has changed
                return _latest_with_all_files(self._directory)

    def wait(self) -> None:
        """Waits until the writes in progress are complete.

        Raises:
            CheckpointError: If a state could not be written. It is raised once. Also if this
                process was forked from a process that is saving.
        """
        if not self._writing:
            return
        if self._process != os.getpid():  # a fork has no threads that could end
            raise CheckpointError(
                f"{self._directory}: process {self._process} is saving step"
                f" {self._writing[0].path.name}, and this one, {os.getpid()}, was forked from it."
                f" Only process {self._process} can wait for the save."
            )
        with self._one_writer:
            for writing in [*self._writing]:
                try:
                    writing.wait(progress=self._progress)
                finally:
                    if writing not in untold:  # a Ctrl-C has not ended the wait
                        self._writing.remove(writing)
                if self._keep is not None and jax.process_index() == 0:
                    self._remove_all_but(self._keep, int(writing.path.name))

    def close(self) -> None:
        """Waits as `wait` does, and then releases the directory for other writers.

        In a fork of the process that opened the directory, it has no effect.

        Raises:
            CheckpointError: As `wait`.
        """
        self._closed = True
        if self._process != os.getpid():  # the locks and the save belong to the other process
            return
        with ExitStack() as ending:  # whatever is raised, even by a Ctrl-C
            ending.callback(self._held.close)
            if self._preemption is not None:
                ending.callback(self._preemption.release)
            ending.callback(self._wait_for_removals)
            with self._one_writer:  # another thread may be about to begin a save
                self.wait()

    def _wait_for_removals(self) -> None:
        for removal in self._removing:
            removal.wait()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoints: {self._directory}, {counted(len(self.steps()), 'step')}>"

    def _remove_all_but(self, keep: int, saved: int) -> None:
        self._removing = [removal for removal in self._removing if not removal.done]
        try:
            steps = self.steps()
        except CheckpointError as error:  # the save is complete, and process 0 alone looks
            warn(f"Steps older than the latest {keep} cannot be removed: {error}")
            return
        for step in {*steps[:-keep]} - {saved}:
            try:
                self._remove(step)
            except OSError as error:
                warn(f"{self._directory}: step {step} cannot be removed: {error}.")

    def _remove(self, step: int) -> None:
        """Hides a step at once, and removes its files in a thread."""
        with defer_interrupts():  # a hidden step must get its thread
            start_thread(self._removing, _remove_files, mark_removed(self._directory / str(step)))


def _lock(directory: epath.Path, held: ExitStack) -> Lock | None:
    """Locks the directory, and removes what killed runs left."""
    make_directory(directory)
    lock = None
    if is_local(directory):
        lock = Lock(lock_in(directory), str(directory), held)
    # Without locks, an unfinished checkpoint may still be being written. Object stores never have
    # locks, and unfinished checkpoints are removed there all the same. The warning says so.
    if lock is None or lock.is_held:
        warn_of_removed("Checkpoints", directory, sweep_run(directory))
    return lock


def _latest_with_all_files(directory: epath.Path) -> int | None:
    """The latest step that has all its files, or `None`.

    A program that copies checkpoints, such as `rsync`, creates the directory of a step first, and
    its files later. A warning names a step that lacks files.
    """
    for step in reversed(steps_in(directory)):
        path = directory / str(step)
        with reading(path, listed=True) as check:
            lacking = _lacking_files(path)
            if not lacking:
                return step
            check()
        warn(
            f"{path} lacks {counted(len(lacking), 'file')} or part of them, such as {lacking[0]}:"
            " it is being copied, or damaged. It does not count as the latest step."
        )
    return None


def _unread(errors: list[bytes]) -> bytes:
    """The types of the errors of processes that cannot read a step, and who raised which."""
    failures = {i: error.decode() for i, error in enumerate(errors) if error}
    if not failures:
        return b""
    kinds = sorted({text.partition(":")[0] for text in failures.values()})
    return json.dumps([kinds, name_failures(failures)]).encode()


def _lacking_files(path: epath.Path) -> list[str]:
    """The files of a step that are missing or have another size.

    Programs copy directories in the order of names. So a step that is being copied gets its table
    before its arrays, and the seal, which is the last file of the arrays, at the end.
    """
    if not is_local(path):
        return []
    if not seal(path):
        return [f"{ARRAYS}/{SEAL}"]
    with suppress(CheckpointError):  # whoever reads the step gets the error
        return lacking_files(path, table_at(path).files)
    return []


def _remove_files(old: epath.Path) -> None:
    try:
        if os.path.islink(old):
            old.unlink()  # what it refers to stays
        else:
            old.rmtree()
    except OSError as error:
        warn(f"{old} cannot be removed: {error}.")

"""The checkpoints of one run: a directory with one for each of some steps."""

import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, SupportsIndex, Unpack

import jax
from etils import epath

from treeshard._checkpoint_paths import (
    PathLike,
    checkpoint_path,
    is_local,
    lock_in,
    lock_of,
    set_aside,
    steps_in,
    sweep,
    written_by,
)
from treeshard._directory_lock import Lock, locked
from treeshard._errors import CheckpointError, warn
from treeshard._orbax import Writing
from treeshard._processes import TIMEOUT, exchange, together
from treeshard._restoring import RestoreOptions, restore
from treeshard._saving import begin


class Checkpoints:
    """The checkpoints of a training run, in one directory, by step.

    They are written in the background: `save` returns once the state may change or be donated.
    Until `close` no other run can write to the directory, and what killed runs left unfinished
    there is removed. Object stores have no such lock, and nothing is removed there.

    Use it in a `with` statement, on every process alike.

    Args:
        directory: Where they are; it is made if need be. All processes share it.
        keep: How many are kept, the latest; all of them if `None`. An older one is removed after
            a newer one is whole.
        every: Steps that are no multiple of it are not saved.
        background: Whether to write in the background. What goes wrong there is raised by the
            next `save`, `wait` or `close`.
        read_only: Whether nothing will be saved: then nothing is locked, and another run may be
            writing.
        fingerprints: As in `save`.
        compress: As in `save`.
        ocdbt: As in `save`.
        timeout: Seconds that other processes are waited for; not while they read or write.

    Raises:
        CheckpointError: If another run writes to the directory: it says which. If it cannot be
            written to.
        ProcessError: If other processes failed, or did not come.
        ValueError: If `keep` or `every` is not positive.

    Examples:
        >>> state = {"w": np.zeros(8), "step": 0}
        >>> with tempfile.TemporaryDirectory() as there, Checkpoints(there, keep=2) as checkpoints:
        ...     for step in range(1, 5):
        ...         saved = checkpoints.save(step, {"w": state["w"] + step, "step": step})
        ...     step, restored = checkpoints.restore_latest(state)
        ...     checkpoints.wait()
        ...     steps = checkpoints.steps()
        >>> steps, step, restored["step"]
        ((3, 4), 4, 4)
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep: int | None = None,
        every: int = 1,
        background: bool = True,
        read_only: bool = False,
        fingerprints: bool = True,
        compress: bool = False,
        ocdbt: bool = True,
        timeout: float = TIMEOUT,
    ) -> None:
        if every < 1 or (keep is not None and keep < 1):
            raise ValueError(f"Checkpoints: keep={keep}, every={every}: both are to be positive.")
        self._directory = checkpoint_path(directory)
        self._keep, self._every, self._background = keep, every, background
        self._timeout, self._read_only = timeout, read_only
        self._options = {"fingerprints": fingerprints, "compress": compress, "ocdbt": ocdbt}
        self._writing: Writing | None = None
        self._removing = ThreadPoolExecutor(1, "treeshard-remove")
        self._held = ExitStack()
        self._closed = False
        if not read_only:
            with self._unless_it_fails(), together("Checkpoints", timeout=timeout):
                if jax.process_index() == 0:
                    self._open()

    def save(self, step: SupportsIndex, state: Any) -> bool:
        """Saves a state, if its step is one to save.

        Args:
            step: The step, not negative and not saved yet.
            state: Any pytree, as in `treeshard.checkpoint.save`.

        Returns:
            Whether it is saved, or being saved.

        Raises:
            CheckpointError: If the step is there already; if this object is closed or read-only;
                if the state cannot be written, or an earlier one could not be. What was there
                before is as it was.
            ValueError: If the step is negative.
            LeafError, DeletedLeafError, ProcessError: As `treeshard.checkpoint.save`.
        """
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"save(step={number}): steps are not negative.")
        if self._read_only or self._closed:
            why = "read-only" if self._read_only else "closed"
            raise CheckpointError(f"{self._directory}: the Checkpoints are {why}.")
        if number % self._every:
            return False
        self.wait()
        path = self._directory / str(number)
        self._writing = begin(path, state, timeout=self._timeout, **self._options)
        if not self._background:
            self.wait()
        return True

    def restore_latest(
        self, like: Any = None, **options: Unpack[RestoreOptions]
    ) -> tuple[int, Any] | None:
        """Reads the checkpoint of the latest step, once what is being written is whole.

        Args:
            like: What comes back, as in `treeshard.checkpoint.restore`.
            **options: `rules`, `mesh`, `min_size`, `cast`, `partial`, `verify` and `timeout`, as in
                `treeshard.checkpoint.restore`.

        Returns:
            The step and the state; or `None` if there is no checkpoint yet.

        Raises:
            CheckpointError, DamagedError, MismatchError, ProcessError: As `wait` and
                `treeshard.checkpoint.restore`.
        """
        self.wait()
        mine = str(-1 if self.latest is None else self.latest).encode()
        said = exchange("restore_latest", mine, timeout=self._timeout)
        step = int(said[0])  # others may see a shared directory later
        return None if step < 0 else (step, self.restore(step, like, **options))

    def restore(
        self, step: SupportsIndex, like: Any = None, **options: Unpack[RestoreOptions]
    ) -> Any:
        """Reads the checkpoint of a step, once what is being written is whole.

        Args:
            step: The step.
            like: What comes back, as in `treeshard.checkpoint.restore`.
            **options: `rules`, `mesh`, `min_size`, `cast`, `partial`, `verify` and `timeout`, as in
                `treeshard.checkpoint.restore`.

        Returns:
            The state.

        Raises:
            CheckpointError, DamagedError, MismatchError, ProcessError: As `wait` and
                `treeshard.checkpoint.restore`.
        """
        self.wait()
        path = self._directory / str(operator.index(step))
        return restore(path, like, **{"timeout": self._timeout, **options})

    def steps(self) -> tuple[int, ...]:
        """The steps that there are whole checkpoints of, ascending."""
        return steps_in(self._directory)

    @property
    def latest(self) -> int | None:
        """The latest step that there is a whole checkpoint of; `None` without any."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Returns once what is being written is whole.

        Raises:
            CheckpointError: If it could not be written. It is raised once.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()
            if self._keep is not None and jax.process_index() == 0:
                self._remove_all_but(self._keep)

    def close(self) -> None:
        """Waits as `wait` does, and lets others write to the directory."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._removing.shutdown()
            self._held.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoints: {self._directory}, {len(self.steps())} steps>"

    # ------------------------------------------------------------------ inside

    def _open(self) -> None:
        """Keeps other writers away, and removes what killed ones left unfinished."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be made: {error.strerror}.") from None
        if not is_local(self._directory):
            return
        self._held.callback(Lock(lock_in(self._directory), str(self._directory)).release)
        for left in self._directory.iterdir():
            if (path := written_by(left)) is not None:
                with suppress(CheckpointError), locked(lock_of(path), str(path)):
                    sweep(path)  # nobody is writing it

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._held.close()
            raise

    def _remove_all_but(self, keep: int) -> None:
        for step in self.steps()[:-keep]:
            try:
                self._removing.submit(_remove, set_aside(self._directory / str(step)))
            except OSError as error:
                warn(f"{self._directory}: step {step} cannot be removed: {error}.")


def _remove(old: epath.Path) -> None:
    try:
        old.rmtree()
    except OSError as error:
        warn(f"{old} cannot be removed: {error}.")

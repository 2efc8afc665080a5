"""The barriers at which processes wait for each other while a checkpoint is written."""

import jax

from treeshard._errors import CheckpointError, listed
from treeshard._processes import AS_LONG_AS_IT_TAKES, exchange


class Meetings:
    """The barriers of one save: its directory exists, its arrays are written, it is committed.

    Each process reaches all of them in turn. A process that fails brings its error to the next
    barrier, and there all processes raise.

    Args:
        path: The checkpoint.
        timeout: Seconds to wait for other processes at the first barrier.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        later = AS_LONG_AS_IT_TAKES
        self._left = [("begin", timeout), ("written", later), ("committed", later)]

    def meet(self, error: BaseException | None = None) -> None:
        """Waits at the next barrier; does nothing if one has failed already.

        Raises:
            CheckpointError: If this or another process has failed: it lists the errors by process.
            ProcessError: If a process does not arrive.
        """
        if not self._left:
            return
        stage, timeout = self._left.pop(0)
        met = b"" if error is None else f"{type(error).__name__}: {error}".encode()
        try:
            said = exchange(f"save {self._path}: {stage}", met, timeout=timeout)
        except BaseException:
            self._left.clear()
            raise
        if any(said):
            self._left.clear()
            if error is None or isinstance(error, Exception):  # and not Ctrl-C
                raise CheckpointError(self._message(said)) from error

    def _message(self, said: list[bytes]) -> str:
        texts = {i: met.decode() for i, met in enumerate(said) if met}
        if jax.process_count() > 1:
            texts = {i: f"process {i} raised {text}" for i, text in texts.items()}
        why = listed("Several processes failed:", list(texts.values()))
        return f"{self._path} was not saved; what existed before is unchanged. {why}"

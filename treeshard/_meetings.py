"""Where the processes wait for each other while a checkpoint is written."""

import jax

from treeshard._errors import CheckpointError, listed
from treeshard._processes import AS_LONG_AS_IT_TAKES, exchange


class Meetings:
    """The meetings of all processes for one checkpoint: its directory is there, its arrays are
    written, it has its name.

    Each process comes to all of them in turn. One that fails comes to the next with what it met,
    and there all raise.

    Args:
        path: The checkpoint.
        timeout: Seconds in which all come to the first.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        later = AS_LONG_AS_IT_TAKES
        self._left = [("begin", timeout), ("written", later), ("committed", later)]

    def meet(self, error: BaseException | None = None) -> None:
        """Comes to the next meeting; does nothing if one has failed already.

        Raises:
            CheckpointError: If this or another process has failed: it says who met what.
            ProcessError: If a process did not come.
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
            texts = {i: f"process {i} met {text}" for i, text in texts.items()}
        why = listed("Several processes failed:", list(texts.values()))
        return f"{self._path} was not saved, and what was there before is as it was. {why}"

"""Runs a function in a process of its own.

XLA ends its whole process where one of its own checks fails, and does not give the memory of a
large compile back to the system. The process is a new interpreter: `multiprocessing` would run the
user's script a second time to find its functions, or fork a process in which JAX has threads.
cloudpickle copies functions of scripts and of notebooks by value, and what modules define by name.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import jax

from treeshard.errors import TreeShardError

_ENDED = (
    "its process ended, as where the compiler fails a check of its own or the host has no memory"
    " left"
)
_CODE = "from treeshard.programs._child import main; main()"


def in_child(work: Callable[[], Any], seconds: float) -> Any:
    """What the function returns, or a text that says why it failed. Raises `TimeoutError` after
    `seconds`."""
    if seconds <= 0:
        raise TimeoutError
    try:
        copied = cloudpickle.dumps(work)
    except Exception as error:  # whatever the objects that it refers to raise
        raise TreeShardError(
            f"suggest: the function cannot be copied to the process that compiles: {error}. Make"
            " what it refers to inside of it, or in a module that it imports."
        ) from error
    with TemporaryDirectory() as folder:
        given, made = Path(folder, "given"), Path(folder, "made")
        given.write_bytes(pickle.dumps((copied, jax.config.values)))
        # `-P`: what lies in the current folder hides no module that this process sees.
        _run([sys.executable, "-P", "-c", _CODE, given, made], seconds)
        if not made.exists():
            return _ENDED
        result, warned = pickle.loads(made.read_bytes())
    for message, category, file, line in warned:
        warnings.warn_explicit(message, category, file, line)
    return result


def _run(command: list[Any], seconds: float) -> None:
    """Runs a command until it ends, or until this function raises."""
    environment = {
        **os.environ,
        # The modules that the function names are found as they are here.
        "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
        # A GPU that is attached is shared with this process.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    # Ctrl-C in a terminal reaches all processes of a session; this process ends the other one.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        # With what it started, as the assembler of a GPU's compiler.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def main() -> None:
    """What the other process does. Writes what the function returned, or why it failed, and for
    each warning its message, category, file and line."""
    given, made = Path(sys.argv[1]), Path(sys.argv[2])
    threading.Thread(target=_end_with_the_parent, args=[given.parent], daemon=True).start()
    copied, settings = pickle.loads(given.read_bytes())
    # A new interpreter has JAX's settings from the environment, not what `jax.config` was set to.
    here = jax.config.values
    for name, value in settings.items():
        if here[name] != value:
            jax.config.update(name, value)
    with warnings.catch_warnings(record=True) as warned:
        try:
            result = pickle.loads(copied)()
        except Exception as error:  # of the user's function, or of the compiler
            result = (str(error).strip() or type(error).__name__).splitlines()[0]
    places = [(one.message, one.category, one.filename, one.lineno) for one in warned]
    written = made.with_suffix(".part")
    written.write_bytes(cloudpickle.dumps((result, places)))
    written.rename(made)


def _end_with_the_parent(folder: Path) -> None:
    """Nothing is ever written to the input; it closes when the parent is no more."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)

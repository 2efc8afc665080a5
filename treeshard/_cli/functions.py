"""Functions that the command line gets as `MODULE:FUNCTION`."""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from treeshard.errors import FormatError, TreeShardError, did_you_mean


def load_function(text: str) -> Callable[..., Any]:
    """Imports `package.module:function`, also from the current directory."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", text)
    if match is None:
        file = re.fullmatch(r"(.*)\.py:(\w+)", text)
        hint = f" Write {file[1].strip('./').replace('/', '.')}:{file[2]}." if file else ""
        raise FormatError(
            f"{text!r} is not MODULE:FUNCTION, as in `train:make_step` for the function `make_step`"
            f" in train.py.{hint}"
        )
    module_name, name = match.groups()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(f"{text}: importing {module_name}", error) from error
        raise FormatError(
            f"{text}: there is no module {error.name!r} in {os.getcwd()}, nor is one installed."
            " Run the command in the directory that has it."
        ) from error
    except Exception as error:
        raise _failed(f"{text}: importing {module_name}", error) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [x for x, member in vars(module).items() if callable(member) and x[0] != "_"]
        what = "has no function" if function is None else "has something that is not a function as"
        hint = did_you_mean(name, names) or f" It has {', '.join(names[:10]) or 'none'}."
        raise FormatError(f"{text}: {module_name} {what} {name!r}.{hint}")
    return function


def call_function(text: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that `load_function` returned; what it raises becomes a `FormatError`."""
    try:
        return function(*arguments)
    except TreeShardError:
        raise
    except Exception as error:
        raise _failed(text, error) from error


def _failed(what: str, error: Exception) -> FormatError:
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line of the user's code.
    own = [x for x in frames if not re.search(r"site-packages|/treeshard/|^<", x.filename)]
    frame = (own or frames)[-1]
    raised = f"{type(error).__name__}: {error}"
    return FormatError(f"{what} failed at {frame.filename}:{frame.lineno}: {raised}")

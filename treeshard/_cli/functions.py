"""Functions that the command line gets as `MODULE:FUNCTION`.

What such a function raises is a mistake in the user's code, so it is told in one line with the
place in that code, and not by a traceback through treeshard and JAX.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from treeshard.errors import FormatError, TreeShardError, did_you_mean

_FORM = (
    "{text!r} is not MODULE:FUNCTION, as in `train:make_step` for the function `make_step` in"
    " train.py.{hint}"
)
_NO_MODULE = (
    "{text}: there is no module {name!r} in {directory}, nor is one installed. Run the command in"
    " the directory that has it."
)


def load_function(text: str) -> Callable[..., Any]:
    """Imports `package.module:function`, also from the current directory."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", text)
    if match is None:
        raise FormatError(_FORM.format(text=text, hint=_hint_for_file(text)))
    module_name, name = match.groups()
    module = _import(text, module_name)
    function = getattr(module, name, None)
    if callable(function):
        return function
    names = [x for x, member in vars(module).items() if callable(member) and x[0] != "_"]
    what = "has no function" if function is None else "has something that is not a function as"
    hint = did_you_mean(name, names) or f" It has {', '.join(names[:10]) or 'none'}."
    raise FormatError(f"{text}: {module_name} {what} {name!r}.{hint}")


def _hint_for_file(text: str) -> str:
    """What to write for `./train.py:make_step`."""
    file = re.fullmatch(r"(.*)\.py:(\w+)", text)
    if file is None:
        return ""
    return f" Write {file[1].strip('./').replace('/', '.')}:{file[2]}."


def _import(text: str, name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:  # a script's directory is, and not the current one
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module may raise anything
        # The module itself or a package that it is in, and not one that it imports.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            message = _NO_MODULE.format(text=text, name=error.name, directory=directory)
            raise FormatError(message) from error
        raise _failed(f"{text}: importing {name}", error) from error


def wrong_result(text: str, result: Any, expected: str) -> FormatError:
    """The error of a function that returned something else than it should."""
    shown = type(result).__name__
    if isinstance(result, tuple):
        shown = f"a tuple of {', '.join(type(x).__name__ for x in result) or 'nothing'}"
    return FormatError(f"{text} returned {shown}. {expected}")


def call_function(text: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that `load_function` returned; what it raises becomes a `FormatError`."""
    try:
        return function(*arguments)
    except TreeShardError:
        raise
    except Exception as error:  # so may the user's function
        raise _failed(text, error) from error


def _failed(what: str, error: Exception) -> FormatError:
    frames = traceback.extract_tb(error.__traceback__)
    # Names in angle brackets, such as `<frozen importlib._bootstrap>`, are not files.
    users = [x for x in frames if not re.search(r"site-packages|/treeshard/|^<", x.filename)]
    innermost = (users or frames)[-1]
    raised = f"{type(error).__name__}: {error}"
    return FormatError(f"{what} failed at {innermost.filename}:{innermost.lineno}: {raised}")

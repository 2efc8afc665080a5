"""Takes the frames of treeshard and JAX out of the tracebacks of errors that callers make.

JAX's own setting shows them: `JAX_TRACEBACK_FILTERING=off` in the environment, or
`jax.config.update("jax_traceback_filtering", "off")`.
"""

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from types import FunctionType, TracebackType
from typing import Any

import jax

from treeshard.errors import HIDDEN, ShardingWarning, TreeShardError


def open_to_callers(package: dict[str, Any]) -> None:
    """Makes `dir` of a package show its `__all__`, whose functions then hide their frames."""
    package["__dir__"] = lambda: package["__all__"]
    hide_frames(package, package["__all__"])


def hide_frames(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Replaces functions in a namespace, and the methods of classes, by those of `at_boundary`."""
    for name in names:
        thing = namespace[name]
        if isinstance(thing, FunctionType):
            namespace[name] = at_boundary(thing)
            setattr(sys.modules[thing.__module__], name, namespace[name])  # as pickle finds it
        elif isinstance(thing, type) and not issubclass(thing, BaseException):
            for method, fn in list(vars(thing).items()):
                if isinstance(fn, staticmethod):
                    setattr(thing, method, staticmethod(at_boundary(fn.__func__)))
                elif isinstance(fn, FunctionType) and (method[0] != "_" or method in _CALLS):
                    setattr(thing, method, at_boundary(fn))


_CALLS = ("__call__", "__init__")


def at_boundary(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose errors have tracebacks without frames of treeshard; one for each `fn`."""
    if fn in _boundaries:
        return _boundaries[fn]

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except (TreeShardError, ShardingWarning) as error:
            mode = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
            if mode != "off":
                _filter(error)
            raise

    _boundaries[fn] = _boundaries[call] = call
    return call


_boundaries: dict[Callable[..., Any], Callable[..., Any]] = {}


def _filter(error: BaseException | None) -> None:
    while error is not None:
        frames: list[TracebackType] = []
        next_frame = error.__traceback__
        while next_frame is not None:
            frames.append(next_frame)
            next_frame = next_frame.tb_next
        kept = None
        for each in reversed(frames):
            if not each.tb_frame.f_code.co_filename.startswith(HIDDEN):
                kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
        error.__traceback__ = kept
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)

"""Checks the annotations of treeshard's functions as they are called, with beartype.

`checking("treeshard")` puts `@checked` on each function of a package as it is imported, those
inside functions too. The checks take a frame of a call stack each, in the name and the file of the
function that they check: whoever hides treeshard's frames hides them.
"""

import ast
import dataclasses
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, Self, get_type_hints

from beartype import beartype

DECORATOR = "__checked__"  # what `checked` is called in the modules of the package
_off = False


@contextmanager
def off() -> Iterator[None]:
    """Checks nothing."""
    global _off
    _off = True
    try:
        yield
    finally:
        _off = False


def checked(target: Any) -> Any:
    """A function with its checks, but for what a background thread defines; a dataclass with those
    of its `__init__`.

    While beartype reads a function it records warnings. Python has one such record for all threads,
    so the warnings that a test waits for would be lost in the meantime.
    """
    if threading.current_thread() is not threading.main_thread():
        return target
    if not isinstance(target, type):
        return _checked(target)
    if dataclasses.is_dataclass(target) and "__init__" in vars(target):
        target.__init__ = _checked(target.__init__)
    return target


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    resolved = FunctionType(
        function.__code__,
        function.__globals__,
        argdefs=function.__defaults__,
        closure=function.__closure__,
    )
    resolved.__kwdefaults__ = function.__kwdefaults__
    resolved.__annotations__ = _hints(function)
    resolved.__module__, resolved.__qualname__ = function.__module__, function.__qualname__
    check = beartype(resolved)
    if check is resolved:  # nothing to check
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _off else check)(*args, **kwargs)

    for wrapper in (check, call):
        wrapper.__code__ = _as_of(function.__code__, wrapper.__code__)
    return call


def _hints(function: Any) -> dict[str, Any]:
    """The annotations of a function, but for those with names that only type checkers import, and
    `Self`, which beartype knows in a class that it decorates alone."""
    hints: dict[str, Any] = {}
    for name, hint in function.__annotations__.items():
        with suppress(NameError):
            if hint is not Self:
                hints[name] = _resolved(hint, function.__globals__)
    return hints


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """A type with the types that it names; `A | list["A"]` becomes `A | list[A | list[Any]]`.

    beartype 0.23 does not end when it reads a type that names itself.
    """
    one = SimpleNamespace(__annotations__={"_": hint})
    hint = get_type_hints(one, names, include_extras=True)["_"]
    left = re.findall(r"ForwardRef\('(\w+)'", repr(hint))
    if not left:
        return hint
    one = SimpleNamespace(__annotations__={"_": hint})
    return get_type_hints(one, names, dict.fromkeys(left, Any), include_extras=True)["_"]


def _as_of(code: CodeType, wrapper: CodeType) -> CodeType:
    """The code of a wrapper, in the name and the file of what it wraps."""
    return wrapper.replace(
        co_filename=code.co_filename, co_name=code.co_name, co_qualname=code.co_qualname
    )


class _Loader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                at = len(node.decorator_list)  # innermost: others may hide the annotations
            elif isinstance(node, ast.ClassDef):
                at = 0  # outermost: a dataclass is one once `@dataclass` has made it
            else:
                continue
            decorator = ast.Name(DECORATOR, ast.Load())
            node.decorator_list.insert(at, ast.copy_location(decorator, node))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def path_stats(self, path: Any) -> Any:
        raise OSError("no bytecode is kept: it would have the checks wherever the package is used")

    def exec_module(self, module: Any) -> None:
        vars(module)[DECORATOR] = checked
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


@contextmanager
def checking(package: str) -> Iterator[None]:
    """Modules of a package that are imported inside check the annotations of their functions."""
    finder = _Finder(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)

"""Shards PyTrees across devices: rules, plans, placement, checks and checkpoints.

`__init__.pyi` is the table of names, for type checkers and for `dir` alike. A name loads its module
when it is first used, and Equinox and Chex are loaded only by what needs them.
"""

from typing import Any as _Any

import lazy_loader as _lazy_loader

# JAX forgets all traces when a context is made, so they are made now.
from treeshard._core import contexts as _contexts  # noqa: F401  (loading it makes them)

__version__ = "0.5.0"

_load, _, _NAMES = _lazy_loader.attach_stub(__name__, __file__)
# Whose names work here too, without being listed: people look for those of the libraries that
# treeshard grew from at the top.
_SEARCHED = ("errors", "compat", "communication", "testing", "training", "manual")


def __getattr__(name: str) -> _Any:
    if name in _NAMES:
        return _load(name)
    hint = ""
    if not name.startswith("_"):  # Python and notebooks ask for many names with underscores
        # No other module has their names, so that `except treeshard.SpecError` loads none.
        if name in (errors := _load("errors")).__all__:
            return getattr(errors, name)
        submodules = [_load(submodule) for submodule in _SEARCHED]
        homes = [module for module in submodules if name in module.__all__]
        # Two submodules may share one object; two objects of one name are not chosen between.
        if len({id(getattr(module, name)) for module in homes}) == 1:
            return getattr(homes[0], name)
        hint = _hint(name, submodules, homes)
    raise AttributeError(f"module 'treeshard' has no attribute {name!r}.{hint}")


def _hint(name: str, submodules: list[_Any], homes: list[_Any]) -> str:
    from treeshard.errors import did_you_mean

    if homes:
        names = " and ".join(repr(f"{module.__name__}.{name}") for module in homes)
        return f" There are {names}."
    return did_you_mean(name, [*_NAMES, *(x for module in submodules for x in module.__all__)])


def __dir__() -> list[str]:
    return sorted([*_NAMES, "__version__"])

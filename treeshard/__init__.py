"""Decides, applies and checks how a PyTree is split over devices.

`__init__.pyi` is the table of names, for type checkers and for `dir` alike. A name loads its module
when it is first used: JAX is imported then at the latest, and Equinox and Chex only by what needs
them.
"""

from typing import Any as _Any

import lazy_loader as _lazy_loader

__version__ = "0.4.0"

_load, _, _NAMES = _lazy_loader.attach_stub(__name__, __file__)
# Whose names work here too, without being listed: people look for those of the libraries that
# treeshard grew from at the top.
_SEARCHED = ("errors", "compat", "communication", "testing", "training", "manual")


def __getattr__(name: str) -> _Any:
    if name in _NAMES:
        return _load(name)
    near = ""
    if not name.startswith("_"):  # Python and notebooks ask for many names with underscores
        from treeshard.errors import did_you_mean

        known = [*_NAMES]
        for submodule in map(_load, _SEARCHED):
            if name in submodule.__all__:
                return getattr(submodule, name)
            known += submodule.__all__
        near = did_you_mean(name, known)
    raise AttributeError(f"module 'treeshard' has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    return sorted([*_NAMES, "__version__"])

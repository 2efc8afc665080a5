"""The public surface: every public name once, at its home."""

from types import ModuleType
from typing import Any

import treeshard as ts

# Where a name is documented if several modules have it: the first that does.
SUBMODULES = {
    "treeshard.testing": ts.testing,
    "treeshard.communication": ts.communication,
    "treeshard.programs": ts.programs,
    "treeshard.training": ts.training,
    "treeshard.manual": ts.manual,
    "treeshard.checkpoint": ts.checkpoint,
    "treeshard.interchange": ts.interchange,
    "treeshard.compat": ts.compat,
    "treeshard.errors": ts.errors,
}
MODULES = {**SUBMODULES, "treeshard": ts}


def public_names(module: ModuleType) -> list[str]:
    """The names that a module offers, without its submodules."""
    if module is not ts:
        return list(module.__all__)
    others = {"__version__", *(name.removeprefix("treeshard.") for name in SUBMODULES)}
    return [name for name in dir(ts) if name not in others]


def surface() -> dict[str, Any]:
    """Qualified name -> object, for everything that is public."""
    homes: dict[tuple[str, int], str] = {}  # by name and identity: two modules may share a name
    for where, module in MODULES.items():
        for name in public_names(module):
            homes.setdefault((name, id(getattr(module, name))), where)
    return {f"{where}.{name}": getattr(MODULES[where], name) for (name, _), where in homes.items()}

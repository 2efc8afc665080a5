"""The public surface, read off the sources."""

import ast
import inspect
from types import ModuleType
from typing import Any

import treeshard as ts

MODULES = {
    "treeshard": ts,
    "treeshard.checkpoint": ts.checkpoint,
    "treeshard.communication": ts.communication,
    "treeshard.compat": ts.compat,
    "treeshard.interchange": ts.interchange,
    "treeshard.testing": ts.testing,
    "treeshard.training": ts.training,
    "treeshard.manual": ts.manual,
}


def public_names(module: ModuleType) -> list[str]:
    """What a module defines without an underscore, or imports as itself (`x as x`)."""
    names: list[str] = []
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node in tree.body:
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.name == alias.asname]
    return [name for name in names if not name.startswith("_")]


def surface() -> dict[str, Any]:
    """Qualified name -> object, for everything that is public."""
    return {
        f"{where}.{name}": getattr(module, name)
        for where, module in MODULES.items()
        for name in public_names(module)
    }

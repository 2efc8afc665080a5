"""The architecture: which package may import which, read from the source."""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import pytest
from files import ROOT, SOURCES, parsed

from tools import draw_architecture

# A module imports from its own package and from the rows above it. Packages in one row do not
# know each other.
CORE = (
    ("errors",),
    ("_core",),
    ("_planning",),
    ("_placement", "manual", "_inspection"),
    ("training", "_disk"),
    ("checkpoint", "interchange"),
    ("compat",),
)
REPORTS = (("_trace",), ("communication",), ("programs",), ("testing",))
ROWS = (*CORE, *REPORTS, ("_cli",), ("__main__", "__init__"))
# `import treeshard` loads nothing heavier than these; all else waits for a function that needs it,
# or for the first use of the package that owns it.
AT_THE_TOP = {"jax", "numpy"}
OWNERS: Mapping[str, str] = {
    "chex": "testing",
    "equinox": "training",
    "etils": "checkpoint",
    "jax._src": "_core.jax_private",
    "lazy_loader": "__init__",
    "safetensors": "interchange",
    "tensorstore": "checkpoint",
}
# Packages that a module loads on first use, since most callers do not need them: `*` is any.
LAZY: Mapping[str, set[str]] = {
    "treeshard.__init__": {"*"},  # the names of the surface
    "treeshard._cli": {"*"},  # each command
    "treeshard._cli.stored_trees": {"checkpoint"},  # needs TensorStore
    "treeshard._core.make_mesh": {"_core"},  # absent devices, and what several processes need
    "treeshard._core.reports": {"*"},  # the one door from the core to the reports
    "treeshard._planning.plan": {"_planning"},  # checks and texts of plans
    "treeshard._placement.constraint": {"_placement"},  # what only Explicit axes need
    "treeshard._placement.moves": {"_placement"},  # what only several processes need
    "treeshard.testing._computations": {"checkpoint"},  # needs TensorStore
    "treeshard.training": {"training"},  # what few training loops need
    "treeshard.training._accumulation": {"_core", "training"},  # what only Explicit axes, TPUs need
    "treeshard.training._gradients": {"training"},  # what only Explicit axes need
    "treeshard.training._program": {"training"},  # what only Explicit axes need
}


class Import(NamedTuple):
    """One import: the dotted name that is loaded, and whether it waits for a call.

    A part of the name that is computed is `?`.
    """

    name: str
    in_function: bool
    relative: bool = False


def dotted(path: str) -> str:
    """`treeshard._core.mesh` of `treeshard/_core/mesh.py`; `treeshard.__init__` stays."""
    name = path.removesuffix(".py").replace("/", ".")
    return name if name == "treeshard.__init__" else name.removesuffix(".__init__")


MODULES = {dotted(path): source for path, source in SOURCES.items()}


@cache
def imports(source: str) -> tuple[Import, ...]:
    """What a source imports, by statement, `import_module` or `__import__`."""

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                yield from (Import(alias.name, in_function) for alias in node.names)
            case ast.ImportFrom():
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                # `from package import module` loads the module.
                loaded = {name if name in MODULES else node.module or "" for name in names}
                yield from (Import(name, in_function, node.level > 0) for name in sorted(loaded))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[name, *_]):
                if called in ("import_module", "__import__"):
                    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                    texts = [getattr(part, "value", "?") for part in parts]
                    known = [text if isinstance(text, str) else "?" for text in texts]
                    yield Import("".join(known), in_function)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):  # loads nothing
                return
            case _:
                pass
        functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        for child in ast.iter_child_nodes(node):
            yield from visit(child, in_function or isinstance(node, functions))

    return tuple(visit(parsed(source), False))


def package_of(module: str) -> str:
    """`_core` of `treeshard._core.mesh`."""
    return module.split(".")[1] if "." in module else "__init__"


def row_of(package: str) -> int:
    return next(number for number, row in enumerate(ROWS) if package in row)


def violations(module: str, source: str) -> Iterator[str]:
    """What is wrong with the imports of a module."""
    here, lazy = package_of(module), LAZY.get(module, set())
    for name, in_function, relative in imports(source):
        there = package_of(name)
        if relative:
            yield f"{name}: write imports of treeshard in full"
        elif name.startswith("?"):
            if "?" not in lazy:
                yield "an import of a computed name"
        elif name.partition(".")[0] != "treeshard":
            yield from _third_party(module, name, in_function)
        elif there == "?" and "*" in lazy:
            continue
        elif name == "treeshard" or not any(there in row for row in ROWS):
            yield f"{name} is in no row: import the module that is needed"
        elif there != here and row_of(there) >= row_of(here):
            yield f"{here} may not import {there}"
        elif in_function and not lazy & {"*", there}:
            yield f"{name} is imported inside a function"


def _third_party(module: str, name: str, in_function: bool) -> Iterator[str]:
    here = module.removeprefix("treeshard.")
    for library, owner in OWNERS.items():
        if f"{name}.".startswith(f"{library}."):
            if not f"{here}.".startswith(f"{owner}."):
                yield f"only {owner} may import {library}"
            return
    top = name.partition(".")[0]
    if not in_function and top not in AT_THE_TOP | sys.stdlib_module_names:
        yield f"{top} is optional, but imported at the head of {module}"


def test_imports_follow_the_order_of_packages() -> None:
    found = {module: [*violations(module, source)] for module, source in MODULES.items()}
    assert {module: facts for module, facts in found.items() if facts} == {}


def test_every_package_is_in_a_row() -> None:
    assert {package_of(module) for module in MODULES} == {name for row in ROWS for name in row}


@pytest.mark.parametrize(
    ("module", "source", "fact"),
    [
        ("_core.specs", "from treeshard._planning.plan import plan", "_core may not import _plan"),
        ("training", "def f():\n    __import__('treeshard._cli')", "training may not import _cli"),
        ("training", "importlib.import_module(name)", "a computed name"),
        ("training", "from treeshard import jit_step", "treeshard is in no row"),
        ("training", "def f():\n    import treeshard._core.specs", "inside a function"),
        ("_core.specs", "from . import mesh", "in full"),
        ("_planning.plan", "def f():\n    import equinox", "only training may import equinox"),
        ("_inspection.draw", "import matplotlib.pyplot", "matplotlib is optional"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, fact: str) -> None:
    [found] = violations(f"treeshard.{module}", source)
    assert fact in found


def test_the_page_on_the_architecture_draws_these_layers() -> None:
    picture = (ROOT / "docs" / "pictures" / "architecture.svg").read_text()
    assert picture == draw_architecture.picture(), "make docs"
    layers = [row for row in ROWS if not {*row} & {"errors", "__init__"}]
    assert layers == [*reversed(draw_architecture.ROWS)]

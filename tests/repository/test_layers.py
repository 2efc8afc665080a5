"""Which package may import which: the architecture, held by reading the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeshard

PACKAGE = Path(treeshard.__file__).parent

# A package may import itself and whatever is on a line above its own. Packages on one line do not
# know each other.
LAYERS = [
    ["errors"],
    ["_core"],
    ["_planning"],
    ["_placement", "manual", "_inspection", "communication"],
    ["training", "_disk"],
    ["checkpoint", "interchange"],
    ["testing", "compat"],
    ["_cli"],
    ["__main__"],
]
# Which packages alone may import a library.
ONLY = {
    "equinox": {"training"},
    "orbax": {"checkpoint"},
    "etils": {"checkpoint"},
    "safetensors": {"interchange"},
    "chex": {"testing"},
}
# Libraries that no module of the lower packages loads when it is itself imported.
HEAVY = {"chex", "equinox", "flax", "matplotlib", "optax", "orbax", "rich", "tqdm"}
LIGHT = {package for layer in LAYERS[:4] for package in layer}
# Imports that wait for the first use: what they load is slow, and most callers do not need it.
LAZY = {
    ("training._step", "communication"),
    ("_cli.stored_trees", "_cli"),
}


def module_name(path: Path) -> str:
    """`_core.mesh`, as the tables above name modules; a package is named without `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    paths = (path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
    return {module_name(path): path for path in sorted(paths)}


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Every module that a source imports, with whether the import waits inside a function."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from treeshard import x` may name a submodule.
            named = [f"{module}.{alias.name}" for alias in node.names]
            yield from ((name, inside) for name in (named if module == "treeshard" else [module]))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield literal_start(node.args[0]), True
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def literal_start(node: ast.expr) -> str:
    """What is known of a text: all of a literal, the beginning of an f-string."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) else ""


def level(package: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if package in layer)


def violations(module: str, source: str) -> list[str]:
    package = module.split(".")[0]
    bad: list[str] = []
    for name, inside in imports(source):
        top, _, rest = name.partition(".")
        if not top:
            bad.append(f"{name}: write imports of treeshard in full")
        elif top == "treeshard":
            target = rest.split(".")[0]
            if target and target != package and level(target) >= level(package):
                bad.append(f"{target} is not below {package}")
            if target and inside and (module, target) not in LAZY:
                bad.append(f"{name} is imported inside a function")
        elif top in ONLY and package not in ONLY[top]:
            bad.append(f"only {sorted(ONLY[top])} may import {top}")
        elif top in HEAVY and not inside and package in LIGHT:
            bad.append(f"{top} is heavy and imported at the head of {module}")
    return bad


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_is_below_it(module: str) -> None:
    if module == "_cli":  # its commands are loaded by name
        pytest.skip("tests/cli runs every command")
    assert violations(module, modules()[module].read_text()) == []


def test_every_package_has_a_layer() -> None:
    packages = {module.split(".")[0] for module in modules()}
    assert packages - {"testing"} <= {package for layer in LAYERS for package in layer}


@pytest.mark.parametrize(
    ("module", "source", "fact"),
    [
        (
            "_core.specs",
            "from treeshard._planning.plan import plan",
            "_planning is not below _core",
        ),
        ("manual._fsdp", "import treeshard._placement.shard", "_placement is not below manual"),
        ("_inspection.draw", "from treeshard import communication", "communication is not below"),
        (
            "_core.mesh",
            'import importlib\nimportlib.import_module("treeshard.training")',
            "training is not below _core",
        ),
        ("_planning.plan", "def f():\n    import treeshard.errors", "imported inside a function"),
        ("_planning.plan", "import equinox as eqx", "only ['training'] may import equinox"),
        ("_placement.shard", "import tqdm", "tqdm is heavy"),
        ("_planning.plan", "from .rules import read_rules", "in full"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, fact: str) -> None:
    assert fact in violations(module, source)[0]


# ------------------------------------------------------------------ cycles


def edges() -> dict[str, set[str]]:
    """Which modules a module imports, wherever in it."""
    known = modules()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for name, _ in imports(path.read_text()):
            rest = name.partition("treeshard.")[2]
            if rest in known and rest != module:
                found[module].add(rest)
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph, as the names along it; empty without one."""
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for following in sorted(graph.get(node, ())):
            if found := walk(following, [*trail, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def test_no_import_cycle() -> None:
    assert cycle(edges()) == []


def test_a_cycle_is_seen() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []

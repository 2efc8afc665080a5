"""The rooms of the house: which module may import which."""

import ast
from pathlib import Path

import pytest

import treeshard

PACKAGE = Path(treeshard.__file__).parent

# A module may import from modules to its left in its row and from the rooms it stands on.
ROOMS = {
    "where": [
        "_errors",
        "_processes",
        "_agreement",
        "_progress",
        "_mesh",
        "_make_mesh",
        "_paths",
        "_specs",
        "_spec_trees",
    ],
    "decide": [
        "_patterns",
        "_partition_axis",
        "_logical",
        "_refinements",
        "_by_names",
        "_pattern_strings",
        "_tactics",
        "_strategies",
        "_decision",
        "_walking",
        "_matching",
        "_rules",
        "_infer",
        "_describe",
        "_kept_dims",
        "_following",
        "_optimizer_state",
        "_leaf_findings",
        "_findings",
        "_literals",
        "_rules_text",
        "_plan_text",
        "_plan_diff",
        "_planned_tree",
        "_plan_follow",
        "_plan",
    ],
    "do": [
        "_across",
        "_targets",
        "_host",
        "_parcels",
        "_point_to_point",
        "_gather",
        "_own_shards",
        "_ways",
        "_transfer",
        "_process_local",
        "_constraint",
    ],
    "by hand": [
        "_boxes",
        "_mean_grads",
        "_by_hand_params",
        "_by_hand_grads",
        "_by_hand_modules",
        "_parallel_regions",
        "_tensor_parallel",
        "manual",
    ],
    "look": [
        "_live",
        "_program",
        "_hlo",
        "_stablehlo",
        "_groups",
        "_dataflow",
        "_moved",
        "_collectives",
        "_collective_budgets",
        "_communication",
        "_unplanned",
        "_settling",
        "_comparison",
        "_partitioner_warnings",
        "_stability",
        "_placed",
        "_analysis",
        "_draw_files",
        "_draw",
    ],
    "the top": [
        "_metrics",
        "_accumulate",
        "_layout",
        "_step",
        "training",
        "_checksums",
        "_saved_leaf",
        "_asked_for",
        "_leaf_table",
        "_table_text",
        "_like",
        "_checkpoint_paths",
        "_directory_lock",
        "_meetings",
        "_interrupts",
        "_orbax",
        "_saving",
        "_wanted_leaves",
        "_read_leaf",
        "_stored_arrays",
        "_restoring",
        "_contents",
        "_checkpoints",
        "checkpoint",
        "_safetensors",
        "_byte_ranges",
        "_new_files",
        "_tensor_files",
        "_tensor_trees",
        "_wanted_tensors",
        "interchange",
        "_stored_trees",
        "_stored_checkpoint",
        "_difference",
        "_plan_files",
        "_cli_options",
        "_cli_plan",
        "_cli_look",
        "_cli_export",
        "_cli_import",
        "_cli",
        "__main__",
    ],
}
BELOW = {
    "where": [],
    "decide": ["where"],
    "do": ["where", "decide"],
    "by hand": ["where", "decide"],
    "look": ["where", "decide"],
    "the top": ["where", "decide", "do", "by hand", "look"],
}
# Who alone may import what.
ONLY = {
    "equinox": {"training"},
    "orbax": {"_orbax"},
    "safetensors": set(),  # the format is ours to read and write by parts; tests compare
}
# What nothing may import when it is itself imported, outside the top.
HEAVY = {"chex", "equinox", "flax", "matplotlib", "optax", "orbax", "rich", "tqdm"}


def modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def room_of(module: str) -> str:
    return next(room for room, inside in ROOMS.items() if module in inside)


def allowed(module: str) -> set[str]:
    room = room_of(module)
    left = ROOMS[room][: ROOMS[room].index(module)]
    return {*left, *(name for below in BELOW[room] for name in ROOMS[below])}


def imports(source: str) -> list[tuple[str, bool]]:
    """Every module that a source imports, and whether that stands inside a function."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names]
            found.extend((name, inside) for name in (names if module == "treeshard" else [module]))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def violations(module: str, source: str) -> list[str]:
    bad: list[str] = []
    for name, inside in imports(source):
        top = name.split(".")[0]
        if top == "treeshard" or name.startswith("."):
            target = name.split(".")[1]
            if name.startswith("."):
                bad.append(f"{name}: write imports of treeshard in full")
            elif target not in allowed(module):
                bad.append(f"{target} is not below {module}")
            elif inside:
                bad.append(f"{name} is imported inside a function")
        elif top in ONLY and module not in ONLY[top]:
            bad.append(f"only {ONLY[top]} may import {top}")
        elif top in HEAVY and not inside and room_of(module) != "the top":
            bad.append(f"{top} is heavy and imported at the head of {module}")
    return bad


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    assert violations(module, (PACKAGE / f"{module}.py").read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "fact"),
    [
        ("_specs", "from treeshard._plan import plan", "_plan is not below _specs"),
        ("_mesh", "import treeshard._specs", "_specs is not below _mesh"),
        ("_live", "from treeshard import _transfer", "_transfer is not below _live"),
        ("_plan", "def f():\n    import treeshard._specs", "imported inside a function"),
        ("_plan", "import equinox as eqx", "only {'training'} may import equinox"),
        ("_transfer", "import tqdm", "tqdm is heavy"),
        ("_plan", "from ._specs import project", "in full"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, fact: str) -> None:
    assert fact in violations(module, source)[0]

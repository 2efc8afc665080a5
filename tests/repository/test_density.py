"""Functions with many branches are few, and each has a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeshard

ROOT = Path(treeshard.__file__).parents[1]
LIMIT = 18  # branches that a function may have without a reason
AT_MOST = 26  # functions that have one

# Functions above the limit, and why their branches stay together.
HARD = {
    "treeshard/communication/_dataflow.py:sources": (
        "one case for each HLO opcode that passes data on unchanged"
    ),
    "treeshard/communication/_collectives.py:_buffers": (
        "one case for each way in which HLO writes what a collective moves"
    ),
    "treeshard/communication/_collectives.py:_moved": (
        "reads all that is known of one collective, with the exceptions of backends"
    ),
    "treeshard/programs/_buffers.py:_value": (
        "one case for each HLO opcode that reuses the memory of an operand"
    ),
    "treeshard/programs/_flops.py:traced_flops": (
        "one case for each primitive that multiplies, or runs others"
    ),
    "treeshard/_core/specs.py:project": (
        "the one place that decides how much of a spec fits; its rules depend on each other"
    ),
    "treeshard/_core/make_mesh.py:make_mesh": (
        "checks of independent arguments, then one of JAX's three ways to make a mesh"
    ),
    "treeshard/training/__init__.py:_warn_of_idle_axes": (
        "a table of cases, each with its own sentence"
    ),
    "treeshard/interchange/_names.py:map_tensors": (
        "one pass over the names, and one over each kind of mistake"
    ),
    "treeshard/_planning/plan_json.py:leaf": "checks each field of untrusted JSON where it is read",
    "treeshard/communication/_differences.py:explain": (
        "choices and words stand together; words belong in a table"
    ),
    "treeshard/_placement/shard.py:place": "two functions in one, chosen by who calls",
    "treeshard/programs/_memory.py:advise": "one case for each advice; words belong in a table",
    "treeshard/checkpoint/_restore.py:_read_together": "reads, checks and places in one loop",
    "treeshard/programs/_cost.py:cost_of": (
        "adds up each kind of work, and names what is unknown of it"
    ),
    "treeshard/communication/_matching.py:match": "one case for each kind of planned transfer",
    "treeshard/_placement/padding.py:_resized": "pads and unpads, on hosts and on devices",
    "treeshard/_cli/differences.py:difference": (
        "sorts pairs of leaves into kinds by what is known unread"
    ),
    "treeshard/training/_pitfalls.py:separated": "finds shared memory, warns of it and copies",
    "treeshard/training/_pitfalls.py:warn_of_activations": (
        "finds what is moved, weighs it and writes the warning"
    ),
    "treeshard/communication/_forecast.py:_transfers": (
        "gathers, reductions and the update of one parameter, in order"
    ),
    "treeshard/checkpoint/_array_store.py:write_arrays": "writes, counts and reports in one loop",
    "treeshard/_placement/constraint.py:unshard": "finds specs, axes and mesh from four contexts",
    "treeshard/testing/_checks.py:check": "runs each check, and words its result",
    "treeshard/_planning/adapters.py:following": "collects followers and walks to their bases",
    "treeshard/_placement/constraint.py:_report": (
        "one case for each kind of misfit, and for what only warns"
    ),
}

TURNS = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


def branches(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The ways through a function: one, and one more at each place where it may turn.

    What is defined inside the function counts too, but its decorators and defaults do not.
    """
    count = 1
    for node in (inner for statement in function.body for inner in ast.walk(statement)):
        match node:
            case ast.comprehension():
                count += 1 + len(node.ifs)
            case ast.BoolOp():
                count += len(node.values) - 1
            case _ if isinstance(node, TURNS):
                count += 1
            case _:
                pass
    return count


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The functions and methods of a source, with their branches."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, branches(node)


def above_the_limit(sources: dict[str, str]) -> dict[str, int]:
    """The functions with more branches than the limit, by path and name."""
    return {
        f"{path}:{name}": count
        for path, source in sources.items()
        for name, count in functions(source)
        if count > LIMIT
    }


def sources() -> dict[str, str]:
    files = sorted((ROOT / "treeshard").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def test_functions_with_many_branches_have_a_reason() -> None:
    assert above_the_limit(sources()).keys() == HARD.keys()


def test_the_reasons_are_few_and_of_one_line() -> None:
    assert len(HARD) <= AT_MOST
    for name, reason in HARD.items():
        assert len(reason.split()) > 3, name
        assert "\n" not in reason, name


@pytest.mark.parametrize(
    ("body", "count"),
    [
        pytest.param("return x", 1, id="straight"),
        pytest.param("if x: pass\nelif y: pass\nelse: pass", 3, id="if"),
        pytest.param("for i in x: pass\nelse: pass", 2, id="for"),
        pytest.param("while x: pass", 2, id="while"),
        pytest.param("try: f()\nexcept A: pass\nexcept B: pass\nfinally: g()", 3, id="except"),
        pytest.param("return a if b else c", 2, id="conditional expression"),
        pytest.param("return [i for i in x for j in y if i if j]", 5, id="comprehension"),
        pytest.param("return a and b and (c or not d)", 4, id="and, or"),
        pytest.param("match x:\n case 1: pass\n case _: pass", 3, id="match"),
        pytest.param("def g(y=a or b):\n if y: pass", 3, id="inner function"),
        pytest.param("return lambda y: y or x", 2, id="lambda"),
        pytest.param("with f() as g: assert x", 1, id="no branch"),
    ],
)
def test_branches_are_counted(body: str, count: int) -> None:
    lines = "\n ".join(body.splitlines())
    [(name, found), *_] = functions(f"@d(1 if x else 2)\nasync def f(x=a or b):\n {lines}\n")
    assert (name, found) == ("f", count)


def test_a_function_with_too_many_branches_is_seen() -> None:
    def source(turns: int) -> str:
        return "class A:\n def f(self, x):\n" + turns * "  if x: pass\n"

    assert above_the_limit({"a.py": source(LIMIT - 1), "b.py": "def g(): pass"}) == {}
    assert above_the_limit({"a.py": source(LIMIT)}) == {"a.py:f": LIMIT + 1}

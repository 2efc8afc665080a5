"""No function of the library has many branches."""

import ast
from collections.abc import Iterator, Mapping

import pytest
from files import SOURCES, parsed

LIMIT = 18  # branches that a function may have

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
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, branches(node)


def above_the_limit(sources: Mapping[str, str]) -> dict[str, int]:
    """The functions with more branches than the limit, by path and name."""
    return {
        f"{path}:{name}": count
        for path, source in sources.items()
        for name, count in functions(source)
        if count > LIMIT
    }


def test_no_function_has_many_branches() -> None:
    assert above_the_limit(SOURCES) == {}


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

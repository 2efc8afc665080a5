"""Calls in the prose and in the tables of pages have arguments that their functions take."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from files import PAGES
from surface import SUBMODULES, surface

import treeshard as ts

MODULES = [name.removeprefix("treeshard.") for name in SUBMODULES]
PUBLIC: dict[str, list[Any]] = {}
for qualified, value in surface().items():
    PUBLIC.setdefault(qualified.rpartition(".")[2], []).append(value)


def inline(text: str) -> list[str]:
    """The code in backticks, outside blocks; some spans go over a line."""
    prose = re.sub(r"(?ms)^( *)```.*?^\1```$", "", text)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def calls(code: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def of_ours(function: ast.expr, page: str) -> Callable[..., Any] | None:
    """The function of treeshard that a name means, if it is one."""
    name = ast.unparse(function)
    if re.fullmatch(r"(ts|treeshard)(\.\w+)+", name):
        return attrgetter(name.partition(".")[2])(ts)
    if re.fullmatch(rf"({'|'.join(MODULES)})\.\w+", name):
        return attrgetter(name)(ts)
    # Other projects have functions of the same names.
    named = [] if page == "docs/migrate.md" else PUBLIC.get(name, [])
    return named[0] if len(named) == 1 else None


def takes(function: Callable[..., Any], call: ast.Call) -> None:
    """Raises if the arguments of a call are not those of the function. `...` stands for any."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in named or any(isinstance(arg, ast.Starred) for arg in call.args):
        return
    given = [arg for arg in call.args if not (isinstance(arg, ast.Constant) and arg.value is ...)]
    signature = inspect.signature(function)
    bind = signature.bind if len(given) == len(call.args) else signature.bind_partial
    bind(*given, **named)


def wrong_calls(text: str, page: str) -> Iterator[str]:
    for code in inline(text):
        for call in calls(code):
            function = of_ours(call.func, page)
            try:
                if function is not None:
                    takes(function, call)
            except TypeError as error:
                yield f"{page}: `{code}`: {error}"


def test_inline_calls_have_arguments_that_their_functions_take() -> None:
    assert [wrong for page, text in PAGES.items() for wrong in wrong_calls(text, page)] == []

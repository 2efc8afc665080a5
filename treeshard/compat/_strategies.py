"""Reads tactics written as text, such as `"shard_dim('model', -1) | fsdp('data')"`.

The text is parsed as Python and walked: only calls of known names with literal arguments are
accepted. `eval` would be one line, and would run any code in a config from somebody else. Only
`infer_sharding` and the command line take texts. In Python, tactics are values.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any, NoReturn

from treeshard._core.text import LONGEST_EXPRESSION
from treeshard._planning.tactics import Tactic, fsdp, logical_partitioning, replicate, shard_dim
from treeshard.errors import ShardingRuleError, TreeShardError, did_you_mean, short

MakeTactic = Callable[..., Tactic]

# The names mean the same in a text as in Python.
TACTICS: Mapping[str, MakeTactic] = {
    "fsdp": fsdp,
    "logical_partitioning": logical_partitioning,
    "replicate": replicate,
    "shard_dim": shard_dim,
}

_HOW = "Write calls joined by |, such as \"shard_dim('model', -1) | fsdp('data')\"."


def parse_strategy(text: str, tactics: Mapping[str, MakeTactic] = TACTICS) -> Tactic:
    """Parses calls of tactics with literal arguments, joined by `|`.

    Args:
        text: The calls. A name alone is a call without arguments.
        tactics: The functions that may be called, by name.

    Raises:
        ShardingRuleError: If the text does not parse, a name is not a tactic, or a tactic
            does not take the arguments. The message shows the column.
    """
    # Beyond its own limits, Python's parser raises errors of many types.
    text = text.strip()
    if len(text) > LONGEST_EXPRESSION:
        raise ShardingRuleError(f"the strategy {short(text)!r} has {len(text):,} characters.")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = getattr(error, "offset", None)
        at = f" at column {column}" if column else ""
        raise ShardingRuleError(
            f"the strategy {text!r} does not parse{at}: {getattr(error, 'msg', error)}. {_HOW}"
        ) from None
    return reduce(or_, [_tactic(node, text, tactics) for node in _operands(tree)])


def _operands(node: ast.expr) -> list[ast.expr]:
    """The operands of `|`, from left to right."""
    # `a | b | c` is parsed as `(a | b) | c`.
    later: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        later.append(node.right)
        node = node.left
    return [node, *reversed(later)]


def _tactic(node: ast.expr, text: str, tactics: Mapping[str, MakeTactic]) -> Tactic:
    # "replicate" is a call without arguments, as big_vision's `Registry.lookup` takes it.
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Name | ast.Attribute):
        _refuse(node, text, f"is not a call of a tactic. {_HOW}")
    name = ast.get_source_segment(text, called) or text
    make = tactics.get(name)
    if make is None:
        hint = did_you_mean(name, tactics) or f" The tactics are {', '.join(tactics)}."
        _refuse(called, text, f"is not a tactic.{hint}")
    args, options = _arguments(node, text) if isinstance(node, ast.Call) else ([], {})
    # Arguments are bound before the call: a `TypeError` of the call itself is about a value.
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        why = f"has wrong arguments: {error}. The signature is {name}{_signature(make)}."
        _refuse(node, text, why)
    try:
        return make(*args, **options)
    except (TreeShardError, TypeError, ValueError) as error:
        _refuse(node, text, f"is invalid: {str(error).rstrip('.')}.")


def _arguments(call: ast.Call, text: str) -> tuple[list[Any], dict[str, Any]]:
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            _refuse(keyword.value, text, "is unpacked with **. Write the arguments out.")
        options[keyword.arg] = _literal(keyword.value, text)
    return [_literal(arg, text) for arg in call.args], options


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        _refuse(node, text, "is not a literal, and is not evaluated. Write the value itself.")


def _signature(make: MakeTactic) -> str:
    parameters = inspect.signature(make).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(bare))


def _refuse(node: ast.AST, text: str, why: str) -> NoReturn:
    source = ast.get_source_segment(text, node) or text
    column = getattr(node, "col_offset", 0) + 1
    raise ShardingRuleError(f"the strategy {text!r}, at column {column}: {source} {why}")

"""Strategy strings, such as `"shard_dim('model', -1) | fsdp('data')"`, parsed to tactics."""

import ast
import inspect
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, NoReturn

from treeshard._core.text import LONGEST_EXPRESSION
from treeshard._planning.adapters import follow
from treeshard._planning.tactics import (
    Fsdp,
    Tactic,
    axes_to_shard,
    fsdp,
    logical_partitioning,
    registered_tactics,
    replicate,
    shard_dim,
)
from treeshard.errors import ShardingRuleError, TreeShardError, did_you_mean, short


def _fsdp(
    axis: Any,
    min_size_to_shard_mb: Any = ...,
    *,
    min_size: Any = ...,
    skip: Any = (),
    memory: Any = None,
):
    """`fsdp` in strings: its threshold is in MiB, unless `min_size` gives it in elements."""
    if min_size is not ...:
        if min_size_to_shard_mb is not ...:
            raise TypeError("give min_size_to_shard_mb or min_size, not both")
        if min_size is not None:
            _check_number("min_size", min_size, int, "a number of elements, or None")
        return fsdp(axis, min_size=min_size, skip=skip, memory=memory)
    mib = 4 if min_size_to_shard_mb is ... else min_size_to_shard_mb
    _check_number("min_size_to_shard_mb", mib, int | float, "a number of MiB")
    return Tactic((Fsdp(axes_to_shard(axis, "fsdp"), 0, tuple(skip), mib, memory),))


def _check_number(name: str, value: Any, kind: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, not {what}")


_OURS: dict[str, Callable[..., Tactic]] = {
    "follow": follow,
    "fsdp": _fsdp,
    "logical_partitioning": logical_partitioning,
    "replicate": replicate,
    "shard_dim": shard_dim,
}


# ------------------------------------------------------------------ reading strings


def parse_strategy(text: str) -> Tactic:
    """Parses a strategy string: calls of tactics with literal arguments, joined by `|`.

    Nothing is evaluated. `fsdp` is big_vision's here: `fsdp(axis, min_size_to_shard_mb=4)`.

    Raises:
        ShardingRuleError: If the string does not parse, a name is not a tactic, or a tactic
            does not take the arguments. The message shows the column.
    """
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
    return reduce(or_, [_step(node, text) for node in _steps(tree)])


_HOW = "Write calls joined by |, such as \"shard_dim('model', -1) | fsdp('data')\"."


def _steps(node: ast.expr) -> list[ast.expr]:
    """The operands of `|`, from left to right."""
    later: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        later.append(node.right)
        node = node.left
    return [node, *reversed(later)]


def _step(node: ast.expr, text: str) -> Tactic:
    called = node.func if isinstance(node, ast.Call) else node
    if not isinstance(called, ast.Name | ast.Attribute):
        _refuse(node, text, f"is not a call of a tactic. {_HOW}")
    name = ast.get_source_segment(text, called) or text
    known = _OURS | registered_tactics
    if name not in known:
        hint = did_you_mean(name, known) or f" The tactics are {', '.join(known)}."
        why = f"is not a tactic.{hint} `treeshard.tactic` registers a tactic of your own."
        _refuse(called, text, why)
    args, options = _arguments(node, text) if isinstance(node, ast.Call) else ([], {})
    make = known[name]
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


def _signature(make: Callable[..., Tactic]) -> str:
    if make is _fsdp:
        return "(axis, min_size_to_shard_mb=4, *, min_size=<elements>, skip=(), memory=None)"
    parameters = inspect.signature(make).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(bare))


def _refuse(node: ast.AST, text: str, why: str) -> NoReturn:
    source = ast.get_source_segment(text, node) or text
    column = getattr(node, "col_offset", 0) + 1
    raise ShardingRuleError(f"the strategy {text!r}, at column {column}: {source} {why}")

"""Errors of types on Explicit axes, with lines to paste: each was traced before it is proposed.

JAX raises where it cannot tell how a result is split. Whether an error is one of these shows when
the expression is traced again: it can be, with arrays that are not split. Then other ways to write
it are traced too, with their gradients, and those that type-check are shown, with what they move.
"""

import ast
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jax.sharding import AxisType

from treeshard._core.mesh import AnyMesh, axes_of_type, describe_mesh
from treeshard._core.specs import all_axes, dim_entries, entries
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan_in_force import PlanInForce, plan_in_force
from treeshard.communication._collectives import collectives, total_bytes
from treeshard.errors import ShardingTypeError, TreeShardError
from treeshard.training._failing_line import Expression, failing_expressions, spec_of
from treeshard.training._proposals import Operand, Proposals, operand_nodes

_SHOWN = 3  # proposals, and leaves that an operand may be
_COMPILED = 4  # of each kind of proposals: a compilation takes 0.1 s
_FRAMES = 3  # a function of the user's, and who calls it


class _Way(NamedTuple):
    """What to write instead: the whole line, and the bytes that it moves between devices.

    The size is `None` if it is not known, and `moves` says why.
    """

    line: str
    size: int | None
    moves: str


def explained(
    error: Exception, mesh: AnyMesh, step: PlanInForce | None
) -> ShardingTypeError | None:
    """The error to raise in place of one about types; `None` if it is about something else."""
    if isinstance(error, TreeShardError) or not axes_of_type(mesh, AxisType.Explicit):
        return None
    with plan_in_force(step):
        for expression in islice(failing_expressions(error, mesh), _FRAMES):
            if expression.is_about_types():
                return ShardingTypeError(_message(error, expression, mesh, step))
    return None


def _message(
    error: Exception, expression: Expression, mesh: AnyMesh, step: PlanInForce | None
) -> str:
    operands = [_operand(node, expression, step) for node in operand_nodes(expression.node)]
    operands = [x for x in operands if x.types != []]
    rows = step.rows if step else ()
    ways = _ways(expression, Proposals(expression, operands, mesh, rows))
    text = " ".join(expression.source.text.split())
    origins = [row for operand in operands for row in _described(operand, expression, step)]
    lines = [
        f"{expression.place}: JAX cannot tell how the result of `{text}` is split over"
        f" {describe_mesh(mesh)}, whose axes are Explicit.",
        *(f"  {row}" for row in origins),
    ]
    if ways:
        lines.append("Write one of these; each was traced here, with its gradient:")
        lines += [f"  {way.line}  # {way.moves}" for way in ways]
        lines += expression.imports([way.line for way in ways])
    else:
        lines.append("No other way to write it that was traced here has a type.")
    return "\n".join([*lines, f"JAX says: {_first_line(error)}"])


# ------------------------------------------------------------------ operands


def _operand(node: Any, expression: Expression, step: PlanInForce | None) -> Operand:
    types = expression.types_or_none(expression.text_of(node))
    if not types or step is None:
        return Operand(node, types)
    axes = set(step.gathered_axes)
    split = [x for x in types if axes & set(all_axes(entries(spec_of(x))))]
    leaves = [_leaves_of(x, step) for x in split]
    is_gathered = bool(split) and all(leaves)
    text = expression.text_of(node)
    named = any(_is_named(leaf, text) for found in leaves for leaf in found)
    return Operand(node, types, is_gathered, is_gathered and named)


def _leaves_of(x: Any, step: PlanInForce) -> list[PlannedLeaf]:
    """The leaves of the state that have a type, or whose layers on dim 0 have it."""
    return [leaf for leaf in step.plan.leaves if _has_type(leaf, x)]


def _is_named(leaf: PlannedLeaf, text: str) -> bool:
    """Whether a part of a leaf's path is a word of the user's code."""
    return not set(leaf.path.split("/")).isdisjoint(re.findall(r"\w+", text))


def _best_named(leaves: Sequence[PlannedLeaf], text: str) -> list[PlannedLeaf]:
    """Those of which the fewest parts of their paths are not in the code."""
    words = set(re.findall(r"\w+", text))
    missing = [len(set(leaf.path.split("/")) - words) for leaf in leaves]
    least = min(missing, default=0)
    return [leaf for leaf, count in zip(leaves, missing, strict=True) if count == least]


def _has_type(leaf: PlannedLeaf, x: Any) -> bool:
    if leaf.dtype != x.dtype:
        return False
    of_leaf = dim_entries(leaf.given, len(leaf.shape))
    of_x = dim_entries(spec_of(x), x.ndim)
    if (tuple(leaf.shape), of_leaf) == (tuple(x.shape), of_x):
        return True
    return (tuple(leaf.shape[1:]), of_leaf[1:]) == (tuple(x.shape), of_x)


def _described(operand: Operand, expression: Expression, step: PlanInForce | None) -> Iterator[str]:
    """One line for each array of an operand: its type, and the leaf that it may come from."""
    text = " ".join(expression.text_of(operand.node).split())
    is_access = _is_access(operand.node)
    for x in (operand.types or ())[:_SHOWN]:
        leaves = _leaves_of(x, step) if step else []
        yield f"{text}: {x.str_short()}{_origin(leaves, text, is_access)}"


def _is_access(node: ast.expr) -> bool:
    """Whether it reads a leaf, as `layer.weight`, and does not compute with it, as `weight.T`."""
    match node:
        case ast.Attribute(value=value, attr=attr):
            return attr not in ("T", "mT") and _is_access(value)
        case ast.Subscript(value=value, slice=ast.Constant() | ast.Name()):
            return _is_access(value)
        case _:
            return isinstance(node, ast.Name)


def _origin(leaves: Sequence[PlannedLeaf], text: str, is_access: bool) -> str:
    """Which leaves of the state have this type; those that are called so in the code, if any."""
    if not leaves:
        return ""
    chosen = _best_named([leaf for leaf in leaves if _is_named(leaf, text)], text) or leaves
    paths = fold_paths([leaf.path for leaf in chosen])
    shown = " or ".join(paths[:_SHOWN]) + (" or ..." if len(paths) > _SHOWN else "")
    rules = {leaf.rule: leaf for leaf in chosen}
    [leaf] = rules.values() if len(rules) == 1 else [None]
    why = "" if leaf is None or leaf.rule is None else f", by rule {leaf.rule} {leaf.pattern!r}"
    return f", {'the leaf' if is_access else 'like the leaf'} {shown}{why}"


# ------------------------------------------------------------------ ways


def _ways(expression: Expression, proposals: Proposals) -> list[_Way]:
    """Those that type-check: first what is ours to know, then by what they move."""
    first = _typed(expression, proposals.preferred())
    others = _typed(expression, proposals.others())
    by_size = sorted(others, key=lambda way: math.inf if way.size is None else way.size)
    return list({way.line: way for way in [*first, *by_size]}.values())[:_SHOWN]


def _typed(expression: Expression, texts: Iterable[str]) -> list[_Way]:
    typed = (text for text in dict.fromkeys(texts) if expression.has_types(text))
    return [_way(expression, text) for text in islice(typed, _COMPILED)]


def _way(expression: Expression, text: str) -> _Way:
    line = expression.line_with(text)
    try:
        found = collectives(expression.compiled(text))
    except Exception as error:  # a mesh whose compiler is not here
        return _Way(line, None, f"what it moves is not known: {_first_line(error)}")
    if not found:
        return _Way(line, 0, "moves nothing")
    size = total_bytes(found)
    kinds = ", ".join(dict.fromkeys(x.kind for x in found))
    return _Way(line, size, f"moves {'?' if size is None else human_bytes(size)}: {kinds}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

"""Parses specs, names, dtypes, amounts of memory and JSON; writes sizes, tables and folded paths.

Parsing evaluates literals only.
"""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from string import ascii_letters
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from treeshard._core.specs import is_logical, is_mesh_axes
from treeshard.errors import FormatError, short

N = TypeVar("N", int, str)


@lru_cache
def parse_dtype(name: str) -> Any:
    """Returns a dtype by its name, `key<fry>` included. Starts no backend."""
    try:
        if key := re.fullmatch("key<(.+)>", name):
            impl = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}.get(key[1], key[1])
            return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
        return jax.numpy.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # numpy also parses shapes and counts
        raise FormatError(f"{name!r} is not a dtype.") from None


@lru_cache(1024)
def dtype_name(dtype: Any) -> str:
    """The name of a dtype, as in `str(dtype)`, cached because numpy builds it each time."""
    return str(dtype)


def parse_spec(text: str) -> PartitionSpec:
    """Parses `P('data', None, ('fsdp', 'tensor'))`."""
    match _parse_expression(text):
        case ast.Call(func=ast.Name(id="P" | "PartitionSpec"), args=args, keywords=[]):
            entries = [_literal(arg, text) for arg in args]
        case _:
            raise FormatError(
                f"{text!r} is not a spec. Write it as P('data', None, ('fsdp', 'tensor'))."
            )
    if bad := [entry for entry in entries if not is_mesh_axes(entry)]:
        raise FormatError(
            f"{text!r} is not a spec: {bad[0]!r} is neither an axis name nor a tuple of them."
        )
    return PartitionSpec(*[tuple(e) if isinstance(e, list) else e for e in entries])


def parse_names(text: str) -> tuple[Any, ...]:
    """Parses a tuple of logical names, `('batch', None, 'embed')`."""
    names = _literal(_parse_expression(text), text)
    if not is_logical(names):
        raise FormatError(
            f"{text!r} is not a tuple of names. Write it as ('batch', None, 'embed')."
        )
    return names


def parse_pattern(text: str, option: str) -> re.Pattern[str]:
    """Compiles the regular expression that an option has."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(f"{option} {text!r}: the pattern does not compile: {error}.") from None


# Beyond their own limits, Python's parser and `repr` raise errors of many types.
LONGEST_EXPRESSION = 3_500


def _parse_expression(text: str) -> ast.expr:
    if len(text) > LONGEST_EXPRESSION:
        raise FormatError(f"{short(text)!r} is too long: it has {len(text):,} characters.")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{text!r} cannot be parsed: {error}.") from None


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        part = ast.get_source_segment(text, node)  # `ast.unparse` would recurse
        raise FormatError(f"{text!r}: {part!r} is not a literal.") from None


_UNITS = {"": 1, "B": 1, "KB": 1000}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """Parses `80GB` (powers of 1000) or `80GiB` (powers of 1024) into bytes."""
    number = text.rstrip(f"{ascii_letters} ")
    unit = text.removeprefix(number).strip()
    try:
        count = float(number) * _UNITS[unit]  # `float` also reads "nan" and "inf"
    except (KeyError, ValueError):
        count = 0.0
    if not 0 < count < math.inf:
        raise FormatError(f"{text!r} is not an amount of memory. Write it as 80GB or 80GiB.")
    return int(count)


# ------------------------------------------------------------------ JSON and TOML


def parse_json(text: bytes) -> Any:
    """Parses UTF-8 JSON. A repeated key is an error: one of its values would be lost silently."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_each_key_once)
        if b"\\u" in text:  # half of a surrogate pair is neither a file name nor can be printed
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not valid JSON: {error}.") from None
    return value


def _each_key_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {repeated!r} is repeated")
    return mapping


# ------------------------------------------------------------------ sizes and tables


def human_bytes(count: int) -> str:
    """`1.5 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 5)  # P is the largest letter
    return f"{count / 1024**power:.1f} {'KMGTP'[power - 1]}iB"


def columns(rows: Sequence[tuple[str, ...]], right: int = 3) -> str:
    """Rows as lines of aligned cells; the column at index `right` is right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[right] = row[right].rjust(widths[right])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# ------------------------------------------------------------------ processes


def describe_groups(row: Mapping[int, str]) -> str:
    """Facts by process: `P('fsdp',) on processes 0, 1; P() on process 2`, eight at most."""
    return "; ".join(limit_to_eight(f"{fact} on {on}" for fact, on in group_by_fact(row).items()))


def group_by_fact(row: Mapping[int, str]) -> dict[str, str]:
    """The processes of each fact, in words."""
    groups: dict[str, list[int]] = {}
    for i, fact in row.items():
        groups.setdefault(fact, []).append(i)
    return {fact: named_processes(on) for fact, on in groups.items()}


def named_processes(processes: Sequence[int]) -> str:
    """`process 3`, `processes 0, 2` or `processes 0 to 7, 9`, eight numbers or ranges at most."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    names: list[str] = []
    for run in consecutive(processes):
        names += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return "processes " + ", ".join(limit_to_eight(names))


def limit_to_eight(texts: Iterable[str]) -> list[str]:
    """The first eight texts, and the number of others, to keep messages between processes short."""
    texts = list(texts)
    return texts if len(texts) <= 8 else [*texts[:8], f"and {len(texts) - 8} more"]


# ------------------------------------------------------------------ folding

_NUMBER = re.compile("([0-9]+)")


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Merges paths that differ only in numbers: `layers/{0..79}/attn/q`."""
    return [path for path, _ in fold((path, None, path) for path in paths)]


def fold(items: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, list[Any]]]:
    """Groups items `(path, kind, item)` of one kind whose paths differ only in numbers.

    Returns `(folded path, items)` for each group, in order of first appearance.
    """
    alike: dict[Any, list[tuple[list[str], Any]]] = {}
    for path, kind, item in items:
        # `a/1/b2` is the words `a/`, `/b` and "", and the numbers 1 and 2: they alternate.
        words = _NUMBER.split(path)
        alike.setdefault((*words[::2], kind), []).append((words[1::2], item))
    lines: list[tuple[str, list[Any]]] = []
    for (*words, _), members in alike.items():
        for numbers, inside in _grids(members, 0):
            path = "".join(a + b for a, b in zip(words, [*numbers, ""], strict=True))
            lines.append((path, inside))
    return lines


def _grids(
    members: list[tuple[list[str], Any]], position: int
) -> Iterable[tuple[list[str], list[Any]]]:
    """Splits numbered members into full grids: every number at one position of the path
    with every number at the others, so that `{0..3}/{0..7}` means exactly 32 leaves."""
    # Of the members (0, 0), (0, 1), (1, 0) the ranges 0..1 and 0..1 would also mean (1, 1). Such
    # members are split by their first number, then by the next.
    numbers = [list(dict.fromkeys(column)) for column in zip(*(n for n, _ in members), strict=True)]
    # Members with the same numbers share a path, and stay together.
    if math.prod(map(len, numbers)) == len(members) or position == len(numbers):
        yield [_span(column) for column in numbers], [member for _, member in members]
        return
    members = sorted(members, key=lambda member: member[0][position])
    for _, part in groupby(members, key=lambda member: member[0][position]):
        yield from _grids(list(part), position + 1)


def consecutive(numbers: Iterable[N]) -> list[list[N]]:
    """Splits numbers where one is not the next of the last: `[[0, 1, 2], [8]]`."""
    runs: list[list[N]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _span(numbers: list[str]) -> str:
    """`{0..79}` or `{0..3,8}`."""
    if len(numbers) == 1:
        return numbers[0]
    runs = consecutive(sorted(numbers, key=int))
    spans = [run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return "{" + ",".join(spans) + "}"

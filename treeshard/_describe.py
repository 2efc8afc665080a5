"""What a plan says when it is shown: a line a leaf, repeated layers folded."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from treeshard._decision import PlannedLeaf
from treeshard._mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._specs import Adjustment, axes_of, entries
from treeshard._tactics import Tactic

_NUMBER = re.compile("([0-9]+)")


Rules = Sequence[tuple[Any, Any]]


_HEADS = ("path", "array", "spec", "per device", "why")
_NUMBERS = 3  # the column to be set flush right


def describe(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> str:
    """A plan's lines in aligned columns, and its totals."""
    return f"{columns([_HEADS, *_rows(leaves, rules, mesh)])}\n{_totals(leaves, mesh)}"


def describe_html(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> str:
    """The same as an HTML table, for notebooks."""

    def line(tag: str, row: Sequence[str]) -> str:
        cells = [f"<{tag}{_STYLES[i]}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(row)]
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in _rows(leaves, rules, mesh))
    totals = html.escape(_totals(leaves, mesh)).replace("\n", "<br>")
    return f"<table><thead>{line('th', _HEADS)}</thead><tbody>{body}</tbody></table><p>{totals}</p>"


_LEFT, _RIGHT = ' style="text-align: left"', ' style="text-align: right"'
_STYLES = [_RIGHT if column == _NUMBERS else _LEFT for column in range(len(_HEADS))]


def rich_table(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> Any:
    """The same as a table of rich, which must be installed."""
    from rich.table import Table

    table = Table(caption=_totals(leaves, mesh), caption_justify="left")
    for column, head in enumerate(_HEADS):
        table.add_column(head, justify="right" if column == _NUMBERS else "left", overflow="fold")
    for row in _rows(leaves, rules, mesh):
        table.add_row(*map(_plain, row))
    return table


def _plain(cell: str) -> Any:
    from rich.text import Text  # brackets would be read as markup

    return Text(cell)


def _rows(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for path, alike in _folded(leaves):
        leaf = alike[0]
        shape = ",".join(map(str, leaf.shape))
        held = human_bytes(leaf.bytes_per_device(mesh) * len(alike))
        why = _reason(leaf, rules)
        rows.append((path or "(the tree)", f"{leaf.dtype}[{shape}]", str(leaf.given), held, why))
    return rows


def human_bytes(count: int) -> str:
    """`1.5 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 5)
    return f"{count / 1024**power:.1f} {'KMGTP'[power - 1]}iB"


def columns(rows: Sequence[tuple[str, ...]], right: int = _NUMBERS) -> str:
    """Rows as lines of aligned cells, those of one column flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[right] = row[right].rjust(widths[right])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _reason(leaf: PlannedLeaf, rules: Rules) -> str:
    if leaf.rule is None:
        why = "" if leaf.shape else "scalar"
    else:
        action = rules[leaf.rule][1]
        why = f"rule {leaf.rule} {leaf.pattern!r}"
        if isinstance(action, Tactic):
            why += f" {action!r}"
        elif leaf.asked != leaf.given and not callable(action):
            why += f" {leaf.asked}"
    notes = "; ".join(map(_note, leaf.adjustments))
    return ": ".join(part for part in (why, notes) if part)


def _note(adjustment: Adjustment) -> str:
    kind, _, axes, dim = adjustment
    where = "" if dim is None else f" on dim {dim}"
    return f"{kind} {', '.join(axes)}{where}" if axes else kind


def _totals(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> str:
    devices = math.prod(axis_sizes(mesh).values())
    total, held = (
        sum(leaf.bytes for leaf in leaves),
        sum(leaf.bytes_per_device(mesh) for leaf in leaves),
    )
    whole = sum(not any(map(axes_of, entries(leaf.given))) for leaf in leaves)
    ratio = f", {held * devices / total:.2f}x an even split" if total else ""
    return (
        f"{len(leaves):,} leaves, {sum(leaf.size for leaf in leaves):,} elements,"
        f" {human_bytes(total)} in all; {whole:,} leaves are whole on every device.\n"
        f"{human_bytes(held)} on the fullest of {devices:,} devices ({describe_mesh(mesh)})"
        f"{ratio}."
    )


# ------------------------------------------------------------------ folding


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Paths, those that differ in numbers only as one: `layers/{0..79}/attn/q`."""
    return [path for path, _ in fold((path, None, path) for path in paths)]


def _folded(leaves: Iterable[PlannedLeaf]) -> list[tuple[str, list[PlannedLeaf]]]:
    """Leaves that were decided alike, under one path, in order of first appearance."""
    return fold((leaf.path, (leaf.shape, leaf.dtype, leaf.decision), leaf) for leaf in leaves)


def fold(items: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, list[Any]]]:
    """Items (path, kind, item) that are of one kind and differ only in the numbers of paths."""
    alike: dict[Any, list[tuple[list[str], Any]]] = {}
    for path, kind, item in items:
        words = _NUMBER.split(path)  # words and numbers in turn
        alike.setdefault((*words[::2], kind), []).append((words[1::2], item))
    lines: list[tuple[str, list[Any]]] = []
    for (*words, _), members in alike.items():
        for numbers, inside in _grids(members, 0):
            path = "".join(a + b for a, b in zip(words, [*numbers, ""], strict=True))
            lines.append((path, inside))
    return lines


def _grids(
    members: list[tuple[list[str], Any]], place: int
) -> Iterable[tuple[list[str], list[Any]]]:
    """Splits numbered members into full grids: every number at one place with every number
    at the others, so that `{0..3}/{0..7}` stands for 32 leaves and no others."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(n for n, _ in members), strict=True)]
    # Members with the same numbers, which share a path, stand together.
    if math.prod(map(len, columns)) == len(members) or place == len(columns):
        yield [_span(column) for column in columns], [member for _, member in members]
        return
    members = sorted(members, key=lambda member: member[0][place])
    for _, part in groupby(members, key=lambda member: member[0][place]):
        yield from _grids(list(part), place + 1)


def _span(numbers: list[str]) -> str:
    """`{0..79}` or `{0..3,8}`."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=int):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(r[0] if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs) + "}"

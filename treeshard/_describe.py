"""A plan as text, HTML and a rich table: one line per leaf, repeated layers folded."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from treeshard._decision import PlannedLeaf
from treeshard._mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._specs import Adjustment, array_text, axes_of, entries
from treeshard._tactics import Tactic

_NUMBER = re.compile("([0-9]+)")


Rules = Sequence[tuple[Any, Any]]


_HEADS = ("path", "array", "spec", "per device", "why")
_NUMBERS = 3  # the right-aligned column


def describe(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> str:
    """A plan as aligned columns, followed by its totals."""
    return f"{columns([_HEADS, *_rows(leaves, rules, mesh)])}\n{_totals(leaves, mesh)}"


def describe_html(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> str:
    """A plan as an HTML table, for notebooks."""

    def line(tag: str, row: Sequence[str]) -> str:
        cells = [f"<{tag}{_STYLES[i]}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(row)]
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in _rows(leaves, rules, mesh))
    totals = html.escape(_totals(leaves, mesh)).replace("\n", "<br>")
    return f"<table><thead>{line('th', _HEADS)}</thead><tbody>{body}</tbody></table><p>{totals}</p>"


_LEFT, _RIGHT = ' style="text-align: left"', ' style="text-align: right"'
_STYLES = [_RIGHT if column == _NUMBERS else _LEFT for column in range(len(_HEADS))]


def rich_table(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> Any:
    """A plan as a table of rich, which must be installed."""
    from rich.table import Table

    table = Table(caption=_totals(leaves, mesh), caption_justify="left")
    for column, head in enumerate(_HEADS):
        table.add_column(head, justify="right" if column == _NUMBERS else "left", overflow="fold")
    for row in _rows(leaves, rules, mesh):
        table.add_row(*map(_plain, row))
    return table


def _plain(cell: str) -> Any:
    from rich.text import Text  # a plain string's brackets would be read as markup

    return Text(cell)


def _rows(leaves: Sequence[PlannedLeaf], rules: Rules, mesh: AnyMesh) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    alike = fold((leaf.path, (leaf.shape, leaf.dtype, leaf.decision), leaf) for leaf in leaves)
    for path, members in alike:
        leaf = members[0]
        size = human_bytes(leaf.bytes_per_device(mesh) * len(members))
        row = (path or "(the tree)", array_text(leaf), str(leaf.given), size, _reason(leaf, rules))
        rows.append(row)
    return rows


def human_bytes(count: int) -> str:
    """`1.5 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 5)
    return f"{count / 1024**power:.1f} {'KMGTP'[power - 1]}iB"


def columns(rows: Sequence[tuple[str, ...]], right: int = _NUMBERS) -> str:
    """Rows as lines of aligned cells; the column at index `right` is right-aligned."""
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
    total = sum(leaf.bytes for leaf in leaves)
    per_device = sum(leaf.bytes_per_device(mesh) for leaf in leaves)
    replicated = sum(not any(map(axes_of, entries(leaf.given))) for leaf in leaves)
    ratio = f", {per_device * devices / total:.2f}x an even split" if total else ""
    return (
        f"{len(leaves):,} leaves, {sum(leaf.size for leaf in leaves):,} elements,"
        f" {human_bytes(total)} in all; {replicated:,} leaves are replicated.\n"
        f"{human_bytes(per_device)} on the fullest of {devices:,} devices ({describe_mesh(mesh)})"
        f"{ratio}."
    )


# ------------------------------------------------------------------ folding


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Merges paths that differ only in numbers: `layers/{0..79}/attn/q`."""
    return [path for path, _ in fold((path, None, path) for path in paths)]


def fold(items: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, list[Any]]]:
    """Groups items `(path, kind, item)` of one kind whose paths differ only in numbers.

    Returns `(folded path, items)` for each group, in order of first appearance.
    """
    alike: dict[Any, list[tuple[list[str], Any]]] = {}
    for path, kind, item in items:
        words = _NUMBER.split(path)  # words and numbers alternate
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
    columns = [list(dict.fromkeys(column)) for column in zip(*(n for n, _ in members), strict=True)]
    # Members with the same numbers share a path, and stay together.
    if math.prod(map(len, columns)) == len(members) or position == len(columns):
        yield [_span(column) for column in columns], [member for _, member in members]
        return
    members = sorted(members, key=lambda member: member[0][position])
    for _, part in groupby(members, key=lambda member: member[0][position]):
        yield from _grids(list(part), position + 1)


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

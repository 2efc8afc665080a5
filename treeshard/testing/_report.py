"""What a check says, as a table of layouts and leaves and in words.

A report has all layouts, where an assertion would stop at the first difference: which of them are
wrong, and by how much on each mesh, tells more than any of them alone.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.text import fold


class Cause(NamedTuple):
    """What is wrong with a result in one layout.

    Attributes:
        fact: What is wrong.
        fix: What to change; empty if the numbers do not show it.
        short: For a cell of the table.
        measured: What was measured, such as `x 8.000`.
        multiple: The number by which the result is a multiple of the right one, if it is.
    """

    fact: str
    fix: str = ""
    short: str = "wrong"
    measured: str = ""
    multiple: float | None = None


class Problem(NamedTuple):
    """One result that is wrong.

    Attributes:
        path: The path of the leaf; `loss` is the value of the loss.
        spec: How the leaf is sharded.
        layouts: The names of the layouts in which it is wrong.
        fact: What is wrong.
        fix: What to change; `""` if the numbers do not show it.
        line: The line of code that made it, as `file:line`; `""` if it is not known.
    """

    path: str
    spec: PartitionSpec
    layouts: tuple[str, ...]
    fact: str
    fix: str
    line: str = ""


@dataclass(frozen=True)
class Report:
    """How the results of a computation differ between layouts; `str()` of it is a table and words.

    Attributes:
        what: The check.
        layouts: The layouts, as text: mesh, batch and what else is special about each.
        cells: For each leaf and each layout a word: `ok`; `2.1 noise` for a difference that is
            larger than the noise of reordering but no more than rounding; otherwise what is wrong.
        problems: What is wrong. Empty if nothing is.
        notes: What was not compared, or compared in another way, and why.
    """

    what: str
    layouts: tuple[str, ...]
    cells: Mapping[str, Mapping[str, str]]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no result is wrong in the layouts that were compared, of which there are some."""
        return bool(self._compared()) and not self.problems

    def __str__(self) -> str:
        head = f"{self.what}: {self._verdict()}"
        below = [f"\n{text}" for text in self._problems()]
        return "\n".join([head, *self._table(), "", *self.layouts, *self.notes, *below])

    def _compared(self) -> set[str]:
        """The names of the layouts that were compared."""
        return {name for row in self.cells.values() for name in row}

    def _verdict(self) -> str:
        compared = self._compared()
        if not compared:
            return "Nothing was compared."
        if self.ok and len(compared) < len(self.layouts):
            return (
                f"Nothing is wrong in {len(compared)} of {len(self.layouts)} layouts; the others"
                " were not compared."
            )
        if self.ok:
            return "Nothing is wrong."
        count = len(self.problems)
        return f"{count} results are wrong." if count > 1 else "1 result is wrong."

    def _table(self) -> list[str]:
        """A row for each leaf, those of repeated layers folded if they have the same cells."""
        names = [text.partition(":")[0] for text in self.layouts]
        rows = [("leaf", *names)]
        leaves = ((path, tuple(cells.items()), cells) for path, cells in self.cells.items())
        for path, (cells, *_) in fold(leaves):
            rows.append((path, *(cells.get(name, "-") for name in names)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([*map(str.ljust, row, widths)] for row in rows)
        return ["  ".join(cells).rstrip() for cells in padded]

    def _problems(self) -> list[str]:
        """A line for each cause, with the leaves that it has made wrong, repeated layers folded."""
        alike: dict[Any, list[Problem]] = defaultdict(list)
        for problem in self.problems:
            alike[problem[2:]].append(problem)
        lines: list[str] = []
        for (layouts, fact, fix, line), members in alike.items():
            folded = fold((p.path, p.spec, p) for p in members)
            leaves = "; ".join(f"{path} {inside[0].spec}" for path, inside in folded)
            parts = [f"In: {', '.join(layouts)}.", f"Made at {line}." if line else "", fix]
            lines.append(f"{leaves}: {fact}\n  {' '.join(filter(None, parts))}")
        return lines

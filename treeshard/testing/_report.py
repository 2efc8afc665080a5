"""Writes the report of a check: a table of layouts and leaves, and a sentence for each problem.

A report has all layouts, while an assertion would stop at the first difference. The set of wrong
layouts, and the error on each mesh, often show the cause.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.text import fold, fold_paths


class Finding(NamedTuple):
    """What is wrong with a result in one layout."""

    fact: str  # a sentence for the report
    cell: str  # the measurement for a cell of the table, such as `x 8.000`


class Problem(NamedTuple):
    """One result that is wrong.

    Attributes:
        path: The path of the leaf, with its step, as in `step 1: params/w`; `loss` for the value of
            the loss.
        spec: How the leaf is sharded.
        layouts: The names of the layouts in which it is wrong.
        fact: What is wrong.
    """

    path: str
    spec: PartitionSpec
    layouts: tuple[str, ...]
    fact: str


# The cell of a result that was not checked.
UNCHECKED = "not checked"


@dataclass(frozen=True)
class Report:
    """How the results of a computation differ between layouts; `str()` of it is a readable report.

    Attributes:
        what: The check.
        layouts: The layouts, as text: the mesh, the batch and other properties of each.
        cells: For each leaf and each layout a word: `ok`; `2.1 noise` for a difference that is
            larger than the noise of reordering but within rounding; `zero`, `hidden`, `alike` or
            `not finite` if a fault would not show; `not checked`; otherwise the error.
        problems: The wrong results. Empty if all results are right.
        notes: How comparisons differed from the usual ones, and why.
        raised: For each layout that raised unexpectedly, its error.
        not_compared: For each leaf that could not be compared, the reason.
        visible: For each leaf of floats that was compared, the smallest relative error that would
            have been seen in every layout, including errors of rounding to the program's own
            dtypes: 0.01 is 1%. Wider floats may show smaller errors of other kinds: a note has the
            size.
        aux: The results that are neither a gradient nor a leaf of the state, such as the value of
            the loss. A check that compared only these is not `ok`.
    """

    what: str
    layouts: tuple[str, ...]
    cells: Mapping[str, Mapping[str, str]]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    raised: Mapping[str, str] = field(default_factory=dict)
    not_compared: Mapping[str, str] = field(default_factory=dict)
    visible: Mapping[str, float] = field(default_factory=dict)
    aux: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        """Whether the check passed: all results were checked and are right, they include a gradient
        or a leaf of the state, and no layout raised."""
        return bool(self._find_compared()) and not self._complaints()

    def __str__(self) -> str:
        head = f"{self.what}: {self._verdict()}"
        raised = [f"{name} raised {what}" for name, what in self.raised.items()]
        missing = [f"not compared: {text}" for text in self._explain_missing()]
        below = [f"\n{text}" for text in self._problems()]
        lines = [head, *raised, *self._table(), "", *self.layouts, *missing, *self.notes, *below]
        return "\n".join(lines)

    def _find_compared(self) -> set[str]:
        """The gradients, or leaves of floats of the state, that were compared in some layout."""
        return {*self.visible} - {*self.not_compared} - {*self.aux}

    def _count_unchecked(self) -> int:
        return sum(UNCHECKED in row.values() for row in self.cells.values())

    def _complaints(self) -> list[str]:
        """Why the report is not ok, in words."""
        counts = [
            (len(self.problems), "result is wrong", "results are wrong"),
            (len(self.raised), "layout raised", "layouts raised"),
            (self._count_unchecked(), "result is not checked", "results are not checked"),
        ]
        return [f"{n} {one if n == 1 else several}" for n, one, several in counts if n]

    def _verdict(self) -> str:
        of_what = " of the state" if self.what == "check_step" else ""
        missing = [] if self._find_compared() else [f"No result{of_what} was compared"]
        complaints = missing + self._complaints()
        if complaints:
            return f"{', '.join(complaints)}."
        ran = {name for row in self.cells.values() for name in row}
        leaves, layouts = len(self.cells), len(self.layouts)
        parts: list[str] = []
        if self.not_compared:
            parts.append(f"{leaves - len(self.not_compared)} of {leaves} results")
        if len(ran) < layouts:
            parts.append(f"{len(ran)} of {layouts} layouts")
        if parts:
            return f"No errors in {' and '.join(parts)}; the others were not compared."
        return "All results are right."

    def _explain_missing(self) -> list[str]:
        """A line for each reason why leaves were not compared."""
        paths: dict[str, list[str]] = defaultdict(list)
        for path, why in self.not_compared.items():
            paths[why].append(path)
        return [f"{', '.join(fold_paths(some))} ({why})" for why, some in paths.items()]

    def _table(self) -> list[str]:
        """A row for each leaf. Repeated layers with the same cells are folded."""
        names = [text.partition(":")[0] for text in self.layouts]
        rows = [("leaf", *names, "sees")]
        leaves = ((path, tuple(cells.items()), path) for path, cells in self.cells.items())
        for folded, paths in fold(leaves):
            cells = self.cells[paths[0]]
            rows.append((folded, *(cells.get(name, "-") for name in names), self._sees(paths)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([*map(str.ljust, row, widths)] for row in rows)
        return ["  ".join(cells).rstrip() for cells in padded]

    def _sees(self, paths: Sequence[str]) -> str:
        """The smallest error that would have been seen in each of some leaves."""
        errors = [self.visible[path] for path in paths if path in self.visible]
        return percent(max(errors)) if errors else "-"

    def _problems(self) -> list[str]:
        """A line for each fact, with its leaves. Repeated layers are folded."""
        alike: dict[Any, list[Problem]] = defaultdict(list)
        for problem in self.problems:
            alike[problem.fact].append(problem)
        lines: list[str] = []
        for fact, members in alike.items():
            folded = fold((p.path, p.spec, p) for p in members)
            leaves = "; ".join(f"{path} {inside[0].spec}" for path, inside in folded)
            layouts = dict.fromkeys(name for p in members for name in p.layouts)
            lines.append(f"{leaves}: {fact}\n  In: {', '.join(layouts)}.")
        return lines


def percent(error: float) -> str:
    """A relative error in percent, rounded up to one digit."""
    if error >= 1:
        return "100%" if error < math.inf else "-"
    digit = 10.0 ** math.floor(math.log10(max(error, 1e-12)))
    return f"{100 * math.ceil(error / digit) * digit:.6g}%"

"""What a check found, as a table and in words."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.text import fold


class Cause(NamedTuple):
    """Why a result is wrong in one layout.

    Attributes:
        fact: What is wrong.
        fix: What to change.
        short: For a cell of the table.
        factor: Such as `x 8.000`, if the result is a multiple of the right one.
        meanings: What that factor may mean, each in words.
    """

    fact: str
    fix: str
    short: str = "wrong"
    factor: str = ""
    meanings: tuple[str, ...] = ()


class Problem(NamedTuple):
    """One result that is wrong.

    Attributes:
        path: The path of the leaf; `loss` is the value of the loss.
        spec: How the leaf is sharded.
        layouts: The names of the layouts in which it is wrong.
        fact: What is wrong.
        fix: What to change.
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
        """Whether all results are right."""
        return not self.problems

    def __str__(self) -> str:
        names = [text.partition(":")[0] for text in self.layouts]
        rows = [("leaf", *names)]
        lines = fold((path, tuple(cells.items()), cells) for path, cells in self.cells.items())
        rows += [(path, *(alike[0].get(name, "-") for name in names)) for path, alike in lines]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        count = len(self.problems)
        verdict = f"{count} results are wrong." if count > 1 else "1 result is wrong."
        verdict = "Nothing is wrong." if self.ok else verdict
        parts = [f"{self.what}: {verdict}", *table, "", *self.layouts, *self.notes]
        return "\n".join([*parts, *(f"\n{text}" for text in self._problems())])

    def _problems(self) -> list[str]:
        """A line for each cause, with the leaves that it has made wrong, repeated layers folded."""
        alike: dict[Any, list[Problem]] = defaultdict(list)
        for problem in self.problems:
            alike[problem[2:]].append(problem)
        lines: list[str] = []
        for (layouts, fact, fix, line), members in alike.items():
            folded = fold((p.path, p.spec, p) for p in members)
            leaves = "; ".join(f"{path} {inside[0].spec}" for path, inside in folded)
            where = f" Made at {line}." if line else ""
            lines.append(f"{leaves}: {fact}\n  In: {', '.join(layouts)}.{where} {fix}")
        return lines


def merged(causes: Mapping[str, Mapping[int, Cause]]) -> Iterator[tuple[int, list[str], str, str]]:
    """The causes of each result over all layouts: its index, the layouts, the fact and the fix.

    A factor may have several meanings on one mesh: those that hold on all meshes are kept.
    """
    by_leaf: dict[int, dict[str, Cause]] = defaultdict(dict)
    for name, of_layout in causes.items():
        for i, cause in of_layout.items():
            by_leaf[i][name] = cause
    for i, by_layout in sorted(by_leaf.items()):
        meanings = [cause.meanings for cause in by_layout.values() if cause.meanings]
        common = [x for x in meanings[0] if all(x in m for m in meanings)] if meanings else []
        groups: dict[Any, dict[str, str]] = defaultdict(dict)
        for name, cause in by_layout.items():
            fact = cause.fact
            if cause.meanings:
                fact = " or ".join(common or cause.meanings)
            groups[fact, cause.fix][name] = cause.factor
        for (fact, fix), factors in groups.items():
            if any(factors.values()):
                first = next(iter(factors.values()))
                others = [f"; {x} in `{name}`" for name, x in factors.items() if x != first]
                fact = f"{fact} ({first}{''.join(others)})."
            yield i, list(factors), fact, fix

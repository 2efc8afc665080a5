"""Writes docs/numbers.md, and the table of figures in README.md, from benchmarks/results/.

    python -m benchmarks.page

No figure is written by hand: `make bench` measures, writes the results and calls this.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._harness import as_cells, shown, verdict

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "numbers.md"
README = ROOT / "README.md"
SOURCE = "https://github.com/treeshard/treeshard/blob/main/benchmarks/"
SITE = "https://treeshard.github.io/treeshard/"  # package indexes resolve no relative links

Results = Mapping[str, Mapping[str, Any]]


def between_marks(text: str, made: str, name: str = "table") -> str:
    """A page, with what a script made for the place that it marks."""
    pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    return re.sub(pattern, lambda at: f"{at[1]}{made}{at[2]}", text)


class Claim(NamedTuple):
    """A figure that the README quotes.

    Attributes:
        bench: The benchmark that measures it.
        case: Which of its rows.
        what: What the README calls it.
        show: How the figure is written.
        others: Rows of other ways, by name; by default those of its kind that the
            row itself lists.
        ratio_to: What the figure is a multiple of, if it is.
        is_more_better: Whether larger figures are better.
    """

    bench: str
    case: str
    what: str
    show: Callable[[float], str] = shown
    others: Mapping[str, str] = {}
    ratio_to: str = ""
    is_more_better: bool = False


def _percent(figure: float) -> str:
    return f"{figure:.0%}"


CLAIMS = [
    Claim(
        "bench_optimizer_state",
        "right, of 135 states: treeshard",
        "optax states placed rightly, of 135",
        _percent,
        {
            "`optax.tree_map_params`": "right, of 135 states: optax.tree_map_params",
            "rules": "right, of 135 states: rules on the state",
        },
        is_more_better=True,
    ),
    Claim(
        "bench_transfer",
        "make_shard_and_gather_fns, both, cold, s",
        "1,000 leaves sharded and gathered, s",
    ),
    Claim("bench_checkpoint", "save, x Orbax", "saving, x Orbax", ratio_to="Orbax"),
]


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Benchmark -> what it wrote, in order of their names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def write(folder: Path = RESULTS) -> None:
    """Writes the page, and the README's table where all that it quotes was measured."""
    found = load(folder)
    PAGE.write_text(text(found), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    if readme != (new := with_claims(readme, found)):
        README.write_text(new, encoding="utf-8")


# ------------------------------------------------------------------ the README's table


HEAD = (
    "| `python -m benchmarks.` | what | treeshard | others | better |\n"
    "| --- | --- | --- | --- | --- |\n"
)


def with_claims(readme: str, found: Results) -> str:
    """The README's text with its table of figures as they were measured."""
    if any(claim.bench not in found for claim in CLAIMS):
        return readme
    table = re.compile(r"^\| `python -m benchmarks\.` \|.*\n(?:\|.*\n)+", re.MULTILINE)
    return table.sub(lambda _: claims(found), readme)


def claims(found: Results) -> str:
    """The table that the README quotes."""
    lines: list[str] = []
    for i, claim in enumerate(CLAIMS):
        row = row_of(found, claim.bench, claim.case)
        others = {name: row_of(found, claim.bench, case) for name, case in claim.others.items()}
        others = others or _ways(row["vs"])
        # One is named once, above the others of its kind.
        first = i == 0 or CLAIMS[i - 1].bench != claim.bench
        command = f"[`{claim.bench}`]({SITE}numbers/#{claim.bench})" if first else ""
        vs = ", ".join(f"{name} {claim.show(x['measured'])}" for name, x in others.items())
        figure = claim.show(row["measured"]) + (f" ({mark})" if (mark := verdict(row)) else "")
        measured = {name: x["measured"] for name, x in others.items()}
        best = _best(claim, row["measured"], measured)
        lines.append(f"| {command} | {claim.what} | {figure} | {vs} | {best} |\n")
    return HEAD + "".join(lines)


def _best(claim: Claim, ours: float, others: Mapping[str, float]) -> str:
    """Whose figure is the best."""
    figures = {claim.ratio_to: 1.0} if claim.ratio_to else others
    figures = {**figures, "treeshard": ours}
    return (max if claim.is_more_better else min)(figures, key=lambda name: figures[name])


def _ways(vs: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Those of a row's others that are figures of its kind: the rest say their unit."""
    if isinstance(vs, str):
        return {}
    return {k: x for k, x in vs.items() if not k.endswith(")") and not k.startswith("x ")}


def row_of(found: Results, bench: str, case: str) -> Mapping[str, Any]:
    """The row of a case. An error names those that there are."""
    rows = {row["case"]: row for row in found[bench]["rows"]}
    if case not in rows:
        raise KeyError(f"{bench} has no row {case!r}. It has {', '.join(map(repr, rows))}.")
    return rows[case]


# ------------------------------------------------------------------ the page


INTRO = """\
# Numbers

How treeshard compares with other ways to do the same, and where it misses its own targets.
`make bench` runs all of it, on eight simulated devices unless a title says otherwise, and writes
all figures into `benchmarks/results/`. Each figure is the median over rounds; in brackets are the
quartiles and the target where it is missed or unclear. A ratio, such as `x Orbax`, is taken in
each round.

"""


def text(found: Results) -> str:
    """The page."""
    common = _find_common(found)
    parts = [INTRO]
    if found:
        parts.append(f"Measured with {_setting(common)}.\n")
    for name, result in found.items():
        rows = _shown(name, result["rows"])
        if rows:
            measured = f"[`{result['command']}`]({SOURCE}{name}.py), {result['date']}"
            parts.append(f"\n## {name}\n\n{result['title']}: {measured}.\n\n")
            parts.append(_table(rows))
    return "".join(parts)


def _shown(bench: str, rows: list[Any]) -> list[Any]:
    """The rows that miss a target or are quoted by the README, and up to three with those that are
    compared with another way or slower than it."""
    claims = [claim for claim in CLAIMS if claim.bench == bench]
    quoted = {case for claim in claims for case in (claim.case, *claim.others.values())}
    first = [row for row in rows if verdict(row) or row["case"] in quoted]
    others = [row for row in rows if row not in first and _is_compared(row)]
    chosen = first + others[: max(0, 3 - len(first))]
    return [row for row in rows if row in chosen]


def _is_compared(row: Mapping[str, Any]) -> bool:
    """Whether a row with a target is compared with another way, or slower than it."""
    is_slower = ", x " in row["case"] and row["measured"] > 1.2
    return bool(row["reach"] and (_ways(row["vs"]) or is_slower))


def _table(rows: list[Mapping[str, Any]]) -> str:
    cells = [("case", "measured", "others"), *map(_cells, rows)]
    cells = [column for column in zip(*cells, strict=True) if any(column[1:])]
    lines = [*zip(*cells, strict=True)]
    lines.insert(1, tuple("--:" if column[0] == "measured" else "---" for column in cells))
    return "".join(f"| {' | '.join(_escape(cell) for cell in line)} |\n" for line in lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A row as it stands in a table of the page: quartiles and targets only where they decide."""
    case, measured, quartiles, reach, others = as_cells(row)
    if verdict(row):
        spread = f"{quartiles}; " if verdict(row) == "unclear" else ""
        measured = f"{measured} ({spread}{reach})"
    if isinstance(row["vs"], Mapping):
        others = ", ".join(f"{name} {shown(x['measured'])}" for name, x in _ways(row["vs"]).items())
    return case, measured, others


def _escape(cell: str) -> str:
    # The site's Markdown shows the backslash of an escaped `<`.
    return re.sub(r"([>*_|])", r"\\\1", cell).replace("<", "&lt;")


def _find_common(found: Results) -> dict[str, str]:
    """The versions and the machine that every result names alike."""
    settings = [result["on"] for result in found.values()]
    return {
        key: value
        for key, value in (settings[0] if settings else {}).items()
        if all(other.get(key) == value for other in settings)
    }


def _setting(on: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in on.items())


if __name__ == "__main__":
    write()

"""Writes docs/numbers.md, and the figures in README.md, from benchmarks/results/.

    python -m benchmarks.page

No figure is written by hand: `make bench` measures, writes the results and calls this.
"""

import json
import re
from collections.abc import Mapping
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
        cases: The rows that the sentence quotes, each with the name of another library if it is
            that library's figure in the row.
        sentence: The figures with their subject, unit and comparison. `{0}` is the first, `{link}`
            where the page has the benchmark, and `{spread}` the quartiles if the first is unclear.
    """

    bench: str
    cases: tuple[tuple[str, str], ...]
    sentence: str


_BOTH = "make_shard_and_gather_fns, both, cold, s"
CLAIMS = [
    Claim(
        "bench_optimizer_state",
        (
            ("right, of 135 states: treeshard", ""),
            ("right, of 135 states: optax.tree_map_params", ""),
            ("right, of 135 states: rules on the state", ""),
        ),
        "treeshard shards {0:.0%} of [135 optax states]({link}) correctly, against {1:.0%} for"
        " `optax.tree_map_params` and {2:.0%} for path rules.",
    ),
    Claim(
        "bench_transfer",
        ((_BOTH, ""), (_BOTH, "eformer"), (_BOTH, "scalax")),
        "It [shards and gathers 1,000 leaves]({link}) in {0:.3g} s, against {1:.3g} s for eformer"
        " and {2:.3g} s for scalax.",
    ),
    Claim(
        "bench_checkpoint",
        (("save, x Orbax", ""),),
        "It needs {0:.3g} times Orbax's time to [save 512 MiB]({link}){spread}.",
    ),
]


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Benchmark -> what it wrote, in order of their names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def write(folder: Path = RESULTS) -> None:
    """Writes the page, and the README's figures if all of them were measured."""
    found = load(folder)
    PAGE.write_text(text(found), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    if readme != (new := with_claims(readme, found)):
        README.write_text(new, encoding="utf-8")


# ------------------------------------------------------------------ the README's figures


def with_claims(readme: str, found: Results) -> str:
    """The README's text with its figures as they were measured."""
    if any(claim.bench not in found for claim in CLAIMS):
        return readme
    lines = re.compile(r"^- .*numbers/#.*\n(?:- .*\n)+", re.MULTILINE)
    return lines.sub(lambda _: claims(found), readme)


def claims(found: Results) -> str:
    """The list of the README: a sentence for each claim."""
    lines: list[str] = []
    for claim in CLAIMS:
        rows = [(row_of(found, claim.bench, case), other) for case, other in claim.cases]
        figures = [(row["vs"][other] if other else row)["measured"] for row, other in rows]
        low, high = rows[0][0]["spread"] or (0, 0)
        is_unclear = verdict(rows[0][0]) == "unclear"
        spread = f" (quartiles {low:.3g} and {high:.3g}: inconclusive)" if is_unclear else ""
        link = f"{SITE}numbers/#{_anchor(found[claim.bench]['title'])}"
        lines.append(f"- {claim.sentence.format(*figures, link=link, spread=spread)}\n")
    return "".join(lines)


def _anchor(title: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


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

How treeshard compares with other libraries, and which of its own targets it misses. `make bench`
measures with eight simulated devices unless a title says otherwise, and writes all figures to
`benchmarks/results/`. Each figure is the median of several rounds. A ratio, such as `x Orbax`, is
computed in each round. Brackets show the target if a figure misses it, and also the quartiles if
the target is between them.

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
            parts.append(f"\n## {result['title']}\n\n{measured}.\n\n")
            parts.append(_table(rows))
    return "".join(parts)


def _shown(bench: str, rows: list[Any]) -> list[Any]:
    """The rows that miss a target or are quoted by the README, and up to three with those that are
    compared with another way or slower than it."""
    claims = [claim for claim in CLAIMS if claim.bench == bench]
    quoted = {case for claim in claims for case, _ in claim.cases}
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
    case, measured, quartiles, _, others = as_cells(row)
    if verdict(row):
        spread = f"quartiles {quartiles}; " if verdict(row) == "unclear" else ""
        measured = f"{measured} ({spread}target {row['reach']})"
    if isinstance(row["vs"], Mapping):
        ways = _ways(row["vs"]).items()
        others = "; ".join(f"{name}: {shown(x['measured'])}" for name, x in ways)
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

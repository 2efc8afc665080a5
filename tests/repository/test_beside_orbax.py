"""The page that compares checkpoints with Orbax's: its rows are those of the script."""

import re

from tools import beside_orbax


def test_the_page_has_every_row_with_an_outcome_of_both() -> None:
    lines = beside_orbax.written().splitlines()
    rows = [[x.strip() for x in line.strip("|").split(" | ")] for line in lines if "| " in line]
    head, *rows = [row for row in rows if not set("".join(row)) <= set("-|")]
    assert [row[:2] for row in rows] == [[row.what, row.promise] for row in beside_orbax.ROWS]
    assert head[2:] == ["what happened with Orbax", "what happened with treeshard"]
    for row in rows:
        assert all(row[2:]), row


def test_a_row_runs(tmp_path) -> None:
    """The one that needs no other process and no restore."""
    index = next(i for i, row in enumerate(beside_orbax.ROWS) if "replica" in row.what)
    page = beside_orbax.written()
    said = beside_orbax.outcome(index, "treeshard")
    assert said == "an error"
    assert re.search(rf"\| {beside_orbax.ROWS[index].what} \|.*\| {said} \|", page)

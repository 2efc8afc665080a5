"""docs/migrate.md: that each row of each section has a test, and how rows are held to theirs."""

import importlib
import re
from pathlib import Path

import pytest
from migration import PAGE, Table

SECTIONS = set(re.findall(r"^## (From .+)$", PAGE.read_text(), re.MULTILINE))

TEXT = """
| theirs | treeshard |
|---|---|
| `old(x)`<br>`older(x)` | `y = x + 1`<br>`y * 2`<br>A note may name `z`. |
| `gone(x)` | `x` |
"""


def test_each_row_of_each_section_is_tested() -> None:
    files = sorted(Path(__file__).parent.glob("test_migration_*.py"))
    tested = [importlib.import_module(file.stem).row for file in files]
    assert {table.section for table in tested} == SECTIONS
    for table in tested:
        table.check()


def test_a_row_whose_code_no_test_runs_is_seen(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    row = Table(page)

    @row("old(x)")
    def compares(ours, x):
        assert ours(x=x) == 8

    compares(x=3)
    with pytest.raises(AssertionError, match="rows without a test: ..gone"):
        row.check()

    @row("gone(x)")
    def forgets(ours):
        pass

    row.check()
    with pytest.raises(AssertionError, match="does not run the row's code: gone"):
        forgets()

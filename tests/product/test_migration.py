"""docs/migrate.md: that each row of each section has a test, and how rows are held to theirs."""

import importlib
import re
from pathlib import Path

import pytest
from migration import PAGE, Table

SECTIONS = set(re.findall(r"^## (From .+)$", PAGE.read_text(), re.MULTILINE))

TEXT = """
| there | here | what changes |
|---|---|---|
| `old(x)`<br>`older(x)` | `y = x + 1`<br>`y * 2` | It is said in words. |
| `gone(x)` | `x` | |

- `no(row)`
"""


@pytest.fixture
def row(tmp_path: Path) -> Table:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    return Table(page)


def test_each_row_of_each_section_is_tested() -> None:
    files = sorted(Path(__file__).parent.glob("test_migration_*.py"))
    tested = [importlib.import_module(file.stem).row for file in files]
    assert {table.section for table in tested} == SECTIONS
    for table in tested:
        table.check()


def test_a_rows_code_is_run(row: Table) -> None:
    assert list(row.rows) == ["old(x)", "gone(x)"]

    @row("old(x)")
    def test(ours, x):
        assert ours(x=x) == 8

    test(x=3)
    with pytest.raises(AssertionError):
        test(x=4)


def test_a_row_without_a_test_and_a_test_without_a_row_are_seen(row: Table) -> None:
    row("old(x)")
    with pytest.raises(AssertionError, match=re.escape("rows without a test: ['gone(x)']")):
        row.check()
    row("gone(x)")
    row.check()
    with pytest.raises(LookupError, match=re.escape("no row 'new(x)'. It has ['old(x)', 'gone")):
        row("new(x)")


def test_a_test_that_does_not_run_its_row_is_seen(row: Table) -> None:
    @row("old(x)", "gone(x)")
    def test(old, gone):
        old(x=1)

    with pytest.raises(AssertionError, match=r"does not run the row's code: gone\(x\)"):
        test()

"""docs/migrate.md: that each section has its tests, and how rows are held to theirs."""

import re
from pathlib import Path

import pytest
from migration import PAGE, Table

SECTIONS = re.findall(r"^## (From .+)$", PAGE.read_text(), re.MULTILINE)

TEXT = """
| there | here | what changes |
|---|---|---|
| `old(x)`<br>`older(x)` | `y = x + 1`<br>`y * 2` | It is said in words. |
| `gone(x)` | `x` | |

- `no(row)`
"""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    return Table(page)


def test_each_section_is_tested() -> None:
    tests = [file.read_text() for file in Path(__file__).parent.glob("test_migration_*.py")]
    assert len(SECTIONS) == len(tests)
    for section in SECTIONS:
        [text] = [text for text in tests if f'table("{section}")' in text]
        assert "TABLE.check()" in text


def test_a_rows_code_is_run(table: Table) -> None:
    assert list(table.rows) == ["old(x)", "gone(x)"]

    @table.row("old(x)")
    def test(ours, x):
        assert ours(x=x) == 8

    test(x=3)
    with pytest.raises(AssertionError):
        test(x=4)


def test_a_row_without_a_test_is_seen(table: Table) -> None:
    table.row("old(x)")
    with pytest.raises(AssertionError, match=re.escape("rows without a test: ['gone(x)']")):
        table.check()
    table.row("gone(x)")
    table.check()


def test_a_test_without_a_row_is_seen(table: Table) -> None:
    with pytest.raises(LookupError, match=re.escape("no row 'new(x)'. It has ['old(x)', 'gone")):
        table.row("new(x)")


def test_a_test_that_does_not_run_its_row_is_seen(table: Table) -> None:
    @table.row("gone(x)")
    def test(ours):
        pass

    with pytest.raises(AssertionError, match="does not run the row's code"):
        test()

"""docs/guide/explicit-axes.md has the table that errors are answered from."""

from files import DOCS

from treeshard.training._type_errors import TABLE


def table() -> str:
    lines = ["| fails | JAX says | write |", "|---|---|---|"]
    said = None
    for row in TABLE:
        says = "" if row.says == said else row.says or "anything else"
        lines.append(f"| `{row.fails}` | {says} | `{row.write}` |")
        said = row.says
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    page = DOCS["docs/guide/explicit-axes.md"]
    written = page.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    assert written.strip() == table()

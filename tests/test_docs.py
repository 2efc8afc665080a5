"""The pages of docs/ run, and print what they say they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from surface import surface

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if "```text" in page.read_text()],
                         ids=lambda page: page.stem)  # fmt: skip
def test_a_page_prints_what_it_says(page: Path) -> None:
    names: dict[str, object] = {}
    printed = io.StringIO()
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, page.name, "exec"), names)
        else:
            assert printed.getvalue().strip() == text.strip()


def test_the_page_of_broken_rules_is_there() -> None:
    assert "broken-rules" in [page.stem for page in PAGES]


def test_the_reference_lists_every_public_name() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(surface())

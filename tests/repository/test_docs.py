"""The pages run, and print what they say they print."""

import pkgutil
import re
from pathlib import Path

import command_line
import links
import notebook
import pytest
from files import DOCS, EXTRAS, README, ROOT, SOURCES
from files import PAGES as TEXTS
from helpers import OFFLOADS
from pages import as_printed, blocks, pages, run
from surface import surface

from treeshard import errors
from treeshard._core.specs import Adjustment
from treeshard._inspection import stability as _stability
from treeshard._planning.findings import Finding
from treeshard.communication._collectives import KINDS, RARE_KINDS
from treeshard.communication._differences import WORDS

PAGES = [str(page.relative_to(ROOT)) for page in pages()]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=OFFLOADS if "optimizer-state" in page else ()) for page in PAGES],
)
@pytest.mark.usefixtures("quick_compiles")
def test_a_page_prints_what_it_says(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for block, printed in list(run(ROOT / page)):
        assert as_printed(block, printed), f"{page}, line {block.line}, printed:\n{printed}"


WRONG = """
```python
raise ValueError("no")
```

```text
ValueError: no
```

```python
print(1 / 3)
```

```text
0.3...4
```

```python
1 / 0
```
"""


def test_what_a_page_says_wrongly_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(WRONG)
    blocks_run = run(page)
    assert as_printed(*next(blocks_run))
    assert not as_printed(*next(blocks_run))
    with pytest.raises(ZeroDivisionError):
        next(blocks_run)


def test_no_block_is_missed() -> None:
    for page, text in TEXTS.items():
        assert len(blocks(text)) == len(re.findall(r"```(?:python|console)", text)), page


def test_the_notebook_is_the_quick_start() -> None:
    page = notebook.PAGE.read_text()
    assert notebook.NOTEBOOK.read_text() == notebook.notebook(page), "python tools/notebook.py"


def test_the_command_line_page_is_what_the_parsers_say() -> None:
    page = command_line.PAGE.read_text()
    assert command_line.page(page) == page, "python tools/command_line.py"


def test_links_of_pages_outside_the_site_exist() -> None:
    pages_outside = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    assert all("://" in target for target in linked(README))  # an index shows it alone
    for target in [x for page in pages_outside for x in linked((ROOT / page).read_text())]:
        file, _, anchor = in_the_repository(target).partition("#")
        if "://" not in file:
            assert (ROOT / file).is_file(), target
            titles = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.MULTILINE)
            assert not anchor or anchor in {slug(title) for title in titles}, target


def linked(text: str) -> list[str]:
    """The addresses of `[text](address)` and `[name]: address`."""
    prose = re.sub(r"(?s)```.*?```", "", text)
    found = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", prose, re.MULTILINE)
    return [inside or below for inside, below in found]


def in_the_repository(url: str) -> str:
    """The file that the address of a page, a source or a picture of ours shows."""
    for host in ("https://github.com/treeshard/treeshard/blob/main/", RAW):
        if url.startswith(host):
            return url.removeprefix(host)
    if url.startswith(SITE):
        page, mark, anchor = url.removeprefix(SITE).partition("#")
        file = f"docs/{page.rstrip('/')}.md" if page else "docs/index.md"
        inside = f"docs/{page}index.md"
        return (inside if (ROOT / inside).exists() else file) + mark + anchor
    return url


SITE = "https://treeshard.github.io/treeshard/"
RAW = "https://raw.githubusercontent.com/treeshard/treeshard/main/"


def slug(title: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def test_the_first_page_lists_the_extras() -> None:
    """What messages and pages tell to type is on the page on installing, letter for letter."""
    listed = re.findall(r"`(pip install 'treeshard\[\w+\]')`", DOCS["docs/quick-start.md"])
    extras = EXTRAS.keys() - {"bench", "dev", "docs", "stores"}
    assert sorted(listed) == sorted(f"pip install 'treeshard[{extra}]'" for extra in extras)
    for path, text in {**SOURCES, **TEXTS}.items():
        for command in re.findall(r"pip install '?\"?treeshard\S*", text):
            said = re.match(r"pip install 'treeshard\[(\w+|\{extra\})\]'", command)
            assert said, f"{path}: {command}"
            assert said[1] in {*extras, "{extra}"}, f"{path}: {command}"


def test_the_navigation_lists_every_page_() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"- (.+)$", nav, re.MULTILINE)
    listed = [entry for entry in entries if not entry.endswith(":")]
    assert sorted(f"docs/{page}" for page in listed) == sorted(DOCS)


def test_the_page_of_errors_has_every_class_and_every_code() -> None:
    docstrings = f"{Finding.__doc__} {Adjustment.__doc__}"
    codes = set(re.findall(r'`"([a-z-]+)"`', docstrings)) - {"error", "warning", "axis-is-manual"}
    codes |= {row.partition(",")[0] for row in WORDS} | _stability._FIXES.keys()
    messages = re.findall(r"^\| (`[^|]+) \|", DOCS["docs/errors.md"], re.MULTILINE)
    listed = [name for cell in messages for name in re.findall(r"`([^`]+)`", cell)]
    assert {*errors.__all__, *codes} - {*listed, "TreeShardError"} == set()
    for name in {*listed} - codes - {*KINDS, *RARE_KINDS}:
        assert any(name in source for source in SOURCES.values()), name


def test_the_reference_lists_every_public_name() -> None:
    pages = "".join(text for page, text in DOCS.items() if page.startswith("docs/reference/"))
    listed = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert sorted(listed) == sorted(surface())


def test_the_names_that_pages_link_are_those_of_the_libraries() -> None:
    for name in links.ADDRESSES:
        pkgutil.resolve_name(name)
    linked = {
        name or text
        for page in DOCS.values()
        for text, name in re.findall(r"\[`([^`\n]+)`\]\[([\w.]*)\]", page)
    }
    assert "jax.jit" in linked
    ours = surface()
    for name in linked - links.ADDRESSES.keys() - ours.keys():
        owner, _, method = name.rpartition(".")
        assert hasattr(ours[owner], method), name

"""The pages run, and print what they say they print."""

import ast
import json
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
from treeshard._core.specs import MISFITS
from treeshard._inspection import stability as _stability
from treeshard._planning import findings as _findings
from treeshard._planning import lint
from treeshard.communication._collectives import KINDS, RARE_KINDS
from treeshard.communication._differences import WORDS

PAGES = pages()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=OFFLOADS if page.stem == "optimizer-state" else (), id=name)
        for page in PAGES
        for name in [str(page.relative_to(ROOT))]
    ],
)
@pytest.mark.usefixtures("compile_cache", "quick_compiles")
def test_a_page_prints_what_it_says(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ran = list(run(page))
    for block, printed in ran:
        assert as_printed(block, printed), f"{page}, line {block.line}, printed:\n{printed}"


def test_pages_are_found() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "docs/index.md", "docs/tutorial.md", "docs/how-to/equinox.md"} <= names


WRONG = """
<!--
```python
import warnings
import treeshard as ts
shown = 3
```
-->
```python
print(shown)
warnings.warn("mind", ts.ShardingWarning)
raise ValueError("no")
```

```text
3
ShardingWarning: mind
ValueError: no
```

- in a list:

  ```python
  print(1 / 3)
  ```

  ```text
  0.3...4
  ```
"""


def test_what_a_page_says_wrongly_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(WRONG)
    found = [(as_printed(block, printed), printed) for block, printed in run(page)]
    assert found == [
        (True, ""),
        (True, "3\nShardingWarning: mind\nValueError: no"),
        (False, "0.3333333333333333"),
    ]


def test_an_error_that_a_page_does_not_show_is_raised(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n1 / 0\n```\n```text\nOther: no\n```\n")
    with pytest.raises(ZeroDivisionError):
        list(run(page))


def test_no_block_is_missed() -> None:
    for page, text in TEXTS.items():
        assert len(blocks(text)) == len(re.findall(r"```(?:python|console)", text)), page


def test_what_one_compiler_does_is_not_said_of_all() -> None:
    examples = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    reduces = r"the\s+compiler\b[^()]{0,80}\b(all-reduc|reduce-scatter|scatters|widen)"
    said = [
        (name, sentence)
        for name, text in {**TEXTS, **SOURCES, **examples}.items()
        for sentence in re.split(r"\n\s*\n|(?<=[.!?|])\s", text)
        if re.search(reduces, sentence, re.I)
    ]
    assert said
    assert not [pair for pair in said if not re.search(r"CPU|TPU|GPU", pair[1])]


def test_the_notebook_is_the_quick_start() -> None:
    page = notebook.PAGE.read_text()
    assert notebook.NOTEBOOK.read_text() == notebook.notebook(page), "python tools/notebook.py"
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code[1:] == [block.code for block in blocks(page)]
    assert code[0].startswith("# ")  # how to install; a reader removes the mark
    prose = "".join(line for cell in cells for line in cell["source"])
    assert ".md)" not in prose
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_command_line_page_is_what_the_parsers_say() -> None:
    page = command_line.PAGE.read_text()
    assert command_line.page(page) == page, "python tools/command_line.py"
    commands = re.findall(r"^## `treeshard (\w+)`$", page, re.MULTILINE)
    assert {"plan", "inspect", "verify", "export"} <= {*commands}


def test_a_command_on_a_page_runs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ treeshard plan --shapes no.json --rules no --mesh x=1\n```\n")
    [(block, printed)] = run(page)
    assert "main(['plan', '--shapes', 'no.json'" in block.code
    assert printed == ""  # the error goes to the other stream


def test_the_readme_hides_no_code() -> None:
    """A reader can paste its first block and run it; what it prints follows."""
    assert "```" not in "".join(re.findall(r"<!--.*?-->", README, re.DOTALL))
    first = blocks(README)[0]
    assert first.printed
    assert len(first.code.splitlines()) <= 25
    assert "ts.match_partition_rules(" in first.code
    assert "ts.unshard(" in blocks(README)[1].code


def test_the_readme_is_read_in_a_minute() -> None:
    shown = re.sub(r"\]\([^)]+\)", "]", README)
    assert len(shown.split()) <= 550
    assert README.index("pip install") < README.index("```python")


def test_links_of_pages_outside_the_site_exist() -> None:
    pages_outside = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    for target in [x for page in pages_outside for x in linked((ROOT / page).read_text())]:
        file, _, anchor = in_the_repository(target).partition("#")
        if "://" not in file:
            assert (ROOT / file).is_file(), target
            titles = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.MULTILINE)
            assert not anchor or anchor in {slug(title) for title in titles}, target


def linked(text: str) -> list[str]:
    """The addresses of `[text](address)` and `[name]: address`."""
    found = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
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


def test_the_readme_reads_alike_on_a_package_index() -> None:
    """An index shows it without the files beside it."""
    assert [target for target in linked(README) if "://" not in target] == []
    defined = set(re.findall(r"^\[([^\]]+)\]: ", README, re.MULTILINE))
    prose = re.sub(r"(?s)```.*?```", "", README)
    assert set(re.findall(r"\]\[([^\]]+)\]", prose)) == defined


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


def test_the_navigation_lists_every_page_by_its_title() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"- (.+)$", nav, re.MULTILINE)
    listed = [entry for entry in entries if not entry.endswith(":")]
    assert sorted(f"docs/{page}" for page in listed) == sorted(DOCS), (
        "a page is listed once, and without a label: its title is the label"
    )
    titles = [DOCS[f"docs/{page}"].partition("\n")[0] for page in listed]
    assert all(title.startswith("# ") for title in titles)
    assert len(set(titles)) == len(titles)


WITHOUT_CODE = {
    "errors.md": "a table; the messages are tested where they are raised",
    "guide/beside-plain-jax.md": "benchmarks/plain_jax.py compiles it",
    "migrate.md": "test_migration_* run its tables",
    "numbers.md": "written by the benchmarks",
    "versions.md": "the versions are what `make test-floor` and `make test-newest` install",
}


def test_a_page_has_code_that_runs_or_a_reason() -> None:
    without = {page.removeprefix("docs/") for page, text in DOCS.items() if not blocks(text)}
    written = {page for page in without if not page.startswith("reference/")}  # docstrings' run
    assert written == set(WITHOUT_CODE)


def test_the_page_of_errors_has_every_class_and_every_code() -> None:
    codes = {row.partition(",")[0] for row in _findings._WORDS} | MISFITS | lint.RELATED
    codes |= {row.partition(",")[0] for row in WORDS} | _stability._FIXES.keys()
    listed = re.findall(r"^\| `([^`]+)`", DOCS["docs/errors.md"], re.MULTILINE)
    assert {*errors.__all__, *codes} - {*listed, "TreeShardError"} == set()
    for name in {*listed} - codes - {*KINDS, *RARE_KINDS}:
        assert any(name in source for source in SOURCES.values()), name


def test_cells_are_short_enough_to_read() -> None:
    """What a row of a migration table has to say beyond this stands under the table."""
    for line in DOCS["docs/migrate.md"].splitlines():
        if line.startswith("| "):
            assert max(len(cell) for cell in line.split(" | ")) <= 250, line


def test_code_that_does_not_run_is_code() -> None:
    """```py blocks need packages that the tests do without; the page says so."""
    for page, text in DOCS.items():
        for code in re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            ast.parse(code)
            assert "not run by" in " ".join(text.split()), page


def test_the_reference_lists_every_public_name() -> None:
    pages = "".join(text for page, text in DOCS.items() if page.startswith("docs/reference/"))
    listed = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert sorted(listed) == sorted(surface())


def test_the_names_that_pages_link_are_those_of_the_libraries() -> None:
    listed = list(links.ADDRESSES)
    assert listed == sorted(listed)
    for name, address in links.ADDRESSES.items():
        pkgutil.resolve_name(name)
        assert re.fullmatch(r"https://[\w.-]+/[\w./#-]+", address), name
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


def test_the_tutorial_is_the_demo() -> None:
    """What the tutorial defines, and the demo too, is the same in both."""
    page = "\n".join(block.code for block in blocks(DOCS["docs/tutorial.md"]))
    told = _definitions(page)
    demo = _definitions((ROOT / "examples" / "train_fsdp.py").read_text())
    shared = told.keys() & demo.keys()
    assert {"RULES", "Transformer", "State", "make_init", "make_train_step"} <= shared
    assert {name: told[name] for name in shared} == {name: demo[name] for name in shared}


def _definitions(code: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.isupper():
                found[name] = ast.unparse(node)
    return found

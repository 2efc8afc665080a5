"""docs/errors.md, made of the catalogue: `python tests/errors_page.py` writes it."""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent, fill

from catalogue import GROUPS, OPS, REASONS, SETUP, Entry, Group
from pages import ROOT, run

PAGE = ROOT / "docs" / "errors.md"

HEAD = """# Errors and findings

Everything that has a name in what treeshard raises, warns of or reports, by what you see. Each has
code that provokes it, what that prints, and what to do instead.
"""


def printed(group: Group, entry: Entry) -> str:
    """What an entry prints, by itself; raises what the page does not show."""
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "entry.md"
        wrong = [_code(entry.wrong), _text(f"{entry.shows or entry.name}: ...")]
        alone.write_text("\n".join([_code(SETUP), _code(group.setup), *wrong, _code(entry.right)]))
        *_, (_, said), (_, nothing) = run(alone)
    assert not nothing, f"what is right prints: {nothing}"
    return _portable(said)


def _portable(text: str) -> str:
    """Without what depends on the compiler, and on where the page lies."""
    text = re.sub(r"(, in \w+\(\w*\)/).*, at .*", r"\1..., at ...", text)
    text = re.sub(r"\S+/\w+\.md:\d+|(?<=CRC-32 )\d+", "...", text)
    return re.sub(r"/\S+/(?=runs/)", ".../", text)


def heading(entry: Entry) -> str:
    """The line that a section begins with."""
    return f"### `{entry.name}`" + (f": {entry.about}" if entry.about else "")


def section(group: Group, entry: Entry) -> str:
    """An entry, with what it prints."""
    said = printed(group, entry)
    parts = [f"{heading(entry)}\n", _prose(entry.means), _code(entry.wrong), _text(said)]
    return "\n".join([*parts, *(["Instead:\n", _code(entry.right)] if entry.right else [])])


def page(section: Callable[[Group, Entry], str] = section) -> str:
    """The whole page."""
    parts = [HEAD, _contents(), "All of it begins with\n", _code(SETUP)]
    for group in GROUPS:
        parts += [f"## {group.title}\n"]
        parts += [_prose(group.about)] if group.about else []
        parts += [_code(group.setup)] if group.setup else []
        parts += [section(group, entry) for entry in group.entries]
    parts += ["## What a comparison lists\n", _table("a `Collective`, or a planned transfer", OPS)]
    parts += [_table("what a transfer is planned for", REASONS)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _contents() -> str:
    """A row for each symptom, with links to its entries."""
    rows = ["| you see | names |", "|---|---|"]
    for group in GROUPS:
        links = [f"[`{entry.name}`](#{anchor(entry)})" for entry in group.entries]
        names = {entry.name: link for entry, link in zip(group.entries, links, strict=True)}
        rows.append(f"| {group.title} | {', '.join(names.values())} |")
    return "\n".join(rows) + "\n"


def anchor(entry: Entry) -> str:
    """Where the heading of an entry is linked to, as mkdocs has it."""
    text = f"{entry.name} {entry.about}".lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip())


def _prose(text: str) -> str:
    return fill(text, 110, break_long_words=False, break_on_hyphens=False) + "\n"


def _code(code: str) -> str:
    return f"```python\n{dedent(code).strip()}\n```\n"


def _text(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _table(what: str, rows: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {means} |" for name, means in rows.items()]
    return "\n".join([f"| {what} | |", "|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

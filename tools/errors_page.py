"""Writes the pages about errors from the catalogue: `python tools/errors_page.py`.

These are docs/errors.md, and the ends of pages that are written by hand.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent, fill

from catalogue import GROUPS, OPS, REASONS, SETUP, Entry, Group
from pages import END, ROOT, run

INDEX = ROOT / "docs" / "errors.md"
HEADING = "## What each message means\n"

HEAD = """# Errors and findings

Every error, warning, finding and code of treeshard, by symptom, with an example of the message.
Long messages end in `...` here; in full, they say what to do. The search finds names too.
"""
_WORDS = 25


def printed(group: Group, entry: Entry) -> str:
    """What the code of an entry prints. Raises errors that the page does not show."""
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "entry.md"
        wrong = [_code(entry.wrong), _text(f"{entry.shows or entry.name}: ...")]
        alone.write_text("\n".join([_code(SETUP), _code(group.setup), *wrong, _code(entry.right)]))
        *_, (_, output), (_, unexpected) = run(alone)
    assert not unexpected, f"the correct code prints: {unexpected}"
    return _portable(output)


def _portable(text: str) -> str:
    """The text without parts that depend on the compiler or on the machine."""
    text = text.replace(", inserted by the partitioner", "")  # only newer versions of JAX know
    text = re.sub(r"(, in \w+\(\w*\)/).*, at .*", r"\1..., at ...", text)
    text = re.sub(r"(?m)(?<= )0\.\d+%$", "...", text)  # errors that would have been seen
    text = re.sub(r"\S+/\w+\.md:\d+|(?<=CRC-32 )\d+", "...", text)
    return re.sub(r"/\S+/(?=runs/)", ".../", text)


def heading(group: Group, entry: Entry) -> str:
    """The first line of a section."""
    return f"### `{entry.name}`" + (f": {entry.about}" if entry.about else "")


def section(group: Group, entry: Entry) -> str:
    """The section of an entry: what it means, and the message that its code prints."""
    message = _message(entry.name, printed(group, entry))
    parts = [f"{heading(group, entry)}\n", _prose(entry.means)]
    return "\n".join([*parts, _text(message)] if message else parts)


def _message(name: str, output: str) -> str:
    """The lines of an output from a name on, without the list of ops below a difference."""
    lines = [line for line in output.splitlines() if not line.startswith("    ")]
    first = next((i for i, line in enumerate(lines) if name in line), len(lines))
    return _shortened(lines[first:])


def _shortened(lines: list[str]) -> str:
    """The first sentences of a message, about `_WORDS` words of them."""
    shown: list[str] = []
    left = _WORDS
    for line in lines:
        sentences = re.split(r"(?<=[.?]) (?=[A-Z`])", line)
        counts = [len(sentence.split()) for sentence in sentences]
        kept = next((i for i in range(len(counts)) if sum(counts[: i + 1]) > left), len(counts))
        kept = kept if shown else max(kept, 1)
        if kept:
            shown.append(" ".join([*sentences[:kept], *["..."] * (kept < len(counts))]))
        if kept < len(counts):
            return "\n".join(shown if kept else [*shown, "..."])
        left -= sum(counts)
    return "\n".join(shown)


def pages(section: Callable[[Group, Entry], str] = section) -> dict[Path, str]:
    """Every page, by its file."""
    by_hand = [group for group in GROUPS if not whole(group)]
    return {INDEX: _index(section), **{file(group): page(group, section) for group in by_hand}}


def file(group: Group) -> Path:
    """The file of a group's page."""
    return INDEX.parent / f"{group.page}.md"


def whole(group: Group) -> bool:
    """Whether all of a group's page is written here."""
    return file(group) == INDEX


def page(group: Group, section: Callable[[Group, Entry], str] = section) -> str:
    """The page of a group that ends a page written by hand."""
    parts = [_by_hand(group), END, HEADING, *_sections(group, section)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _sections(group: Group, section: Callable[[Group, Entry], str]) -> list[str]:
    about = [_prose(group.about)] if group.about else []
    return about + [section(group, entry) for entry in group.entries]


def _by_hand(group: Group) -> str:
    """What comes before the mark in a page that is written by hand."""
    text, mark, _ = file(group).read_text().partition(END)
    if not mark:
        raise ValueError(f"{file(group)} has no line {END!r}")
    return text.rstrip("\n") + "\n"


def _index(section: Callable[[Group, Entry], str]) -> str:
    parts = [HEAD, _contents()]
    for group in filter(whole, GROUPS):
        parts += [f"## {group.title}\n", *_sections(group, section)]
    parts += ["## The words of a comparison\n"]
    parts += [_table("a `Collective` or a planned transfer", OPS)]
    parts += [_table("why a transfer is planned", REASONS)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _contents() -> str:
    """A table of symptoms, with links to their pages and entries."""
    rows = ["| symptom | names |", "|---|---|"]
    for group in GROUPS:
        page = "" if whole(group) else str(file(group).relative_to(INDEX.parent))
        links = [f"[`{entry.name}`]({page}#{anchor(entry)})" for entry in group.entries]
        names = {entry.name: link for entry, link in zip(group.entries, links, strict=True)}
        top = page or f"#{slug(group.title)}"
        rows.append(f"| [{group.title}]({top}) | {', '.join(names.values())} |")
    return "\n".join(rows) + "\n"


def anchor(entry: Entry) -> str:
    """The anchor that mkdocs gives to the heading of an entry."""
    return slug(f"{entry.name} {entry.about}")


def slug(title: str) -> str:
    """The anchor that mkdocs gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


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
    for path, text in pages().items():
        path.write_text(text)

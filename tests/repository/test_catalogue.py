"""The pages about errors: every entry prints what its section shows, and no name is missing."""

import ast
import inspect
import re
from typing import Any

import errors_page
import pytest
from catalogue import GROUPS, OPS, REASONS, Entry, Group
from files import SOURCES, parsed
from surface import surface

import treeshard as ts
from treeshard import errors as _errors
from treeshard._core import specs as _specs
from treeshard._inspection import stability as _stability
from treeshard._planning import findings as _findings
from treeshard._planning import lint as _lint
from treeshard.communication._collectives import KINDS, RARE_KINDS
from treeshard.communication._differences import WORDS, Unplanned

ENTRIES = [(group, entry) for group in GROUPS for entry in group.entries]
WRITE = "A page about errors is out of date: run `python tools/errors_page.py`."


def is_class(name: str) -> bool:
    return hasattr(_errors, name)


# ------------------------------------------------------------------ the page


def sections(group: Group) -> dict[str, str]:
    """The sections of a group's page by their first line."""
    text = errors_page.file(group).read_text()
    text = text if errors_page.whole(group) else text.partition(errors_page.END)[2]
    parts = re.split(r"^(?=###? )", text, flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.strip("\n") for part in parts[1:]}


@pytest.mark.parametrize(
    ("group", "entry"), ENTRIES, ids=[f"{entry.name} {entry.about}".strip() for _, entry in ENTRIES]
)
def test_an_entry_prints_what_its_section_shows(group: Group, entry: Entry) -> None:
    text = errors_page.section(group, entry).strip("\n")
    assert sections(group).get(text.partition("\n")[0]) == text, WRITE


@pytest.mark.parametrize(
    "name", [entry.name for _, entry in ENTRIES if not entry.shows], ids=lambda name: name
)
def test_the_output_starts_with_the_name(name: str) -> None:
    """The name is where a class or a code is printed, not somewhere in the text."""
    found = [section for group in GROUPS for section in sections(group).items()]
    texts = [text for title, text in found if f"`{name}`" in title]
    start = "" if is_class(name) else r"((error|warning) |[\w/]+: )?"
    for text in texts:
        output = text.split("```text\n")[1].split("\n```")[0]
        assert re.search(rf"^{start}{name}\b(?!-)", output, re.MULTILINE), output


def test_codes_that_are_not_raised_are_asserted() -> None:
    """For a code that is reported, not raised, correct code proves nothing unless it asserts."""
    for _, entry in ENTRIES:
        if entry.right and not is_class(entry.name):
            assert "assert " in entry.right, entry.name


def test_the_rest_of_the_pages() -> None:
    def section(group: Group, entry: Entry) -> str:
        return sections(group).get(errors_page.heading(group, entry), "missing") + "\n"

    written = errors_page.pages(section)
    for path, text in written.items():
        assert path.read_text() == text, WRITE


def test_anchors_are_unique() -> None:
    anchors = [(group.page, errors_page.anchor(entry)) for group, entry in ENTRIES]
    assert len(set(anchors)) == len(anchors)


# ------------------------------------------------------------------ completeness


def first_arguments(function: str) -> set[str]:
    """The strings in the first argument of all calls of a function: the codes that it gets."""
    strings: set[str] = set()
    for source in [text for text in SOURCES.values() if function in text]:
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
                if called == function:
                    parts = (getattr(x, "value", None) for x in ast.walk(node.args[0]))
                    strings.update(part for part in parts if isinstance(part, str))
    return strings


def in_docstring(thing: Any, attribute: str) -> set[str]:
    """The strings that the docstring of a class names as values of an attribute."""
    about = re.split(r"\n\s+(?=\w+: )", inspect.getdoc(thing) or "")
    [line] = [part for part in about if part.startswith(f"{attribute}: ")]
    return set(re.findall(r'`"([\w, -]+)"`', line))


NAMES = {entry.name for _, entry in ENTRIES}
# Used inside `analyze_sharding_strategy`; never returned.
INTERNAL = {"unconstrained"}


def test_no_class_is_missing() -> None:
    classes = {
        name
        for name, thing in vars(_errors).items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    }
    public = {thing.__name__ for thing in surface().values() if isinstance(thing, type)}
    assert public & classes == classes - {"UnknownAxisInRuleError", "UnknownAxisInSpecError"}
    assert classes - NAMES == set()


# The code of a misfit is the kind of its adjustment.
FINDINGS = {row.partition(",")[0] for row in _findings._WORDS} | _specs.MISFITS | _lint.RELATED
UNPLANNED = {case.partition(",")[0] for case in WORDS}


@pytest.mark.parametrize(
    ("codes", "record", "attribute"),
    [
        pytest.param(FINDINGS, ts.Finding, "code", id="findings"),
        pytest.param(first_arguments("Adjustment") - INTERNAL, ts.Adjustment, "kind", id="specs"),
        pytest.param(UNPLANNED, Unplanned, "code", id="comparisons"),
        pytest.param({*_stability._FIXES}, _stability.LeafDifference, "what", id="differences"),
    ],
)
def test_no_code_is_missing(codes: set[str], record: type, attribute: str) -> None:
    assert codes
    assert codes - NAMES == set()
    assert in_docstring(record, attribute) == codes


def test_no_word_of_a_comparison_is_missing() -> None:
    assert list(OPS) == [*KINDS, *RARE_KINDS, "unknown"]
    assert in_docstring(ts.Collective, "kind") == set(OPS)
    assert in_docstring(ts.PlannedTransfer, "why") == set(REASONS)


def test_every_name_of_the_catalogue_is_in_the_sources() -> None:
    for name in NAMES:
        assert any(name in source for source in SOURCES.values()), name

"""Specs, names and dtypes from text: literals only."""

import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.text import (
    describe_groups,
    group_by_fact,
    named_processes,
    parse_bytes,
    parse_dtype,
    parse_names,
    parse_spec,
)


@pytest.mark.parametrize(
    "spec",
    [P(), P(None), P("a", None, ("b", "c")), P(("a",))],
)
def test_specs_are_read_from_their_repr(spec) -> None:
    assert parse_spec(repr(spec)) == spec
    assert parse_spec("P(['a', 'b'])") == P(("a", "b"))


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_spec, "P(", "'P(' cannot be parsed: '(' was never closed"),
        (parse_spec, "P(__import__('os'))", "\"__import__('os')\" is not a literal."),
        (parse_spec, "P('a', x=3)", "is not a spec. Write it as P('data', None,"),
        (parse_spec, "Q('a')", "is not a spec. Write it as P('data', None,"),
        (parse_spec, "P(3)", "3 is neither an axis name nor a tuple of them."),
        (parse_names, "('a', 3)", "\"('a', 3)\" is not a tuple of names. Write it as ('batch', "),
        (parse_dtype, "flaot32", "'flaot32' is not a dtype."),
    ],
)
def test_literals_that_cannot_be_read(parse, text, message) -> None:
    with pytest.raises(ts.FormatError) as raised:
        parse(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("2kB", 2000), ("1TiB", 2**40)],
)
def test_amounts_of_memory_are_read(text, count) -> None:
    assert parse_bytes(text) == count


def test_what_processes_say_is_grouped_and_counted() -> None:
    row = {i: "full" if i % 2 else f"error {i}" for i in range(20)}
    assert group_by_fact({0: "a", 1: "b", 2: "a"}) == {"a": "processes 0, 2", "b": "process 1"}
    assert describe_groups(row).endswith("error 12 on process 12; and 3 more")
    assert named_processes([0, 1, 2, 5, 7]) == "processes 0 to 2, 5, 7"

"""Specs, names and dtypes from text: literals only."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.text import parse_bytes, parse_dtype, parse_names, parse_spec


@pytest.mark.parametrize(
    "spec",
    [P(), P(None), P("a", None, ("b", "c")), P(P.UNCONSTRAINED, "a"), P("a", unreduced={"b"})],
)
def test_specs_are_read_from_their_repr(spec) -> None:
    assert parse_spec(repr(spec)) == spec
    assert parse_spec("P(['a', 'b'])") == P(("a", "b"))


def test_kinds_of_unreduced_axes_are_read() -> None:
    # JAX 0.11 and newer print it; older ones know sums only.
    assert parse_spec("P('a', unreduced={'b'}, unreduced_kind=sum)") == P("a", unreduced={"b"})
    if hasattr(jax.sharding, "UnreducedKind"):
        largest = P("a", unreduced={"b"}, unreduced_kind=jax.sharding.UnreducedKind.max)
        assert parse_spec(repr(largest)) == largest != P("a", unreduced={"b"})


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_spec, "P(", "'P(' cannot be parsed: '(' was never closed"),
        (parse_spec, "P(__import__('os'))", "\"__import__('os')\" is not a literal."),
        (parse_spec, "P('a', x=3)", "is not a spec"),
        (parse_spec, "P(unreduced={'a'}, unreduced_kind=avg)", "JAX has no unreduced_kind 'avg'."),
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

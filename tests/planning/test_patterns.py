"""What is read from patterns without running them."""

import re

import pytest

from treeshard._planning.tree_walk import read_pattern, zeroed


@pytest.mark.parametrize(
    "pattern",
    [
        "weight", "", ".*", r"^layers/\d+/", r"layers/[0-9]{2}/w$", r"[+-9]", r"[a-f]", r"[\w]+",
        r"\D", r"(?i)NORM", r"(a|b)?", r"(?=w)w", r"(?<!/)w", r"(?>w+)", r"w*+", r"w+?", r"\bw\B",
        r"[^/]*", "(?x) w # 12", r"(?i:w)", "[^a]", "[^0-9]",
    ],
)  # fmt: skip
def test_patterns_that_treat_digits_alike(pattern) -> None:
    assert not read_pattern(re.compile(pattern)).tells_digits_apart


@pytest.mark.parametrize(
    "pattern",
    [
        "0", "layers/1", "[0-5]", "[^0]", "[+-5]", "[a7]", r"(\w)\1", r"(?P<x>.)(?P=x)", "(?=3)",
        "(?!3)", "(?<=3)w", "(a|b9)", "(9)?", "9*", "(?:9)*?", "9?+", "(?>9)", r"a{1}\{1}",
        r"\x31", r"(?x)#[0-5]" "\n[0-5]", "[+-0-9]", "(a)?(?(1)b|c)", "[^1-9]",
    ],
)  # fmt: skip
def test_patterns_that_tell_digits_apart(pattern) -> None:
    assert read_pattern(re.compile(pattern)).tells_digits_apart


@pytest.mark.parametrize(
    "pattern",
    ["w1", "1w", "feed_forward/w1/kernel", "fc[12]/", "w[^1]", "(w1|w2)$", "x(?!w1)", "(?:w1)+"],
)
def test_digits_beside_a_letter_are_no_index(pattern) -> None:
    reading = read_pattern(re.compile(pattern))
    assert reading.tells_digits_apart
    assert not reading.tells_indices_apart


@pytest.mark.parametrize(
    "pattern",
    [
        "0",
        "layers/1",
        "/1/",
        "1/w",
        "w?1",
        "w1*",
        "w(1)",
        "(?<=w)1",
        "[wv]1",
        "w12",
        r"(\w)\1",
        "1$",
    ],
)
def test_digits_that_may_be_an_index(pattern) -> None:
    assert read_pattern(re.compile(pattern)).tells_indices_apart


@pytest.mark.parametrize(
    ("pattern", "needs"),
    [
        ("attn/q/weight", ("attn/q/weight",)),
        ("^attn$", ("attn",)),
        ("norm|bias", ("norm", "bias")),
        ("norm|.*", ("",)),
        ("attn/(q|k|v)_proj/w", ("_proj/w",)),
        ("(?:attn)(/)q", ("attn/q",)),
        ("w(eight)?", ("w",)),
        ("(weight)+s", ("weight",)),
        ("a(?=long)b", ("ab",)),
        ("(?i)norm", ("",)),
        ("x(?i:norm)", ("x",)),
        (".*", ("",)),
        (r"layers/\d+/attention", ("/attention",)),
        ("(alpha|beta)x", ("alpha", "beta")),
    ],
)
def test_what_a_match_needs(pattern, needs) -> None:
    assert read_pattern(re.compile(pattern)).needs == needs


def test_flags_given_apart_count() -> None:
    assert read_pattern(re.compile("norm", re.IGNORECASE)).needs == ("",)
    assert not read_pattern(re.compile("w # 12", re.VERBOSE)).tells_digits_apart


def test_what_cannot_be_read_is_taken_for_anything(monkeypatch) -> None:
    pattern = re.compile("not read before")
    monkeypatch.setattr(re._parser, "parse", None)  # pyright: ignore
    assert read_pattern(pattern) == (True, True, ("",))


def test_zeroed_keeps_the_length() -> None:
    assert zeroed("layers/12/w9") == "layers/00/w0"

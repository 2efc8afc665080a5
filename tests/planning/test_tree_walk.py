"""Keys of paths, and which patterns may be matched on them."""

import re

import jax
import pytest

from treeshard._planning.tree_walk import name_leaves, needed_text, tells_indices_apart


@pytest.mark.parametrize(
    "pattern",
    [
        "weight", "", ".*", r"^layers/\d+/", r"layers/[0-9]{2}/w$", r"[a-f]", r"[\w]+", r"\D",
        "(?i)NORM", "(a|b)?", "(?=w)w", "(?<!/)w", "(?>w+)", "w*+", "w+?", r"\bw\B", "[^/]*",
        "[^a]", "[^0-9]", "[]a]", r"layers/\d/\.w", r"[\]a]w",
    ],
)  # fmt: skip
def test_patterns_without_digits_match_keys(pattern) -> None:
    assert not tells_indices_apart(re.compile(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        "w1", "w12", "feed_forward/w1/kernel", "fc[12]/", "w[^1]", "(w1|w2)$", "x(?!w1)",
        "(?:w1)+", "(?P<w1>a)",
    ],
)  # fmt: skip
def test_digits_after_a_letter_are_not_an_index(pattern) -> None:
    assert not tells_indices_apart(re.compile(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        "0", "layers/1", "/1/", "1/w", "1$", "w_1", "[0-5]", "[^0]", "[^1-9]", "[+-5]", "[+-0-9]",
        "[a7]", "[^]1]", "w?1", "w1*", "w(1)", "(?<=w)1", "[wv]1", r"\w1", "w[1/]{2}", "(a|/9)",
        "(9)?", "(?>9)", "(?=3)", "(?!3)", r"a{1}\{1}", "(?i:1)",
    ],
)  # fmt: skip
def test_digits_that_may_be_an_index(pattern) -> None:
    assert tells_indices_apart(re.compile(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w)/\1", "(?P<x>.)/(?P=x)", "(a)?(?(1)b|c)", r"\x31", r"a\x31", r"[\x31]",
        r"\N{DIGIT ONE}", "(?#w1)1", "(?x)w1", "(?x:w 1)",
    ],
)  # fmt: skip
def test_patterns_that_are_not_understood_are_matched_on_every_path(pattern) -> None:
    assert tells_indices_apart(re.compile(pattern))


def test_flags_given_apart_count() -> None:
    assert tells_indices_apart(re.compile("w 1", re.VERBOSE))


def test_keys_have_zeros_for_indices() -> None:
    tree = {
        "layers": [{"w1": 0, "b": 0}] * 11,
        "layer_12": {"1w": 0, "w_3": {4: 0}},
        "a/7": 0,
        "norm": 0,
    }
    names = name_leaves(tree, jax.tree.structure(tree))
    keys = dict(zip(names.paths, names.keys, strict=True))
    assert keys["layers/3/w1"] == "layers/0/w1"
    assert keys["layers/10/b"] == "layers/00/b"
    assert keys["layer_12/1w"] == "layer_00/0w"
    assert keys["layer_12/w_3/4"] == "layer_00/w_0/0"
    assert (keys["a/7"], keys["norm"]) == ("a/0", "norm")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("attn/q/weight", "attn/q/weight"),
        ("^attn$", "attn"),
        ("attn/(q|k|v)_proj/w", "_proj/w"),
        ("(alpha|beta)x", "x"),
        ("(?:attn)(/)q", "q"),
        ("w(eight)?", "w"),
        ("weights?/b", "weight"),
        ("a(?=long)b", "a"),
        ("x(?i:norm)", ""),
        (r"layers/\d+/attention", "/attention"),
        ("[abc]/mlp", "/mlp"),
        ("ab{2}c", "a"),
        ("(a|b(c))/d", "/d"),
        ("(?P<layer>[0-9])/w", "/w"),
        (r"\x31", ""),
        (r"(.)w\1", ""),
        ("norm|bias", ""),
        ("(?i)norm", ""),
        (".*", ""),
    ],
)
def test_a_text_that_every_match_contains(pattern, text) -> None:
    assert needed_text(re.compile(pattern)) == text
    assert needed_text(re.compile(pattern, re.IGNORECASE)) == ""

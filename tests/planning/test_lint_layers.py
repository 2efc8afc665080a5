"""Layers that are sharded unlike the others, and attention heads that are cut."""

from typing import Any

import pytest
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts


def findings(tree: Any, rules: Any, mesh: str, code: str) -> list[str]:
    found = ts.plan(tree, rules, mesh, min_size=0).findings
    return [str(finding) for finding in found if finding.code == code]


def layers(count: int) -> Any:
    return {"layers": [{"mlp": {"up": struct(8, 16)}, "norm": struct(8)} for _ in range(count)]}


DENSE = {f"Dense_{i}": {"kernel": struct(8, 8)} for i in range(4)}
OF_OTHER_SHAPES = {"layers": [{"w": struct(8, 16 if i == 3 else 8)} for i in range(8)]}
ROWS, COLUMNS = P("fsdp"), P(None, "fsdp")


@pytest.mark.parametrize(
    ("tree", "rules", "text"),
    [
        pytest.param(
            layers(8),
            [("layers/[0-24-7]/.*up", COLUMNS), (".*", ROWS)],
            "warning unlike-siblings: layers/3/mlp/up: P('fsdp',) by rule 1 '.*', unlike 7 other"
            " layers, which have P(None, 'fsdp') by rule 0 'layers/[0-24-7]/.*up'. Let one rule"
            " decide all of them, or name this layer in a pattern, if this is intended.",
            id="a layer that a pattern leaves out",
        ),
        pytest.param(
            {f"block_{i}": {"mlp": {"up": struct(8, 16)}} for i in range(5)},
            [(".*", lambda path, leaf: COLUMNS if "3" in path else ROWS)],
            "warning unlike-siblings: block_3/mlp/up: P(None, 'fsdp') by rule 0 '.*', unlike 4"
            " other layers, which have P('fsdp',). Let one rule decide all of them, or name this"
            " layer in a pattern, if this is intended.",
            id="a function",
        ),
        pytest.param(
            layers(12),
            [("layers/1.*up", COLUMNS), (".*", ROWS)],
            "warning unlike-siblings: layers/{10..11}/mlp/up: P(None, 'fsdp') by rule 0"
            " 'layers/1.*up', which does not say where the number of 'layers/1/' begins and ends,"
            " and so matches these too. Write 'layers/1/'.",
            id="a number that begins others",
        ),
        pytest.param(
            layers(12),
            [("1/mlp/up", COLUMNS), (".*", ROWS)],
            "warning unlike-siblings: layers/11/mlp/up: P(None, 'fsdp') by rule 0 '1/mlp/up', which"
            " does not say where the number of 'layers/1/' begins and ends, and so matches these"
            " too. Write 'layers/1/'.",
            id="a number that ends others",
        ),
    ],
)
def test_a_layer_that_is_sharded_unlike_the_others(tree, rules, text) -> None:
    assert findings(tree, rules, "fsdp=4", "unlike-siblings") == [text]


@pytest.mark.parametrize(
    ("tree", "rules"),
    [
        (layers(12), [("layers/1/", COLUMNS), ("", ROWS)]),
        (layers(12), [("layers/(1|10|11)/mlp", COLUMNS), ("", ROWS)]),
        (layers(16), [(r"layers/\d/", COLUMNS), ("", ROWS)]),
        (layers(20), [(r"layers/1\d?/mlp", COLUMNS), ("", ROWS)]),
        (layers(12), [(r"layers/\d", ROWS)]),
        (layers(12), [("layers/.*[02468]/mlp", COLUMNS), ("", ROWS)]),  # every other layer
        (layers(3), [("layers/[02]/mlp", COLUMNS), ("", ROWS)]),
        (
            {f"Dense_{i}": {"kernel": struct(8, 8)} for i in range(4)},
            [("_[0-2]", COLUMNS), ("", ROWS)],
        ),
        (
            {"layers": [{"w": struct(8, 8 + 4 * (i == 3))} for i in range(8)]},
            [("", ts.fsdp("fsdp"))],
        ),
    ],
)
def test_layers_that_are_meant_to_differ(tree, rules) -> None:
    assert findings(tree, rules, "fsdp=4", "unlike-siblings") == []


# ------------------------------------------------------------------ attention heads


def attention(heads: int, kv: int, *more: int) -> Any:
    """As Flax has it, with heads in a dim of their own; `more` are dims of stacked layers."""
    of_heads = {name: {"kernel": struct(*more, 32, heads, 8)} for name in ("query",)}
    of_heads |= {name: {"kernel": struct(*more, 32, kv, 8)} for name in ("key", "value")}
    return {"attn": of_heads | {"out": {"kernel": struct(*more, heads, 8, 32)}}}


FUSED = {  # 8 heads of queries, 2 of keys and values, of size 8
    "attn": {
        "q": struct(48, 64),
        "k": struct(48, 16),
        "v": struct(48, 16),
        "o": struct(64, 48),
        "q_norm": {"scale": struct(8)},
        "k_norm": {"scale": struct(8)},
    }
}
ON_HEADS = [("out", P("tensor")), ("attn", P(None, "tensor"))]


@pytest.mark.parametrize(
    ("tree", "rules", "texts"),
    [
        pytest.param(
            attention(8, 8),
            [("attn", P(None, None, "tensor"))],
            [
                "warning cuts-head: attn/key/kernel, attn/query/kernel, attn/value/kernel:"
                " P(None, None, 'tensor') by rule 0 'attn' splits dim 2, which is 1 head of 8, into"
                " 4 parts over 'tensor': not between heads. Each product of queries and keys is"
                " then summed over devices. Split another dim over 'tensor', or fewer heads over a"
                " smaller axis."
            ],
            id="separate",
        ),
        pytest.param(
            attention(8, 2, 3),
            [("out", P(None, None, "tensor")), ("", P(None, None, "tensor"))],
            ["attn/out/kernel: P(None, None, 'tensor') by rule 0 'out' splits dim 2"],
            id="stacked",
        ),
        pytest.param(
            FUSED,
            [("norm", None), ("/o", P("tensor")), ("", P(None, "tensor"))],
            ["attn/k, attn/v: P(None, 'tensor') by rule 2 '' splits dim 1, which is 2 heads of 8"],
            id="fused",
        ),
    ],
)
def test_heads_that_are_cut(tree, rules, texts) -> None:
    found = findings(tree, rules, "fsdp=2,tensor=4", "cuts-head")
    assert len(found) == len(texts)
    for text, finding in zip(texts, found, strict=True):
        assert text in finding


EXPERTS = {"experts": {"up": struct(4, 8, 16), "down": struct(4, 16, 8)}}
NORM_OF_ALL = {  # as in OLMo 2
    "attn": {name: struct(48, 64) for name in "qkv"}
    | {"o": struct(64, 48), "q_norm": struct(64), "k_norm": struct(64)}
}


@pytest.mark.parametrize(
    ("tree", "rules"),
    [
        (attention(8, 8), ON_HEADS),
        (attention(8, 8, 4), [("out", P(None, "tensor")), ("", P(None, None, "tensor"))]),
        (attention(8, 8), [("", P(None, None, "fsdp"))]),  # gathered for use
        (attention(8, 8), [("", ts.fsdp("tensor", skip=(0, 1)))]),
        (
            FUSED,
            [("norm", None), ("[kv]", P("tensor")), ("/o", P("tensor")), ("", P(None, "tensor"))],
        ),
        (FUSED, [("norm", None), ("", ts.fsdp("fsdp"))]),
        (NORM_OF_ALL, [("norm", None), ("", P(None, "tensor"))]),
        ({"conv": {"a": struct(3, 3, 8), "b": struct(3, 8, 3)}}, [("", P())]),
        (
            {"experts": {"up": struct(4, 8, 16), "down": struct(4, 16, 8)}},
            [("", P(None, None, "tensor"))],
        ),
    ],
)
def test_heads_that_are_not_cut(tree, rules) -> None:
    assert findings(tree, rules, "fsdp=2,tensor=4", "cuts-head") == []

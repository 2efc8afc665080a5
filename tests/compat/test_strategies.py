"""Strategy strings: how they are parsed, and the errors for bad ones."""

from typing import Any

import pytest

import treeshard as ts
from treeshard import fsdp, logical_partitioning, replicate, shard_dim
from treeshard.compat._strategies import parse_strategy

READ: list[tuple[str, Any]] = [
    ("replicate", replicate()),
    ("fsdp(['data', 'model'])", fsdp(["data", "model"])),
    ("fsdp(('data',), skip=[0])", fsdp("data", skip=(0,))),
    ("fsdp('data', min_size=100)", fsdp("data", min_size=100)),
    ("replicate(memory='pinned_host')", replicate(memory="pinned_host")),
    ("shard_dim('model', 0, True)", shard_dim("model", 0, True)),
    ("shard_dim(dim=1, axis='m', ignore_ndim_error=True)", shard_dim("m", 1, True)),
    ("logical_partitioning([('a', 'data')])", logical_partitioning([("a", "data")])),
    ("  shard_dim('m', 0)|replicate ", shard_dim("m", 0) | replicate()),
    ("replicate | shard_dim('|', 0) | replicate", replicate() | shard_dim("|", 0) | replicate()),
    ("(replicate | fsdp('a'))\n", replicate() | fsdp("a")),
]


@pytest.mark.parametrize(("text", "meant"), READ, ids=[text.strip() for text, _ in READ])
def test_a_string_and_a_repr_parse_to_their_tactic(text, meant) -> None:
    assert parse_strategy(text) == parse_strategy(repr(meant)) == meant


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp('data')", "at column 1: fdsp is not a tactic. Did you mean 'fsdp'?"),
        ("fsdp('a') | zzz()", "at column 13: zzz is not a tactic. The tactics are fsdp,"),
        (
            "__import__('os')",
            "the strategy \"__import__('os')\", at column 1: __import__ is not a tactic.",
        ),
        (
            "fsdp(__import__('os').sep)",
            "at column 6: __import__('os').sep is not a literal, and is not evaluated. Write",
        ),
        ("fsdp(*['a'])", "at column 6: *['a'] is not a literal"),
        ("fsdp(**{'axis': 'a'})", "at column 8: {'axis': 'a'} is unpacked with **. Write the"),
        (
            "fsdp('a', min_size_mb=2)",
            "fsdp('a', min_size_mb=2) has wrong arguments: got an unexpected keyword argument"
            " 'min_size_mb'. The signature is fsdp(axis, *, min_size=None, skip=(), memory=None).",
        ),
        (
            "shard_dim('a')",
            "missing a required argument: 'dim'. The signature is shard_dim(axis, dim,"
            " ignore_ndim_error=False, *, memory=None).",
        ),
        ("fsdp(('a', 'a'))", "fsdp(('a', 'a')): give at least one axis, and each once."),
        ("fsdp('a') + replicate", "is not a call of a tactic. Write calls joined by |, such as"),
        ("fsdp('a'", "does not parse at column 5: '(' was never closed. Write calls joined by |"),
        ("a\0", "does not parse: source code string cannot contain null bytes."),
        ("(" * 500 + ")" * 500, "does not parse"),
    ],
)
def test_a_bad_string_names_the_column(text, message) -> None:
    with pytest.raises(ts.ShardingRuleError) as raised:
        parse_strategy(text)
    assert str(raised.value).startswith(f"the strategy {text.strip()!r}")
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["shard_dim('a', 'b')", "fsdp(3)"])
def test_arguments_of_a_wrong_type(text, unchecked) -> None:
    with pytest.raises(ts.ShardingRuleError, match="is invalid: .*int"):
        parse_strategy(text)


def test_nothing_is_evaluated(tmp_path) -> None:
    file = tmp_path / "made"
    for text in (f"fsdp(open({str(file)!r}, 'w'))", f"open({str(file)!r}, 'w')"):
        with pytest.raises(ts.ShardingRuleError):
            parse_strategy(text)
    assert not file.exists()

"""Strategy strings: how they are parsed, and the errors for bad ones."""

from typing import Any

import pytest

import treeshard as ts
from treeshard import follow, fsdp, logical_partitioning, replicate, shard_dim
from treeshard.compat._strategies import parse_strategy

READ: list[tuple[str, Any]] = [
    ("replicate", replicate()),
    ("replicate()", replicate()),
    ("fsdp('data')", fsdp("data")),
    ("fsdp(['data', 'model'])", fsdp(["data", "model"])),
    ("fsdp(('data',), skip=[0])", fsdp("data", skip=(0,))),
    ("follow('weight', blocks=True)", follow("weight", blocks=True)),
    ("fsdp('data', min_size=100)", fsdp("data", min_size=100)),
    ("fsdp('data', min_size=None)", fsdp("data")),
    ("shard_dim('model', -1)", shard_dim("model", -1)),
    ("shard_dim('model', 0, True)", shard_dim("model", 0, True)),
    ("shard_dim(dim=1, axis='m', ignore_ndim_error=True)", shard_dim("m", 1, True)),
    ("logical_partitioning()", logical_partitioning()),
    ("logical_partitioning([('a', 'data')])", logical_partitioning([("a", "data")])),
    ("  shard_dim('m', 0)|replicate ", shard_dim("m", 0) | replicate()),
    ("replicate | shard_dim('|', 0) | replicate", replicate() | shard_dim("|", 0) | replicate()),
    ("(replicate | fsdp('a'))\n", replicate() | fsdp("a")),
]


@pytest.mark.parametrize(("text", "meant"), READ, ids=[text.strip() for text, _ in READ])
def test_a_string_parses_to_its_tactic(text, meant) -> None:
    assert parse_strategy(text) == meant


@pytest.mark.parametrize("meant", [meant for _, meant in READ], ids=repr)
def test_a_repr_parses_to_an_equal_tactic(meant) -> None:
    assert parse_strategy(repr(meant)) == meant


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp('data')", "at column 1: fdsp is not a tactic. Did you mean 'fsdp'?"),
        ("fsdp('a') | zzz()", "at column 13: zzz is not a tactic. The tactics are follow, fsdp,"),
        ("os.system('true')", "at column 1: os.system is not a tactic."),
        ("shard_dm('a')", "shard_dm is not a tactic. Did you mean 'shard_dim'?"),
        (
            "__import__('os')",
            "the strategy \"__import__('os')\", at column 1: __import__ is not a tactic.",
        ),
        (
            "fsdp(__import__('os').sep)",
            "at column 6: __import__('os').sep is not a literal, and is not evaluated. Write",
        ),
        ("replicate | fsdp(axis)", "at column 18: axis is not a literal"),
        ("shard_dim('m', 1 + 1)", "at column 16: 1 + 1 is not a literal"),
        ("fsdp(f'{x}')", "is not a literal"),
        ("fsdp(*['a'])", "at column 6: *['a'] is not a literal"),
        ("fsdp(**{'axis': 'a'})", "at column 8: {'axis': 'a'} is unpacked with **. Write the"),
        (
            "fsdp('a', min_size_mb=2)",
            "fsdp('a', min_size_mb=2) has wrong arguments: got an unexpected keyword argument"
            " 'min_size_mb'. The signature is fsdp(axis, *, min_size=None, skip=(), memory=None).",
        ),
        ("fsdp", "fsdp has wrong arguments: missing a required argument: 'axis'."),
        (
            "shard_dim('a')",
            "missing a required argument: 'dim'. The signature is shard_dim(axis, dim,"
            " ignore_ndim_error=False, *, memory=None).",
        ),
        ("replicate('a')", "has wrong arguments: too many positional arguments. The sig"),
        ("fsdp('a', min_size_to_shard_mb=4)", "unexpected keyword argument 'min_size_to_shard_mb'"),
        ("fsdp(('a', 'a'))", "fsdp(('a', 'a')): give at least one axis, and each once."),
        ("fsdp('a') + replicate", "is not a call of a tactic. Write calls joined by |, such as"),
        ("'fsdp'", "'fsdp' is not a call of a tactic."),
        ("(lambda: replicate())()", "is not a call of a tactic."),
        ("fsdp('a'", "does not parse at column 5: '(' was never closed. Write calls joined by |"),
        ("", "the strategy '' does not parse"),
        ("replicate; replicate", "does not parse at column 10"),
        ("a\0", "does not parse: source code string cannot contain null bytes."),
        ("(" * 500 + ")" * 500, "does not parse"),
    ],
)
def test_a_bad_string_names_the_column(text, message) -> None:
    with pytest.raises(ts.ShardingRuleError) as raised:
        parse_strategy(text)
    assert str(raised.value).startswith(f"the strategy {text.strip()!r}")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text", ["shard_dim('a', 'b')", "fsdp(3)", "fsdp('a', skip=1)", "fsdp('a', min_size='4')"]
)
def test_arguments_of_a_wrong_type(text, unchecked) -> None:
    with pytest.raises(ts.ShardingRuleError, match="is invalid: .*int"):
        parse_strategy(text)


def test_nothing_is_evaluated(tmp_path) -> None:
    file = tmp_path / "made"
    for text in (f"fsdp(open({str(file)!r}, 'w'))", f"open({str(file)!r}, 'w')"):
        with pytest.raises(ts.ShardingRuleError):
            parse_strategy(text)
    assert not file.exists()

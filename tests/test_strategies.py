"""Strategy strings: how they are read, and what is said of bad ones."""

from typing import Any

import pytest

import treeshard as ts
from treeshard._refinements import FsdpByBytes
from treeshard._strategies import parse_strategy
from treeshard._tactics import (
    Tactic,
    fsdp,
    logical_partitioning,
    own_tactics,
    replicate,
    shard_dim,
    tactic,
)


def by_bytes(*axes: str, mb: float = 4, skip: tuple[int, ...] = ()) -> Tactic:
    return Tactic((FsdpByBytes(axes, 0, skip, mb),))


@pytest.fixture(autouse=True)
def own() -> Any:
    @tactic
    def shard_last(axis, times=1):
        return lambda spec, mesh, path, leaf: (*spec[:-1], axis)

    yield shard_last
    del own_tactics["shard_last"]


READ: list[tuple[str, Any]] = [
    ("replicate", replicate()),
    ("replicate()", replicate()),
    ("fsdp('data')", by_bytes("data")),
    ("fsdp(axis='data', min_size_to_shard_mb=0.5)", by_bytes("data", mb=0.5)),
    ("fsdp(['data', 'model'], 1)", by_bytes("data", "model", mb=1)),
    ("fsdp(('data',), skip=[0])", by_bytes("data", skip=(0,))),
    ("fsdp('data', min_size=100)", fsdp("data", min_size=100)),
    ("fsdp('data', min_size=None)", fsdp("data")),
    ("shard_dim('model', -1)", shard_dim("model", -1)),
    ("shard_dim('model', 0, True)", shard_dim("model", 0, True)),
    ("shard_dim(dim=1, axis='m', ignore_ndim_error=True)", shard_dim("m", 1, True)),
    ("logical_partitioning()", logical_partitioning()),
    ("logical_partitioning([('a', 'data')])", logical_partitioning([("a", "data")])),
    ("  shard_dim('m', 0)|replicate ", shard_dim("m", 0) | replicate()),
    ("replicate | shard_dim('|', 0) | replicate", replicate() | shard_dim("|", 0) | replicate()),
    ("(replicate | fsdp('a'))\n", replicate() | by_bytes("a")),
]


@pytest.mark.parametrize(("text", "meant"), READ, ids=[text.strip() for text, _ in READ])
def test_what_a_string_means(text, meant) -> None:
    assert parse_strategy(text) == meant


@pytest.mark.parametrize("text", [text for text, _ in READ] + ["shard_last('data', times=2)"])
def test_a_tactic_can_be_written_and_read_again(text) -> None:
    read = parse_strategy(text)
    assert parse_strategy(read.text) == read


def test_tactics_of_ones_own(own) -> None:
    assert parse_strategy("shard_last('data') | replicate") == own("data") | replicate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp('data')", "at column 1: fdsp is no tactic. Did you mean 'fsdp'?"),
        ("fsdp('a') | zzz()", "at column 13: zzz is no tactic. There are fsdp, logical_part"),
        ("os.system('true')", "at column 1: os.system is no tactic."),
        ("shard_lst('a')", "shard_lst is no tactic. Did you mean 'shard_last'?"),
        (
            "__import__('os')",
            "the strategy \"__import__('os')\", at column 1: __import__ is no tactic.",
        ),
        (
            "fsdp(__import__('os').sep)",
            "at column 6: __import__('os').sep is no literal, and nothing here is evaluated. Write",
        ),
        ("replicate | fsdp(axis)", "at column 18: axis is no literal"),
        ("shard_dim('m', 1 + 1)", "at column 16: 1 + 1 is no literal"),
        ("fsdp(f'{x}')", "is no literal"),
        ("fsdp(*['a'])", "at column 6: *['a'] is no literal"),
        ("fsdp(**{'axis': 'a'})", "at column 8: {'axis': 'a'} is unpacked with **. Write the"),
        (
            "fsdp('a', min_size_mb=2)",
            "fsdp('a', min_size_mb=2) calls it wrongly: got an unexpected keyword argument"
            " 'min_size_mb'. It is fsdp(axis, min_size_to_shard_mb=4), with min_size=, in",
        ),
        ("fsdp", "fsdp calls it wrongly: missing a required argument: 'axis'."),
        (
            "shard_dim('a')",
            "missing a required argument: 'dim'. It is shard_dim(axis, dim,"
            " ignore_ndim_error=False).",
        ),
        ("shard_last()", "'axis'. It is shard_last(axis, times=1)."),
        ("replicate('a')", "calls it wrongly: too many positional arguments. It is replicate()."),
        ("fsdp('a', 1, min_size=1)", "give min_size_to_shard_mb or min_size, not both."),
        ("fsdp('a', '4')", "min_size_to_shard_mb is '4', not a number of MiB."),
        ("fsdp('a', min_size=1.5)", "min_size is 1.5, not a number of elements, or None."),
        ("fsdp(('a', 'a'))", "fsdp(('a', 'a')): name at least one axis, and each once."),
        ("fsdp('a') + replicate", "is no call of a tactic. Write calls joined by |, such as"),
        ("'fsdp'", "'fsdp' is no call of a tactic."),
        ("(lambda: replicate())()", "is no call of a tactic."),
        ("fsdp('a'", "does not parse at column 5: '(' was never closed. Write calls joined by |"),
        ("", "the strategy '' does not parse"),
        ("replicate; replicate", "does not parse at column 10"),
        ("a\0", "does not parse: source code string cannot contain null bytes."),
        ("(" * 500 + ")" * 500, "does not parse"),
    ],
)
def test_bad_strings(text, message) -> None:
    with pytest.raises(ts.ShardingRuleError) as raised:
        parse_strategy(text)
    assert str(raised.value).startswith(f"the strategy {text.strip()!r}")
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["shard_dim('a', 'b')", "fsdp(3)", "fsdp('a', skip=1)"])
def test_arguments_of_a_wrong_type(text, unchecked) -> None:
    with pytest.raises(ts.ShardingRuleError, match="cannot be had: .*int"):
        parse_strategy(text)


def test_nothing_is_evaluated(tmp_path) -> None:
    file = tmp_path / "made"
    for text in (f"fsdp(open({str(file)!r}, 'w'))", f"open({str(file)!r}, 'w')"):
        with pytest.raises(ts.ShardingRuleError):
            parse_strategy(text)
    assert not file.exists()

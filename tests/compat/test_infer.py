"""`infer_sharding`: users' ops, boxes, and errors.

Its shardings are compared with big_vision's in `tests/product/test_migration_big_vision.py`.
"""

import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from helpers import mesh_of, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.compat._big_vision import _ops

MESH = mesh_of(data=2, model=4)
RULES = [("embed", "data"), ("mlp", "model")]


def specs(tree: Any, strategy: Any) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, ts.infer_sharding(tree, strategy, MESH))


def message_of(tree: Any, strategy: Any, mesh: Any = MESH) -> str:
    with pytest.raises(ts.ShardingRuleError) as raised:
        ts.infer_sharding(tree, strategy, mesh)
    return str(raised.value)


def test_the_threshold_of_fsdp_is_in_bytes() -> None:
    small, large = struct(2**18), struct(2**18 + 8)
    half = struct(2**18 + 8, dtype="bfloat16")
    tree = [{"a": small, "b": large, "c": half} for _ in range(12)]
    assert specs(tree, [(".*", "fsdp('data', 1)")]) == [{"a": P(), "b": P("data"), "c": P()}] * 12
    tactic = ts.fsdp("data", min_size=0)  # in elements
    assert specs(tree, [(".*", tactic)]) == [dict.fromkeys("abc", P("data"))] * 12


@pytest.fixture
def last() -> Any:
    @ts.Registry.register("shardings.last")
    def last(axis, *, answer=None):
        """Shards the last dim."""
        return lambda cur_spec, mesh, name, x: answer or (*cur_spec[:-1], axis)

    yield last
    del _ops["last"]


def test_a_users_op(last) -> None:
    tree = {"w": struct(8, 8)}
    assert specs(tree, [("w", "last('data')")]) == {"w": P(None, "data")}
    assert specs(tree, [("w", "fsdp('model', 0) | last('data')")]) == {"w": P(None, "data")}
    assert specs(tree, [("w", "last('x', answer=('data', None))")]) == {"w": P("data")}
    boxed = {"w": linen.Partitioned(struct(8, 8), ("a", "b"))}
    assert specs(boxed, [("w", "last('data')")]) == {"w": P(None, "data")}
    text = message_of({"w": struct(8, 7)}, [("w", "last('data') | fsdp('model', 0)")])
    assert "last('data'): P(None, 'data') splits dim 1 of shape (8, 7) into 2 parts" in text
    assert last.__doc__ == "Shards the last dim."
    assert repr(last("data", answer=None)) == "last('data', answer=None)"
    signature = "The signature is last(axis, *, answer=None)."
    assert signature in message_of(tree, [("w", "last()")])


@pytest.mark.parametrize(
    "answer",
    ["data", ("data",), ("data", 3)],
    ids=["not-a-tuple", "too-short", "not-an-entry"],
)
def test_ops_that_do_not_return_a_spec(last, answer) -> None:
    text = message_of({"w": struct(8, 8)}, [("w", f"last('x', answer={answer!r})")])
    assert text.startswith(f"w: rule 0, 'w': the op last('x', answer={answer!r}) returned")
    assert "for shape (8, 8). Return a spec or a tuple with one entry per dim" in text


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "shardings.fsdp": "'fsdp' is big_vision's. Use another name",
        "last": "'last' is not the name of an op. Write `Registry.register(\"shardings.my_op\")`",
        "preprocess_ops.last": "'preprocess_ops.last' is not the name of an op",
        "shardings.a-b": "'shardings.a-b' is not the name of an op",
    }.items(),
)
def test_names_that_no_op_can_have(name: str, message: str) -> None:
    with pytest.raises(ts.ShardingRuleError, match=re.escape(f"Registry.register: {message}")):
        ts.Registry.register(name)


def test_scalars_need_no_pattern() -> None:
    tree = {"step": 3, "lr": 0.1, "key": np.float32(1), "scalar": struct(), "none": None}
    shardings = ts.infer_sharding(tree, [("nothing", "replicate")], MESH)
    whole = NamedSharding(MESH, P())
    assert shardings == dict.fromkeys(["step", "lr", "key", "scalar"], whole) | {"none": None}


def test_a_sharding_replaces_a_box() -> None:
    box = linen.LogicallyPartitioned(struct(8, 8), ("embed", "mlp"))
    tree = {
        "layers": [{"w": box, "b": struct(8)} for _ in range(12)],
        "other": {"w": linen.LogicallyPartitioned(struct(8, 8), (None, "mlp"))},
        "axes": linen.Partitioned(struct(8), ("model",)),
    }
    strategy = [(".*w|axes", "logical_partitioning()"), (".*", "fsdp('data', 0)")]
    with ts.logical_axis_rules(RULES):
        shardings = specs(tree, strategy)
    assert shardings == {
        "layers": [{"w": P("data", "model"), "b": P("data")}] * 12,
        "other": {"w": P(None, "model")},
        "axes": P("model"),
    }


def test_a_box_around_nothing_or_a_tree() -> None:
    two = nnx.Param({"a": np.zeros((8, 8)), "b": np.zeros(3)})
    tree = {"empty": linen.Partitioned(None, ("data",)), "two": two}
    shardings = ts.infer_sharding(tree, [("two/a", "fsdp('data', 0)"), (".*", "replicate")], MESH)
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)


def test_unmatched_leaves_are_replicated_with_one_warning() -> None:
    tree = {"b": struct(8, 8), "c": struct(8), "cc": struct(8)}
    with pytest.warns(ts.ShardingWarning) as warned:
        assert specs(tree, [("c", "fsdp('data', 0)")]) == {"b": P(), "c": P("data"), "cc": P()}
    assert [str(each.message) for each in warned] == [
        "2 leaves match no pattern of the strategy:\n  b: shape (8, 8)\n  cc: shape (8,)\n"
        'They are replicated. If you intend it, end with (".*", "replicate").'
    ]
    with pytest.warns(ts.ShardingWarning, match=r"^No pattern of the strategy matches a: shape"):
        ts.infer_sharding({"a": struct(8)}, [("c", "replicate")], MESH)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ([("a",)], "rule 0 is not a pair: ('a',)"),
        ([("a", "fdsp('x')")], "rule 0, 'a': the strategy \"fdsp('x')\", at column 1: fdsp is not"),
        (
            [("a", P("data")), ("b", print)],
            "2 rules are malformed:\n  rule 0, 'a': P('data',) is not a string of ops, such as",
        ),
        ([("a", "fsdp('x', min_size_mb=4)")], "is fsdp(axis, min_size_to_shard_mb=4)."),
    ],
    ids=["not-a-pair", "unknown", "function", "signature"],
)
def test_malformed_strategies(strategy, message) -> None:
    assert message in message_of({}, strategy)


def test_arguments_of_another_type(unchecked) -> None:
    message = "min_size_to_shard_mb is '4', not a number of MiB."
    assert message in message_of({}, [("a", "fsdp('x', '4')")])
    assert "rules are dict. Give a list" in message_of({}, {"a": "replicate"})

"""Constraints by EasyDeL's names of dims; eformer 0.0.101 returns the same specs."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.compat import PartitionManager, apply_logical_sharding

QUERIES = ["__BATCH__", "__QUERY_LENGTH__", "__HEAD__", "__HEAD_DIM__"]
KEYS = ["__BATCH__", "__KV_LENGTH__", "__KV_HEAD__", "__KV_HEAD_DIM__"]
WEIGHTS = [["__FULLY_SHARDED_DATA_PARALLEL__", "__SEQUENCE_PARALLEL__"], "__TENSOR_PARALLEL__"]
MLP = ["__EXPERT__", "_", "__MLP_INTERMEDIATE__"]
GATE = ["__EXPERT_GATE__", None, "__VOCAB__"]
BIAS = ["__BIAS_HEAD_SEQ__", "__BIAS_KV_SEQ__", "__LENGTH__", "__EMBED__"]


@pytest.mark.parametrize(
    ("names", "train", "decode"),
    [
        (QUERIES, P(("fsdp", "dp"), "sp", "tp", None), P(("fsdp", "dp"), "sp", "tp", None)),
        (KEYS, P(("fsdp", "dp"), "sp", "tp", None), P(("fsdp", "dp"), "sp", "tp", None)),
        (WEIGHTS, P(("fsdp", "sp"), "tp"), P(("fsdp", "sp"), "tp")),
        (MLP, P("ep", None, "tp"), P("ep", None, "tp")),
        (GATE, P(None, None, "tp"), P(None, None, "tp")),
        (BIAS, P(None, None, "sp", "tp"), P(None, None, "sp", "tp")),
        (["batch", ("sequence", "head")], P(("fsdp", "dp"), ("sp", "tp")), None),
        ([["__EMBED__", "__KV_HEAD_DIM__"], ["_"]], P("tp", None), P("tp", None)),
        ([["__KV_HEAD__", "__TENSOR_PARALLEL__"], None], P("tp", None), P("tp", None)),
    ],
)
def test_names_resolve_as_in_eformer(names: list[Any], train: Any, decode: Any) -> None:
    manager = PartitionManager(ts.PartitionAxis())
    assert manager.resolve(names, "__train__") == manager.resolve(names, "__prefill__") == train
    assert manager.resolve(names, "train") == train
    if decode is not None:
        assert manager.resolve(names, "__autoregressive__") == decode
        assert manager.resolve(names, "__insert__") == decode


@pytest.mark.parametrize(
    ("fields", "decode"),
    [
        ({}, P(("fsdp", "dp"), "sp", "tp")),
        ({"batch_axis": "dp", "head_axis": "ep"}, P("dp", "sp", "ep")),
        ({"generation_batch_axis": "dp"}, P("dp", "sp", "tp")),
        ({"generation_head_axis": None}, P(("fsdp", "dp"), "sp", "tp")),
        ({"generation_head_axis": "ep", "key_sequence_axis": None}, P(("fsdp", "dp"), None, "ep")),
        ({"tensor_parallel_axis": "model"}, P(("fsdp", "dp"), "sp", "model")),
        ({"tensor_parallel_axis": "model", "head_axis": "ep"}, P(("fsdp", "dp"), "sp", "ep")),
    ],
)
def test_decoding_is_sharded_as_training_unless_it_has_its_own_axes(
    fields: dict[str, Any], decode: P
) -> None:
    manager = PartitionManager(ts.PartitionAxis(**fields))
    names = ["__BATCH__", "__KV_LENGTH__", "__HEAD__"]
    assert manager.resolve(names, "__insert__") == decode


@pytest.mark.parametrize(
    ("names", "train", "decode"),
    [
        (["__BATCH__", "cache"], P(("fsdp", "dp"), "sp"), P(("fsdp", "dp"), "sp")),
        (["__CACHE__", "__HEAD__"], P("sp", "tp"), P("sp", "tp")),
        (["__ATTN_DP__", "_"], P("dp", None), P(None, None)),
        ([["__ATTN_DP__", "cache"], None], P(("dp", "sp"), None), P("sp", None)),
    ],
)
def test_custom_names(names: list[Any], train: P, decode: P) -> None:
    custom = {"cache": "sp", "__ATTN_DP__": "dp", "generation___ATTN_DP__": None}
    manager = PartitionManager(ts.PartitionAxis(custom=custom))
    assert manager.resolve(names, "__train__") == train
    assert manager.resolve(names, "__autoregressive__") == decode


def test_keys_and_values_have_the_defaults_of_their_fields_in_eformer() -> None:
    manager = PartitionManager(ts.PartitionAxis(head_axis="ep", attention_dim_axis="sp"))
    names = ["__KV_HEAD__", "__KV_HEAD_DIM__", "__HEAD__", "__HEAD_DIM__"]
    assert manager.resolve(names, "__train__") == P("tp", None, "ep", "sp")


def test_a_dim_of_length_one_is_of_decoding() -> None:
    paxis = ts.PartitionAxis(generation_batch_axis="dp")
    manager = PartitionManager(paxis)
    hidden = SimpleNamespace(axes=["__BATCH__", "__QUERY_LENGTH__", "__EMBED__"], mode=1)
    assert manager.resolve(dynamic_axes=hidden, shape=(8, 1, 4)) == P("dp", "sp", "tp")
    assert manager.resolve(dynamic_axes=hidden, shape=(8, 2, 4)) == P(("fsdp", "dp"), "sp", "tp")
    assert manager.resolve(["batch"], None, hidden, (8, 1)) == P("dp", "sp", "tp")
    assert manager.resolve(None, "train", hidden, (8, 1)) == P("dp", "sp", "tp")
    assert manager.resolve(hidden, shape=(8, 1)) == P("dp", "sp", "tp")
    with pytest.raises(ts.SpecError, match=r"mode=1 is a dim, and the shape is \(\). Pass the `sh"):
        manager.resolve(dynamic_axes=hidden)
    with pytest.raises(ts.SpecError, match=r"the shape is \(8,\)"):
        manager.shard(jnp.ones(8), dynamic_axes=hidden)


def test_arrays_are_constrained_in_and_out_of_jit() -> None:
    manager = PartitionManager(ts.PartitionAxis())

    def constrain(x: jax.Array) -> jax.Array:
        return apply_logical_sharding(
            x, axes=["__BATCH__", None, "__EMBED__"], mode="__train__", partition_manager=manager
        )

    assert constrain(x := jnp.ones((8, 2, 4))) is x  # no mesh
    assert jax.jit(lambda m, x: m.shard(x, ["__BATCH__"], "train"))(manager, x).shape == x.shape
    with jax.set_mesh(ts.make_mesh("fsdp=4,tp=2")):
        assert constrain(x).sharding.spec == P("fsdp", None, "tp")
        assert jax.jit(constrain)(x).sharding.spec == P("fsdp", None, "tp")
        assert jax.jit(constrain)(jnp.ones((6, 2, 4))).sharding.spec == P(None, None, "tp")
        with pytest.raises(ts.SpecError, match="6"):
            manager.shard(jnp.ones((6, 2)), ["__BATCH__", None], "train", auto_correct=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": ["__BATCH__"]}, "`axes=` and `mode=`"),
        ({"axes": ["__BACH__"], "mode": "__train__"}, "Did you mean 'batch'"),
        ({"axes": ["_head"], "mode": "train"}, "'_head' is not a logical name"),
        ({"axes": [3], "mode": "train"}, r"3 \(int\) is not a logical name"),
        ({"axes": ["batch"], "mode": "__trian__"}, "'__trian__' is neither 'train' nor"),
    ],
)
def test_mistakes_have_a_way_out(arguments: dict[str, Any], message: str, unchecked: None) -> None:
    with pytest.raises(ts.SpecError, match=message):
        PartitionManager(ts.PartitionAxis()).resolve(**arguments)

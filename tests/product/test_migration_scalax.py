"""docs/migrate.md: the lines of scalax, observed on 0.2.6, and ours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import first_match, longest_dim, short, table

import treeshard as ts

row = table("From scalax", "dp=2,fsdp=4")


test_mesh = row.makes_mesh('mesh = MeshShardingHelper([2, -1], ["dp", "fsdp"])', dp=2, fsdp=4)
test_init = row.makes_state(
    "mesh.sjit(init, out_shardings=rule)(key)", [("w", P("fsdp")), (".*", None)], P("fsdp")
)
test_step = row.steps(
    "mesh.sjit(step, in_shardings=(rule, PS()), out_shardings=(rule, PS()),"
    ' args_sharding_constraint=(rule, PS("dp")), donate_argnums=(0,))',
    P("fsdp"),
)
test_batch = row.splits_rows("mesh.local_data_to_global_array(batch)", P(("dp", "fsdp")))


@row('FSDPShardingRule(fsdp_axis_name="fsdp", fsdp_axis_size=4, min_fsdp_size=2**20)')
def test_fsdp(ours) -> None:
    shapes = [(1024, 1024), (1024, 1023), (2048, 1024), (1024, 2048), (8, 4100, 40), (4099, 4098)]
    shapes += [(1023, 1024), (2**20,), (2**20 - 4,), ()]
    found = ts.plan([struct(*shape) for shape in shapes], ours(), row.mesh).specs
    old = [
        longest_dim(shape, "fsdp", 4, first=True) if np.prod(shape) >= 2**20 else P()
        for shape in shapes
    ]
    assert (old[0], found[0]) == (P("fsdp"), P(None, "fsdp"))
    assert found[1:] == old[1:]
    assert {P(), P("fsdp"), P(None, "fsdp")} == set(old)


@row("FSDPShardingRule(min_fsdp_size=64)")
def test_fsdp_without_a_size(ours) -> None:
    """There `odd` is P("fsdp", None), which divides no dim of it."""
    tree = {"w": struct(8, 33), "v": struct(96, 16), "odd": struct(9, 25), "long": struct(2, 1000)}
    plan = ts.plan(tree, ours(), row.mesh)
    assert plan.specs == {"w": P("fsdp"), "v": P("fsdp"), "odd": P(), "long": P(None, "fsdp")}
    assert "no-dim fsdp" in str(plan)


@row("TreePathShardingRule(*rules, strict=True)")
def test_rules(ours) -> None:
    rules = [("w", P("fsdp")), ("b", P())]
    tree = {"w": struct(8, 8), "b": struct(8), "w1": struct(1, 1), "w0": struct()}
    assert ours(rules=rules, tree=tree) == first_match(rules, tree)
    more = tree | {"x": struct(8), "y": struct(8)}
    with pytest.raises(ValueError, match=r"(?s)x: shape.*y: shape"):
        ours(rules=rules, tree=more)
    found = ts.match_partition_rules(rules, more, min_size=2, strict=False)
    assert found == first_match(rules, more, strict=False)


@row("PolicyShardingRule(policy)")
def test_policy(ours) -> None:
    asked: list[str] = []

    def policy(path: str, leaf: Any) -> P:
        asked.append(path)
        return P("fsdp") if "w" in path else P()

    tree = {"w": struct(8, 8), "b": struct(8), "step": struct()}
    found = ts.match_partition_rules(ours(policy=policy), tree, min_size=0)
    assert found == {"w": P("fsdp"), "b": P(), "step": P()}
    assert asked == ["b", "w"]


@row('mesh.match_sharding_rule({"a": rule, "b": PS("dp")}, tree)')
def test_a_tree_of_rules(ours) -> None:
    found = ours(tree={"a": {"w": struct(8, 16)}, "b": [struct(8), struct(4, 3)]})
    assert all(isinstance(x, NamedSharding) for x in jax.tree.leaves(found))
    assert short(found) == {"a": {"w": P(None, "fsdp")}, "b": [P("dp"), P("dp")]}


RULES = [("w", P("fsdp")), ("b", None)]


@row('with_sharding_constraint(x, PS("dp"))')
def test_constraint(ours) -> None:
    x = jnp.ones(8)
    assert ours(x=x) is x
    with jax.set_mesh(row.mesh):
        assert ours(x=x).sharding.spec == P("dp")
    with jax.set_mesh(ts.make_mesh("tp=8")):
        assert ours(x=x).sharding.spec == P()


@row('with_sharding_annotation(x, "activation")')
def test_annotation(ours) -> None:
    x = jnp.ones((8, 4))
    with ts.logical_axis_rules([("batch", "dp")]):
        assert ours(x=x).sharding.spec == P("dp", None)


@row("mesh.make_shard_and_gather_fns(tree, rule)")
def test_shard_and_gather_fns(ours) -> None:
    tree = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
    shard_fns, gather_fns = ours(plan=ts.plan(tree, RULES, row.mesh, min_size=0))
    placed = jax.tree.map(lambda f, x: f(x), shard_fns, tree)
    assert ts.get_partition_spec(placed) == {"w": P("fsdp"), "b": P()}
    back = jax.tree.map(lambda f, x: f(x), gather_fns, placed)
    np.testing.assert_array_equal(back["w"], tree["w"])

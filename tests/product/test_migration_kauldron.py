"""docs/migrate.md: kauldron's lines, and ours."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from helpers import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import (
    longest_dim,
    mebibytes,
    short,
    table,
)

import treeshard as ts

row = table("From kauldron", "devices=8")


test_mesh = row.makes_mesh("kd.sharding.DEVICES_MESH", devices=8)
test_init = row.makes_state(
    "kd.sharding.with_sharding_constraint(state, sharding.state)",
    [(".*", ts.fsdp("devices"))],
    P(None, "devices"),
)
test_step = row.steps('jax.jit(step, donate_argnames=("state",))', P("devices"))
test_batch = row.splits_rows("kd.sharding.device_put(batch, kd.sharding.FIRST_DIM)", P("devices"))
test_checkpoints = row.keeps_checkpoints(
    "kd.ckpts.Checkpointer(save_interval_steps=100, max_to_keep=3)",
    {0: True, 50: False, 100: True, 200: True, 300: True},
    (100, 200, 300),
)


def old_fsdp(leaf: Any) -> P:
    """Leaves of more than 4 MiB are split."""
    return longest_dim(leaf.shape, "devices", 8) if mebibytes(leaf) > 4 else P()


PARAMS = {
    "dense": {"kernel": struct(1024, 1032), "bias": struct(1032), "square": struct(2048, 2048)},
    "limit": [struct(1024, 1024), struct(2**20 + 8)],
    "odd": struct(1025, 1027),
    "half": struct(1024, 2056, dtype="bfloat16"),
    "scale": struct(),
}


@row(
    "kd.sharding.FSDPSharding(min_size_to_shard_mb=4)(params)",
    "kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding())",
)
def test_fsdp(shardings, planned) -> None:
    old = jax.tree.map(old_fsdp, PARAMS)
    assert {P(), P("devices"), P(None, "devices")} == set(jax.tree.leaves(old))
    assert short(shardings(params=PARAMS)) == old
    plan = planned(params=PARAMS)
    assert plan.specs["dense"] == old["dense"]
    assert old["limit"] == [P(), P("devices")]
    assert plan.specs["limit"] == [P(None, "devices"), P("devices")]
    (found,) = plan.findings
    assert (found.code, found.paths) == ("left-whole", ("odd",))


@row("kd.sharding.ShardingStrategy(opt_state=None)")
def test_optimizer_state(ours) -> None:
    params = {"w": struct(2048, 1024), "b": struct(8)}
    opt_state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = ours(params=params, rules=[(".*", ts.fsdp("devices"))], opt_state=opt_state).specs
    assert found[0].mu == found[0].nu == {"w": P("devices"), "b": P()}


@row("kd.sharding.with_sharding_constraint(tree, shardings)")
def test_constraint(ours) -> None:
    first = NamedSharding(row.mesh, P("devices"))
    tree = {"a": jnp.ones((8, 2)), "b": {"c": jnp.ones((8, 3)), "d": jnp.ones(16)}}
    out = ours(tree=tree, shardings={"a": None, "b": first})
    assert out["a"] is tree["a"]
    assert ts.get_partition_spec(out["b"]) == {"c": P("devices"), "d": P("devices")}
    plan = ts.plan(tree, [("a|c", P("devices")), ("d", None)], row.mesh, min_size=0)
    assert ts.get_partition_spec(ours(tree=tree, shardings=plan)) == plan.specs


def sharding_of_subtree(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: NamedSharding(row.mesh, old_fsdp(leaf)), tree)


@row(
    "kd.sharding.with_sharding_constraint(tree, sharding_of_subtree)",
    "kd.sharding.ShardingStrategy(params=sharding_of_subtree)",
)
def test_functions_of_subtrees(constrained, planned) -> None:
    tree = {"a": jnp.ones((8, 2**18)), "b": {"c": jnp.ones((8, 3))}}
    out = constrained(tree=tree, sharding_of_subtree=sharding_of_subtree)
    assert ts.get_partition_spec(out) == jax.tree.map(old_fsdp, tree)
    plan = planned(params=PARAMS, sharding_of_subtree=sharding_of_subtree)
    assert plan.specs == jax.tree.map(old_fsdp, PARAMS)
    both = planned(
        params=PARAMS,
        sharding_of_subtree={**PARAMS, "dense": sharding_of_subtree}
        | {key: None for key in PARAMS if key != "dense"},
    )
    assert both.specs["dense"] == plan.specs["dense"]

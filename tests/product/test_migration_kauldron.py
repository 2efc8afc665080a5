"""docs/migrate.md: kauldron's lines, and ours.

What the old ones do was read in kauldron's `sharding_utils.py`, and is written down here anew.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import short, table

import treeshard as ts

TABLE = table("From kauldron")
row = TABLE.row


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("devices=8")


def test_every_row_has_a_test() -> None:
    TABLE.check()


@row("kd.sharding.DEVICES_MESH")
def test_mesh(ours) -> None:
    assert ours() == Mesh(np.asarray(jax.devices()), ("devices",))


def old_fsdp(leaf: Any, floor: float = 4) -> P:
    """The longest dim that the device count divides, of leaves of more than `floor` MiB."""
    divisible = [i for i, dim in enumerate(leaf.shape) if dim % 8 == 0]
    if np.prod(leaf.shape) * leaf.dtype.itemsize <= floor * 2**20 or not divisible:
        return P()
    return P(*[None] * max(divisible, key=lambda i: (leaf.shape[i], i)), "devices")


PARAMS = {
    "dense": {"kernel": struct(1024, 1032), "bias": struct(1032), "square": struct(2048, 2048)},
    "limit": [struct(1024, 1024), struct(2**20 + 8)],
    "odd": struct(1025, 1027),
    "half": struct(1024, 2056, dtype="bfloat16"),
    "scale": struct(),
}


@row("kd.sharding.FSDPSharding(min_size_to_shard_mb=4)(params)")
def test_fsdp(ours, mesh) -> None:
    old = jax.tree.map(old_fsdp, PARAMS)
    assert short(ours(params=PARAMS, mesh=mesh)) == old
    assert {P(), P("devices"), P(None, "devices")} == set(jax.tree.leaves(old))


@row("kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding())")
def test_params(ours, mesh) -> None:
    plan = ours(params=PARAMS, mesh=mesh)
    large = {"kernel": P(None, "devices"), "bias": P(), "square": P(None, "devices")}
    assert plan.specs["dense"] == large == jax.tree.map(old_fsdp, PARAMS["dense"])
    assert plan.specs["limit"] == [P(None, "devices"), P("devices")]  # there the first is whole
    assert old_fsdp(PARAMS["limit"][0]) == P()
    (found,) = plan.findings
    assert (found.code, found.paths) == ("left-whole", ("odd",))


@row("kd.sharding.ShardingStrategy(opt_state=None)")
def test_optimizer_state(ours, mesh) -> None:
    params = {"w": struct(2048, 1024), "b": struct(8)}
    optimizer = optax.adam(1e-3)
    opt_state = jax.eval_shape(optimizer.init, params)
    rules = [(".*", ts.fsdp("devices"))]
    found = ours(params=params, rules=rules, opt_state=opt_state, mesh=mesh).specs
    assert found[0].mu == found[0].nu == {"w": P("devices"), "b": P()}
    # Where the compiler decides:
    small = {"w": jnp.ones((8, 8))}
    placed = ts.shard(small, P("devices"), mesh)
    assert not placed["w"].sharding.is_fully_replicated
    state = jax.jit(optimizer.init)(placed)
    assert state[0].mu["w"].sharding.is_fully_replicated


@row("kd.sharding.with_sharding_constraint(tree, shardings)")
def test_constraint(ours, mesh) -> None:
    first = NamedSharding(mesh, P("devices"))
    tree = {"a": jnp.ones((8, 2)), "b": {"c": jnp.ones((8, 3)), "d": jnp.ones(16)}}
    out = ours(tree=tree, shardings={"a": None, "b": first})
    assert out["a"] is tree["a"]
    assert ts.get_partition_spec(out["b"]) == {"c": P("devices"), "d": P("devices")}
    assert ours(tree=struct(8), shardings=first).sharding == first
    with pytest.raises(ts.SpecError, match="is not a spec"):
        ours(tree=tree, shardings=lambda tree: first)
    plan = ts.plan(tree, [("a|c", P("devices")), ("d", None)], mesh, min_size=0)
    assert ts.get_partition_spec(ours(tree=tree, shardings=plan)) == plan.specs
    odd = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, first))(jnp.ones(7))
    assert odd.sharding.is_fully_replicated
    with pytest.warns(ts.ShardingWarning, match="7 is not divisible"):
        jax.jit(lambda x: ours(tree=x, shardings=first))(jnp.ones(7))


@row("kd.sharding.device_put(batch, kd.sharding.FIRST_DIM)")
def test_batch(ours, mesh) -> None:
    batch = {"image": np.ones((8, 2), np.float32), "step": 3}
    placed = ours(batch=batch, mesh=mesh)
    assert placed["image"].sharding.spec == P("devices")
    assert placed["step"] == 3
    assert type(placed["step"]) is int
    with pytest.raises(ts.SpecError, match="image: .* 7 is not divisible"):
        ours(batch={"image": np.ones((7, 2), np.float32)}, mesh=mesh)


@row("kd.ckpts.Checkpointer(save_interval_steps=100, max_to_keep=3)")
def test_checkpoints(ours, mesh, tmp_path) -> None:
    x = np.arange(8, dtype=np.float32)
    with ours(directory=tmp_path / "run") as checkpoints:
        saved = [checkpoints.save(step, {"w": x + step}) for step in (0, 50, 100, 200, 300)]
        checkpoints.wait()
        assert saved == [True, False, True, True, True]
        assert checkpoints.steps() == (100, 200, 300)
        plan = ts.plan({"w": x}, [("w", P("devices"))], mesh, min_size=0)
        step, state = checkpoints.restore_latest(plan)
    assert step == 300
    assert state["w"].sharding.spec == P("devices")
    np.testing.assert_array_equal(state["w"], x + 300)


# ------------------------------------------------------------------ a loop

RULES = [("step", None), (".*", ts.fsdp("devices", min_size=0))]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def init(rng: jax.Array) -> dict[str, Any]:
    params = {"w": jax.random.normal(rng, (16, 8))}
    return {"step": jnp.asarray(0), "params": params, "opt_state": OPTIMIZER.init(params)}


@row("kd.sharding.with_sharding_constraint(state, sharding.state)")
def test_init(ours, mesh) -> None:
    rng = jax.random.key(0)
    state, plan = ours(init=init, rng=rng, rules=RULES, mesh=mesh)
    assert ts.get_partition_spec(state) == plan.specs
    assert plan.specs["params"] == plan.specs["opt_state"][0].trace == {"w": P("devices")}
    np.testing.assert_array_equal(state["params"]["w"], init(rng)["params"]["w"])


@row('jax.jit(step, donate_argnames=("state",))')
def test_step(ours, mesh, compiles) -> None:
    def step(state: Any, batch: jax.Array) -> Any:
        return {"w": state["w"] + batch.mean(), "step": state["step"] + 1}, batch.sum()

    state = {"w": jnp.ones((16, 8)), "step": jnp.asarray(0)}
    plan = ts.plan(state, RULES, mesh)
    run = ours(step=step, plan=plan)
    batch = np.ones((8, 2), np.float32)
    state, total = run(ts.shard(state, plan), batch)
    before = len(compiles)
    state, total = run(state, batch)
    assert len(compiles) == before
    assert ts.get_partition_spec(state) == plan.specs
    assert float(total) == 16
    assert int(state["step"]) == 2

"""docs/migrate.md: openpi's lines, and ours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import struct
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import (
    check_step,
    longest_dim,
    mebibytes,
    short,
    table,
)

import treeshard as ts

row = table("From openpi", "batch=2,fsdp=4")


@row("sharding.make_mesh(num_fsdp_devices)")
def test_mesh(ours) -> None:
    mesh = ours(num_fsdp_devices=4)
    old = jax.make_mesh((2, 4), ("batch", "fsdp"))
    assert mesh.shape == old.shape
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(old.axis_types) == {AxisType.Explicit}


def old_fsdp(leaf: Any) -> P:
    """Leaves of 2 dims and 4 MiB or more are split."""
    if np.ndim(leaf) < 2 or mebibytes(leaf) < 4:
        return P()
    return longest_dim(leaf.shape, "fsdp", 4)


STATE = {
    "params": [struct(1024, 1024), struct(2048, 1024), struct(1023, 1028), struct(1023, 1024)],
    "small": {"bias": struct(1024), "conv": struct(3, 3, 64, 64)},
    "odd": struct(1025, 1027),
    "deep": struct(18, 1024, 2048),
    "step": struct(),
    "count": 0,
}


@row("sharding.fsdp_sharding(train_state_shape, mesh, min_size_mbytes=4)")
def test_fsdp(planned) -> None:
    old = jax.tree.map(old_fsdp, STATE)
    assert {P(), P("fsdp"), P(None, "fsdp"), P(None, None, "fsdp")} == set(jax.tree.leaves(old))
    assert planned(train_state_shape=STATE).specs == old
    found = planned(train_state_shape=STATE).shardings
    assert found["count"] == P()
    assert short(found) == old
    assert found["deep"] == NamedSharding(row.mesh, P(None, None, "fsdp"))
    others = {"half": struct(1024, 1024, dtype="bfloat16"), "vector": struct(2**20)}
    assert jax.tree.map(old_fsdp, others) == {"half": P(), "vector": P()}
    found = planned(train_state_shape=others).specs
    assert found == {"half": P(None, "fsdp"), "vector": P("fsdp")}


@row("sharding.activation_sharding_constraint(x)")
def test_activations(ours) -> None:
    x = jnp.ones((8, 4))
    assert ours(x=x) is x
    both = NamedSharding(row.mesh, P(("batch", "fsdp")))
    with jax.set_mesh(row.mesh):
        assert jax.jit(lambda x: ours(x=x))(x).sharding.is_equivalent_to(both, 2)
        with pytest.warns(ts.ShardingWarning, match="6 is not divisible"):
            assert short(ours(x=jnp.ones((6, 4))).sharding) == P("batch")


test_init = row.makes_state(
    "jax.jit(init, donate_argnums=(1,), in_shardings=replicated_sharding,"
    " out_shardings=state_sharding)(init_rng, partial_params)",
    [(".*", ts.fsdp("fsdp"))],
    P(None, "fsdp"),
)
test_batch = row.splits_rows(
    "jax.make_array_from_process_local_data(data_sharding, x)", P(("batch", "fsdp"))
)


RULES = [(".*", ts.fsdp("fsdp", min_size=64))]


@row(
    "jax.jit(functools.partial(train_step, config),"
    " in_shardings=(replicated_sharding, train_state_sharding, data_sharding),"
    " out_shardings=(train_state_sharding, replicated_sharding), donate_argnums=(1,))"
)
def test_step(ours) -> None:
    def train_step(config: float, rng: jax.Array, state: Any, batch: jax.Array) -> Any:
        noise = jax.random.normal(jax.random.fold_in(rng, state["step"]), batch.shape)
        loss = lambda w: jnp.mean(((batch + noise) @ w) ** 2)  # noqa: E731
        value, grad = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - config * grad, "step": state["step"] + 1}, {"loss": value}

    rng, state = jax.random.key(1), {"w": jnp.ones((16, 8)), "step": jnp.int32(0)}
    plan = ts.plan(state, RULES, row.mesh)
    step = ours(train_step=train_step, config=0.1, rng=rng, plan=plan)
    old = lambda state, batch: train_step(0.1, rng, state, batch)  # noqa: E731
    check_step(step, plan, old, state, np.ones((8, 16), np.float32))

"""docs/migrate.md: openpi's lines, and ours.

What the old ones do was read in openpi's `training/sharding.py`, and is written down here anew.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import struct
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import check_init, check_step, longest_dim, mib, short, table

import treeshard as ts

TABLE = table("From openpi")
row = TABLE.row


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("batch=2,fsdp=4")


@row("sharding.make_mesh(num_fsdp_devices)")
def test_mesh(ours) -> None:
    mesh = ours(num_fsdp_devices=4)
    assert dict(mesh.shape) == {"batch": 2, "fsdp": 4}
    old = jax.make_mesh((2, 4), ("batch", "fsdp"))
    assert old.shape == mesh.shape
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(old.axis_types) == {AxisType.Explicit}


def old_fsdp(leaf: Any) -> P:
    """The longest dim of leaves of 2 dims and 4 MiB or more; of equal dims, any."""
    if len(getattr(leaf, "shape", ())) < 2 or mib(leaf) < 4:
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
def test_fsdp(ours, mesh) -> None:
    old = jax.tree.map(old_fsdp, STATE)
    plan = ours(train_state_shape=STATE, mesh=mesh)
    assert plan.specs == old
    assert {P(), P("fsdp"), P(None, "fsdp"), P(None, None, "fsdp")} == set(jax.tree.leaves(old))
    halves = {"w": struct(1024, 1024, dtype="bfloat16"), "v": struct(2**20)}
    assert jax.tree.map(old_fsdp, halves) == {"w": P(), "v": P()}
    found = ours(train_state_shape=halves, mesh=mesh).specs
    assert found == {"w": P(None, "fsdp"), "v": P("fsdp")}
    assert "no-dim fsdp" in str(plan)


@row("state_sharding = sharding.fsdp_sharding(train_state_shape, mesh)")
def test_shardings(ours, mesh) -> None:
    found = ours(train_state_shape=STATE, mesh=mesh)
    assert found["count"] == P()
    assert short(found) == jax.tree.map(old_fsdp, STATE)
    assert found["deep"] == NamedSharding(mesh, P(None, None, "fsdp"))


@row("with sharding.set_mesh(mesh):")
def test_context(ours, mesh) -> None:
    other = ts.make_mesh("batch=8")
    with ours(mesh=mesh):
        assert ts.get_incontext_mesh() == mesh
        with ours(mesh=other):
            assert ts.get_incontext_mesh() == other
        assert ts.get_incontext_mesh() == mesh


@row("sharding.activation_sharding_constraint(x)")
def test_activations(ours, mesh) -> None:
    x = jnp.ones((8, 4))
    assert ours(x=x) is x
    both = NamedSharding(mesh, P(("batch", "fsdp")))
    with jax.set_mesh(mesh):
        assert jax.jit(lambda x: ours(x=x))(x).sharding.is_equivalent_to(both, 2)
    old = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, both))
    for rows, given in [(6, P("batch")), (7, P())]:
        odd = jnp.ones((rows, 4))
        with (
            jax.set_mesh(mesh),
            pytest.warns(ts.ShardingWarning, match=f"{rows} is not divisible"),
        ):
            assert short(ours(x=odd).sharding) == given
        assert short(old(odd).sharding) == given
        with pytest.raises(ValueError, match="should evenly divide"):
            jax.lax.with_sharding_constraint(odd, both)


@row("jax.make_array_from_process_local_data(data_sharding, x)")
def test_batch(ours, mesh) -> None:
    batch = {"image": np.ones((8, 2), np.float32)}
    both = NamedSharding(mesh, P(("batch", "fsdp")))
    old = jax.make_array_from_process_local_data(both, batch["image"])
    assert ours(batch=batch, mesh=mesh)["image"].sharding == old.sharding
    with pytest.raises(ts.SpecError, match="image: .* 6 is not divisible"):
        ours(batch={"image": np.ones((6, 2), np.float32)}, mesh=mesh)


@row("checkpoint_manager.save(step, items)")
def test_checkpoints(ours, mesh, tmp_path) -> None:
    x = np.arange(8, dtype=np.float32)
    with ours(directory=tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": x + step, "step": step})
        plan = ts.plan({"w": x, "step": 0}, [("w", P("fsdp"))], mesh, min_size=0)
        step, state = checkpoints.restore_latest(plan)
        assert checkpoints.steps() == (2,)
    assert (step, state["step"], state["w"].sharding.spec) == (2, 2, P("fsdp"))
    np.testing.assert_array_equal(state["w"], x + 2)


# ------------------------------------------------------------------ a loop

RULES = [(".*", ts.fsdp("fsdp", min_size=64))]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def init(rng: jax.Array, partial_params: Any) -> dict[str, Any]:
    params = {"w": jax.random.normal(rng, (16, 8)), "b": jnp.zeros(8)} | partial_params
    return {"step": 0, "params": params, "opt_state": OPTIMIZER.init(params)}


@row(
    "jax.jit(init, donate_argnums=(1,), in_shardings=replicated_sharding,"
    " out_shardings=state_sharding)(init_rng, partial_params)"
)
def test_init(ours, mesh) -> None:
    key, loaded = jax.random.key(0), {"b": np.arange(8, dtype=np.float32)}
    made = ours(init=init, init_rng=key, partial_params=loaded, rules=RULES, mesh=mesh)
    check_init(made, init, key, loaded)
    specs = made[1].specs
    assert specs["params"] == specs["opt_state"][0].trace == {"w": P("fsdp"), "b": P()}


@row(
    "jax.jit(functools.partial(train_step, config),"
    " in_shardings=(replicated_sharding, train_state_sharding, data_sharding),"
    " out_shardings=(train_state_sharding, replicated_sharding), donate_argnums=(1,))"
)
def test_step(ours, mesh) -> None:
    def train_step(config: float, rng: jax.Array, state: Any, batch: jax.Array) -> Any:
        noise = jax.random.normal(jax.random.fold_in(rng, state["step"]), batch.shape)
        loss = lambda w: jnp.mean(((batch + noise) @ w) ** 2)  # noqa: E731
        value, grad = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - config * grad, "step": state["step"] + 1}, {"loss": value}

    rng, state = jax.random.key(1), {"w": jnp.ones((16, 8)), "step": jnp.int32(0)}
    plan = ts.plan(state, RULES, mesh)
    batch = np.ones((8, 16), np.float32)
    step = ours(train_step=train_step, config=0.1, rng=rng, plan=plan)
    check_step(step, partial(train_step, 0.1, rng), plan, state, batch)

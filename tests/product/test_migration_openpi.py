"""docs/migrate.md: openpi's lines, and ours.

What the old ones do was read in openpi's `training/sharding.py`, and is written down here anew.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import struct
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import short, table

import treeshard as ts

TABLE = table("From openpi")
row = TABLE.row


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("batch=2,fsdp=4")


def test_every_row_has_a_test() -> None:
    TABLE.check()


@row("sharding.make_mesh(num_fsdp_devices)")
def test_mesh(ours) -> None:
    mesh = ours(num_fsdp_devices=4)
    assert dict(mesh.shape) == {"batch": 2, "fsdp": 4}
    old = jax.make_mesh((2, 4), ("batch", "fsdp"))
    assert old.shape == mesh.shape
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(old.axis_types) == {AxisType.Explicit}


def old_fsdp(leaf: Any, size: int = 4, floor: float = 4) -> P:
    """The longest dim that divides, of leaves of 2 dims and `floor` MiB or more."""
    if not hasattr(leaf, "shape") or size == 1 or len(leaf.shape) < 2:
        return P()
    divisible = [i for i in np.argsort(leaf.shape)[::-1] if leaf.shape[i] % size == 0]
    if np.prod(leaf.shape) * leaf.dtype.itemsize < floor * 2**20 or not divisible:
        return P()
    return P(*[None] * int(divisible[0]), "fsdp")


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
    # Of equal dims, any of them there.
    equal = struct(512, 512, 2, 2)
    assert ours(train_state_shape=equal, mesh=mesh).specs == P(None, "fsdp")
    assert old_fsdp(equal) in (P("fsdp"), P(None, "fsdp"))


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
    loaded = {"b": np.arange(8, dtype=np.float32)}
    state, plan = ours(
        init=init, init_rng=jax.random.key(0), partial_params=loaded, rules=RULES, mesh=mesh
    )
    assert ts.get_partition_spec(state) == plan.specs
    assert plan.specs["params"] == plan.specs["opt_state"][0].trace == {"w": P("fsdp"), "b": P()}
    np.testing.assert_array_equal(state["params"]["b"], loaded["b"])


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
    placed = ts.shard(state, plan)
    for _ in range(2):
        state, expected = train_step(0.1, rng, state, jnp.asarray(batch))
        placed, info = step(placed, batch)
        np.testing.assert_allclose(info["loss"], expected["loss"], rtol=1e-5)
    assert ts.get_partition_spec(placed) == plan.specs

"""Leaves in the memory of the host: planned, placed, brought in for a step and back, saved."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import OFFLOADS, assert_same, struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.training import jit_step, shard_map_step

pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")

WIDTH = 64
OPTIMIZER = optax.adamw(1e-2)
HOST = "pinned_host"


def init(key: Any) -> Any:
    names = ["layer_0", "layer_1"]
    keys = jax.random.split(key, (2, 2))
    params = {
        name: {
            "up": jax.random.normal(one[0], (WIDTH, 4 * WIDTH)) / 8,
            "down": jax.random.normal(one[1], (4 * WIDTH, WIDTH)) / 16,
        }
        for name, one in zip(names, keys, strict=True)
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = batch
        for name in params:
            layer = ts.with_sharding_constraint(params[name], P())
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def rules(memory: str | None) -> Any:
    return [("opt_state", ts.fsdp("fsdp", memory=memory)), (".*", ts.fsdp("fsdp"))]


@pytest.fixture
def mesh() -> Mesh:
    return ts.make_mesh("fsdp=8")


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@OFFLOADS
def test_a_state_is_trained_moved_and_saved(mesh: Mesh, tmp_path: Any) -> None:
    key, batch = jax.random.key(0), np.ones((8, WIDTH), "float32")
    losses, memories = {}, {}
    for memory in (None, HOST):
        state, plan = ts.init_sharded(init, key, rules=rules(memory), mesh=mesh)
        step = jit_step(train_step, plan)
        memories[memory] = step.compile(plan.structs, batch).memory()
        losses[memory] = []
        for _ in range(3):
            state, loss = step(state, batch)
            losses[memory].append(float(loss))
        assert kinds(state["opt_state"]) == {memory or "device"}
        assert kinds(state["params"]) == {"device"}
    assert losses[HOST] == losses[None]
    assert memories[HOST].host == memories[None].arguments - memories[HOST].arguments == 2**16
    gathered = ts.gather(state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    on_devices = ts.plan(state, rules(None), mesh)
    for moved in (
        ts.shard(gathered, plan),
        ts.reshard(ts.reshard(state, on_devices), plan),
        ts.reshard(
            ts.reshard(state, plan.on(ts.make_mesh("fsdp=4", devices=jax.devices()[:4]))), plan
        ),
    ):
        assert jax.tree.map(lambda x: x.sharding, moved) == shardings
        assert_same(ts.gather(moved), gathered)
    assert kinds(ts.reshard(state, on_devices)) == {"device"}
    save(tmp_path / "x", state)
    for like in (plan, state):
        restored = restore(tmp_path / "x", like)
        assert jax.tree.map(lambda x: x.sharding, restored) == shardings
        assert_same(ts.gather(restored), gathered)
    state, _ = step(restored, batch)
    assert kinds(state["opt_state"]) == {HOST}


@OFFLOADS
def test_a_step_by_hand(mesh: Mesh) -> None:
    plan = ts.plan({"w": struct(1024, 64)}, [("w", ts.shard_dim("fsdp", 0, memory=HOST))], mesh)
    step = shard_map_step(
        lambda s, b: ({"w": s["w"] + 1}, jax.lax.pmean(b.mean(), "fsdp")), plan, batch=P("fsdp")
    )
    state = ts.shard({"w": np.zeros((1024, 64), "float32")}, plan)
    state, _ = step(state, np.ones((8, 2), "float32"))
    assert kinds(state) == {HOST}
    np.testing.assert_array_equal(state["w"], np.ones((1024, 64)))


def test_a_plan_shows_the_bytes_of_each_memory(mesh: Mesh) -> None:
    state = jax.eval_shape(init, jax.random.key(0))
    plan = ts.plan(state, rules(HOST), mesh)
    layer = 2 * 4 * WIDTH * WIDTH * 4 // 8  # bytes on a device
    assert plan.bytes_per_device() == 2 * layer + 4  # and the counter
    assert plan.bytes_per_device(HOST) == 4 * layer
    assert "P(None, 'fsdp') in pinned_host" in str(plan)
    assert "32.0 KiB and 64.0 KiB in pinned_host on the fullest of 8 devices" in str(plan)
    assert plan.on("fsdp=8") == plan
    on_devices = ts.plan(state, rules(None), mesh)
    assert on_devices != plan
    assert plan.diff(on_devices).bytes == 4 * layer
    assert "P(None, 'fsdp') in pinned_host  P(None, 'fsdp')" in str(plan.diff(on_devices))
    followed = ts.plan(state["params"], [(".*", ts.fsdp("fsdp", memory=HOST))], mesh)
    assert followed.follow(state["opt_state"]).bytes_per_device(HOST) == 4 * layer


def test_a_memory_that_the_devices_lack(mesh: Mesh) -> None:
    tree = {"w": np.ones((1024, 64), "float32")}
    plan = ts.plan(tree, [("w", ts.fsdp("fsdp", memory="vault"))], mesh)
    for call in (lambda: ts.shard(tree, plan), lambda: jit_step(train_step, plan)(tree, tree)):
        with pytest.raises(ts.MeshError) as error:
            call()
        assert str(error.value).startswith("The plan places leaves in vault: Could not find memory")
        assert "device, pinned_host" in str(error.value)


def test_a_state_in_the_wrong_memory(mesh: Mesh) -> None:
    tree = {"w": np.ones((1024, 64), "float32")}
    plan = ts.plan(tree, [("w", ts.fsdp("fsdp", memory=HOST))], mesh)
    step = jit_step(lambda s, b: (s, b.sum()), plan, batch=P("fsdp"))
    with pytest.raises(ts.SpecError, match=r"planned as P\('fsdp',\) in pinned_host"):
        step(ts.shard(tree, P("fsdp"), mesh), np.ones(8, "float32"))

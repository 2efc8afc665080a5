"""Arrays of a donated state that share memory are copied, with a warning that names both."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.arrays import second_handle
from treeshard.training import jit_step, shard_map_step

pytestmark = pytest.mark.usefixtures("standard_promotion")


def placed(value=1.0, mesh=None):
    return ts.shard(np.full((16, 4), value, "float32"), P("fsdp"), mesh or ts.make_mesh("fsdp=8"))


def plan_of(state):
    return ts.plan(state, [(".*", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)


def add(state, batch):
    return {name: x + batch.sum() for name, x in state.items()}, batch.mean()


def keep(state, batch):
    return {"params": state["params"] + 1, "ema": state["ema"]}, batch.sum()


def assert_warned(told, path, other, where="jit_step"):
    (one,) = told
    assert str(one.message) == (
        f"{where}: {path}: it shares its memory with {other}, and a step that donates its state can"
        " use that memory once, so it was copied. Make it an array of its own with `jnp.copy`, or"
        " make the step with `donate=False`."
    )


@pytest.mark.parametrize("other", [lambda p: p, second_handle], ids=["object", "buffers"])
def test_one_array_at_two_paths(other) -> None:
    p = placed()
    state = {"params": p, "ema": other(p)}
    step = jit_step(keep, plan_of(state), batch=P("fsdp"))
    with pytest.warns(ts.ShardingWarning) as told:
        state, _ = step(state, np.ones((8, 2), "float32"))
    assert_warned(told, "params", "ema")  # leaves are in the order of their names
    for _ in range(2):  # and no second warning, which would be an error
        state, _ = step(state, np.ones((8, 2), "float32"))
    np.testing.assert_array_equal(state["params"], np.full((16, 4), 4.0))
    np.testing.assert_array_equal(state["ema"], np.ones((16, 4)))


def test_one_device() -> None:
    mesh = ts.make_mesh("fsdp=1", devices=jax.devices()[:1])
    state = {"params": placed(mesh=mesh), "ema": placed(mesh=mesh)}
    step = jit_step(keep, ts.plan(state, [(".*", P())], mesh), batch=P())
    batch = np.ones((8, 2), "float32")
    state, _ = step(state, batch)
    given = {**state, "ema": second_handle(state["params"])}
    with pytest.warns(ts.ShardingWarning) as told:
        after, _ = step(given, batch)
    assert_warned(told, "params", "ema")
    np.testing.assert_array_equal(after["params"], np.full((16, 4), 3.0))
    np.testing.assert_array_equal(after["ema"], np.full((16, 4), 2.0))
    with pytest.raises(ts.DeletedLeafError, match="ema: deleted, or donated to an earlier step"):
        step(given, batch)
    step(after, batch)  # nothing is broken


def test_the_same_array_again_after_some_steps() -> None:
    state = {"params": placed(), "ema": placed()}
    step = jit_step(keep, plan_of(state), batch=P("fsdp"))
    batch = np.ones((8, 2), "float32")
    state, _ = step(state, batch)
    with pytest.warns(ts.ShardingWarning) as told:
        state, _ = step({**state, "ema": state["params"]}, batch)
    assert_warned(told, "params", "ema")
    np.testing.assert_array_equal(state["ema"], np.full((16, 4), 2.0))
    with pytest.warns(ts.ShardingWarning):
        state, _ = step({**state, "ema": second_handle(state["params"])}, batch)
    np.testing.assert_array_equal(state["ema"], np.full((16, 4), 3.0))


def test_a_shard_of_another_array() -> None:
    mesh = ts.make_mesh("fsdp=8")
    state = {"whole": ts.shard(np.ones((2, 4), "float32"), P(), mesh)}
    parts = [shard.data for shard in state["whole"].addressable_shards]
    state["rows"] = jax.make_array_from_single_device_arrays((16, 4), placed().sharding, parts)
    plan = ts.plan(state, [("rows", P("fsdp")), ("whole", None)], mesh, min_size=0)
    with pytest.warns(ts.ShardingWarning, match="whole: it shares its memory with rows"):
        state, _ = jit_step(add, plan, batch=P("fsdp"))(state, np.ones((8, 2), "float32"))
    np.testing.assert_array_equal(state["rows"], np.full((16, 4), 17.0))


@pytest.mark.parametrize("other", [lambda p: p, second_handle], ids=["object", "buffers"])
def test_the_batch_is_in_the_state(other) -> None:
    batch = placed()
    step = jit_step(add, plan_of({"last": batch}), batch=P("fsdp"))
    with pytest.warns(ts.ShardingWarning) as told:
        state, mean = step({"last": other(batch)}, batch)
    assert_warned(told, "last", "the batch")
    assert mean == 1.0
    np.testing.assert_array_equal(state["last"], np.full((16, 4), 65.0))
    np.testing.assert_array_equal(batch, np.ones((16, 4)))
    with pytest.warns(ts.ShardingWarning):  # what a step returned, as its next batch
        step(state, state["last"])


def test_keys_and_moved_arrays() -> None:
    mesh = ts.make_mesh("fsdp=8")
    key = ts.shard(jax.random.key(0), P(), mesh)
    p = placed()
    other = ts.reshard(p, P("data"), ts.make_mesh("data=8"))  # relabelled, without a copy
    state = {"a": p, "b": ts.reshard(other, P("fsdp"), mesh), "key": key, "key2": key}
    plan = ts.plan(state, [("key", None), (".*", P("fsdp"))], mesh, min_size=0)
    step = jit_step(lambda s, b: ({**s, "a": s["a"] + 1}, b.sum()), plan)
    with pytest.warns(ts.ShardingWarning) as told:
        state, _ = step(state, np.ones((8, 2), "float32"))
    assert "b: it shares its memory with a," in str(told[0].message)
    assert "key2: it shares its memory with key," in str(told[0].message)
    np.testing.assert_array_equal(state["b"], np.ones((16, 4)))
    assert state["key2"] == jax.random.key(0)


def test_shard_map_step() -> None:
    p = placed()
    step = shard_map_step(
        lambda s, b: (jax.tree.map(lambda x: x + 1, s), jax.lax.psum(b.sum(), "fsdp")),
        plan_of({"params": p, "ema": p}),
        batch=P("fsdp"),
    )
    with pytest.warns(ts.ShardingWarning) as told:
        state, total = step({"params": p, "ema": p}, np.ones((8, 2), "float32"))
    assert_warned(told, "params", "ema", "shard_map_step")
    assert total == 16
    np.testing.assert_array_equal(state["ema"], np.full((16, 4), 2.0))


def test_nothing_is_copied_without_donation_or_inside_jit() -> None:
    p = placed()
    state = {"params": p, "ema": p}
    batch = jnp.ones((8, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "it shares its memory")
        new, _ = jit_step(add, plan_of(state), batch=P("fsdp"), donate=False)(state, batch)
        step = jit_step(add, plan_of(state), batch=P("fsdp"))
        inside, _ = jax.jit(step)(state, batch)
        step.lower(state, batch)
    np.testing.assert_array_equal(new["ema"], inside["ema"])
    assert not p.is_deleted()


def test_copies_that_init_sharded_returns_are_separate() -> None:
    def init():
        p = jnp.ones((16, 4))
        return {"params": p, "ema": jnp.copy(p)}

    state, plan = ts.init_sharded(init, rules=[(".*", P("fsdp"))], mesh="fsdp=8", min_size=0)
    state, _ = jit_step(keep, plan, batch=P("fsdp"))(state, np.ones((8, 2), "float32"))
    np.testing.assert_array_equal(state["ema"], np.ones((16, 4)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("devices", [1, 8])
def test_deleted_and_shared_arrays_given_to_a_program_that_has_run(devices, compiled) -> None:
    mesh = ts.make_mesh("fsdp=-1", devices=jax.devices()[:devices])
    state = {"params": placed(mesh=mesh), "ema": placed(mesh=mesh)}
    plan = ts.plan(state, [(".*", P("fsdp"))], mesh, min_size=0)
    step, batch = jit_step(add, plan), np.ones((8, 2), "float32")
    if compiled:
        step.compile(plan.structs, batch)
    first, _ = step(state, batch)
    second, _ = step(first, batch)
    with pytest.raises(ts.DeletedLeafError, match="params: deleted, or donated to an earlier step"):
        step({"params": first["params"], "ema": second["ema"]}, batch)
    with pytest.warns(ts.ShardingWarning, match="params: it shares its memory with ema"):
        third, _ = step({**second, "ema": second_handle(second["params"])}, batch)
    np.testing.assert_array_equal(third["params"], third["ema"])


def test_a_program_that_fails_while_it_runs_is_not_called_a_deleted_state() -> None:
    # On several devices, the CPU's runtime ends the process when a callback raises.
    mesh = ts.make_mesh("fsdp=1", devices=jax.devices()[:1])
    fails = []

    def look(x: np.ndarray) -> np.ndarray:
        if fails:
            raise ValueError("the callback failed")
        return x

    def run(state, batch):
        seen = jax.pure_callback(look, jax.ShapeDtypeStruct((), "float32"), batch.sum())
        return {name: x + seen for name, x in state.items()}, 0

    state = {"params": placed(mesh=mesh)}
    step, batch = jit_step(run, ts.plan(state, [(".*", P())], mesh), batch=P()), np.ones((8, 2))
    state, _ = step(state, batch.astype("float32"))
    fails.append(True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the callback failed"):
        jax.block_until_ready(step(state, batch.astype("float32")))


def test_arrays_that_shard_did_not_copy_go_with_the_state(fsdp_mesh) -> None:
    given = {"w": jnp.ones((8, 8)), "key": jax.random.key(7)}
    plan = ts.plan(given, [("w", P("fsdp")), ("key", None)], fsdp_mesh, min_size=0)
    step = ts.jit_step(lambda s, b: ({**s, "w": s["w"] * 2}, b.sum()), plan)
    copies = jax.tree.map(jnp.copy, given)
    step(ts.shard(copies, plan), jnp.ones(8))
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    step(ts.shard(given, plan), jnp.ones(8))
    with pytest.raises(ts.DeletedLeafError, match="key: .* from which `shard` made it without"):
        ts.shard(given, plan)

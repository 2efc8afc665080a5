"""Arrays of a donated state that share memory are copied, with a warning that names both."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.arrays import alias_array
from treeshard.training import jit_step, shard_map_step

pytestmark = pytest.mark.usefixtures("standard_promotion")


def placed(value=1.0, mesh=None, axis="fsdp"):
    return ts.shard(np.full((16, 4), value, "float32"), P(axis), mesh or ts.make_mesh("fsdp=8"))


def mesh_of(kind, sizes):
    return ts.make_mesh(sizes, axis_types=(getattr(AxisType, kind),))


def plan_of(state):
    return ts.plan(state, [(".*", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)


BATCH = np.ones((8, 2), "float32")


def add(state, batch):
    return {name: x + batch.sum() for name, x in state.items()}, batch.mean()


def keep(state, batch):
    return {"params": state["params"] + 1, "ema": state["ema"]}, 0


def assert_warned(told, path, other, where="jit_step"):
    (one,) = told
    assert str(one.message) == (
        f"{where}: {path}: it shares memory with {other}, and a step that donates its state can"
        " use that memory only once, so it was copied. Copy the array with `jnp.copy`, or make the"
        " step with `donate=False`."
    )


@pytest.mark.parametrize(
    ("make", "other"),
    [(jit_step, lambda p: p), (jit_step, alias_array), (shard_map_step, lambda p: p)],
    ids=["object", "buffers", "by hand"],
)
def test_one_array_at_two_paths(make, other) -> None:
    p = placed()
    state = {"params": p, "ema": other(p)}
    step = make(keep, plan_of(state), batch=P("fsdp"))
    with pytest.warns(ts.ShardingWarning) as told:
        state, _ = step(state, BATCH)
    assert_warned(told, "params", "ema", make.__name__)  # leaves are in the order of their names
    for _ in range(2):  # and no second warning, which would be an error
        state, _ = step(state, BATCH)
    np.testing.assert_array_equal(state["params"], np.full((16, 4), 4.0))
    np.testing.assert_array_equal(state["ema"], np.ones((16, 4)))
    with pytest.warns(ts.ShardingWarning) as told:  # the same again, after some steps
        state, _ = step({**state, "ema": state["params"]}, BATCH)
    assert_warned(told, "params", "ema", make.__name__)
    np.testing.assert_array_equal(state["ema"], np.full((16, 4), 4.0))


def test_a_shard_of_another_array() -> None:
    mesh = ts.make_mesh("fsdp=8")
    state = {"whole": ts.shard(np.ones((2, 4), "float32"), P(), mesh)}
    parts = [shard.data for shard in state["whole"].addressable_shards]
    state["rows"] = jax.make_array_from_single_device_arrays((16, 4), placed().sharding, parts)
    plan = ts.plan(state, [("rows", P("fsdp")), ("whole", None)], mesh, min_size=0)
    with pytest.warns(ts.ShardingWarning, match="whole: it shares memory with rows"):
        state, _ = jit_step(add, plan, batch=P("fsdp"))(state, BATCH)
    np.testing.assert_array_equal(state["rows"], np.full((16, 4), 17.0))


def test_the_batch_is_in_the_state() -> None:
    batch = placed()
    step = jit_step(add, plan_of({"last": batch}), batch=P("fsdp"))
    with pytest.warns(ts.ShardingWarning) as told:
        state, mean = step({"last": alias_array(batch)}, batch)
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
        state, _ = step(state, BATCH)
    assert "b: it shares memory with a," in str(told[0].message)
    assert "key2: it shares memory with key," in str(told[0].message)
    np.testing.assert_array_equal(state["b"], np.ones((16, 4)))
    assert state["key2"] == jax.random.key(0)


def test_nothing_is_copied_without_donation_or_inside_jit() -> None:
    p = placed()
    state = {"params": p, "ema": p}
    batch = jnp.ones((8, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "it shares memory")
        new, _ = jit_step(add, plan_of(state), batch=P("fsdp"), donate=False)(state, batch)
        step = jit_step(add, plan_of(state), batch=P("fsdp"))
        inside, _ = jax.jit(step)(state, batch)
        step.lower(state, batch)
    np.testing.assert_array_equal(new["ema"], inside["ema"])
    assert not p.is_deleted()


@pytest.mark.parametrize(("devices", "compiled"), [(1, False), (8, False), (8, True)])
def test_deleted_and_shared_arrays_given_to_a_program_that_has_run(devices, compiled) -> None:
    mesh = ts.make_mesh("fsdp=-1", devices=jax.devices()[:devices])
    state = {"params": placed(mesh=mesh), "ema": placed(mesh=mesh)}
    plan = ts.plan(state, [(".*", P("fsdp"))], mesh, min_size=0)
    step = jit_step(add, plan)
    if compiled:
        step.compile(plan.structs, BATCH)
    first, _ = step(state, BATCH)
    second, _ = step(first, BATCH)
    deleted = "donated to an earlier step. Continue with .* that the step returned(.|\n)*  params"
    with pytest.raises(ts.DeletedLeafError, match=deleted):
        step({"params": first["params"], "ema": second["ema"]}, BATCH)
    one = ts.shard(np.ones(8, np.float32), P("fsdp"), mesh)
    of_one = jit_step(
        lambda x, _: (x + 1, None), ts.plan(one, [(".*", P("fsdp"))], mesh, min_size=0)
    )
    of_one(one, BATCH)
    with pytest.raises(ts.DeletedLeafError, match="The leaves:\n  the state$"):
        of_one(one, BATCH)
    aliased = {**second, "ema": alias_array(second["params"])}
    if devices == 1:  # looked at only after JAX has refused it
        with pytest.raises(ts.StateError, match="params: it shares memory with ema"):
            step(aliased, BATCH)
        aliased = {**second, "ema": second["params"]}
    with pytest.warns(ts.ShardingWarning, match="params: it shares memory with ema"):
        third, _ = step(aliased, BATCH)
    np.testing.assert_array_equal(third["params"], third["ema"])
    np.testing.assert_array_equal(third["ema"], np.full((16, 4), 49.0))


@pytest.mark.parametrize("when", ["first", "warm", "compiled"])
@pytest.mark.parametrize(
    ("kind", "other", "names"),
    [
        ("Auto", "Explicit", "fsdp=8"),
        ("Explicit", "Auto", "fsdp=8"),
        ("Explicit", "Explicit", "data=8"),
    ],
)
def test_a_state_of_another_mesh_of_the_same_devices_is_not_copied(
    kind, other, names, when
) -> None:
    plan = ts.plan({"w": placed()}, [("w", P("fsdp"))], mesh_of(kind, "fsdp=8"), min_size=0)
    step = jit_step(add, plan)
    if when == "compiled":
        step.compile(plan.structs, BATCH)
    if when == "warm":
        step(ts.shard({"w": placed()}, plan), BATCH)
    mesh = mesh_of(other, names)
    given = placed(mesh=mesh, axis=names.removesuffix("=8"))
    state, _ = step({"w": given}, BATCH)
    np.testing.assert_array_equal(state["w"], np.full((16, 4), 17.0))
    assert state["w"].sharding.mesh == plan.mesh
    assert given.is_deleted()  # the step took its memory


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
    with pytest.raises(ts.DeletedLeafError, match="key: .* that `shard` reused without a copy"):
        ts.shard(given, plan)

"""Two processes save, each its own shards; if one of them fails, both raise."""

import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.full_disk import files_of_at_most
from tests.helpers import files_in, flip_in
from tests.multiprocess.states import differing, host_state, like, state_at
from tests.multiprocess.worker import Context, error_of
from treeshard._core.processes import exchange
from treeshard.checkpoint import Checkpoints, _checkpoints, _save, inspect, restore, save, verify

SAVED = [("half", P(None, "fsdp")), ("^w|int4", P("fsdp")), (".*", None)]
TENSOR = [("^w|int4", P("tensor", "data")), ("half", P("data")), (".*", None)]


def saved_state() -> dict[str, Any]:
    keys = ts.shard(jax.random.split(jax.random.key(0), 8), P("fsdp"), ts.make_mesh("fsdp=8"))
    return state_at(7, "fsdp=8", SAVED) | {"keys": keys}


def structs() -> dict[str, Any]:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    return like() | {"keys": keys}


def assert_is_the_state(found: dict[str, Any]) -> None:
    """Asserts the values of every shard that this process holds."""
    assert found.keys() == structs().keys()
    assert not differing(found, 7)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 8)))
    for shard in jax.random.key_data(found["keys"]).addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), keys[shard.index])


def check_a_saved_state_is_restored_by_all_and_by_one(context: Context) -> None:
    path, state = context.directory / "fsdp", saved_state()
    save(path, state)
    again = restore(path, state)
    assert_is_the_state(again)
    assert again["half"].sharding == state["half"].sharding
    mesh = ts.make_mesh("data=2,tensor=4")
    with jax.set_mesh(mesh):
        again = restore(path, ts.plan(structs(), TENSOR, mesh, min_size=0))
    assert_is_the_state(again)
    assert again["w"].sharding.spec == P("tensor", "data")
    if context.index == 1:
        host = host_state(7)
        of = {leaf.path: leaf for leaf in inspect(path).leaves}
        assert of["half"].spec == "P(None, 'fsdp')"
        verify(path)
        assert restore(path)["half"].tobytes() == host["half"].tobytes()


def check_small_arrays_that_one_process_stores_are_restored_by_shards(context: Context) -> None:
    """Each is one chunk, of which a process reads some parts."""
    tree = {f"w{i}": np.arange(64.0, dtype=np.float32).reshape(8, 8) + i for i in range(5)}
    save(context.directory / "small", tree)
    for spec in (P("fsdp"), P(None, "fsdp"), P()):
        plan = ts.plan(tree, [(".*", spec)], "fsdp=8", min_size=0)
        found = restore(context.directory / "small", plan)
        for name, x in found.items():
            assert x.sharding.spec == spec
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), tree[name][shard.index])


def check_own_copies_and_uncommitted_arrays_are_restored(context: Context) -> None:
    """Each process restores to devices of its own, and a step on devices may follow."""
    own = Mesh(np.array(jax.local_devices()), ("fsdp",))
    w = np.arange(8, dtype=np.float32)
    state = {
        "w": ts.shard(w, P("fsdp"), ts.make_mesh("fsdp=8")),
        "count": jnp.int32(3),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0, 3)),
        "on one": jax.device_put(w, jax.local_devices()[1]),
        "on own mesh": jax.device_put(w, NamedSharding(own, P("fsdp"))),
    }
    with Checkpoints(context.directory / "copies") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        _, found = checkpoints.restore_latest(state)
        checkpoints.save(2, found)
        found = checkpoints.restore(1, found)
    for name, x in state.items():
        assert found[name].sharding == x.sharding, name
        assert found[name].committed == x.committed, name
    for name in ("on one", "on own mesh"):
        np.testing.assert_array_equal(np.asarray(found[name]), w)
    assert int(found["count"]) == 3
    next_one = jax.jit(lambda state: state["w"] * state["count"])(found)
    np.testing.assert_array_equal(ts.gather(next_one), 3 * w)
    gathered = ts.gather(state)
    save(context.directory / "gathered", gathered)
    assert restore(context.directory / "gathered", gathered)["key"] == gathered["key"]


def check_what_another_process_has_alone_is_an_error(context: Context) -> None:
    """Process 1 cannot tell its array from a copy of its own, which process 0 stores."""
    meshes = [Mesh(np.array(jax.local_devices(process_index=i)), ("fsdp",)) for i in (0, 1)]
    x = np.arange(8, dtype=np.float32)
    first, second = (
        jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, P("fsdp")), x.__getitem__, dtype=x.dtype
        )
        for mesh in meshes
    )
    path = context.directory / "alone"
    kind = ts.ProcessError if context.index == 1 else ts.LeafError
    told = error_of(lambda: save(path, {"w": second}), kind)
    assert "w: float32[8]: it is on devices of process 1 alone. Move it to devices of" in told
    assert not path.exists()
    save(path, {"w": first, "empty": np.zeros((0, 4), np.float32)})
    struct = jax.ShapeDtypeStruct(
        (0, 4), np.float32, sharding=NamedSharding(meshes[1], P(None, "fsdp"))
    )
    found = restore(path, {"w": x, "empty": struct})
    np.testing.assert_array_equal(found["w"], x)
    assert found["empty"].sharding == struct.sharding


def check_a_run(context: Context) -> None:
    state = saved_state()
    with Checkpoints(context.directory / "run", keep=2) as checkpoints:
        assert checkpoints.restore_latest(state) is None
        for step in (1, 2, 3):
            assert checkpoints.save(step, {**state, "step": step})
        found = checkpoints.restore_latest({**state, "step": 0})
        assert found is not None
        assert found[0] == found[1]["step"] == 3
        assert_is_the_state({**found[1], "step": 7})
        error = ts.CheckpointError if context.index == 0 else ts.ProcessError
        with pytest.raises(error, match="this process is already writing here"):
            Checkpoints(context.directory / "run")
    if context.index == 0:  # process 0 removes older ones
        assert files_in(context.directory / "run") == ["2", "3"]
    other = context.directory / "other"
    told = error_of(lambda: Checkpoints(other, keep=2 + context.index, every=1 + context.index))
    assert "keep: 2 on process 0; 3 on process 1" in told
    assert "every: 1 on process 0; 2 on process 1" in told


def check_a_run_goes_back_to_an_earlier_step(context: Context) -> None:
    """It replaces a step, with other values than an abandoned run, and removes later ones."""
    state = saved_state()
    run = context.directory / "back"
    with Checkpoints(run) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {**state, "step": 100 + step})
        checkpoints.wait()
        later = pytest.warns(ts.ShardingWarning, match="up to 3, .*`checkpoints.remove_after.2.`")
        with nullcontext() if context.index else later:  # process 0 says it
            checkpoints.save(2, state)
        assert checkpoints.remove_after(2) == (3,)
        found = checkpoints.restore_latest({**state, "step": 0})
        assert found is not None
        assert found[0] == 2
        assert_is_the_state(found[1])
        told = error_of(lambda: checkpoints.remove_after(context.index))
        assert "the step: 0 on process 0; 1 on process 1" in told
        assert checkpoints.steps() == (1, 2)


def refused(context: Context, tree: Any, error: type[Exception], name: str = "no") -> str:
    path = context.directory / "refused"
    told = error_of(lambda: save(path / name, tree, timeout=20), error)
    assert context.index or files_in(path) == []  # process 0 creates directories and locks
    return told


def check_trees_and_values_that_differ_are_refused(context: Context) -> None:
    state = saved_state()
    said = refused(context, {**state, "step": context.index}, ts.ProcessError)
    assert "step: int 0 on process 0; int 1 on process 1" in said
    said = refused(context, state, ts.ProcessError, f"no{context.index}")
    assert f"the path: {context.directory}/refused/no0 on process 0" in said
    said = refused(context, {**state, "own": jnp.full(3, context.index)}, ts.CheckpointError)
    assert "own: its values differ between processes" in said
    error = ts.CheckpointError if context.index == 0 else ts.ProcessError
    for values in (state, {**state, "own": state["own"] + 1}):
        with pytest.raises(error, match="There is already a checkpoint at"):
            save(context.directory / "fsdp", values)
    assert_is_the_state(restore(context.directory / "fsdp", state))


def check_replicas_that_differ_between_processes_are_told(context: Context) -> None:
    host = np.arange(64, dtype=np.float32).reshape(8, 8)

    def placed(spec: P, whole: np.ndarray) -> jax.Array:
        sharding = jax.sharding.NamedSharding(ts.make_mesh("data=2,fsdp=4"), spec)
        return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])

    mine = host + context.index
    key = np.asarray(jax.random.key_data(jax.random.key(context.index)))
    tree = {
        "columns": placed(P(None, "fsdp"), mine),
        "key": jax.random.wrap_key_data(placed(P(), key)),
        "own": np.full(3, context.index),
        "rows": placed(P("data"), mine),  # of which no other process has a replica
        "whole": placed(P(), mine),
    }
    told = refused(context, tree, ts.CheckpointError)
    assert "the copies of 4 leaves differ:" in told
    for name in ("columns", "key", "whole"):
        assert f"{name}: its replicas on different devices are not equal" in told
    assert "own: its values differ between processes" in told
    # Each names the first part that differs, and the processes that hold it.
    assert "not equal.\n    [:, 0:2] and 3 more parts: CRC-32 " in told, told
    assert "\n    all of it: CRC-32 " in told, told
    assert " on process 0; CRC-32 " in told, told
    with pytest.warns(ts.ShardingWarning, match="The first replicas are saved"):
        save(context.directory / "replicas", tree, on_divergence="warn")
    again = restore(context.directory / "replicas")
    assert (again["whole"] == host).all()
    assert (again["columns"] == host).all()
    assert (again["own"] == 0).all()


def check_an_error_on_one_process_is_an_error_on_all(context: Context) -> None:
    state = saved_state()
    with pytest.MonkeyPatch.context() as patch:
        if context.index == 1:
            patch.setattr(_save, "write_arrays", Mock(side_effect=MemoryError("mine")))
        said = refused(context, state, ts.CheckpointError)
    assert "process 1 raised MemoryError: mine" in said
    if context.index == 1:
        state["half"].delete()
    error = ts.DeletedLeafError if context.index == 1 else ts.ProcessError
    assert "half: bfloat16[64,64]" in refused(context, state, error)


def check_a_full_disk_on_one_process_is_an_error_on_all(context: Context) -> None:
    state = saved_state()
    with Checkpoints(context.directory / "full", background=False) as checkpoints:
        checkpoints.save(1, state)
        for who in (1, 0):
            full = files_of_at_most(4_000) if context.index == who else nullcontext()
            with full, pytest.raises(ts.CheckpointError) as told:
                checkpoints.save(2, state)
            assert f"full/2 was not saved; what existed before is unchanged. process {who}" in (
                str(told.value)
            )
            assert "File too large" in str(told.value)
            assert checkpoints.steps() == (1,)
        checkpoints.save(2, state)
        found = checkpoints.restore_latest(state)
        assert found is not None
        assert_is_the_state(found[1])
        if context.index == 0:
            assert files_in(context.directory / "full") == [".treeshard-lock", "1", "2"]


def check_damage_is_an_error_on_all(context: Context) -> None:
    state = saved_state()
    path = context.directory / "damaged"
    if context.index == 0:
        shutil.copytree(context.directory / "fsdp", path)
        flip_in(path, host_state(7)["w"].tobytes()[:64])
    exchange("damaged", b"")
    with pytest.raises(ts.DamagedError, match="w: it cannot be read: chunk w/c/0/0 in state/"):
        restore(path, state)


def check_readers_agree_on_a_step(context: Context) -> None:
    """The writer replaces a step when process 0 has read it, and process 1 has not."""
    tree = {"w": host_state(7)["half"]}
    real = _checkpoints.restore
    for name, wanted in {"flat": None, "like": tree}.items():
        run, mark = context.directory / f"read-{name}", context.directory / f"read-{name}-by-0"
        save(run / "1", tree)
        save(run / "later", tree)

        def first(*args: Any, mark: Path = mark, **options: Any) -> Any:
            found = real(*args, **options)
            mark.touch()
            return found

        def second(*args: Any, run: Path = run, mark: Path = mark, **options: Any) -> Any:
            until = time.monotonic() + (0.5 if args[1] else 30)  # with `like`, 0 waits for this one
            while (run / "1").exists() and time.monotonic() < until and not mark.exists():
                time.sleep(0.01)
            if (run / "1").exists():
                (run / "1").rename(run / "removed")
                (run / "later").rename(run / "2")
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_checkpoints, "restore", [first, second][context.index])
            found = Checkpoints(run, read_only=True, timeout=10).restore_latest(wanted)
        assert found is not None
        assert found[0] == 2, name
        assert found[1]["w"].tobytes() == tree["w"].tobytes()
    with pytest.MonkeyPatch.context() as patch:
        if context.index == 1:
            patch.setattr(_checkpoints, "restore", lambda *_, **__: real(run / "gone"))
        error = [ts.ProcessError, ts.CheckpointError][context.index]
        with pytest.raises(error, match=f"There is no checkpoint at {run}/gone"):
            Checkpoints(run, read_only=True, timeout=10).restore_latest()


def check_differing_requests_are_refused(context: Context) -> None:
    state = saved_state()
    whole = ts.shard(host_state(7)["half"], P(), ts.make_mesh("fsdp=8"))
    if context.index == 1:
        state["half"] = whole
    said = error_of(lambda: restore(context.directory / "fsdp", state))
    assert "half: bfloat16[64,64] as P" in said
    state = saved_state()
    if context.index == 1:
        del state["own"]
    error = ts.MismatchError if context.index == 1 else ts.ProcessError
    with pytest.raises(error, match="own: in .*/fsdp, but not requested"):
        restore(context.directory / "fsdp", state)

"""Two processes save, each its own shards; if one of them fails, both raise."""

import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

import equinox as eqx
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.full_disk import files_of_at_most
from tests.helpers import files_in
from tests.multiprocess.worker import Context, arriving_last, start_again
from treeshard._core.processes import exchange
from treeshard.checkpoint import Checkpoints, _checkpoints, _save, inspect, restore, save, verify

FSDP = [("bias|whole", None), (".*", ts.fsdp("fsdp", min_size=0))]
TENSOR = [
    ("bias|whole|own", None),
    ("weight|int4", P("tensor", "data")),
    ("keys|wide", P("data")),
]


class Linear(eqx.Module):
    weight: Any
    bias: Any
    activation: Any = eqx.field(static=False, default=jax.nn.gelu)


def host_state() -> dict[str, Any]:
    """A state on the host, the same on every process."""
    draw = np.random.default_rng(0)
    layers = [
        Linear(draw.normal(size=(128, 128)).astype(np.float32), np.full(7, i, np.float32))
        for i in range(3)
    ]
    return {
        "layers": layers,
        "wide": draw.normal(size=(64, 256)).astype(ml_dtypes.bfloat16),
        "int4": draw.integers(-8, 8, (8, 16)).astype(ml_dtypes.int4),
        "keys": np.asarray(draw.integers(0, 2**32, (8, 2)), np.uint32),
        "whole": np.arange(5, dtype=np.int32),
    }


def with_scalars(state: dict[str, Any], step: int = 7) -> dict[str, Any]:
    keys = jax.random.wrap_key_data(state["keys"])
    return {
        **state,
        "keys": keys,
        "step": step,
        "lr": 0.1,
        "name": "run",
        "own": np.arange(3, dtype=np.int32),
    }


def state_on(rules: Any, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    host = host_state()
    return with_scalars(ts.shard(host, ts.plan(host, rules, mesh)))


def structs() -> dict[str, Any]:
    """The state with shapes and dtypes in place of arrays on devices."""
    host = host_state()
    bare = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, host
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    return {**bare, "keys": keys, "step": 0, "lr": 0.0, "name": "", "own": np.zeros(3, np.int32)}


def assert_is_the_state(found: dict[str, Any]) -> None:
    """Asserts the values of every shard that this process holds."""
    host = host_state()
    scalars = (found["step"], found["lr"], found["name"])
    assert scalars == (7, 0.1, "run")
    host["own"] = np.arange(3, dtype=np.int32)
    found = {name: found[name] for name in host} | {"keys": jax.random.key_data(found["keys"])}
    assert jax.tree.structure(found) == jax.tree.structure(host)
    for path, x, whole in zip(
        ts.leaf_paths(host), jax.tree.leaves(found), jax.tree.leaves(host), strict=True
    ):
        if callable(whole):
            assert x is whole
            continue
        assert (x.shape, x.dtype) == (whole.shape, whole.dtype), path
        if isinstance(x, np.ndarray):
            assert x.tobytes() == whole.tobytes(), path
        else:
            for shard in x.addressable_shards:
                assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), path


def check_a_saved_state_is_restored(context: Context) -> None:
    mesh = ts.make_mesh("fsdp=8")
    state = state_on(FSDP, mesh)
    save(context.directory / "fsdp", state)
    again = restore(context.directory / "fsdp", state)
    assert_is_the_state(again)
    assert again["wide"].sharding == state["wide"].sharding


def check_a_state_is_restored_on_another_mesh(context: Context) -> None:
    mesh = ts.make_mesh("data=2,tensor=4")
    with jax.set_mesh(mesh):
        again = restore(context.directory / "fsdp", ts.plan(structs(), TENSOR, mesh, min_size=0))
    assert_is_the_state(again)
    assert again["layers"][1].weight.sharding.spec == P("tensor", "data")


def check_fingerprints_are_those_of_the_full_arrays(context: Context) -> None:
    of = {leaf.path: leaf for leaf in inspect(context.directory / "fsdp").leaves}
    host = host_state()
    assert of["wide"].crc == crc32(host["wide"].tobytes())
    assert of["layers/2/weight"].crc == crc32(host["layers"][2].weight.tobytes())
    assert of["keys"].crc == crc32(host["keys"].tobytes())
    assert of["wide"].spec == "P(None, 'fsdp')"


def check_one_process_reads_alone(context: Context) -> None:
    if context.index == 1:
        verify(context.directory / "fsdp")
        flat = restore(context.directory / "fsdp")
        assert flat["wide"].tobytes() == host_state()["wide"].tobytes()


def check_a_run(context: Context) -> None:
    mesh = ts.make_mesh("fsdp=8")
    state = state_on(FSDP, mesh)
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


def refused(context: Context, tree: Any, error: type[Exception], name: str = "no") -> str:
    with pytest.raises(error) as told:
        save(context.directory / "refused" / name, tree, timeout=20)
    start_again()
    return str(told.value)


def assert_nothing_is_left(context: Context) -> None:
    if context.index == 0:  # process 0 creates directories and locks
        assert files_in(context.directory / "refused") == []


def check_differing_trees_are_refused(context: Context) -> None:
    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    said = refused(context, {**state, "step": context.index}, ts.ProcessError)
    assert "step: int 0" in said
    assert "on process 0" in said
    said = refused(context, state, ts.ProcessError, f"no{context.index}")
    assert f"the path: {context.directory}/refused/no0 on process 0" in said
    said = refused(context, {**state, "own": np.full(3, context.index)}, ts.CheckpointError)
    assert "own: its values differ between processes" in said
    assert_nothing_is_left(context)


def check_a_leaf_deleted_on_one_process_is_an_error_on_all(context: Context) -> None:
    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    if context.index == 1:
        state["wide"].delete()
    error = ts.DeletedLeafError if context.index == 1 else ts.ProcessError
    assert "wide: bfloat16[64,256]" in refused(context, state, error)
    assert_nothing_is_left(context)


def check_a_checkpoint_is_saved_again_with_its_own_values_only(context: Context) -> None:
    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    save(context.directory / "fsdp", state)
    other = {**state, "own": state["own"] + 1}
    with pytest.raises(ts.CheckpointError, match="There is already a checkpoint at"):
        save(context.directory / "fsdp", other)
    assert_is_the_state(restore(context.directory / "fsdp", state))


def check_a_copy_that_fails_on_one_process_is_an_error_on_all(context: Context) -> None:
    def fails(_: Any) -> Any:
        raise MemoryError("mine")

    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    with pytest.MonkeyPatch.context() as patch:
        if context.index == 1:
            patch.setattr(_save, "copies", fails)
        with pytest.raises(ts.CheckpointError, match="process 1 raised MemoryError: mine"):
            save(context.directory / "refused" / "copies", state, timeout=20)
    assert_nothing_is_left(context)


def check_a_late_process_is_named(context: Context) -> None:
    with arriving_last(context, 1, "late"), pytest.raises(ts.ProcessError) as told:
        save(context.directory / "refused" / "late", {"x": 1}, timeout=1)
    absent = "save: process 1 of 2 did not arrive within 1 s."
    assert context.index == 1 or absent in str(told.value)
    assert_nothing_is_left(context)


def check_a_full_disk_on_one_process_is_an_error_on_all(context: Context) -> None:
    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    began = time.monotonic()
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
    assert time.monotonic() - began < 60  # no process waits for the failed one


def check_damage_is_an_error_on_all(context: Context) -> None:
    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    path = context.directory / "damaged"
    data = host_state()["wide"].tobytes()
    if context.index == 0:
        shutil.copytree(context.directory / "fsdp", path)
        flipped = 0
        for file in [*path.glob("state/**/d/*")]:
            raw = bytearray(file.read_bytes())
            if (place := raw.find(data[:64])) >= 0:  # the shard of one device holds these bytes
                raw[place] ^= 1
                file.write_bytes(raw)
                flipped += 1
        assert flipped
    exchange("damaged", b"")
    with pytest.raises(ts.DamagedError, match=f"{path}: wide: its bytes have the CRC-32"):
        restore(path, state)


def check_readers_agree_on_a_step(context: Context) -> None:
    """The writer replaces a step when process 0 has read it, and process 1 has not."""
    tree = {"w": host_state()["wide"]}
    real = _checkpoints.restore
    for name, like in {"flat": None, "like": tree}.items():
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
            found = Checkpoints(run, read_only=True, timeout=10).restore_latest(like)
        assert found is not None
        assert found[0] == 2, name
        assert found[1]["w"].tobytes() == tree["w"].tobytes()


def check_a_step_that_one_reader_cannot_read_is_an_error_on_all(context: Context) -> None:
    run = context.directory / "read-flat"
    with pytest.MonkeyPatch.context() as patch:
        if context.index == 1:
            patch.setattr(_checkpoints, "restore", lambda *args, **options: restore(run / "gone"))
        error = [ts.ProcessError, ts.CheckpointError][context.index]
        says = "read-flat/gone. The directory has step 2."
        with pytest.raises(error, match=f"There is no checkpoint at {context.directory}/{says}"):
            Checkpoints(run, read_only=True, timeout=10).restore_latest()


def check_differing_requests_are_refused(context: Context) -> None:
    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    whole = ts.shard(host_state()["wide"], P(), ts.make_mesh("fsdp=8"))
    if context.index == 1:
        state["wide"] = whole
    with pytest.raises(ts.ProcessError, match=r"wide: bfloat16\[64,256\] as P"):
        restore(context.directory / "fsdp", state)
    start_again()
    state = state_on(FSDP, ts.make_mesh("fsdp=8"))
    if context.index == 1:
        del state["own"]
    error = ts.MismatchError if context.index == 1 else ts.ProcessError
    with pytest.raises(error, match="own: in .*/fsdp, but not requested"):
        restore(context.directory / "fsdp", state)

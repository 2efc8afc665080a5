"""Moves trees to meshes of several processes and back; on one process too, for comparison."""

from itertools import product
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import arange, assert_same, bits
from tests.multiprocess.worker import Context
from treeshard._core.arrays import region_of
from treeshard._placement import transport

compiles: list[str] = []


def listen(name: str, seconds: float, **_: object) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
        compiles.append(name)


jax.monitoring.register_event_duration_secs_listener(listen)


def mesh_2d() -> Mesh:
    return ts.make_mesh("data=2,fsdp=4")


def mesh_across() -> Mesh:
    """HSDP: each process has parts of every array, and `data` spans processes too."""
    devices = np.array(jax.devices()).reshape(4, 2).T
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def host_tree() -> dict[str, Any]:
    """Leaves of all unusual dtypes and shapes, with random bits."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, (16, 8), np.uint32)
    dtypes = {"bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn, "int4": ml_dtypes.int4}
    return {
        "f32": random.standard_normal((16, 8), np.float32),
        "transposed": random.standard_normal((8, 16), np.float32).T,
        **{name: (bits % 16).astype(np.float32).astype(dtype) for name, dtype in dtypes.items()},
        "uint2": (bits % 4).astype(ml_dtypes.uint2),
        "bool": bits % 2 == 0,
        "complex": (bits + 1j * bits).astype(np.complex64),
        "three": arange(8, 4, 6, dtype=np.int32),
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 8), np.float32),
        "key": jax.random.split(jax.random.key(7), 16),
        "rbg": jax.random.key(7, impl="rbg"),
        "single": jax.device_put(arange(16), jax.local_devices()[-1]),
        "f": len,
        "name": "mlp",
        "step": 3,
        "stays": arange(3),
        "gone": None,
    }


def specs_for(tree: dict[str, Any], spec: P) -> dict[str, Any]:
    whole = {"scalar": P(), "rbg": P(), "stays": None, "gone": None}
    ranks = {name: np.ndim(x) if hasattr(x, "shape") else 0 for name, x in tree.items()}
    return {name: P(*spec[:rank]) for name, rank in ranks.items()} | whole


SPECS = [P(None, "fsdp"), P(("data", "fsdp")), P("fsdp", "data"), P("data"), P()]


def assert_structs(tree: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, x in expected.items():
        if hasattr(x, "dtype"):
            assert tree[name] == jax.ShapeDtypeStruct(x.shape, x.dtype), name
        else:
            assert tree[name] is x, name


# ------------------------------------------------------------------ there and back


def check_gather_undoes_shard_bit_for_bit(context: Context) -> None:
    tree = host_tree()
    for mesh, several in ((mesh_2d(), SPECS), (mesh_across(), SPECS[1:4])):
        for spec in several:
            specs = specs_for(tree, spec)
            placed = ts.shard(tree, specs, mesh)
            for name, x in placed.items():
                if isinstance(x, jax.Array):
                    assert x.sharding.mesh == mesh, name
                    assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), x.ndim)
            for shard in placed["f32"].addressable_shards:
                assert bits(shard.data) == bits(tree["f32"][shard.index])
            assert placed["stays"] is tree["stays"]
            assert_same(ts.gather(placed), tree)
            with mock.patch.object(transport, "MAX_DISTANCES", 0):  # as among many processes
                assert_same(ts.gather(placed), tree)


def check_one_process_receives_and_the_others_get_structs(context: Context) -> None:
    tree = host_tree()
    placed = ts.shard(tree, specs_for(tree, P(("data", "fsdp"))), mesh_2d())
    for to in range(context.count):
        got = ts.gather(placed, to=to)
        (assert_same if context.index == to else assert_structs)(got, tree)
        pairs = dict(ts.iter_gather(placed, to=to))
        arrays = {name: x for name, x in tree.items() if hasattr(x, "dtype")}
        (assert_same if context.index == to else assert_structs)(pairs, arrays)


def check_a_constraint_places_arrays_and_waits_for_nobody_on_own_devices(context: Context) -> None:
    placed = ts.with_sharding_constraint(arange(16, 8), P("fsdp"), mesh_2d())
    np.testing.assert_array_equal(ts.gather(placed), arange(16, 8))
    if context.index == 0:  # the others never make this call
        mesh = ts.make_mesh("fsdp=-1", devices=jax.local_devices())
        placed = ts.with_sharding_constraint(arange(16, 8), P("fsdp"), mesh)
        assert placed.sharding == NamedSharding(mesh, P("fsdp"))


# ------------------------------------------------------------------ what it costs


def check_placing_compiles_nothing_and_gathering_few_programs(context: Context) -> None:
    tree = {f"{n:02}": arange(8, n + 1) for n in range(40)}
    tree |= {f"half/{n:02}": arange(16, n + 1, dtype=ml_dtypes.bfloat16) for n in range(10)}
    before = len(compiles)
    placed = ts.shard(tree, P(("data", "fsdp")), mesh_2d())
    assert len(compiles) == before
    for distances, programs in ((transport.MAX_DISTANCES, context.count - 1), (0, 1)):
        before = len(compiles)
        with mock.patch.object(transport, "MAX_DISTANCES", distances):
            ts.gather(placed, to=0)
            list(ts.iter_gather(placed, to=0))
            ts.gather(placed)
        assert len(compiles) - before <= programs


# ------------------------------------------------------------------ read, shard by shard


def check_structs_are_filled_shard_by_shard(context: Context) -> None:
    expected = {"w": arange(16, 8), "b": arange(8, dtype=ml_dtypes.bfloat16), "s": np.float32(7)}
    expected["key"] = jax.random.split(jax.random.key(3), 8)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), expected)
    asked: list[tuple[str, Any]] = []

    def read(path: str, index: tuple[slice, ...]) -> Any:
        asked.append((path, tuple((i.start, i.stop) for i in index)))
        return expected[path][index]

    specs = {"w": P("data", "fsdp"), "b": P("data"), "s": P(), "key": P("fsdp")}
    placed = ts.shard(structs | {"n": arange(8)}, specs | {"n": P("data")}, mesh_2d(), read=read)
    assert_same(ts.gather(placed), expected | {"n": arange(8)})
    assert len(set(asked)) == len(asked)  # once each
    for path in expected:
        regions = {region for name, region in asked if name == path}
        x = placed[path]
        shards = x.sharding.addressable_devices_indices_map(x.shape).values()
        assert regions == {region_of(index, x.shape) for index in shards}, path


def check_the_result_of_read_is_checked(context: Context) -> None:
    struct = {"w": jax.ShapeDtypeStruct((16, 8), np.float32)}
    here = 16 // context.count * context.index

    def read(path: str, index: tuple[slice, ...]) -> Any:
        return np.zeros((2, 8), np.float64 if index[0].start == here else np.float32)

    with pytest.raises(ts.MismatchError) as raised:
        ts.shard(struct, P(("data", "fsdp")), mesh_2d(), read=read)
    assert str(raised.value) == (
        f"`read` returned float64[2,8] for w[{here}:{here + 2}, 0:8]; expected float32[2,8]."
        " It must return only that part of float32[16,8], in the same dtype."
    )


def check_if_read_fails_on_one_process_all_raise(context: Context) -> None:
    def read(path: str, index: tuple[slice, ...]) -> Any:
        if context.index == context.count - 1:
            raise OSError("the disk is gone")
        return np.zeros((2,), np.float32)

    kind = OSError if context.index == context.count - 1 else ts.ProcessError
    with pytest.raises(kind, match="the disk is gone") as raised:
        ts.shard(jax.ShapeDtypeStruct((16,), "float32"), P(("data", "fsdp")), mesh_2d(), read=read)
    if kind is OSError:
        start = 16 // context.count * context.index
        notes = [f"`read` was called for the array[{start}:{start + 2}]."]
        assert raised.value.__notes__ == notes


# ------------------------------------------------------------------ parts of a batch


def check_parts_are_joined(context: Context) -> None:
    keys = jax.random.split(jax.random.key(1), 16)
    whole = {"x": arange(16, 6), "y": np.arange(16, dtype=">f8")}
    expected = {name: x.astype(np.float32) for name, x in whole.items()}
    expected |= {"key": keys, "device": arange(16, dtype=np.int32), "name": "train"}
    rows = slice(*(16 // context.count * (context.index + i) for i in (0, 1)))
    mine = {name: x[rows] for name, x in whole.items()}
    others = {"key": keys[rows], "device": jax.numpy.arange(16)[rows], "name": "train"}
    # Which every process passes in full: one spec is cut to the rank of each leaf.
    full = {"scale": np.float32(2), "seed": jax.random.key(3)}
    expected |= full
    spec = P(("data", "fsdp"))
    batch = ts.from_process_local(mine | others | full, spec, mesh_2d())
    assert all(batch[name].is_fully_replicated for name in full)
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in mine.items()}
    for name, x in ts.from_process_local(structs, spec, mesh_2d()).items():
        made = batch[name]
        assert (x.shape, x.dtype, x.sharding) == (made.shape, made.dtype, made.sharding)
    assert batch["x"].sharding == NamedSharding(mesh_2d(), spec)
    assert batch["y"].dtype == np.float32
    mine["x"][:] = -1  # a loader that reuses its buffer
    assert_same(ts.gather(batch), {name: expected[name] for name in batch})


def check_parts_along_other_dims(context: Context) -> None:
    """Each process passes what its devices hold along each dim: of an interleaved mesh too."""
    whole = arange(8, 16)
    for mesh in (mesh_2d(), mesh_across()):
        for spec in SPECS:
            regions = NamedSharding(mesh, spec).addressable_devices_indices_map((8, 16)).values()
            own = [sorted({i for region in regions for i in range(*region[d].indices(n))})
                   for d, n in enumerate((8, 16))]  # fmt: skip
            batch = ts.from_process_local(whole[np.ix_(*own)], spec, mesh)
            assert batch.shape == (8, 16), spec
            np.testing.assert_array_equal(ts.gather(batch), whole)


# ------------------------------------------------------------------ from mesh to mesh


def check_resharding_between_specs_and_meshes(context: Context) -> None:
    tree = {"x": arange(16, 8), "half": arange(8, 8, dtype=ml_dtypes.bfloat16)}
    tree["key"] = jax.random.split(jax.random.key(5), 8)
    devices = np.array(jax.devices())
    auto = (AxisType.Auto,)
    meshes = {
        "other axes": Mesh(devices, ("fsdp",), axis_types=auto),
        "other order": Mesh(devices[[5, 2, 7, 0, 1, 6, 3, 4]], ("fsdp",), axis_types=auto),
        "across": mesh_across(),
        "two devices": Mesh(devices[[0, -1]], ("fsdp",), axis_types=auto),
        "the first process": Mesh(jax.local_devices(process_index=0), ("fsdp",), axis_types=auto),
    }
    placed = ts.shard(tree, P(("data", "fsdp")), mesh_2d())
    # As among many processes: one program takes the place of one for each distance.
    for distances, (name, mesh) in product((4, 0), meshes.items()):
        with mock.patch.object(transport, "MAX_DISTANCES", distances):
            moved = ts.reshard(placed, P("fsdp"), mesh)
            assert moved["x"].sharding == NamedSharding(mesh, P("fsdp")), name
            for shard in moved["x"].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), tree["x"][shard.index])
            if name != "the first process" or context.count == 1:
                assert_same(ts.gather(ts.reshard(moved, P("data"), mesh_2d())), tree)
    assert placed["x"]._npy_value is None

"""Arrays in a few files: Orbax reads them, each is read alone, and earlier checkpoints too."""

import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import _array_store, inspect, restore, save, verify

LARGE = np.random.default_rng(0).normal(size=(512, 513)).astype(np.float32)
SPECS = {"w": P("data", "fsdp"), "half": P("fsdp"), "whole": P(), "large": P("fsdp"), "one": P()}


def state(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    tree = {
        "w": np.arange(1024, dtype=np.float32).reshape(32, 32),
        "half": np.arange(64).astype(ml_dtypes.bfloat16),
        "whole": np.arange(33, dtype=np.int32),
        "one": np.float32(7),
        "large": LARGE,
    }
    return ts.shard(tree, SPECS, mesh) | {"own": np.arange(6).reshape(2, 3).T, "step": 7}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, mesh) -> Path:
    path = tmp_path_factory.mktemp("packed") / "x"
    save(path, state(mesh))
    return path


def assert_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(x).tobytes(), name
        assert getattr(found[name], "sharding", None) == getattr(x, "sharding", None), name


def test_orbax_reads_them(saved: Path, mesh) -> None:
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    for name in ("large", "half"):
        x = state(mesh)[name]
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        with context:
            read = ocp.load(saved, {name: struct}, checkpointable_name="state")
        assert np.asarray(read[name]).tobytes() == np.asarray(x).tobytes()


def test_they_are_restored_on_any_mesh_and_to_the_host(saved: Path, mesh) -> None:
    assert_same(restore(saved, state(mesh)), state(mesh))
    for axes in ("fsdp=4,data=2", "data=2,fsdp=2", "fsdp=1,data=1"):
        count = 8 if "4" in axes else 4 if "2" in axes else 1
        other = state(ts.make_mesh(axes, devices=jax.devices()[:count]))
        assert_same(restore(saved, other), other)
    host = restore(saved)
    assert all(not isinstance(x, jax.Array) for x in host.values())
    assert_same(host, {name: np.asarray(x) if name != "step" else x for name, x in host.items()})
    verify(saved)


def test_restored_arrays_may_be_donated(saved: Path, mesh) -> None:
    again = restore(saved, state(mesh))
    arrays = {name: again[name] for name in SPECS}
    jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)(arrays)
    assert all(_is_donated(x) for x in arrays.values())


def _is_donated(x: jax.Array) -> bool:
    """Whether a program took memory of an array; JAX 0.11 takes some shards of bfloat16 only."""
    try:
        for shard in x.addressable_shards:
            shard.data.unsafe_buffer_pointer()
    except RuntimeError:
        return True
    return False


def test_one_leaf_alone_is_restored_without_the_others(saved: Path, mesh, tmp_path: Path) -> None:
    """The bytes of large arrays may be gone."""
    shutil.copytree(saved, tmp_path / "x")
    first = np.asarray(LARGE).tobytes()[:64]
    for file in (tmp_path / "x" / "state").rglob("*"):
        if file.is_file() and first in (raw := file.read_bytes()):
            file.write_bytes(raw.replace(first, bytes(64)))
    found = restore(tmp_path / "x", {"half": state(mesh)["half"]}, partial=True)
    assert_same(found, {"half": state(mesh)["half"]})
    with pytest.raises(ts.DamagedError, match="large: its bytes have the CRC-32"):
        restore(tmp_path / "x", {"large": state(mesh)["large"]}, partial=True)


def test_a_damaged_index_is_named_for_each_leaf(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "x")
    file = tmp_path / "x" / "state" / "manifest.ocdbt"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ts.DamagedError) as told:
        verify(tmp_path / "x")
    headline, *rows = str(told.value).splitlines()
    assert headline == f"{tmp_path}/x: 6 leaves are damaged:"
    for name, row in zip(["half", "large", "one", "own", "w", "whole"], rows, strict=True):
        where = 'Error decoding local file "state/manifest.ocdbt": Error decoding manifest: CRC-32C'
        assert row.startswith(f"  {name}: it cannot be read: {where}")
    file.unlink()
    with pytest.raises(ts.DamagedError, match="w: it cannot be read: it is not in the array store"):
        verify(tmp_path / "x")


@pytest.mark.parametrize("compress", [False, True])
def test_each_array_in_its_own_files(compress, mesh, tmp_path: Path) -> None:
    save(tmp_path / "x", state(mesh), ocdbt=False, compress=compress)
    names = {path.name for path in (tmp_path / "x" / "state").iterdir() if path.is_dir()}
    assert names == {"w", "half", "whole", "one", "own", "large"}
    assert_same(restore(tmp_path / "x", state(mesh)), state(mesh))


def test_many_leaves_are_in_a_few_files(mesh, tmp_path: Path) -> None:
    values = {f"layers/{i}": np.full((8, 2), i, np.float32) for i in range(1000)}
    tree = ts.shard(values, P("fsdp"), mesh)
    save(tmp_path / "x", tree)
    assert len([x for x in (tmp_path / "x").rglob("*") if x.is_file()]) < 15
    assert_same(restore(tmp_path / "x", tree), tree)


def test_checkpoints_of_0_2_are_restored(tmp_path: Path, mesh) -> None:
    """`saved_by_0_2.zip` has what treeshard 0.2.0 saved, with and without `ocdbt`."""
    shutil.unpack_archive(Path(__file__).with_name("saved_by_0_2.zip"), tmp_path)
    for way in ("few", "each"):
        path = tmp_path / way
        verify(path)
        assert str(inspect(path)).endswith("Saved on fsdp=8.")
        like = jax.ShapeDtypeStruct((16, 8), "float32", sharding=NamedSharding(mesh, P("data")))
        w = restore(path, {"w": like}, partial=True)["w"]
        assert w.sharding == like.sharding
        assert (np.asarray(w) == np.arange(128).reshape(16, 8)).all()
        found = restore(path)
        assert np.asarray(found["half"]).tolist() == list(range(16))
        assert np.asarray(found["int2"]).astype(int).tolist() == [-2, -1, 0, 1] * 2
        assert found["own"].tolist() == [0, 1 << 40, 2 << 40]
        assert jax.random.key_data(found["key"]).tolist() == [0, 3]
        rest = {"step": 7, "lr": 0.1, "name": "run", "none": None, "bytes": b"\x00\xff"}
        assert {name: found[name] for name in rest} == rest
        assert found["empty"].shape == (0, 4)


@pytest.mark.parametrize("small", [1, 40, 100, 400, 2**20])
def test_verify_reads_several_small_chunks_at_a_time(tmp_path, monkeypatch, small) -> None:
    w = np.arange(7 * 5 * 9, dtype=np.float32).reshape(7, 5, 9)
    save(tmp_path / "x", {"w": w}, ocdbt=False)
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 3, 2]}}
    store = {"driver": "file", "path": f"{tmp_path}/x/state/w/"}
    spec = {"driver": "zarr3", "kvstore": store, "metadata": {"chunk_grid": grid}}
    how = {"create": True, "delete_existing": True, "dtype": "float32", "shape": w.shape}
    tensorstore.open(spec, **how).result().write(w).result()
    monkeypatch.setattr(_array_store, "_SMALL", small)
    verify(tmp_path / "x")

"""Arrays in a few files: Orbax reads them, and each is read alone."""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import tensorstore
from etils import epath
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import Checkpoints, _array_store, inspect, restore, save, verify

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
    for axes, count in {"fsdp=4,data=2": 8, "data=2,fsdp=2": 4, "fsdp=1,data=1": 1}.items():
        other = state(ts.make_mesh(axes, devices=jax.devices()[:count]))
        assert_same(restore(saved, other), other)
    assert not any(isinstance(x, jax.Array) for x in restore(saved).values())
    verify(saved)
    again = restore(saved, state(mesh))
    negated = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)
    arrays = {name: again[name] for name in SPECS}
    assert_same(negated(negated(arrays)), {name: state(mesh)[name] for name in SPECS})


def test_one_leaf_alone_is_restored_without_the_others(saved: Path, mesh, tmp_path: Path) -> None:
    """The bytes of large arrays may be gone."""
    shutil.copytree(saved, tmp_path / "x")
    first = np.asarray(LARGE).tobytes()[:64]
    for file in (tmp_path / "x" / "state").rglob("*"):
        if file.is_file() and first in (raw := file.read_bytes()):
            file.write_bytes(raw.replace(first, bytes(64)))
    found = restore(tmp_path / "x", {"half": state(mesh)["half"]}, partial=True)
    assert_same(found, {"half": state(mesh)["half"]})
    with pytest.raises(ts.DamagedError, match="large: it cannot be read: chunk large/c/0/0 in"):
        restore(tmp_path / "x", {"large": state(mesh)["large"]}, partial=True)


def test_many_leaves_are_in_a_few_files_and_no_description_is_read(
    mesh, tmp_path: Path, monkeypatch
) -> None:
    values = {f"layers/{i}": np.full((8, 2), i, np.float32) for i in range(300)}
    tree = ts.shard(values, P("fsdp"), mesh) | {"large": ts.shard(LARGE, P("fsdp"), mesh)}
    opened: list[bool] = []
    open_array = tensorstore.open

    def recorded(spec: Any, **options: Any) -> Any:
        opened.append(options.get("assume_metadata", False))
        return open_array(spec, **options)

    save(tmp_path / "x", tree)
    monkeypatch.setattr(tensorstore, "open", recorded)
    assert_same(restore(tmp_path / "x", tree), tree)
    verify(tmp_path / "x")
    assert opened == [True] * 6  # for 256 and 44 tiny arrays, and for the large one, twice
    assert len([x for x in (tmp_path / "x").rglob("*") if x.is_file()]) < 30


def test_arrays_have_up_to_32_dims(tmp_path: Path) -> None:
    """As many as TensorStore allows, although it reads tiny arrays as parts of a larger one."""
    tree = {"most": np.ones((1,) * 32, np.float32), "few": np.ones(3, np.float32)}
    save(tmp_path / "x", tree)
    assert_same(restore(tmp_path / "x"), tree)
    verify(tmp_path / "x")


def test_damaged_leaves_are_listed_in_the_order_of_the_tree(tmp_path: Path) -> None:
    """Tiny arrays are read by their types."""
    save(tmp_path / "x", {f"w{i:02}": np.ones(2, "if"[i % 2]) for i in range(9)})
    for file in (tmp_path / "x").rglob("d/*"):
        file.unlink()
    for call in (restore, verify):
        with pytest.raises(ts.DamagedError) as told:
            call(tmp_path / "x")
        found = re.findall(r"^  (w\d+):", str(told.value), re.MULTILINE)
        assert found == [f"w{i:02}" for i in range(9)]


def test_arrays_are_written_in_several_transactions(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(_array_store, "IN_FLIGHT", 1000)
    tree = {f"{i}": np.full(100, i) for i in range(10)}
    save(tmp_path / "x", tree)
    assert_same(restore(tmp_path / "x"), tree)


def test_arrays_may_be_donated_once_they_are_read(mesh, tmp_path: Path, monkeypatch) -> None:
    """By another thread. A save in the background has read them when it returns."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    commit = _array_store._start_commit

    def saved(at: int, path: Path, *, background: bool) -> Any:
        commits, states = [], [step({"w": ts.shard(np.zeros((1024, 2048)), P("fsdp"), mesh)})]

        def step_and_commit(*args: Any) -> list[Any]:
            if len(commits) == at:
                states.append(jax.block_until_ready(step(states.pop())))
            commits.append(at)
            return commit(*args)

        with monkeypatch.context() as patch, Checkpoints(path, background=background) as run:
            patch.setattr(_array_store, "_start_commit", step_and_commit)
            run.save(1, states[0])
            run.wait()
        assert (states.pop()["w"] == 2).all()
        return restore(path / "1")["w"]

    for at, background in ((0, True), (1, True), (1, False)):
        assert (saved(at, tmp_path / f"{at}{background}", background=background) == 1).all()
    with pytest.raises(ts.CheckpointError, match="w: it was deleted or donated while it was saved"):
        saved(0, tmp_path / "early", background=False)


def test_damage_to_the_index_hides_no_other_damage(tmp_path: Path, monkeypatch) -> None:
    """Leaves under other nodes, in a file that has changed, are not read as if they were saved."""
    monkeypatch.setitem(_array_store._NEW_DATABASE, "max_decoded_node_bytes", 5000)
    path, tree = tmp_path / "x", {f"{i}": np.full(300, i) for i in range(200)}
    save(path, tree)
    values = max(path.glob("state/*/d/*"), key=lambda file: file.stat().st_size)
    values.write_bytes(values.read_bytes() + b"x")  # what the index names in it is intact
    [nodes] = path.glob("state/d/*")
    node = bytearray(nodes.read_bytes())
    node[node.find(b"chunk_grid")] ^= 4  # of a description, which only leaf nodes have
    nodes.write_bytes(node)
    store = _array_store.ArrayStore(epath.Path(path))
    known = {leaf for leaf in tree if f"{leaf}/c/0" in store.files_by_key}
    assert 0 < len(known) < 200
    with pytest.raises(ts.DamagedError) as told:
        restore(path, {leaf: tree[leaf] for leaf in known}, partial=True)
    assert f"{len(known)} leaves are damaged" in str(told.value)
    with pytest.raises(ts.DamagedError, match="200 leaves are damaged"):
        verify(path)


def test_verify_reads_large_arrays_by_their_chunks(tmp_path, monkeypatch, mesh) -> None:
    w = np.arange(8 * 5 * 16, dtype=np.float32).reshape(8, 5, 16)
    monkeypatch.setattr(_array_store, "SMALL", 1)
    save(tmp_path / "x", {"w": ts.shard(w, P("data", None, "fsdp"), mesh)})
    (leaf,) = inspect(tmp_path / "x").leaves
    assert leaf.chunk == (4, 5, 4)
    monkeypatch.setattr(_array_store, "IN_FLIGHT", 1)
    read: list[tuple[int, ...]] = []
    read_chunks = _array_store.ArrayStore.read

    def recorded(*args: Any) -> Any:
        for row, region, values in read_chunks(*args):
            read.append(values.shape)
            yield row, region, values

    monkeypatch.setattr(_array_store.ArrayStore, "read", recorded)
    verify(tmp_path / "x")
    assert read == [(4, 5, 4)] * 8

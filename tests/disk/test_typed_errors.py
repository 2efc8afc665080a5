"""Paths and texts of any kind, and files that change or are withheld: what is raised is typed."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._disk import untrusted
from treeshard.checkpoint import Checkpoints, _array_store, _save, inspect, restore, save
from treeshard.interchange import save_safetensors

TREE = {"w": np.ones((8, 4), np.float32)}


def test_a_reader_that_races_keep_reads_the_later_step(tmp_path: Path, monkeypatch) -> None:
    run = Checkpoints(tmp_path, keep=1)
    run.save(1, {"w": TREE["w"]})
    run.wait()
    reader = Checkpoints(tmp_path, read_only=True)
    read = _array_store.ArrayStore.read

    def save_first(*args, **options):
        if run.steps() == (1,):
            run.save(2, {"w": 2 * TREE["w"]})
            run.wait()
        return read(*args, **options)

    monkeypatch.setattr(_array_store.ArrayStore, "read", save_first)
    with pytest.raises(ts.CheckpointError) as told:
        reader.restore(1)
    assert f"{tmp_path}/1 was removed while it was read" in str(told.value)
    assert not isinstance(told.value, ts.DamagedError)
    shutil.rmtree(tmp_path / "2")
    run.save(1, TREE)
    run.wait()
    step, tree = reader.restore_latest()
    assert (step, tree["w"].max()) == (2, 2)
    run.close()


def test_axis_types_of_jax_are_an_error(unchecked) -> None:
    with pytest.raises(ts.MeshError) as told:
        ts.make_mesh("data=2,fsdp=4", axis_types=AxisType.Explicit)
    assert str(told.value).endswith("Pass 'auto' or 'explicit', or a dict of these by axis.")


def test_empty_arrays_are_gathered_after_they_were_resharded(mesh) -> None:
    empty = {"e": np.zeros((8, 0), np.float32), "k": jax.random.split(jax.random.key(0), (8, 0))}
    moved = ts.reshard(ts.shard(empty, P("fsdp"), mesh), P("data"), mesh)
    for full in (ts.gather(moved), ts.gather(moved, to=0), dict(ts.iter_gather(moved))):
        assert {name: x.shape for name, x in full.items()} == {"e": (8, 0), "k": (8, 0)}


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    red = "\x1b[31mw\n9 leaves\u202e"
    save(tmp_path / "x", {red: np.ones(2, np.float32)})
    shown = str(inspect(tmp_path / "x"))
    assert r"\x1b[31mw\n9 leaves\u202e" in shown
    assert shown.replace("\n", "").isprintable()
    with pytest.raises(ts.MismatchError) as told:
        restore(tmp_path / "x", {"w": np.ones(2, np.float32)})
    assert "\x1b" not in str(told.value)


def test_leaves_beyond_the_limits_of_the_array_store_are_told_before_arrays_are_copied(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(_save, "copies", None)  # which copies them
    with pytest.raises(ts.LeafError, match=r"w: .* it has 33 dims, and the array store has at mo"):
        save(tmp_path / "x", {"w": np.ones((1,) * 33, np.float32)})
    with pytest.raises(ts.LeafError, match=r"its path has 70,000 bytes in the array store, which"):
        save(tmp_path / "x", {"w" * 70_000: TREE["w"]})
    assert not list(tmp_path.iterdir())


def test_headers_that_could_not_be_read_are_not_written(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "m.safetensors"
    monkeypatch.setattr(untrusted, "MOST_ITEMS", 20)
    with pytest.raises(
        ts.FormatError, match=r"^The header would be JSON of about 24 values.*Split"
    ):
        save_safetensors(file, {f"{i}": TREE["w"] for i in range(3)})
    many = {f"{i}": TREE["w"] for i in range(20)}
    with pytest.raises(ts.FormatError, match=r"The index would be JSON of about 23 values"):
        save_safetensors(file, many, max_file_size=128)
    monkeypatch.setattr(untrusted, "MOST_BYTES", 2**10)
    with pytest.raises(ts.FormatError, match="header would be JSON of 1.0 KiB. At most 1.0 KiB"):
        save_safetensors(file, {"x" * 10**3: TREE["w"]})
    assert not list(tmp_path.iterdir())

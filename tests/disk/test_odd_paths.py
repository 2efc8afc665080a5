"""Paths and dtypes that a save cannot have are typed errors at once, before anything is written."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import files_in

import treeshard as ts
from treeshard.checkpoint import Checkpoints, inspect, restore, save, verify
from treeshard.interchange import load_safetensors, save_safetensors, tensor_shapes

TREE = {"w": np.ones(3, np.float32)}
OF_CHECKPOINTS = {
    "save": lambda path: save(path, TREE),
    "restore": restore,
    "inspect": inspect,
    "verify": verify,
    "Checkpoints": Checkpoints,
    "a reader": lambda path: Checkpoints(path, read_only=True),
}
OF_FILES = {
    "save_safetensors": lambda path: save_safetensors(path, TREE),
    "load_safetensors": load_safetensors,
    "tensor_shapes": tensor_shapes,
}
CALLS = OF_CHECKPOINTS | OF_FILES


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "hdfs://a/b",
            "hdfs://a/b: there is no access to hdfs://. Pass a local path, gs:// or s3://.",
        ),
        (
            "s3://a/b",
            "s3://a/b: reading and writing s3:// needs s3fs. Install with `pip install s3fs`, or"
            " pass a local path.",
        ),
        ("gs:///run", "gs:///run names no bucket. Pass gs://BUCKET/NAME."),
        ("a\0b", r"a\x00b: a path cannot contain a NUL character."),
        (Path("gs://a/b"), "gs:/a/b is a `Path` of a URL. Pass it as text: 'gs://a/b'."),
        (Path("file:///a/b"), "file:/a/b is a `Path` of a URL. Pass it as text: 'file:///a/b'."),
    ],
    ids=repr,
)
def test_a_path_that_is_none_is_an_error_of_every_function(
    path, says, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    not_local = f"{path} is not in a file system. Pass a local path."
    is_url = isinstance(path, str) and "://" in path
    for name, call in CALLS.items():
        with pytest.raises(ts.CheckpointError) as told:
            call(path)
        assert str(told.value) == (not_local if name in OF_FILES and is_url else says), name
    assert files_in(tmp_path) == []


def test_the_root_is_no_checkpoint() -> None:
    with pytest.raises(ts.CheckpointError, match="^/ is the root of a file system. Save to a dir"):
        save("/", TREE)


def test_relative_paths_tildes_and_addresses_of_files_are_paths(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("new/x", TREE)
    assert inspect("./new/../new/x").path == str(tmp_path / "new" / "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/one", TREE)
    assert inspect(f"file://{tmp_path}/one").path == str(tmp_path / "one")
    save_safetensors("~/x.safetensors", TREE)
    assert list(load_safetensors(f"file://{tmp_path}/x.safetensors")) == ["w"]
    with Checkpoints("~/run") as run:
        run.save(1, TREE)
    assert Checkpoints(tmp_path / "run", read_only=True).steps() == (1,)


def test_a_relative_path_in_a_removed_directory(tmp_path: Path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for name, call in CALLS.items():
        says = "No such file" if name in OF_FILES else "current directory, which no longer exists"
        with pytest.raises(ts.CheckpointError, match=says):
            call("x")


def test_names_that_the_array_store_cannot_have(tmp_path: Path, monkeypatch) -> None:
    not_utf_8 = os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")
    for call in OF_CHECKPOINTS.values():
        with pytest.raises(ts.CheckpointError, match=r"run-\\udcff' is not UTF-8"):
            call(not_utf_8)
        with pytest.raises(ts.CheckpointError, match="reads a backslash in a path as `/`"):
            call(tmp_path / "a\\b" / "x")
    assert files_in(tmp_path) == []
    save_safetensors(not_utf_8, TREE)
    assert load_safetensors(not_utf_8)["w"].tolist() == [1, 1, 1]
    (tmp_path / "a\\b").mkdir()
    monkeypatch.chdir(tmp_path / "a\\b")
    with pytest.raises(ts.CheckpointError, match=r"a\\b/x: the array store reads a backslash"):
        save("x", TREE)
    assert files_in(tmp_path / "a\\b") == []


@pytest.mark.parametrize("name", ["q#?q {0}%20", "é\n'\"", "..x:y"])
def test_other_characters_in_the_path_are_fine(name: str, tmp_path: Path) -> None:
    large = {"w": np.random.default_rng(0).normal(size=(512, 512))}
    save(tmp_path / name / name, large)
    (tmp_path / name).rename(tmp_path / "moved")
    assert (restore(tmp_path / "moved" / name)["w"] == large["w"]).all()


def test_float0_is_not_saved(tmp_path: Path) -> None:
    gradients = {"w": np.ones(3, np.float32), "ids": np.zeros(3, jax.dtypes.float0)}
    with pytest.raises(ts.errors.LeafError, match="ids: .*float0 has no values"):
        save(tmp_path / "x", gradients)
    with pytest.raises(ts.errors.LeafError, match="ids: .*safetensors does not have this dtype"):
        save_safetensors(tmp_path / "x", gradients)
    assert files_in(tmp_path) == []
    save(tmp_path / "x", TREE)
    assert restore(tmp_path / "x", gradients)["ids"] is gradients["ids"]

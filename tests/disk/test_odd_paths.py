"""Paths and dtypes that a save cannot have are typed errors at once, before anything is written."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

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
}
OF_FILES = {
    "save_safetensors": lambda path: save_safetensors(path, TREE),
    "load_safetensors": load_safetensors,
    "tensor_shapes": tensor_shapes,
}


@pytest.mark.parametrize("call", [*OF_CHECKPOINTS, *OF_FILES])
def test_a_relative_path_in_a_removed_directory(call: str, tmp_path: Path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    says = "No such file" if call in OF_FILES else "current directory, which no longer exists"
    with pytest.raises(ts.CheckpointError, match=says):
        {**OF_CHECKPOINTS, **OF_FILES}[call]("x")


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")
    for call in OF_CHECKPOINTS.values():
        with pytest.raises(ts.CheckpointError, match=r"run-\\udcff' is not UTF-8"):
            call(name)
    assert list(tmp_path.iterdir()) == []
    save_safetensors(name, TREE)
    assert load_safetensors(name)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("url", ["gs://", "gs:///", "gs:///run", "s3://"])
def test_an_address_without_a_bucket(url: str) -> None:
    for call in OF_CHECKPOINTS.values():
        with pytest.raises(ts.CheckpointError, match=f"^{url} names no bucket"):
            call(url)


def test_names_up_to_the_longest_are_saved_or_a_typed_error(tmp_path: Path) -> None:
    """The longest is 255 bytes; those of locks, parts and indexes are longer than the file's."""
    tree = {"a": np.ones(100), "b": np.ones(100)}
    saved: set[bool] = set()
    for length in range(190, 262, 3):
        for many in (None, 800):
            path = tmp_path / f"{length}-{many}" / ("x" * length)
            path.parent.mkdir()
            error = ""
            try:
                for _ in range(2):
                    save_safetensors(path, tree, max_file_size=many)
            except ts.CheckpointError as raised:
                error = str(raised)
            saved.add(not error)
            if error:
                assert "ile name too long" in error
                assert not any(file.name.endswith(".part") for file in path.parent.iterdir())
            else:
                assert load_safetensors(path).keys() == tree.keys()
    assert saved == {True, False}


def test_float0_is_not_saved(tmp_path: Path) -> None:
    gradients = {"w": np.ones(3, np.float32), "ids": np.zeros(3, jax.dtypes.float0)}
    with pytest.raises(ts.errors.LeafError, match="ids: .*float0 has no values"):
        save(tmp_path / "x", gradients)
    with pytest.raises(ts.errors.LeafError, match="ids: .*safetensors does not have this dtype"):
        save_safetensors(tmp_path / "x", gradients)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "x", TREE)
    assert restore(tmp_path / "x", gradients)["ids"] is gradients["ids"]

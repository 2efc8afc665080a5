"""Tensors in several files with an index."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same, files_in
from safetensors import safe_open
from safetensors.numpy import save_file
from saved_tensors import blocks, package_bytes

import treeshard as ts
from treeshard.interchange import load_safetensors, save_safetensors, tensor_shapes


def test_several_files_have_the_bytes_of_the_package_and_an_index(file, tmp_path) -> None:
    save_safetensors(file, blocks(), max_file_size=900, metadata={"format": "pt"})
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert files_in(tmp_path) == [*names, "model.safetensors.index.json"]
    map_ = {path: names[i // 2] for i, path in enumerate(blocks())}
    index = {"metadata": {"total_size": 2000}, "weight_map": map_}
    text = (tmp_path / "model.safetensors.index.json").read_text()
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    for name in names:
        tree = {path: x for path, x in blocks().items() if map_[path] == name}
        assert (tmp_path / name).read_bytes() == package_bytes(tree, tmp_path, {"format": "pt"})
    for which in ("", "model.safetensors", "model.safetensors.index.json"):
        assert_same(load_safetensors(tmp_path / which), blocks())


PARTS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
IN_PARTS = [*PARTS, "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("path", "most", "files"),
    [
        ("out", None, ["model.safetensors"]),
        ("out", 900, IN_PARTS),
        ("new/llama-3.1", None, ["model.safetensors"]),
        ("new/llama-3.1", 900, IN_PARTS),
        ("", 900, IN_PARTS),
    ],
)
def test_without_the_suffix_a_folder_is_written(path, most, files, tmp_path) -> None:
    """As `transformers` reads it, which needs the metadata of each file."""
    folder = tmp_path / path
    save_safetensors(folder, blocks(), max_file_size=most)
    assert files_in(folder) == files
    assert_same(load_safetensors(folder), blocks())
    assert tensor_shapes(folder).keys() == blocks().keys()
    for name in files:
        if name.endswith(".safetensors"):
            with safe_open(folder / name, "numpy") as file:
                assert file.metadata() == {"format": "pt"}
    # What else is there is not read, nor is an earlier save of more or fewer files.
    save_safetensors(folder / "adapter.safetensors", {"a": np.ones(3)})
    save_safetensors(folder, blocks(), max_file_size=900 if most is None else None, metadata={})
    others = ["model.safetensors"] if most else IN_PARTS
    assert files_in(folder) == sorted(["adapter.safetensors", *others])
    assert_same(load_safetensors(folder), blocks())


def test_missing_or_ambiguous_files_raise(file, tmp_path) -> None:
    with pytest.raises(ts.CheckpointError, match="cannot be read: .*No such file or directory"):
        load_safetensors(file)
    with pytest.raises(ts.CheckpointError, match="has no file \\*.safetensors."):
        load_safetensors(tmp_path)
    for name in "ab":
        save_safetensors(tmp_path / f"{name}.safetensors", blocks())
    with pytest.raises(
        ts.CheckpointError, match="has 2 files .*: a.safetensors, b.safetensors. Pass"
    ):
        load_safetensors(tmp_path)


@pytest.fixture
def index(file, tmp_path) -> Path:
    save_safetensors(file, blocks(3), max_file_size=400)
    return tmp_path / "model.safetensors.index.json"


def rewrite(index: Path, **changes: object) -> None:
    raw = json.loads(index.read_text())
    raw["weight_map"].update({name.replace("_", "/"): x for name, x in changes.items()})
    index.write_text(json.dumps(raw))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", "a\0b"])
def test_files_outside_the_directory_are_not_read(index, name, opened) -> None:
    save_safetensors(index.parent.parent / "secret.safetensors", blocks(3))
    rewrite(index, layers_0_w=name)
    opened.clear()
    with pytest.raises(ts.FormatError) as told:
        load_safetensors(index)
    assert f"names {name!r}, which is not the name of a file beside it." in str(told.value)
    assert opened == {str(index)}


@pytest.fixture
def opened():
    """The paths that the process opens during the test."""
    paths: set[str] = set()
    listening = [True]

    def listen(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and listening:
            paths.add(str(args[0]))

    sys.addaudithook(listen)  # a hook cannot be removed
    yield paths
    listening.clear()


def test_an_index_that_contradicts_or_lacks_its_files_is_rejected(index) -> None:
    first, second = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    rewrite(index, layers_0_w=second, more=first)
    with pytest.raises(ts.FormatError) as told:
        load_safetensors(index)
    headline, *facts = str(told.value).splitlines()
    assert headline == f"{index}: 2 tensors are not where the index says:"
    assert f"layers/0/w: the index says {second}, but {first} has it." in facts[0]
    assert f"more: the index says {first}, but none of its files" in facts[1]
    save_file({"layers/0/w": np.ones(1), "layers/1/w": np.ones(1)}, index.with_name(second))
    with pytest.raises(ts.FormatError, match=f"{second} and {first} has it"):
        load_safetensors(index)
    index.with_name(second).unlink()
    with pytest.raises(ts.CheckpointError) as told:
        load_safetensors(index)
    assert f"{index} cannot be read: [Errno 2] No such file or directory" in str(told.value)
    assert second in str(told.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not valid JSON: Expecting property name"),
        (b"\xff", "is not valid JSON: 'utf-8' codec can't decode"),
        (b"[]", "has no 'weight_map', the file of each tensor."),
        (b'{"weight_map": {"a": null}}', "has no 'weight_map', the file of each tensor."),
        (b'{"weight_map": {"a": "b", "a": "c"}}', "the key 'a' is repeated"),
    ],
)
def test_a_malformed_index_is_rejected(index, text, message) -> None:
    index.write_bytes(text)
    with pytest.raises(ts.FormatError) as told:
        load_safetensors(index)
    assert str(told.value).startswith(str(index))
    assert message in str(told.value)

"""What is read of the index of arrays in few files, compared with what TensorStore wrote."""

from pathlib import Path
from typing import Any

import crafted_index as crafted
import pytest
import tensorstore

from treeshard.checkpoint import _ocdbt
from treeshard.checkpoint._ocdbt import Index
from treeshard.errors import CheckpointError

SMALL = {"max_decoded_node_bytes": 500, "version_tree_arity_log2": 1}


def opened(folder: Path, context: Any = None, **config: Any) -> Any:
    base = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    return tensorstore.KvStore.open(spec, context=context).result()


def written(folder: Path, sizes: dict[str, int], context: Any = None, **config: Any) -> Any:
    """A store of zeros, written one by one, each as a version of its own."""
    store = opened(folder, context, **config)
    for key, size in sizes.items():
        store.write(key, bytes(size)).result()
    return store


@pytest.fixture
def nodes(monkeypatch) -> list[str]:
    """The files of the nodes that are read."""
    names: list[str] = []
    read = Index._read

    def noted(self: Index, name: str, node: Any) -> bytes:
        names.append(name)
        return read(self, name, node)

    monkeypatch.setattr(Index, "_read", noted)
    return names


@pytest.mark.parametrize("kind", ["single", "numbered"])
@pytest.mark.parametrize("compression", [None, {"id": "zstd"}], ids=["as is", "compressed"])
@pytest.mark.parametrize("config", [{}, SMALL], ids=["one node", "small nodes"])
def test_large_values_are_those_of_the_store(tmp_path, nodes, kind, compression, config) -> None:
    sizes = {f"layers.{i}/{'é' * (i % 7)}/c/{i}": 2**20 + i if i % 3 else i for i in range(60)}
    written(tmp_path, sizes, manifest_kind=kind, compression=compression, **config)
    assert Index(tmp_path, 0).large_values() == {k: n for k, n in sizes.items() if n > 2**20}
    assert (len(nodes) == 1) == (not config)


@pytest.mark.parametrize("config", [{}, SMALL], ids=["one node", "small nodes"])
def test_large_values_that_processes_wrote_are_found(tmp_path, nodes, config) -> None:
    context, transaction = tensorstore.Context(), tensorstore.Transaction(atomic=True)
    parts = {i: {f"{i}/{j:03}": 2**20 + j + 1 for j in range(20)} for i in range(3)}
    merged = opened(tmp_path, context, **config)
    for i, sizes in parts.items():
        part = written(tmp_path / f"ocdbt.process_{i}", sizes, context, **config)
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_async().result()
    expected = {key: size for sizes in parts.values() for key, size in sizes.items()}
    assert Index(tmp_path, 0).large_values() == expected
    assert (len(nodes) == 1) == (not config)


def test_an_empty_store_has_no_large_values(tmp_path) -> None:
    store = written(tmp_path, {"a": 2**20 + 1})
    store.delete_range(tensorstore.KvStore.KeyRange()).result()
    assert Index(tmp_path, 0).large_values() == {}


def test_numbers_are_read_up_to_64_bits(tmp_path) -> None:
    numbers = [0, 127, 128, 300, 2**14 - 1, 2**14, 2**32 + 5, 2**63, 2**64 - 1]
    data = crafted.index_file(_ocdbt._MAGIC_OF_NODE, b"\0\0" + crafted.varints(*numbers))
    fields = _ocdbt._Fields(data, _ocdbt._MAGIC_OF_NODE, Index(tmp_path, 0), "x")
    assert fields.numbers(len(numbers)).tolist() == numbers


def test_names_of_files_begin_with_the_bases_of_all_parents(tmp_path) -> None:
    (tmp_path / "p/q/d").mkdir(parents=True)
    leaf = crafted.leaf_node({"a": b"b", "c": (0, 2**20 + 1)})
    inner = crafted.parent_node(1, [b""], 0, len(leaf), crafted.file_table(b"q/", b"d/x"))
    root = crafted.parent_node(2, [b""], 0, len(inner))
    files = {"p/q/d/x": leaf, "p/d/x": inner, "p/d/y": root}
    (tmp_path / "p/d").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data.ljust(2**21, b"\0"))
    table = crafted.file_table(b"p/", b"d/y")
    (tmp_path / "manifest.ocdbt").write_bytes(crafted.manifest(2, 0, len(root), table))
    assert opened(tmp_path).read("a").result().value == b"b"
    assert len(opened(tmp_path).read("c").result().value) == 2**20 + 1
    assert Index(tmp_path, 0).large_values() == {"c": 2**20 + 1}


@pytest.mark.parametrize("envelope", [b"\1\0", b"\0\2"], ids=["version", "compression"])
def test_tensorstore_refuses_formats_that_are_not_known_here(tmp_path, envelope) -> None:
    """Such parts are left to TensorStore: a release that reads them needs limits here."""
    leaf = crafted.leaf_node({"a": b"b"})
    crafted.write_index([leaf], tmp_path)
    whole = (tmp_path / "manifest.ocdbt").read_bytes()[14:-4]
    other = crafted.index_file(crafted.NODE, envelope + leaf[14:-4])
    for make in (
        lambda: crafted.write_index([other], tmp_path),
        lambda: (tmp_path / "manifest.ocdbt").write_bytes(
            crafted.index_file(crafted.MANIFEST, envelope + whole)
        ),
    ):
        make()
        assert Index(tmp_path, 0).large_values() == {}
        with pytest.raises(ValueError, match="version is 0 but|Unsupported compression format"):
            opened(tmp_path).read("a").result()


def test_nodes_are_read_once_and_counted_for_each_parent(tmp_path, nodes, monkeypatch) -> None:
    leaf = crafted.leaf_node({"w": b""})
    keys = [i.to_bytes(2, "big") for i in range(1000)]
    crafted.write_index([leaf, crafted.parent_node(1, keys, 0, len(leaf))], tmp_path)
    assert Index(tmp_path, 0).large_values() == {}
    assert len(nodes) == 2
    monkeypatch.setattr(_ocdbt, "_MOST", 2**25)
    text = r"d/x: the index of the arrays takes more than 32.0 MiB"
    with pytest.raises(CheckpointError, match=text):
        Index(tmp_path, 0).large_values()


@pytest.mark.parametrize("name", [b"../x", b"d/../../x", b"/x", b"d//x", b"d/./x", b"d/\0"])
def test_names_of_files_outside_are_read_by_nobody(tmp_path, name) -> None:
    leaf = crafted.leaf_node({"a": (0, 2**20 + 1)})
    crafted.write_index([leaf], tmp_path / "s")
    (tmp_path / "x").write_bytes(leaf)
    table = crafted.file_table(b"", name)
    (tmp_path / "s/manifest.ocdbt").write_bytes(crafted.manifest(0, 0, len(leaf), table))
    assert Index(tmp_path / "s", 0).large_values() == {}
    with pytest.raises(ValueError, match="Invalid key"):
        opened(tmp_path / "s").read("a").result()

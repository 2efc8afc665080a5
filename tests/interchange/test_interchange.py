"""Trees saved to safetensors files and loaded: the same bytes as the safetensors package."""

import os
from functools import partial

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from full_disk import files_of_at_most
from helpers import assert_same, files_in
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from saved_tensors import blocks, entry, flat, package_bytes, random_array, write_raw

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.interchange import _byte_ranges, _tensors, load_safetensors, save_safetensors
from treeshard.interchange._format import DTYPES, PACKED

pytestmark = pytest.mark.usefixtures("all_sizes")

NUMPY_DTYPES = [jnp.dtype(name) for code, name in DTYPES.items() if code not in PACKED]
JAX_DTYPES = [x for x in NUMPY_DTYPES if x.name not in ("int64", "uint64", "float64")]


class Mlp(eqx.Module):
    """Arrays, a function, a number and a static field."""

    w: jax.Array
    b: jax.Array
    act: object
    rate: float
    width: int = eqx.field(static=True)


def mlp() -> Mlp:
    rows = jnp.arange(512, dtype=jnp.float32).reshape(16, 32)
    return Mlp(rows, jnp.ones(16, jnp.bfloat16), jax.nn.relu, 0.1, 32)


def views_of(x: np.ndarray) -> list[np.ndarray]:
    """Arrays of the same values with other strides or byte order."""
    twice = np.repeat(x, 2, axis=0) if x.ndim else x
    views = [x, np.asfortranarray(x), twice[::2] if x.ndim else x]
    if x.dtype.kind in "iufc" and x.dtype.itemsize > 1 and x.dtype.type.__module__ == "numpy":
        views.append(x.astype(x.dtype.newbyteorder(">")))
    return views


names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda x: x != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(block=st.sampled_from([16, 64, 2**23]), data=st.data())
def test_any_tree_has_the_bytes_of_the_package(tmp_path, monkeypatch, block, data) -> None:
    monkeypatch.setattr(_byte_ranges, "BLOCK", block)
    tree = {}
    for name in data.draw(st.lists(names, max_size=6, unique=True)):
        dtype, shape = data.draw(st.sampled_from(NUMPY_DTYPES)), data.draw(shapes)
        tree[name] = data.draw(st.sampled_from(views_of(random_array(dtype, shape, len(tree)))))
    metadata = data.draw(st.none() | st.dictionaries(names, names, min_size=1, max_size=1))
    ours = tmp_path / "ours.safetensors"
    save_safetensors(ours, tree, metadata=metadata)
    assert ours.read_bytes() == package_bytes(tree, tmp_path, metadata)
    assert_same(load_safetensors(ours), flat(tree))
    assert files_in(tmp_path) == [ours.name]


# name -> the format's code, dtype, shape, and the specs on `fsdp=8` and on `data=2,fsdp=4`
TABLE = {
    "bool": ("BOOL", "bool", (8, 16), P("fsdp"), P(None, "data")),
    "bf16": ("BF16", "bfloat16", (16, 8, 24), P(None, "fsdp"), P("data", None, "fsdp")),
    "f8": ("F8_E4M3", "float8_e4m3fn", (8, 16), P(None, "fsdp"), P(("data", "fsdp"))),
    "f16": ("F16", "float16", (8, 8, 8), P(None, None, "fsdp"), P(None, ("fsdp", "data"))),
    "f32": ("F32", "float32", (8, 16), P("fsdp"), P("fsdp", "data")),
    "c64": ("C64", "complex64", (8, 8), P(), P("data")),
    "empty": ("F32", "float32", (0, 8), P(None, "fsdp"), P(None, "data")),
    "scalar": ("I32", "int32", (), P(), P()),
    "odd": ("I16", "int16", (7, 3), P(), P()),
}


@pytest.mark.parametrize(
    ("axes", "which", "most"), [("fsdp=8", 3, None), ("data=2,fsdp=4", 4, 1200)]
)
def test_files_go_both_ways(file, tmp_path, monkeypatch, axes, which, most) -> None:
    monkeypatch.setattr(_byte_ranges, "BLOCK", 64)
    placed_as = {name: NamedSharding(ts.make_mesh(axes), row[which]) for name, row in TABLE.items()}
    tree = {name: random_array(jnp.dtype(row[1]), row[2]) for name, row in TABLE.items()}
    placed = {name: jax.device_put(x, placed_as[name]) for name, x in tree.items()}
    save_safetensors(file, placed, max_file_size=most)
    by_package = {}
    for part in tmp_path.glob("*.safetensors"):  # `load_file` has no float8
        by_package |= dict(safetensors.deserialize(part.read_bytes()))
    assert by_package.keys() == tree.keys()
    for name, x in tree.items():
        assert by_package[name]["shape"] == [*x.shape]
        assert by_package[name]["dtype"] == TABLE[name][0]
        assert by_package[name]["data"] == x.tobytes()
    assert len(files_in(tmp_path)) == (1 if most is None else 5)
    if most is None:
        save_file(tree, file)
    found = load_safetensors(file, placed)
    assert_same(found, tree)
    for name, x in found.items():
        assert x.sharding == placed_as[name]
        for piece in x.addressable_shards:
            assert np.asarray(piece.data).tobytes() == tree[name][piece.index].tobytes()


def test_short_reads_and_writes_are_continued(file, monkeypatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: pwrite(f, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda f, into, at: preadv(f, [into[0][:7]], at))
    save_safetensors(file, blocks())
    assert_same(load_safetensors(file, blocks()), blocks())
    monkeypatch.setattr(os, "preadv", lambda f, into, at: 0)
    with pytest.raises(ts.DamagedError, match="was cut short while it was read"):
        load_safetensors(file, blocks())


@pytest.mark.parametrize("rows", [2**9, 2**15])  # read together with others, and alone
def test_a_file_that_is_cut_short_while_it_is_read_is_damaged(file, monkeypatch, rows) -> None:
    save_safetensors(file, {"w": np.zeros((rows, 3)), "x": np.zeros((rows, 3))})
    cut = os.path.getsize(file) - 1
    monkeypatch.setattr(_tensors, "check_memory", lambda *_: os.truncate(file, cut))
    with pytest.raises(ts.DamagedError, match="was cut short while it was read"):
        load_safetensors(file)


def test_the_header_of_each_file_is_read_once(file, monkeypatch) -> None:
    opened = []
    monkeypatch.setattr(safetensors, "safe_open", lambda *args: opened.append(args))
    save_safetensors(file, blocks(), max_file_size=900)
    load_safetensors(file.with_name("model.safetensors.index.json"), blocks())
    assert len(opened) == 3


def test_tensors_are_renamed(file) -> None:
    tree = {"layers": [{"w": np.ones(2)}, {"w": np.zeros(3)}]}
    save_safetensors(file, tree, rename=lambda path: path.replace("/", "."))
    assert load_safetensors(file).keys() == {"layers.0.w", "layers.1.w"}
    assert_same(load_safetensors(file, tree, rename=lambda path: path.replace("/", ".")), tree)
    save_safetensors(file, tree, rename={"layers/0/w": "first"})
    assert load_safetensors(file).keys() == {"first", "layers/1/w"}
    assert_same(load_safetensors(file, tree, rename={"layers/0/w": "first"}), tree)


@pytest.mark.parametrize(
    ("tree", "rename", "message"),
    [
        (
            {"a/b": 1, "a": {"b": 1}},
            None,
            "a/b: the name of ['a']['b'] and ['a/b']. Give them different names with `rename`.",
        ),
        ({"a": 1}, {"a": "__metadata__"}, "a: its name would be '__metadata__', which the"),
        ({"a": 1}, {"a": "\ud800"}, "a: its name would be '\\ud800', which is not valid Unicode."),
        ({"a": 1}, lambda path: 3, "a: its name would be 3, which is a int, not a str."),
        (
            {"weight": 1},
            {"wieght": "w", "d": "e"},
            "wieght: `rename` has it, but the tree has no such array. Did you mean 'weight'?",
        ),
    ],
    ids=["paths", "metadata", "unicode", "int", "unknown"],
)
def test_invalid_names_are_listed(file, tree, rename, message) -> None:
    with pytest.raises(ts.CheckpointError) as told:
        save_safetensors(file, jax.tree.map(np.ones, tree), rename=rename)
    assert message in str(told.value)
    assert str(told.value).startswith("save_safetensors: ")
    assert files_in(file.parent) == []


def test_all_leaves_that_cannot_be_written_are_listed(file) -> None:
    gone = jnp.ones(2)
    gone.delete()
    no_dtype = (
        "safetensors does not have this dtype, or packs it. Use `.astype`, or `.view('uint8')`"
    )
    facts = {
        "complex": (np.ones(2, np.complex128), "complex128[2]: safetensors does not have this"),
        "gone": (gone, "float32[2]: the array was deleted"),
        "int4": (jnp.ones(2, jnp.int4), f"int4[2]: {no_dtype}"),
        "key": (jax.random.key(0), "key<fry>[]: "),
        "struct": (jax.ShapeDtypeStruct((2,), "int8"), "int8[2]: a ShapeDtypeStruct"),
    }
    with pytest.raises(ts.LeafError) as told:
        save_safetensors(file, {name: x for name, (x, _) in facts.items()} | {"b": np.ones(3)})
    lines = str(told.value).splitlines()[1:]
    for line, (name, (_, says)) in zip(lines, facts.items(), strict=True):
        assert line.startswith(f"  {name}: {says}"), line
    assert "Save `jax.random.key_data(key)`, and turn it back into" in lines[3]
    with pytest.raises(ts.DeletedLeafError):
        save_safetensors(file, gone)
    assert files_in(file.parent) == []


def test_a_path_that_cannot_be_written_raises(tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    paths = {
        "file": "/file cannot be created: File exists.",
        "file/out": "/file/out cannot be created: Not a directory.",
        "file/model.safetensors": "/file cannot be created: File exists.",
        "folder.safetensors": "is a directory. Pass the path of a file.",
    }
    for path, says in paths.items():
        with pytest.raises(ts.CheckpointError, match=says):
            save_safetensors(tmp_path / path, blocks())
    assert files_in(tmp_path) == ["file", "folder.safetensors"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, {1: "a"}, {"a": "\ud800"}, "a", [1]])
def test_metadata_that_is_not_text_changes_nothing(file, metadata) -> None:
    save_safetensors(file, blocks())
    with pytest.raises(ts.FormatError, match="the format has text by name, such as"):
        save_safetensors(file, {"a": np.ones(2)}, metadata=metadata)
    assert_same(load_safetensors(file), blocks())


def test_errors_name_what_is_not_unicode(tmp_path) -> None:
    with pytest.raises(ts.CheckpointError, match=r"udcff.* not valid Unicode"):
        save_safetensors(tmp_path / "x.safetensors", {"\udcff": np.ones(2)})
    file = tmp_path / os.fsdecode(b"\xff.safetensors")
    save_safetensors(file, {"a": np.ones(2)})
    with pytest.raises(ts.MismatchError, match="\udcff"):
        load_safetensors(file, {"b": np.ones(2)})


def test_a_cast_without_a_direct_conversion(file) -> None:
    scales = np.array([0.5, 1, 2], ml_dtypes.float8_e8m0fnu)
    save_safetensors(file, {"scales": scales})
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16):
        expected = {"scales": np.array([0.5, 1, 2], dtype)}
        assert_same(load_safetensors(file, cast=dtype), expected)
        assert_same(load_safetensors(file, expected, cast=dtype), expected)


def test_only_what_is_converted_needs_memory_twice(file, monkeypatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr(_tensors, "check_memory", lambda _, bytes_: needed.append(bytes_))
    save_safetensors(file, {"a": np.ones(100, np.float32), "b": np.ones(100, ml_dtypes.bfloat16)})
    for cast in (None, "bfloat16", "float32"):  # "a" is read first
        load_safetensors(file, cast=cast)
    assert needed == [600, 200 + 400, 400 + 400 + 200]


@pytest.mark.parametrize("most", [None, 900])
def test_a_full_disk_changes_nothing(file, tmp_path, most) -> None:
    save_safetensors(file, blocks(), max_file_size=most)
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    large = {"a": np.ones(10), "b": np.ones(10**5)}
    with files_of_at_most(10**5), pytest.raises(ts.CheckpointError) as told:
        save_safetensors(file, large, max_file_size=most)
    assert str(told.value) == (
        f"save_safetensors: {file} cannot be written: [Errno 27] File too large. What was saved"
        " before is unchanged."
    )
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before
    save_safetensors(file, large, max_file_size=most)
    assert_same(load_safetensors(file), large)


def test_rules_and_plans_place_the_leaves_of_a_module(file, mesh) -> None:
    save_safetensors(file, mlp(), metadata={})
    like, rules = eqx.filter_eval_shape(mlp), [("b", None), ("w", P("fsdp"))]
    found = [
        load_safetensors(file, like, rules=rules, mesh=mesh),
        load_safetensors(file, like, rules=rules, mesh="data=2,fsdp=4"),
        load_safetensors(file, ts.plan(mlp(), rules, mesh)),
    ]
    with jax.set_mesh(mesh):
        found.append(load_safetensors(file, like, rules=rules))
    for module in found:
        assert module.w.sharding == NamedSharding(mesh, P("fsdp"))
        assert (module.act, module.rate, module.width) == (jax.nn.relu, 0.1, 32)
        assert_same(eqx.filter(module, eqx.is_array), eqx.filter(mlp(), eqx.is_array))
    assert {type(x) for x in load_safetensors(file).values()} == {np.ndarray}
    by_name = load_safetensors(file, rules=rules, mesh=mesh)
    assert {name: x.sharding.spec for name, x in by_name.items()} == {"w": P("fsdp"), "b": P()}
    negated = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)
    assert_same(negated(negated(by_name)), flat(mlp()))


def test_leaves_are_placed_as_those_of_like(file, mesh) -> None:
    tree = {
        "host": np.ones((8, 8), np.float32),
        "number": np.float32(3),
        "sharded": ts.shard(np.ones(8, np.float32), P("fsdp"), mesh),
        "committed": jax.device_put(np.ones(3, np.float32), jax.devices()[5]),
        "uncommitted": jnp.ones(3),
        "struct": jnp.ones(3),
    }
    save_safetensors(file, tree)
    like = tree | {"struct": jax.ShapeDtypeStruct((3,), "float32")}
    found = load_safetensors(file, like)
    assert type(found["host"]) is np.ndarray
    assert type(found["number"]) is np.float32
    assert found["sharded"].sharding == tree["sharded"].sharding
    assert found["committed"].devices() == {jax.devices()[5]}
    # Uncommitted arrays follow sharded ones.
    for name in ("uncommitted", "struct"):
        both = found[name][0] + found["sharded"]
        assert both.sharding.device_set == set(mesh.devices.flat)
    assert_same(found, tree)


@pytest.mark.parametrize("in_a_checkpoint", [False, True])
def test_a_trace_may_load(file, tmp_path, mesh, in_a_checkpoint) -> None:
    """A small array, one that is read by regions, and one for the default device."""
    tree = {"small": np.ones(8, np.float32), "large": np.ones((8, 2**16), np.float32)}
    state = ts.shard(tree, P("fsdp"), mesh) | {"count": jnp.float32(3)}
    if in_a_checkpoint:
        save(tmp_path / "x", state)
    save_safetensors(file, state)
    load = partial(restore, tmp_path / "x") if in_a_checkpoint else partial(load_safetensors, file)
    loaded = []

    def scaled(x: jax.Array) -> jax.Array:
        loaded.append(load(state))
        return x * loaded[-1]["small"] * loaded[-1]["large"][:, 0] * loaded[-1]["count"]

    np.testing.assert_array_equal(jax.jit(scaled)(np.ones(8, np.float32)), np.full(8, 3.0))
    assert_same(loaded[0], state)


def test_a_mesh_without_rules_or_rules_without_a_mesh_raise(file, mesh) -> None:
    save_safetensors(file, {"w": np.ones(8)})
    with pytest.raises(ValueError, match="a mesh was given without rules"):
        load_safetensors(file, mesh=mesh)
    with pytest.raises(ts.NoMeshError, match="jax.set_mesh"):
        load_safetensors(file, rules=[("w", None)])
    with pytest.raises(ValueError, match="The result is a dict by name: rename its keys."):
        load_safetensors(file, rename=str.upper)
    abstract = ts.plan({"w": np.ones(8)}, [("w", None)], mesh.abstract_mesh)
    with pytest.raises(ts.NoMeshError, match="is an AbstractMesh: it has sizes, but no devices"):
        load_safetensors(file, abstract)


def test_what_differs_from_the_request_is_told_as_of_a_checkpoint(file, mesh) -> None:
    tree = {"layers/0/weight": np.ones((8, 4)), "b": np.array([1, 1e39]), "i": np.array([2**40])}
    save_safetensors(file, tree)
    with pytest.raises(ts.MismatchError) as told:
        load_safetensors(file, tree | {"layers/0/weight": np.ones((4, 8))})
    assert (
        "layers/0/weight: saved as float64[8,4], requested as float64[4,8]. Request float64[8,4],"
        " and transpose it by `.T`." in str(told.value)
    )
    like = {"layers/0/wieght": np.ones((8, 4)), "b": np.ones(2, np.float32)}
    with pytest.raises(ts.MismatchError) as told:
        load_safetensors(file, like)
    for fact in (
        "b: saved as float64[2], requested as float32[2]. `cast='float32'` converts it.",
        f"layers/0/wieght: not in {file}. Did you mean 'layers/0/weight'?",
        f"i: in {file}, but not requested.",
        "pass `rename=`",
    ):
        assert fact in str(told.value)
    with pytest.warns(ts.ShardingWarning, match=f"layers/0/wieght: not in {file}"):
        found = load_safetensors(file, like, cast="float32", partial=True)
    assert found["layers/0/wieght"] is like["layers/0/wieght"]
    assert_same(found["b"], np.array([1, np.inf], np.float32))
    assert_same(load_safetensors(file, cast=jnp.float32)["b"], found["b"])
    with pytest.raises(ts.MismatchError, match=r"i: int64\[1\] would be int32\[1\] on devices"):
        load_safetensors(file, rules=[(".*", None)], mesh=mesh)
    with jax.enable_x64(True):
        assert load_safetensors(file, rules=[(".*", None)], mesh=mesh)["i"][0] == 2**40


def test_packed_dtypes_are_not_loaded(file) -> None:
    write_raw(file, {"w": entry("F4", [4], [0, 2])}, b"ab")
    with pytest.raises(ts.MismatchError, match="w: F4 packs several numbers into a byte"):
        load_safetensors(file)
    assert load_safetensors(file, {}, partial=True) == {}


def test_progress_shows_bars(file, capsys) -> None:
    save_safetensors(file, blocks(), progress=True)
    load_safetensors(file, progress=True)
    bars = capsys.readouterr().err
    assert "save_safetensors: 100%" in bars
    assert "load_safetensors: 100%" in bars
    load_safetensors(file)
    assert capsys.readouterr().err == ""

"""Trees saved to safetensors files and loaded: the same bytes as the safetensors package."""

import random
import subprocess
import sys
import time
import warnings

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
from treeshard._disk import untrusted
from treeshard._disk.files import Lock
from treeshard.interchange import _byte_ranges, load_safetensors, save_safetensors
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


# ------------------------------------------------------------------ bytes


def views_of(x: np.ndarray) -> list[np.ndarray]:
    """Arrays of the same values with other strides or byte order."""
    twice = np.repeat(x, 2, axis=0) if x.ndim else x
    views = [x, np.asfortranarray(x), x.T.copy().T, twice[::2] if x.ndim else x]
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
    save_safetensors(tmp_path / "ours", tree, metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == package_bytes(tree, tmp_path, metadata)
    assert_same(load_safetensors(tmp_path / "ours"), flat(tree))
    assert files_in(tmp_path) == ["ours"]


# name -> the format's code, dtype, shape, and the specs on `fsdp=8` and on `data=2,fsdp=4`
TABLE = {
    "bool": ("BOOL", "bool", (8, 16), P("fsdp"), P(None, "data")),
    "bf16": ("BF16", "bfloat16", (16, 8, 24), P(None, "fsdp"), P("data", None, "fsdp")),
    "f8": ("F8_E4M3", "float8_e4m3fn", (8, 16), P(None, "fsdp"), P("fsdp", "data")),
    "f8-wide": ("F8_E5M2", "float8_e5m2", (16, 8), P("fsdp"), P(("data", "fsdp"))),
    "int4-as-bytes": ("U8", "uint8", (8, 4), P("fsdp"), P(None, "fsdp")),
    "f16": ("F16", "float16", (8, 8, 8), P(None, None, "fsdp"), P(None, ("fsdp", "data"))),
    "f32": ("F32", "float32", (8, 16), P("fsdp"), P("fsdp", "data")),
    "c64": ("C64", "complex64", (8, 8), P(), P("data")),
    "empty": ("F32", "float32", (0, 8), P(None, "fsdp"), P(None, "data")),
    "scalar": ("I32", "int32", (), P(), P()),
    "odd": ("I16", "int16", (7, 3), P(), P()),
}


@pytest.mark.parametrize("most", [None, 900], ids=["one file", "several files"])
@pytest.mark.parametrize(("axes", "which"), [("fsdp=8", 3), ("data=2,fsdp=4", 4)])
def test_files_go_both_ways(file, tmp_path, axes, which, most) -> None:
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


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp"), P("data", "fsdp"), P()], ids=str)
def test_large_arrays_are_moved_in_blocks(file, mesh, spec, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_byte_ranges, "BLOCK", 2**12)
    tree = {"w": random_array(np.dtype("float32"), (256, 128)), "t": np.ones((300, 150)).T}
    save_safetensors(file, {"w": ts.shard(tree["w"], spec, mesh), "t": tree["t"]})
    assert file.read_bytes() == package_bytes(tree, tmp_path)
    struct = jax.ShapeDtypeStruct((256, 128), "float32", sharding=NamedSharding(mesh, spec))
    assert_same(load_safetensors(file, {"w": struct, "t": tree["t"]}), flat(tree))


def test_a_header_is_read_once_and_each_tensor_takes_as_long_as_the_last(
    file, tmp_path, monkeypatch
) -> None:
    def calls(count: int) -> int:
        """The calls of Python functions in a load of so many empty tensors."""
        save_file({f"{i}/w": np.zeros(0, np.float32) for i in range(count)}, file)
        made = 0

        def count_one(frame: object, event: str, arg: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count_one)
        try:
            load_safetensors(file)
        finally:
            sys.setprofile(None)
        return made

    none, some, twice = (calls(count) for count in (0, 1000, 2000))
    assert twice - some == pytest.approx(some - none, rel=0.05)
    opened = []
    monkeypatch.setattr(safetensors, "safe_open", lambda *args: opened.append(args))
    save_safetensors(file, blocks(), max_file_size=900)
    load_safetensors(file.with_name("model.safetensors.index.json"), blocks())
    assert len(opened) == 3


def test_only_arrays_are_saved(file) -> None:
    save_safetensors(file, mlp(), metadata={})
    assert load_safetensors(file).keys() == {"w", "b"}
    assert safetensors.safe_open(file, "np").metadata() is None


def test_an_array_at_two_paths_is_two_tensors(file) -> None:
    x = np.arange(6.0)
    save_safetensors(file, {"embed": x, "head": x})
    tree = load_safetensors(file, {"embed": x, "head": x})
    assert_same(tree, {"embed": x, "head": x.copy()})
    assert not np.shares_memory(tree["embed"], tree["head"])


# ------------------------------------------------------------------ names


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
            {"a/b": np.ones(1), "a": {"b": np.ones(1)}},
            None,
            "a/b: the name of ['a']['b'] and ['a/b']. Give them different names with `rename`.",
        ),
        (
            {"a": np.ones(1), "b": np.ones(1)},
            lambda path: "x",
            "x: the name of ['a'] and ['b']. Give them different names with `rename`.",
        ),
        (
            {"a": np.ones(1)},
            {"a": "__metadata__"},
            "a: its name would be '__metadata__', which the",
        ),
        (
            {"a": np.ones(1)},
            {"a": "\ud800"},
            "a: its name would be '\\ud800', which is not valid Unicode.",
        ),
        ({"a": np.ones(1)}, lambda path: 3, "a: its name would be 3, which is a int, not a str."),
        (
            {"weight": np.ones(1)},
            {"wieght": "w"},
            "wieght: `rename` has it, but the tree has no such array. Did you mean 'weight'?",
        ),
        ({"a": np.ones(1), "b": np.ones(1)}, {"c": "d", "e": "f"}, "2 names are invalid:\n"),
    ],
    ids=["paths", "names", "metadata", "unicode", "int", "unknown", "several"],
)
def test_invalid_names_are_listed(file, tree, rename, message) -> None:
    with pytest.raises(ts.CheckpointError) as told:
        save_safetensors(file, tree, rename=rename)
    assert message in str(told.value)
    assert str(told.value).startswith("save_safetensors: ")
    assert files_in(file.parent) == []


def test_rename_needs_like(file) -> None:
    with pytest.raises(ValueError, match="The result is a dict by name: rename its keys."):
        load_safetensors(file, rename=str.upper)


# ------------------------------------------------------------------ errors of save


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (jax.random.key(0), ts.LeafError, "Save `jax.random.key_data(key)`, and turn it back into"),
        (
            jnp.ones(2, jnp.int4),
            ts.LeafError,
            "int4[2]: safetensors does not have this dtype, or packs it.",
        ),
        (np.ones(2, ml_dtypes.float4_e2m1fn), ts.LeafError, "Use `.astype`, or `.view('uint8')`"),
        (
            np.ones(2, np.complex128),
            ts.LeafError,
            "w: complex128[2]: safetensors does not have this dtype",
        ),
        (jax.ShapeDtypeStruct((2,), "int8"), ts.LeafError, "w: int8[2]: it is a ShapeDtypeStruct"),
    ],
    ids=["key", "int4", "float4", "complex128", "struct"],
)
def test_leaves_that_cannot_be_written_raise(file, leaf, error, message) -> None:
    with pytest.raises(error) as told:
        save_safetensors(file, {"w": leaf, "b": np.ones(3)})
    assert message in str(told.value)
    assert files_in(file.parent) == []


def test_all_leaves_that_cannot_be_written_are_named(file) -> None:
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ts.LeafError) as told:
        save_safetensors(file, {"a": jax.random.key(0), "b": {"c": gone}})
    assert "a: key<fry>[]: " in str(told.value)
    assert "b/c: float32[2]: its memory is gone" in str(told.value)
    with pytest.raises(ts.DeletedLeafError):
        save_safetensors(file, gone)


def test_an_invalid_file_size_is_rejected(file) -> None:
    with pytest.raises(ts.FormatError, match="'5 GBs' is not an amount of memory. Write it"):
        save_safetensors(file, blocks(), max_file_size="5 GBs")


def test_a_header_longer_than_what_is_read_is_not_written(file, monkeypatch) -> None:
    monkeypatch.setattr(untrusted, "MOST_BYTES", 2**10)
    with pytest.raises(ts.FormatError, match="header would be JSON of 1.0 KiB. At most 1.0 KiB"):
        save_safetensors(file, {"x" * 10**3: np.ones(1)})
    assert files_in(file.parent) == []


def test_a_path_that_cannot_be_written_raises(tmp_path) -> None:
    nowhere = tmp_path / "nowhere" / "model.safetensors"
    with pytest.raises(ts.CheckpointError, match="safetensors: cannot be written to: No such"):
        save_safetensors(nowhere, blocks())
    with pytest.raises(ts.CheckpointError, match="is a directory. Pass the path of a file."):
        save_safetensors(tmp_path, blocks())


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


def test_a_killed_save_leaves_a_complete_file(file, tmp_path) -> None:
    saves = f"""
import numpy as np
from treeshard.interchange import save_safetensors
trees = [{{"w": np.full((1000, 1000), i, np.float32)}} for i in range(2)]
while True:
    for tree in trees:
        save_safetensors({str(file)!r}, tree)
"""
    rng, seen = random.Random(7), set()
    for _ in range(3):
        file.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", saves], start_new_session=True) as process:
            while not file.exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.random() / 5)
            process.kill()
        found = load_safetensors(file)["w"]
        assert (found == found[0, 0]).all()
        seen.add(float(found[0, 0]))
    assert seen <= {0.0, 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.ShardingWarning)  # if the last one left something
        save_safetensors(file, blocks())
    assert files_in(tmp_path) == ["model.safetensors"]


def test_leftovers_of_a_killed_save_are_overwritten(file, tmp_path) -> None:
    (tmp_path / ".model.safetensors.part").write_bytes(b"x" * 10**5)
    with pytest.warns(ts.ShardingWarning, match=r"model.safetensors.part \(97.7 KiB\)"):
        save_safetensors(file, blocks())
    assert files_in(tmp_path) == ["model.safetensors"]
    assert file.read_bytes() == package_bytes(blocks(), tmp_path)


def test_two_saves_of_one_file_at_a_time_are_refused(file, tmp_path) -> None:
    with (
        Lock(tmp_path / ".model.safetensors.treeshard-files-lock", "elsewhere"),
        pytest.raises(ts.CheckpointError, match="is already writing here"),
    ):
        save_safetensors(file, blocks())
    save_safetensors(file, blocks())
    assert files_in(tmp_path) == ["model.safetensors"]


# ------------------------------------------------------------------ placement


def test_rules_place_the_leaves_of_a_module(file, mesh) -> None:
    save_safetensors(file, mlp())
    like = eqx.filter_eval_shape(mlp)
    found = load_safetensors(file, like, rules=[("b", None), ("w", P("fsdp"))], mesh=mesh)
    assert found.w.sharding == NamedSharding(mesh, P("fsdp"))
    assert (found.act, found.rate, found.width) == (jax.nn.relu, 0.1, 32)
    assert_same(eqx.filter(found, eqx.is_array), eqx.filter(mlp(), eqx.is_array))


def test_a_mesh_may_be_text(file) -> None:
    save_safetensors(file, {"w": np.ones((8, 4), np.float32)})
    rules = [("w", P("fsdp"))]
    loaded = load_safetensors(file, rules=rules, mesh="fsdp=8", min_size=0)
    assert loaded["w"].sharding == NamedSharding(ts.make_mesh("fsdp=8"), P("fsdp"))


def test_rules_use_the_current_mesh(file, mesh) -> None:
    save_safetensors(file, {"w": np.ones((8, 8), np.float32)})
    with jax.set_mesh(mesh):
        found = load_safetensors(file, rules=[("w", P("data"))])
    assert found["w"].sharding.spec == P("data")


def test_a_plan_places_leaves(file, mesh) -> None:
    decided = ts.plan(mlp(), [("b", None), ("w", P(None, "data"))], mesh)
    save_safetensors(file, mlp())
    found = load_safetensors(file, decided)
    assert found.w.sharding == NamedSharding(mesh, P(None, "data"))
    assert found.act is jax.nn.relu


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


def test_without_like_all_tensors_are_loaded_by_name(file, mesh) -> None:
    save_safetensors(file, {"b": np.ones(8), "a": {"w": np.ones((8, 8), np.float32)}})
    assert all(type(x) is np.ndarray for x in load_safetensors(file).values())
    with jax.enable_x64(True):
        found = load_safetensors(file, rules=[("w", P("fsdp")), (".*", None)], mesh=mesh)
    assert {name: x.sharding.spec for name, x in found.items()} == {"a/w": P("fsdp"), "b": P()}


def test_loaded_arrays_can_be_donated(file, mesh) -> None:
    save_safetensors(
        file, {"w": np.ones((512, 512), np.float32), "r": np.ones((512, 8), np.float32)}
    )
    found = load_safetensors(file, rules=[("w", P("fsdp")), ("r", None)], mesh=mesh)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    for x in jax.tree.leaves(step(step(found))):
        assert all(np.all(np.asarray(piece.data) == 3) for piece in x.addressable_shards)
    assert_same(load_safetensors(file)["r"], np.ones((512, 8), np.float32))


def test_a_mesh_without_rules_or_rules_without_a_mesh_raise(file, mesh) -> None:
    save_safetensors(file, {"w": np.ones(8)})
    with pytest.raises(ValueError, match="a mesh was given without rules"):
        load_safetensors(file, mesh=mesh)
    with pytest.raises(ts.NoMeshError, match="jax.set_mesh"):
        load_safetensors(file, rules=[("w", None)])
    abstract = ts.plan({"w": np.ones(8)}, [("w", None)], mesh.abstract_mesh)
    with pytest.raises(ts.NoMeshError, match="is an AbstractMesh: it has sizes, but no devices"):
        load_safetensors(file, abstract)


def test_rules_that_do_not_fit_raise(file, mesh) -> None:
    save_safetensors(file, {"w": np.ones((2, 3), np.float32)})
    with pytest.raises(ts.ShardingRuleError, match="is not divisible"):
        load_safetensors(file, rules=[("w", P(None, "fsdp"))], mesh=mesh)


# ------------------------------------------------------------------ differences from the request


def test_all_differences_are_listed_at_once(file) -> None:
    save_safetensors(file, {"layers/0/weight": np.ones((8, 4)), "b": np.ones(3), "c": np.ones(2)})
    like = {"layers/0/wieght": np.ones((8, 4)), "b": np.ones(4), "c": np.ones(2, np.int32)}
    with pytest.raises(ts.MismatchError) as told:
        load_safetensors(file, like)
    message = str(told.value)
    for fact in (
        "b: saved as float64[3], requested as float64[4].",
        "c: saved as float64[2], requested as int32[2].",
        f"layers/0/wieght: not in {file}. Did you mean 'layers/0/weight'?",
        f"layers/0/weight: in {file}, but not requested.",
    ):
        assert fact in message


def test_dtypes_are_converted_only_with_cast(file) -> None:
    tree = {"w": np.array([1.0, 1e39]), "i": np.ones(2, np.int32)}
    save_safetensors(file, tree)
    like = {"w": np.ones(2, np.float32), "i": tree["i"]}
    with pytest.raises(ts.MismatchError, match="`cast='float32'` converts it."):
        load_safetensors(file, like)
    found = load_safetensors(file, like, cast="float32")
    assert_same(found, {"w": np.array([1, np.inf], np.float32), "i": tree["i"]})
    assert_same(load_safetensors(file, cast=jnp.float32), found)
    with pytest.raises(ts.FormatError, match="Only floating-point arrays are"):
        load_safetensors(file, cast="int32")


def test_64_bits_on_devices_need_x64(file, mesh) -> None:
    save_safetensors(file, {"i": np.array([2**40]), "w": np.ones(1)})
    with pytest.raises(ts.MismatchError) as told:
        load_safetensors(file, rules=[(".*", None)], mesh=mesh)
    assert "i: int64[1] would be int32[1] on devices. Turn on 64-bit" in str(told.value)
    assert "convert it with `cast='float32'`" in str(told.value)
    with jax.enable_x64(True):
        found = load_safetensors(file, rules=[(".*", None)], mesh=mesh)
        assert found["i"][0] == 2**40


def test_partial_loads_part_of_a_tree(file) -> None:
    save_safetensors(file, {"a": np.ones(2), "c": np.ones(3)})
    like = {"a": np.zeros(2), "b": np.zeros(3)}
    with pytest.raises(ts.MismatchError, match="`partial=True` reads the leaves"):
        load_safetensors(file, like)
    with pytest.warns(ts.ShardingWarning, match=f"b: not in {file}"):
        found = load_safetensors(file, like, partial=True)
    assert_same(found["a"], np.ones(2))
    assert found["b"] is like["b"]
    with pytest.raises(
        ts.MismatchError, match="saved as float64\\[2\\], requested as float64\\[5\\]"
    ):
        load_safetensors(file, {"a": np.zeros(5)}, partial=True)


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

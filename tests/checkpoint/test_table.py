"""Converts trees to a table and arrays, and back."""

import enum
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import define_prng_impl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._disk.leaves import kind_of, store_key
from treeshard.checkpoint._checksums import checksums
from treeshard.checkpoint._table import from_text, pack, to_text, unpack


def round_trip(tree: Any) -> dict[str, Any]:
    """The leaves after a round trip through stored arrays and the text of the table."""
    packed = pack(tree)
    found = checksums(list(packed.arrays.values()), "save")
    table = packed.table.with_checksums(dict(zip(packed.arrays, found, strict=True)))
    read = from_text(to_text(table))
    assert read == table
    stored = {row.key: (row.stored_shape, row.stored) for row in read.leaves if row.stored}
    assert stored == {key: (x.shape, str(x.dtype)) for key, x in packed.arrays.items()}
    return {row.path: unpack(row, packed.arrays.get(row.key)) for row in read.leaves}


def same(a: Any, b: Any) -> bool:
    if kind_of(a) == "key":
        return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
    if isinstance(a, np.ndarray | np.generic | jax.Array):
        kinds = isinstance(a, jax.Array) == isinstance(b, jax.Array)
        a, b = np.asarray(a), np.asarray(b)
        return kinds and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return type(a) is type(b) and (a == b if type(a) is int else repr(a) == repr(b))


# ------------------------------------------------------------------ round trips

LEAVES = {
    "float": jnp.arange(6.0).reshape(2, 3),
    "bfloat16": jnp.arange(6).astype(jnp.bfloat16),
    "float8": jnp.arange(6).astype(jnp.float8_e5m2),
    "float8 of a new kind": jnp.arange(6).astype("float8_e8m0fnu"),
    "int4": (jnp.arange(6) - 3).astype(jnp.int4),
    "uint4": jnp.arange(6).astype(jnp.uint4),
    "int2": np.array([-2, -1, 0, 1], ml_dtypes.int2),
    "float4": jnp.arange(6).astype("float4_e2m1fn"),
    "bool": jnp.array([True, False]),
    "complex": jnp.array([1 + 2j]),
    "scalar": jnp.float32(3),
    "numpy": np.arange(3),
    "numpy, 64 bits": np.array([2**60 + 1, -1]),
    "numpy, 64 bits of float": np.array([np.pi, np.nan, -0.0]),
    "numpy's scalar": np.asarray(np.float32(2.5)),
    "nothing in it": np.zeros((0, 3), np.float16),
    "nothing of uint4": np.zeros((4, 0), ml_dtypes.uint4),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(3), 4).reshape(2, 2),
    "rbg": jax.random.key(3, impl="rbg"),
    "no keys": jax.random.split(jax.random.key(3), 4)[:0],
    "true": True,
    "int": -3,
    "a large int": -(10**5000),
    "2**64": 2**64,
    "nan": float("nan"),
    "inf": float("-inf"),
    "-0.0": -0.0,
    "tiny": 5e-324,
    "complex number": complex(-0.0, float("inf")),
    "text": 'é"\\\n\x00 \u2028 ' + chr(0x1F600),
    "no text": "",
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "none": None,
}


@pytest.mark.parametrize("name", LEAVES)
def test_every_kind_comes_back(name) -> None:
    back = round_trip({"at": {"it": LEAVES[name]}})
    assert list(back) == ["at/it"]
    assert same(back["at/it"], LEAVES[name])


def test_a_tree_of_all_kinds_and_a_bare_leaf() -> None:
    back = round_trip(LEAVES)
    assert list(back) == sorted(LEAVES)
    assert all(same(back[name], LEAVES[name]) for name in LEAVES)
    assert round_trip(7) == {"": 7}
    assert same(round_trip(LEAVES["float"])[""], LEAVES["float"])
    assert round_trip({}) == {}


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text()
) | st.binary()


@settings(max_examples=60, deadline=None)
@given(st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text("ab.%_ é"), x)))
def test_any_tree_of_scalars_comes_back(tree) -> None:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    back = list(round_trip(tree).values())
    assert len(back) == len(leaves)
    assert all(map(same, back, leaves))


@pytest.mark.parametrize("dtype", ["uint4", "float4_e2m1fn", "float8_e8m0fnu", "int4", "int32"])
def test_shards_are_not_moved(dtype, mesh, compiles) -> None:
    sharding = NamedSharding(mesh, P(None, "fsdp"))
    x = jax.device_put(np.arange(4 * 8).reshape(4, 8).astype(np.uint8) % 5, sharding)
    x = jax.block_until_ready(x.astype(dtype))
    compiles.clear()
    packed = pack({"x": x})
    back = unpack(packed.table.leaves[0], packed.arrays["x"])
    assert packed.arrays["x"].sharding == back.sharding == sharding
    assert compiles == []
    assert same(back, x)


def test_big_endian_arrays_are_converted() -> None:
    (back,) = round_trip(np.arange(3, dtype=">i4")).values()
    assert same(back, np.arange(3, dtype="=i4"))


# ------------------------------------------------------------------ rows of a tree


class Color(enum.IntEnum):
    RED = 1


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    name: str
    activation: Callable[..., Any]
    size: int = eqx.field(static=True)


def test_static_leaves_are_left_out() -> None:
    layer = Layer(jnp.ones(3), None, "mlp", jax.nn.relu, 7)
    tree = {"layer": layer, "color": Color.RED, "np": np.str_("x"), "f": len, "type": int}
    table = pack(tree).table
    assert {row.path: row.kind for row in table.leaves} == {
        "layer/weight": "array",
        "layer/bias": "none",
        "layer/name": "str",
    }
    assert table.leaves[0].crc is None


def test_flax_boxes_have_one_path() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert [row.path for row in pack(nnx.state(model)).table.leaves] == ["bias", "kernel"]
    linen = {"kernel": nn.Partitioned(jnp.ones((2, 3)), ("fsdp", None))}
    assert [row.path for row in pack(linen).table.leaves] == ["kernel"]


def test_optimizer_state_has_a_row_per_leaf() -> None:
    params = {"w": jnp.ones(3)}
    state = optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(0.1))).init(params)
    back = round_trip(state)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: x is None)
    assert list(back) == ts.leaf_paths(state, is_leaf=lambda x: x is None)
    assert all(map(same, back.values(), leaves))


def test_specs_and_meshes_are_recorded(mesh, fsdp_mesh) -> None:
    w = np.zeros((8, 8))
    tree = {
        "a": jax.device_put(w, NamedSharding(mesh, P(None, ("fsdp", "data")))),
        "b": jax.device_put(w, NamedSharding(fsdp_mesh, P("fsdp"))),
        "c": w,
    }
    table = pack(tree).table
    meshes = [list(axes.items()) for axes in table.meshes]
    assert meshes == [[("data", 2), ("fsdp", 4)], [("fsdp", 8)]]  # in the order of their axes
    assert [list(axes.items()) for axes in from_text(to_text(table)).meshes] == meshes
    assert [row.spec for row in table.leaves] == ["P(None, ('fsdp', 'data'))", "P('fsdp',)", None]


def test_every_leaf_has_a_size_in_bytes() -> None:
    tree = {"k": jax.random.split(jax.random.key(0), 3), "s": "abc", "w": np.zeros((2, 3))}
    assert [row.bytes for row in pack(tree).table.leaves] == [24, 3, 48]


# ------------------------------------------------------------------ keys in the array store


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("layers/0/attn/q/weight", "layers.0.attn.q.weight"),
        ("a.b/c d", "a%2Eb.c%20d"),
        ("../../etc/passwd", "%2E%2E.%2E%2E.etc.passwd"),
        ("", "%"),
        ("_METADATA", "%_METADATA"),
        ("array_metadatas", "%array_metadatas"),
        ("%_METADATA", "%25_METADATA"),
        ("a//b", "a..b"),
        ("/", "%."),
        ("//", "%.."),
        ("é\x00", "%C3%A9%00"),
    ],
)
def test_store_keys(path, key) -> None:
    assert store_key(path) == key


@settings(max_examples=300, deadline=None)
@given(st.sets(st.text("ab./%_~é\\ ", max_size=6) | st.text(max_size=300), max_size=8))
def test_store_keys_are_valid_file_names_and_unique(paths) -> None:
    keys = [store_key(path) for path in paths]
    assert len(set(keys)) == len(paths)
    assert all(re.fullmatch(r"[A-Za-z0-9_.~%-]{1,200}", key) for key in keys)
    assert not {".", ".."} & set(keys)


# ------------------------------------------------------------------ what cannot be saved


def test_leaves_with_equal_paths_are_listed() -> None:
    with pytest.raises(ts.CheckpointError) as told:
        pack({"a/b": None, "a": {"b": 2}, "x/y": 1, "x": {"y": len}})
    assert str(told.value) == "save: a/b: shared by ['a']['b'], ['a/b']. Rename a key."


def test_unsupported_leaves_are_listed_at_once() -> None:
    gone = jnp.arange(3.0) + 1
    gone.delete()
    tree = {
        "none": None,
        "gone": gone,
        "struct": jax.ShapeDtypeStruct((3,), "float32"),
        "objects": np.array([None, {}]),
        "words": np.array(["a", "b"]),
        "days": np.datetime64("2020-01-01"),
        "masked": np.ma.masked_array([1, 2], [True, False]),
        "record": np.zeros(2, [("x", "f4")]),
    }
    with pytest.raises(ts.TreeShardError) as told:
        pack(tree, "save /runs/7")
    lines = str(told.value).splitlines()
    assert lines[0] == "save /runs/7: 7 leaves cannot be moved, and none was:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == sorted(tree.keys() - {"none"})
    assert "objects: object[2]: JAX does not support this dtype. Use `.astype`, or `.tol" in str(
        told.value
    )


def test_deleted_and_traced_leaves_are_refused() -> None:
    gone = jnp.arange(3.0) + 1
    gone.delete()
    with pytest.raises(ts.DeletedLeafError, match="w: float32\\[3\\]: its memory is gone"):
        pack({"w": gone})
    with pytest.raises(ts.LeafError, match="w: float32\\[3\\]: it is being traced"):
        jax.jit(lambda x: pack({"w": x}))(jnp.ones(3))


def test_strings_that_are_not_unicode_are_refused() -> None:
    with pytest.raises(ts.LeafError) as told:
        pack({"a": "\ud800", "\udfff": 1, "b": "ok"})
    assert str(told.value) == (
        "save: 2 strings cannot be saved:\n"
        "  'a': it is not valid Unicode (surrogates not allowed). Save it as bytes.\n"
        "  '\\udfff': it is not valid Unicode (surrogates not allowed). Save it as bytes."
    )


def test_keys_of_an_unnamed_implementation_are_refused() -> None:
    def numbers(key: jax.Array, shape: tuple[int, ...], *_: Any) -> jax.Array:
        return jnp.zeros((*shape, 2), jnp.uint32)

    impl = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=numbers,
        random_bits=numbers,
        fold_in=lambda key, data: key,
        name="mine",
        tag="mine",
    )
    with pytest.raises(ts.LeafError) as told:
        pack({"key": jax.random.key(0, impl=impl)})
    assert str(told.value) == (
        "key: key<mine>[]: its PRNG implementation has no name, so no other program could restore"
        " it."
        " Save `jax.random.key_data` of it."
    )

"""Converts trees to a table and arrays, and back; the table as text; damaged tables."""

import enum
import json
import re
from collections.abc import Callable
from typing import Any
from zlib import crc32

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._disk.leaves import kind_of
from treeshard.checkpoint._array_store import store_key
from treeshard.checkpoint._checksums import checksums
from treeshard.checkpoint._table import from_text, pack, to_text, unpack


def round_trip(tree: Any) -> dict[str, Any]:
    """The leaves after a round trip through stored arrays and the text of the table."""
    table, arrays = pack(tree)
    found = checksums(list(arrays.values()), "save").crcs
    table = table.with_checksums(dict(zip(arrays, found, strict=True)))
    read = from_text(to_text(table))
    assert read == table
    stored = {row.path: (row.stored_shape, row.stored) for row in read.leaves if row.stored}
    assert stored == {path: (x.shape, str(x.dtype)) for path, x in arrays.items()}
    return {row.path: unpack(row, arrays.get(row.path)) for row in read.leaves}


def same(a: Any, b: Any) -> bool:
    if kind_of(a) == "key":
        return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
    if isinstance(a, np.ndarray | np.generic | jax.Array):
        kinds = isinstance(a, jax.Array) == isinstance(b, jax.Array)
        a, b = np.asarray(a), np.asarray(b)
        return kinds and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return type(a) is type(b) and (a == b if type(a) is int else repr(a) == repr(b))


# ------------------------------------------------------------------ from a tree, and back

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
    table, arrays = pack({"x": x})
    back = unpack(table.leaves[0], arrays["x"])
    assert arrays["x"].sharding == back.sharding == sharding
    assert compiles == []
    assert same(back, x)


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
    table = pack(tree)[0]
    assert {row.path: row.kind for row in table.leaves} == {
        "layer/weight": "array",
        "layer/bias": "none",
        "layer/name": "str",
        "color": "str",
        "np": "str",
    }
    assert [row.path for row in table.leaves if row.crc is None] == ["layer/weight"]


def test_specs_and_meshes_are_recorded(mesh, fsdp_mesh) -> None:
    w = np.zeros((8, 8))
    tree = {
        "a": jax.device_put(w, NamedSharding(mesh, P(None, ("fsdp", "data")))),
        "b": jax.device_put(w, NamedSharding(fsdp_mesh, P("fsdp"))),
        "c": w,
    }
    table = pack(tree)[0]
    meshes = [list(axes.items()) for axes in table.meshes]
    assert meshes == [[("data", 2), ("fsdp", 4)], [("fsdp", 8)]]  # in the order of their axes
    assert [list(axes.items()) for axes in from_text(to_text(table)).meshes] == meshes
    assert [row.spec for row in table.leaves] == ["P(None, ('fsdp', 'data'))", "P('fsdp',)", None]


# ------------------------------------------------------------------ keys in the array store


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("layers/0/attn/q/weight", "layers.0.attn.q.weight"),
        ("a.b/c d", "a%2Eb.c%20d"),
        ("../../etc/passwd", "%2E%2E.%2E%2E.etc.passwd"),
        ("", "%"),
        ("%.", "%25%2E"),
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
def test_store_keys_are_plain_and_unique(paths) -> None:
    keys = [store_key(path) for path in paths]
    assert len(set(keys)) == len(paths)
    assert all(re.fullmatch(r"[A-Za-z0-9_.~%-]+", key) for key in keys)
    assert not {".", ".."} & set(keys)


# ------------------------------------------------------------------ the text of a table


def values_crc(text: str) -> int:
    """The CRC-32 of a table's values, in one canonical form."""
    raw = {key: value for key, value in json.loads(text).items() if key != "crc"}
    return crc32(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


def test_the_text_of_a_table(fsdp_mesh) -> None:
    w = jax.device_put(np.arange(8, dtype=np.uint8), NamedSharding(fsdp_mesh, P("fsdp")))
    table, _ = pack({"w": w, "step": 3, "none": None})
    text = to_text(table.with_checksums({"w": crc32(bytes(range(8)))}))
    assert text == (
        "{\n"
        '"treeshard_leaves": 3,\n'
        '"meshes": [[["fsdp", 8]]],\n'
        '"leaves": [\n'
        '  {"path": "none", "kind": "none", "crc": 0},\n'
        '  {"path": "step", "kind": "int", "value": "3", "crc": 1842515611},\n'
        '  {"path": "w", "kind": "array", "shape": [8], "dtype": "uint8",'
        ' "spec": "P(\'fsdp\',)", "stored": "uint8", "chunk": [8], "crc": 2292869279}\n'
        "],\n"
        f'"crc": {values_crc(text)}\n'
        "}\n"
    )
    assert from_text(json.dumps(json.loads(text))) == from_text(text)  # reformatted


# ------------------------------------------------------------------ bad tables


def a_table(mesh: jax.sharding.Mesh) -> str:
    place = NamedSharding(mesh, P(None, "fsdp"))
    tree = {
        "empty": np.zeros((0, 3), np.float32),
        "key": jax.random.split(jax.random.key(0), 3),
        "none": None,
        "quarter": jax.device_put(np.zeros((2, 4), ml_dtypes.uint4), place),
        "step": 3,
        "text": "hello",
        "w": jax.device_put(np.arange(32.0).reshape(8, 4), place),
    }
    table, arrays = pack(tree)
    found = checksums(list(arrays.values()), "save").crcs
    return to_text(table.with_checksums(dict(zip(arrays, found, strict=True))))


def with_checksum(raw: Any) -> str:
    text = json.dumps(raw)
    return json.dumps({**raw, "crc": values_crc(text)})


EMPTY, KEY, NONE, QUARTER, STEP, TEXT, W = range(7)


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (None, {"treeshard_leaves": 2}, "The table of leaves is of version 2, and this treeshard"),
        (None, {"meshes": [3]}, "The table of leaves is not one of treeshard's: "),
        (None, {"leaves": [3]}, "The table of leaves is not one of treeshard's: leaves[0]: "),
        (W, {"kind": "tensor"}, "leaves[6]: its fields are path, kind, shape, dtype, spec, "),
        (W, {"unknown": 3}, "leaves[6]: its fields are path, kind, shape, dtype, spec, stored, "),
        (W, {"dtype": "flaot32"}, "leaves[6]: 'flaot32' is not a dtype."),
        (KEY, {"impl": "mine"}, "leaves[1]: this JAX has no PRNG implementation 'mine'."),
        (STEP, {"value": "x"}, "leaves[4]: value is 'x', which is not of kind int."),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_table_of_another_program_is_refused(row, change, message, mesh) -> None:
    """Its checksum is right, and a row is not one that treeshard writes."""
    raw = json.loads(a_table(mesh))
    (raw if row is None else raw["leaves"][row]).update(change)
    with pytest.raises(ts.FormatError) as told:
        from_text(with_checksum(raw))
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "The table of leaves is not valid JSON: Expecting value"),
        (lambda text: text[:-3], "The table of leaves is not valid JSON: "),
        (lambda text: text.replace("float32", "float16"), "The table of leaves has the CRC-32 "),
        (lambda text: text.replace("hello", "hallo"), "The table of leaves has the CRC-32 "),
        (lambda text: "[]", "The table of leaves has no version or no checksum."),
        (lambda text: '{"treeshard_leaves": 1}', "has no version or no checksum."),
        (
            lambda text: text.replace('"crc": 0', '"crc": NaN'),
            "The table of leaves has the CRC-32 ",
        ),
        (lambda text: text.replace('"kind"', '"path"'), "JSON: the key 'path' is repeated."),
        (lambda text: "[" * 100000, "The table of leaves is not valid JSON: "),
        (
            lambda text: f'{{"treeshard_leaves": {"9" * 5000}, "crc": 0}}',
            "The table of leaves is not valid JSON: Exceeds the limit",
        ),
    ],
)
def test_a_damaged_table_is_an_error(damage, message, mesh) -> None:
    with pytest.raises(ts.DamagedError) as told:
        from_text(damage(a_table(mesh)))
    assert message in str(told.value)


def test_damage_is_never_silent(mesh, unchecked) -> None:
    """Thousands of tables with a few wrong characters: an error, or the same table."""
    text = a_table(mesh)
    table = from_text(text)
    rng = np.random.default_rng(0)
    characters = [*'0123456789-+.eE"[]{},: \\\n', "\x00", "é"]
    kinds = {"error": 0, "the same": 0}
    for _ in range(4000):
        damaged = list(text)
        for _ in range(rng.integers(1, 4)):
            place = rng.integers(len(damaged))
            match rng.integers(4):
                case 0:
                    damaged[place] = chr(ord(damaged[place]) ^ 1 << int(rng.integers(7)))
                case 1:
                    damaged[place] = characters[rng.integers(len(characters))]
                case 2:
                    del damaged[place : place + rng.integers(1, 30)]
                case 3:
                    damaged[place:place] = damaged[: rng.integers(1, 30)]
        try:
            assert from_text("".join(damaged)) == table
            kinds["the same"] += 1
        except ts.DamagedError:
            kinds["error"] += 1
    assert kinds["error"] > 3900

"""Tables of leaves as text: the format, damage, and tables that other programs wrote."""

import json
import tracemalloc
from typing import Any
from zlib import crc32

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._disk.leaves import Contents
from treeshard.checkpoint._checksums import checksums
from treeshard.checkpoint._table import from_text, pack, to_text, unpack


def values_crc(text: str) -> int:
    """The CRC-32 of a table's values, in one canonical form."""
    raw = {key: value for key, value in json.loads(text).items() if key != "crc"}
    return crc32(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


def test_the_text_of_a_table(fsdp_mesh) -> None:
    w = jax.device_put(np.arange(8, dtype=np.uint8), NamedSharding(fsdp_mesh, P("fsdp")))
    packed = pack({"w": w, "step": 3, "none": None})
    text = to_text(packed.table.with_checksums({"w": crc32(bytes(range(8)))}))
    assert text == (
        "{\n"
        '"treeshard_leaves": 1,\n'
        '"meshes": [[["fsdp", 8]]],\n'
        '"leaves": [\n'
        '  {"path": "none", "kind": "none", "crc": 0},\n'
        '  {"path": "step", "kind": "int", "value": "3", "crc": 1842515611},\n'
        '  {"path": "w", "kind": "array", "shape": [8], "dtype": "uint8",'
        ' "spec": "P(\'fsdp\',)", "stored": "uint8", "crc": 2292869279}\n'
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
    packed = pack(tree)
    found = checksums(list(packed.arrays.values()), "save")
    return to_text(packed.table.with_checksums(dict(zip(packed.arrays, found, strict=True))))


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
        (W, {"kind": "tensor"}, "leaves[6]: "),
        (W, {"path": 3}, 'leaves[6]: {"path": 3, '),
        (W, {"unknown": 3}, "leaves[6]: SavedLeaf.__new__() got an unexpected keyword argument"),
        (W, {"shape": [8, -4]}, 'leaves[6]: {"path": "w", '),
        (W, {"shape": [2**40, 2**40]}, 'leaves[6]: {"path": "w", '),
        (W, {"dtype": "flaot32"}, "leaves[6]: 'flaot32' is not a dtype."),
        (W, {"stored": "uint8"}, 'leaves[6]: {"path": "w", '),
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
        (lambda text: text.replace("hello", "\ud800"), "The table of leaves is not valid JSON: "),
        (lambda text: text.replace('"crc": 0', '"crc": NaN'), "JSON: NaN is not a number."),
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


def test_tables_nested_to_any_depth() -> None:
    for depth in range(600, 1200):  # at some it can be read and not written
        with pytest.raises(ts.DamagedError, match="The table of leaves "):
            from_text(f'{{"treeshard_leaves": {"[" * depth}{"]" * depth}, "crc": 0}}')


def test_damage_is_never_silent(mesh, unchecked) -> None:
    """Thousands of tables with a few wrong characters: an error, or the same table."""
    text = a_table(mesh)
    table = from_text(text)
    rng = np.random.default_rng(0)
    characters = [*'0123456789-+.eE"[]{},: \\\n', "\x00", "é", "\ud800"]
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


ODD = [None, True, 0, -1, 3, 2**31, 2**63, 10**400, 1.5, "", "x", "P('fsdp')", "float32", [], {}]
ODD += ["key", "array", "none", "int", "uint8", [0], [2**62], [0, 2**61], [1] * 70, ["fsdp", 8]]
ODD += ["../..", "P(" * 500, "9" * 4400, "0x" + "f" * 5000, [[["fsdp", 4]]], {"path": 1}, "\x00"]


def places(raw: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = raw.items() if isinstance(raw, dict) else enumerate(raw if type(raw) is list else ())
    return [at, *[place for key, x in inside for place in places(x, (*at, key))]]


def test_tables_of_other_programs_are_read_or_refused(mesh, unchecked) -> None:
    """Thousands of odd values, with valid checksums: a `FormatError`, or a usable table."""
    text = a_table(mesh)
    everywhere = [place for place in places(json.loads(text)) if place and place != ("crc",)]
    rng = np.random.default_rng(0)
    kinds = {"refused": 0, "read": 0}
    for i in range(4000):
        raw = json.loads(text)
        *way, last = everywhere[i % len(everywhere)]
        inside = raw
        for key in way:
            inside = inside[key]
        inside[last] = ODD[rng.integers(len(ODD))]
        kinds[outcome(with_checksum(raw))] += 1
    assert min(kinds.values()) > 300, kinds


def outcome(text: str) -> str:
    try:
        table = from_text(text)
    except ts.FormatError:
        return "refused"
    assert from_text(to_text(table)) == table
    str(Contents("", table.leaves, table.meshes))
    for row in table.leaves:
        assert row.key
        if row.stored is None:
            unpack(row, None)
    return "read"


@pytest.mark.parametrize("shape", [[0, 2**60], [2**30, 0, 2**30], [2**31, 2**29], [2**70], [0]])
def test_reading_a_table_allocates_nothing_of_the_sizes_in_it(shape, mesh) -> None:
    raw = json.loads(a_table(mesh))
    for row in (EMPTY, W, KEY):
        raw["leaves"][row]["shape"] = shape
    tracemalloc.start()
    try:
        outcome(with_checksum(raw))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()

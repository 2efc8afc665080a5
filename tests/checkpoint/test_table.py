"""The table of leaves: its text, names in the array store, and damaged tables."""

import json
import re
from typing import Any
from zlib import crc32

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.facts import Facts
from treeshard.checkpoint._array_store import store_key
from treeshard.checkpoint._table import from_text, pack, to_text


@settings(max_examples=50, deadline=None)
@given(st.sets(st.text("ab./%_~é\\ \0", max_size=6), max_size=8))
@example({"", "%", "a//b", "a/b", "a.b", "/", "//", "../../etc/passwd", "é\x00"})
def test_store_keys_are_plain_and_unique(paths) -> None:
    assert store_key("layers/0/attn/q.w") == "layers.0.attn.q%2Ew"  # as it is on disk
    keys = [store_key(path) for path in paths]
    assert len(set(keys)) == len(paths)
    assert all(re.fullmatch(r"[A-Za-z0-9_.~%-]+", key) for key in keys)
    assert not {".", ".."} & set(keys)


def values_crc(text: str) -> int:
    """The CRC-32 of a table's values, in one canonical form."""
    raw = {key: value for key, value in json.loads(text).items() if key != "crc"}
    return crc32(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


def test_the_text_of_a_table(fsdp_mesh) -> None:
    w = jax.device_put(np.arange(8, dtype=np.uint8), NamedSharding(fsdp_mesh, P("fsdp")))
    table, _ = pack({"w": w, "step": 3, "none": None}, Facts())
    text = to_text(table._replace(files={"d/1": [8, 7], "_METADATA": [3, 5]}))
    assert text == (
        "{\n"
        '"treeshard_leaves": 4,\n'
        '"meshes": [[["fsdp", 8]]],\n'
        '"leaves": [\n'
        '  {"path": "none", "kind": "none"},\n'
        '  {"path": "step", "kind": "int", "value": "3"},\n'
        '  {"path": "w", "kind": "array", "shape": [8], "dtype": "uint8",'
        ' "spec": "P(\'fsdp\',)", "stored": "uint8", "chunk": [8]}\n'
        "],\n"
        '"files": {\n'
        '  "_METADATA": [3, 5],\n'
        '  "d/1": [8, 7]\n'
        "},\n"
        f'"crc": {values_crc(text)}\n'
        "}\n"
    )
    assert from_text(json.dumps(json.loads(text))) == from_text(text)  # reformatted


def a_table(mesh: jax.sharding.Mesh) -> str:
    w = jax.device_put(np.arange(32.0).reshape(8, 4), NamedSharding(mesh, P(None, "fsdp")))
    table, _ = pack({"key": jax.random.key(0), "step": 3, "text": "hello", "w": w}, Facts())
    return to_text(table)


def with_checksum(raw: Any) -> str:
    text = json.dumps(raw)
    return json.dumps({**raw, "crc": values_crc(text)})


KEY, STEP, TEXT, W = range(4)


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (None, {"treeshard_leaves": 3}, "The table of leaves is of version 3, and this treeshard"),
        (None, {"meshes": [3]}, "The table of leaves is not one of treeshard's: "),
        (None, {"files": [3]}, "The table of leaves is not one of treeshard's: "),
        (W, {"unknown": 3}, "leaves[3]: its fields are path, kind, shape, dtype, spec, stored, "),
        (W, {"dtype": "flaot32"}, "leaves[3]: 'flaot32' is not a dtype."),
        (KEY, {"impl": "mine"}, "leaves[0]: this JAX has no PRNG implementation 'mine'."),
        (STEP, {"value": "x"}, "leaves[1]: value is 'x', which is not of kind int."),
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

"""Headers of safetensors files: read as the safetensors package does, or rejected."""

import json
import random
import struct
import sys
from types import ModuleType

import jax.numpy as jnp
import pytest
import safetensors
from saved_tensors import blocks, entry, package_bytes, random_array, write_raw

import treeshard as ts
from treeshard.interchange import _format, load_safetensors, save_safetensors


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "is not a safetensors file: Error while deserializing header: invalid JSON"),
        ({"w": 3}, "invalid type: integer `3`"),
        ({"w": entry("F33")}, "unknown variant `F33`, expected one of `BOOL`"),
        ({"w": entry(shape=[1] * 65)}, "w: the shape has 65 dims, and numpy allows 64."),
        ({"w": entry(shape=[0, 2**62, 4], offsets=[0, 0])}, "which is too large for numpy."),
        ({"w": entry("F4", [3], [0, 1])}, "does not end up at a byte boundary"),
        ({"w": entry(offsets=[1, 0])}, "invalid offset for tensor `w`"),
        (b"[" * 10**5, "invalid JSON in header"),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_an_invalid_header_is_rejected(file, header, message) -> None:
    write_raw(file, header, b"x")
    with pytest.raises(ts.FormatError) as told:
        load_safetensors(file)
    assert str(told.value).startswith(f"{file}")
    assert message in str(told.value)


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 8 + b"{}"])
def test_a_file_of_another_format_is_rejected(file, data) -> None:
    file.write_bytes(data)
    with pytest.raises(ts.FormatError, match=f"{file} is not a safetensors file: .*header too"):
        load_safetensors(file)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_a_file_that_is_too_short_or_too_long_is_damaged(file, change) -> None:
    save_safetensors(file, blocks())
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ts.DamagedError, match="is cut short or too long: .* Copy it again."):
        load_safetensors(file)


def test_a_file_that_is_replaced_while_it_is_opened_raises(file, monkeypatch) -> None:
    save_safetensors(file, blocks(1))
    open_with_package = safetensors.safe_open

    def replace_first(*args):
        save_safetensors(file, blocks(2))
        return open_with_package(*args)

    monkeypatch.setattr(safetensors, "safe_open", replace_first)
    with pytest.raises(ts.CheckpointError, match="was replaced while it was opened. Load it again"):
        load_safetensors(file)


def test_a_package_that_is_missing_or_cannot_be_loaded(file, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save_safetensors(file, blocks())  # does not need it
    with pytest.raises(ImportError, match=r"pip install 'treeshard\[checkpoint\]'"):
        load_safetensors(file)
    broken = ModuleType("safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", broken)  # lacks every name: an `ImportError`
    with pytest.raises(ts.CheckpointError, match="is installed, but cannot be loaded: cannot imp"):
        load_safetensors(file)


@pytest.mark.parametrize(
    "entry_of", [lambda x: [*x.values()], lambda x: {**x, "dtype": {"U8": None}}]
)
def test_an_entry_of_another_form_that_the_package_reads_is_rejected(file, entry_of) -> None:
    write_raw(file, {"w": entry_of(entry())}, b"x")
    assert dict(safetensors.deserialize(file.read_bytes()))["w"]["data"] == b"x"
    with pytest.raises(ts.FormatError, match="w: its entry is not of the form that the format"):
        load_safetensors(file)


def valid_file(rng: random.Random, directory) -> bytes:
    """A file of a few tensors, written by the package."""
    dtypes = [name for code, name in _format.DTYPES.items() if code not in _format.PACKED]
    tree = {}
    for i in range(rng.randint(1, 4)):
        shape = tuple(rng.choice([0, 1, 2, 3, 8]) for _ in range(rng.randint(0, 3)))
        tree[rng.choice("abé/.\n") * (i + 1)] = random_array(jnp.dtype(rng.choice(dtypes)), shape)
    return package_bytes(tree, directory, rng.choice([None, {"format": "pt"}]))


VALUES = [0, 1, 2, -1, 7, 8, 2**31, 2**63, 2**64, 10**30, 1.0, 1e300, True, None, "", "F32", "F4",
          "F6_E2M3", [], [0], [1, 1], [2**32, 2**32], [-1, 3], {}, {"a": "b"}, [[[]]]]  # fmt: skip


def other_header(rng: random.Random, valid: bytes) -> bytes:
    """Changes values, names and order of the header; its length stays correct."""
    length = struct.unpack("<Q", valid[:8])[0]
    raw, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([*raw])
        inside = raw[name] if isinstance(raw[name], dict) else {}
        change = rng.randrange(6)
        if change == 0:
            raw[name] = rng.choice(VALUES)
        elif change == 1:
            inside[rng.choice(["dtype", "shape", "data_offsets", "strides"])] = rng.choice(VALUES)
        elif change == 2 and inside:
            inside.pop(rng.choice([*inside]))
        elif change == 3:
            raw[rng.choice(["new", "__metadata__", "", "a"])] = json.loads(json.dumps(raw[name]))
        elif change == 4:
            inside["dtype"] = rng.choice([*_format.DTYPES])
        else:
            raw = dict(reversed(raw.items()))
    text = json.dumps(raw).encode() + b" " * rng.choice([0, 0, 3])
    return struct.pack("<Q", len(text)) + text + data


def test_fuzzed_headers_are_rejected_or_read_as_the_package_does(file, tmp_path, unchecked) -> None:
    rng = random.Random(7)
    valid = [valid_file(rng, tmp_path) for _ in range(40)]
    rejected = read = 0
    for _ in range(2000):
        bad = other_header(rng, rng.choice(valid))
        file.unlink(missing_ok=True)  # faster than overwriting it
        file.write_bytes(bad)
        try:
            tensors = load_safetensors(file)
        except (ts.FormatError, ts.DamagedError, ts.MismatchError):
            rejected += 1
            continue
        read += 1
        theirs = dict(safetensors.deserialize(bad))
        assert tensors.keys() == theirs.keys()
        for name, x in tensors.items():
            assert list(x.shape) == theirs[name]["shape"]
            assert _format.code_of(x.dtype) == theirs[name]["dtype"]
            assert x.tobytes() == theirs[name]["data"]
    assert rejected > 500
    assert read > 100

"""Headers of safetensors files: read as the safetensors package does, or rejected."""

import json
import random
import resource
import struct
from pathlib import Path

import jax.numpy as jnp
import pytest
import safetensors
from saved_tensors import blocks, entry, package_bytes, random_array, write_raw

import treeshard as ts
from treeshard.interchange import _format as _safetensors
from treeshard.interchange import load_safetensors, save_safetensors


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "the header is list, not an object."),
        ({"w": 3}, "w: its entry is int, not an object."),
        ({"w": {"dtype": "U8"}}, "w: its entry lacks 'data_offsets'. It lacks 'shape'."),
        ({"w": entry() | {"stride": 1}}, "w: its entry has an unknown key 'stride'."),
        ({"w": entry("F33")}, "w: 'F33' is not a dtype. Did you mean 'F32'?"),
        ({"w": entry(3)}, "w: 3 is not a dtype. The format has BOOL, F4,"),
        ({"w": entry(shape=[-1])}, "w: the shape is [-1], not a list of lengths."),
        ({"w": entry(shape=[1.0])}, "w: the shape is [1.0], not a list of lengths."),
        ({"w": entry(shape=[True])}, "w: the shape is [True], not a list of lengths."),
        ({"w": entry(shape=[1] * 65)}, "w: the shape has 65 dims, and numpy allows 64."),
        ({"w": entry(shape=[2**62, 2**62])}, "which is too large for any memory."),
        ({"w": entry(shape=[0, 2**63], offsets=[0, 0])}, "which is too large for any memory."),
        ({"w": entry("F4", [3], [0, 1])}, "w: F4[3] does not end at a full byte."),
        ({"w": entry(offsets=[1, 0])}, "w: the offsets are [1, 0], not its start and stop."),
        ({"w": entry(offsets=[0, 1, 1])}, "w: the offsets are [0, 1, 1], not its start"),
        (
            {"w": entry("F32", [2], [0, 4])},
            "w: F32[2] takes 8 bytes, and the offsets [0, 4] span 4.",
        ),
        (
            {"w": entry(offsets=[1, 2])},
            "w begins at byte 1 and leaves a gap after the header, which",
        ),
        (
            {"v": entry(shape=[4], offsets=[0, 4]), "w": entry("F32", [1], [2, 6])},
            "w begins at byte 2 and overlaps v, which ends at 4.",
        ),
        ({"__metadata__": {"a": 1}}, "__metadata__ is {'a': 1}, not an object of strings."),
        ({"v": 1, "w": 2}, "2 tensors are wrong:\n  v: its entry is int"),
        (b'{"w": 1, "w": 2}', "the header is not valid JSON: the key 'w' is repeated."),
        (b'{"w": NaN}', "the header is not valid JSON: NaN is not a number."),
        (b'{"w": -0}', "the header is not valid JSON: -0 is not a number."),
        (b'{"w": "\xff"}', "the header is not valid JSON: 'utf-8' codec can't decode"),
        (b'{"\\ud800": 1}', "the header is not valid JSON: 'utf-8' codec can't encode"),
        (b"[" * 10**5, "the header is not valid JSON: maximum recursion depth"),
        (b'{"w": 1' + b"0" * 5000 + b"}", "the header is not valid JSON: Exceeds the limit"),
        (b"{}x", "the header is not valid JSON: Extra data"),
        (b"\xef\xbb\xbf{}", "the header is not valid JSON: Unexpected UTF-8 BOM"),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_an_invalid_header_is_rejected(file, header, message) -> None:
    write_raw(file, header, b"x")
    with pytest.raises(ts.FormatError) as told:
        load_safetensors(file)
    assert str(told.value).startswith(f"{file}: ")
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "says that its header has 0 bytes, and 0 follow."),
        (b"\xff" * 8 + b"{}", "has 18446744073709551615 bytes, and 2 follow."),
        (struct.pack("<Q", 10**8 + 1) + b"{}", "has 100000001 bytes, and 2 follow."),
    ],
)
def test_a_file_of_another_format_is_rejected(file, data, message) -> None:
    file.write_bytes(data)
    with pytest.raises(ts.FormatError) as told:
        load_safetensors(file)
    assert message in str(told.value)


def test_a_file_that_is_too_short_or_too_long_is_damaged(file) -> None:
    save_safetensors(file, blocks())
    complete = file.read_bytes()
    file.write_bytes(complete[:-1])
    with pytest.raises(ts.DamagedError, match="is cut short: its header lists 2000 bytes"):
        load_safetensors(file)
    file.write_bytes(complete + b"x")
    with pytest.raises(
        ts.DamagedError, match="is too long: .* and the file has 2001. Copy it again."
    ):
        load_safetensors(file)


# ------------------------------------------------------------------ fuzzed


def valid_file(rng: random.Random, directory) -> bytes:
    """A file of a few tensors, written by the package."""
    dtypes = [name for code, name in _safetensors.DTYPES.items() if code not in _safetensors.PACKED]
    tree = {}
    for i in range(rng.randint(1, 4)):
        shape = tuple(rng.choice([0, 1, 2, 3, 8]) for _ in range(rng.randint(0, 3)))
        tree[rng.choice("abé/.\n") * (i + 1)] = random_array(jnp.dtype(rng.choice(dtypes)), shape)
    return package_bytes(tree, directory, rng.choice([None, {"format": "pt"}]))


PIECES = [b"0", b"-", b"9", b"{", b"}", b"[", b",", b'"', b"\\", b"\xff", b" ", b"1e9"]


def other_bytes(rng: random.Random, valid: bytes) -> bytes:
    """Flips, inserts, deletes and appends bytes, in and around the header."""
    data = bytearray(valid)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, piece = rng.randrange(min(len(data), 200)), rng.choice(PIECES)
        change = rng.randrange(5)
        if change == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            data[at:at] = piece
        elif change == 2 and len(data) > 100:
            del data[at : at + rng.choice([1, 1, 3, 40])]
        elif change == 3:
            data[at : at + len(piece)] = piece
        else:
            data += rng.choice([b"x", b"\0" * 8])
    return bytes(data)


VALUES = [0, 1, 2, -1, 7, 8, 2**31, 2**63, 2**64, 10**30, 1.0, 1e300, True, None, "", "F32", "F4",
          "F6_E2M3", [], [0], [1, 1], [2**32, 2**32], [-1, 3], {}, {"a": "b"}, [[[]]]]  # fmt: skip


def other_header(rng: random.Random, valid: bytes) -> bytes:
    """Changes values, names and order of the header; its length stays correct."""
    length = struct.unpack("<Q", valid[:8])[0]
    raw, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([*raw])
        inside = raw[name] if isinstance(raw[name], dict) else {}
        change = rng.randrange(8)
        if change == 0:
            raw[name] = rng.choice(VALUES)
        elif change == 1:
            inside[rng.choice(["dtype", "shape", "data_offsets", "strides"])] = rng.choice(VALUES)
        elif change == 2 and inside:
            inside.pop(rng.choice([*inside]))
        elif change == 3:
            raw[rng.choice(["new", "__metadata__", "", "a"])] = json.loads(json.dumps(raw[name]))
        elif change == 4 and isinstance(inside.get("shape"), list):
            inside["shape"].insert(0, rng.choice([0, 1, 2, 2**40]))
        elif change == 5 and isinstance(inside.get("data_offsets"), list):
            step = rng.choice([1, -1, 4, 8, -8, 2**40])
            inside["data_offsets"] = [x + step for x in inside["data_offsets"] if type(x) is int]
        elif change == 6 and isinstance(inside.get("dtype"), str):
            inside["dtype"] = rng.choice([*_safetensors.DTYPES])
        else:
            raw = dict(reversed(raw.items()))
    text = json.dumps(raw).encode() + b" " * rng.choice([0, 0, 3])
    return struct.pack("<Q", len(text)) + text + data


def endless_header(rng: random.Random, valid: bytes) -> bytes:
    """A header of thousands of brackets, digits or letters."""
    start = rng.choice([b"[", b'{"a":', b'{"a":{"shape":[', b'{"a":"', b'{"a":{"shape":[1'])
    text = start * rng.choice([1, 100, 5000]) + rng.choice([b"", b"0" * 5000, b"]}" * 100])
    return struct.pack("<Q", len(text)) + text + valid


@pytest.fixture
def little_memory():
    """Limits the process to 64 MiB more than it uses now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_memory_limit_is_in_force(little_memory) -> None:
    with pytest.raises(MemoryError):
        bytes(2**27)


@pytest.mark.parametrize(
    ("change", "count"), [(other_bytes, 2000), (other_header, 2500), (endless_header, 200)]
)
def test_fuzzed_headers_are_rejected_or_read_as_the_package_does(
    file, tmp_path, unchecked, little_memory, change, count
) -> None:
    rng = random.Random(7)
    valid = [valid_file(rng, tmp_path) for _ in range(40)]
    rejected = read = 0
    for _ in range(count):
        bad = change(rng, rng.choice(valid))
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
            assert _safetensors.code_of(x.dtype) == theirs[name]["dtype"]
            assert x.tobytes() == theirs[name]["data"]
    print(f"{change.__name__}: {rejected} rejected, {read} read as the package does")
    assert rejected > count / 4

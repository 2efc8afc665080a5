"""Indexes of arrays in few files (OCDBT): manifests and nodes, byte by byte."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import zstandard

MANIFEST, NODE = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")


def index_file(magic: bytes, inner: bytes) -> bytes:
    """A manifest or node from what follows its length."""
    data = magic + struct.pack("<Q", len(inner) + 16) + inner
    register = 0xFFFFFFFF
    for byte in data:
        register = register >> 8 ^ CRC_32C[(register ^ byte) & 255]
    return data + struct.pack("<I", register ^ 0xFFFFFFFF)


def after_a_byte(register: int) -> int:
    for _ in range(8):
        register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register


CRC_32C = [after_a_byte(byte) for byte in range(256)]


def varint(number: int) -> bytes:
    low = number & 127
    return bytes([low]) if number < 128 else bytes([low | 128]) + varint(number >> 7)


def varints(*numbers: int) -> bytes:
    return b"".join(map(varint, numbers))


def compressed(magic: bytes, *parts: bytes) -> bytes:
    """A manifest or node."""
    zipped = zstandard.ZstdCompressor(level=1).compressobj()
    data = b"".join(zipped.compress(part) for part in parts)
    return index_file(magic, b"\0\1" + data + zipped.flush())


def file_table(base: bytes, name: bytes) -> bytes:
    return varints(1, len(base + name), len(base)) + base + name


# The file of all nodes, unless a test says otherwise.
FILE = file_table(b"", b"d/x")
CONFIG = bytes(17) + varints(1024, 2**23) + b"\4\0"


def manifest(height: int, offset: int, length: int, table: bytes = FILE) -> bytes:
    """A manifest of one version."""
    version = varints(1, 1) + bytes([height]) + varints(0, offset, length, 1, 1, 1)
    return index_file(MANIFEST, b"\0\0" + CONFIG + table + version + bytes(9))


def leaf_node(values: dict[str, bytes | tuple[int, int]]) -> bytes:
    """A node of values, each as its bytes or as its offset and length in the file."""
    rows = sorted(values.items())
    apart = [x for _, x in rows if isinstance(x, tuple)]
    inline = [x for _, x in rows if isinstance(x, bytes)]
    body = FILE + varints(len(rows), *[0] * (len(rows) - 1), *(len(key) for key, _ in rows))
    body += "".join(key for key, _ in rows).encode()
    body += varints(*(x[1] if isinstance(x, tuple) else len(x) for _, x in rows))
    body += bytes(isinstance(x, tuple) for _, x in rows)
    body += varints(*[0] * len(apart), *(offset for offset, _ in apart))
    return compressed(NODE, b"\0" + body, *inline)


def parent_node(
    height: int, keys: list[bytes], offset: int, length: int, table: bytes = FILE
) -> bytes:
    """A node whose children are one node."""
    count = len(keys)
    body = bytes([height]) + table + varints(count, *[0] * (count - 1), *map(len, keys))
    columns = [varint(x) * count for x in (0, offset, length, 1, 1, 1)]
    return compressed(NODE, body + bytes(count), *keys, *columns)


def write_index(nodes: list[bytes], state: Path, holes: int = 0) -> None:
    """Replaces an index. Of its nodes, one per level, the first is the leaf."""
    file = state / "d/x"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(nodes))
    os.truncate(file, file.stat().st_size + holes)
    offset = sum(map(len, nodes[:-1]))
    data = manifest(len(nodes) - 1, offset, len(nodes[-1]))
    (state / "manifest.ocdbt").write_bytes(data)


# ------------------------------------------------------------------ harmful ones


def of_nodes(make: Callable[[], list[bytes]]) -> Callable[[Path], None]:
    return lambda path: write_index(make(), path / "state")


def large_values() -> list[bytes]:
    return [leaf_node({f"w/{i:04}": bytes(2**20) for i in range(2048)})]


def long_keys() -> list[bytes]:
    """16 GiB of keys: each begins as the second, which is written once."""
    count = 2**18
    body = varints(0, count, 0) + varint(65_531) * (count - 2)
    body += varints(1, 65_535) + varint(4) * (count - 2) + b"a" + b"b" * 65_531
    body += b"".join(i.to_bytes(4, "big") for i in range(1, count)) + bytes(2 * count)
    return [compressed(NODE, b"\0" + body)]


def long_names() -> bytes:
    """A table of 8 GiB of names of files: each begins as the first, which is written once."""
    count, length = 2**17, 2**16 - 1
    table = varint(count) + varint(length - 1) * (count - 1)
    table += varint(length) + varint(1) * (count - 1) + bytes(count)
    return table + b"f" * length + b"g" * (count - 1)


def node_of_long_names() -> list[bytes]:
    return [compressed(NODE, b"\0" + long_names())]


def manifest_of_long_names(path: Path) -> None:
    data = compressed(MANIFEST, CONFIG + long_names())
    (path / "state/manifest.ocdbt").write_bytes(data)


def chain() -> list[bytes]:
    """100 nodes of 60 MB, each the parent of the one before."""
    nodes = [leaf_node({"w/zarr.json": b"{}"})]
    for height in range(1, 101):
        later = (b"x" + bytes([height]) + i.to_bytes(4, "big") for i in range(1, 1000))
        keys = [b"", *(key.ljust(60_000, b"k") for key in later)]
        nodes.append(parent_node(height, keys, sum(map(len, nodes[:-1])), len(nodes[-1])))
    return nodes


def in_holes(name: str) -> Callable[[Path], None]:
    """Stores a value of `w` as 4 GiB of zeros, in a file of a terabyte of holes."""

    def change(path: Path) -> None:
        about = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [8192, 1024],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8192, 1024]}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "fill_value": 0.0,
        }
        values = {"w/zarr.json": json.dumps(about).encode(), name: (2**20, 2**32)}
        write_index([leaf_node(values)], path / "state", holes=2**40)

    return change

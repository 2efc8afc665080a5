"""Trees for tests of safetensors files, and the bytes that the safetensors package writes."""

import json
import struct
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

import treeshard as ts


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes, viewed as `dtype`."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    if dtype.kind == "b":
        raw = bytes(x % 2 for x in raw)
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


def blocks(count: int = 5) -> dict[str, np.ndarray]:
    """Arrays of 400 bytes each."""
    return {f"layers/{i}/w": np.full((10, 10), i, np.float32) for i in range(count)}


def flat(tree) -> dict[str, np.ndarray]:
    """The arrays of a tree by path, in native byte order and C order, which the package needs."""
    named = zip(ts.leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    arrays = {path: np.asarray(x) for path, x in named if hasattr(x, "dtype")}
    return {path: np.array(x, x.dtype.newbyteorder("="), order="C") for path, x in arrays.items()}


def package_bytes(tree, directory: Path, metadata=None) -> bytes:
    """The file that the package writes for a tree."""
    file = directory / "by-the-package"
    save_file(flat(tree), file, metadata)
    data = file.read_bytes()
    file.unlink()
    return data


def entry(dtype="U8", shape=(1,), offsets=(0, 1)) -> dict[str, object]:
    """The header's entry for a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    """Writes a file with the given header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)

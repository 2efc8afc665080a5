"""Trees for files of tensors, and what the format's own package makes of them."""

import json
import struct
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

import treeshard as ts


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bytes, as `dtype`."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    if dtype.kind == "b":
        raw = bytes(x % 2 for x in raw)
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


def blocks(count: int = 5) -> dict[str, np.ndarray]:
    """400 bytes each."""
    return {f"layers/{i}/w": np.full((10, 10), i, np.float32) for i in range(count)}


def flat(tree) -> dict[str, np.ndarray]:
    """The arrays of a tree by path, as the package can have them."""
    named = zip(ts.leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    arrays = {path: np.asarray(x) for path, x in named if hasattr(x, "dtype")}
    return {path: np.array(x, x.dtype.newbyteorder("="), order="C") for path, x in arrays.items()}


def package_bytes(tree, directory: Path, metadata=None) -> bytes:
    """What the package writes for a tree."""
    file = directory / "by-the-package"
    save_file(flat(tree), file, metadata)
    found = file.read_bytes()
    file.unlink()
    return found


def assert_same(found, expected) -> None:
    """Fails unless two trees are equal to the bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if hasattr(y, "dtype"):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        else:
            assert x is y


def entry(dtype="U8", shape=(1,), offsets=(0, 1)) -> dict[str, object]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    """Writes a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def files_in(directory: Path) -> list[str]:
    """The names of what is in a directory, sorted."""
    return sorted(x.name for x in directory.iterdir())

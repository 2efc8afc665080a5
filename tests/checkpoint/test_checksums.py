"""The checksum of an array equals zlib's CRC-32 of its bytes, for every sharding."""

import runpy
import sys
import tracemalloc
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeshard.checkpoint import _checksums
from treeshard.checkpoint._checksums import _of_runs, checksum, checksums


def zlibs(x: Any) -> int:
    return zlib.crc32(np.asarray(x).tobytes())


def some(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits, except for the unused bits of numbers smaller than a byte."""
    bits = np.random.default_rng(0).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize))
    if dtype in ("int2", "int4", "uint4", "float4_e2m1fn"):
        bits %= 4 if dtype == "int2" else 16
    return bits.astype(np.uint8).view(jnp.dtype(dtype))[..., 0]


# Runs about the length from which each takes a call of its own.
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, "int8"), (3, "complex64"), (31, "float32"), (33, "float32"), (65, "int8"), (200, "uint4")],
)
def test_checksums_do_not_depend_on_run_length_or_block_size(
    length, dtype, mesh, compiles, monkeypatch
) -> None:
    monkeypatch.setattr(_checksums, "BLOCK", 2 * _checksums.SHORT)
    hosts = [some(shape, dtype) for shape in [(2, 3, 6, 4 * length), (8, 2 * length), (0, 4)]]
    specs = [P(None, None, "data", "fsdp"), P("fsdp", "data"), P("fsdp")]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    placed = jax.block_until_ready(jax.device_put(hosts, shardings))
    compiles.clear()
    assert checksums(placed, "reading").crcs == list(map(zlibs, hosts))
    assert checksums([hosts[0].T], "reading").crcs == [checksum(hosts[0].T)] == [zlibs(hosts[0].T)]
    assert not compiles
    assert all(x._npy_value is None for x in placed), "there is a copy on the host"


def test_without_isal_zlib_is_used(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert runpy.run_path(_checksums.__file__)["crc32"] is zlib.crc32


@pytest.mark.parametrize("dtype", ["int4", "int2", "float4_e2m1fn"])
def test_unused_bits_do_not_count(dtype) -> None:
    clean = some((5, 7, 33), dtype)
    mask = 3 if dtype == "int2" else 15
    dirty = (clean.view(np.uint8) | np.uint8(255 - mask)).view(clean.dtype)
    assert checksum(dirty) == checksum(clean) == zlibs(clean) != zlibs(dirty)
    for runs in (5, 5 * 7):  # of a shard: long and short ones
        assert (_of_runs(dirty, runs) == _of_runs(clean, runs)).all()


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [
        ("float32", P("data", "fsdp")),  # short runs
        ("uint4", P("data")),  # masked
        ("float32", None),  # transposed, on the host
    ],
)
def test_copies_are_small(dtype, spec, mesh, monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # every reader copies a block
    monkeypatch.setattr(_checksums, "BLOCK", 2**16)
    host = some((2**16, 16), dtype)
    host = host.T if spec is None else host
    x = host if spec is None else jax.device_put(host, NamedSharding(mesh, spec))
    checksums([x], "reading")
    tracemalloc.start()
    try:
        checksums([x], "reading")
        assert tracemalloc.get_traced_memory()[1] < 12 * _checksums.BLOCK < host.nbytes
    finally:
        tracemalloc.stop()

"""Checksums of what several devices hold: of any dtype and layout, without a copy of the whole."""

import tracemalloc
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeshard._core.facts import Facts, differences
from treeshard._core.replicas import checksum, region_name, shared_parts

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "bool": bool,
    "complex64": np.complex64,
    "float32": np.float32,
    "fp8": ml_dtypes.float8_e4m3fn,
    "of another machine": np.dtype(">f4"),
    "uint8": np.uint8,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checksum_is_that_of_the_bytes_in_c_order(dtype: str) -> None:
    full = (np.arange(3 * 400_000) % 2).reshape(3, -1).astype(DTYPES[dtype])
    for x in (full, full.T, full[::-1, ::2], full[0, 0], full[:0]):
        native = x.astype(x.dtype.newbyteorder("=")) if dtype.startswith("of") else x
        assert checksum(x) == zlib.crc32(np.ascontiguousarray(native).tobytes())


def test_values_count_as_they_are_on_devices() -> None:
    assert checksum(np.float64(1 + 1e-12)) == checksum(np.float32(1))
    assert checksum(np.float64(1e300)) == checksum(np.float32("inf"))
    assert checksum(np.zeros(2, "f")) != checksum(-np.zeros(2, "f"))
    low, dirty = np.array([1, 2], ml_dtypes.int4), np.array([0xF1, 0xF2], np.uint8)
    assert checksum(low) == checksum(dirty.view(ml_dtypes.int4))
    key = jax.random.key(3)
    assert checksum(key) == checksum(np.asarray(jax.random.key_data(key)))


def test_no_array_is_copied_as_a_whole() -> None:
    x = np.ones((64, 2**16))
    tracemalloc.start()
    for view in (x, x.T, x[:, ::2]):
        checksum(view)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**22 < x.nbytes


def test_replicas_of_one_process(mesh) -> None:
    sharding = NamedSharding(mesh, P("data"))
    pieces = [jax.device_put(np.full((4, 3), d.id == 5, "f"), d) for d in mesh.devices.flat]
    x = jax.make_array_from_single_device_arrays((8, 3), sharding, pieces)
    parts = list(shared_parts(x, [0]))
    assert [part.name for part in parts] == ["[0:4]", "[4:8]"]
    assert [len(part.checksums()) for part in parts] == [1, 2]
    facts = Facts()
    facts.share("w", parts)
    assert "" in facts.hashes().values()
    found = differences({0: facts.select_groups(facts.hashes())})
    assert found.lines() == ["w[4:8] (values): 2 different checksums on process 0"]
    assert not list(shared_parts(jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp")))), [0]))


def test_regions_have_names() -> None:
    assert region_name(((0, 4), (0, 8), (2, 3), (0, 5)), (4, 8, 3, 5)) == "[:, :, 2:3]"
    assert region_name(((0, 4),), (4,)) == region_name((), ()) == ""

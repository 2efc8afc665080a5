"""Checksums of arrays whose shards are on several processes."""

import zlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multiprocess.worker import Context
from treeshard.checkpoint._checksums import checksums

DTYPES = ["float32", "bfloat16", "int4", "uint8", "bool", "complex64"]


def mesh_of(devices: list[jax.Device], *sizes: int) -> Mesh:
    axes = tuple("abc"[: len(sizes)])
    kinds = (AxisType.Auto,) * len(axes)
    return Mesh(np.array(devices).reshape(sizes), axes, axis_types=kinds)


def placed(host: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(host.shape, sharding, lambda i: np.array(host[i]))


def layouts(count: int) -> Iterator[tuple[np.ndarray, jax.Array]]:
    """Arrays and shardings, the same on every process: devices in any order, specs of all kinds."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        sizes = [(8,), (2, 4), (4, 2), (2, 2, 2)][rng.integers(4)]
        mesh = mesh_of(list(rng.permutation(np.array(jax.devices()))), *sizes)
        dims: list[list[str]] = [[] for _ in range(3)]
        for axis in rng.permutation(mesh.axis_names):
            if (dim := rng.integers(4)) < 3:
                dims[dim].append(str(axis))
        parts = [int(np.prod([mesh.shape[axis] for axis in names])) for names in dims]
        shape = tuple(int(part * rng.integers(1, 9)) for part in parts)
        dtype = DTYPES[rng.integers(len(DTYPES))]
        host = rng.integers(0, 2 if dtype == "bool" else 7, shape).astype(dtype)
        yield host, placed(host, mesh, P(*[tuple(names) or None for names in dims]))


def check_checksums_are_those_of_the_full_arrays_of_any_sharding(context: Context) -> None:
    hosts, arrays = zip(*layouts(200), strict=True)
    assert any(not x.is_fully_addressable for x in arrays)
    compiled: list[str] = []

    def listen(name: str, seconds: float, **_: object) -> None:
        compiled.extend([name] if "compile" in name else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = checksums(arrays, "reading", 20).crcs
    jax.monitoring.unregister_event_duration_listener(listen)
    assert found == [zlib.crc32(host.tobytes()) for host in hosts]
    assert not compiled


def check_keys_and_what_each_process_has_alone_count_as_their_data(context: Context) -> None:
    host = np.arange(10)
    single = jax.device_put(np.float32(3), jax.local_devices()[0])
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 16)))
    split = jax.random.wrap_key_data(placed(data, mesh_of(jax.devices(), 8), P("a")))
    want = [zlib.crc32(x.tobytes()) for x in (host, np.float32(3), data)]
    assert checksums([host, single, split], "reading", 20).crcs == want

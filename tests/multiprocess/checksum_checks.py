"""Checksums of arrays whose shards are on several processes."""

import zlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multiprocess.worker import Context, arriving_last
from treeshard import ProcessError
from treeshard.checkpoint import _checksums
from treeshard.checkpoint._checksums import checksums
from treeshard.checkpoint._table import pack, unpack

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


def check_checksums_do_not_depend_on_the_sharding(context: Context) -> None:
    hosts, arrays = zip(*layouts(200), strict=True)
    assert any(not x.is_fully_addressable for x in arrays)
    found = checksums(arrays, "reading", 20).crcs
    assert found == [zlib.crc32(host.tobytes()) for host in hosts]


def check_keys_count_as_their_data(context: Context) -> None:
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 16))
    mesh = mesh_of(jax.devices(), 8)
    split = jax.random.wrap_key_data(placed(np.asarray(keys), mesh, P("a")))
    assert checksums([split], "reading", 20).crcs == [zlib.crc32(np.asarray(keys).tobytes())]


def check_a_wrong_value_on_one_process_changes_the_checksum_on_all(context: Context) -> None:
    host = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    mine = host + (context.index == 1)
    bad = placed(mine, mesh_of(jax.devices(), 8), P("a"))
    (found,) = checksums([bad], "reading", 20).crcs
    there = host.copy()
    local = 8 // context.count
    there[local : 2 * local] += 1
    assert found == zlib.crc32(there.tobytes()) != zlib.crc32(host.tobytes())


def check_copies_of_each_process_count_once(context: Context) -> None:
    host = np.arange(10)
    single = jax.device_put(np.float32(3), jax.local_devices()[0])
    want = [zlib.crc32(host.tobytes()), zlib.crc32(np.float32(3).tobytes())]
    assert checksums([host, single], "reading", 20).crcs == want


def check_copies_and_replicas_that_differ_are_found(context: Context) -> None:
    """Within a process, between processes, in one of several regions, by one bit."""
    devices = np.array(jax.devices())
    by_process = mesh_of(list(devices), 2, 4)
    within = mesh_of(list(devices.reshape(2, 4).T.flat), 4, 2)
    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    mine = host + (context.index == 1) * np.float32(2**-18)
    arrays = [
        placed(host, by_process, P(None, "b")),
        placed(mine, by_process, P(None, "b")),
        placed(mine, by_process, P("a")),  # of two processes, none has a replica of the other's
        placed(mine, within, P("a")),
        placed(mine, mesh_of(list(devices), 8), P()),
        np.arange(3),
        np.full(3, context.index),
    ]
    joint = checksums(arrays, "save", 20, replicas=True)
    copies = _checksums.COPIES_DIFFER
    differing = (1, 3, 4) if context.count == 2 else (1, 2, 3, 4)
    assert joint.differing == dict.fromkeys(differing, _checksums.REPLICAS_DIFFER) | {6: copies}
    assert joint.crcs[4] == joint.crcs[0] == zlib.crc32(host.tobytes())
    assert joint.crcs[6] == zlib.crc32(np.zeros(3, int).tobytes())
    assert checksums(arrays, "restore", 20).differing == {6: copies}


def check_different_numbers_of_arrays_are_an_error(context: Context) -> None:
    with pytest.raises(ProcessError, match="save: the processes have different numbers of arrays"):
        checksums([np.zeros(3)] * (1 + (context.index == 1)), "save", 20)


def check_a_failure_to_read_is_an_error_on_all(context: Context) -> None:
    x = placed(np.arange(8.0, dtype=np.float32), mesh_of(jax.devices(), 8), P("a"))
    if context.index == 1:
        x.delete()
    kind = RuntimeError if context.index == 1 else ProcessError
    with pytest.raises(kind, match="Array has been deleted") as told:
        checksums([x], "save", 20)
    if context.index != 1:
        start = (
            "save: nothing was done, since process 1 raised RuntimeError: Array has been deleted"
        )
        assert str(told.value).startswith(start)


def check_an_absent_process_is_named(context: Context) -> None:
    with arriving_last(context, 1, "late at checksums"), pytest.raises(ProcessError) as told:
        checksums([np.zeros(3)], "save", 0.5)
    if context.index != 1:
        assert f"save: process 1 of {context.count} did not arrive within 0.5 s" in str(told.value)


def check_trees_are_packed_and_unpacked(context: Context) -> None:
    mesh = mesh_of(jax.devices(), 8)
    host = np.arange(16).reshape(8, 2)
    single = jax.device_put(np.float32(3), jax.local_devices()[0])
    tree = {
        "uint4": placed(host.astype("uint4"), mesh, P("a")),
        "whole": placed(host.astype("float4_e2m1fn"), mesh, P()),
        "keys": jax.random.wrap_key_data(placed(host.astype(np.uint32), mesh, P("a"))),
        "empty": placed(np.zeros((8, 0), np.float32), mesh, P("a")),
        "single": single,
        "host": host,
    }
    table, arrays = pack(tree)
    assert isinstance(arrays["single"], np.ndarray)  # not global
    stored = {key: x for key, x in arrays.items() if isinstance(x, jax.Array)}
    assert sorted(stored) == ["keys", "uint4", "whole"]
    assert {str(x.dtype) for x in stored.values()} == {"uint8", "uint32"}
    found = checksums(list(arrays.values()), "save", 20).crcs
    keys = host.astype(np.uint32)
    want = [host, keys, np.float32(3), *(host.astype(tree[x].dtype) for x in ("uint4", "whole"))]
    assert found == [zlib.crc32(x.tobytes()) for x in want]
    back = {row.path: unpack(row, arrays.get(row.path)) for row in table.leaves}
    assert back.keys() == tree.keys()
    for name in ("uint4", "whole", "keys"):
        assert back[name].sharding == tree[name].sharding
        assert (back[name].dtype, back[name].shape) == (tree[name].dtype, tree[name].shape)
    again = checksums([back["uint4"], back["whole"], back["keys"]], "read", 20).crcs
    assert again == [found[3], found[4], found[1]]


def check_nothing_is_compiled_or_sent(context: Context) -> None:
    seen: list[str] = []
    arrays = [x for _, x in layouts(5)]
    listener = lambda name, seconds, **_: seen.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    checksums(arrays, "reading", 20)
    jax.monitoring.unregister_event_duration_listener(listener)
    assert [name for name in seen if "compile" in name] == []

"""Four processes pass values that must be equal where several of them hold a part of an array.

Process 3 passes other values than process 2, with which it shares its rows.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.worker import Context, error_of
from treeshard.interchange import save_safetensors

LARGE = 2**17  # items: more than 64 KiB in any dtype


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    """An axis `tensor` that crosses processes: 0 and 1 have the first rows, 2 and 3 the others."""
    axes = ts.make_mesh("data=2,tensor=4")
    return Mesh(axes.devices, axes.axis_names, axis_types=(kind,) * 2)


def last_bit_flipped(x: np.ndarray) -> np.ndarray:
    raw = bytearray(x.tobytes())
    raw[-x.dtype.itemsize] ^= 1
    return np.frombuffer(bytes(raw), x.dtype).reshape(x.shape)


def rows(dtype: Any, size: int = LARGE) -> np.ndarray:
    return (np.arange(size) % 2).astype(dtype).reshape(4, -1)


PARTS: dict[str, np.ndarray] = {
    "bfloat16": rows(ml_dtypes.bfloat16),
    "bool": rows(bool),
    "complex64": rows(np.complex64),
    "float32": rows(np.float32),
    "fp8": rows(ml_dtypes.float8_e4m3fn),
    "int4": rows(ml_dtypes.int4),
    "int64": rows(np.int64),
    "nan": np.full((4, LARGE), np.nan, np.float32),
    "small": rows(np.float32, 8),
    "transposed": rows(np.float32).reshape(-1, 4).T,
}


def check_rows_that_some_processes_share(context: Context) -> None:
    other = context.index == 3
    here = {name: last_bit_flipped(x) if other else x for name, x in PARTS.items()}
    here["zero"] = np.full((4, LARGE), -0.0 if other else 0.0, np.float32)
    key_data = np.arange(8, dtype=np.uint32).reshape(4, 2) + other
    tree = {"nested": [here], "keys": jax.random.wrap_key_data(key_data)}
    tree["empty"] = np.zeros((4, 0), np.float32)
    for kind in (AxisType.Auto, AxisType.Explicit):
        told = error_of(lambda kind=kind: ts.from_process_local(tree, P("data"), mesh(kind)))
        head, *lines = told.splitlines()
        assert head.startswith("from_process_local: the call differs between"), told
        assert len(lines) == 11, told
        assert lines[0].startswith("  keys[4:8] (values): CRC-32 "), told
        assert "  ... and 2 more" in lines, told
        assert all(" on process 2; CRC-32 " in line for line in lines[:-1]), told
    # Rows that another process does not have may differ.
    tree = {"nested": [PARTS | {"own": rows(np.float32) + context.index // 2}]}
    joint = ts.from_process_local(tree, P("data"), mesh())["nested"][0]
    np.testing.assert_array_equal(ts.gather(joint["fp8"])[4:], PARTS["fp8"])
    # 64-bit numbers are compared as they are on devices.
    wide = np.full((4, LARGE), 1 + 1e-12 * other)
    ts.from_process_local({"wide": wide}, P("data"), mesh())


def check_parts_along_two_dims(context: Context) -> None:
    """Each process has two of four columns, and shares them with one that has other rows of it."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    here = Mesh(devices, ("copy", "rows", "columns"), axis_types=(AxisType.Auto,) * 3)
    whole = np.arange(2 * LARGE, dtype=np.float32).reshape(4, -1)
    part = whole[2:] if context.index % 2 else whole[:2]
    found = ts.gather(ts.from_process_local(part, P("rows", "columns"), here))
    np.testing.assert_array_equal(found, whole)
    part = np.asfortranarray(part)
    if context.index == 3:
        part[0, LARGE // 4] += 1  # in the second half of its columns
    told = error_of(lambda: ts.from_process_local([part], P("rows", "columns"), here))
    line = f"  0[2:4, {LARGE // 4}:{LARGE // 2}] (values): CRC-32 "
    assert told.splitlines()[1].startswith(line), told
    assert " on process 1; CRC-32 " in told, told


def check_batches_of_a_step(context: Context) -> None:
    """Each process passes them in full, as numpy arrays or on its own device."""
    other = context.index == 3
    batch = {"x": rows(np.float32), "key": jax.random.key(1)}
    mine = last_bit_flipped(batch["x"]) if other else batch["x"]
    plan = ts.plan({"w": np.zeros(4, "f")}, [("w", P())], mesh(), min_size=0)
    state = ts.shard({"w": np.zeros(4, "f")}, plan)

    def one_step(s: Any, b: Any) -> Any:
        return s, s["w"].sum()

    specs = {"x": P("data"), "key": P()}
    for make in (ts.jit_step, ts.shard_map_step):
        step = make(one_step, plan, batch=specs, donate=False)
        for convert in (np.asarray, jnp.asarray, np.asfortranarray):
            x = convert(mine)
            told = error_of(lambda step=step, x=x: step(state, {**batch, "x": x}))
            assert "\n  batch/x (values): CRC-32 " in told, told
            assert " on processes 0 to 2; CRC-32 " in told, told
        step(state, batch)
        # JAX's own function, which compares nothing.
        rows_here = NamedSharding(mesh(), P("data"))
        made = jax.make_array_from_callback(mine.shape, rows_here, mine.__getitem__)
        told = error_of(lambda step=step, made=made: step(state, {**batch, "x": made}))
        assert "\n  batch/x[2:4] (values): CRC-32 " in told, told
        # Numbers and text are values, too.
        for value in (0.5 + other, "other" if other else "text"):
            told = error_of(lambda step=step, value=value: step(state, {**batch, "x": value}))
            assert re.search(r"\n  batch/x: (0.5|'text') on processes 0 to 2; ", told), told
        # Another structure has a first batch, too.
        step = make(one_step, plan, batch={**specs, "y": P("data")}, donate=False)
        more = {**batch, "y": rows(np.int32) + other}
        told = error_of(lambda step=step, more=more: step(state, more))
        assert "\n  batch/y (values): CRC-32 " in told, told


def check_shards_that_are_read(context: Context) -> None:
    def read(size: int) -> Callable[..., np.ndarray]:
        part = np.zeros((2, size), np.float32)
        part[-1, -1] = context.index == 3
        return lambda path, index: part

    for size, check in ((4, "small"), (LARGE, "values")):
        struct = {"w": jax.ShapeDtypeStruct((4, size), "float32")}
        told = error_of(
            lambda size=size, check=check, struct=struct: ts.shard(
                struct, P("data"), mesh(), read=read(size), check=check
            )
        )
        assert "\n  w[2:4] (values): CRC-32 " in told, told
        ts.shard(struct, P("data"), mesh(), read=read(size), check="form")


def check_large_inputs_of_an_initialiser(context: Context) -> None:
    given = rows(np.float32) + (context.index == 3)

    def init(weights: Any) -> Any:
        return {"w": weights}

    told = error_of(lambda: ts.init_sharded(init, given, rules=[(".*", P("data"))], mesh=mesh()))
    assert "\n  argument 0 (values): CRC-32 " in told, told


def check_small_replicas_of_another_program(context: Context) -> None:
    """What JAX made has no origin; the first to read it notices what differs."""

    def placed(value: Callable[[jax.Device], float], *spec: str) -> jax.Array:
        sharding = NamedSharding(mesh(), P(*spec))
        shape = sharding.shard_shape((4,))
        pieces = [jax.device_put(np.full(shape, value(d), "f"), d) for d in jax.local_devices()]
        return jax.make_array_from_single_device_arrays((4,), sharding, pieces)

    trees = {
        "w (values): CRC-32 ": placed(lambda device: device.process_index == 3),
        "w[2:4] (values): CRC-32 ": placed(lambda device: device.process_index == 3, "data"),
        "w[0:2] and 1 more part (values): 2 different checksums on processes 0, 1": placed(
            lambda device: device.id % 2, "data"
        ),
    }
    path = context.directory / "no.safetensors"
    reads: list[Callable[[Any], Any]] = [
        lambda tree: ts.gather(tree, timeout=20),
        lambda tree: list(ts.iter_gather(tree, timeout=20)),
        lambda tree: ts.reshard(tree, P(), mesh(), timeout=20),
        lambda tree: save_safetensors(path, tree, timeout=20),
    ]
    for line, w in trees.items():
        for read in reads:
            text = error_of(lambda read=read, w=w: read({"w": w}))
            assert f"\n  {line}" in text, (line, text)
    assert not path.exists()
    rows_of_each = placed(lambda device: device.process_index // 2, "data")
    equal = {"w": placed(lambda _: np.nan), "split": rows_of_each}
    assert np.isnan(ts.gather(equal)["w"]).all()

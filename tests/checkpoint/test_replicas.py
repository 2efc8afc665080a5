"""Replicas that differ are told when they are saved, and what was saved can be restored."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import Checkpoints, restore, save

HOST = np.arange(64, dtype=np.float32).reshape(8, 8)


def placed(spec: P, value: Callable[[int], np.ndarray], mesh: jax.sharding.Mesh) -> jax.Array:
    """An array with `value(i)` on device `i`."""
    sharding = NamedSharding(mesh, spec)
    shape = value(0).shape
    indices = sharding.devices_indices_map(shape)
    pieces = [jax.device_put(value(d.id)[indices[d]], d) for d in mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def bit_of(x: np.ndarray, device: int, changed: int = 5) -> np.ndarray:
    """A copy of `x`, with one bit flipped on one device."""
    raw = bytearray(np.ascontiguousarray(x).tobytes())
    raw[-1] ^= device == changed
    return np.frombuffer(bytes(raw), x.dtype).reshape(x.shape)


KEYS = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 4)))
INT4 = HOST.astype(ml_dtypes.int4)
ZEROS = np.zeros(3, np.float32)
# What is on each device, and the spec.
WAYS: dict[str, tuple[P, Callable[[int], np.ndarray]]] = {
    "one bit of one replica": (P(), lambda i: bit_of(HOST, i)),
    "replicas that swap rows": (P(), lambda i: HOST[::-1] if i % 2 else HOST),
    "int4, sharded over one axis": (P("data"), lambda i: bit_of(INT4, i, 7)),
    "keys": (P(), lambda i: bit_of(KEYS, i)),
    "the sign of zero": (P(), lambda i: -ZEROS if i else ZEROS),
}


@pytest.mark.parametrize("way", WAYS)
def test_replicas_that_differ_are_told_and_the_first_is_saved(way, mesh, tmp_path: Path) -> None:
    spec, value = WAYS[way]
    x = placed(spec, value, mesh)
    x = jax.random.wrap_key_data(x) if way == "keys" else x
    tree = {"layers": [jnp.ones(3), x], "equal": jax.device_put(HOST, NamedSharding(mesh, P()))}
    with pytest.raises(ts.CheckpointError) as told:
        save(tmp_path / "x", tree)
    assert str(told.value).splitlines()[0] == (
        "save: layers/1: its replicas on different devices are not equal."
    )
    assert "on_divergence='warn'" in str(told.value)
    assert not list(tmp_path.iterdir())
    with pytest.warns(ts.ShardingWarning, match="layers/1: its replicas on different devices"):
        save(tmp_path / "x", tree, on_divergence="warn")
    assert bits(restore(tmp_path / "x")["layers"]["1"]) == value(0).tobytes()


def test_a_run_goes_on_after_the_error(mesh, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as run:
        run.save(1, {"w": jnp.asarray(HOST)})
        with pytest.raises(ts.CheckpointError, match="save: w: its replicas"):
            run.save(2, {"w": placed(P(), lambda i: HOST + i, mesh)})
        run.save(3, {"w": jnp.asarray(HOST)})
        run.wait()
        assert run.steps() == (1, 3)
    with (
        Checkpoints(tmp_path / "run", on_divergence="warn") as run,
        pytest.warns(ts.ShardingWarning, match="w: its replicas"),
    ):
        run.save(4, {"w": placed(P(), lambda i: HOST + i, mesh)})


def test_an_unknown_choice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"on_divergence='ignore'\): it is 'error' or 'warn'"):
        save(tmp_path / "x", {}, on_divergence="ignore")

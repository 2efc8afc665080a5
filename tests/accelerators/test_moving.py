"""Trees to an accelerator and back, of every kind of leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import arange, assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts

SPECS = {"w": P("fsdp"), "bf16": P(None, "fsdp"), "e4m3": P("fsdp"), "e5m2": P(), "keys": P()}


@pytest.fixture
def tree() -> dict[str, Any]:
    """float32, bfloat16, two kinds of float8 and typed keys, in the memory of the host."""
    return {
        "w": arange(64, 32),
        "bf16": arange(64, 32, dtype=jnp.bfloat16),
        "e4m3": arange(64, 4, dtype=jnp.float8_e4m3fn),
        "e5m2": arange(64, 4, dtype=jnp.float8_e5m2),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), jax.devices("cpu")[0]),
    }


def test_shard_and_gather(tree: Any, mesh: Mesh) -> None:
    placed = ts.shard(tree, SPECS, mesh)
    for name, x in placed.items():
        assert x.sharding.device_set == {*jax.devices()}, name
    assert_same(ts.gather(placed), tree)
    assert_same(dict(ts.iter_gather(placed)), tree)


def test_functions_for_each_leaf(tree: Any, mesh: Mesh) -> None:
    shard_fns, gather_fns = ts.make_shard_and_gather_fns(SPECS, mesh)
    placed = jax.tree.map(lambda f, x: f(x), shard_fns, tree)
    assert_same(placed, ts.shard(tree, SPECS, mesh))
    assert_same(jax.tree.map(lambda f, x: f(x), gather_fns, placed), tree)


def test_reshard_to_other_specs_and_to_a_cpu_and_back(
    tree: Any, mesh: Mesh, cpu_mesh: Mesh
) -> None:
    placed = ts.shard(tree, SPECS, mesh)
    replicated = ts.reshard(placed, P(), mesh)
    assert all(x.is_fully_replicated for x in replicated.values())
    on_cpu = ts.reshard(replicated, P(), cpu_mesh)
    assert all(x.sharding.device_set == {*cpu_mesh.devices.flat} for x in on_cpu.values())
    back = ts.reshard(on_cpu, SPECS, mesh)
    for moved in (replicated, on_cpu, back):
        assert_same(ts.gather(moved), tree)
    assert {k: x.sharding for k, x in back.items()} == {k: x.sharding for k, x in placed.items()}

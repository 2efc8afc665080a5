"""Trees have value semantics: one object at two paths is saved and restored as two equal arrays.

A leaf that a library stores once, for several uses, is one array in a checkpoint.
"""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import inspect, restore, save, verify

W = np.arange(64, dtype=np.float32).reshape(16, 4)


def two_handles(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Two `jax.Array`s on the same memory."""
    x = ts.shard(W, P("fsdp"), mesh)
    shards = [shard.data for shard in x.addressable_shards]
    y = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
    return {"embed": x, "head": y}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda mesh: dict.fromkeys(("embed", "head"), W), id="numpy"),
        pytest.param(
            lambda mesh: dict.fromkeys(("embed", "head"), ts.shard(W, P("fsdp"), mesh)),
            id="sharded",
        ),
        pytest.param(two_handles, id="two handles"),
    ],
)
def test_one_array_at_two_paths_is_two_in_a_checkpoint(make: Any, mesh, tmp_path: Path) -> None:
    tree = make(mesh)
    save(tmp_path / "x", tree)
    contents = inspect(tmp_path / "x")
    assert [(leaf.path, leaf.bytes) for leaf in contents.leaves] == [("embed", 256), ("head", 256)]
    assert contents.bytes == 2 * W.nbytes
    verify(tmp_path / "x")
    for like in (tree, None):
        again = restore(tmp_path / "x", like)
        assert again["embed"] is not again["head"]
        for leaf in again.values():
            np.testing.assert_array_equal(leaf, W)
    again = restore(tmp_path / "x", {name: ts.shard(W, P("fsdp"), mesh) for name in tree})
    jax.jit(lambda x: -x, donate_argnums=0)(again["embed"])
    np.testing.assert_array_equal(again["head"], W)


def test_two_arrays_that_differ_are_restored_beside_one_object(mesh, tmp_path: Path) -> None:
    save(tmp_path / "x", {"embed": W, "head": W + 1})
    like = dict.fromkeys(("embed", "head"), ts.shard(W, P("fsdp"), mesh))
    again = restore(tmp_path / "x", like)
    np.testing.assert_array_equal(again["embed"], W)
    np.testing.assert_array_equal(again["head"], W + 1)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        self.embed = eqx.nn.Embedding(16, 4, key=key)
        self.head = eqx.nn.Linear(4, 16, use_bias=False, key=key)


def equinox_shared(seed: int) -> Any:
    model = Model(jax.random.key(seed))
    return eqx.nn.Shared(model, lambda m: m.head.weight, lambda m: m.embed.weight)


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.head = self.embed


def nnx_state(seed: int) -> Any:
    return nnx.state(Tied(nnx.Rngs(seed)))


@pytest.mark.parametrize("make", [equinox_shared, nnx_state], ids=["equinox.nn.Shared", "nnx"])
def test_a_shared_leaf_is_one_array_in_a_checkpoint(make: Any, mesh, tmp_path: Path) -> None:
    plan = ts.plan(make(0), [(".*", P("fsdp"))], mesh, min_size=0)
    state = ts.shard(make(0), plan)
    save(tmp_path / "x", state)
    arrays = [leaf for leaf in inspect(tmp_path / "x").leaves if leaf.kind == "array"]
    assert [leaf.shape for leaf in arrays] == [(16, 4)]
    for like in (plan, ts.shard(make(1), plan)):
        again = restore(tmp_path / "x", like)
        assert_same(eqx.filter(again, eqx.is_array), eqx.filter(state, eqx.is_array))
    if make is equinox_shared:
        model = again()
        assert model.head.weight is model.embed.weight

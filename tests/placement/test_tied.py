"""Trees have value semantics: a tied weight is one leaf; one object at two paths is two arrays."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.training import jit_step

pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")
VOCAB, WIDTH = 32, 8
TOKENS = np.arange(64, dtype="int32").reshape(8, 8) % VOCAB
RULES = [(".*", ts.fsdp("fsdp", min_size=64))]


@pytest.fixture
def mesh() -> Mesh:
    return ts.make_mesh("fsdp=8")


def arrays_of(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)]


# ------------------------------------------------------------------ tied heads


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    mlp: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.mlp = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=keys[2])


def shared_decoder() -> Any:
    model = Decoder(jax.random.key(0))
    return eqx.nn.Shared(model, lambda m: m.head.weight, lambda m: m.embed.weight)


def logits_of_decoder(shared: Any, tokens: Any) -> jax.Array:
    model = shared()
    hidden = jax.vmap(jax.vmap(lambda token: model.mlp(model.embed(token))))(tokens)
    return hidden @ model.head.weight.T


def step(state: Any, tokens: Any) -> Any:
    def loss_of(state: Any) -> jax.Array:
        logits = logits_of_decoder(state, tokens)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    loss, grads = eqx.filter_value_and_grad(loss_of)(state)
    return eqx.apply_updates(state, jax.tree.map(lambda g: -0.1 * g, grads)), loss


def test_a_tied_head_stays_one_array(mesh: Mesh, tmp_path: Any) -> None:
    source = shared_decoder()
    expected = ts.gather(source)  # a step may donate memory that it shares with its source
    plan = ts.plan(source, RULES, mesh)
    assert len(plan.leaves) == 3
    state = ts.shard(source, plan)
    assert_same(ts.gather(state), expected)
    arrays = arrays_of(state)
    assert plan.bytes_per_device() == sum(x.addressable_shards[0].data.nbytes for x in arrays)
    sharded_step, one_device = jit_step(step, plan, batch=P("fsdp")), eqx.filter_jit(step)
    for _ in range(2):
        state, loss = sharded_step(state, TOKENS)
        expected, expected_loss = one_device(expected, TOKENS)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    save(tmp_path / "x", state)
    restored = restore(tmp_path / "x", plan)
    moved = ts.reshard(restored, plan.on(ts.make_mesh("data=2,fsdp=4")))
    gathered = ts.gather(moved)
    assert jax.tree.structure(gathered) == jax.tree.structure(expected)
    assert_close(arrays_of(gathered), arrays_of(expected))


# ------------------------------------------------------------------ one object at two paths


def w() -> np.ndarray:
    return np.arange(VOCAB * WIDTH, dtype="float32").reshape(VOCAB, WIDTH)


def twice(x: Any) -> Any:
    return {"embed": {"w": x}, "head": {"w": x}, "name": "mlp"}


TREES: dict[str, Callable[[], Any]] = {
    "dict": lambda: twice(w()),
    "on a device": lambda: twice(jnp.asarray(w())),
    "keys": lambda: twice(jax.random.split(jax.random.key(0), 8)),
}


@pytest.mark.parametrize("name", TREES)
def test_one_object_at_two_paths_becomes_equal_arrays(name: str, mesh: Mesh) -> None:
    source = TREES[name]()
    placed = ts.shard(source, P("fsdp"), mesh)
    arrays = arrays_of(placed)
    assert len({id(x) for x in arrays}) == len(arrays)
    assert_same(ts.gather(placed), ts.gather(source))
    moved = ts.reshard(placed, P(("fsdp", "data")), ts.make_mesh("data=2,fsdp=4"))
    gathered = ts.gather(source)
    assert_same(ts.gather(moved), gathered)
    on_host = [x for x in arrays_of(gathered) if isinstance(x, np.ndarray)]
    for i, x in enumerate(on_host):
        assert not any(np.shares_memory(x, y) for y in on_host[:i])


def test_each_path_has_its_own_spec(mesh: Mesh) -> None:
    x = w()
    passed = ts.shard(twice(x), None, mesh)
    assert passed["embed"]["w"] is passed["head"]["w"] is x
    placed = ts.shard({"a": x, "b": x}, {"a": P(), "b": P("fsdp")}, mesh)
    assert [str(y.sharding.spec) for y in placed.values()] == ["P()", "P('fsdp',)"]
    again = ts.reshard(dict.fromkeys("ab", placed["a"]), {"a": None, "b": P("fsdp")}, mesh)
    assert again["a"] is placed["a"]
    assert_same(ts.gather(again), {"a": x, "b": x})
    assert_same(dict(ts.iter_gather(again)), {"a": x, "b": x})

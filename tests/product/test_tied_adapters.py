"""An adapter of a head that is tied to the embedding is trained as on one device."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same
from jax.sharding import PartitionSpec as P

import treeshard as ts

VOCAB, WIDTH = 96, 32
OPTIMIZER = optax.adamw(1e-2)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, 6)).astype("int32")


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        one, two, three = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=one)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 64, 1, jax.nn.gelu, key=two)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=three)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        x = x + jax.vmap(self.mlp)(x)
        return jax.vmap(self.head)(x)


def init(key: jax.Array) -> Any:
    model = Decoder(key)
    tied = eqx.nn.Shared(model, lambda m: m.head.weight, lambda m: m.embed.weight)
    lora = {"a": jax.random.normal(key, (4, WIDTH)), "b": jnp.zeros((VOCAB, 4))}
    return {"model": tied, "lora": lora, "opt": OPTIMIZER.init(lora)}


def step_of(plan: ts.Plan | None) -> Any:
    """A step that trains the adapter of the head."""

    def loss_fn(lora: Any, model: Any, tokens: jax.Array) -> jax.Array:
        if plan is not None:
            model, lora = ts.unshard(model), ts.unshard(lora)
        model = model()
        head = model.head.weight + lora["b"] @ lora["a"]
        logits = jax.vmap(eqx.tree_at(lambda m: m.head.weight, model, head))(tokens)
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return each.mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        lora = state["lora"]
        loss, grads = jax.value_and_grad(loss_fn)(lora, state["model"], tokens)
        updates, opt = OPTIMIZER.update(grads, state["opt"], lora)
        return {**state, "lora": optax.apply_updates(lora, updates), "opt": opt}, loss

    return step


@pytest.mark.usefixtures("quick_compiles", "standard_promotion")
def test_adapters_of_a_tied_head_train_as_on_one_device() -> None:
    weight = "model/pytree/embed/weight"
    rules = [
        ("/a$", None),
        ("/b$", P("fsdp")),
        ("embed", P("fsdp")),
        (".*", ts.fsdp("fsdp", min_size=64)),
    ]
    mesh = ts.make_mesh("fsdp=4", devices=jax.devices()[:4])
    state, plan = ts.init_sharded(init, jax.random.key(0), rules=rules, mesh=mesh, min_size=64)
    given = {leaf.path: leaf.given for leaf in plan.leaves}
    assert given["lora/b"] == given["opt/0/mu/b"] == given[weight] == P("fsdp")
    assert "model/pytree/head/weight" not in given

    expected = ts.gather(state)
    step, one_device = ts.jit_step(step_of(plan), plan), eqx.filter_jit(step_of(None))
    for _ in range(2):
        state, loss = step(state, TOKENS)
        expected, wanted = one_device(expected, TOKENS)
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    assert_close(ts.gather(state)["lora"], expected["lora"], 1e-4)

    others = plan.on(ts.make_mesh("fsdp=4", devices=jax.devices()[4:]))  # of a sampler
    moved = ts.reshard(state, others)
    assert not ts.diff_shardings(moved, others)
    assert_same(ts.gather(moved), ts.gather(state))

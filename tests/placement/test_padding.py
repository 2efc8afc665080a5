"""Padded plans: trees with padding and without, and what stays true of both."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import OFFLOADS, assert_close, assert_same, struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._planning.plan import Plan
from treeshard.checkpoint import restore, save
from treeshard.interchange import load_safetensors, save_safetensors, tensor_shapes
from treeshard.training import jit_step

pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")
VOCAB, WIDTH = 1257, 12
OPTIMIZER = optax.adamw(1e-2)
RULES = [("embed|head", P("tensor")), ("up", ts.shard_dim("tensor", 0)), (".*", None)]
TOKENS = np.arange(48, dtype="int32").reshape(4, 12) * 25


def init(key: jax.Array) -> Any:
    one, two = jax.random.split(key)
    params = {
        "embed": jax.random.normal(one, (VOCAB, WIDTH)),
        "head": jax.random.normal(two, (VOCAB, WIDTH)),
        "up": jnp.ones((WIDTH - 1, 5)),
    }
    return {"params": params, "opt": OPTIMIZER.init(params)}


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens] + jnp.sum(params["up"])
    logits = x @ params["head"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def on_mesh(count: int) -> Any:
    return ts.make_mesh({"tensor": count}, devices=jax.devices()[:count])


@cache
def initialised() -> tuple[Any, Plan]:
    key = jax.random.key(0)
    return ts.init_sharded(init, key, rules=RULES, mesh=on_mesh(8), min_size=8, pad=True)


def test_steps_are_those_of_one_device_and_the_padding_stays_zero() -> None:
    state, plan = initialised()
    assert state["params"]["embed"].shape == (1264, WIDTH)

    def step(state: Any, batch: Any, pad: bool = True) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return loss_fn(ts.unpad_leaves(params, plan) if pad else params, batch)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    expected = jax.jit(init)(jax.random.key(0))
    assert_same(ts.gather(ts.unpad_leaves(state, plan)), jax.device_get(expected))
    one_device = jax.jit(lambda state: step(state, TOKENS, pad=False))
    compiled = jit_step(step, plan, batch=P(), donate=False)
    for _ in range(2):
        state, loss = compiled(state, TOKENS)
        expected, wanted = one_device(expected)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    gathered = ts.gather(state)
    assert_close(ts.unpad_leaves(gathered, plan), jax.device_get(expected), 1e-4)
    assert_same(ts.pad_leaves(ts.unpad_leaves(gathered, plan), plan), gathered)
    # The vocabulary is not gathered to cut off the padding.
    program = compiled.lower(plan.structs, struct(4, 12, dtype="int32")).compile()
    assert max(each.bytes or 0 for each in ts.collectives(program)) < VOCAB * WIDTH * 4 / 2


def test_files_hold_true_shapes_and_restore_on_any_number_of_devices(tmp_path) -> None:
    state, plan = initialised()
    true = ts.unpad_leaves(state, plan)
    assert true["params"]["embed"].sharding.spec == P()  # 12 is not divisible by 8
    assert_same(ts.unpad_leaves(ts.gather(state), plan), ts.gather(true), kinds=True)
    save(tmp_path / "checkpoint", true)
    save_safetensors(tmp_path / "params.safetensors", true["params"])
    assert tensor_shapes(tmp_path / "params.safetensors")["head"].shape == (VOCAB, WIDTH)
    for count in (1, 3):
        other = plan.on(on_mesh(count))
        back = ts.pad_leaves(restore(tmp_path / "checkpoint", other.unpadded()), other)
        assert [x.shape for x in jax.tree.leaves(back)] == [x.shape for x in other.leaves]
        assert [x.sharding for x in jax.tree.leaves(back)] == other.sharding_of_each()
        assert_same(ts.gather(ts.unpad_leaves(back, other)), ts.gather(true))
        params = load_safetensors(tmp_path / "params.safetensors")
        assert_same(ts.gather(back)["params"], ts.pad_leaves(params, other))


def test_a_padded_plan_survives_json_other_meshes_and_following() -> None:
    state, plan = initialised()
    true = jax.eval_shape(init, jax.random.key(0))
    for like in (true, plan.structs):
        assert Plan.from_json(plan.to_json(), like=like) == plan
    with pytest.raises(ts.FormatError, match="Plan again"):
        Plan.from_json(plan.to_json(), like=true).on("tensor=8")
    assert plan.on("tensor=8") == plan
    assert plan.on("tensor=5") == ts.plan(true, RULES, "tensor=5", min_size=8).padded()
    assert plan.on("tensor=1") == ts.plan(true, RULES, "tensor=1", min_size=8)
    assert plan.padded() is plan
    assert plan != plan.unpadded()
    params = ts.plan(true["params"], RULES, on_mesh(8), min_size=8).padded()
    copies = params.follow(state["opt"])
    assert ts.unpad_leaves(state["opt"], copies)[0].mu["embed"].shape == (VOCAB, WIDTH)
    assert copies.on("tensor=5").specs == plan.on("tensor=5").specs["opt"]
    assert [x.unpadded for x in copies.on("tensor=5").leaves] == [
        x.unpadded for x in plan.on("tensor=5").leaves if x.path.startswith("opt")
    ]
    assert plan.diff(plan.unpadded())
    assert "padded from (1257, 12)" in str(plan)
    text = plan.to_json().replace('"unpadded": [1257, 12]', '"unpadded": [1257, 13]', 1)
    with pytest.raises(ts.FormatError, match="'unpadded' is not a shape within 'shape'"):
        Plan.from_json(text)


@OFFLOADS
def test_padded_leaves_stay_in_their_memory() -> None:
    def make() -> Any:
        return {"embed": jnp.ones((10, 3)), "tail": jnp.ones((10, 7))}

    rules = [("tail", ts.fsdp("fsdp", memory="pinned_host")), ("embed", P("fsdp"))]
    state, plan = ts.init_sharded(make, rules=rules, mesh="fsdp=8", min_size=0, pad=True)
    assert [leaf.shape for leaf in plan.leaves] == [(16, 3), (10, 8)]
    assert state["tail"].sharding.memory_kind == "pinned_host"
    true = ts.unpad_leaves(state, plan)
    assert true["tail"].shape == (10, 7)
    assert true["tail"].sharding.memory_kind == "pinned_host"
    assert_same(ts.gather(ts.pad_leaves(true, plan)), ts.gather(state))


def test_two_leaves_of_one_path_stay_two() -> None:
    tree = {"a/b": np.arange(10, dtype="int32"), "a": {"b": np.arange(10, 20, dtype="int32")}}
    plan = ts.plan(tree, [(".*", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0).padded()
    padded = ts.pad_leaves(jax.tree.map(jnp.asarray, tree), plan)
    assert_same(ts.unpad_leaves(padded, plan), tree)
    np.testing.assert_array_equal(padded["a"]["b"][:10], tree["a"]["b"])


def test_shapes_are_converted_too_and_plans_without_padding_change_nothing() -> None:
    plan = ts.plan({"w": struct(10, 4), "f": jax.nn.relu}, [("w", P("fsdp"))], "fsdp=8", min_size=0)
    padded = plan.padded()
    assert ts.pad_leaves(plan.unpadded().structs, padded)["w"] == padded.structs["w"]
    assert ts.unpad_leaves(padded.structs, padded)["w"] == padded.unpadded().structs["w"]
    tree = {"anything": struct(10, 4)}
    assert ts.pad_leaves(tree, plan) is tree


def test_a_tree_that_is_not_the_plans_is_an_error() -> None:
    rules = [(".*", P("fsdp"))]
    tree = {"a": struct(10, 4), "b": struct(6, 4)}
    plan = ts.plan(tree, rules, "fsdp=8", min_size=0).padded()
    with pytest.raises(ts.SpecError) as error:
        ts.unpad_leaves(tree, plan)
    assert str(error.value) == (
        "unpad_leaves: the plan has no subtree of this structure with leaves of shape (10, 4),"
        " (6, 4). It converts:\n  a: (16, 4) to (10, 4).\n  b: (8, 4) to (6, 4)."
    )
    tree = {"a": struct(10, 4), "b": struct(12, 4)}
    twice = ts.plan(tree, rules, "fsdp=8", min_size=0).padded()
    why = (
        "more than one subtree of this structure with leaves of shape (16, 4), and they are padded"
    )
    with pytest.raises(ts.SpecError, match=re.escape(why)):
        ts.unpad_leaves(struct(16, 4), twice)

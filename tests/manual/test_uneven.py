"""FSDP by hand with dims that the devices do not divide: the padding changes no value."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import QUICK, assert_close, on
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual

pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# No dim is divisible by 3 or 8, and that of `v` is smaller than most meshes.
PARAMS = {
    "w": normal(0, 11, 13),
    "deep": normal(1, 2, 13, 17) / 4,
    "b": normal(2, 17),
    "v": normal(3, 2),
}
KEYS = sorted(PARAMS)


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.einsum("nh,khv,k->nv", jnp.tanh(x @ params["w"]), params["deep"], params["v"])
    return jnp.mean(jnp.square(hidden + params["b"][None]).sum(-1))


def without_padding(tree: Any) -> Any:
    """The true values in boxes; asserts that the rest is zero."""

    def cut(box: manual.Partitioned) -> Any:
        assert box.unpadded is not None
        assert box.value.size > np.prod(box.unpadded)
        true = np.asarray(box.value)[tuple(map(slice, box.unpadded))]
        assert np.count_nonzero(box.value) == np.count_nonzero(true)
        return true

    return {key: cut(tree[key]) for key in KEYS}


def one_device(x: jax.Array) -> tuple[Any, Any, Any, Any]:
    """The loss and its gradient, and parameters and moments after two steps of AdamW."""
    value, grads = jax.value_and_grad(loss)(PARAMS, x)
    params: Any = PARAMS
    state: Any = OPTIMIZER.init(PARAMS)
    for _ in range(2):
        updates, state = OPTIMIZER.update(jax.grad(loss)(params, x), state, params)
        params = optax.apply_updates(params, updates)
    return value, grads, params, state[0].nu


OPTIMIZER = optax.adamw(1e-2)


@pytest.mark.parametrize(("count", "check_vma"), [(3, True), (8, False)])
def test_raw_gradients_and_two_steps_are_those_of_one_device(count: int, check_vma: bool) -> None:
    mesh = ts.make_mesh({"fsdp": count}, devices=jax.devices()[:count])
    x = normal(4, 2 * count, 11)

    def init() -> Any:
        return manual.shard_params(PARAMS, "fsdp", min_size=1, pad=True)

    def train(params: Any, x: jax.Array) -> Any:
        step = manual.value_and_grad(loss, "fsdp")
        value, grads = step(params, x)
        state: Any = OPTIMIZER.init(params)
        new: Any = params
        for _ in range(2):
            updates, state = OPTIMIZER.update(step(new, x)[1], state, new)
            new = optax.apply_updates(new, updates)
        return value, grads, new, state[0].nu

    inside = jax.shard_map(init, mesh=mesh, in_specs=(), out_specs=P("fsdp"), check_vma=check_vma)
    specs = manual.partition_specs(jax.eval_shape(inside))
    params = on(mesh, init, (), specs, check_vma)()
    for box in params.values():
        least = min(-(-n // count) * np.prod(box.unpadded) // n for n in box.unpadded)
        assert box.value.addressable_shards[0].data.size == least
    out_specs = (P(), specs, specs, specs)
    value, grads, new, nu = on(mesh, train, (specs, P("fsdp")), out_specs, check_vma)(params, x)
    want_loss, want_grads, want_params, want_nu = jax.jit(one_device, compiler_options=QUICK)(x)
    np.testing.assert_allclose(value, want_loss, rtol=1e-5)
    assert_close(without_padding(grads), want_grads)
    assert_close(without_padding(new), want_params)
    assert_close(without_padding(nu), want_nu)


def test_a_padded_plan_says_what_is_padded() -> None:
    mesh = ts.make_mesh("data=2,fsdp=3", devices=jax.devices()[:6])
    rules = [("w", P("data", "fsdp")), ("deep", P(None, ("data", "fsdp"))), (".*", ts.fsdp("fsdp"))]
    plan = ts.plan(PARAMS, rules, mesh, min_size=0).padded()
    assert [leaf.unpadded for leaf in plan.leaves] == [PARAMS[key].shape for key in KEYS]
    x = normal(4, 12, 11)

    axes = ("data", "fsdp")

    def run(full: Any, x: jax.Array) -> Any:
        shards = manual.shard_params(full, axes, plan)
        return shards, manual.value_and_grad(loss, axes, plan)(shards, x)[1]

    shards, grads = on(mesh, run, (P(), P(axes)), (plan.specs, plan.specs))(PARAMS, x)
    assert {key: grads[key].shape for key in KEYS} == {x.path: x.shape for x in plan.leaves}
    assert_close(ts.unpad_leaves(grads, plan), jax.jit(jax.grad(loss))(PARAMS, x))
    padded = ts.pad_leaves(PARAMS, plan)
    assert all(np.array_equal(shards[key], padded[key]) for key in KEYS)


def test_a_layer_of_a_padded_stack_has_its_true_shape(fsdp_mesh) -> None:
    stacked = {"up": normal(5, 3, 11, 13), "down": normal(6, 3, 13, 11), "bias": normal(7, 3, 13)}
    plan = ts.plan(stacked, [(".*", ts.fsdp("fsdp", skip=(0,)))], fsdp_mesh, min_size=0).padded()
    assert all(leaf.unpadded for leaf in plan.leaves)
    x = normal(4, 16, 11)

    def scan(params: Any, x: jax.Array, use: Any) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, weights: Any) -> Any:
            w = use(weights)
            # What padding adds to the softmax would change the loss.
            return x + jax.nn.softmax(x @ w["up"] + w["bias"][None]) @ w["down"], None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))

    def run(shards: Any, x: jax.Array) -> Any:
        def use(weights: Any) -> Any:
            return manual.gather_params(weights, "fsdp", plan)

        step = manual.value_and_grad(
            lambda params, x: scan(params, x, use), "fsdp", plan, gather=False
        )
        return step(shards, x)

    inside = on(fsdp_mesh, run, (plan.specs, P("fsdp")), (P(), plan.specs))
    value, grads = inside(ts.pad_leaves(stacked, plan), x)
    want, want_grads = jax.value_and_grad(lambda params: scan(params, x, lambda w: w))(stacked)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_close(ts.unpad_leaves(grads, plan), want_grads)


class Model(eqx.Module):
    w: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


def test_modules_and_boxes_of_flax_keep_the_true_shape(fsdp_mesh) -> None:
    w, x = PARAMS["w"], normal(4, 16, 11)

    def run(w: jax.Array, x: jax.Array) -> Any:
        model = manual.shard_module_params(Model, "fsdp", min_size=1, pad=True)(w)
        assert model.module.w.unpadded == (11, 13)
        dense = manual.shard_module_params(nn.Dense, "fsdp", min_size=1, pad=True)(13)
        variables = dense.init(jax.random.key(0), x)
        assert variables["params"]["kernel"].unpadded == (11, 13)
        again = nn.Dense(13).init(jax.random.key(0), x)
        variable = manual.shard_params({"w": nnx.Param(w)}, "fsdp", min_size=1, pad=True)
        assert variable["w"].get_value().shape == (11, 2)
        full = manual.gather_params(manual.gather_params(variable, "fsdp"), "fsdp")
        zero = dense.apply(variables, x) - nn.Dense(13).apply(again, x)
        return model(x), zero, full["w"].get_value()

    got, zero, full = on(fsdp_mesh, run, (P(), P("fsdp")), (P("fsdp"), P("fsdp"), P()), False)(w, x)
    np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-5)
    assert not np.any(zero)
    assert np.array_equal(full, w)


def test_a_second_axis_pads_another_dim() -> None:
    mesh = ts.make_mesh("data=2,fsdp=3", devices=jax.devices()[:6])

    def run(w: jax.Array) -> Any:
        once = manual.shard_params({"w": w}, "fsdp", min_size=1, pad=True)
        twice = manual.shard_params(once, "data", min_size=1, pad=True)
        assert twice["w"].unpadded == (11, 13)
        assert twice["w"].value.shape in [(6, 5), (4, 7)]
        part = manual.gather_params(twice, "fsdp")
        assert part["w"].unpadded == (11, 13)
        assert part["w"].names.count("data") == 1
        return manual.gather_params(part, "data")["w"]

    assert np.array_equal(on(mesh, run, P(), P(), False)(PARAMS["w"]), PARAMS["w"])


def test_pad_with_specs_is_an_error(fsdp_mesh) -> None:
    def run(w: jax.Array) -> Any:
        return manual.shard_params(w, "fsdp", P("fsdp"), pad=True)

    why = r"with specs there are none\. Omit `pad`, and give a plan"
    with pytest.raises(ts.SpecError, match=why):
        on(fsdp_mesh, run, P(), P("fsdp"))(PARAMS["w"])

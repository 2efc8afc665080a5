"""`treeshard.manual` with Flax: Linen's boxes and classes, and the state of nnx models."""

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, on
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual

BOTH = ("data", "fsdp")
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)


class Classifier(nn.Module):
    """The tutorial's model, smaller; `dense` makes its layers."""

    dense: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.tanh(self.dense(16, name="input_dense")(x))
        return self.dense(3, name="output_dense")(x)


def loss(model: nn.Module, params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(model.apply({"params": params}, x)).sum(-1))


@pytest.mark.parametrize(
    ("check_vma", "remat"), [(True, False), (False, True)], ids=["checked", "unchecked, remat"]
)
def test_the_tutorials_calls(mesh: Mesh, check_vma: bool, remat: bool) -> None:
    """Shapes first, then a sharded init, then a step, as in the tutorial; on two axes."""
    dense = manual.shard_module_params(nn.Dense, "fsdp", min_weight_size=16, remat=remat)
    model, plain = Classifier(dense), Classifier(nn.Dense)

    def init(key: jax.Array, x: jax.Array) -> Any:
        return model.init(key, x)["params"]

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: loss(model, p, manual.vary(x, BOTH)))(manual.vary(params, BOTH))
        return manual.sync_gradients(grads, BOTH)

    key, in_specs = jax.random.key(0), (P(), P(BOTH))
    shapes = jax.eval_shape(
        jax.shard_map(init, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False), key, X
    )
    specs = nn.get_partition_spec(shapes)
    assert specs == manual.partition_specs(shapes)
    assert specs == {
        "input_dense": {"bias": P("fsdp"), "kernel": P(None, "fsdp")},
        "output_dense": {"bias": P(), "kernel": P("fsdp", None)},
    }

    def both(key: jax.Array, x: jax.Array) -> Any:
        params = init(key, x)
        return params, step(params, x)

    jitted = on(mesh, both, in_specs, (specs, specs), check_vma)
    # Only the last kernel is needed again, for the gradient of the layer before.
    assert str(jitted.trace(key, X).jaxpr).count("all_gather[") == (4 if remat else 3)
    params, grads = jitted(key, X)
    for tree in (params, grads):
        assert isinstance(tree["input_dense"]["kernel"], nn.Partitioned)
    wanted = plain.init(key, X)["params"]
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)  # a bias is zero
    jax.tree.map(close, nn.meta.unbox(params), wanted)
    assert_close(nn.meta.unbox(grads), jax.grad(partial(loss, plain))(wanted, X))


def test_an_nnx_model_through_its_state(mesh: Mesh) -> None:
    model = nnx.Sequential(
        nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    )
    graph, state = nnx.split(model)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(nnx.merge(graph, state)(x)).sum(-1))

    rules = [("kernel", ts.fsdp("fsdp", min_size=0)), (".*", None)]
    specs = ts.match_partition_rules(rules, state, mesh)

    def step(state: Any, x: jax.Array) -> Any:
        """With a tree of specs, and with the specs in the variables."""
        first = manual.value_and_grad(loss, BOTH, specs)(state, x)
        full = manual.gather_params(state, BOTH, specs)
        marked = manual.shard_params(full, "fsdp", min_weight_size=64)
        kernel = marked["layers"][0]["kernel"]
        assert kernel.get_metadata()["out_sharding"] == (None, "fsdp")
        assert kernel.get_value().shape == (8, 4)
        again = manual.gather_params(marked, "fsdp")["layers"][0]
        assert again["kernel"].get_metadata()["out_sharding"] is None
        assert "out_sharding" not in again["bias"].get_metadata()
        value, grads = manual.value_and_grad(loss, BOTH)(marked, x)
        assert jax.tree.structure(grads) == jax.tree.structure(marked)
        return first, (value, jax.tree.leaves(grads))

    out = ((P(), specs), (P(), jax.tree.leaves(specs)))
    first, (value, grads) = on(mesh, step, (specs, P(BOTH)), out)(state, X)
    wanted = jax.value_and_grad(loss)(state, X)
    assert_close(first, wanted)
    assert_close((value, grads), (wanted[0], jax.tree.leaves(wanted[1])))


TARGETS = {
    "specs": (nn.Dense, P("fsdp"), "Linen modules carry their specs in boxes. Omit `specs`, and"),
    "module": (
        nn.Dense(3),
        None,
        "Wrap the class Dense, and make the module from the result: `shard_module_params(",
    ),
    "number": (3, None, "3 (int) is not callable. Pass a function of the parameters,"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_cannot_be_wrapped(name: str) -> None:
    target, specs, message = TARGETS[name]
    kind = TypeError if specs is None else ts.SpecError
    with pytest.raises(kind, match=re.escape(message)):
        manual.shard_module_params(target, "fsdp", specs=specs)

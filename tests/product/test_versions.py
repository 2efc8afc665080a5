"""What the page "Versions" says of code that newer releases of JAX treat in another way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from files import DOCS
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts

PAGE = DOCS["docs/versions.md"]
VERSION = jax.__version_info__
ROWS = ("data", "fsdp")


def test_attention_whose_key_has_one_head() -> None:
    rng = np.random.default_rng(0)
    params = {
        "q": rng.standard_normal((16, 8 * 4)).astype("float32"),
        "k": rng.standard_normal((16, 4)).astype("float32"),
    }
    batch = rng.standard_normal((8, 6, 16)).astype("float32")
    mesh = ts.make_mesh("data=2,fsdp=2,tensor=2", axis_types="explicit")
    plan = ts.plan(params, [("q", P("fsdp", "tensor")), ("k", P("fsdp"))], mesh, min_size=0)
    assert 'ts.with_sharding_constraint(k, P(rows, None, "tensor"))' in PAGE

    def attend(constrain: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            params = ts.unshard(params)
            q = (x @ params["q"]).reshape(8, 6, 8, 4)
            k = jnp.repeat((x @ params["k"]).reshape(8, 6, 1, 4), 8, 2)
            k = constrain(k)
            return jnp.einsum("bthd,bshd->bhts", q, k).mean()

        return ts.training.value_and_grad(loss)

    def in_a_step(constrain: Any) -> Any:
        step = ts.jit_step(
            lambda s, x: (s, attend(constrain)(s, x)), plan, batch=P(ROWS), donate=False
        )
        return step(ts.shard(params, plan), batch)[1]

    alone = attend(lambda k: k)(params, batch)
    found = in_a_step(lambda k: ts.with_sharding_constraint(k, P(ROWS, None, "tensor")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, alone)
    if VERSION >= (0, 11, 1):
        with pytest.raises(ts.errors.ShardingTypeError, match="lhs batch dimensions and rhs batch"):
            in_a_step(lambda k: k)


def test_the_state_of_an_optimizer_that_is_jitted_without_a_mesh() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",))
    params = ts.shard({"w": np.ones((16, 8), "float32")}, P("fsdp"), mesh)
    init = jax.jit(optax.sgd(0.1, momentum=0.9).init)
    if VERSION < (0, 11):
        with pytest.raises(ValueError, match="jax.set_mesh"):
            init(params)
    elif VERSION >= (0, 12):
        assert all(len(x.devices()) == 1 for x in jax.tree.leaves(init(params)))
    with jax.set_mesh(mesh):
        assert all(len(x.devices()) == 8 for x in jax.tree.leaves(init(params)))


@pytest.mark.parametrize(("reduce", "instead"), [(lax.pmean, jnp.mean), (lax.psum, jnp.sum)])
def test_a_mean_over_a_dim_that_vmap_maps_and_an_axis_splits(reduce: Any, instead: Any) -> None:
    mesh = jax.make_mesh((8,), ("fsdp",))
    rows = np.random.default_rng(1).standard_normal((16, 8)).astype("float32")
    x = ts.shard(rows, P("fsdp"), mesh)
    over_rows = jax.jit(jax.vmap(lambda row: reduce(row, "rows"), axis_name="rows"))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(lambda x: instead(x, 0))(x), instead(rows, 0), rtol=1e-4)
        if VERSION >= (0, 12):
            with pytest.raises(ValueError, match="Length of sharding.spec"):
                over_rows(x)
        else:
            np.testing.assert_allclose(np.asarray(over_rows(x))[0], instead(rows, 0), rtol=1e-4)

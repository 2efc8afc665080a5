"""`lookup` and `matmul` on Explicit axes: results and gradients of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts

TABLE = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")
IDS = np.arange(48, dtype="int32").reshape(16, 3) % 5
ROWS = P(("data", "fsdp"))


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return ts.make_mesh("data=2,fsdp=4", axis_types=request.param)


@pytest.fixture
def explicit() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "fsdp"))


def summed_sines(rows: Any) -> Any:
    return jnp.sum(jnp.sin(rows))


GRADIENT = jax.grad(lambda table: summed_sines(table[IDS]))(TABLE)


def by_row(table: Any, ids: Any) -> Any:
    return jax.vmap(lambda i: ts.lookup(table, i))(ids)


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "fsdp")], ids=str)
@pytest.mark.parametrize("look_up", [ts.lookup, by_row])
def test_lookup(mesh: Mesh, spec: P, look_up: Any) -> None:
    def loss(table: Any, ids: Any) -> Any:
        rows = look_up(table, ids)
        return summed_sines(rows), rows

    table, ids = ts.shard(TABLE, spec, mesh), ts.shard(IDS, ROWS, mesh)
    with jax.set_mesh(mesh):
        gradient, rows = jax.jit(jax.grad(loss, has_aux=True))(table, ids)
    np.testing.assert_array_equal(rows, TABLE[IDS])
    np.testing.assert_allclose(gradient, GRADIENT, atol=1e-5)


WAITING = [
    (ts.lookup, ROWS, P(), ("data", "fsdp")),
    (ts.lookup, ROWS, P(None, "fsdp"), ("data",)),
    (ts.lookup, P("data"), P("fsdp"), ("data",)),
    (ts.lookup, P(), P(), ("data", "fsdp")),
    (ts.lookup, P(), P("fsdp"), ("data",)),
    (by_row, ROWS, P("fsdp"), ("data",)),
]


@pytest.mark.parametrize(("look_up", "rows", "spec", "over"), WAITING)
def test_the_gradient_of_a_table_that_waits_for_its_sum(
    explicit: Mesh, look_up: Any, rows: P, spec: P, over: tuple[str, ...]
) -> None:
    """JAX's own lookup has a wrong one, if the table is split or ids are not."""

    def gradient(table: Any, ids: Any) -> Any:
        table = jax.sharding.reshard(table, spec.update(reduced=frozenset(over)))
        found = jax.grad(lambda table: summed_sines(look_up(table, ids)))(table)
        return jax.sharding.reshard(found, spec)

    table, ids = ts.shard(TABLE, spec, explicit), ts.shard(IDS, rows, explicit)
    with jax.set_mesh(explicit):
        np.testing.assert_allclose(jax.jit(gradient)(table, ids), GRADIENT, atol=1e-5)


def test_one_row(mesh: Mesh) -> None:
    table = ts.shard(TABLE, P("fsdp"), mesh)
    for index in (3, jnp.int32(3)):
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(ts.lookup(table, index), TABLE[3])
        np.testing.assert_array_equal(ts.lookup(jnp.asarray(TABLE), index), TABLE[3])


@pytest.mark.parametrize("axis", ["fsdp", None], ids=["row parallel", "of full matrices"])
def test_matmul(mesh: Mesh, axis: str | None) -> None:
    x = np.random.default_rng(1).standard_normal((4, 16)).astype("float32")
    placed = ts.shard(x, P("data", axis), mesh), ts.shard(TABLE, P(axis), mesh)

    def loss(x: Any, w: Any) -> Any:
        product = ts.matmul(x, w)
        return summed_sines(product), product

    with jax.set_mesh(mesh):
        gradients, product = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*placed)
    np.testing.assert_allclose(product, x @ TABLE, atol=1e-5)
    expected = jax.grad(lambda x, w: summed_sines(x @ w), (0, 1))(x, TABLE)
    for got, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("x_shape", "x_spec", "w_shape", "w_spec"),
    [
        ((8, 16), P("data", "fsdp"), (16, 8), P("fsdp", "data")),  # one axis splits both
        ((2, 4, 16), P("data", None, "fsdp"), (2, 16, 8), P("data", "fsdp")),
        ((1, 4, 16), P(None, None, "fsdp"), (2, 16, 8), P("data", "fsdp")),
        ((4, 16), P(None, "fsdp"), (2, 16, 8), P("data", "fsdp")),
        ((2, 4, 16), P("data", None, "fsdp"), (16,), P("fsdp")),
        ((16,), P("fsdp"), (2, 16, 8), P("data", "fsdp")),
        ((16,), P("fsdp"), (16, 8), P("fsdp", "data")),
        ((16,), P("fsdp"), (16,), P("fsdp")),
    ],
)
def test_matmul_of_other_ranks(
    mesh: Mesh, x_shape: Any, x_spec: P, w_shape: Any, w_spec: P
) -> None:
    rng = np.random.default_rng(2)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in (x_shape, w_shape))
    placed = ts.shard(x, x_spec, mesh), ts.shard(w, w_spec, mesh)
    with jax.set_mesh(mesh):
        product = jax.jit(ts.matmul)(*placed)
        gradients = jax.jit(jax.grad(lambda x, w: summed_sines(ts.matmul(x, w)), (0, 1)))(*placed)
    np.testing.assert_allclose(product, x @ w, atol=1e-5)
    expected = jax.grad(lambda x, w: summed_sines(x @ w), (0, 1))(x, w)
    for got, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_mesh_of_the_types_is_enough(explicit: Mesh) -> None:
    table, ids = ts.shard(TABLE, P("fsdp"), explicit), ts.shard(IDS, ROWS, explicit)
    for look_up in (ts.lookup, jax.jit(ts.lookup)):
        np.testing.assert_array_equal(look_up(table, ids), TABLE[IDS])
    x = ts.shard(np.ones((4, 16), "float32"), P("data", "fsdp"), explicit)
    for product in (ts.matmul, jax.jit(ts.matmul)):
        np.testing.assert_allclose(product(x, table), np.ones((4, 16)) @ TABLE, atol=1e-5)

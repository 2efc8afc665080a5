"""docs/migrate.md: the lines of the UvA tutorials, and ours."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, on, struct
from jax import lax
from jax.sharding import PartitionSpec as P
from migration import longest_dim, short, table

import treeshard as ts
from treeshard import manual
from treeshard.training import Metrics

row = table("From the UvA deep-learning tutorials", "data=8")


def shapes_of(f: Any, *args: Any) -> Any:
    """What `f` returns on one device; nothing is compiled."""
    mapped = jax.shard_map(f, mesh=row.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.eval_shape(mapped, *args)


def test_fold_rng() -> None:
    rng = jax.random.key(3)
    draw = lambda key: jax.random.key_data(manual.fold_rng_over_axis(key, "data"))[None]  # noqa: E731
    old = [jax.random.key_data(jax.random.fold_in(rng, index)) for index in range(8)]
    np.testing.assert_array_equal(on(row.mesh, draw, P(), P("data"))(rng), old)


@row('shard_params(params, "data", min_weight_size=2**4)')
def test_shard_params(ours) -> None:
    """There a leaf of more elements is split along its longest dim, of equals the last.

    Here a leaf of exactly as many elements is split too.
    """
    shapes = [(16, 8), (8, 8), (8, 24, 8), (17,), (24,), (16,), (4, 4), (2, 8), (3, 8), ()]
    params = {str(shape): struct(*shape) for shape in shapes}
    with pytest.warns(ts.ShardingWarning, match=r"\(17,\): no free dim"):
        found = shapes_of(lambda p: ours(params=p), params)
    for shape in shapes:
        box = found[str(shape)]
        names = box.names if isinstance(box, manual.Partitioned) else ()
        old = longest_dim(shape, "data", 8) if np.prod(shape) >= 16 else P()
        assert short(P(*names)) == old, shape
    assert found["(16, 8)"].value.shape == (2, 8)
    # Flax's boxes stay, and so does what another axis shards.
    boxed = {"w": nn.Partitioned(struct(8, 64), ("model", None))}
    found = shapes_of(lambda p: ours(params=p), boxed)["w"]
    assert (type(found), found.names) == (nn.Partitioned, ("model", "data"))


def test_gather_params() -> None:
    parts = {
        "w": nn.Partitioned(struct(2, 8), ("data", None)),
        "model": nn.Partitioned(struct(2, 8), ("data", "model")),
        "whole": struct(4),
    }
    found = shapes_of(lambda p: manual.gather_params(p, "data"), parts)
    assert (found["w"].shape, found["whole"].shape) == ((16, 8), (4,))
    assert (found["model"].value.shape, found["model"].names) == ((16, 8), (None, "model"))
    by_specs = lambda p: manual.gather_params(p, "data", P("data"))  # noqa: E731
    assert shapes_of(by_specs, {"w": struct(2, 8)})["w"].shape == (16, 8)


def test_gather_array() -> None:
    x = jnp.arange(16.0).reshape(8, 2)
    weight = jnp.arange(8.0) + 1  # another for each device

    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        gather = lambda x: manual.gather_array_with_mean_grads(x, 0, "data")  # noqa: E731
        grad = jax.grad(lambda x: weight[0] * (gather(x) ** 2).sum())(x)
        return gather(x)[None], grad

    whole, grad = on(row.mesh, step, P("data"), P("data"))(x, weight)
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (8, 8, 2)))
    np.testing.assert_allclose(grad, 2 * x * weight.mean())


@row(
    'shard_module_params(nn.Dense, axis_name="data", min_weight_size=2**4)',
    "nn.get_partition_spec(jax.eval_shape(init_fn, rng, x))",
)
def test_shard_module_params(sharded, specs) -> None:
    dense = sharded(nn=nn)(24)

    def init(rng: jax.Array, x: jax.Array) -> Any:
        params = dense.init(rng, x)["params"]
        return params, optax.adam(1e-3).init(params)

    x = struct(4, 16)
    params, _ = shapes_of(init, jax.random.key(0), x)
    assert (params["kernel"].names, params["bias"].names) == ((None, "data"), ("data",))
    assert shapes_of(lambda p, x: dense.apply({"params": p}, x), params, x).shape == (4, 24)
    mapped = jax.shard_map(init, mesh=row.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    args = jax.random.key(0), jnp.ones((4, 16))
    found = specs(init_fn=mapped, rng=args[0], x=args[1])
    assert found == nn.get_partition_spec(jax.eval_shape(mapped, *args))
    assert found[0] == found[1][0].mu == {"kernel": P(None, "data"), "bias": P("data")}


RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(8, 2)).astype(np.float32),
    "b": RNG.normal(size=2).astype(np.float32),
}
SPECS = {"w": P("data"), "b": P()}
X = RNG.normal(size=(16, 8)).astype(np.float32)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)


def old_step(params: Any, x: jax.Array) -> Any:
    """Theirs: an all-gather whose gradient is reduce-scattered and averaged; a mean of the rest."""

    @jax.custom_gradient
    def gather(x: jax.Array) -> Any:
        whole = lax.all_gather(x, "data", axis=0, tiled=True)
        return whole, lambda g: lax.psum_scatter(g, "data", tiled=True) / 8

    grads = jax.grad(lambda p: loss_fn(p | {"w": gather(p["w"])}, x))(params)
    return grads | {"b": lax.pmean(grads["b"], "data")}


def test_sync_gradients() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        specs = {"w": manual.Partitioned(params["w"], ("data", None)), "b": params["b"]}
        grads = jax.grad(lambda p: loss_fn(manual.gather_params(p, "data"), x))(specs)
        grads = manual.sync_gradients(grads, ("data",))
        again = manual.sync_gradients(grads, ("data",))
        return {"w": again["w"].value, "b": again["b"]}

    expected = jax.grad(loss_fn)(PARAMS, X)
    for check in (True, False):
        assert_close(on(row.mesh, step, (SPECS, P("data")), SPECS, check)(PARAMS, X), expected)
    old = on(row.mesh, old_step, (SPECS, P("data")), SPECS)(PARAMS, X)
    assert_close(old, expected | {"b": 8 * expected["b"]})


@row("jax.value_and_grad(loss_fn)(params, batch)")
def test_value_and_grad(ours) -> None:
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    for loss in (loss_fn, lambda p, x: lax.pmean(loss_fn(p, x), "data")):

        def step(params: Any, x: jax.Array, loss: Any = loss) -> Any:
            return ours(loss_fn=loss, specs=SPECS, params=params, batch=x)

        found = on(row.mesh, step, (SPECS, P("data")), (P(), SPECS))(PARAMS, X)
        assert_close(found, expected)


@row("accumulate_gradients(state, batch, rng, num_minibatches, loss_fn)")
def test_accumulate_gradients(ours) -> None:
    """There what is left over is not looked at."""

    def grad_fn(x: Any, rng: Any) -> Any:  # of the mean of x @ w
        return x.mean(0), {"loss": (x.sum(), jnp.asarray(len(x)))}

    found = ours(grad_fn=grad_fn, batch=X, num_minibatches=4, rng=None)
    assert_close(found, (X.mean(0), {"loss": (X.sum(), 16)}))
    with pytest.raises(ts.SpecError, match="15 rows are not divisible by 4 minibatches"):
        ours(grad_fn=grad_fn, batch=X[:15], num_minibatches=4, rng=None)


@row(
    'jax.jit(shard_map(train_step, mesh, in_specs=(specs, P(), P("data")),'
    ' out_specs=(specs, P()), check_rep=False), donate_argnames=("state", "metrics"))',
    'print_metrics(metrics, title="Final")',
)
def test_step(step, print_metrics, capsys) -> None:
    def train_step(params: Any, x: jax.Array) -> Any:
        loss, grads = manual.value_and_grad(loss_fn, "data", SPECS)(params, x)
        rows = Metrics({"loss": (loss * len(x), len(x))}).reduce("data")
        return jax.tree.map(lambda p, g: p - g, params, grads), rows

    plan = ts.plan(PARAMS, [("w", P("data")), ("b", None)], row.mesh, min_size=0)
    state = ts.shard(PARAMS, plan)
    new, metrics = step(train_step=train_step, plan=plan)(state, X)
    assert state["w"].is_deleted()
    loss, grads = jax.value_and_grad(loss_fn)(PARAMS, X)
    assert_close(ts.gather(new), jax.tree.map(lambda p, g: p - g, PARAMS, grads))
    np.testing.assert_allclose((None + metrics).means()["loss"], loss, rtol=1e-5)
    print_metrics(metrics={"loss": (3.0, 2), "accuracy": (1, 4)})
    assert capsys.readouterr().out.split() == ["Final", "loss", "1.5000", "accuracy", "0.2500"]


@row('TPDense(dense_fn, model_axis_name="model", tp_mode="gather")(x)')
def test_tensor_parallel(ours) -> None:
    mesh = ts.make_mesh("model=4", devices=jax.devices()[:4])
    rng = np.random.default_rng(1)
    x, up, down = (rng.normal(size=s).astype(np.float32) for s in [(2, 8), (8, 12), (12, 8)])
    # As they are saved there: a part of the columns, or of the rows, for each device.
    saved = np.stack(np.split(up, 4, axis=1)), np.stack(np.split(down, 4))
    restored = saved[0].transpose(1, 0, 2).reshape(8, -1), saved[1].reshape(-1, 8)

    def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = ours(x=x, weight=up)
        assert (x.shape, hidden.shape) == ((2, 2), (2, 3))
        return manual.row_parallel(hidden, down, "model", dim=-1)

    columns = P(None, "model")
    found = on(mesh, layers, (columns, columns, P("model")), columns)(x, *restored)
    np.testing.assert_allclose(found, x @ up @ down, rtol=1e-4)

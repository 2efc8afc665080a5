"""docs/migrate.md: the lines of the UvA tutorials, and ours.

What the old functions do was read in the tutorials' `data_parallel.py` and `single_gpu.py`, and is
written down here anew.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from migration import table

import treeshard as ts
from treeshard import manual
from treeshard.training import Metrics

TABLE = table("From the UvA deep-learning tutorials")
row = TABLE.row

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("data=8")


def shapes_of(f: Any, mesh: Mesh, *args: Any) -> Any:
    """What `f` returns on one device; nothing is compiled."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.eval_shape(mapped, *args)


def run(f: Any, mesh: Mesh, in_specs: Any, out_specs: Any, *args: Any, check: bool = True) -> Any:
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return jax.jit(mapped, compiler_options=QUICK)(*args)


def test_every_row_has_a_test() -> None:
    TABLE.check()


@row('fold_rng_over_axis(rng, "data")')
def test_fold_rng(ours, mesh) -> None:
    rng = jax.random.key(3)
    draw = lambda key: jax.random.key_data(ours(rng=key))[None]  # noqa: E731
    found = run(draw, mesh, P(), P("data"), rng)
    old = [jax.random.key_data(jax.random.fold_in(rng, index)) for index in range(8)]
    np.testing.assert_array_equal(found, old)


# ------------------------------------------------------------------ parameters in parts


def old_names(shape: tuple[int, ...], names: Any = None, least: int = 2**4) -> Any:
    """The names that the tutorials give a leaf, by shape: the longest free dim that divides, the
    last of equals, of leaves of more than `least` elements; `None` where there is no box."""
    given = names or (None,) * len(shape)
    divisible = [i for i, dim in enumerate(shape) if dim % 8 == 0 and given[i] is None]
    if np.prod(shape) <= least or not divisible or "data" in given:
        return names
    chosen = max(divisible, key=lambda i: (shape[i], i))
    return tuple("data" if i == chosen else name for i, name in enumerate(given))


@row('shard_params(params, "data", min_weight_size=2**4)')
def test_shard_params(ours, mesh) -> None:
    shapes = [(16, 8), (8, 8), (8, 24, 8), (17,), (24,), (16,), (4, 4), (2, 8), (3, 8), ()]
    params = {str(shape): struct(*shape) for shape in shapes}
    with pytest.warns(ts.ShardingWarning, match=r"\(17,\): no free dim"):
        found = shapes_of(lambda p: ours(params=p), mesh, params)
    for shape in shapes:
        box = found[str(shape)]
        assert (box.names if isinstance(box, manual.Partitioned) else None) == old_names(shape)
    assert found["(16, 8)"].value.shape == (2, 8)
    # Flax's boxes stay; what another axis shards stays too.
    boxed = {"w": nn.Partitioned(struct(8, 64), ("model", None))}
    found = shapes_of(lambda p: ours(params=p), mesh, boxed)
    assert isinstance(found["w"], nn.Partitioned)
    assert found["w"].names == old_names((8, 64), ("model", None)) == ("model", "data")
    with pytest.warns(ts.ShardingWarning, match="already"):
        assert shapes_of(lambda p: ours(params=p), mesh, found)["w"].names == ("model", "data")


@row('gather_params(params, "data")')
def test_gather_params(ours, mesh) -> None:
    parts = {
        "w": nn.Partitioned(struct(2, 8), ("data", None)),
        "model": nn.Partitioned(struct(2, 8), ("data", "model")),
        "whole": struct(4),
    }
    found = shapes_of(lambda p: ours(params=p), mesh, parts)
    assert (found["w"].shape, found["whole"].shape) == ((16, 8), (4,))
    assert (found["model"].value.shape, found["model"].names) == ((16, 8), (None, "model"))
    # A pair of axes: there, "data" is not among the names (("data", "model"), None).
    both = ts.make_mesh("data=4,model=2")
    parts = {"w": nn.Partitioned(struct(2, 8), (("data", "model"), None))}
    gather = lambda p: manual.gather_params(p, ("data", "model"))  # noqa: E731
    assert shapes_of(gather, both, parts)["w"].shape == (16, 8)
    gather = lambda p: manual.gather_params(p, "data", P("data"))  # noqa: E731
    assert shapes_of(gather, mesh, {"w": struct(2, 8)})["w"].shape == (16, 8)


@row('gather_array_with_mean_grads(x, 0, "data")')
def test_gather_array(ours, mesh) -> None:
    x = jnp.arange(16.0).reshape(8, 2)
    weight = jnp.arange(8.0) + 1  # another for each device

    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = ours(x=x)
        grad = jax.grad(lambda x: weight[0] * (ours(x=x) ** 2).sum())(x)
        return whole[None], grad

    whole, grad = run(step, mesh, P("data"), P("data"), x, weight)
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (8, 8, 2)))
    np.testing.assert_allclose(grad, 2 * x * weight.mean())


@row('shard_module_params(nn.Dense, axis_name="data", min_weight_size=2**4)')
def test_shard_module_params(ours, mesh) -> None:
    dense = ours(nn=nn)(2)
    x = struct(4, 16)
    params = shapes_of(dense.init, mesh, jax.random.key(0), x)["params"]
    assert isinstance(params["kernel"], nn.Partitioned)
    assert params["kernel"].names == old_names((16, 2)) == ("data", None)
    assert params["bias"].shape == (2,)
    found = shapes_of(lambda p, x: dense.apply({"params": p}, x), mesh, params, x)
    assert found.shape == (4, 2)


@row("nn.get_partition_spec(jax.eval_shape(init_fn, rng, x))")
def test_specs_of_boxes(ours, mesh) -> None:
    dense = manual.shard_module_params(nn.Dense, "data", min_size=17)(24)

    def init(rng: jax.Array, x: jax.Array) -> Any:
        params = dense.init(rng, x)["params"]
        return params, optax.adam(1e-3).init(params)

    mapped = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    args = jax.random.key(0), jnp.ones((4, 16))
    found = ours(init_fn=mapped, rng=args[0], x=args[1])
    assert found == nn.get_partition_spec(jax.eval_shape(mapped, *args))
    assert found[0] == found[1][0].mu == {"kernel": P(None, "data"), "bias": P("data")}


# ------------------------------------------------------------------ gradients

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(8, 2)).astype(np.float32),
    "b": RNG.normal(size=2).astype(np.float32),
}
SPECS = {"w": P("data"), "b": P()}
X = RNG.normal(size=(16, 8)).astype(np.float32)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)


def old_gather(params: Any) -> Any:
    """Theirs: an all-gather whose gradient is reduce-scattered and averaged."""

    @jax.custom_gradient
    def gather(x: jax.Array) -> Any:
        whole = lax.all_gather(x, "data", axis=0, tiled=True)
        return whole, lambda g: lax.psum_scatter(g, "data", tiled=True) / 8

    return params | {"w": gather(params["w"])}


def old_step(params: Any, x: jax.Array) -> Any:
    grads = jax.grad(lambda p: loss_fn(old_gather(p), x))(params)
    return grads | {"b": lax.pmean(grads["b"], "data")}


@row('sync_gradients(grads, ("data",))')
def test_sync_gradients(ours, mesh) -> None:
    def step(params: Any, x: jax.Array) -> Any:
        specs = {"w": manual.Partitioned(params["w"], ("data", None)), "b": params["b"]}
        grads = jax.grad(lambda p: loss_fn(manual.gather_params(p, "data"), x))(specs)
        grads = ours(grads=grads)
        again = ours(grads=grads)
        return {"w": again["w"].value, "b": again["b"]}

    expected = jax.grad(loss_fn)(PARAMS, X)
    args = mesh, (SPECS, P("data")), SPECS, PARAMS, X
    for check in (True, False):
        found = run(step, *args, check=check)
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-5, atol=1e-7)
    old = run(old_step, *args, check=False)
    np.testing.assert_allclose(old["b"], expected["b"], rtol=1e-5)
    old = run(old_step, *args)
    np.testing.assert_allclose(old["w"], expected["w"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(old["b"], 8 * expected["b"], rtol=1e-5)


@row("jax.value_and_grad(loss_fn)(params, batch)")
def test_value_and_grad(ours, mesh) -> None:
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    losses = [loss_fn, lambda p, x: lax.pmean(loss_fn(p, x), "data")]
    for loss in losses:

        def step(params: Any, x: jax.Array, loss: Any = loss) -> Any:
            return ours(loss_fn=loss, specs=SPECS, params=params, batch=x)

        value, grads = run(step, mesh, (SPECS, P("data")), (P(), SPECS), PARAMS, X)
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(grads["w"], expected[1]["w"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(grads["b"], expected[1]["b"], rtol=1e-5, atol=1e-7)


def old_accumulate(grad_fn: Any, batch: np.ndarray, parts: int) -> Any:
    """Theirs: slices one after another; what is left over is not looked at."""
    rows = len(batch) // parts
    found = [grad_fn(batch[i * rows : (i + 1) * rows], None) for i in range(parts)]
    grads, metrics = zip(*found, strict=True)
    return sum(grads) / parts, jax.tree.map(lambda *each: sum(each), *metrics)


@row("accumulate_gradients(state, batch, rng, num_minibatches, loss_fn)")
def test_accumulate_gradients(ours) -> None:
    def grad_fn(x: Any, rng: Any) -> Any:  # of the mean of x @ w
        return x.mean(0), {"loss": (x.sum(), len(x))}

    found = ours(grad_fn=grad_fn, batch=X, num_minibatches=4, rng=None)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        found,
        old_accumulate(grad_fn, X, 4),
    )
    first = lambda x, rng: (x[0], ())  # noqa: E731
    rows = np.arange(8, dtype=np.float32)
    assert old_accumulate(first, rows, 2)[0] == (0 + 4) / 2
    found = ours(grad_fn=first, batch=rows, num_minibatches=2, rng=None)
    assert found[0] == (0 + 1) / 2
    old_accumulate(grad_fn, X[:15], 4)
    with pytest.raises(ts.SpecError, match="15 rows are not divisible by 4 minibatches"):
        ours(grad_fn=grad_fn, batch=X[:15], num_minibatches=4, rng=None)


@row(
    'jax.jit(shard_map(train_step, mesh, in_specs=(specs, P(), P("data")),'
    ' out_specs=(specs, P()), check_rep=False), donate_argnames=("state", "metrics"))'
)
def test_step(ours, mesh) -> None:
    def train_step(params: Any, x: jax.Array) -> Any:
        loss, grads = manual.value_and_grad(loss_fn, "data", SPECS)(params, x)
        rows = Metrics({"loss": (loss * len(x), len(x))}).reduce("data")
        return jax.tree.map(lambda p, g: p - g, params, grads), rows

    plan = ts.plan(PARAMS, [("w", P("data")), ("b", None)], mesh, min_size=0)
    state = ts.shard(PARAMS, plan)
    new, metrics = ours(train_step=train_step, plan=plan)(state, X)
    assert state["w"].is_deleted()
    loss, grads = jax.value_and_grad(loss_fn)(PARAMS, X)
    np.testing.assert_allclose((None + metrics).means()["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(new["b"], PARAMS["b"] - grads["b"], rtol=1e-5)

    def forgets(params: Any, x: jax.Array) -> Any:
        return params | {"b": params["b"] - x[0, :2]}, x.sum()

    with pytest.raises(ts.StateError, match=r"(?s)b: the result differs .*aux: it differs"):
        ours(train_step=forgets, plan=plan)(ts.shard(PARAMS, plan), X)


@row('print_metrics(metrics, title="Final")')
def test_print_metrics(ours, capsys) -> None:
    ours(metrics={"loss": (3.0, 2), "accuracy": (1, 4)})
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
    found = run(layers, mesh, (columns, columns, P("model")), columns, x, *restored)
    np.testing.assert_allclose(found, x @ up @ down, rtol=1e-4)

"""A scan over layers that gathers small weights of the next layer while one computes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import HSDP, returning_gradients
from treeshard.communication import collectives
from treeshard.training import scan_layers, value_and_grad

LAYERS, WIDTH, HIDDEN = 4, 32, 64
WEIGHTS = 2  # those that are sharded


def values() -> dict[str, Any]:
    draw = np.random.default_rng(0).standard_normal
    stacked = {"up": draw((LAYERS, WIDTH, HIDDEN)) / 8, "down": draw((LAYERS, HIDDEN, WIDTH)) / 8}
    stacked["scale"] = 1 + draw((LAYERS, WIDTH)) / 8
    tree = {"layers": stacked, "shared": draw(())}
    return jax.tree.map(lambda x: np.asarray(x, "float32"), tree)


def loss_of(run: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose layers pass on a scalar too, and close over a weight."""

    def loss(params: Any, rows: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            h, penalty = x
            scaled = h * w["scale"][None]
            new = h * params["shared"] + jnp.tanh(scaled @ w["up"]) @ w["down"]
            return new, penalty + jnp.mean(w["scale"] ** 2) / 8

        x, penalty = run(layer, (rows, jnp.float32(0)), params["layers"])
        return jnp.mean(x**2) + penalty

    return loss


def one_by_one(layer: Any, x: Any, layers: Any) -> Any:
    stacked = {name: w for name, w in layers.items() if hasattr(w, "shape")}
    for i in range(len(next(iter(stacked.values())))):
        x = layer(x, layers | {name: w[i] for name, w in stacked.items()})
    return x


def step_of(axes: str, kind: str, prefetch: int) -> Any:
    """A step that returns gradients as its state, its plan and a batch."""
    rules = [("scale|shared", None), (".*", P(None, "fsdp"))]
    plan = ts.plan(values(), rules, ts.make_mesh(axes, axis_types=kind), min_size=0)

    def run(layer: Any, x: Any, layers: Any) -> Any:
        return scan_layers(layer, x, layers, prefetch=prefetch)

    rows = np.random.default_rng(1).standard_normal((16, WIDTH)).astype("float32")
    return returning_gradients(plan, value_and_grad(loss_of(run))), plan, rows


# With a limit of 0, only one of the two matrices is gathered early.
@pytest.mark.parametrize(
    ("axes", "kind", "prefetch", "limit", "early"),
    [
        ("fsdp=8", "auto", 1, 0, 1),
        (HSDP, "auto", 0, 0, 0),
        (HSDP, "explicit", 1, 2**20, 2),
    ],
)
def test_gradients_and_gathers_are_those_of_the_layers(
    axes: str, kind: str, prefetch: int, limit: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeshard.training._layers._JOINED", limit)
    step, plan, rows = step_of(axes, kind, prefetch)
    params = values()
    compiled = step.compile(plan.structs, rows)
    grads, value = step(ts.shard(params, plan), rows)
    assert_close((value, grads), jax.value_and_grad(loss_of(one_by_one))(params, rows))

    moved = collectives(compiled.compiled)
    gathers = [x for x in moved if x.kind == "all-gather"]
    assert sum(x.count or 0 for x in gathers) == WEIGHTS * 2 * LAYERS
    before_loops = [x for x in gathers if x.count == 1 and "transpose" not in (x.op_name or "")]
    assert len(before_loops) == early
    assert {x.bytes for x in gathers} == {WIDTH * HIDDEN * 4}
    assert compiled.communication().unplanned == ()
    if kind == "explicit":  # gradients wait for one sum over data
        assert sum(x.count for x in moved if x.kind == "reduce-scatter") == WEIGHTS * LAYERS
        over_data = [x for x in moved if x.kind == "all-reduce" and x.axes == ("data",)]
        assert [x.count for x in over_data] == [1] * WEIGHTS


MIXED = {
    "w": jnp.asarray(values()["layers"]["up"][:, :, :WIDTH]),
    "scale": jnp.asarray(values()["layers"]["scale"]),
    "on": np.array([1, 0, 1, 1], "int32"),
    "signed": np.array([True, False, False, True]),
    "key": jax.random.split(jax.random.key(0), LAYERS),
    "activation": jnp.tanh,
    "name": "block",
}


@pytest.mark.parametrize("rows", ["given", "mapped"])
def test_layers_may_have_leaves_without_gradients(rows: str) -> None:
    """Integers choose, booleans sign, keys drop, and functions and names are static."""

    def layer(x: Any, w: Any, shift: Any) -> Any:
        assert w["name"] == "block"
        kept = jnp.where(jax.random.bernoulli(w["key"], 0.8, (1, WIDTH)), shift, 0)
        new = w["activation"]((x * kept.astype("float32") * w["scale"][None]) @ w["w"])
        return jnp.where(w["on"] > 0, jnp.where(w["signed"], -new, new), x)

    def loss(weights: Any, x: Any, shift: Any, run: Any) -> Any:
        layers = MIXED | weights
        return jnp.sum(run(lambda x, w: layer(x, w, shift), x, layers) ** 2)

    def scanned(layer: Any, x: Any, layers: Any) -> Any:
        return scan_layers(layer, x, layers, gather=lambda w: w, prefetch=1)

    weights = {name: MIXED[name] for name in ("w", "scale")}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, WIDTH)), "float32")
    # Mapped, the integer that the layer closes over is a tracer.
    shift = jnp.arange(1, 4) if rows == "mapped" else jnp.int32(1)

    def grads(run: Any) -> Any:
        of = jax.grad(lambda weights, x, shift: loss(weights, x, shift, run), (0, 1))
        of = jax.vmap(of, (None, None, 0)) if rows == "mapped" else of
        # The integer is no argument: if it is given, it stays an array and becomes no tracer.
        return jax.jit(lambda *floats: of(*floats, shift), compiler_options=QUICK)(weights, x)

    assert_close(grads(scanned), grads(one_by_one))


def test_integers_of_a_plan_are_gathered_with_the_weights() -> None:
    layers = {name: MIXED[name] for name in ("w", "on", "signed")}
    plan = ts.plan(
        layers, [("w", P(None, "fsdp")), (".*", None)], ts.make_mesh("fsdp=8"), min_size=0
    )

    def loss(w: Any, layers: Any, x: Any, run: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.where(w["on"] > 0, jnp.where(w["signed"], 2 * x, jnp.tanh(x @ w["w"])), x)

        return jnp.mean(run(layer, x, layers | {"w": w}) ** 2)

    def step(layers: Any, x: Any) -> Any:
        grad = jax.grad(loss)(layers["w"], layers, x, scan_layers)
        return layers | {"w": grad}, ()

    x = np.random.default_rng(1).standard_normal((16, WIDTH)).astype("float32")
    got, _ = ts.jit_step(step, plan, donate=False)(ts.shard(layers, plan), x)
    assert_close(got["w"], jax.grad(loss)(layers["w"], layers, x, one_by_one))
    assert got["on"].tolist() == [1, 0, 1, 1]


def test_messages() -> None:
    layer = lambda x, w: x  # noqa: E731
    layers = {"w": np.ones((4, 8), "float32")}
    x = np.ones(8, "float32")
    with pytest.raises(ts.errors.ArgumentError, match="prefetch is 2, and neither 0 nor 1"):
        scan_layers(layer, x, layers, prefetch=2)
    uneven = r"number of layers:\n  layers/b: float32\[3,8\]\.\n  layers/w: float32\[4,8\]\."
    with pytest.raises(ts.SpecError, match=uneven):
        scan_layers(layer, x, {**layers, "b": np.ones((3, 8), "float32")})
    with pytest.raises(ts.SpecError, match=r"x/at: int32\[8\] is not .* can be closed over"):
        scan_layers(layer, {"at": np.arange(8, dtype="int32"), "x": x}, layers)

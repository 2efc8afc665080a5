"""A scan over layers that gathers small weights of the next layer while one computes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import mesh_of_kind
from treeshard.communication import collectives
from treeshard.training import scan_layers, value_and_grad

LAYERS, WIDTH, HIDDEN = 4, 32, 64
WEIGHTS = 2  # those that are sharded


def values(layers: int = LAYERS) -> dict[str, Any]:
    draw = np.random.default_rng(0).standard_normal
    stacked = {"up": draw((layers, WIDTH, HIDDEN)) / 8, "down": draw((layers, HIDDEN, WIDTH)) / 8}
    stacked["scale"] = 1 + draw((layers, WIDTH)) / 8
    tree = {"layers": stacked, "shared": draw(())}
    return jax.tree.map(lambda x: np.asarray(x, "float32"), tree)


def loss_of(run: Callable[..., Any], remat: bool = False) -> Callable[..., Any]:
    """A loss whose layers pass on a scalar too, and close over a weight."""

    def loss(params: Any, rows: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            h, penalty = x
            scaled = h * w["scale"][None]
            new = h * params["shared"] + jnp.tanh(scaled @ w["up"]) @ w["down"]
            return new, penalty + jnp.mean(w["scale"] ** 2) / 8

        layer = jax.checkpoint(layer) if remat else layer
        x, penalty = run(layer, (rows, jnp.float32(0)), params["layers"])
        return jnp.mean(x**2) + penalty

    return loss


def one_by_one(layer: Any, x: Any, layers: Any) -> Any:
    for i in range(len(layers["up"])):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], layers))
    return x


def step_of(axes: str, kind: str, prefetch: int, layers: int = LAYERS, remat: bool = False) -> Any:
    """A step that returns gradients as its state, its plan and a batch."""
    rules = [("scale|shared", None), (".*", P(None, "fsdp"))]
    plan = ts.plan(values(layers), rules, mesh_of_kind(axes, kind), min_size=0)

    def run(layer: Any, x: Any, layers: Any) -> Any:
        return scan_layers(layer, x, layers, prefetch=prefetch)

    def step(params: Any, rows: Any) -> Any:
        value, grads = value_and_grad(loss_of(run, remat))(params, rows)
        return grads, value

    rows = np.random.default_rng(1).standard_normal((16, WIDTH)).astype("float32")
    return ts.jit_step(step, plan, donate=False), plan, rows


# With a limit of 0, only one of the two matrices is gathered early.
@pytest.mark.parametrize(("prefetch", "limit", "early"), [(0, 0, 0), (1, 0, 1), (1, 2**20, 2)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("axes", ["fsdp=8", "data=2,fsdp=4"])
def test_gradients_and_gathers_are_those_of_the_layers(
    axes: str, kind: str, prefetch: int, limit: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeshard.training._layers._JOINED", limit)
    step, plan, rows = step_of(axes, kind, prefetch)
    params = values()
    compiled = step.compile(plan.structs, rows)
    grads, value = step(ts.shard(params, plan), rows)
    expected = jax.value_and_grad(loss_of(one_by_one))(params, rows)
    assert_close((value, grads), expected)

    gathers = [x for x in collectives(compiled.compiled) if x.kind == "all-gather"]
    assert sum(x.count or 0 for x in gathers) == WEIGHTS * 2 * LAYERS
    before_loops = [x for x in gathers if x.count == 1 and "transpose" not in (x.op_name or "")]
    assert len(before_loops) == early
    assert {x.bytes for x in gathers} == {WIDTH * HIDDEN * 4}
    assert compiled.communication().unplanned == ()


def test_gradients_wait_for_one_sum_over_data() -> None:
    step, plan, rows = step_of("data=2,fsdp=4", "explicit", 1)
    moved = collectives(step.compile(plan.structs, rows).compiled)
    scattered = [x.count or 0 for x in moved if x.kind == "reduce-scatter"]
    assert sum(scattered) == WEIGHTS * LAYERS
    over_data = [x for x in moved if x.kind == "all-reduce" and x.axes == ("data",)]
    assert [x.count for x in over_data] == [1] * WEIGHTS


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers_that_are_repeated_themselves(layers: int) -> None:
    step, plan, rows = step_of("fsdp=8", "auto", 1, layers, remat=True)
    params = values(layers)
    grads, value = step(ts.shard(params, plan), rows)
    assert_close((value, grads), jax.value_and_grad(loss_of(one_by_one))(params, rows))


def test_messages() -> None:
    layer = lambda x, w: x  # noqa: E731
    layers = {"w": np.ones((4, 8), "float32")}
    x = np.ones(8, "float32")
    with pytest.raises(ts.errors.ArgumentError) as caught:
        scan_layers(layer, x, layers, prefetch=2)
    assert str(caught.value) == "scan_layers: prefetch is 2, and neither 0 nor 1."
    with pytest.raises(ts.SpecError) as caught:
        scan_layers(layer, x, {**layers, "b": np.ones((3, 8), "float32")})
    assert str(caught.value) == (
        "scan_layers: leaves do not stack one number of layers:\n"
        "  layers/b: float32[3,8].\n  layers/w: float32[4,8]."
    )
    with pytest.raises(ts.SpecError) as caught:
        scan_layers(layer, {"at": np.arange(8, dtype="int32"), "x": x}, layers)
    assert str(caught.value) == (
        "scan_layers: x/at: int32[8] is not floating. What layers do not change can be closed over."
    )

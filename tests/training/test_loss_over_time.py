"""A loss that scans over time: its gradients are those of one device, reduced after the loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import QUICK
from treeshard.training import accumulate_gradients, value_and_grad

ROWS, TIMES, WIDTH, HIDDEN = 32, 5, 4, 8
RNG = np.random.default_rng(0)
PARAMS = {
    "bias": 0.1 * RNG.normal(size=3 * HIDDEN).astype("float32"),
    "hidden": 0.3 * RNG.normal(size=(HIDDEN, 3 * HIDDEN)).astype("float32"),
    "input": 0.3 * RNG.normal(size=(WIDTH, 3 * HIDDEN)).astype("float32"),
    "out": 0.3 * RNG.normal(size=(HIDDEN, WIDTH)).astype("float32"),
}
X = RNG.normal(size=(ROWS, TIMES, WIDTH)).astype("float32")
HSDP = "data=2,fsdp=4"


class Model(NamedTuple):
    """A GRU that predicts the next input.

    Attributes:
        start: The first hidden state of some rows.
        before: What is done with the parameters before the loop.
        inside: What is done with them in each trip.
        carried: What is done with the hidden state in each trip.
        remat: Whether each trip is computed again for the gradients.
    """

    start: Callable[[Any], Any]
    before: Callable[[Any], Any] = ts.unshard
    inside: Callable[[Any], Any] = lambda p: p
    carried: Callable[[Any], Any] = lambda h: h
    remat: bool = False

    def loss(self, params: Any, x: Any) -> Any:
        params = self.before(params)

        def step(h: Any, x: Any) -> Any:
            p = self.inside(params)
            of_x = jnp.split(x @ p["input"] + p["bias"][None], 3, 1)
            of_h = jnp.split(h @ p["hidden"], 3, 1)
            reset, update = (jax.nn.sigmoid(of_x[i] + of_h[i]) for i in (0, 1))
            new = jnp.tanh(of_x[2] + reset * of_h[2])
            h = self.carried((1 - update) * new + update * h)
            return h, h @ p["out"]

        step = jax.checkpoint(step) if self.remat else step
        times = jnp.swapaxes(x, 0, 1)
        return jnp.mean((jax.lax.scan(step, self.start(x), times[:-1])[1] - times[1:]) ** 2)


def zeros(x: Any) -> Any:
    return jnp.zeros((len(x), HIDDEN))


def zeros_like(x: Any) -> Any:
    """On Explicit axes they are split as the rows are, which zeros are not."""
    return jnp.zeros_like(jnp.repeat(x[:, 0], HIDDEN // WIDTH, axis=1))


def constrained(h: Any) -> Any:
    return ts.with_sharding_constraint(h, P(("data", "fsdp")))


SAME = lambda p: p  # noqa: E731
MODELS = {
    "zeros": Model(zeros),
    "zeros, remat": Model(zeros, remat=True),
    "gathered in the loop": Model(zeros, SAME, ts.unshard),
    "gathered in the loop, remat": Model(zeros_like, SAME, ts.unshard, remat=True),
    "constrained": Model(zeros_like, carried=constrained),
}
VALUE, GRADS = jax.jit(jax.value_and_grad(MODELS["zeros"].loss), compiler_options=QUICK)(PARAMS, X)


def step_of(mesh: Any, gradient: Callable[..., Any]) -> tuple[Any, ts.Plan]:
    plan = ts.plan(PARAMS, [(".*", ts.fsdp("fsdp", min_size=0))], mesh)
    return ts.jit_step(lambda p, x: (p, gradient(p, x)), plan, donate=False), plan


def in_passes(loss: Any, axis_names: Any, differentiate: Any = jax.value_and_grad) -> Any:
    def gradient(params: Any, x: Any) -> Any:
        def grad_fn(rows: Any, key: Any) -> Any:
            value, grads = differentiate(loss)(params, rows)
            return grads, value

        return accumulate_gradients(grad_fn, x, 2, axis_names=axis_names)

    return gradient


def assert_those_of_one_device(grads: Any) -> None:
    for name, expected in GRADS.items():
        np.testing.assert_allclose(grads[name], expected, rtol=1e-5, atol=1e-7)


def explicit(axes: str) -> Any:
    return ts.make_mesh(axes, axis_types=dict.fromkeys(("data", "fsdp"), "explicit"))


@pytest.mark.parametrize(
    ("name", "mesh", "axis_names"),
    [
        ("zeros", "fsdp=8", "fsdp"),
        ("zeros", HSDP, ("data", "fsdp")),
        ("zeros, remat", HSDP, "data"),
        ("gathered in the loop", "fsdp=8", ("fsdp",)),
        ("gathered in the loop, remat", HSDP, ("data", "fsdp")),
        ("constrained", HSDP, "data"),
    ],
)
def test_each_gradient_is_reduced_once_after_the_loop(name, mesh, axis_names) -> None:
    step, plan = step_of(ts.make_mesh(mesh), in_passes(MODELS[name].loss, axis_names))
    compiled = step.compile(plan.structs, X).compiled
    grads, value = step(ts.shard(PARAMS, plan), X)[1]
    assert_those_of_one_device(ts.gather(grads))
    np.testing.assert_allclose(value, VALUE, rtol=1e-5)
    named = {axis_names} if isinstance(axis_names, str) else {*axis_names}
    reduced = [x for x in ts.collectives(compiled) if x.kind != "all-gather" and x.rank]
    over_named = [x.count for x in reduced if named.intersection(x.axes or named)]
    assert over_named
    assert set(over_named) == {1}


@pytest.mark.parametrize("axis_names", [None, ("data", "fsdp")])
@pytest.mark.parametrize("name", ["gathered in the loop, remat", "constrained"])
def test_on_explicit_axes(name, axis_names) -> None:
    differentiate = value_and_grad if axis_names is None else jax.value_and_grad
    gradient = in_passes(MODELS[name].loss, axis_names, differentiate)
    step, plan = step_of(explicit(HSDP), gradient)
    grads, value = step(ts.shard(PARAMS, plan), X)[1]
    assert_those_of_one_device(ts.gather(grads))
    np.testing.assert_allclose(value, VALUE, rtol=1e-5)


def test_axes_are_bound_in_the_loss() -> None:
    """A weighted mean needs the weights of all devices."""
    axes = ("data", "fsdp")

    def weighted(params: Any, x: Any, over_devices: Any = lambda x: x) -> Any:
        rows = jnp.mean((x[:, 0] @ params["input"]) ** 2, 1)
        weights = jnp.abs(x[:, 1, 0])
        return jnp.mean(rows * weights) / over_devices(weights.mean())

    loss = lambda params, x: weighted(params, x, lambda x: jax.lax.pmean(x, axes))  # noqa: E731
    step, plan = step_of(ts.make_mesh(HSDP), in_passes(loss, axes))
    grads = ts.gather(step(ts.shard(PARAMS, plan), X)[1][0])["input"]
    of_passes = [jax.grad(weighted)(PARAMS, X[i::2])["input"] for i in (0, 1)]
    np.testing.assert_allclose(grads, sum(of_passes) / 2, rtol=1e-5, atol=1e-7)

"""A loss that scans over time: its gradients are those of one device, reduced after the loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import HSDP, in_passes, returning_gradients
from treeshard.training import value_and_grad

ROWS, TIMES, WIDTH, HIDDEN = 32, 5, 4, 8
RNG = np.random.default_rng(0)
PARAMS = {
    "bias": 0.1 * RNG.normal(size=3 * HIDDEN).astype("float32"),
    "hidden": 0.3 * RNG.normal(size=(HIDDEN, 3 * HIDDEN)).astype("float32"),
    "input": 0.3 * RNG.normal(size=(WIDTH, 3 * HIDDEN)).astype("float32"),
    "out": 0.3 * RNG.normal(size=(HIDDEN, WIDTH)).astype("float32"),
}
X = RNG.normal(size=(ROWS, TIMES, WIDTH)).astype("float32")


def loss_of(
    in_each_trip: bool = False, carried: Callable[[Any], Any] = lambda h: h
) -> Callable[[Any, Any], Any]:
    """A GRU that predicts the next input. Parameters are gathered before the loop, or in each trip,
    which is then computed again."""

    def loss(params: Any, x: Any) -> Any:
        before = params if in_each_trip else ts.unshard(params)

        def step(h: Any, x: Any) -> Any:
            p = ts.unshard(before) if in_each_trip else before
            of_x = jnp.split(x @ p["input"] + p["bias"][None], 3, 1)
            of_h = jnp.split(h @ p["hidden"], 3, 1)
            reset, update = (jax.nn.sigmoid(of_x[i] + of_h[i]) for i in (0, 1))
            new = jnp.tanh(of_x[2] + reset * of_h[2])
            h = carried((1 - update) * new + update * h)
            return h, h @ p["out"]

        step = jax.checkpoint(step) if in_each_trip else step
        times = jnp.swapaxes(x, 0, 1)
        # On Explicit axes they are split as the rows are, which zeros are not.
        start = jnp.zeros_like(jnp.repeat(x[:, 0], HIDDEN // WIDTH, axis=1))
        return jnp.mean((jax.lax.scan(step, start, times[:-1])[1] - times[1:]) ** 2)

    return loss


def constrained(h: Any) -> Any:
    return ts.with_sharding_constraint(h, P(("data", "fsdp")))


LOSSES = {
    "gathered before the loop": loss_of(),
    "gathered in the loop, remat": loss_of(in_each_trip=True),
    "constrained": loss_of(carried=constrained),
}
VALUE, GRADS = jax.jit(jax.value_and_grad(loss_of()), compiler_options=QUICK)(PARAMS, X)


def program(
    name: str, mesh: Any, axis_names: Any, differentiate: Any = jax.value_and_grad
) -> jax.stages.Compiled:
    """The program of two minibatches, whose numbers are those of one device."""
    plan = ts.plan(PARAMS, [(".*", ts.fsdp("fsdp", min_size=0))], mesh)
    step = returning_gradients(plan, in_passes(LOSSES[name], axis_names, 2, differentiate))
    compiled = step.compile(plan.structs, X).compiled
    assert_close(step(ts.shard(PARAMS, plan), X), (GRADS, VALUE))
    return compiled


@pytest.mark.parametrize(
    ("name", "mesh", "axis_names"),
    [
        ("gathered before the loop", "fsdp=8", ("fsdp",)),
        ("gathered in the loop, remat", HSDP, ("data", "fsdp")),
        ("constrained", HSDP, ("data",)),
    ],
)
def test_each_gradient_is_reduced_once_after_the_loop(name, mesh, axis_names) -> None:
    compiled = program(name, ts.make_mesh(mesh), axis_names)
    reduced = [x for x in ts.collectives(compiled) if x.kind != "all-gather" and x.rank]
    over_named = [x.count for x in reduced if {*axis_names}.intersection(x.axes or axis_names)]
    assert over_named
    assert set(over_named) == {1}


def test_on_explicit_axes() -> None:
    mesh = ts.make_mesh(HSDP, axis_types="explicit")
    program("gathered in the loop, remat", mesh, None, value_and_grad)
    if jax.__version_info__ < (0, 10, 2):  # whose types of a sum in a loop do not agree
        with pytest.raises(ts.errors.ShardingTypeError, match="cotangent type"):
            program("constrained", mesh, ("data", "fsdp"))
        return
    program("constrained", mesh, ("data", "fsdp"))

"""A model whose matrices Muon updates, and what their update may move."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import struct
from treeshard.communication import collectives
from treeshard.training import by_matrix

# Two lone matrices and five stacked ones are of one shape; there is one of another.
PARAMS = {
    "first": struct(32, 64),
    "second": struct(32, 64),
    "layers": struct(5, 32, 64),
    "down": struct(64, 32),
    "bias": struct(64),
}
STACKS = [7, 1]
FSDP = [("bias", None), ("layers", P(None, "fsdp")), (".*", P("fsdp"))]
# Of one shape, in three ways.
TENSOR = [
    ("bias", None),
    ("layers", P(None, "fsdp", "tensor")),
    ("second", P("tensor", "fsdp")),
    (".*", P("fsdp", "tensor")),
]


def values(seed: int) -> Any:
    draw = np.random.default_rng(seed).standard_normal
    return {name: draw(x.shape).astype("float32") for name, x in PARAMS.items()}


def batch(seed: int) -> Any:
    """Gradients, and rows for the axes that split none."""
    return values(seed), np.ones(8, "float32")


def muon(**options: Any) -> Any:
    """optax's Muon, of layers too."""

    def dims(params: Any) -> Any:
        numbers = lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)  # noqa: E731
        return jax.tree.map(lambda x: numbers(x) if x.ndim > 1 else None, params)

    return optax.contrib.muon(0.1, muon_weight_dimension_numbers=dims, **options)


class Setup(NamedTuple):
    """An update by matrix: `step(state, batch(seed))` returns the new state, and the updates."""

    step: Any
    plan: ts.Plan
    init: Any
    rules: Any


def setup(optimizer: Any, mesh: Mesh, rules: Any = FSDP) -> Setup:
    """A step whose gradients are its batch, by a linear loss: only its update moves arrays."""
    of_params = ts.plan(PARAMS, rules, mesh, min_size=0)
    wrapped = by_matrix(optimizer, of_params)

    def init() -> Any:
        params = jax.tree.map(jnp.asarray, values(0))
        return {"params": params, "opt": wrapped.init(params)}

    axes = tuple(axis for axis in ("fsdp", "tensor") if axis in mesh.axis_names)
    of_state = [("opt/matrices/", P(axes)), ("opt/", None), *rules]
    plan = ts.plan(jax.eval_shape(init), of_state, mesh, min_size=0)

    def loss(params: Any, factors: Any) -> Any:
        return sum(jnp.sum(params[name] * factors[name]) for name in PARAMS)

    def update(state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(state["params"], batch[0])
        updates, opt = wrapped.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, updates

    step = ts.jit_step(update, plan, batch=(of_params.specs, P(mesh.axis_names)), donate=False)
    return Setup(step, plan, init, of_state)


def assert_two_exchanges(compiled: Any, axes: tuple[str, ...], parts: int) -> None:
    """Asserts that each stack goes to the devices that update it and back, and nothing else."""
    moved = [x for x in collectives(compiled) if x.rank]
    assert {(x.kind, x.axes) for x in moved} == {("all-to-all", axes)}
    shards = [32 * 64 * 4 * math.ceil(n / parts) for n in STACKS]
    assert sorted(x.bytes for x in moved) == sorted(2 * shards)
    assert all(x.count == 1 for x in moved)

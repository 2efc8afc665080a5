"""Right computations pass the checks: experts, a recurrent network, dropout, an optimizer."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, testing
from treeshard.errors import WrongResultError

WIDTH, LENGTH, ROWS = 16, 8, 16
RULES = [(".*", ts.fsdp("fsdp", min_size=0))]
pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")


class Case(NamedTuple):
    """A loss; by hand, the axes that split the batch come last, if its body needs them."""

    params: Any
    batch: Any
    specs: Any
    loss: Callable[..., Any]
    by_hand: Callable[..., Any]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "bfloat16")


def experts(axes: tuple[str, ...]) -> Case:
    """A mixture of experts with dense dispatch to the best two."""
    params = {
        "router": normal(WIDTH, 4),
        "up": normal(4, WIDTH, 32, seed=1) / 4,
        "down": normal(4, 32, WIDTH, seed=2) / 6,
    }

    def loss(p: Any, x: Any) -> Any:
        scores = jax.nn.softmax((x @ p["router"]).astype("float32"))
        second = jnp.sort(scores, axis=-1)[:, -2:-1]
        gates = jnp.where(scores >= second, scores, 0).astype(x.dtype)
        h = jax.nn.relu(jnp.einsum("bd,edf->bef", x, p["up"]))
        y = jnp.einsum("bef,efd,be->bd", h, p["down"], gates)
        return jnp.mean(y.astype("float32") ** 2)

    return Case(params, normal(ROWS, WIDTH, seed=5), P(axes), loss, loss)


def recurrent(axes: tuple[str, ...]) -> Case:
    """A gated recurrent network, whose rows are dim 1 of the batch."""
    cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=jax.random.key(0))
    model = {"cell": cell, "out": eqx.nn.Linear(WIDTH, 8, key=jax.random.key(1))}
    model = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_array(x) else x, model)

    def loss(model: Any, x: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            return jax.vmap(model["cell"])(x, h), None

        h, _ = jax.lax.scan(step, 0 * x[0], x)
        return jnp.mean(jax.vmap(model["out"])(h).astype("float32") ** 2)

    return Case(model, normal(LENGTH, ROWS, WIDTH, seed=3), P(None, axes), loss, loss)


def dropped(axes: tuple[str, ...]) -> Case:
    """An MLP with dropout, whose key comes with the batch: each device draws its own numbers."""
    params = {
        "up": normal(WIDTH, 32) / 4,
        "bias": normal(32, seed=2) / 9,
        "down": normal(32, 8, seed=1) / 6,
    }

    def loss(p: Any, batch: Any, axes: tuple[str, ...] = ()) -> Any:
        x, key = batch
        key = manual.fold_rng_over_axis(key, axes) if axes else key
        h = jax.nn.relu(x @ p["up"] + p["bias"][None])
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0)
        return jnp.mean((h @ p["down"]).astype("float32") ** 2)

    batch = normal(ROWS, WIDTH), jax.random.key(3)
    return Case(params, batch, (P(axes), P()), loss, partial(loss, axes=axes))


@pytest.mark.parametrize(
    ("make", "axes", "layouts", "draws"),
    [
        (experts, "data=2,fsdp=4", ("minibatches", "by hand"), False),
        (recurrent, "fsdp=8", ("unchecked",), False),
        (dropped, "data=2,fsdp=4", ("plan", "unchecked"), True),
    ],
)
def test_right_gradients_pass(make: Any, axes: str, layouts: tuple[str, ...], draws: bool) -> None:
    mesh = ts.make_mesh(axes)
    case = make(tuple(mesh.axis_names))
    plan = ts.plan(case.params, RULES, mesh, min_size=0)
    body = manual.value_and_grad(case.by_hand, mesh.axis_names, plan)
    options = {"layouts": layouts, "by_hand": body, "batch_specs": case.specs}
    report = testing.check_gradients(case.loss, case.params, case.batch, plan, **options)
    assert not [note for note in report.notes if "raised" in note]
    own = (
        "unchecked: each device draws its own random numbers; compared with keys folded by"
        " axis_index(('data', 'fsdp')) on one device"
    )
    assert (own in report.notes) == draws
    [finest] = re.findall("other errors are seen from (.*)%", "\n".join(report.notes))
    assert float(finest) < 1, report
    assert all(row.keys() == {*layouts} for row in report.cells.values())


def test_no_result_of_an_optimizer_is_called_wrong_behind_dropout() -> None:
    """Of devices with random numbers of their own, what Adam makes of gradients is not known."""
    case = dropped(("fsdp",))
    adam = optax.adamw(1e-3)

    def init() -> Any:
        return {"params": case.params, "opt": adam.init(case.params), "step": jnp.int32(0)}

    state, plan = ts.init_sharded(init, rules=RULES, mesh="fsdp=8", min_size=0)
    of_params = ts.plan(case.params, RULES, plan.mesh, min_size=0)
    gradients = manual.value_and_grad(case.by_hand, "fsdp", of_params)

    def step(state: Any, batch: Any) -> Any:
        value, grads = gradients(state["params"], batch)
        updates, opt = adam.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, {"loss": value}

    run = ts.shard_map_step(step, plan, batch=case.specs)
    with pytest.raises(WrongResultError, match="results are not checked") as told:
        testing.check_step(run, state, case.batch, layouts=["plan"])
    text = str(told.value)
    assert "results that are not linear in the gradients are not checked" in text
    assert "compare it with `check_gradients`" in text
    assert " off " not in text
    assert "wrong" not in text.replace("WrongResultError", "")
    rows = [line for line in text.splitlines() if line.startswith("step ")]
    assert any("params/up" in row and "not checked" in row for row in rows)
    assert any("step 1: opt/0/mu/up" in row and "ok" in row for row in rows)

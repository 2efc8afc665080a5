"""Right computations pass the checks: models, strategies and dtypes, by jit and by hand."""

import itertools
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from check_models import MODELS
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, testing
from treeshard.errors import WrongResultError
from treeshard.training import init_sharded, jit_step, shard_map_step

SOAK = os.environ.get("TREESHARD_SOAK", "0") not in ("", "0")
pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")

FSDP = [(".*", ts.fsdp("fsdp", min_size=0))]
TENSOR = [(".*", ts.shard_dim("tensor", -1, ignore_ndim_error=True))]
BOTH = [(".*", ts.shard_dim("tensor", -1, ignore_ndim_error=True) | ts.fsdp("fsdp", min_size=0))]
# Rules, mesh, and the axes of the batch.
STRATEGIES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "dp": ([(".*", None)], "data=8", ("data",)),
    "fsdp": (FSDP, "fsdp=8", ("fsdp",)),
    "hsdp": (FSDP, "data=2,fsdp=4", ("data", "fsdp")),
    "tp": (TENSOR, "data=2,tensor=4", ("data",)),
    "fsdp x tp": (BOTH, "fsdp=4,tensor=2", ("fsdp",)),
}
DTYPES = ("float32", "bfloat16")
# By jit and by hand, with accumulation.
SHORT = [
    ("experts", "hsdp", "bfloat16", ("minibatches", "by hand")),
    ("dropped", "fsdp", "bfloat16", ("plan", "unchecked")),
]
ALL = [(*case, ()) for case in itertools.product(MODELS, STRATEGIES, DTYPES)]


def compared(report: testing.Report, names: set[str], record_property: Any) -> None:
    """Checks that all layouts were compared, and records the largest multiple of the noise."""
    assert not [note for note in report.notes if "raised" in note]
    assert all(error < 0.01 for error in report.visible.values()), report
    assert all(row.keys() == names for row in report.cells.values())
    cells = [cell for row in report.cells.values() for cell in row.values()]
    noise = max([float(cell.split()[0]) for cell in cells if "noise" in cell], default=0.0)
    record_property(
        f"{len(names)} layouts, {len(cells)} cells, largest multiple of the noise", noise
    )


@pytest.mark.parametrize(("model", "strategy", "dtype", "names"), ALL if SOAK else SHORT)
def test_right_gradients_pass(
    model: str, strategy: str, dtype: str, names: Any, record_property: Any
) -> None:
    params, batch, loss = MODELS[model](dtype)
    rules, axes, split = STRATEGIES[strategy]
    plan = ts.plan(params, rules, ts.make_mesh(axes), min_size=0)
    specs = specs_of(model, split)
    body = None
    if "tensor" not in axes:
        own = partial(loss, axes=split) if model in ("tied", "dropped") else loss
        body = manual.value_and_grad(own, split, plan)
    layouts = testing.layouts(plan, batch, specs, by_hand=body is not None)
    layouts = [x for x in layouts if not names or x.name in names]
    report = testing.check_gradients(
        loss, params, batch, plan, layouts=layouts, by_hand=body, batch_specs=specs
    )
    of = {layout.name for layout in layouts}
    assert of == set(names) if names else of > {"plan", "mesh", "axes", "batch", "minibatches"}
    # Minibatches draw other numbers.
    compared(report, of - {"minibatches"} if model == "dropped" else of, record_property)


def specs_of(model: str, split: tuple[str, ...]) -> Any:
    special = {"recurrent": P(None, split), "dropped": (P(split), P())}
    return special.get(model, P(split))


def adam(loss: Any, by_hand: Any = None) -> Any:
    def step(state: Any, batch: Any) -> Any:
        if by_hand is None:
            value, grads = jax.value_and_grad(loss)(state["params"], batch)
        else:
            value, grads = by_hand(state["params"], batch)
        updates, opt = optax.adamw(1e-3).update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, {"loss": value}

    return step


STEPS = [
    ("dropped", "fsdp", "bfloat16", True),
    ("experts", "fsdp", "bfloat16", True),
    ("scanned", "hsdp", "float32", False),
    ("experts", "fsdp x tp", "float32", False),
    *((x, "zero-1", dtype, False) for x in MODELS for dtype in DTYPES),
]


# Tests of wrong steps check that the other leaves are right.
@pytest.mark.parametrize(("model", "strategy", "dtype", "by_hand"), STEPS if SOAK else STEPS[:1])
def test_right_steps_pass(
    model: str, strategy: str, dtype: str, by_hand: bool, record_property: Any
) -> None:
    params, batch, loss = MODELS[model](dtype)
    zero_1 = ([("opt", ts.fsdp("data", min_size=0)), (".*", None)], "data=8", ("data",))
    rules, axes, split = STRATEGIES.get(strategy, zero_1)

    def init() -> Any:
        return {"params": params, "opt": optax.adamw(1e-3).init(params), "step": jnp.int32(0)}

    state, plan = init_sharded(init, rules=rules, mesh=axes, min_size=0)
    of_params = ts.plan(params, rules, plan.mesh, min_size=0)
    own = partial(loss, axes=split) if model == "dropped" else loss
    body = manual.value_and_grad(own, split, of_params) if by_hand else None
    make = shard_map_step if by_hand else jit_step
    step = make(adam(loss, body), plan, batch=specs_of(model, split))
    if model == "dropped" and by_hand:
        assert_nothing_is_called_wrong(step, state, batch)
        return
    report = testing.check_step(step, state, batch)
    assert {path.split("/")[0] for path in report.cells} >= {"step 2: params", "step 1: opt"}
    names = {"plan", "mesh", "axes", *["batch"] * (not by_hand)}
    compared(report, names, record_property)


def assert_nothing_is_called_wrong(step: Any, state: Any, batch: Any) -> None:
    """Of devices with random numbers of their own, what Adam makes of gradients is not known."""
    with pytest.raises(WrongResultError, match="results are not checked") as told:
        testing.check_step(step, state, batch, layouts=() if SOAK else ("plan",))
    text = str(told.value)
    assert "what is not linear in the gradients is not checked" in text
    assert "`check_gradients` compares it" in text
    assert " off " not in text
    assert "wrong" not in text.replace("WrongResultError", "")
    rows = [line for line in text.splitlines() if line.startswith("step ")]
    assert any("params/up" in row and "not checked" in row for row in rows)
    assert any("step 1: opt/0/mu/up" in row and "ok" in row for row in rows)

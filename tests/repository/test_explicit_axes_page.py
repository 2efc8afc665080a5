"""docs/guide/explicit-axes.md: each row of its tables runs."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files import DOCS
from jax.sharding import PartitionSpec as P
from pages import blocks

import treeshard as ts
from treeshard.training import value_and_grad

PAGE = DOCS["docs/guide/explicit-axes.md"]

NAMES: dict[str, Any] = {"jax": jax, "jnp": jnp, "ts": ts, "P": P}
[SETUP] = [block.code for block in blocks(PAGE) if "WEIGHTS = {" in block.code]
exec(SETUP, NAMES)
ROWS, BATCH, WEIGHTS = NAMES["ROWS"], NAMES["BATCH"], NAMES["WEIGHTS"]
AXES = ("data", "fsdp", "tensor")

pytestmark = pytest.mark.usefixtures("compile_cache", "quick_compiles", "loose_promotion")


@pytest.fixture
def loose_promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Row(NamedTuple):
    """A row: what fails, what JAX says, and what to write."""

    fails: str
    says: str
    write: str


def rows(name: str) -> list[Row]:
    table = PAGE.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
    cells = re.findall(r"^\| `(.+)` \| (.*) \| `(.+)` \|$", table, re.MULTILINE)
    assert len(cells) == len(table.strip().splitlines()) - 2
    found: list[Row] = []
    for fails, says, write in cells:  # an empty cell repeats the one above
        found.append(Row(fails, says or found[-1].says, write))
    return found


BOTH, EXPLICIT = rows("both"), rows("explicit")


def values(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([*name.encode(), *shape])
        if name == "ids":
            return rng.integers(0, 24, shape, "int32")
        return rng.standard_normal(shape).astype("float32")

    return {name: drawn(name, shape) for name, (shape, _) in arrays.items()}


def evaluate(expression: str, arrays: dict[str, Any]) -> Any:
    return eval(expression, {**NAMES, **arrays})


def loss_and_result(expression: str, arrays: dict[str, Any]) -> Any:
    """A loss that depends on every element, and what the expression returns."""
    result = evaluate(expression, arrays)
    leaves = [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum((jnp.mean(jnp.sin(x)) for x in leaves), jnp.float32(0)), result


def reference(expression: str) -> Any:
    """The result and the gradients of a line as it is written for one device."""
    with jax.set_mesh(ts.make_mesh("data=1,fsdp=1,tensor=1", devices=jax.devices()[:1])):
        integers = {"ids": values(BATCH)["ids"]}
        floats = {k: v for k, v in values({**BATCH, **WEIGHTS}).items() if k != "ids"}
        loss = lambda floats: loss_and_result(expression, floats | integers)  # noqa: E731
        (_, result), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)
    return result, gradients


def in_a_step(expression: str, kind: Any) -> Any:
    """Its result, the gradients by JAX, and those of the weights by treeshard."""
    mesh = ts.make_mesh("data=2,fsdp=2,tensor=2", axis_types=kind)
    plan = ts.plan(
        values(WEIGHTS), [(f"^{k}$", s) for k, (_, s) in WEIGHTS.items()], mesh, min_size=0
    )

    def step(weights: Any, batch: Any) -> Any:
        batch = {k: ts.with_sharding_constraint(x, BATCH[k][1]) for k, x in batch.items()}
        ids = {"ids": batch.pop("ids")}

        def loss(weights: Any, batch: Any) -> Any:
            return loss_and_result(expression, {**weights, **batch, **ids})

        by_jax = jax.grad(loss, (0, 1), has_aux=True)(weights, batch)
        if kind == "auto":  # there it differentiates means over rows, which these are not
            return weights, (by_jax, {})
        return weights, (by_jax, value_and_grad(lambda w: loss(w, batch)[0])(weights)[1])

    run = ts.jit_step(step, plan, batch=P(ROWS), donate=False)
    _, ((by_jax, result), by_treeshard) = run(ts.shard(values(WEIGHTS), plan), values(BATCH))
    return result, {**by_jax[0], **by_jax[1]}, by_treeshard


CASES = [(row, "explicit") for row in BOTH + EXPLICIT] + [(row, "auto") for row in BOTH]


@pytest.mark.parametrize(("row", "kind"), CASES, ids=lambda x: getattr(x, "write", x))
def test_what_to_write_is_right(row: Row, kind: str) -> None:
    result, gradients = reference(row.fails)
    got, by_jax, by_treeshard = in_a_step(row.write, kind)
    jax.tree.map(same, got, result)
    jax.tree.map(same, by_jax, gradients)
    for name, gradient in by_treeshard.items():
        same(gradient, gradients[name])
    assert kind == "auto" or by_treeshard.keys() == WEIGHTS.keys()


def same(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", BOTH + EXPLICIT, ids=lambda row: row.fails)
def test_what_fails_fails_as_it_says(row: Row) -> None:
    mesh = jax.make_mesh((2, 2, 2), AXES)
    arrays = {**BATCH, **WEIGHTS}
    specs = {name: spec for name, (_, spec) in arrays.items()}
    with jax.set_mesh(mesh):
        placed = ts.shard(values(arrays), specs, mesh)
        error: Exception | None = None
        try:
            jax.eval_shape(lambda arrays: evaluate(row.fails, arrays), placed)
        except Exception as found:
            error = found
        assert error is not None, f"`{row.fails}` does not fail any more: remove its row"
        if row.fails.startswith("ts.unshard("):
            return  # it needs the plan of a step
        assert row.says in str(error)

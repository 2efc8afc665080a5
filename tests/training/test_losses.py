"""`training.value_and_grad` computes what `jax.value_and_grad` computes, of any loss.

A loss that is not a mean over rows differs from the mean of the losses of parts of the batch, so
that a function that differentiated parts one by one would fail here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import QUICK
from treeshard.errors import ShardingTypeError
from treeshard.training import value_and_grad

ROWS, WIDTH, CLASSES = 48, 8, 4
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


PARAMS = {"w": drawn(WIDTH, WIDTH), "out": drawn(WIDTH, CLASSES), "bias": drawn(WIDTH)}
BATCH = {
    "x": drawn(ROWS, WIDTH),
    "y": drawn(ROWS, CLASSES),
    "label": RNG.integers(0, CLASSES, ROWS).astype("int32"),
    # More of the last rows count, so that parts of the batch differ.
    "mask": (RNG.random(ROWS) < np.linspace(0.1, 0.9, ROWS)).astype("float32"),
    "partner": RNG.permutation(ROWS).astype("int32"),
}
WEIGHTS_OF_CLASSES = np.linspace(0.2, 2, CLASSES).astype("float32")
RULES = [("w", P("fsdp")), ("out", P(None, "fsdp")), ("bias", None)]

# ------------------------------------------------------------------ losses


def hidden(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["bias"][None])


def errors(p: Any, b: Any) -> Any:
    """The squared error of each row."""
    return jnp.mean((hidden(p, b["x"]) @ p["out"] - b["y"]) ** 2, 1)


def masked(p: Any, b: Any) -> Any:
    return jnp.sum(errors(p, b) * b["mask"]) / jnp.sum(b["mask"])


def root(p: Any, b: Any) -> Any:
    return jnp.sqrt(jnp.mean(errors(p, b)))


def added_up(p: Any, b: Any) -> Any:
    return jnp.sum(errors(p, b)) / 10


def unbiased(p: Any, b: Any) -> Any:
    return jnp.sum(errors(p, b)) / (len(b["x"]) - 1)


def penalised(p: Any, b: Any) -> Any:
    return jnp.mean(errors(p, b)) + jnp.sum(p["w"] ** 2) / len(b["x"])


def relative(p: Any, b: Any) -> Any:
    return jnp.mean(errors(p, b)) / jnp.mean(b["y"] ** 2)


def batch_norm(p: Any, b: Any) -> Any:
    h = b["x"] @ p["w"]
    h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)
    return jnp.mean((jnp.tanh(h) @ p["out"] - b["y"]) ** 2)


def variance(p: Any, b: Any) -> Any:
    return jnp.mean(jax.nn.relu(1 - jnp.sqrt(hidden(p, b["x"]).var(0) + 1e-4)))


def by_softmax(p: Any, b: Any) -> Any:
    each = errors(p, b)
    return jnp.sum(jax.lax.stop_gradient(jax.nn.softmax(each)) * each)


def window_of_numpy(p: Any, b: Any) -> Any:
    """An array that NumPy makes while JAX traces has as many rows as it is told."""
    return jnp.mean(errors(p, b) * np.hanning(len(b["x"])).astype("float32"))


def meta(p: Any, b: Any) -> Any:
    inner = jax.grad(lambda w: jnp.mean(errors({**p, "w": w}, b)))(p["w"])
    return jnp.mean(errors({**p, "w": p["w"] - 0.5 * inner}, b))


@jax.custom_vjp
def of_unit_norm(x: Any) -> Any:
    """The identity, with a gradient that depends on all rows."""
    return x


of_unit_norm.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.sqrt(jnp.sum(g**2)),))


def clipped_backward(p: Any, b: Any) -> Any:
    return jnp.mean((of_unit_norm(hidden(p, b["x"])) @ p["out"] - b["y"]) ** 2)


def row_by_row(p: Any, b: Any) -> Any:
    """A mean over rows."""
    scores = jax.nn.log_softmax(hidden(p, b["x"]) @ p["out"])
    return -jnp.mean(jnp.sum(scores * jax.nn.one_hot(b["label"], CLASSES), 1))


def contrastive(p: Any, b: Any) -> Any:
    scores = (hidden(p, b["x"]) @ p["out"]) @ b["y"].T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


def hardest(p: Any, b: Any) -> Any:
    return jnp.mean(jax.lax.top_k(errors(p, b), 6)[0])


def median(p: Any, b: Any) -> Any:
    return jnp.median(errors(p, b))


def first_rows(p: Any, b: Any) -> Any:
    return jnp.mean(errors(p, b)[:4])


def partners(p: Any, b: Any) -> Any:
    h = hidden(p, b["x"])
    return jnp.mean(h * h[b["partner"]])


def cumulated(p: Any, b: Any) -> Any:
    return jnp.mean(jnp.cumsum(hidden(p, b["x"]), 0) ** 2) / ROWS


def groups(p: Any, b: Any) -> Any:
    return jnp.max(jax.ops.segment_sum(errors(p, b), b["label"], CLASSES))


def over_rows(p: Any, b: Any) -> Any:
    step = lambda h, x: (jnp.tanh(x @ p["w"] + h), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, jnp.zeros(WIDTH), b["x"])[0])


TYPED = (masked, root, added_up, unbiased, penalised, relative, batch_norm, variance, by_softmax)
TYPED += (window_of_numpy, meta, clipped_backward, row_by_row)
# On Explicit axes JAX has no types for what these do with rows that are split.
UNTYPED = (contrastive, hardest, median, first_rows, partners, cumulated, groups, over_rows)

# ------------------------------------------------------------------ beside one device


def in_a_step(losses: Any, mesh: Any) -> tuple[Any, Any]:
    """`run(params, batch)`, which returns value and gradients of each loss, and its plan."""
    plan = ts.plan(PARAMS, RULES, mesh, min_size=0)

    def step(params: Any, batch: Any) -> Any:
        return params, [value_and_grad(gathered(loss))(params, batch) for loss in losses]

    return ts.jit_step(step, plan, batch=P(tuple(mesh.axis_names)), donate=False), plan


def gathered(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, batch: loss(ts.unshard(params), batch)


def assert_close(found: Any, expected: Any, name: str = "") -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    """The value and the gradients of each loss."""

    def of_all(params: Any, batch: Any) -> Any:
        return {f.__name__: jax.value_and_grad(f)(params, batch) for f in (*TYPED, *UNTYPED)}

    return jax.device_get(jax.jit(of_all, compiler_options=QUICK)(PARAMS, BATCH))


@pytest.mark.parametrize(
    ("axes", "kind", "losses"),
    [
        ("data=8,fsdp=1", "auto", (*TYPED, *UNTYPED)),
        ("data=2,fsdp=4", "auto", (*TYPED, *UNTYPED)),
        ("data=2,fsdp=4", "explicit", TYPED),
    ],
)
def test_values_and_gradients_are_those_of_one_device(
    axes: str, kind: str, losses: Any, on_one_device: dict[str, Any]
) -> None:
    step, plan = in_a_step(losses, ts.make_mesh(axes, axis_types=kind))
    found = ts.gather(step(ts.shard(PARAMS, plan), BATCH)[1])
    for loss, of_loss in zip(losses, found, strict=True):
        assert_close(of_loss, on_one_device[loss.__name__], loss.__name__)


def test_what_has_no_type_is_an_error_and_not_another_number() -> None:
    mesh = ts.make_mesh("data=2,fsdp=4", axis_types="explicit")
    for loss in UNTYPED:
        step, plan = in_a_step([loss], mesh)
        with pytest.raises(ShardingTypeError, match="JAX cannot tell"):
            step.lower(plan.structs, BATCH)


def test_arguments_that_are_not_rows_are_not_split() -> None:
    """Weights of four classes, and the weights of a teacher, on eight devices."""
    teacher = {"w": drawn(WIDTH, WIDTH), "out": drawn(WIDTH, CLASSES), "bias": drawn(WIDTH)}

    def distilled(p: Any, b: Any, of_classes: Any, teacher: Any) -> Any:
        wanted = jax.nn.softmax(hidden(teacher, b["x"]) @ teacher["out"])
        scores = jax.nn.log_softmax(hidden(p, b["x"]) @ p["out"])
        return -jnp.mean(wanted * scores * of_classes[None]), {"scores": scores.T @ scores}

    def step(params: Any, batch: Any) -> Any:
        of_loss = value_and_grad(distilled, has_aux=True)
        return params, of_loss(params, batch, jnp.asarray(WEIGHTS_OF_CLASSES), teacher)

    plan = ts.plan(PARAMS, RULES, ts.make_mesh("data=8,fsdp=1"), min_size=0)
    found = ts.jit_step(step, plan, donate=False)(ts.shard(PARAMS, plan), BATCH)[1]
    expected = jax.jit(jax.value_and_grad(distilled, has_aux=True), compiler_options=QUICK)
    assert_close(ts.gather(found), expected(PARAMS, BATCH, WEIGHTS_OF_CLASSES, teacher))

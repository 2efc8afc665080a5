"""Gradient steps, and how often a program should reduce their gradients, over which axes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.targets.counting import count_in_loops
from treeshard.communication import collectives
from treeshard.communication._program import read_program
from treeshard.training import accumulate_gradients, value_and_grad

LAYERS, MINIBATCHES = 6, 4


class Reduced(NamedTuple):
    """What reduces gradients in a step: a kind of collective, and its axes.

    `part` is its payload in a step as a multiple of the bytes of all layers, and `depth` the number
    of loops that it runs in.
    """

    kind: str
    axes: tuple[str, ...]
    runs: int
    part: float
    depth: int


class Case(NamedTuple):
    """A mean over rows of stacked layers, and what is right to reduce its gradients.

    `passes` are the axes for `accumulate_gradients` on Auto axes, or `None` for one pass.
    """

    loss: Callable[[Any, Any], Any]
    axes: str
    spec: P
    passes: tuple[str, ...] | None
    reduced: tuple[Reduced, ...]


def layered(params: Any, x: Any) -> Any:
    """Layers in a scan that gathers each where it is used, and again for the backward pass."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ ts.unshard(w)), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0] ** 2)


def columns(params: Any, x: Any) -> Any:
    """The same, with layers whose columns are split over `tensor`."""

    def layer(x: Any, w: Any) -> Any:
        x = jnp.tanh(x @ ts.unshard(w))
        return ts.with_sharding_constraint(x, P("fsdp")), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0] ** 2)


def replicated(params: Any, x: Any) -> Any:
    """ZeRO-1: weights that are full on every device."""
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


HSDP = "data=2,fsdp=4"
FSDP, TENSOR = P(None, "fsdp"), P(None, "fsdp", "tensor")
IN_PASSES = LAYERS * MINIBATCHES
SHARDS_OVER_DATA = Reduced("all-reduce", ("data",), 1, 1 / 4, 0)
ONE_SUM = Reduced("all-reduce", ("data", "fsdp"), 1, 1, 0)


def scattered(runs: int, part: float, depth: int) -> Reduced:
    return Reduced("reduce-scatter", ("fsdp",), runs, part, depth)


CASES = {
    "fsdp": Case(layered, "fsdp=8", FSDP, None, (scattered(LAYERS, 1, 1),)),
    "hsdp": Case(layered, HSDP, FSDP, None, (SHARDS_OVER_DATA, scattered(LAYERS, 1, 1))),
    "fsdp x tp": Case(columns, "fsdp=4,tensor=2", TENSOR, None, (scattered(LAYERS, 0.5, 1),)),
    "zero-1": Case(replicated, HSDP, P(), None, (ONE_SUM,)),
    "fsdp in passes": Case(layered, "fsdp=8", FSDP, (), (scattered(IN_PASSES, MINIBATCHES, 2),)),
    "hsdp in passes": Case(
        layered, HSDP, FSDP, ("data",), (SHARDS_OVER_DATA, scattered(IN_PASSES, MINIBATCHES, 2))
    ),
    "zero-1 in passes": Case(replicated, HSDP, P(), ("data", "fsdp"), (ONE_SUM,)),
}
# On Auto axes compilers choose over which axes they reduce gradients in loops, if no function of
# minibatches is given the axes.
CHOSEN_BY_COMPILERS = {"hsdp", "zero-1"}
NAMES_AND_KINDS = [
    *((name, "explicit") for name in CASES),
    *((name, "auto") for name in CASES if name not in CHOSEN_BY_COMPILERS),
]


def state(width: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0).standard_normal((LAYERS, width, width))
    return {"w": (drawn / width**0.5).astype("float32")}


def in_passes(
    loss: Callable[..., Any],
    axes: tuple[str, ...] | None,
    minibatches: int = MINIBATCHES,
    differentiate: Callable[..., Any] = value_and_grad,
) -> Callable[..., Any]:
    """The value and the gradients of a loss, of several minibatches."""

    def run(params: Any, batch: Any) -> Any:
        def of_a_minibatch(rows: Any, key: Any) -> Any:
            value, grads = differentiate(loss)(params, rows)
            return grads, {"value": value}

        # Where axes are not named, gradients are summed over them in each pass.
        named = axes or None
        grads, means = accumulate_gradients(of_a_minibatch, batch, minibatches, axis_names=named)
        return means["value"], grads

    return run


def returning_gradients(
    plan: ts.Plan, differentiated: Callable[..., Any], make: Callable[..., Any] = ts.jit_step
) -> Any:
    """A step whose new state are the gradients that `differentiated(params, batch)` returns."""

    def step(params: Any, batch: Any) -> Any:
        value, grads = differentiated(params, batch)
        return grads, value

    return make(step, plan, batch=P(rows_of(plan.mesh)), donate=False)


def rows_of(mesh: Mesh) -> tuple[str, ...]:
    """The axes that split the rows of a batch."""
    return tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names)


def gradient_step(
    loss: Callable[..., Any], mesh: Mesh, spec: P, width: int, differentiate: Callable[..., Any]
) -> tuple[Any, ts.Plan, np.ndarray]:
    """A step that returns the gradients of layers as its state, its plan, and a batch."""
    plan = ts.plan(state(width), [("w", spec)], mesh, min_size=0)
    x = np.random.default_rng(1).standard_normal((32, width)).astype("float32")
    return returning_gradients(plan, differentiate(loss)), plan, x


def step_of(case: Case, mesh: Mesh, width: int) -> tuple[Any, ts.Plan, np.ndarray]:
    differentiate = partial(value_and_grad, axis_names=rows_of(mesh))
    if case.passes is not None:
        own = value_and_grad if case.passes else differentiate
        differentiate = lambda loss: in_passes(loss, case.passes, differentiate=own)  # noqa: E731
    return gradient_step(case.loss, mesh, case.spec, width, differentiate)


def assert_reduced(compiled: jax.stages.Compiled, expected: Sequence[Reduced], width: int) -> None:
    """Asserts what reduces the gradients in a program, how often, and in how many loops."""
    size = LAYERS * width * width * 4
    found: dict[tuple[str, Any], list[int]] = {}
    of_activations = set()
    for one in collectives(compiled):
        # The loss of a part of the batch is a `float32[1]`.
        if one.kind == "all-gather" or not one.rank or one.bytes == 4:
            continue
        if one.axes == ("tensor",):
            of_activations.add(one.kind)
            continue
        runs_and_bytes = found.setdefault((one.kind, one.axes), [0, 0])
        assert one.count is not None
        assert one.bytes is not None
        runs_and_bytes[0] += one.count
        runs_and_bytes[1] += one.count * one.bytes
    assert found == {(x.kind, x.axes): [x.runs, x.part * size] for x in expected}

    on_gpus = read_program(compiled).platform in ("gpu", "cuda")
    in_passes = max(x.depth for x in expected) == 2
    trips = (MINIBATCHES, LAYERS) if in_passes else (LAYERS, 1)
    counted = count_in_loops(compiled.as_text() or "", trips=trips)
    for kind in {x.kind for x in expected} - of_activations:
        depths = {depth: bytes_ for (k, depth), bytes_ in counted.items() if k == kind}
        planned = {x.depth: x.part * size for x in expected if x.kind == kind}
        if max(planned) > 0 and on_gpus:
            # Their compiler takes the first or the last trip out of a loop.
            assert max(depths) == max(planned)
            assert sum(depths.values()) == sum(planned.values())
        else:
            assert depths == planned

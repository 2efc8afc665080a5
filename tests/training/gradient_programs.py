"""Gradient steps, and how often a program should reduce their gradients, over which axes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.targets.counting import count_in_loops
from treeshard.communication import collectives
from treeshard.communication._program import platform_of
from treeshard.training import accumulate_gradients, value_and_grad

LAYERS, MINIBATCHES = 6, 4


class Reduced(NamedTuple):
    """What a program moves to reduce gradients, with one kind of collective along some axes.

    Attributes:
        kind: `"reduce-scatter"`, or `"all-reduce"`.
        axes: The axes.
        runs: How often it runs in a step.
        part: Its payload in a step, as a multiple of the bytes of all layers.
        depth: The number of loops that it runs in.
    """

    kind: str
    axes: tuple[str, ...]
    runs: int
    part: float
    depth: int


class Case(NamedTuple):
    """A loss of stacked layers, how they are sharded, and what reduces their gradients.

    Attributes:
        loss: `loss(params, rows)`, a mean over rows.
        axes: The axes of the mesh.
        spec: The spec of the layers.
        passes: How to take minibatches: the axes for `accumulate_gradients`; `None` for one pass.
        remat: Whether layers are gathered anew for the backward pass.
        reduced: What is right.
    """

    loss: Callable[[Any, Any], Any]
    axes: str
    spec: P
    passes: tuple[str, ...] | None
    remat: bool
    reduced: tuple[Reduced, ...]


# ------------------------------------------------------------------ losses


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


def mapped(params: Any, x: Any) -> Any:
    """Rows one at a time, through layers that are gathered before."""
    weights = ts.unshard(params)["w"]

    def through(row: Any) -> Any:
        return jax.lax.scan(lambda row, w: (jnp.tanh(row @ w), None), row, weights)[0]

    return jnp.mean(jax.vmap(through)(x) ** 2)


def replicated(params: Any, x: Any) -> Any:
    """ZeRO-1: weights that are full on every device."""
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


# ------------------------------------------------------------------ cases


FSDP, TENSOR = P(None, "fsdp"), P(None, "fsdp", "tensor")
IN_PASSES = LAYERS * MINIBATCHES
SHARDS_OVER_DATA = Reduced("all-reduce", ("data",), 1, 1 / 4, 0)
ONE_SUM = Reduced("all-reduce", ("data", "fsdp"), 1, 1, 0)


def scattered(runs: int, part: float, depth: int) -> Reduced:
    return Reduced("reduce-scatter", ("fsdp",), runs, part, depth)


CASES = {
    "fsdp": Case(layered, "fsdp=8", FSDP, None, True, (scattered(LAYERS, 1, 1),)),
    "hsdp": Case(
        layered,
        "data=2,fsdp=4",
        FSDP,
        None,
        True,
        (SHARDS_OVER_DATA, scattered(LAYERS, 1, 1)),
    ),
    "fsdp x tp": Case(columns, "fsdp=4,tensor=2", TENSOR, None, True, (scattered(LAYERS, 0.5, 1),)),
    "vmap": Case(
        mapped,
        "data=2,fsdp=4",
        FSDP,
        None,
        False,
        (SHARDS_OVER_DATA, scattered(1, 1, 0)),
    ),
    "zero-1": Case(replicated, "data=2,fsdp=4", P(), None, False, (ONE_SUM,)),
    "fsdp in passes": Case(
        layered,
        "fsdp=8",
        FSDP,
        (),
        True,
        (scattered(IN_PASSES, MINIBATCHES, 2),),
    ),
    "hsdp in passes": Case(
        layered,
        "data=2,fsdp=4",
        FSDP,
        ("data",),
        True,
        (SHARDS_OVER_DATA, scattered(IN_PASSES, MINIBATCHES, 2)),
    ),
    "fsdp x tp in passes": Case(
        columns,
        "fsdp=4,tensor=2",
        TENSOR,
        (),
        True,
        (scattered(IN_PASSES, MINIBATCHES / 2, 2),),
    ),
    "zero-1 in passes": Case(replicated, "data=2,fsdp=4", P(), ("data", "fsdp"), False, (ONE_SUM,)),
}
# On Auto axes compilers choose over which axes they reduce gradients in loops, if no function of
# minibatches is given the axes.
CHOSEN_BY_COMPILERS = {"hsdp", "vmap", "zero-1"}
NAMES_AND_KINDS = [
    *((name, "explicit") for name in CASES),
    *((name, "auto") for name in CASES if name not in CHOSEN_BY_COMPILERS),
]


# ------------------------------------------------------------------ steps


def mesh_of_kind(axes: str, kind: str, topology: str | None = None) -> Mesh:
    """A mesh whose axes are all `"auto"`, or all `"explicit"`."""
    kinds = {axis.split("=")[0]: kind for axis in axes.split(",")}
    return ts.make_mesh(axes, axis_types=kinds, topology=topology)


def state(width: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0).standard_normal((LAYERS, width, width))
    return {"w": (drawn / width**0.5).astype("float32")}


def in_passes(loss: Callable[..., Any], axes: tuple[str, ...]) -> Callable[..., Any]:
    """The value and the gradients of a loss, of several minibatches."""

    def run(params: Any, x: Any) -> Any:
        def of_a_minibatch(rows: Any, key: Any) -> Any:
            value, grads = value_and_grad(loss)(params, rows)
            return grads, {"value": value}

        # Where axes are not named, gradients of Auto axes are summed over them in each pass.
        named = axes or None
        grads, means = accumulate_gradients(of_a_minibatch, x, MINIBATCHES, axis_names=named)
        return means["value"], grads

    return run


def gradient_step(
    loss: Callable[..., Any], mesh: Mesh, spec: P, width: int, differentiate: Callable[..., Any]
) -> tuple[Any, ts.Plan, np.ndarray]:
    """A step that returns gradients as its state, its plan, and a batch."""
    plan = ts.plan(state(width), [("w", spec)], mesh, min_size=0)

    def step(params: Any, x: Any) -> Any:
        value, grads = differentiate(loss)(params, x)
        return grads, value

    rows = tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names)
    x = np.random.default_rng(1).standard_normal((32, width)).astype("float32")
    return ts.jit_step(step, plan, batch=P(rows), donate=False), plan, x


def step_of(case: Case, mesh: Mesh, width: int) -> tuple[Any, ts.Plan, np.ndarray]:
    differentiate = value_and_grad
    if case.passes is not None:
        differentiate = lambda loss: in_passes(loss, case.passes)  # noqa: E731
    return gradient_step(case.loss, mesh, case.spec, width, differentiate)


# ------------------------------------------------------------------ what compilers make of them


def by_all_reduce(reduced: Sequence[Reduced]) -> tuple[Reduced, ...]:
    """The same where the compiler for CPUs, on Auto axes, all-reduces what it could scatter."""
    return tuple(one._replace(kind="all-reduce") for one in reduced)


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

    on_gpus = platform_of(compiled) in ("gpu", "cuda")
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

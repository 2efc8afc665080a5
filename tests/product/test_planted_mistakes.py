"""Mistakes planted in correct steps: each is reported with a hint that leads to it, and the correct
step has nothing to report. On CPUs, and in the programs of TPUs and GPUs.

Programs are compiled and not run. Those of TPUs and GPUs are stored in `tests/targets/mistakes`, as
`tests/targets/make_mistakes.py` wrote them. With TREESHARD_TARGETS=1 they are compiled again, which
needs `treeshard[tpu,cuda]`.
"""

import json
import lzma
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from helpers import struct
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual
from treeshard.communication._comparison import compare_step
from treeshard.communication._program import read_program
from treeshard.training import value_and_grad

STORED = Path(__file__).parents[1] / "targets" / "mistakes"
TARGETS = ("v5e:2x4", "h100:8")
BACKENDS = ["cpu", *TARGETS, *[f"live {x}" for x in TARGETS if os.environ.get("TREESHARD_TARGETS")]]

HSDP, FSDP = "data=2,fsdp=4", "fsdp=8"
BOTH = P(("data", "fsdp"))
# Large enough that compilers for TPUs scatter gradients: they all-reduce those of a few KiB.
ROWS, WIDTH, HIDDEN = 512, 512, 2048
X = struct(ROWS, WIDTH)
TREE = {"down": struct(HIDDEN, WIDTH), "up": struct(WIDTH, HIDDEN)}
BY_SPEC = [("up|down", P("fsdp"))]
BY_TACTIC = [(".*", ts.fsdp("fsdp"))]


class Report(list[str]):
    """The findings, warnings and errors of one step."""

    def __str__(self) -> str:
        return "\n".join(self) or "nothing"


# ------------------------------------------------------------------ a step and its report


def good_loss(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
    p = ts.unshard(p, plan.specs, "fsdp")
    h = ts.with_sharding_constraint(jnp.tanh(x @ p["up"]), BOTH)
    return jnp.mean((h @ p["down"]) ** 2)


def sgd(loss: Any, gradient: Any = value_and_grad) -> Any:
    def step(state: Any, x: Any) -> Any:
        value, grads = gradient(loss)(state, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step


def momentum(loss: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        value, grads = value_and_grad(loss)(state["model"], x)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"]["mu"], grads)
        model = jax.tree.map(lambda p, m: p - 0.1 * m, state["model"], mu)
        return {"model": model, "opt": {"mu": mu}}, value

    return step


def report(
    mesh: Any,
    rules: Any = BY_SPEC,
    tree: Any = TREE,
    loss: Any = good_loss,
    train: Any = sgd,
    batch: Any = BOTH,
    x: Any = X,
    make: Any = ts.jit_step,
    compile_: Callable[[Any], Any] = lambda lowered: lowered.compile(),
) -> Report:
    """Plans, compiles and compares a step, and collects all that is said about it."""
    found = Report()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ts.ShardingWarning)
        try:
            plan = ts.plan(tree, rules, mesh, min_size=0)
            found += map(str, plan.findings)
            plan.check()
            of_model = ts.plan(tree.get("model", tree), rules, mesh, min_size=0)
            step = make(train(lambda p, x: loss(p, x, of_model)), plan, batch=batch)
            program = compile_(step.lower(plan.structs, x))
            roles, read = step.roles(plan.structs, x), read_program(program, plan.mesh)
            compared = compare_step(plan, step.batch_specs, roles, read)
            found += map(str, compared.unplanned)
        except (ts.TreeShardError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    found += [str(one.message) for one in warned]
    return found


class Case(NamedTuple):
    """A mistake and its correct twin, as arguments of `report`.

    Attributes:
        axes: The mesh.
        leads: What the hint must say.
        wrong: The arguments of the mistake alone.
        right: Those of its twin.
        both: Those of both.
    """

    axes: str
    leads: str
    wrong: dict[str, Any]
    right: dict[str, Any] = {}  # noqa: RUF012
    both: dict[str, Any] = {}  # noqa: RUF012

    def options(self, side: str) -> dict[str, Any]:
        return self.both | (self.wrong if side == "wrong" else self.right)


# ------------------------------------------------------------------ losses


def no_unshard(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


def constrained_as(spec: Any) -> Any:
    def loss(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
        p = ts.unshard(p, plan.specs, "fsdp")
        h = ts.with_sharding_constraint(jnp.tanh(x @ p["up"]), spec)
        return jnp.mean((h @ p["down"]) ** 2)

    return loss


LAYERS = {"v": struct(8, WIDTH, WIDTH), "w": struct(8, WIDTH, WIDTH)}


def scanned(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
    def layer(x: Any, one: Any) -> Any:
        one = ts.unshard(one, ts.layer_specs(plan.specs), "fsdp")
        return jnp.tanh(x @ one["v"] @ one["w"]), None

    return jnp.mean(lax.scan(layer, x, p)[0] ** 2)


def with_gradients(do: Any) -> Any:
    """A step that does something with its gradients."""

    def train(loss: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            value, grads = value_and_grad(loss)(state, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, do(grads)), value

        return step

    return train


def to_host(grads: Any) -> Any:
    io_callback(lambda x: None, None, grads["up"])
    return grads


def norm_to_host(grads: Any) -> Any:
    io_callback(lambda x: None, None, jnp.sqrt(jnp.sum(grads["up"] ** 2)))
    return grads


def minibatches(reduce_once: bool) -> Any:
    def train(loss: Any) -> Any:
        def by_library(state: Any, x: Any) -> Any:
            def gradients(x: Any, _: Any) -> Any:
                value, grads = value_and_grad(free)(state, x)
                return grads, value

            axes = ("data", "fsdp")
            grads, value = ts.training.accumulate_gradients(gradients, x, 4, axis_names=axes)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

        # `accumulate_gradients` has its own constraints.
        def free(p: Any, x: Any) -> jax.Array:
            p = ts.unshard(p, P("fsdp"), "fsdp")
            return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

        def by_loop(state: Any, x: Any) -> Any:
            def one(total: Any, x: Any) -> Any:
                value, grads = value_and_grad(loss)(state, x)
                return jax.tree.map(jnp.add, total, grads), value

            x = x.reshape(-1, 4, WIDTH).swapaxes(0, 1)
            x = ts.with_sharding_constraint(x, P(None, ("data", "fsdp")))
            grads, values = lax.scan(one, jax.tree.map(jnp.zeros_like, state), x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), values.mean()

        return by_library if reduce_once else by_loop

    return train


def minibatches_by_hand(reduce_once: bool) -> Any:
    """A step of `shard_map_step` that gathers its weights before the loop."""

    def loss(p: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    def scattered(grads: Any) -> Any:
        return jax.tree.map(lambda g: lax.psum_scatter(g, "fsdp", tiled=True) / 8, grads)

    def train(_: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            full = manual.gather_params(state, "fsdp", {"up": P("fsdp"), "down": P("fsdp")})

            def one(total: Any, x: Any) -> Any:
                value, grads = jax.value_and_grad(loss)(full, x)
                grads = grads if reduce_once else scattered(grads)
                return jax.tree.map(jnp.add, total, grads), value

            zeros = jax.tree.map(jnp.zeros_like, full if reduce_once else state)
            zeros = manual.vary(zeros, "fsdp")
            grads, values = lax.scan(one, zeros, x.reshape(4, -1, WIDTH))
            grads = scattered(grads) if reduce_once else grads
            new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
            return new, lax.pmean(values.mean(), "fsdp")

        return step

    return train


STATE = {"model": TREE, "opt": {"mu": TREE}}

CASES = {
    "batch not split, fsdp tactic": Case(
        FSDP, "batch=P", {"batch": P()}, {"batch": None}, {"rules": BY_TACTIC}
    ),
    "batch over data only, specs": Case(
        HSDP, "batch=P", {"batch": P("data"), "loss": constrained_as(P("data"))}
    ),
    "batch over fsdp only": Case(
        HSDP,
        "batch-not-split: 'data' does not split the batch",
        {"batch": P("fsdp"), "loss": constrained_as(P("fsdp"))},
    ),
    "optimizer state on another dim": Case(
        HSDP,
        "Plan.follow",
        {"rules": [("opt", P(None, "fsdp")), *BY_SPEC]},
        both={"tree": STATE, "train": momentum},
    ),
    "constraint on the wrong dim": Case(
        HSDP, "constraint", {"loss": constrained_as(P(None, ("data", "fsdp")))}
    ),
    "no unshard": Case(FSDP, "unshard", {"loss": no_unshard}, both={"batch": P("fsdp")}),
    "sharded scan dim": Case(
        FSDP,
        "Shard another dim",
        {"rules": [(".*", P("fsdp"))]},
        {"rules": [(".*", P(None, "fsdp"))]},
        {"tree": LAYERS, "loss": scanned, "batch": P("fsdp")},
    ),
    "gradients by jax alone": Case(
        HSDP,
        "`training.value_and_grad(loss, axis_names=...)` scatters",
        {"train": lambda loss: sgd(loss, jax.value_and_grad)},
    ),
    "a leaf to the host in each step": Case(
        HSDP,
        "callback of 4.0 MiB to the host in each step",
        {"train": with_gradients(to_host)},
        {"train": with_gradients(norm_to_host)},
    ),
    "gather in the minibatch loop": Case(
        HSDP,
        "accumulate_gradients",
        {"train": minibatches(reduce_once=False)},
        {"train": minibatches(reduce_once=True)},
        {"x": struct(4 * ROWS, WIDTH)},
    ),
    "gradients reduced in the minibatch loop": Case(
        FSDP,
        "inside-loop: down, up: ",
        {"train": minibatches_by_hand(reduce_once=False)},
        {"train": minibatches_by_hand(reduce_once=True)},
        {"make": ts.shard_map_step, "batch": P("fsdp"), "x": struct(4 * ROWS, WIDTH)},
    ),
}


# ------------------------------------------------------------------ backends


@cache
def stored(target: str) -> dict[str, str]:
    """The texts of the programs for a target, by the name of the case and its side."""
    return json.loads(
        lzma.decompress((STORED / f"{target.replace(':', '_')}.json.xz").read_bytes())
    )


def report_on(backend: str, name: str, side: str) -> Report:
    axes, options = CASES[name].axes, CASES[name].options(side)
    if backend == "cpu":
        return report(ts.make_mesh(axes), **options)
    if "live" in backend:
        return report(ts.make_mesh(axes, topology=backend.split()[1]), **options)
    text = stored(backend).get(f"{name}/{side}", "")  # none, if the step cannot be compiled
    return report(ts.make_mesh(axes), compile_=lambda lowered: text, **options)


# A case that is not for all backends, and those it is for.
ONLY = {
    "gradients by jax alone": TARGETS,  # CPUs all-reduce whatever one writes
    # JAX lowers callbacks to GPUs only where there is one.
    "a leaf to the host in each step": ("cpu", "v5e:2x4"),
}
ON_BACKENDS = [
    (backend, name)
    for backend in BACKENDS
    for name in CASES
    if name not in ONLY or backend.removeprefix("live ") in ONLY[name]
]


def distinct_steps() -> Iterator[tuple[str, str]]:
    """The cases whose correct steps differ: many mistakes are made in one and the same step."""
    seen: list[tuple[str, str, dict[str, Any]]] = []
    for backend, name in ON_BACKENDS:
        step = (backend, CASES[name].axes, CASES[name].options("right"))
        if step not in seen:
            seen.append(step)
            yield backend, name


@pytest.mark.parametrize(("backend", "name"), ON_BACKENDS)
def test_a_mistake_is_reported(backend: str, name: str) -> None:
    found = report_on(backend, name, "wrong")
    assert CASES[name].leads in str(found)


@pytest.mark.parametrize("target", TARGETS)
def test_both_reductions_of_a_gradient_in_a_loop_are_reported(target: str) -> None:
    found = str(report_on(target, "gather in the minibatch loop", "wrong"))
    for kind in ("reduce-scatter", "all-reduce"):
        assert f"inside-loop: down, up: {kind} of gradients in each trip of a loop" in found


@pytest.mark.parametrize(("backend", "name"), [*distinct_steps()])
def test_the_correct_step_has_nothing_to_report(backend: str, name: str) -> None:
    assert str(report_on(backend, name, "right")) == "nothing"

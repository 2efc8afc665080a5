"""Mistakes planted in correct steps: each is reported with a hint that leads to it, and the correct
step has nothing to report.

A backend is a function from axes to a mesh. Programs are compiled for it and not run, so that the
devices of the mesh need not be attached.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from helpers import struct
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

import treeshard as ts
from treeshard import manual
from treeshard.training import value_and_grad

BACKENDS: dict[str, Callable[[str], Any]] = {"cpu": ts.make_mesh}

HSDP, FSDP = "data=2,fsdp=4", "fsdp=8"
BOTH = P(("data", "fsdp"))
X = struct(16, 16)
TREE = {"down": struct(64, 16), "up": struct(16, 64)}
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
    **options: Any,
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
            found += map(str, step.communication(plan.structs, x, **options).unplanned)
        except (ts.TreeShardError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    found += [str(one.message) for one in warned]
    return found


class Case(NamedTuple):
    """A mistake and its correct twin, as arguments of `report`, and what the hint must say."""

    axes: str
    wrong: dict[str, Any]
    right: dict[str, Any]
    leads: str


# ------------------------------------------------------------------ losses


def no_unshard(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


def constrained_as(spec: Any) -> Any:
    def loss(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
        p = ts.unshard(p, plan.specs, "fsdp")
        h = ts.with_sharding_constraint(jnp.tanh(x @ p["up"]), spec)
        return jnp.mean((h @ p["down"]) ** 2)

    return loss


LAYERS = {"norm": struct(8, 16), "w": struct(8, 16, 16)}


def scanned(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
    def layer(x: Any, one: Any) -> Any:
        one = ts.unshard(one, ts.layer_specs(plan.specs), "fsdp")
        return jnp.tanh((x * one["norm"][None]) @ one["w"]), None

    return jnp.mean(lax.scan(layer, x, p)[0] ** 2)


def cast(before: bool) -> Any:
    def loss(p: Any, x: Any, plan: ts.Plan) -> jax.Array:
        to_bf16 = lambda tree: jax.tree.map(lambda a: a.astype("bfloat16"), tree)  # noqa: E731
        p = to_bf16(p) if before else p
        p = to_bf16(ts.unshard(p, plan.specs, "fsdp"))
        h = ts.with_sharding_constraint(jnp.tanh(x.astype("bfloat16") @ p["up"]), BOTH)
        return jnp.mean((h @ p["down"]).astype("float32") ** 2)

    return loss


def half(p: Any, x: Any) -> jax.Array:
    p = jax.tree.map(lambda a: a.astype("bfloat16"), p)
    h = jnp.tanh(x.astype("bfloat16") @ p["up"]) @ p["down"]
    return jnp.mean(h.astype("float32") ** 2)


def by_hand(mean: bool = True, dtype: Any = None) -> Any:
    """A step of `shard_map_step`."""

    def train(_: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            plan = ts.plan(TREE, BY_SPEC, FSDP, min_size=0)
            value, grads = manual.value_and_grad(half, "fsdp", plan, dtype=dtype)(state, x)
            value = value if mean else value + x.sum()
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

        return step

    return train


def sync_by_hand(sync: Any) -> Any:
    """A step of `shard_map_step` that reduces its gradients itself."""

    def train(_: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            plan = ts.plan(TREE, BY_SPEC, HSDP, min_size=0)
            loss = lambda p: half(manual.gather_params(p, "fsdp", plan), x)  # noqa: E731
            value, grads = jax.value_and_grad(loss)(manual.vary(state, ("data", "fsdp")))
            grads = sync(grads, plan)
            new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
            return new, lax.pmean(value, ("data", "fsdp"))

        return step

    return train


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


def on_one_device(grads: Any) -> Any:
    return jax.tree.map(lambda g: jax.device_put(g, jax.devices()[0]), grads)


def on_one_sharding(grads: Any) -> Any:
    one = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda g: jax.device_put(g, one), grads)


def on_the_mesh(grads: Any) -> Any:
    return ts.with_sharding_constraint(grads, P("fsdp"))


def counting(loss: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        model, value = sgd(loss)(state["model"], x)
        return {"model": model, "count": state["count"] + 1}, value

    return step


def in_bfloat16(dtype: Any) -> Any:
    def train(loss: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            value, grads = value_and_grad(loss)(state, x)
            new = lambda p, g: (p.astype("float32") - 0.1 * g.astype("float32")).astype(dtype)  # noqa: E731
            return jax.tree.map(new, state, grads), value

        return step

    return train


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

            x = x.reshape(-1, 4, 16).swapaxes(0, 1)
            x = ts.with_sharding_constraint(x, P(None, ("data", "fsdp")))
            grads, values = lax.scan(one, jax.tree.map(jnp.zeros_like, state), x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), values.mean()

        return by_library if reduce_once else by_loop

    return train


STATE = {"model": TREE, "opt": {"mu": TREE}}

HALF = {name: struct(*leaf.shape, dtype="bfloat16") for name, leaf in TREE.items()}
HALF_X = struct(16, 16, dtype="bfloat16")

CASES = {
    "batch not split, fsdp tactic": Case(
        FSDP, {"rules": BY_TACTIC, "batch": P()}, {"rules": BY_TACTIC, "batch": None}, "batch=P"
    ),
    "batch not split, specs": Case(
        FSDP, {"batch": P(), "loss": constrained_as(P())}, {"batch": P("fsdp")}, "batch=P"
    ),
    "batch forgotten, specs": Case(
        FSDP, {"batch": None, "loss": constrained_as(P())}, {"batch": P("fsdp")}, "batch=P"
    ),
    "batch over data only, fsdp tactic": Case(
        HSDP, {"rules": BY_TACTIC, "batch": P("data")}, {"rules": BY_TACTIC}, "batch=P"
    ),
    "batch over data only, specs": Case(
        HSDP, {"batch": P("data"), "loss": constrained_as(P("data"))}, {}, "batch=P"
    ),
    "batch over fsdp only": Case(
        HSDP, {"batch": P("fsdp"), "loss": constrained_as(P("fsdp"))}, {}, "batch=P"
    ),
    "optimizer state replicated": Case(
        HSDP,
        {"tree": STATE, "train": momentum, "rules": [("opt", None), *BY_SPEC]},
        {"tree": STATE, "train": momentum},
        "opt/",
    ),
    "optimizer state on another dim": Case(
        HSDP,
        {"tree": STATE, "train": momentum, "rules": [("opt", P(None, "fsdp")), *BY_SPEC]},
        {"tree": STATE, "train": momentum},
        "Plan.follow",
    ),
    "constraint on the wrong dim": Case(
        HSDP, {"loss": constrained_as(P(None, ("data", "fsdp")))}, {}, "constraint"
    ),
    "activation replicated": Case(HSDP, {"loss": constrained_as(P())}, {}, "constraint"),
    "no unshard": Case(
        FSDP, {"loss": no_unshard, "batch": P("fsdp")}, {"batch": P("fsdp")}, "unshard"
    ),
    "sharded scan dim": Case(
        FSDP,
        {
            "tree": LAYERS,
            "rules": [(".*", P("fsdp"))],
            "loss": scanned,
            "batch": P("fsdp"),
            "scan": True,
        },
        {
            "tree": LAYERS,
            "rules": [(".*", P(None, "fsdp"))],
            "loss": scanned,
            "batch": P("fsdp"),
            "scan": True,
        },
        "Shard another dim",
    ),
    "f32 gathered, bf16 meant": Case(
        HSDP,
        {"loss": cast(before=False), "dtype": "bfloat16"},
        {"loss": cast(before=True), "dtype": "bfloat16"},
        "before the gather",
    ),
    "f32 gathered by hand, bf16 meant": Case(
        FSDP,
        {"make": ts.shard_map_step, "train": by_hand(), "batch": P("fsdp"), "dtype": "bfloat16"},
        {
            "make": ts.shard_map_step,
            "train": by_hand(dtype="bfloat16"),
            "batch": P("fsdp"),
            "dtype": "bfloat16",
        },
        "before the gather",
    ),
    "loss without pmean": Case(
        FSDP,
        {"make": ts.shard_map_step, "train": by_hand(mean=False), "batch": P("fsdp")},
        {"make": ts.shard_map_step, "train": by_hand(), "batch": P("fsdp")},
        "aux: it differs along 'fsdp'. Reduce it: `Metrics.reduce`, or `jax.lax.pmean`.",
    ),
    "gradients not synced": Case(
        HSDP,
        {"make": ts.shard_map_step, "train": sync_by_hand(lambda grads, plan: grads)},
        {
            "make": ts.shard_map_step,
            "train": sync_by_hand(
                lambda grads, plan: manual.sync_gradients(grads, ("data", "fsdp"), plan)
            ),
        },
        "Average its gradients: `manual.sync_gradients`",
    ),
    "gradients by jax alone": Case(
        HSDP,
        {"train": lambda loss: sgd(loss, jax.value_and_grad)},
        {},
        "Use `training.value_and_grad`",
    ),
    "a leaf to the host in each step": Case(
        HSDP,
        {"train": with_gradients(to_host)},
        {"train": with_gradients(norm_to_host)},
        "a callback takes 4.0 KiB to the host in each step",
    ),
    "device_put to a device": Case(
        HSDP,
        {"train": with_gradients(on_one_device)},
        {"train": with_gradients(on_the_mesh)},
        "test_planted_mistakes.py:",
    ),
    "device_put to a single-device sharding": Case(
        HSDP,
        {"train": with_gradients(on_one_sharding)},
        {"train": with_gradients(on_the_mesh)},
        "device_put",
    ),
    "Python int in the state": Case(
        HSDP,
        {"tree": {"model": TREE, "count": 0}, "train": counting},
        {"tree": {"model": TREE, "count": struct(dtype="int32")}, "train": counting},
        "Start it as an array: `jnp.int32(0)`",
    ),
    "dtype widened": Case(
        HSDP,
        {"tree": HALF, "x": HALF_X, "train": in_bfloat16("float32")},
        {"tree": HALF, "x": HALF_X, "train": in_bfloat16("bfloat16")},
        "convert this leaf",
    ),
    "gather in the minibatch loop": Case(
        HSDP,
        {"train": minibatches(reduce_once=False), "x": struct(64, 16)},
        {"train": minibatches(reduce_once=True), "x": struct(64, 16)},
        "accumulate_gradients",
    ),
    "wrong axis in rules": Case(HSDP, {"rules": [(".*", P("fdsp"))]}, {}, "Did you mean 'fsdp'"),
    "wrong axis in the batch": Case(HSDP, {"batch": P("fdsp")}, {}, "Did you mean 'fsdp'"),
    "wrong axis in a constraint": Case(
        HSDP, {"loss": constrained_as(P(("data", "fdsp")))}, {}, "Did you mean 'fsdp'"
    ),
    "batch that does not divide": Case(
        HSDP, {"x": struct(12, 16)}, {}, "jit_step: batch: float32[12,16]"
    ),
    "dead rule": Case(HSDP, {"rules": [("dwon", P("data")), *BY_SPEC]}, {}, "Did you mean 'down'"),
    "shadowed rule": Case(
        HSDP,
        {"rules": [*BY_SPEC, ("up", P(None, "fsdp")), (".*", None)]},
        {"rules": [("up", P(None, "fsdp")), *BY_SPEC]},
        "Move it above rule 0",
    ),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    return BACKENDS[request.param]


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_reported(name: str, backend: Any) -> None:
    case = CASES[name]
    found = report(backend(case.axes), **case.wrong)
    print(found)
    assert case.leads in str(found), str(found)


@pytest.mark.parametrize("name", CASES)
def test_the_correct_step_has_nothing_to_report(name: str, backend: Any) -> None:
    case = CASES[name]
    assert str(report(backend(case.axes), **case.right)) == "nothing"

"""Every entry point on meshes of Auto, Explicit and mixed axes does what it does on one device.

`TREESHARD_SOAK=1` checks more pairs of an entry point and a mesh.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.explicit_programs import (
    KINDS,
    layers,
    make_step,
    mesh_of,
    mlp,
    numbers,
    plan_of,
    rows_of,
    state_of,
)
from treeshard import checkpoint, manual
from treeshard.communication import collectives
from treeshard.testing import check_gradients, check_step
from treeshard.training import accumulate_gradients, value_and_grad

pytestmark = pytest.mark.usefixtures("broadcasting")

MODEL = mlp()
STRATEGIES = ("hsdp", "fsdp x tp")
WHERE = [(strategy, kind) for strategy in STRATEGIES for kind in KINDS]
SOAK = bool(os.environ.get("TREESHARD_SOAK"))
on_each_mesh = pytest.mark.parametrize(("strategy", "kind"), WHERE)
on_each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def gradients() -> Any:
    """The loss and its gradients on one device."""
    return jax.jit(jax.value_and_grad(MODEL.loss))(MODEL.params, MODEL.batch)


def rules_of(strategy: str) -> list[tuple[str, Any]]:
    return MODEL.rules if strategy == "fsdp x tp" else [(".*", ts.fsdp("fsdp", min_size=0))]


def parameters_on(strategy: str, kind: str) -> ts.Plan:
    return ts.plan(MODEL.params, rules_of(strategy), mesh_of(strategy, kind), min_size=0)


def assert_same(got: Any, expected: Any) -> None:
    chex.assert_trees_all_close(ts.gather(got), expected, rtol=1e-4, atol=1e-6)


def gradient_step(plan: ts.Plan, differentiate: Any, make: Any = ts.jit_step) -> Any:
    """A step that returns gradients as its state."""

    def step(params: Any, batch: Any) -> Any:
        value, grads = differentiate(params, batch)
        return grads, value

    return make(step, plan, batch=rows_of(plan.mesh), donate=False)


@pytest.mark.usefixtures("quick_compiles")
@on_each_mesh
def test_a_state_that_is_initialised_sharded_or_of_another_mesh(
    strategy: str, kind: str, gradients: Any
) -> None:
    def init() -> Any:
        return {name: jnp.asarray(x) for name, x in ts.unshard(MODEL.params).items()}

    initialised, plan = ts.init_sharded(
        init, rules=rules_of(strategy), mesh=mesh_of(strategy, kind), min_size=0
    )
    step = gradient_step(plan, value_and_grad(MODEL.loss))
    others = [ts.shard(MODEL.params, parameters_on(strategy, other)) for other in KINDS]
    for params in (initialised, *others):
        grads, value = step(params, MODEL.batch)
        assert_same((grads, value), gradients[::-1])
        assert jax.tree.map(lambda x: x.sharding, grads) == plan.shardings


# The rows of `hsdp` are split over both axes, of which the first is `data`.
ACCUMULATED = [
    *(("hsdp", kind, names) for kind in ("auto", "explicit") for names in ("none", "first")),
    *(("hsdp", kind, "rows") for kind in KINDS),
    *(("fsdp x tp", kind, names) for kind in ("first", "last") for names in ("none", "rows")),
]
if SOAK:
    ACCUMULATED = [(*where, names) for where in WHERE for names in ("none", "rows", "first")]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("strategy", "kind", "names"), ACCUMULATED)
def test_gradients_that_are_accumulated(
    strategy: str, kind: str, names: str, gradients: Any
) -> None:
    plan = parameters_on(strategy, kind)
    rows = rows_of(plan.mesh)[0]
    axis_names = {"none": None, "rows": rows, "first": plan.mesh.axis_names[0]}[names]

    def accumulated(params: Any, batch: Any) -> Any:
        def grad_fn(minibatch: Any, key: Any) -> Any:
            value, grads = value_and_grad(MODEL.loss)(params, minibatch)
            return grads, {"value": value}

        grads, metrics = accumulate_gradients(grad_fn, batch, 2, axis_names=axis_names)
        return metrics["value"], grads

    grads, _ = gradient_step(plan, accumulated)(ts.shard(MODEL.params, plan), MODEL.batch)
    assert_same(grads, gradients[1])


@pytest.mark.usefixtures("quick_compiles")
@on_each_kind
def test_gradients_by_hand(kind: str, gradients: Any) -> None:
    plan = parameters_on("hsdp", kind)
    by_hand = manual.value_and_grad(MODEL.loss, plan.mesh.axis_names, plan)
    step = gradient_step(plan, by_hand, ts.shard_map_step)
    grads, value = step(ts.shard(MODEL.params, plan), MODEL.batch)
    assert_same((grads, value), gradients[::-1])


@on_each_mesh
def test_a_checkpoint_is_restored_on_every_mesh(strategy: str, kind: str, tmp_path: Any) -> None:
    plan = parameters_on(strategy, kind)
    checkpoint.save(tmp_path / "params", ts.shard(MODEL.params, plan))
    for other in KINDS:
        like = parameters_on(strategy, other)
        restored = checkpoint.restore(tmp_path / "params", like)
        chex.assert_trees_all_equal(ts.gather(restored), MODEL.params)
        assert jax.tree.map(lambda x: x.sharding, restored) == like.shardings


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("kind", KINDS if SOAK else ("explicit", "first"))
def test_checks_find_nothing_wrong(kind: str) -> None:
    plan = parameters_on("hsdp", kind)
    rows = rows_of(plan.mesh)
    by_hand = manual.value_and_grad(MODEL.loss, plan.mesh.axis_names, plan)
    report = check_gradients(
        MODEL.loss, MODEL.params, MODEL.batch, plan, by_hand=by_hand, batch_specs=rows
    )
    assert report.ok
    assert not report.notes
    state_plan = plan_of(MODEL, "hsdp", plan.mesh)
    step = make_step(MODEL, state_plan, value_and_grad)
    report = check_step(step, state_of(MODEL), MODEL.batch)
    assert report.ok
    assert not report.notes


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("axes", ["data=1,fsdp=1", "data=1,fsdp=2", "data=2,fsdp=1", "fsdp=1"])
def test_axes_of_one_device(axes: str, gradients: Any) -> None:
    names = [axis.split("=")[0] for axis in axes.split(",")]
    count = 2 if "2" in axes else 1
    mesh = ts.make_mesh(
        axes, devices=jax.devices()[:count], axis_types=dict.fromkeys(names, "explicit")
    )
    plan = ts.plan(MODEL.params, rules_of("fsdp"), mesh, min_size=0)
    for differentiate in (value_and_grad, jax.value_and_grad):
        step = gradient_step(plan, differentiate(MODEL.loss))
        grads, value = step(ts.shard(MODEL.params, plan), MODEL.batch)
        assert_same((grads, value), gradients[::-1])


# ------------------------------------------------------------------ what is moved


@on_each_mesh
def test_a_step_moves_what_is_planned(strategy: str, kind: str) -> None:
    mesh = mesh_of(strategy, kind)
    plan = plan_of(MODEL, strategy, mesh)
    step = make_step(MODEL, plan, value_and_grad)
    # JAX writes the Explicit axes of a dim before its Auto axes, so rows in another order move.
    rows = P(("fsdp", "data")) if (strategy, kind) == ("hsdp", "last") else rows_of(mesh)
    compared = step.on(plan, rows).communication(plan.structs, MODEL.batch)
    assert not compared.unplanned


def test_shards_are_summed_along_the_axis_that_splits_no_parameter() -> None:
    """Where all axes are Explicit. On Auto axes the compiler decides."""
    plan = parameters_on("hsdp", "explicit")
    step = gradient_step(plan, value_and_grad(MODEL.loss))
    found = collectives(step.lower(plan.structs, MODEL.batch).compile())
    shard = MODEL.params["up"].nbytes // 4
    summed = [x for x in found if x.axes == ("data",) and x.bytes == shard]
    assert len(summed) == 2  # `up` and `down`


@on_each_mesh
def test_unshard_gathers_along_auto_axes_too(strategy: str, kind: str) -> None:
    """In a scan over layers, where it finds the specs of a slice."""
    model = layers()
    mesh = mesh_of(strategy, kind)
    plan = plan_of(model, strategy, mesh)
    step = make_step(model, plan, value_and_grad)
    found = collectives(step.lower(plan.structs, model.batch).compile())
    up = model.params["up"]
    gathered = [x for x in found if x.kind == "all-gather" and x.axes == ("fsdp",)]
    one_layer = up.nbytes // len(up) // (2 if strategy == "fsdp x tp" else 1)
    assert {x.bytes for x in gathered} >= {one_layer}
    assert not [x for x in found if x.kind == "all-gather" and "tensor" in x.axes]


@on_each_kind
def test_unshard_without_a_plan(kind: str) -> None:
    """Types name the Explicit axes. What they do not name stays as it is."""
    mesh = mesh_of("fsdp x tp", kind)
    w = ts.shard(numbers(8, 4), P("fsdp", "tensor"), mesh)
    axis = "tensor" if kind == "last" else "fsdp"
    with jax.set_mesh(mesh):
        if kind == "auto":
            with pytest.warns(ts.ShardingWarning, match="nothing is gathered"):
                jax.jit(lambda x: ts.unshard(x, axis=axis))(w)
            return
        out = jax.jit(lambda x: ts.unshard(x, axis=axis))(w)
        other = "fsdp" if axis == "tensor" else "tensor"
        split = P("fsdp") if axis == "tensor" else P(None, "tensor")
        assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, split), 2), out.sharding
        if kind != "explicit":
            with pytest.warns(ts.ShardingWarning, match="nothing is gathered"):
                jax.jit(lambda x: ts.unshard(x, axis=other))(w)


# ------------------------------------------------------------------ without jit

W = numbers(8, 16)
CONTEXTS: dict[str, Callable[[Mesh], Any]] = {
    "set_mesh": jax.set_mesh,
    "no context": lambda _: contextlib.nullcontext(),
}


def squares(x: Any) -> Any:
    return jnp.sum(x**2)


def unjitted(mesh: Mesh | None) -> dict[str, Callable[[Any], Any]]:
    """Transformations of constraints, each with the result of `2 * W`."""

    def constrain(x: Any, spec: P) -> Any:
        return ts.with_sharding_constraint(x, spec, mesh)

    return {
        "as it is": jax.grad(lambda x: squares(constrain(x, P("fsdp")))),
        "resharded": jax.grad(lambda x: squares(constrain(x, P("data", "fsdp")))),
        "replicated": jax.grad(lambda x: squares(constrain(x, P()))),
        "unshard": jax.grad(lambda x: squares(ts.unshard(x, P("fsdp"), "fsdp", mesh))),
        "vmap": jax.vmap(lambda x: 2 * constrain(x, P("data"))),
        "vmap, unshard": jax.vmap(lambda x: 2 * ts.unshard(x, P("data"), "data", mesh)),
        "vmap of grad": jax.vmap(jax.grad(lambda x: squares(constrain(x, P("data"))))),
        "grad of vmap": jax.grad(
            lambda x: squares(jax.vmap(lambda row: constrain(row, P("data")))(x))
        ),
    }


@pytest.mark.parametrize(
    ("context", "by_argument"),
    [("set_mesh", False), ("no context", False), ("no context", True)]
    + SOAK * [("set_mesh", True)],
)
@pytest.mark.parametrize("kind", KINDS if SOAK else ("auto", "explicit", "last"))
# On Auto axes nothing is constrained without a mesh: `test_constraint.py` reads what is said.
@pytest.mark.filterwarnings("ignore:.*there is no mesh here")
def test_constraints_in_transformations_without_jit(
    kind: str, context: str, by_argument: bool
) -> None:
    mesh = mesh_of("hsdp", kind)
    for x in (W, ts.shard(W, P("fsdp"), mesh)):
        with CONTEXTS[context](mesh):
            try:
                jax.grad(squares)(x)
                has_gradient = True
            except ValueError:  # JAX's own: a cotangent on Explicit axes needs the devices
                has_gradient = False
            for name, f in unjitted(mesh if by_argument else None).items():
                if has_gradient or ("grad" not in name and name.startswith("vmap")):
                    np.testing.assert_array_equal(f(x), 2 * W, err_msg=name)
        # With a context JAX has all it needs.
        assert has_gradient or context == "no context"

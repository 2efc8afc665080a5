"""Every entry point on meshes of Auto, Explicit and mixed axes does what it does on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.explicit_programs import KINDS, mesh_of, mlp, numbers
from tests.training.gradient_programs import in_passes, returning_gradients
from treeshard.training import value_and_grad

pytestmark = pytest.mark.usefixtures("broadcasting")

MODEL = mlp()


@pytest.fixture(scope="module")
def gradients() -> Any:
    """The raw gradients and the loss on one device."""
    return jax.jit(jax.value_and_grad(MODEL.loss))(MODEL.params, MODEL.batch)[::-1]


def rules_of(strategy: str) -> list[tuple[str, Any]]:
    return MODEL.rules if strategy == "fsdp x tp" else [(".*", ts.fsdp("fsdp", min_size=0))]


def parameters_on(strategy: str, kind: str) -> ts.Plan:
    return ts.plan(MODEL.params, rules_of(strategy), mesh_of(strategy, kind), min_size=0)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("strategy", "kind"), [("hsdp", "explicit"), ("fsdp x tp", "first"), ("hsdp", "last")]
)
def test_a_state_that_is_initialised_sharded_or_of_another_mesh(
    strategy: str, kind: str, gradients: Any
) -> None:
    def init() -> Any:
        return {name: jnp.asarray(x) for name, x in ts.unshard(MODEL.params).items()}

    initialised, plan = ts.init_sharded(
        init, rules=rules_of(strategy), mesh=mesh_of(strategy, kind), min_size=0
    )
    step = returning_gradients(plan, value_and_grad(MODEL.loss))
    others = [ts.shard(MODEL.params, parameters_on(strategy, other)) for other in KINDS]
    for params in (initialised, *others):
        found = step(params, MODEL.batch)
        assert_close(found, gradients)
        assert jax.tree.map(lambda x: x.sharding, found[0]) == plan.shardings


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("strategy", "kind", "axes"),
    [
        ("hsdp", "explicit", ("data",)),
        ("hsdp", "first", ("data", "fsdp")),
        ("fsdp x tp", "last", None),
    ],
)
def test_gradients_that_are_accumulated(
    strategy: str, kind: str, axes: Any, gradients: Any
) -> None:
    plan = parameters_on(strategy, kind)
    step = returning_gradients(plan, in_passes(MODEL.loss, axes, 2))
    assert_close(step(ts.shard(MODEL.params, plan), MODEL.batch), gradients)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("axes", ["data=1,fsdp=2", "data=2,fsdp=1", "fsdp=1"])
def test_axes_of_one_device(axes: str, gradients: Any) -> None:
    devices = jax.devices()[: 2 if "2" in axes else 1]
    mesh = ts.make_mesh(axes, devices=devices, axis_types="explicit")
    plan = ts.plan(MODEL.params, rules_of("hsdp"), mesh, min_size=0)
    for differentiate in (value_and_grad, jax.value_and_grad):
        step = returning_gradients(plan, differentiate(MODEL.loss))
        assert_close(step(ts.shard(MODEL.params, plan), MODEL.batch), gradients)


@pytest.mark.parametrize("kind", ["explicit", "last"])
def test_unshard_without_a_plan(kind: str) -> None:
    """Types name the Explicit axes. What they do not name stays as it is."""
    mesh = mesh_of("fsdp x tp", kind)
    w = ts.shard(numbers(8, 4), P("fsdp", "tensor"), mesh)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: ts.unshard(x, axis="tensor"))(w)
        split = jax.NamedSharding(mesh, P("fsdp"))
        assert out.sharding.is_equivalent_to(split, 2), out.sharding
        if kind == "last":
            with pytest.warns(ts.ShardingWarning, match="unshard has no effect"):
                jax.jit(lambda x: ts.unshard(x, axis="fsdp"))(w)

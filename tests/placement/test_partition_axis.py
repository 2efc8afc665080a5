"""`PartitionAxis.constrain`, and what is told of a mesh whose axes have other names."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import legacy, struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import PartitionAxis

AXES = PartitionAxis(generation_batch_axis="dp", custom={"cache": "tp"})
X = jnp.ones((8, 16, 8))


@pytest.mark.parametrize("types", ["auto", "explicit"])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("names", "mode", "spec"),
    [
        (("batch", "sequence", "head"), "train", P(("fsdp", "dp"), None, "tp")),
        (("batch", "sequence", "head"), "generation", P("dp", None, "tp")),
        ((None, "cache"), "train", P(None, "tp")),
    ],
)
@pytest.mark.parametrize("context", ["argument", "text", "set_mesh", "with mesh"])
def test_names_are_resolved_and_constrained(
    context: str, names: Any, mode: Any, spec: P, traced: bool, types: Any
) -> None:
    axes = "fsdp=2,dp=2,tp=2"
    mesh = ts.make_mesh(axes, axis_types=types)
    if types == "explicit" and context in ("text", "with mesh"):
        pytest.skip("these name no axis types")
    given = {"argument": mesh, "text": axes}.get(context)
    entered = {"set_mesh": jax.set_mesh, "with mesh": legacy}.get(context, nullcontext)
    specs: list[P] = []

    def use(x: jax.Array) -> jax.Array:
        x = AXES.constrain(x, *names, mode=mode, mesh=given)
        jax.debug.inspect_array_sharding(x, callback=lambda sharding: specs.append(sharding.spec))
        return x

    x = X if types == "auto" else jax.device_put(X, jax.sharding.NamedSharding(mesh, P()))
    with entered(mesh):
        y = (jax.jit(use) if traced else use)(x)
    assert [tuple(s) for s in specs] == [tuple(spec)]
    np.testing.assert_array_equal(y, X)


def test_what_it_takes_and_returns() -> None:
    assert AXES.constrain(X, "batch") is X  # no mesh
    mesh = "fsdp=4,tp=2"
    tree = {"a": X, "b": struct(8, 4), "step": 3, "act": jax.nn.relu}
    assert AXES.constrain(X, "batch", "sequence", None, None, mesh=mesh).sharding.spec == P("fsdp")
    assert AXES.constrain(X, "batch", None, mesh=mesh).sharding.spec == P("fsdp")
    found = AXES.constrain(tree, "batch", "head", mesh=mesh)
    assert (found["step"], found["act"]) == (3, jax.nn.relu)
    assert found["b"].sharding.spec == P("fsdp", "tp")
    with pytest.raises(ts.SpecError, match="'bach' is not a logical name.* Did you mean 'batch'"):
        AXES.constrain(X, "bach", mesh=mesh)
    with pytest.raises(ts.SpecError, match="is not a logical name. Give a str"):
        AXES.constrain(X, ("batch", "batch"), mesh=mesh)
    with pytest.raises(ts.SpecError, match="4 entries"):
        AXES.constrain(X, "batch", None, None, "head", mesh=mesh)
    with pytest.warns(ts.ShardingWarning, match="6 is not divisible"):
        assert AXES.constrain(X[:6], "batch", mesh=mesh).sharding.spec == P()


# ------------------------------------------------------------------ a mesh with other names

DIMS = ("batch", None, "head")


def by_rules(axes: PartitionAxis, mesh: Any) -> Any:
    with ts.logical_axis_rules(axes):
        return ts.with_sharding_constraint(X, DIMS, mesh)


def by_rules_in_a_mesh(axes: PartitionAxis, mesh: Any) -> Any:
    with ts.logical_axis_rules(axes), jax.set_mesh(mesh):
        return ts.with_sharding_constraint(X, DIMS)


def in_a_mesh(axes: PartitionAxis, mesh: Any) -> Any:
    with jax.set_mesh(mesh):
        return axes.constrain(X, *DIMS)


def resolved_in_a_mesh(axes: PartitionAxis, mesh: Any) -> Any:
    with jax.set_mesh(mesh):
        return ts.with_sharding_constraint(X, axes.resolve(*DIMS))


def by_rules_in_jit(axes: PartitionAxis, mesh: Any) -> Any:
    return jax.jit(lambda x: (by_rules(axes, mesh), x)[1])(X)


def by_rules_of_leaves(axes: PartitionAxis, mesh: Any) -> Any:
    with ts.logical_axis_rules(axes):
        return ts.match_partition_rules([(".*", DIMS)], X, mesh, min_size=0)


def by_rules_placed(axes: PartitionAxis, mesh: Any) -> Any:
    with ts.logical_axis_rules(axes):
        return ts.shard(X, DIMS, mesh)


def by_manager(axes: PartitionAxis, mesh: Any) -> Any:
    manager = ts.compat.PartitionManager(axes)
    with jax.set_mesh(mesh):
        return manager.shard(X, ["__BATCH__", None, "__HEAD__"], "__train__")


WAYS: dict[str, Callable[[PartitionAxis, Any], Any]] = {
    "resolve(mesh=)": lambda axes, mesh: axes.resolve(*DIMS, mesh=mesh),
    "resolve(), constraint": lambda axes, mesh: ts.with_sharding_constraint(
        X, axes.resolve(*DIMS), mesh
    ),
    "resolve(), constraint in jit": lambda axes, mesh: jax.jit(
        lambda x: ts.with_sharding_constraint(x, axes.resolve(*DIMS), mesh)
    )(X),
    "resolve(), constraint in a mesh": resolved_in_a_mesh,
    "constrain(mesh=)": lambda axes, mesh: axes.constrain(X, *DIMS, mesh=mesh),
    "constrain() in a mesh": in_a_mesh,
    "names": by_rules,
    "names in a mesh": by_rules_in_a_mesh,
    "names in jit": by_rules_in_jit,
    "names in rules": by_rules_of_leaves,
    "names of what is placed": by_rules_placed,
    "logical_to_mesh_spec": lambda axes, mesh: ts.logical_to_mesh_spec(DIMS, axes, mesh),
    "a manager": by_manager,
}


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "data=8", "replica=2,model=4", "mp=8"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_tells_once_of_axes_under_other_names(way: Any, mesh: str) -> None:
    made = ts.make_mesh(mesh)
    with pytest.warns(ts.ShardingWarning, match="for_mesh.mesh.` takes the names of a mesh") as w:
        way(PartitionAxis(), made)
    assert len(w) == 1
    assert "no field names" in str(w[0].message) or "instead" in str(w[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        way(PartitionAxis.for_mesh(made), made)


# Specs for many meshes: the axis that serves the same is used, or has one device.
@pytest.mark.parametrize(
    ("spec", "mesh"),
    [
        (P(("dp", "fsdp"), None, "tp"), "fsdp=8"),
        (P(("dp", "data"), None, ("tp", "tensor")), "data=4,tensor=2"),
        (P("dp"), "data=1,fsdp=8"),
        (P("model"), "tensor=8"),
        (P("dp"), "x=8"),
    ],
)
def test_a_spec_for_many_meshes_is_not_told(spec: P, mesh: str) -> None:
    ts.with_sharding_constraint(X, spec, ts.make_mesh(mesh))


def test_what_is_told_of_another_name() -> None:
    message = (
        "(?s)the mesh has no axis 'tp'.* It has 'tensor' instead."
        " `PartitionAxis.for_mesh.mesh.` takes the names of a mesh."
    )
    with pytest.warns(ts.ShardingWarning, match=message):
        ts.with_sharding_constraint(X, P(None, None, "tp"), ts.make_mesh("data=4,tensor=2"))

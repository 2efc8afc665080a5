"""Specs that are `unreduced` or `reduced`: types of traced values, by which no array is placed."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import checkpoint, compat

W = np.arange(32, dtype="float32").reshape(8, 4)
TREE = {"a": {"w": W}, "b": W + 1}


MESHES = {
    "auto": ts.make_mesh("data=2,fsdp=4"),
    "mixed": ts.make_mesh("data=2,fsdp=4", axis_types=["explicit", "auto"]),
    "explicit": ts.make_mesh("data=2,fsdp=4", axis_types="explicit"),
}
EXPLICIT = MESHES["explicit"]


def typed(kind: str) -> P:
    return P("fsdp", **{kind: {"data"}})


def rules(spec: P) -> list[tuple[str, Any]]:
    return [(".*", spec)]


def stepped(make: Callable[..., Any], spec: P, mesh: Mesh) -> Any:
    plan = ts.plan(TREE, rules(P(None, "data")), mesh, min_size=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.ShardingWarning)  # `data` does not split the batch
        step = make(lambda state, batch: (state, 0), plan, batch=spec, donate=False)
    return step(ts.shard(TREE, plan), TREE)


def traced(f: Callable[[Any], Any], mesh: Mesh) -> Any:
    with jax.set_mesh(mesh):
        return jax.jit(f)(TREE)


PLACING: dict[str, Callable[[P, Mesh], Any]] = {
    "shard": lambda spec, mesh: ts.shard(TREE, spec, mesh),
    "from_process_local": lambda spec, mesh: ts.from_process_local(TREE, spec, mesh),
    "with_sharding_constraint": lambda spec, mesh: ts.with_sharding_constraint(TREE, spec, mesh),
    "unshard": lambda spec, mesh: ts.unshard(TREE, spec, "fsdp", mesh),
    "plan": lambda spec, mesh: ts.plan(TREE, rules(spec), mesh, min_size=0).check(),
    "rules without a mesh": lambda spec, mesh: ts.match_partition_rules(
        rules(spec), TREE, min_size=0
    ),
    "init_sharded": lambda spec, mesh: ts.init_sharded(
        lambda: jax.tree.map(jnp.asarray, TREE), rules=rules(spec), mesh=mesh, min_size=0
    ),
    "jit_step": lambda spec, mesh: stepped(ts.jit_step, spec, mesh),
    "shard_map_step": lambda spec, mesh: stepped(ts.shard_map_step, spec, mesh),
    "analyze": lambda spec, mesh: compat.analyze_sharding_strategy(TREE, spec, mesh),
}
_BY_RULES = ("plan", "rules without a mesh", "init_sharded")


@pytest.mark.parametrize(
    ("axes", "kind"), [("auto", "unreduced"), ("mixed", "reduced"), ("explicit", "unreduced")]
)
@pytest.mark.parametrize("name", PLACING)
def test_no_array_is_placed_by_a_type(name: str, axes: str, kind: str) -> None:
    expected = ts.ShardingRuleError if name in _BY_RULES else ts.SpecError
    with pytest.raises(expected) as error:
        PLACING[name](typed(kind), MESHES[axes])
    message = str(error.value)
    spec = "P(" if name == "unshard" else "P('fsdp', "
    for path in ("a/w", "b"):
        assert re.search(rf"{path}: .*8, ?4.*{re.escape(spec)}{kind}={{'data'}}", message), message
    assert f"`{kind}` axes are part of a type, which values have inside jit" in message
    assert f"write {'P()' if name == 'unshard' else repr(P('fsdp'))}." in message
    if "without" not in name:
        assert "data=2, fsdp=4" in message
        auto = {"auto": " Auto here: 'data', 'fsdp'.", "mixed": " Auto here: 'fsdp'."}.get(axes, "")
        assert f"Explicit axes alone.{auto} Elsewhere" in message


def test_a_plan_has_it_as_a_finding_and_places_arrays_without_it() -> None:
    plan = ts.plan(TREE, rules(typed("reduced")), EXPLICIT, min_size=0, strict=False)
    assert [x.code for x in plan.findings] == ["reduced-type"]
    assert [leaf.given for leaf in plan.leaves] == [P("fsdp")] * 2
    with pytest.warns(ts.ShardingWarning, match="`reduced` axes are part of a type"):
        assert ts.shard(TREE, plan)["b"].sharding.spec == P("fsdp")


def test_nor_is_an_array_restored_by_one(tmp_path: Any) -> None:
    checkpoint.save(tmp_path / "tree", TREE)
    sharding = NamedSharding(EXPLICIT, typed("reduced"))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), TREE)
    with pytest.raises(ts.SpecError, match=r"(?s)restore: 2 leaves.* a/w: .*reduced.* b: "):
        checkpoint.restore(tmp_path / "tree", like)


# ------------------------------------------------------------------ in a trace


@pytest.mark.parametrize(("axes", "kind"), [("auto", "reduced"), ("mixed", "unreduced")])
def test_no_constraint_where_an_axis_is_auto(axes: str, kind: str) -> None:
    for name, constrain in {
        "with_sharding_constraint": lambda x: ts.with_sharding_constraint(x, typed(kind)),
        "unshard": lambda x: ts.unshard(x, typed(kind), "fsdp"),
    }.items():
        with pytest.raises(
            ts.SpecError, match=f"{name}: 2 constraints .*{kind}.*Auto.*\n  a/w: .*{kind}"
        ):
            traced(constrain, MESHES[axes])


def test_a_mesh_that_is_not_in_force_gives_values_no_types() -> None:
    with pytest.raises(ts.SpecError, match=r"under `jax\.set_mesh`.*Auto here: 'data', 'fsdp'\."):
        jax.jit(lambda x: ts.with_sharding_constraint(x, P(reduced={"data"}), EXPLICIT))(W)


@pytest.mark.parametrize("kind", ["unreduced", "reduced"])
def test_a_constraint_types_values_on_explicit_axes(kind: str) -> None:
    types = []

    def there_and_back(tree: Any) -> Any:
        tree = ts.with_sharding_constraint(tree, typed(kind))
        types.append(jax.typeof(tree["b"]).sharding.spec)
        return ts.with_sharding_constraint(tree, P("fsdp"))

    with jax.set_mesh(EXPLICIT):
        out = jax.jit(there_and_back)(ts.shard(TREE, P("fsdp")))
    assert getattr(types[0], kind) == {"data"}
    np.testing.assert_array_equal(out["b"], TREE["b"])


def test_without_a_mesh_it_does_nothing() -> None:
    assert ts.with_sharding_constraint(W, P(reduced={"data"})) is W
    assert jax.jit(lambda x: ts.with_sharding_constraint(x, P(reduced={"data"})))(W).shape == (8, 4)


# ------------------------------------------------------------------ arrays of such a type


def test_a_sum_that_waits_cannot_be_read(tmp_path: Any) -> None:
    with jax.set_mesh(EXPLICIT):
        split = ts.shard(W, P("fsdp"))
        waiting = {"w": jax.sharding.reshard(split, P("fsdp", unreduced={"data"}))}
        summed = jax.sharding.reshard(waiting["w"], P("fsdp", None))
    way_out = (
        r"w: float32\[8,4\]: the array is unreduced along 'data'.*reshard\(x, P\('fsdp', None\)\)"
    )
    with pytest.raises(ts.errors.LeafError, match=way_out):
        ts.gather(waiting)
    with pytest.raises(ts.errors.LeafError, match=way_out):
        checkpoint.save(tmp_path / "tree", waiting)
    with pytest.raises(ts.errors.LeafError, match=way_out):
        ts.interchange.save_safetensors(tmp_path / "w.safetensors", waiting)
    np.testing.assert_array_equal(ts.gather(summed), W)

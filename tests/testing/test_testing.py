"""The assertions for users' tests: what they accept, and what they say of what they do not."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import testing

SHAPES = {
    "layers": [{"w": jax.ShapeDtypeStruct((16, 8), "float32")} for _ in range(3)],
    "head": jax.ShapeDtypeStruct((8, 4), "float32"),
}


def planned(*rules: Any, mesh: Any = "data=2,fsdp=4") -> ts.Plan:
    return ts.plan(SHAPES, [*rules, (".*", None)], mesh, min_size=0)


# ------------------------------------------------------------------ assert_same_plan


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    file = tmp_path / "plans" / "model.txt"
    testing.assert_same_plan(planned(("w", P("fsdp"))), file, update=True)
    return file


def test_a_changed_plan_fails_with_the_diff_and_how_to_accept_it(stored) -> None:
    testing.assert_same_plan(planned(("layers", P("fsdp", None))), str(stored))
    before = stored.read_text()
    with pytest.raises(AssertionError) as raised:
        testing.assert_same_plan(planned(("w", P(None, "fsdp")), ("head", P("data"))), stored)
    assert type(raised.value) is ts.errors.UnexpectedShardingError
    first, *changes, last = str(raised.value).splitlines()
    assert first == f"The plan differs from the one stored in {stored}:"
    assert sorted(changes) == [
        "+head: float32[8,4] P('data',)",
        *(f"+layers/{i}/w: float32[16,8] P(None, 'fsdp')" for i in range(3)),
        "-head: float32[8,4] P()",
        *(f"-layers/{i}/w: float32[16,8] P('fsdp',)" for i in range(3)),
    ]
    assert last == (
        "If this is intended, run the test with TREESHARD_UPDATE_PLANS=1 in the environment to"
        " store the new plan."
    )
    assert stored.read_text() == before
    with pytest.raises(AssertionError, match="-mesh: data=2, fsdp=4\n[+]mesh: fsdp=8"):
        testing.assert_same_plan(planned(("w", P("fsdp")), mesh="fsdp=8"), stored)


def test_a_plan_without_a_file_fails(tmp_path) -> None:
    file = tmp_path / "model.txt"
    with pytest.raises(AssertionError, match="does not exist. Run this test with TREESHARD_UPDATE"):
        testing.assert_same_plan(planned(), file)
    assert not file.exists()


def test_the_environment_accepts_a_changed_plan(stored, monkeypatch) -> None:
    changed = planned(("w", P("data")))
    monkeypatch.setenv("TREESHARD_UPDATE_PLANS", "0")
    with pytest.raises(AssertionError):
        testing.assert_same_plan(changed, stored)
    monkeypatch.setenv("TREESHARD_UPDATE_PLANS", "1")
    testing.assert_same_plan(changed, stored)
    monkeypatch.delenv("TREESHARD_UPDATE_PLANS")
    testing.assert_same_plan(changed, stored)


# ------------------------------------------------------------------ assert_trees_sharded_as


class Block(eqx.Module):
    w: Any
    activation: Any = jax.nn.gelu


def tree(mesh: Any) -> dict[str, Any]:
    sharded = ts.shard({"a": np.ones((8, 8)), "b": np.ones(8), "c": np.ones((4, 4))},
                       {"a": P("fsdp"), "b": P(("data", "fsdp")), "c": P()}, mesh)  # fmt: skip
    return {"block": Block(sharded["a"]), "b": sharded["b"], "c": [sharded["c"], 3, None]}


def specs(**changed: Any) -> dict[str, Any]:
    a, b, c = ({"a": P("fsdp"), "b": P(("data", "fsdp")), "c": P()} | changed).values()
    return {"block": Block(a, None), "b": b, "c": [c, None, None]}


def test_trees_that_are_sharded_as_expected_pass(mesh) -> None:
    for expected in (
        specs(a=P("fsdp", None), c=P(None, None)),
        specs(a=None, b=None),
        {"block": P("fsdp"), "b": P(("data", "fsdp")), "c": P()},
    ):
        testing.assert_trees_sharded_as(tree(mesh), expected)


def test_every_array_that_is_sharded_differently_is_listed(mesh) -> None:
    with pytest.raises(AssertionError) as raised:
        testing.assert_trees_sharded_as(tree(mesh), specs(a=P("data"), b=P("fsdp"), c=P()))
    assert type(raised.value) is ts.errors.UnexpectedShardingError
    assert str(raised.value).splitlines() == [
        "2 arrays are not sharded as expected:",
        "  b: is P(('data', 'fsdp'),), expected P('fsdp',).",
        "  block/w: is P('fsdp',), expected P('data',).",
    ]


def test_a_plan_checks_mesh_shape_and_dtype(mesh, fsdp_mesh) -> None:
    params = {"w": np.ones((8, 8), "float32"), "b": np.ones(8, "float32")}
    rules = [(".*", P("fsdp"))]
    plan = ts.plan(params, rules, mesh, min_size=0)
    placed = ts.shard(params, plan)
    for same in (plan, plan.on("data=2,fsdp=4"), plan.shardings):
        testing.assert_trees_sharded_as(placed, same)
    testing.assert_trees_sharded_as(plan.structs, plan)
    abstract = ts.plan(params, rules, mesh_of(data=2, fsdp=4), min_size=0)
    testing.assert_trees_sharded_as(placed, abstract)
    other = {
        "w: is on fsdp=8, expected data=2, fsdp=4": ts.shard(params, P("fsdp"), fsdp_mesh),
        "w: is float32[4,8], expected float32[8,8]": placed | {"w": placed["w"][:4]},
        "b: is float16[8], expected float32[8]": placed | {"b": placed["b"].astype("float16")},
        "w: is a ndarray without a sharding, expected P('fsdp',)": params,
        "w: is SingleDeviceSharding": placed | {"w": jax.numpy.ones((8, 8))},
    }
    for message, actual in other.items():
        with pytest.raises(AssertionError) as raised:
            testing.assert_trees_sharded_as(actual, plan)
        assert message in str(raised.value)


def test_one_device_and_an_axis_of_size_one_make_no_difference(mesh) -> None:
    split = ts.shard(np.ones((8, 8)), P("fsdp"), ts.make_mesh("data=1,fsdp=8"))
    testing.assert_trees_sharded_as(split, P("fsdp", "data"))
    testing.assert_trees_sharded_as(split, P(("data", "fsdp")))
    with pytest.raises(
        AssertionError, match="the tree: is P\\('fsdp',\\), expected P\\('data',\\)"
    ):
        testing.assert_trees_sharded_as(split, P("data"))
    alone = jax.numpy.ones(8)
    testing.assert_trees_sharded_as(alone, P())
    for expected in (P("fsdp"), NamedSharding(mesh, P())):
        with pytest.raises(AssertionError, match="SingleDeviceSharding"):
            testing.assert_trees_sharded_as(alone, expected)


def test_another_structure_fails_as_chex_does_and_other_leaves_are_refused(mesh) -> None:
    with pytest.raises(ts.errors.UnexpectedShardingError) as raised:
        testing.assert_trees_sharded_as(tree(mesh), {"b": P()})
    assert "[Chex] Assertion assert_trees_all_equal_structs failed" in str(raised.value)
    assert "the expected specs lack 'block', 'c'" in str(raised.value)
    with pytest.raises(ts.SpecError, match="'fsdp' \\(str\\)"):
        testing.assert_trees_sharded_as({"w": tree(mesh)["b"]}, {"w": "fsdp"})


def test_the_memory_of_arrays_is_compared_where_it_is_said(mesh) -> None:
    params = {"w": np.ones((8, 8), "float32")}
    on_host, on_device = (
        ts.plan(params, [("w", ts.fsdp("fsdp", min_size=0, memory=memory))], mesh)
        for memory in ("pinned_host", None)
    )
    placed = ts.shard(params, on_host)
    testing.assert_trees_sharded_as(placed, on_host)
    testing.assert_trees_sharded_as(placed, {"w": placed["w"].sharding})
    testing.assert_trees_sharded_as(placed, on_host.specs)
    with pytest.raises(AssertionError, match="w: is in the memory 'pinned_host', expected 'device"):
        testing.assert_trees_sharded_as(placed, on_device)
    for expected in (on_host, {"w": placed["w"].sharding}):
        with pytest.raises(AssertionError, match="'device', expected 'pinned_host'"):
            testing.assert_trees_sharded_as(ts.shard(params, on_device), expected)


# ------------------------------------------------------------------ layouts


def test_a_layout_in_which_something_does_not_divide_is_left_out(mesh) -> None:
    plan = ts.plan({"w": np.ones((12, 8), "float32")}, [("w", P("fsdp"))], mesh, min_size=0)
    of_two_rows, of_16 = (
        [layout.name for layout in testing.layouts(plan, np.ones((rows, 12)), P("data"))]
        for rows in (2, 16)
    )
    assert "mesh" in of_16
    assert of_two_rows[:2] == ["plan", "axes"]

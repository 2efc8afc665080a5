"""Specs: projecting them on meshes and shapes, reading axes, matching them with trees."""

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.spec_trees import specs_of_leaves
from treeshard._core.specs import all_axes, entries, project

U = P.UNCONSTRAINED
MESH = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

PROJECTIONS = {
    "unconstrained stays": (P(U, "data"), (3, 4), P(U, "data"), []),
    "size one": (P("tensor"), (3,), P("tensor"), []),
    "trailing None beyond the rank": (P("data", None, None), (4,), P("data"), []),
    "unknown": (P("fdsp", "data"), (4, 8), P(None, "data"), ["axis-not-in-mesh"]),
    "twice": (P("data", "data"), (4, 4), P("data"), ["axis-already-used"]),
    "the first dim that names it has it": (
        P("data", "data"),
        (3, 4),
        P(),
        ["indivisible", "axis-already-used"],
    ),
    "within an entry": (
        P(("data", "x", "data", "fsdp"), U),
        (0, 1),
        P(("data", "fsdp"), U),
        ["axis-not-in-mesh", "axis-already-used"],
    ),
    "longest prefix": (P(("data", "fsdp")), (6,), P("data"), ["indivisible"]),
    "beyond the rank": (P("data", "fsdp"), (4,), P("data"), ["rank"]),
    "several": (P("x", "fsdp", "data"), (4, 6), P(), ["axis-not-in-mesh", "indivisible", "rank"]),
}


@pytest.mark.parametrize("case", PROJECTIONS.values(), ids=PROJECTIONS.keys())
def test_project(case) -> None:
    spec, shape, given_spec, kinds = case
    got, adjustments = project(spec, MESH, shape)
    assert got == given_spec
    assert project(got, MESH, shape) == (got, ())
    assert [adjustment.kind for adjustment in adjustments] == kinds
    dropped = [axis for adjustment in adjustments for axis in adjustment.axes]
    assert sorted([*all_axes(entries(got)), *dropped]) == sorted(all_axes(entries(spec)))


def test_project_keeps_the_types_that_traced_values_have() -> None:
    explicit = MESH.update(axis_types=(AxisType.Explicit,) * len(MESH.axis_names))
    spec = P("data", "nope", unreduced={"fsdp"}, reduced={"model"})
    assert entries(spec) == ("data", "nope")
    typed, notes = project(spec, explicit, (4, 4), typed=True)
    assert typed == P("data", unreduced={"fsdp"})
    assert [note.axes for note in notes] == [("nope",), ("model",)]
    assert {note.kind for note in notes} == {"axis-not-in-mesh"}
    own, notes = project(spec, explicit, (4, 4), manual=frozenset({"fsdp"}), typed=True)
    assert own == P("data")
    assert notes[1].kind == "axis-is-manual"
    alone = P("data", reduced={"fsdp"})
    assert project(alone, explicit, (4, 4), typed=True) == (alone, ())
    assert project(alone, None, (4, 4), typed=True) == (alone, ())


@pytest.mark.parametrize("mesh", [MESH, None])
def test_project_drops_types_where_values_have_none(mesh) -> None:
    spec = P("data", unreduced={"fsdp"})
    plain, [note] = project(spec, mesh, (4, 4))
    assert plain == P("data")
    assert (note.kind, note.axes) == ("reduced-type", ("fsdp",))
    if mesh is not None:  # its axes are Auto, in a trace too
        assert project(spec, mesh, (4, 4), typed=True) == (plain, (note,))


def test_get_names_from_partition_spec(mesh) -> None:
    get = ts.get_names_from_partition_spec
    assert get(P("fsdp", None, ("data", "fsdp"))) == ["fsdp", "data"]
    assert get(NamedSharding(mesh, P("data"))) == ["data"]
    assert get({"a": [P("data"), None], "b": P(U, "fsdp")}) == ["data", "fsdp"]
    assert get(None) == []
    assert get(("data", ("fsdp", None), "data")) == ["data", "fsdp"]


def test_layer_specs(mesh) -> None:
    specs = {
        "w": P(None, "fsdp", None),
        "b": P(),
        "n": None,
        "s": NamedSharding(mesh, P(None, "data")),
    }
    sliced = ts.layer_specs(specs)
    assert sliced == {"w": P("fsdp"), "b": P(), "n": None, "s": NamedSharding(mesh, P("data"))}
    assert ts.layer_specs(P("data", None, "fsdp"), dim=1) == P("data", "fsdp")
    with pytest.raises(ts.SpecError) as error:
        ts.layer_specs({"ok": P(), "w": P("fsdp"), "v": P(("data",))})
    assert "2 leaves are sharded on the stacked dim 0" in str(error.value)
    assert "  w: P('fsdp',) shards dim 0, on which the layers are stacked" in str(error.value)
    with pytest.raises(ts.SpecError, match="^layer_specs: dim=-1: .* Write `dim=0` for the first"):
        ts.layer_specs(P(None, "fsdp", None), -1)


def test_layer_specs_keep_the_memory(mesh) -> None:
    of_stack = NamedSharding(mesh, P(None, "fsdp"), memory_kind="pinned_host")
    of_layer = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    assert ts.layer_specs({"w": of_stack}) == {"w": of_layer}


class Model(eqx.Module):
    linear: eqx.nn.Linear
    act: object


MODEL = Model(eqx.nn.Linear(2, 2, key=jax.random.key(0)), jax.nn.gelu)

MATCHED = {
    "prefix": ({"x": P("a"), "y": P("b")}, {"x": 1, "y": [2, 3]}, [P("a"), P("b"), P("b")]),
    "None for a subtree": ({"x": None, "y": P("a")}, {"x": [1, 2], "y": 3}, [None, None, P("a")]),
    "None in both": ({"x": None, "y": P("a")}, {"x": None, "y": 3}, [P("a")]),
    "filtered module": (
        jax.tree.map(lambda x: P("a"), eqx.filter(MODEL, eqx.is_array)),
        MODEL,
        [P("a"), P("a"), None],
    ),
}


@pytest.mark.parametrize("case", MATCHED.values(), ids=MATCHED.keys())
def test_specs_of_leaves_gives_one_spec_per_leaf(case) -> None:
    specs, tree, expected = case
    assert specs_of_leaves(specs, tree) == expected


MISMATCHED = {
    "missing and extra": (
        {"a": P(), "b": {"c": P(), "e": P()}},
        {"a": 1, "b": {"c": 1, "d": 2}},
        "at b: the specs lack 'd' and the tree has no 'e'. The specs must have the tree's",
    ),
    "deeper than the tree": (
        {"a": {"b": P()}},
        {"a": np.zeros((2, 3))},
        r"at a: the specs have a dict of 'b', the tree has an array of shape \(2, 3\)",
    ),
    "static fields": (
        jax.tree.map(lambda _: P(), eqx.nn.Linear(3, 2, key=jax.random.key(0))),
        MODEL.linear,
        "at the root: both are Linear, but their static fields differ",
    ),
    "not a spec": ({"a": "data"}, {"a": 1}, r"a: 'data' \(str\) is not a spec"),
}


@pytest.mark.parametrize("case", MISMATCHED.values(), ids=MISMATCHED.keys())
def test_specs_that_do_not_match_the_tree_are_rejected(case) -> None:
    specs, tree, message = case
    with pytest.raises(ts.SpecError, match=message):
        specs_of_leaves(specs, tree)

"""Tactics: which dim they shard, and what they record when they shard none."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from helpers import mesh_of, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import Tactic, fsdp, logical_partitioning, replicate, shard_dim
from treeshard._planning.tactics import min_size_in_force

WHOLE = P()
MESH = mesh_of(data=2, fsdp=4, one=1)


def refined(tactic: Tactic, leaf: Any, spec: P = WHOLE, floor: int = 0):
    given, notes = tactic.refine(spec, MESH, "w", leaf, floor)
    return given, [note.kind for note in notes]


U = P.UNCONSTRAINED
BOTH = ("data", "fsdp")
# The tactic, the shape, the spec of earlier tactics, and the spec that it gives.
SHARDED: dict[str, tuple[Tactic, tuple[int, ...], P, P]] = {
    "largest": (fsdp("fsdp"), (8, 16), P(), P(None, "fsdp")),
    "of equal ones the last": (fsdp("fsdp"), (8, 8, 8), P(), P(None, None, "fsdp")),
    "largest free one": (fsdp("fsdp"), (8, 16), P(None, "data"), P("fsdp", "data")),
    "unconstrained is not free": (fsdp("fsdp"), (8, 16), P(None, U), P("fsdp", U)),
    "two axes": (fsdp(BOTH), (8, 12), P(), P(BOTH)),
    "skip from the back": (fsdp("fsdp", skip=(-1,)), (8, 16), P(), P("fsdp")),
    "never a dim of length 0": (fsdp("fsdp"), (0, 4), P(), P(None, "fsdp")),
    "replicate": (replicate(), (8, 16), P(), P()),
    "the first dim from the back": (shard_dim("data", -2), (8, 16), P(), P("data")),
    "a dim beside another": (shard_dim("data", 1), (8, 16), P("fsdp"), P("fsdp", "data")),
    "left to right": (fsdp("fsdp") | fsdp("data"), (8, 16), P(), P("data", "fsdp")),
}


@pytest.mark.parametrize(("tactic", "shape", "spec", "given"), SHARDED.values(), ids=SHARDED)
def test_which_dim_is_sharded(tactic, shape, spec, given) -> None:
    assert refined(tactic, struct(*shape), spec) == (given, [])


D, F = P("data"), P("fsdp")
# What is told of a leaf that cannot be sharded.
TOLD: list[tuple[Tactic, tuple[int, ...], P, str, str]] = [
    (fsdp("fsdp"), (7, 9), P(), "no-dim", "no free dim of shape (7, 9) is divisible by 4"),
    (fsdp("fdsp"), (8,), P(), "axis-not-in-mesh", "no axis 'fdsp'. It has data=2, fsdp=4"),
    (shard_dim("data", 1), (8, 8), D, "axis-already-used", "P('data',) uses 'data' already. An"),
    (replicate(), (8,), D, "already-sharded", "as P('data',), so it cannot be replicated. Drop"),
    (shard_dim("data", 0), (8,), F, "already-sharded", "sharded dim 0: P('fsdp',). Give all its"),
    (shard_dim("data", 1), (8,), P(), "rank", "has no dim 1. Make the pattern match fewer leaves"),
]


@pytest.mark.parametrize(("tactic", "shape", "spec", "kind", "why"), TOLD)
def test_a_leaf_that_cannot_be_sharded_keeps_its_spec(tactic, shape, spec, kind, why) -> None:
    given, (note,) = tactic.refine(spec, MESH, "w", struct(*shape), 0)
    assert (given, note.kind) == (spec, kind)
    assert why in note.why


def test_an_adjustment_names_its_step_among_several() -> None:
    _, notes = (fsdp("data") | shard_dim("fsdp", 0)).refine(P(), MESH, "w", struct(8), 0)
    assert notes[0].why.startswith("shard_dim('fsdp', 0): an earlier tactic already sharded dim 0")


@pytest.mark.parametrize(
    ("tactic", "size", "floor", "given", "kinds"),
    [
        (fsdp("fsdp"), 8, 8, P("fsdp"), []),
        (fsdp("fsdp", min_size=4), 4, 99, P("fsdp"), []),
        (fsdp("fsdp", min_size=9), 8, 0, P(), ["too-small"]),
        (fsdp("fsdp") | fsdp("data", min_size=0), 8, 9, P("data"), ["too-small"]),
        (replicate(), 8, 99, P(), []),  # has no threshold
    ],
)
def test_the_threshold_of_the_step_or_else_of_the_call(tactic, size, floor, given, kinds) -> None:
    assert refined(tactic, struct(size), floor=floor) == (given, kinds)


RULES = [("embed", "fsdp"), ("mlp", "data"), ("vocab", "fsdp")]


def logical(*names: Any, rules: Any = None) -> Any:
    return linen.LogicallyPartitioned(struct(*[8] * len(names)), names, rules=rules)


def variable(*names: Any, **metadata: Any) -> Any:
    value = jax.numpy.zeros([8] * len(names))
    return nnx.Param(value, out_sharding=names, eager_sharding=False, **metadata)


IN_BOXES: dict[str, tuple[Any, P]] = {
    "logical": (logical("embed", "mlp"), P("fsdp", "data")),
    "its own rules": (logical("embed", rules=(("embed", "data"),)), P("data")),
    "axes": (linen.Partitioned(struct(8, 8), ("data", None)), P("data")),
    "nnx": (variable("embed", "data"), P("fsdp", "data")),
    "no box": (struct(8), P()),
}


@pytest.mark.parametrize(("box", "spec"), IN_BOXES.values(), ids=IN_BOXES)
def test_names_in_boxes_are_resolved(box, spec) -> None:
    for context in (ts.logical_axis_rules, linen.logical_axis_rules, nnx.logical_axis_rules):
        with context(RULES):
            assert refined(logical_partitioning(), box) == (spec, [])


OWN: dict[str, tuple[Any, Any]] = {  # rules in force, and a variable's own
    "added": ([("mlp", "data")], (("embed", "fsdp"),)),
    "added, with the same rule for a name": (
        [("embed", "fsdp"), ("mlp", "data")],
        (("embed", "fsdp"),),
    ),
    "added, with several axes": ([("other", "fsdp")], [["embed", ["data", "fsdp"]], ["mlp", None]]),
    "an axis of the mesh has a rule": ([("data", "fsdp")], (("embed", None), ("mlp", "data"))),
    "no own": ([("embed", "fsdp"), ("mlp", "data")], None),
    "own without any": ([("embed", "fsdp"), ("mlp", "data")], ()),
    "the last of a name": ([("embed", "fsdp"), ("embed", None), ("mlp", "fsdp")], (("x", "data"),)),
}


@pytest.mark.parametrize(("in_force", "own"), OWN.values(), ids=OWN)
@pytest.mark.parametrize("names", [("embed", "mlp"), (None, "mlp")], ids=str)
def test_rules_of_an_nnx_variable_are_added_as_flax_adds_them(names, in_force, own) -> None:
    box = variable(*names, sharding_rules=own)
    for context in (linen.logical_axis_rules, nnx.logical_axis_rules):
        with context(in_force):
            theirs = nnx.get_partition_spec(box).get_value()
            given, notes = refined(logical_partitioning(), box)
        assert notes == []
        assert NamedSharding(MESH, given).is_equivalent_to(NamedSharding(MESH, theirs), 2)


def test_rules_of_an_nnx_variable_are_added_to_those_of_treeshard() -> None:
    box = variable("embed", "mlp", sharding_rules=(("embed", "fsdp"),))
    for_plan = {"rules": [(".*", logical_partitioning())], "mesh": MESH, "min_size": 0}
    with ts.logical_axis_rules([("mlp", "data")]):
        assert refined(logical_partitioning(), box) == (P("fsdp", "data"), [])
        decided = ts.plan({"w": box}, **for_plan)
        assert decided.leaves[0].given == P("fsdp", "data")
    assert decided.on("data=4,fsdp=2").leaves[0].given == P("fsdp", "data")
    assert refined(logical_partitioning([("mlp", "data")]), box) == (P("fsdp", "data"), [])
    axes = ts.PartitionAxis(mlp_intermediate_axis="data")
    of_kinds = variable("embed", "mlp_intermediate", sharding_rules=(("embed", "fsdp"),))
    with ts.logical_axis_rules(axes):
        assert refined(logical_partitioning(), of_kinds) == (P("fsdp", "data"), [])
    assert refined(logical_partitioning(), box) == (P("fsdp"), [])  # none in force


def test_rules_of_a_linen_box_replace_those_in_force_as_in_flax() -> None:
    box = linen.LogicallyPartitioned(struct(8, 8), ("embed", "mlp"), rules=(("embed", "data"),))
    with linen.logical_axis_rules([("mlp", "fsdp")]):
        theirs = linen.logical_to_mesh_axes(box.names, box.rules)
        assert refined(logical_partitioning(), box) == (P("data"), ["no-logical-rule"])
    assert NamedSharding(MESH, theirs).is_equivalent_to(NamedSharding(MESH, P("data")), 2)


@pytest.mark.parametrize("in_force", [[("embed", "data")], [("embed", None)]], ids=str)
def test_a_name_with_two_rules_of_which_one_is_the_variables_own_is_an_error(in_force) -> None:
    box = variable("embed", "mlp", sharding_rules=(("embed", "fsdp"),))
    axes = in_force[0][1]
    message = f"k: .* the rules in force have 'embed' as {axes!r}, and .* have it as 'fsdp'"
    for context in (nnx.logical_axis_rules, ts.logical_axis_rules):
        with context(in_force), pytest.raises(ts.ShardingRuleError, match=message):
            ts.plan({"k": box}, [(".*", logical_partitioning())], MESH, min_size=0)
    with nnx.logical_axis_rules(in_force), pytest.raises(ValueError, match="Inconsistent"):
        nnx.get_partition_spec(box)


def test_rules_of_the_tactic_come_before_those_in_force_and_names_before_other_tactics() -> None:
    by_names = logical_partitioning(RULES)
    with ts.logical_axis_rules([("embed", "data")]):
        assert refined(by_names, logical("embed")) == (P("fsdp"), [])
    given, (note,) = (fsdp("fsdp") | by_names).refine(P(), MESH, "w", logical("embed"), 0)
    assert given == P("fsdp")
    assert "sharded it as P('fsdp',). Put logical_partitioning first." in note.why


def test_a_partition_axis_gives_names_axes() -> None:
    axes = ts.PartitionAxis(fully_sharded_data_parallel_axis="fsdp", data_parallel_axis="data")
    by_names = logical_partitioning(axes)
    assert refined(by_names, logical("batch", None)) == (P(("fsdp", "data")), [])
    assert refined(by_names, linen.Partitioned(struct(8), ("data",))) == (P("data"), [])
    assert refined(by_names | fsdp("fsdp"), logical("data_parallel", None)) == (
        P("data", "fsdp"),
        [],
    )


def test_a_tactic_called_directly(monkeypatch, mesh) -> None:
    monkeypatch.setenv("MIN_SHARDING_SIZE", "8")
    assert fsdp("fsdp")(P("data"), MESH, "w", np.zeros((2, 4))) == P("data", "fsdp")
    assert fsdp("fsdp")(P(), MESH, "w", np.zeros(4)) == P()
    with jax.set_mesh(mesh):
        assert fsdp("fsdp")(P(), None, "w", struct(8)) == P("fsdp")
    with pytest.raises(ts.NoMeshError, match=r"^fsdp\('fsdp'\): no mesh is in force"):
        fsdp("fsdp")(P(), None, "w", struct(8))
    with pytest.raises(ts.UnknownAxisError) as raised:
        fsdp("fdsp", min_size=0)(P(), MESH, "blocks/w", struct(8, 8))
    assert str(raised.value).startswith(
        "blocks/w (8, 8), fsdp('fdsp', min_size=0): the mesh has no axis 'fdsp'. It has data=2,"
        " fsdp=4, one=1. Did you mean 'fsdp'?"
    )
    with pytest.raises(ts.SpecError, match="uses 'data' already. An axis can split only one dim."):
        fsdp("data", min_size=0)(P("data"), MESH, "blocks/w", struct(8, 8))


def test_bad_axes(unchecked) -> None:
    for axis in ((), ("a", "a")):
        with pytest.raises(ts.SpecError, match="give at least one axis, and each once"):
            fsdp(axis)
    with pytest.raises(TypeError, match="fsdp: 3 is int; axis names are a string"):
        fsdp(3)  # pyright: ignore
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        fsdp("data", min_size=1.5)  # pyright: ignore


def test_the_threshold_of_a_call_or_else_of_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("MIN_SHARDING_SIZE", raising=False)
    assert min_size_in_force(None) == 16384
    for text, size in {"": 16384, " 7 ": 7}.items():
        monkeypatch.setenv("MIN_SHARDING_SIZE", text)
        assert (min_size_in_force(None), min_size_in_force(0)) == (size, 0)
    monkeypatch.setenv("MIN_SHARDING_SIZE", "4k")
    message = "MIN_SHARDING_SIZE is '4k' in .* of elements, such as 16384, or pass `min_size=`"
    with pytest.raises(ts.ShardingRuleError, match=message):
        min_size_in_force(None)

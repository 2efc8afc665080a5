"""A tree of specs instead of rules: the plan is the same as by rules, and has all that it has."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import init_sharded, jit_step

KEY = jax.random.key(0)
MESH = ts.make_mesh("data=2,fsdp=4")
MLP = eqx.nn.MLP(64, 64, 512, 2, key=KEY)
TREE = {"mlp": MLP, "key": KEY, "count": np.int32(0), "name": "mlp", "none": None}
RULES = [("weight", ts.fsdp("fsdp")), (".*", None)]
BY_RULES = ts.plan(TREE, RULES, MESH)
ALL_NONE = jax.tree.map(lambda spec: None if spec == P() else spec, BY_RULES.specs)


def specs_of_subtree(tree: Any) -> Any:
    return ts.match_partition_rules(RULES, tree, MESH)


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(BY_RULES, id="a plan"),
        pytest.param(BY_RULES.specs, id="specs"),
        pytest.param(BY_RULES.shardings, id="shardings"),
        pytest.param(ALL_NONE, id="None replicates"),
        pytest.param({**BY_RULES.specs, "key": None, "name": None}, id="a prefix"),
        pytest.param(specs_of_subtree, id="a function"),
        pytest.param({**BY_RULES.specs, "mlp": specs_of_subtree}, id="a function of a subtree"),
    ],
)
def test_the_plan_is_the_same_as_by_rules(specs) -> None:
    plan = ts.plan(TREE, specs, MESH)
    assert plan == BY_RULES
    assert plan.rules == ()
    assert_same(ts.gather(ts.shard(TREE, plan)), ts.gather(TREE))
    elsewhere = ts.make_mesh("fsdp=8")
    assert plan.on(elsewhere).specs == plan.specs == BY_RULES.on(elsewhere).specs
    params = eqx.filter(MLP, eqx.is_array)
    opt_state = optax.adam(1e-3).init(params)
    assert plan["mlp"].follow(opt_state) == BY_RULES["mlp"].follow(opt_state)
    assert plan.bytes_per_device() == BY_RULES.bytes_per_device()
    assert not plan.diff(BY_RULES)


IS_RULES = [[], (), [("w", P())], [["w", P()]], (("w", None), ("b", P("fsdp")))]
IS_SPECS = [
    [P("fsdp")],
    (P("fsdp"),),
    [None],
    [NamedSharding(MESH, P("fsdp"))],
    [lambda leaf: P("fsdp")],
    lambda tree: P("fsdp"),
    P("fsdp"),
    optax.TraceState(P("fsdp")),
]


@pytest.mark.parametrize("given", IS_RULES)
def test_lists_with_text_are_rules(given) -> None:
    # A list of rules does not have the structure of this tree.
    assert ts.plan({"w": np.ones(8), "b": 1}, given, MESH).rules == tuple(map(tuple, given))


@pytest.mark.parametrize("given", IS_SPECS)
def test_anything_else_is_a_tree_of_specs(given) -> None:
    tree = given._replace(trace=np.ones(8)) if isinstance(given, optax.TraceState) else [np.ones(8)]
    plan = ts.plan(tuple(tree) if type(given) is tuple else tree, given, MESH)
    assert plan.rules == ()
    assert plan.leaves[0].given == (P() if given == [None] else P("fsdp"))


NOT_SPECS = [
    ([3], ts.SpecError, r"0: 3 \(int\) is not a spec"),
    ([P(), P()], ts.SpecError, "the tree has no '1'"),
    ({"w": P()}, ts.SpecError, "the specs have a dict of 'w', the tree has a list"),
    ([np.ones(8)], ts.SpecError, "is not a spec"),
    (None, ts.ShardingRuleError, "rules are NoneType"),
    ("fsdp", ts.ShardingRuleError, "rules are str"),
    (MESH, ts.ShardingRuleError, "rules are Mesh"),
    ([P(), "w"], ts.ShardingRuleError, "rule 0 is not a pair"),
    ([("w",)], ts.ShardingRuleError, "rule 0 is not a pair"),
    ([(("embed", "mlp"), P())], ts.ShardingRuleError, "a pattern for each key"),
]


@pytest.mark.parametrize(("given", "error", "part"), NOT_SPECS)
def test_errors_name_what_is_wrong(given, error, part) -> None:
    with pytest.raises(error, match=part):
        ts.plan([np.ones(8)], given, MESH)


def test_a_spec_is_not_replaced_for_the_size_of_its_leaf() -> None:
    plan = ts.plan({"w": jnp.ones(8)}, {"w": P("fsdp")}, MESH, min_size=2**20)
    assert plan.specs == {"w": P("fsdp")}
    assert not plan.findings


def test_the_memory_of_a_sharding_counts_and_its_mesh_does_not() -> None:
    other = ts.make_mesh("fsdp=8")
    on_host = NamedSharding(other, P("fsdp"), memory_kind="pinned_host")
    plan = ts.plan({"m": np.ones(8), "w": np.ones(8)}, {"m": on_host, "w": P("fsdp")}, MESH)
    assert [leaf.memory for leaf in plan.leaves] == ["pinned_host", None]
    placed = ts.shard({"w": np.ones(8)}, P("fsdp"), MESH)["w"]
    live = ts.plan({"w": placed}, {"w": placed.sharding}, MESH)
    assert live.leaves[0].memory is None
    assert live.mesh == MESH


def test_logical_names_are_resolved_again_for_another_mesh() -> None:
    tree = {"w": np.ones((8, 8))}
    with ts.logical_axis_rules([("embed", ("data", "fsdp"))]):
        plan = ts.plan(tree, {"w": ("embed", None)}, MESH)
    assert plan.specs == {"w": P(("data", "fsdp"))}
    assert plan.on("fsdp=8").specs == {"w": P("fsdp")}


@pytest.mark.parametrize("spec", [P("data", "fsdp"), NamedSharding(MESH, P("data", "fsdp"))])
def test_one_spec_for_a_tree_is_cut_to_each_leaf(spec) -> None:
    tree = {"w": np.ones((64, 64), "f4"), "b": np.ones(64, "f4"), "s": np.float32(0), "k": KEY}
    cut = {"w": P("data", "fsdp"), "b": P("data"), "s": P(), "k": P()}
    for plan in (ts.plan(tree, spec, MESH), ts.plan({"in": tree}, {"in": spec}, MESH)["in"]):
        assert plan.specs == cut == ts.get_partition_spec(ts.shard(tree, plan))
        assert not plan.findings
    with pytest.raises(ts.ShardingRuleError, match="b: .* has 2 entries, but shape"):
        ts.plan(tree, {**dict.fromkeys(tree), "b": spec}, MESH).check()


@pytest.mark.parametrize("spec", [P(), None, P("data")])
def test_a_spec_that_leaves_an_axis_idle_is_meant(spec) -> None:
    tree = {"w": np.ones((512, 512), "f4")}
    assert ts.plan(tree, [(".*", spec)], MESH).findings[0].code == "left-whole"
    given = ts.plan(tree, {"w": spec}, MESH)
    assert not given.findings
    assert not given.follow(optax.sgd(1.0, momentum=0.9).init(tree)).findings


WRONG = {"w": P("fdsp"), "b": P("fsdp"), "k": P()}
SHAPES = {"w": jnp.ones((256, 64)), "b": jnp.ones(3), "k": jnp.ones((512, 512))}


def test_findings_and_text_speak_of_specs() -> None:
    plan = ts.plan(SHAPES, WRONG, MESH)
    found = {finding.code: str(finding) for finding in plan.findings}
    assert found.keys() == {"indivisible", "axis-not-in-mesh"}  # the spec of `k` is meant
    assert "b: its spec: P('fsdp',) splits dim 0 of shape (3,)" in found["indivisible"]
    assert "its spec P('fsdp',): indivisible fsdp on dim 0" in str(plan)
    with pytest.raises(ts.UnknownAxisError) as raised:
        ts.shard(SHAPES, plan)
    assert "2 leaves do not fit their specs. The mesh has data=2, fsdp=4." in str(raised.value)
    assert "w: shape (256, 64), P('fdsp',): the mesh has no axis 'fdsp'" in str(raised.value)
    assert "rule" not in str(raised.value)
    rows = {leaf["path"]: leaf for leaf in json.loads(plan.to_json())["leaves"]}
    assert (rows["b"]["asked"], rows["b"]["given"]) == ("P('fsdp',)", "P()")
    followed = ts.plan({"k": SHAPES["k"]}, P("fsdp"), MESH).follow({"mu": {"k": SHAPES["k"]}})
    assert "its spec" in str(followed)
    assert "no counterpart" not in str(followed)


def test_steps_checkpoints_and_init_take_specs(tmp_path) -> None:
    specs = {"w": P(None, "fsdp"), "b": None}

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (64, 64)), "b": jnp.zeros(64)}

    state, plan = init_sharded(init, KEY, rules=specs, mesh=MESH)
    assert plan == ts.plan(jax.eval_shape(init, KEY), specs, MESH)
    assert state["w"].sharding.spec == P(None, "fsdp")
    step = jit_step(lambda s, x: (jax.tree.map(lambda w: w + x.sum(), s), x.sum()), plan)
    new, _ = step(state, np.ones((8, 64), "float32"))
    ts.checkpoint.save(tmp_path / "new", new)
    by_plan = ts.checkpoint.restore(tmp_path / "new", plan)
    by_specs = ts.checkpoint.restore(tmp_path / "new", plan.structs, rules=specs, mesh=MESH)
    assert by_plan["w"].sharding == by_specs["w"].sharding == new["w"].sharding
    assert_same(by_specs, new)


# ------------------------------------------------------------------ functions of subtrees

PLACED = {
    "a": jnp.ones((8, 2)),
    "b": {"c": jnp.ones((8, 3)), "d": jnp.ones(16)},
    "act": jax.nn.relu,
}
BY_FUNCTIONS = {"a": None, "b": lambda tree: jax.tree.map(lambda x: P("fsdp"), tree), "act": abs}


@pytest.mark.parametrize(
    "call", [ts.shard, ts.reshard, ts.with_sharding_constraint, ts.from_process_local]
)
def test_a_function_gives_the_specs_of_its_subtree(call) -> None:
    out = call(PLACED, BY_FUNCTIONS, MESH)
    assert out["a"] is PLACED["a"]
    assert out["act"] is jax.nn.relu
    assert {x.sharding.spec for x in jax.tree.leaves(out["b"])} == {P("fsdp")}


def test_a_function_gives_the_specs_of_its_subtree_in_jit() -> None:
    def constrain(tree: Any) -> Any:
        return ts.with_sharding_constraint(tree, {"a": None, "b": BY_FUNCTIONS["b"]}, MESH)

    out = jax.jit(constrain)({"a": PLACED["a"], "b": PLACED["b"]})
    assert {x.sharding.spec for x in jax.tree.leaves(out["b"])} == {P("fsdp")}


def test_what_a_function_returns_is_checked() -> None:
    with pytest.raises(ts.SpecError, match="b: 3 .int. is not a spec"):
        ts.shard(PLACED, {"a": None, "b": lambda tree: 3, "act": None}, MESH)

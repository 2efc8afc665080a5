"""Plans: their records, their trees, their text and JSON, their diffs."""

import json
import re
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from helpers import mesh_of, struct
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts

MESH = mesh_of(data=2, fsdp=4)


class Block(eqx.Module):
    weight: Any
    bias: Any
    activation: Any = jax.nn.gelu
    name: str = eqx.field(static=True, default="block")


def model() -> dict[str, Any]:
    return {
        "blocks": [Block(struct(16, 8), struct(8)) for _ in range(3)],
        "head": struct(8, 6, dtype="bfloat16"),
        "key": jax.eval_shape(jax.random.key, 0),
        "none": None,
        "step": struct(dtype="int32"),
    }


RULES = [("bias", P("fsdp", "data")), ("head", P("data", "fsdp")), ("weight", ts.fsdp("fsdp"))]


def planned(tree: Any = None, rules: Any = RULES, mesh: Any = MESH) -> ts.Plan:
    return ts.plan(model() if tree is None else tree, rules, mesh, min_size=0)


def by_path(decided: ts.Plan) -> dict[str, ts.PlannedLeaf]:
    return {leaf.path: leaf for leaf in decided.leaves}


# ------------------------------------------------------------------ records


def test_a_leaf_records_what_was_decided_and_why() -> None:
    leaves = by_path(planned())
    assert list(leaves) == [
        *(f"blocks/{i}/{name}" for i in range(3) for name in ("weight", "bias")),
        "head", "key", "step",
    ]  # fmt: skip
    head = leaves["head"]
    assert head[:2] == ("head", (8, 6))
    assert (head.dtype, head.size, head.bytes) == (jax.numpy.bfloat16, 48, 96)
    assert (head.asked, head.given) == (P("data", "fsdp"), P("data"))
    assert (head.rule, head.pattern) == (1, "head")
    assert [(note.kind, note.axes, note.dim) for note in head.adjustments] == [
        ("indivisible", ("fsdp",), 1)
    ]
    assert head.bytes_per_device(MESH) == 48
    assert (leaves["step"].rule, leaves["step"].asked, leaves["step"].given) == (None, P(), P())
    assert leaves["key"].dtype == jax.random.key(0).dtype


def test_fsdp_axes() -> None:
    assert planned().fsdp_axes() == {"data", "fsdp"}
    assert planned({"w": struct(8)}, [("w", P("fsdp"))]).fsdp_axes() == {"fsdp"}
    assert ts.plan({"w": struct(2**8, 2**8)}, [("w", P("tp"))], "tp=4").fsdp_axes() == frozenset()
    assert planned({"w": struct(7)}, [("w", ts.fsdp("fsdp"))]).fsdp_axes() == frozenset()
    tactic = ts.fsdp("fsdp") | ts.fsdp("data", skip=(0,))
    assert planned({"w": struct(8, 2)}, [("w", tactic)]).fsdp_axes() == {"fsdp", "data"}


# ------------------------------------------------------------------ trees


def test_specs_shardings_and_structs_have_the_trees_structure(mesh) -> None:
    tree, decided = model(), planned(mesh=mesh)
    specs, shardings, structs = decided.specs, decided.shardings, decided.structs
    for planned_tree in (specs, shardings, structs):
        assert jax.tree.structure(planned_tree) == jax.tree.structure(tree)
    block = specs["blocks"][1]
    assert (block.weight, block.bias, block.activation) == (P("fsdp"), P("fsdp"), P())
    assert shardings["blocks"][1].weight == NamedSharding(mesh, P("fsdp"))
    assert shardings["blocks"][1].activation == P()
    assert structs["blocks"][1].activation is jax.nn.gelu
    assert structs["none"] is None
    weight = structs["blocks"][1].weight
    assert (weight.shape, weight.dtype) == ((16, 8), np.float32)
    assert weight.sharding == NamedSharding(mesh, P("fsdp"))
    assert structs["key"].dtype == tree["key"].dtype
    specs["head"] = P("fsdp")
    assert decided.specs["head"] == P("data")


# ------------------------------------------------------------------ equality


def test_plans_are_equal_when_mesh_shapes_and_decisions_are(mesh) -> None:
    tree = {"w": struct(8, 8), "b": struct(8)}
    one = planned(tree, [("w", P("fsdp", None)), ("b", None)])
    by_tactic = [("w", ts.fsdp("fsdp", skip=[1])), ("b", None)]
    same = [
        planned(tree, [("b", P()), (".*", P("fsdp"))], mesh),
        planned({"w": np.zeros((8, 8), "float32"), "b": struct(8)}, by_tactic),
    ]
    for other in same:
        assert one == other
        assert hash(one) == hash(other)
    different = [
        planned(tree, [("w", P(None, "fsdp")), ("b", None)]),
        planned({**tree, "b": struct(9)}, [("w", P("fsdp")), ("b", None)]),
        planned({**tree, "b": struct(8, dtype="int32")}, [("w", P("fsdp")), ("b", None)]),
        planned({"w": struct(8, 8), "c": struct(8)}, [("w", P("fsdp")), ("c", None)]),
        planned(tree, [("w", P("fsdp")), ("b", None)], mesh_of(fsdp=4, data=2)),
    ]
    assert all(one != other for other in different)


# ------------------------------------------------------------------ text


def test_describe() -> None:
    rules = [("blocks/1/bias", None), *RULES, ("unused", None)]
    assert str(planned(rules=rules)).splitlines() == [
        "path                  array          spec        per device  why",
        "blocks/{0..2}/weight  float32[16,8]  P('fsdp',)       384 B  rule 3 'weight' fsdp('fsdp')",
        "blocks/{0,2}/bias     float32[8]     P('fsdp',)        16 B  rule 1 'bias'"
        " P('fsdp', 'data'): trimmed data",
        "blocks/1/bias         float32[8]     P()               32 B  rule 0 'blocks/1/bias'",
        "head                  bfloat16[8,6]  P('data',)        48 B  rule 2 'head'"
        " P('data', 'fsdp'): indivisible fsdp on dim 1",
        "key                   key<fry>[]     P()                8 B  scalar",
        "step                  int32[]        P()                4 B  scalar",
        "9 leaves, 458 elements, 1.7 KiB in all; 3 leaves are replicated.",
        "492 B on the fullest of 8 devices (data=2, fsdp=4), 2.26x an even split.",
    ]


def test_the_reason_in_a_line() -> None:
    tree = {"small": struct(2), "odd": struct(7), "w": struct(8)}
    rules = [("small", ts.fsdp("fsdp", min_size=4)), ("odd", ts.fsdp("fsdp"))]
    assert str(planned(tree, rules)).splitlines()[1:4] == [
        "odd    float32[7]  P()         28 B  rule 1 'odd' fsdp('fsdp'): no-dim fsdp",
        "small  float32[2]  P()          8 B  rule 0 'small' fsdp('fsdp', min_size=4): too-small",
        "w      float32[8]  P()         32 B  unmatched",
    ]
    of_a_leaf = str(planned(struct(8), [("", None)])).splitlines()
    assert of_a_leaf[1] == "(the tree)  float32[8]  P()         32 B  rule 0 ''"


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ([[struct(8)] * 3] * 2, ["{0..1}/{0..2}"]),
        ([[struct(8)] * 3, [struct(8)] * 2], ["0/{0..2}", "1/{0..1}"]),
        ({"layer_07": struct(8), "layer_08": struct(8)}, ["layer_{07..08}"]),
        ({"h1": {"w": struct(8)}, "h9": {"w": struct(8)}}, ["h{1,9}/w"]),
    ],
)
def test_only_full_grids_are_folded(tree: Any, paths: list[str]) -> None:
    lines = str(planned(tree, [("", None)])).splitlines()[1:-2]
    assert [line.split()[0] for line in lines] == paths


# ------------------------------------------------------------------ other meshes, other trees


def test_on_another_mesh_the_same_rules_decide() -> None:
    other = mesh_of(data=1, fsdp=3)
    decided = planned()
    moved = decided.on(other)
    assert moved == planned(mesh=other)
    assert moved.specs["head"] == P("data", "fsdp")
    assert moved.specs["blocks"][0].weight == P()
    assert jax.tree.structure(moved.specs) == jax.tree.structure(decided.specs)
    assert moved.structs["blocks"][0].activation is jax.nn.gelu
    assert moved.on(MESH) == decided
    difference = decided.diff(moved)
    assert difference.bytes == moved.bytes_per_device()  # every shard counts in full
    assert "The mesh changes from data=2, fsdp=4 to data=1, fsdp=3." in str(difference)
    by_size = [("w", lambda path, leaf: P("fsdp") if leaf.shape[0] % 3 == 0 else P())]
    assert planned({"w": np.zeros((6, 2))}, by_size).on(other).specs == {"w": P("fsdp")}


def test_follow() -> None:
    params = {"dense": {"kernel": struct(16, 8), "bias": struct(8)}}
    rules = [("^dense/kernel", P("data", "fsdp")), ("bias", P(None, "data"))]
    decided = planned(params, rules)
    for optimizer in (optax.adam(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2)):
        state = jax.eval_shape(optimizer.init, params)
        moments = decided.follow(state)
        assert moments.mesh == decided.mesh
        assert jax.tree.structure(moments.structs) == jax.tree.structure(state)
        # One rule is anchored: applied to the state, it would match nothing.
        other = mesh_of(data=4, fsdp=2)
        assert moments.on(other) == decided.on(other).follow(state)
    leaves = by_path(decided.follow(jax.eval_shape(optax.adam(0.1).init, params)))
    assert leaves["0/mu/dense/kernel"].decision == by_path(decided)["dense/kernel"].decision
    assert [a.kind for a in leaves["0/nu/dense/bias"].adjustments] == ["trimmed"]
    assert leaves["0/count"].given == P()


def test_follow_keeps_non_array_leaves() -> None:
    decided = planned()
    row = {"head": struct(8)}  # of (8, 6), whose other dim could not be split
    average = decided.follow({"ema": model(), "decay": 0.9, "extra": struct(5, 5), "row": row})
    of_row = by_path(average)["row/head"]
    assert (of_row.given, of_row.adjustments) == (P("data"), ())
    assert average.structs["decay"] == 0.9
    assert average.structs["ema"]["blocks"][0].activation is jax.nn.gelu
    assert average.specs["ema"]["blocks"][1].weight == P("fsdp")
    extra = by_path(average)["extra"]
    assert (extra.given, extra.rule, extra.adjustments) == (P(), None, ())
    with pytest.raises(ts.ShardingRuleError, match="ema/head"):
        average.check()
    codes = {finding.code for finding in average.findings}
    assert codes >= {"indivisible", "trimmed"}
    assert "shadowed-rule" not in codes
    (extra,) = [str(finding) for finding in average.findings if finding.paths == ("extra",)]
    assert extra.endswith("that this one follows. Plan it by rules of its own.")


# ------------------------------------------------------------------ diffs


@pytest.mark.parametrize(
    ("before", "after", "received"),
    [
        (P(), P("fsdp"), 0),
        (P("fsdp"), P(), 512 * 3 // 4),
        (P("data"), P("fsdp"), 512 // 4),
        (P(("data", "fsdp")), P("data"), 512 // 2 - 512 // 8),
        (P("fsdp"), P(None, "fsdp"), 512 // 4 - 512 // 16),
        (P("data", "fsdp"), P("fsdp", "data"), 512 // 8),
    ],
)
def test_the_bytes_that_a_device_receives(before, after, received, mesh) -> None:
    tree = {"w": np.arange(128, dtype="float32").reshape(16, 8)}
    one, two = planned(tree, [("w", before)], mesh), planned(tree, [("w", after)], mesh)
    difference = one.diff(two)
    assert difference.bytes == received
    # Without devices, an upper bound.
    assert one.on(MESH).diff(two.on(MESH)).bytes >= received
    (change,) = difference.changes
    assert (change.path, change.before.given, change.after.given) == ("w", before, after)
    # On real devices: the part of the new shard that is not in the old one, at most.
    olds, news = (
        sorted(
            jax.device_put(tree["w"], plan.shardings["w"]).addressable_shards,
            key=lambda shard: shard.device.id,
        )
        for plan in (one, two)
    )
    pairs = zip(olds, news, strict=True)
    missing = [np.setdiff1d(np.asarray(new.data), np.asarray(old.data)).size for old, new in pairs]
    assert max(missing) * 4 == received


def test_an_empty_diff_and_an_empty_plan() -> None:
    tree = {"w": struct(8, 8)}
    same = planned(tree, [("w", P("fsdp"))]).diff(planned(tree, [(".*", P("fsdp", None))]))
    assert not same
    assert str(same).startswith("0 leaves change; a device receives at most 0 B.")
    assert str(planned({}, [])).endswith("0 B on the fullest of 8 devices (data=2, fsdp=4).")


def test_a_diff_lists_new_removed_and_resharded_leaves() -> None:
    old = {"layers": [{"w": struct(16, 8)} for _ in range(3)], "b": struct(8)}
    new = {"layers": [{"w": struct(16, 8)} for _ in range(4)], "c": struct(8)}
    one = planned(old, [("", P("fsdp"))])
    text = str(one.diff(planned(new, [("w", P(None, "fsdp")), ("", None)])))
    assert text.splitlines() == [
        "path             array          before      after            received",
        "b                float32[8]     P('fsdp',)  -                     0 B",
        "layers/{0..2}/w  float32[16,8]  P('fsdp',)  P(None, 'fsdp')     288 B",
        "c                float32[8]     -           P()                  32 B",
        "layers/3/w       float32[16,8]  -           P(None, 'fsdp')     128 B",
        "6 leaves change; a device receives at most 448 B."
        " The fullest device goes from 392 B to 544 B.",
    ]


def test_a_mesh_as_text_needs_no_devices_and_means_them_where_there_are_as_many() -> None:
    tree = {"w": struct(8, 64)}
    rules = [("w", ts.fsdp("fsdp", min_size=0))]
    decided = ts.plan(tree, rules, "data=2,fsdp=-1")
    assert decided == ts.plan(tree, rules, MESH)
    assert isinstance(decided.mesh, jax.sharding.Mesh)
    assert decided.on("fsdp=16384").mesh.size == 16384
    assert isinstance(ts.plan(tree, [], "fsdp=16").mesh, AbstractMesh)
    for make in (lambda text: ts.plan(tree, rules, text), decided.on):
        with pytest.raises(ts.MeshError, match="fsdp"):
            make("fsdp")


# ------------------------------------------------------------------ subtrees


def test_the_plan_of_a_subtree_is_the_plan_of_that_tree() -> None:
    model = {"layers": [{"w": struct(64, 8)}, {"w": struct(64, 16)}], "name": "mlp"}
    rules = [("w", P("fsdp"))]
    whole = ts.plan((model, {"count": struct()}), rules, "fsdp=8", min_size=0)
    alone = ts.plan(model, rules, "fsdp=8", min_size=0)
    assert whole[0] == whole["0"] == alone
    assert whole[0].specs == alone.specs
    assert whole["0/layers/1/w"].specs == P("fsdp")
    assert whole[0]["layers"]["1"].structs["w"].shape == (64, 16)
    assert whole[0].on("fsdp=4") == alone.on("fsdp=4")
    assert whole[0].follow(model) == alone.follow(model)
    assert whole[0].findings == whole.findings
    slashed = planned({"a": {"b": struct(8)}, "a/c": {"d": struct(16)}}, [(".*", P("fsdp"))])
    assert slashed["a/b"].leaves[0].shape == (8,)
    assert slashed["a/c/d"].leaves[0].shape == (16,)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("modle", "has no 'modle'. At its root it has model, step. Did you mean 'model'?"),
        ("model/2", "has no 'model/2'. Below 'model' it has 0, 1."),
        ("step/x", "has no 'step/x'. Below 'step' it has nothing: it is a leaf."),
    ],
)
def test_a_path_that_a_plan_lacks(path: Any, message: str) -> None:
    whole = ts.plan({"model": [struct(8), struct(8)], "step": struct()}, [], "fsdp=8")
    with pytest.raises(ts.SpecError) as caught:
        whole[path]
    assert message in str(caught.value)


def test_a_plan_is_not_a_sequence() -> None:
    whole = ts.plan({}, [], "fsdp=8")
    assert whole  # and still true
    for use in (list, len):
        with pytest.raises(TypeError, match="Plan"):
            use(whole)


# ------------------------------------------------------------------ JSON

LAYERS = {
    "blocks": [{"weight": struct(16, 8), "bias": struct(8), "activation": jax.nn.gelu}] * 11,
    "key": jax.eval_shape(jax.random.key, 0),
}


def written(rules: Any, mesh: Any = MESH, tree: Any = LAYERS) -> Any:
    return json.loads(ts.plan(tree, rules, mesh, min_size=0).to_json())


def test_json_has_each_leaf_and_names_no_devices(mesh) -> None:
    rules = [("bias", P("fsdp", "data")), ("weight", ts.fsdp("fsdp", memory="pinned_host"))]
    raw = written(rules, mesh)
    assert raw == written(rules)
    assert "cpu" not in json.dumps(raw).lower()
    assert list(raw) == ["treeshard_plan", "mesh", "min_size", "strict", "rules", "leaves"]
    assert raw["mesh"][0] == {"axis": "data", "size": 2, "type": "auto"}
    assert [leaf["path"] for leaf in raw["leaves"][:2]] == ["blocks/0/bias", "blocks/0/weight"]
    bias, weight = raw["leaves"][:2]
    assert (bias["asked"], bias["given"]) == ("P('fsdp', 'data')", "P('fsdp',)")
    assert [note["kind"] for note in bias["adjustments"]] == ["trimmed"]
    assert weight == {
        "path": "blocks/0/weight",
        "shape": [16, 8],
        "dtype": "float32",
        "asked": "P('fsdp',)",
        "given": "P('fsdp',)",
        "memory": "pinned_host",
        "rule": 1,
        "adjustments": [],
    }
    assert raw["leaves"][-1]["dtype"] == "key<fry>"


def replicate_all(path: str, leaf: Any) -> P:
    return P()


@pytest.mark.parametrize(
    ("pattern", "action", "kind", "text"),
    [
        (".*", None, "replicate", "None"),
        (".*", ts.fsdp("fsdp") | ts.replicate(), "tactic", "fsdp('fsdp') | replicate()"),
        ("(?i)W", P("fsdp"), "spec", "P('fsdp',)"),
        (".*", replicate_all, "function", "replicate_all"),
        (".*", ("rows", None), "names", "('rows', None)"),
    ],
    ids=["none", "tactic", "spec", "function", "names"],
)
def test_json_has_rules_as_text(pattern: Any, action: Any, kind: str, text: str) -> None:
    with ts.logical_axis_rules([("rows", None)]):
        (rule,) = written([(pattern, action)], tree={"b": struct(8), "w": struct(8, 8)})["rules"]
    assert rule == {"pattern": pattern, "kind": kind, "action": text}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (re.compile("A b|c", re.IGNORECASE | re.VERBOSE), "(?ix)A b|c"),
        (re.compile("(?i)b", re.ASCII | re.DOTALL), "(?as)(?i)b"),
        (re.compile("(?i)b", re.IGNORECASE), "(?i)b"),
    ],
)
def test_json_has_the_flags_of_compiled_patterns(pattern: re.Pattern[str], text: str) -> None:
    (rule,) = written([(pattern, None)], tree={"b": struct(8)})["rules"]
    assert rule["pattern"] == text
    assert re.compile(text).flags == pattern.flags


def test_json_has_integers_of_numpy() -> None:
    n = np.int64(4)
    rules = [("w", ts.fsdp("fsdp", min_size=n, skip=(n - 4,))), ("b", ts.shard_dim("fsdp", n - 4))]
    tree = {"w": struct(4, 4), "b": struct(4)}
    plan = ts.plan(tree, rules, mesh_of(fsdp=4), min_size=n)
    assert type(plan.min_size) is int
    raw = json.loads(plan.to_json())
    assert (raw["min_size"], raw["mesh"][0]["size"], raw["leaves"][0]["shape"]) == (4, 4, [4])
    texts = ["fsdp('fsdp', min_size=4, skip=(0,))", "shard_dim('fsdp', 0)"]
    assert [rule["action"] for rule in raw["rules"]] == texts


def test_leaves_that_share_a_path_are_not_written() -> None:
    twins = {"a/b": struct(8), "a": {"b": struct(8)}}
    with pytest.raises(ts.ShardingRuleError, match=r"\['a'\]\['b'\] and \['a/b'\] share this path"):
        written([("", None)], tree=twins)

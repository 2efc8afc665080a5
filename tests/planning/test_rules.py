"""Rules: which one decides a leaf, the resulting spec, and the errors for bad rules.

The engine caches decisions, so it is compared with the plain loop on generated trees and
patterns.
"""

import collections
import math
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import linen, nnx
from helpers import mesh_of, struct
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import fsdp, leaf_paths, match_partition_rules, replicate
from treeshard._core.spec_trees import ResolvedSpec
from treeshard._core.specs import trim_spec
from treeshard._planning.matching import decide
from treeshard._planning.rules import read_rules
from treeshard.compat._strategies import parse_strategy

MESH = mesh_of(data=2, fsdp=4)


def match(rules: Any, tree: Any, mesh: Any = None, **options: Any) -> Any:
    return match_partition_rules(rules, tree, mesh, **{"min_size": 0, **options})


def message_of(rules: Any, tree: Any, mesh: Any = None, **options: Any) -> str:
    with pytest.raises(ts.ShardingRuleError) as raised:
        match(rules, tree, mesh, **options)
    return str(raised.value)


class Sly:
    """Raises when compared, as arrays do."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("compared")

    __hash__ = None  # pyright: ignore


class Linear(eqx.Module):
    weight: Any
    bias: Any
    name: Any = eqx.field(static=True, default="linear")


# ------------------------------------------------------------------ the rule that decides


@pytest.mark.parametrize(
    ("rules", "spec"),
    [
        pytest.param([("attn", P("data")), ("q", P("fsdp"))], P("data"), id="first-wins"),
        pytest.param([(re.compile("ATTN", re.I), P("data"))], P("data"), id="compiled"),
        pytest.param((["q", P("data")],), P("data"), id="lists-and-tuples"),
        pytest.param([("q", lambda path, leaf: P(None, path[-1]))], P(None, "q"), id="function"),
        pytest.param([("q", lambda path, leaf: None)], P(), id="function-none"),
        pytest.param([("q", P("data", None, None))], P("data"), id="trailing-nones-vanish"),
    ],
)
def test_which_rule_decides(rules, spec) -> None:
    for mesh in (None, AbstractMesh((2, 2, 2), ("data", "fsdp", "q"))):
        found = match(rules, {"layers": [{"attn": {"q": struct(8, 8)}}]}, mesh)
        assert found == {"layers": [{"attn": {"q": spec}}]}


def test_scalars_and_leaves_without_a_shape_need_no_rule() -> None:
    tree = {
        1: np.float32(2),
        2: struct(),
        3: [jax.nn.relu, "text", 3, np.array([None]), np.array(["text"])],
        4: (None, {}),
    }
    whole = {1: P(), 2: P(), 3: [P()] * 5, 4: (None, {})}
    assert match([], tree) == match([("", P("data"))], tree) == whole
    assert match([("^", P("data"))], struct(8)) == P("data")


def test_boxes_stay_in_the_tree_and_not_in_paths() -> None:
    box = linen.Partitioned(struct(8, 8), names=("embed", None))
    variable = nnx.Param(np.zeros((8, 8)))
    specs = match([("layers/1/w$", P("data")), ("w$", P("fsdp"))], {"layers": [{"w": box}] * 2})
    assert specs["layers"][0]["w"] == linen.Partitioned(P("fsdp"), names=("embed", None))
    assert specs["layers"][1]["w"].value == P("data")
    assert jax.tree.leaves(match([("^w$", P("data"))], {"w": variable})) == [P("data")]
    by_rank = ("a", lambda path, leaf: P(*["data"] * leaf.ndim))
    rules = [by_rank, ("b", ts.logical_partitioning([("embed", "fsdp")]))]
    specs = match(rules, {"a": linen.Partitioned(np.zeros(8), names=("x",)), "b": box}, MESH)
    assert jax.tree.leaves(specs) == [P("data"), P("fsdp")]


# ------------------------------------------------------------------ the resulting spec


def decisions(rules: Any, tree: Any, mesh: Any = None, min_size: int = 0) -> dict[str, Any]:
    decided = decide(read_rules(rules), tree, jax.tree.flatten(tree), mesh, min_size)
    return dict(zip(decided.paths, decided.decisions, strict=True))


def test_leaves_below_min_size_are_replicated_but_must_match() -> None:
    tree = {"big": struct(16), "small": struct(15), "norm": struct(2), "f": struct(2)}
    rules = [("norm", None), ("f", lambda path, leaf: 1 / 0), (".*", P("data"))]
    found = decisions(rules, tree, MESH, min_size=16)
    assert found["big"].spec == P("data")
    small = found["small"]
    assert (small.requested, small.spec, small.rule, small.pattern) == (P("data"), P(), 2, ".*")
    assert [note.kind for note in found["small"].adjustments] == ["explicit-spec-too-small"]
    assert found["norm"] == ResolvedSpec(P(), P(), rule=0, pattern="norm")
    assert [note.kind for note in found["f"].adjustments] == ["too-small"]
    assert "small: shape (15,), no rule" in message_of([("big", None)], {"small": struct(15)})


def test_layers_share_a_decision_unless_they_differ_in_a_shape() -> None:
    layers = [{"w": struct(8), "b": struct(8)} for _ in range(12)]
    layers[7] = {"w": struct(8), "b": struct(6)}
    found = decisions([("w|b", fsdp("fsdp"))], {"layers": layers}, MESH)
    of_b = [found[f"layers/{i}/b"] for i in range(12)]
    assert [decision.spec for decision in of_b] == [P("fsdp")] * 7 + [P()] + [P("fsdp")] * 4
    assert len({id(decision) for decision in found.values()}) == 2


def test_one_threshold_for_every_dtype_and_tactic(monkeypatch) -> None:
    tree = {"below": struct(2**14 - 8), "at": struct(2**14), "half": struct(2**14, dtype="int16")}
    specs = {"below": P(), "at": P("fsdp"), "half": P("fsdp")}
    for rules in ([(".*", fsdp("fsdp"))], [(".*", parse_strategy("fsdp('fsdp')"))]):
        assert match_partition_rules(rules, tree, MESH) == specs == ts.plan(tree, rules, MESH).specs
    assert {path: fsdp("fsdp")(P(), MESH, path, x) for path, x in tree.items()} == specs
    monkeypatch.setenv("MIN_SHARDING_SIZE", str(2**14 - 8))
    assert match_partition_rules(rules, tree, MESH)["below"] == P("fsdp")


RULES = [("batch", ("data", "absent")), ("embed", "fsdp"), ("heads", "fsdp")]


def test_logical_names_as_actions() -> None:
    tree = {"fits": struct(8, 8), "long": struct(8), "odd": struct(8, 6)}
    rules = [("fits|long", ("batch", "embed")), ("odd", (None, "heads"))]
    with ts.logical_axis_rules(RULES):
        found = ts.plan(tree, rules, MESH, min_size=0)
    assert found.specs == {"fits": P("data", "fsdp"), "long": P("data"), "odd": P()}
    kinds = [[note.kind for note in leaf.adjustments] for leaf in found.leaves]
    absent = "logical-axis-not-in-mesh"
    assert kinds == [[absent], [absent, "trimmed"], ["indivisible"]]


def test_names_that_do_not_resolve() -> None:
    text = message_of([("w", ("embed",)), ("", None)], {"w": struct(8)})
    assert text.startswith("rule 0, 'w': ('embed',) is a tuple of logical names, and no rules are")
    with ts.logical_axis_rules(RULES):
        text = message_of([("w", ("embed", "embed")), ("", ("batch", "batch"))], {})
    assert text.splitlines()[0] == "2 rules have logical names that do not resolve:"
    assert "rule 1, '': ('batch', 'batch'): 'batch' occurs twice" in text


def test_only_tactics_use_the_mesh_in_force(mesh) -> None:
    tree = {"w": struct(8, 4)}
    with jax.set_mesh(mesh):
        assert match([("w", P("nowhere"))], tree) == {"w": P("nowhere")}
        assert match([("w", fsdp("fsdp"))], tree) == {"w": P("fsdp")}
        assert "no axis 'fdsp'" in message_of([("w", fsdp("fdsp"))], tree)
    with pytest.raises(ts.NoMeshError, match="^match_partition_rules: no mesh is in force"):
        match([("w", fsdp("fsdp"))], tree)


# ------------------------------------------------------------------ errors


TREE = {"attn": {"q": struct(8, 6), "bias": struct(6)}, "mlp": struct(16, 8)}


def test_all_bad_leaves_at_once() -> None:
    rules = [("q", P("data", "fsdp")), ("bias", P("fdsp")), ("nothing", None)]
    with pytest.raises(ts.UnknownAxisError) as raised:
        match(rules, TREE, MESH)
    with pytest.raises(ts.ShardingRuleError) as by_check:
        ts.plan(TREE, rules, MESH, min_size=0).check()
    assert str(by_check.value) == str(raised.value)
    assert type(by_check.value) is type(raised.value)
    assert str(raised.value).splitlines() == [
        "3 leaves do not follow the rules. The mesh has data=2, fsdp=4.",
        "  attn/bias: shape (6,), P('fdsp',) by rule 1, 'bias': the mesh has no axis 'fdsp'. It has"
        " data=2, fsdp=4. Did you mean 'fsdp'?",
        "  attn/q: shape (8, 6), P('data', 'fsdp') by rule 0, 'q': P('data', 'fsdp') splits dim 1"
        " of shape (8, 6) into 4 parts, and 6 is not divisible by 4. Pad it to 8, or use another"
        " dim or axis.",
        "  mlp: shape (16, 8), no rule matches.",
        'To replicate leaves that no other rule matches, add a last rule (".*", None).',
    ]
    text = message_of([("attn", None)], TREE, MESH)
    assert text.startswith(
        "mlp: shape (16, 8), no rule matches. The mesh has data=2, fsdp=4.\nTo replicate"
    )
    text = message_of([], [struct(8) for _ in range(25)])
    assert text.startswith("25 leaves do not follow the rules.")
    assert "  ... and 15 more" in text


def test_not_strict_replicates_leaves_and_drops_entries() -> None:
    rules = [("q", P("data", "fsdp")), ("bias", P("fdsp"))]
    specs = match(rules, TREE, MESH, strict=False)
    assert specs == {"attn": {"q": P("data"), "bias": P()}, "mlp": P()}


# ------------------------------------------------------------------ specs that are too long

RANKS = {"cube": struct(4, 8, 8), "matrix": struct(8, 8), "vector": struct(8), "scalar": struct()}
# A spec, or names, for leaves of every rank; what they get, and those that lose an axis.
LONG: dict[str, tuple[Any, dict[str, P], list[str]]] = {
    "matrices": (P("data", "fsdp"), {"vector": P("data")}, ["vector"]),
    "the only axis": (P(None, "fsdp"), {"vector": P()}, ["vector"]),
    "three": (
        P("data", None, "fsdp"),
        {"matrix": P("data"), "vector": P("data")},
        ["matrix", "vector"],
    ),
    "several on a dim": (P(None, ("data", "fsdp")), {"vector": P()}, ["vector"]),
    "trailing Nones": (P("data", None, None, None), dict.fromkeys(RANKS, P("data")), []),
    "Nones alone": (P(None, None, None, None), dict.fromkeys(RANKS, P()), []),
    "unconstrained": (P("data", None, P.UNCONSTRAINED), {"matrix": P("data")}, []),
    "names": (("rows", None, "columns"), {"matrix": P("data")}, ["matrix", "vector"]),
    "function": (lambda path, leaf: P("data", None, "fsdp"), {}, ["matrix", "vector"]),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("mesh", [None, MESH], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("name", LONG)
def test_a_spec_is_trimmed_to_the_rank_with_one_warning(name: str, mesh: Any, strict: bool) -> None:
    action, given, lost = LONG[name]
    with (
        ts.logical_axis_rules([("rows", "data"), ("columns", "fsdp")]),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        specs = match([(".*", action)], RANKS, mesh, strict=strict)
        plan = ts.plan(RANKS, [(".*", action)], MESH, min_size=0, strict=strict)
    expected = {"scalar": P()} | {key: spec for key, spec in given.items() if key != "scalar"}
    assert expected.items() <= specs.items()
    assert plan.specs == specs
    texts = [str(each.message) for each in told]
    assert len(texts) == bool(lost)
    assert all(f"{path}: shape" in texts[0] for path in lost)
    [*found] = [x for x in plan.findings if x.code == "trimmed"]
    assert [sorted(x.paths) for x in found] == ([lost] if lost else [])
    assert {x.severity for x in plan.findings} <= {"warning"}
    if lost:
        with pytest.warns(ts.ShardingWarning, match=f"{lost[-1]}: shape"):
            plan.check()


def test_one_warning_and_one_finding_for_all_rules() -> None:
    tree = {"layers": [{"q": struct(8, 8), "b": struct(8)}] * 2, "norm": struct(16)}
    rules = [("q|b", P("data", "fsdp")), ("norm", P(None, "data"))]
    lines = [
        "3 leaves are not sharded as their rules say:",
        "  layers/0/b: shape (8,), P('data', 'fsdp') by rule 0, 'q|b': P('data', 'fsdp') has 2"
        " entries, but shape (8,) has 1 dim. It is applied without the last entry.",
        "  layers/1/b: shape (8,), P('data', 'fsdp') by rule 0, 'q|b': P('data', 'fsdp') has 2"
        " entries, but shape (8,) has 1 dim. It is applied without the last entry.",
        "  norm: shape (16,), P(None, 'data') by rule 1, 'norm': P(None, 'data') has 2 entries, but"
        " shape (16,) has 1 dim. It is applied without the last entry.",
        "To silence this, give such leaves a rule of their own, whose spec has at most one entry"
        " for each dim.",
    ]
    plan = ts.plan(tree, rules, MESH, min_size=0)
    placed_by = ts.plan(tree, rules, ts.make_mesh("data=2,fsdp=4"), min_size=0)
    arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
    for check in (
        lambda: match(rules, tree),
        plan.check,
        lambda: ts.shard(arrays, placed_by),
    ):
        with pytest.warns(ts.ShardingWarning) as warned:
            check()
        assert [str(one.message).splitlines() for one in warned] == [lines]
    ts.shard(arrays, placed_by)  # says nothing again
    [finding] = [x for x in plan.findings if x.code == "trimmed"]
    assert str(finding) == (
        "warning trimmed: layers/{0..1}/b, norm: rule 0 'q|b' and rule 1 'norm': the spec has more"
        " entries than these leaves have dims, so 'fsdp' and 'data' are dropped. To silence this,"
        " give such leaves a rule of their own, whose spec has at most one entry for each dim."
    )
    assert finding.rule is None


def test_unmatched_leaves_and_unknown_axes_are_errors_all_the_same() -> None:
    rules = [("vector", P("data", "fsdp")), ("matrix", P(None, None, "fdsp"))]
    for strict in (True, False):
        plan = ts.plan(RANKS, rules, MESH, min_size=0, strict=strict)
        with pytest.raises(ts.UnknownAxisError) as raised:
            plan.check()
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("2 leaves do not follow the rules.")
    assert lines[1].startswith("  cube: shape (4, 8, 8), no rule matches.")
    assert "the mesh has no axis 'fdsp'" in lines[2]
    assert "  vector" not in str(raised.value)


def as_there(rules: Any, tree: Any, is_whole: Callable[[Any], bool]) -> Any:
    """EasyLM's and eformer's rules, whose specs are trimmed to the rank."""

    def spec(path: str, leaf: Any) -> P:
        if not getattr(leaf, "shape", ()):
            return P()
        for pattern, asked in rules:
            if re.search(pattern, path):
                return P() if is_whole(leaf) else P(*asked[: len(leaf.shape)])
        raise ValueError(path)

    return ts.named_tree_map(spec, tree)


def a_model(rng: random.Random, depth: int) -> Any:
    """Layers of names that rules of EasyLM are written for, with leaves of rank 0 to 4."""
    if depth == 0:
        return struct(
            *[rng.choice([1, 2, 3, 8, 64]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
        )
    names = rng.sample(NAMES, rng.randint(1, 4))
    if rng.random() < 0.3:
        return [a_model(rng, depth - 1) for _ in names]
    return {name: a_model(rng, rng.randint(0, depth - 1)) for name in names}


NAMES = ["wte", "attn", "wq", "kernel", "bias", "norm", "mlp", "w1", "mu", "count", "embedding"]
AXES = [None, None, "dp", "fsdp", "mp", ("dp", "fsdp")]


def test_rules_of_easylm_and_eformer_need_no_change() -> None:
    rng = random.Random(0)
    trimmed_trees = 0
    for _ in range(500):
        tree = a_model(rng, 4)
        patterns = [*rng.sample(NAMES, 3), f"{rng.choice(NAMES)}/{rng.choice(NAMES)}", ".*"]
        rules = [(name, P(*rng.choices(AXES, k=rng.randint(0, 4)))) for name in patterns]
        min_size = rng.choice([0, 8, 64])
        easylm = as_there(rules, tree, lambda x: math.prod(x.shape) == 1)
        eformer = as_there(rules, tree, lambda x, most=min_size: math.prod(x.shape) < most)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert short(match(rules, tree, min_size=2)) == short(easylm)
            trimmed_trees += bool(told)
            assert short(match(rules, tree, min_size=min_size)) == short(eformer)
    assert 50 < trimmed_trees < 450


def short(specs: Any) -> Any:
    return jax.tree.map(trim_spec, specs, is_leaf=lambda x: isinstance(x, P))


def test_all_malformed_rules_are_listed(unchecked) -> None:
    patterns = [(x, None) for x in ("a(b", 3, re.compile(b"a"), ("(q|k)", "kernel"))]
    rules = ["attn", *patterns, ("a", "fsdp('x')"), ("b", (None,)), ("right", None)]
    starts = [
        " is not a pair: 'attn'. A rule is a pair (pattern, action), such as",
        ": the pattern 'a(b' does not compile: missing ), unterminated subpattern at",
        ": the pattern 3 does not compile: first argument must be string",
        ": the pattern re.compile(b'a') is bytes.",
        ": ('(q|k)', 'kernel') has a pattern for each key, as rules of t5x have. Join them to one"
        ' that matches the path: "(^|/)(q|k)/kernel(/|$)".',
        ", 'a': the action is \"fsdp('x')\" (str). An action is a PartitionSpec, a",
        ", 'b': the action is (None,) (tuple).",
    ]
    head, *lines = message_of(rules, {}).splitlines()
    assert head == "7 rules are malformed:"
    for i, (line, start) in enumerate(zip(lines, starts, strict=True)):
        assert line.startswith(f"  rule {i}{start}")
    message = 'rules are dict. Give a list of (pattern, action) pairs, such as [("norm|bias", None)'
    assert message in message_of({"attn": None}, {})


def test_functions_that_do_not_return_a_spec() -> None:
    text = message_of([("bias", lambda path, leaf: ("data",)), ("", lambda path, leaf: 3)], TREE)
    assert text.splitlines()[:3] == [
        "The actions of rules returned no spec for 3 leaves:",
        "  attn/bias: the function of rule 0, 'bias', returned ('data',) (tuple). Return a"
        " PartitionSpec, or None to replicate.",
        "  attn/q: the function of rule 1, '', returned 3 (int). Return a PartitionSpec, or None to"
        " replicate.",
    ]


def test_log_sharding_move_warns_of_trimmed_specs_and_small_leaves(monkeypatch, recwarn) -> None:
    rules = [("q", P("data", "fsdp")), ("", ts.fsdp("data"))]
    monkeypatch.setenv("LOG_SHARDING_MOVE", "0")
    match(rules, TREE, MESH, min_size=7, strict=False)
    assert not recwarn
    monkeypatch.setenv("LOG_SHARDING_MOVE", "1")
    for call in (
        lambda: match(rules, TREE, MESH, min_size=7, strict=False),
        lambda: ts.plan(TREE, rules, MESH, min_size=7),
    ):
        message = "2 leaves are not sharded as their rules say:\n  attn/bias: .* 6 elements, fewer"
        with pytest.warns(ts.ShardingWarning, match=message):
            call()


# ------------------------------------------------------------------ specs of small leaves


def test_a_spec_that_min_size_leaves_unused_warns_once() -> None:
    tree = {"layers": [{"b": np.zeros(8), "w": np.zeros((8, 16))}] * 2}
    rules = [(".*", P("fsdp"))]
    plan = ts.plan(tree, rules, MESH, min_size=9)
    assert "2 leaves are replicated.\n2 of them have a spec that `min_size` leaves un" in str(plan)
    placed_by = ts.plan(tree, rules, ts.make_mesh("data=2,fsdp=4"), min_size=9)
    fact = "shape (8,), P('fsdp',) by rule 0, '.*': 8 elements, fewer than min_size=9."
    lines = [
        "2 leaves are not sharded as their rules say:",
        f"  layers/0/b: {fact}",
        f"  layers/1/b: {fact}",
        "To shard small leaves by such a spec, pass `min_size=0`. To replicate them, give them a"
        " rule with None.",
    ]
    for check in (
        lambda: match(rules, tree, MESH, min_size=9),
        plan.check,
        lambda: ts.init_sharded(lambda: tree, rules=rules, mesh="data=2,fsdp=4", min_size=9),
        lambda: ts.shard(tree, placed_by),
    ):
        with pytest.warns(ts.ShardingWarning) as warned:
            check()
        assert [str(one.message).splitlines() for one in warned] == [lines]
    ts.shard(tree, placed_by)  # says nothing again


def test_small_leaves_are_replicated_silently_where_no_spec_would_split_them() -> None:
    mesh = mesh_of(data=8, fsdp=1)
    tree = {"b": struct(8)}
    for action in (None, P(), ts.fsdp("data"), lambda path, leaf: P("data"), P("fsdp")):
        assert match([("b", action)], tree, mesh, min_size=9) == {"b": P()}
    assert match([("b", P("data"))], {"b": struct(1)}, mesh, min_size=9) == {"b": P()}
    with pytest.warns(ts.ShardingWarning, match="fewer than min_size=9. the mesh has no axis 'x'"):
        match([("b", P("x"))], tree, mesh, min_size=9)


# ------------------------------------------------------------------ the plain loop


def plain_loop(patterns: list[re.Pattern[str]], tree: Any) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        matching = (i for i, pattern in enumerate(patterns) if pattern.search(path))
        if hasattr(leaf, "shape"):
            found.append((path, next(matching, None) if leaf.shape else None))
    return found


KEYS = [
    *("w", "b", "w1", "w10", "layer_1", "layer_2", "layer_12", "attn", "", "a/b", "0", "1w", "3x3"),
    *("_1", "w_1a", "é", "\uff12", "w\n1"),
]
SHAPES = [(), (2,), (2, 3), (0,)]


def a_leaf(rng: random.Random) -> Any:
    return rng.choice([*map(np.zeros, SHAPES), struct(2), struct(2, 3), 1.5, jax.nn.relu])


def a_tree(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.1:
        return None if rng.random() < 0.1 else a_leaf(rng)

    def below() -> Any:
        return a_tree(rng, depth - 1)

    kind = rng.choice(["dict", "list", "same", "module", "box", "ordered"])
    few = range(rng.randint(0, 4))
    match kind:
        case "dict":
            return {key: below() for key in rng.sample(KEYS, len(few))}
        case "list":
            return [below() for _ in few]
        case "same":  # layers: what the engine caches
            layer, odd = below(), below()
            layers = [layer] * rng.choice([2, 3, 12])
            return [*layers, odd, layer] if rng.random() < 0.3 else layers
        case "module":
            return Linear(below(), below(), rng.choice(["x", Sly()]))
        case "box":
            return linen.Partitioned(a_leaf(rng), names=("x",))
        case _:
            return collections.OrderedDict((key, below()) for key in rng.sample(KEYS, len(few)))


PATTERNS = [
    *("", "w", "w1$", "^layer_1", "^a", "layer_1?2", "attn|b", "(?i)W", "/0/", "[0-5]$", "^1$"),
    *(r"/\d/", r"/1\d?$", r"(.)\1", r"(?P<part>\w+)/(?P=part)", "é", ".", "(?!.)"),
]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_engine_agrees_with_the_plain_loop(seed) -> None:
    rng = random.Random(seed)
    tree = a_tree(rng, 4)
    while len(jax.tree.leaves(tree)) > 100 or callable(tree):
        tree = a_tree(rng, 4)
    by_size = [("w", fsdp("fsdp")), ("", P("fsdp"))]
    assert ts.plan(tree, by_size, MESH, min_size=0).specs == match(
        by_size, tree, MESH, strict=False
    )
    asked: list[str] = []

    def by_path(path: str, leaf: Any) -> P:
        asked.append(path)
        return P()

    for _ in range(15):
        patterns = [re.compile(rng.choice(PATTERNS)) for _ in range(rng.randint(1, 5))]
        actions = [rng.choice([None, None, replicate(), by_path]) for _ in patterns]
        rules = list(zip(patterns, actions, strict=True))
        asked.clear()
        decided = decide(read_rules(rules), tree, jax.tree.flatten(tree), MESH, 0)
        found = [decision.rule for decision in decided.decisions]
        expected = plain_loop(patterns, tree)
        assert list(zip(decided.paths, found, strict=True)) == expected, rules
        assert asked == [p for p, i in expected if i is not None and actions[i] is by_path]
        for leaf, decision in zip(decided.arrays, decided.decisions, strict=True):
            unmatched = [note.kind for note in decision.adjustments] == ["unmatched"]
            assert unmatched == (decision.rule is None and bool(getattr(leaf, "shape", ())))

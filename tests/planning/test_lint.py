"""Findings: each one provoked and avoided, and its text."""

from operator import itemgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import struct
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts

MESH = AbstractMesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
ERRORS = {
    "unmatched",
    "rank",
    "axis-not-in-mesh",
    "axis-already-used",
    "already-sharded",
    "indivisible",
    "path-collision",
}


def findings(tree: Any, rules: Any, min_size: int = 0, mesh: Any = MESH) -> Any:
    return ts.plan(tree, rules, mesh, min_size=min_size).findings


W = {"w": struct(8, 16)}
SPLIT = [("w", P("fsdp"))]
TWINS = {"a/b": struct(8), "a": {"b": struct(8)}}
STACK = {"blocks": {"norm": struct(4, 8), "mlp": {"up": struct(4, 8, 16)}}, "out": struct(8, 8)}


@pytest.mark.parametrize(
    ("code", "tree", "wrong", "right"),
    [
        ("unmatched", W, [], SPLIT),
        ("rank", W, [("w", P(None, None, "fsdp"))], [("w", P(None, "fsdp", None))]),
        ("axis-not-in-mesh", W, [("w", P("fdsp"))], SPLIT),
        ("axis-already-used", W, [("w", P("fsdp", "fsdp"))], [("w", P("fsdp", "data"))]),
        ("already-sharded", W, [("w", ts.fsdp("fsdp") | ts.replicate())], [("w", ts.fsdp("fsdp"))]),
        ("indivisible", {"w": struct(6, 16)}, SPLIT, [("w", P(None, "fsdp"))]),
        ("dead-rule", W, [("v", None), *SPLIT], SPLIT),
        ("shadowed-rule", W, [*SPLIT, ("w$", None), ("x|w", None)], [*SPLIT, ("w$", None)]),
        ("left-whole", W, [(".*", None)], SPLIT),
        ("scan-dim", STACK, [("", P("fsdp"))], [("", P(None, "fsdp"))]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_code_is_provoked_and_avoided(code, tree, wrong, right) -> None:
    (finding,) = [finding for finding in findings(tree, wrong) if finding.code == code][:1]
    assert finding.severity == ("error" if code in ERRORS else "warning")
    assert code not in {finding.code for finding in findings(tree, right)}


ARRAY = np.ones((64, 16), "float32")
ONE = np.zeros(1, "float32")
NAMES = np.array(["cat", "dog"])
LAYERS = [{"w": np.ones((64, 16), "float32")} for _ in range(3)]


@pytest.mark.parametrize(
    ("tree", "paths", "text"),
    [
        pytest.param(
            {"embed": {"w": ARRAY}, "head": {"w": ARRAY}},
            ("head/w",),
            "head/w: the same array as embed/w now, and an array of its own once it is placed or"
            " stepped: 1.0 KiB more on each device.",
            id="tied weights",
        ),
        pytest.param(
            {"params": LAYERS, "ema": LAYERS},
            ("params/0/w", "params/1/w", "params/2/w"),
            "params/{0..2}/w: the same array as ema/{0..2}/w now, and an array of its own once it"
            " is placed or stepped: 3.0 KiB more on each device.",
            id="an average that starts as the parameters",
        ),
    ],
)
def test_one_array_at_two_paths_is_planned_as_two(tree, paths, text) -> None:
    plan = ts.plan(tree, SPLIT, MESH, min_size=0)
    (finding,) = plan.findings
    assert finding.paths == paths
    assert str(finding) == (
        f"warning same-array: {text} To keep one array, use `equinox.nn.Shared`."
    )
    assert plan.bytes_per_device() == 1024 * len(plan.leaves)
    assert plan.on("fsdp=8").findings[0].code == "same-array"
    copies = plan.follow({"mu": tree})
    for each in (copies, copies.on("fsdp=8"), copies.padded()):
        (finding,) = each.findings
        assert finding.paths == tuple(f"mu/{path}" for path in paths)
    assert not ts.Plan.from_json(plan.to_json()).findings  # which says so in its docstring
    assert not ts.plan(plan.structs, SPLIT, MESH, min_size=0).findings


@pytest.mark.parametrize(
    "tree",
    [
        eqx.nn.Shared({"a": ARRAY, "b": ARRAY}, itemgetter("b"), itemgetter("a")),
        {"a": ARRAY, "b": ARRAY.copy()},
        {"a": ONE, "b": ONE, "f": jax.nn.relu, "g": jax.nn.relu},
        {"a": NAMES, "b": NAMES, "w": ARRAY},
    ],
    ids=["shared", "copied", "not arrays", "text"],
)
def test_arrays_that_are_not_the_same_have_no_finding(tree: Any) -> None:
    assert "same-array" not in {finding.code for finding in findings(tree, [(".*", None)])}


def test_init_sharded_sees_the_same_array_twice_in_a_trace() -> None:
    def init() -> Any:
        embed = jnp.ones((64, 16))
        return {"embed": embed, "head": embed}

    state, plan = ts.init_sharded(init, rules=[(".*", P("fsdp"))], mesh="fsdp=8", min_size=0)
    assert [finding.paths for finding in plan.findings] == [("head",)]
    assert state["embed"] is not state["head"]


def test_a_path_collision_is_provoked_and_avoided() -> None:
    (finding,) = findings(TWINS, [("b", P("fsdp"))])
    assert str(finding) == (
        "error path-collision: a/b: ['a']['b'] and ['a/b'] share this path. Rename a key: rules"
        " cannot distinguish these leaves, and files cannot hold both."
    )
    with pytest.raises(ts.ShardingRuleError, match="'b'\\] and \\['a/b'\\] share this path"):
        ts.plan(TWINS, [("b", P("fsdp"))], MESH, min_size=0).check()
    with pytest.raises(ts.ShardingRuleError, match="no rule matches(.|\n)*share this path"):
        ts.plan(TWINS | {"c": struct(8)}, [("b", None)], MESH, min_size=0).check()
    assert findings({"a/c": struct(8), "a": {"b": struct(8)}}, [("", P("fsdp"))]) == ()
    assert str(ts.plan(TWINS, [("b", None)], MESH)).count("a/b") == 1  # it can be described


def test_a_correct_plan_has_no_findings() -> None:
    decided = ts.plan(W, SPLIT, MESH, min_size=0)
    assert decided.findings == ()
    decided.check()
    assert ts.plan({}, [], MESH).findings == ()


# ------------------------------------------------------------------ text


LAYERS = {"layers": [{"q": struct(8, 6), "norm": struct(8)} for _ in range(80)]}


@pytest.mark.parametrize(
    ("tree", "rules", "text"),
    [
        (
            LAYERS,
            [("norm", P("data"))],
            "error unmatched: layers/{0..79}/q: shape (8, 6), no rule matches."
            ' Add a rule such as ("q", ...), or a last one (".*", None).',
        ),
        (
            LAYERS,
            [("q", P("data", "fsdp")), ("norm", P("fsdp"))],
            "error indivisible: layers/{0..79}/q: rule 0 'q': P('data', 'fsdp') splits dim 1 of"
            " shape (8, 6) into 4 parts, and 6 is not divisible by 4. Pad it to 8, or use another"
            " dim or axis. `Plan.padded` does so under `jit`, `manual.shard_params(..., pad=True)`"
            " by hand: 2.5 KiB per device instead of 7.5 KiB, with 5.0 KiB of padding in all.",
        ),
        (
            W,
            [("w", P("fdsp"))],
            "error axis-not-in-mesh: w: rule 0 'w': the mesh has no axis 'fdsp'."
            " It has data=2, fsdp=4. Did you mean 'fsdp'?",
        ),
        (
            W,
            [("w", P("fsdp", "fsdp"))],
            "error axis-already-used: w: rule 0 'w': P('fsdp', 'fsdp') names the axis 'fsdp'"
            " twice. An axis can split one dim only.",
        ),
        (
            W,
            [("w", P(None, None, "fsdp"))],
            "error rank: w: rule 0 'w': P(None, None, 'fsdp') has 3 entries, but shape (8, 16) has"
            " 2 dims. Drop the last entry.",
        ),
        (
            {"embed": struct(8, 8)},
            [("embd", None), ("embed", P("fsdp"))],
            "warning dead-rule: rule 0 'embd' matches no leaf. Did you mean 'embed'?"
            " Correct the pattern, or remove the rule.",
        ),
        (
            {"layers": [{"mlp": {"down": struct(8), "up": struct(8)}}] * 12},
            [("mlp/dwn$", None), ("up|down", P("fsdp"))],
            "warning dead-rule: rule 0 'mlp/dwn$' matches no leaf. Did you mean 'mlp/down'?"
            " Correct the pattern, or remove the rule.",
        ),
        (
            {"w": struct(9, 8)},
            [("w", ts.fsdp("fsdp", skip=(1,)))],
            "warning left-whole: w: shape (9, 8) is replicated, 216 B more per device than an even"
            " split over 'fsdp' (4): rule 0 'w', no free dim of shape (9, 8) is divisible by 4."
            " Pad dim 0 to 12, or use another axis. `Plan.padded` does so under `jit`,"
            " `manual.shard_params(..., pad=True)` by hand: 96 B per device instead of 288 B, with"
            " 96 B of padding in all.",
        ),
        (
            {"w": struct(8, 8)},
            [("w", ts.fsdp("fsdp", skip=(0, 1)))],
            "warning left-whole: w: shape (8, 8) is replicated, 192 B more per device than an even"
            " split over 'fsdp' (4): rule 0 'w', no free dim of shape (8, 8) is divisible by 4."
            " Free a dim, or use another axis.",
        ),
        (
            {"step": struct(), "w": struct(8)},
            [("step", None), ("w", P("fsdp"))],
            "warning dead-rule: step: rule 0 'step' matches only scalars, which need no rule."
            " Remove it.",
        ),
        (
            LAYERS,
            [("norm", P("fsdp")), ("q", P("fsdp")), ("layers/.*/q$", P("data")), ("x", None)],
            "warning shadowed-rule: rule 2 'layers/.*/q$' decides no leaf: rule 1 'q' takes all"
            " 80 leaves that it matches. Move it above rule 1, or remove it.",
        ),
        (
            W,
            [(".*", None)],
            "warning left-whole: w: shape (8, 16) is replicated, 384 B more per device than an even"
            " split over 'fsdp' (4): rule 0 '.*' says so. Give it a spec or `fsdp`; if this is"
            " intended, a rule that names it, with None.",
        ),
        (
            {"w": struct(7, 9)},
            [("w", ts.fsdp("fsdp"))],
            "warning left-whole: w: shape (7, 9) is replicated, 189 B more per device than an even"
            " split over 'fsdp' (4): rule 0 'w', no free dim of shape (7, 9) is divisible by 4."
            " Pad dim 0 to 8, or use another axis. `Plan.padded` does so under `jit`,"
            " `manual.shard_params(..., pad=True)` by hand: 72 B per device instead of 252 B, with"
            " 36 B of padding in all.",
        ),
        (
            W,
            [("w", ts.fsdp("fsdp", min_size=999))],
            "warning left-whole: w: shape (8, 16) is replicated, 384 B more per device than an even"
            " split over 'fsdp' (4): rule 0 'w', 128 elements, fewer than min_size=999. Lower"
            " `min_size`.",
        ),
        (
            STACK,
            [("blocks", ts.fsdp("fsdp") | ts.shard_dim("data", 0)), ("out", P("fsdp"))],
            "warning scan-dim: blocks/mlp/up: P('data', None, 'fsdp') shards dim 0, by rule 0"
            " 'blocks', on which 4 layers seem to be stacked. A scan over them would gather every"
            " layer on every device. Shard another dim: P(None, ...), or `skip=(0,)` of `fsdp`.",
        ),
    ],
    ids=[
        "unmatched",
        "indivisible",
        "unknown-axis",
        "axis-twice",
        "rank",
        "dead",
        "dead-by-two-keys",
        "no-dim-but-a-skipped-one",
        "no-dim-but-skipped-ones",
        "scalars-only",
        "shadowed",
        "replicated-by-rule",
        "no-dim",
        "too-small",
        "scan-dim",
    ],
)
def test_the_text(tree, rules, text) -> None:
    assert text in map(str, findings(tree, rules))


def test_many_paths_are_folded_and_then_counted() -> None:
    tree = {f"{name}weight": struct(8) for name in "abcdefg"}
    (finding,) = findings(tree, [])
    assert len(finding.paths) == 7
    assert "aweight, bweight, cweight, dweight, eweight and 2 more: shape (8,)" in str(finding)


# ------------------------------------------------------------------ rules


def test_a_last_rule_for_everything_is_not_a_finding() -> None:
    assert findings(W, [*SPLIT, (".*", None)]) == ()
    assert [x.code for x in findings(W, [*SPLIT, (".*", None), ("w", None)])] == ["shadowed-rule"]
    tree = {"w": struct(8), "b": struct(8)}
    assert [x.rule for x in findings(tree, [("", P("fsdp")), ("w", None)])] == [1]


def test_patterns_that_distinguish_digits_are_searched_on_every_path() -> None:
    rules = [("layers", P("fsdp")), ("layers/7/", None), ("layers/80/", None)]
    shadowed, dead = findings(LAYERS, rules)
    assert (shadowed.code, shadowed.paths) == (
        "shadowed-rule",
        ("layers/7/norm", "layers/7/q"),
    )
    assert (dead.code, dead.rule) == ("dead-rule", 2)


def test_a_rule_for_a_small_leaf_is_used() -> None:
    assert findings({"w": struct(2)}, [("w", ts.fsdp("fsdp"))], min_size=100) == ()


def test_a_spec_that_min_size_leaves_unused() -> None:
    tree = {"layers": [{"b": struct(8), "w": struct(8, 16)}] * 2}
    rules = [("b", P("fsdp")), (".*", P("fsdp"))]
    (finding,) = findings(tree, rules, min_size=9)
    assert str(finding) == (
        "warning explicit-spec-too-small: layers/{0..1}/b: rule 0 'b': P('fsdp',) is not used for"
        " leaves of fewer than 9 elements (`min_size`). To shard small leaves by such a spec, pass"
        " `min_size=0`. To replicate them, give them a rule with None."
    )
    assert findings(tree, rules, min_size=8) == ()


def test_ten_thousand_leaves_and_a_hundred_unused_rules() -> None:
    tree = {f"layer_{i}": {"w": struct(8), "b": struct(8)} for i in range(5000)}
    rules = [(".*", P("fsdp")), *((f"w{i}|/b$", None) for i in range(100))]
    decided = ts.plan(tree, rules, MESH, min_size=0)
    assert [finding.code for finding in decided.findings] == ["shadowed-rule"] * 100


# ------------------------------------------------------------------ replicated leaves


def test_replicated_leaves_are_ordered_by_what_they_waste() -> None:
    tree = {"a": struct(8, 8), "b": struct(64, 8), "c": [struct(8, 16)] * 2, "w": struct(512, 8)}
    replicated = findings(tree, [("w", P(("data", "fsdp"))), ("", None)])
    assert [finding.paths for finding in replicated] == [("b",), ("c/0", "c/1"), ("a",)]
    assert [x.wasted for x in replicated] == [
        2048 * 7 // 8,
        1024 * 7 // 8,
        256 * 7 // 8,
    ]


def test_small_leaves_and_small_savings_are_not_findings() -> None:
    rules = [("w", P(("data", "fsdp"))), (".*", None)]
    tree = {"w": struct(4096, 64), "b": struct(64)}
    assert findings(tree, rules) == ()  # 224 of 131,328 bytes
    assert len(findings(tree | {"b": struct(4096)}, rules)) == 1
    assert findings(tree | {"b": struct(4096)}, rules, min_size=5000) == ()


def test_an_axis_of_size_one_does_not_shard() -> None:
    mesh = AbstractMesh((1, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    assert [x.code for x in findings(W, [("w", P("data"))], mesh=mesh)] == ["left-whole"]
    alone = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    assert findings(W, [("w", None)], mesh=alone) == ()


# ------------------------------------------------------------------ stacked layers


HEADS: dict[str, Any] = {
    **{name: {"kernel": struct(4, 32, 8), "bias": struct(4, 8)} for name in ("q", "k", "v")},
    "out": {"kernel": struct(4, 8, 32), "bias": struct(32)},
}


@pytest.mark.parametrize(
    "tree",
    [
        {"linear": {"weight": struct(8, 16), "bias": struct(8)}},
        {"conv": {"weight": struct(8, 4, 3, 3), "bias": struct(8, 1, 1)}},
        {"attn": {name: struct(8, 8) for name in "qkvo"}},
        {"query": {"kernel": struct(16, 8, 4), "bias": struct(8, 4)}},
        HEADS,
        {"decoder": {"0": {"attn": HEADS}, "1": {"attn": HEADS}}},
        {"decoder": {"k": {"w": struct(4, 32, 8), "b": struct(4, 8)}, "x": struct(32, 64)}},
        {"mha": {"in": struct(4, 32, 8), "in_b": struct(4, 8), "out": struct(4, 8, 32)}},
        {"experts": {"up": struct(8, 16, 32), "scale": struct(8, 16)}},
        {"blocks": {"norm": struct(1, 8), "up": struct(1, 8, 16)}},
    ],
    ids=[
        "linear",
        "convolution",
        "attention",
        "heads",
        "heads-first",
        "heads-of-layers",
        "heads-by-name",
        "heads-by-shape",
        "experts",
        "one-layer",
    ],
)
def test_arrays_that_are_not_stacked_may_be_sharded_on_dim_0(tree) -> None:
    mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,)) if "blocks" in tree else MESH
    codes = {finding.code for finding in findings(tree, [("", P("fsdp"))], mesh=mesh)}
    assert "scan-dim" not in codes


@pytest.mark.parametrize(
    "stack",
    [
        {"h": {"attn": {"q": struct(4, 32, 32)}, "norm": struct(4, 32)}},
        {"h": {"norm": struct(4, 32), "up": struct(4, 32, 128), "bias": struct(4, 128)}},
        {"layers": {"q": struct(4, 32, 8), "q_norm": struct(4, 8)}},
        {"h": {"attn": HEADS["q"], "up": struct(4, 32, 32), "norm": struct(4, 32)}},
    ],
    ids=["full-matrices", "feed-forward", "attention-by-name", "with-more-than-heads"],
)
def test_a_stack_is_told_from_heads(stack) -> None:
    codes = {finding.code for finding in findings(stack, [("", P("fsdp"))])}
    assert "scan-dim" in codes


def test_a_stack_is_found_in_optimizer_state_too() -> None:
    tree = {"mu": STACK, "nu": STACK, "count": struct()}
    stacked = [x for x in findings(tree, [("", P("fsdp"))]) if x.code == "scan-dim"]
    assert {path for finding in stacked for path in finding.paths} == {
        f"{moment}/blocks/{name}" for moment in ("mu", "nu") for name in ("mlp/up", "norm")
    }


# ------------------------------------------------------------------ logical names


LOGICAL = [("embed", "fsdp"), ("batch", "data")]


def test_names_without_a_rule_in_rules() -> None:
    with ts.logical_axis_rules(LOGICAL):
        bad = ts.plan(W, [("w", ("embed", "emed"))], MESH, min_size=0)
        good = ts.plan(W, [("w", ("embed", None))], MESH, min_size=0)
    (finding,) = bad.findings  # outside the context, which the plan stores
    assert str(finding) == (
        "warning name-without-rule: w: rule 0 'w' uses the logical name 'emed', which has no"
        " logical rule, so its dim is not sharded. Did you mean 'embed'?"
        " Add ('emed', None) to the logical rules if this is intended."
    )
    assert good.findings == ()


def test_names_without_a_rule_in_boxes() -> None:
    def boxed(*names: str) -> Any:
        return {"w": nn.LogicallyPartitioned(struct(8, 16), names), "v": struct(8)}

    rules = [("w", ts.logical_partitioning(LOGICAL)), ("v", P(("data", "fsdp")))]
    (finding,) = findings(boxed("embed", "mlp"), rules)
    assert (finding.code, finding.paths) == ("name-without-rule", ("w",))
    assert "logical name 'mlp'" in finding.fact
    assert findings(boxed("embed", "batch"), rules) == ()
    with ts.logical_axis_rules(LOGICAL):
        decided = ts.plan(
            boxed("embed", "mlp"), [("", ts.logical_partitioning())], MESH, min_size=99
        )
    assert [x.code for x in decided.findings] == ["name-without-rule"]


AXES = ts.PartitionAxis(tensor_parallel_axis="fsdp")


@pytest.mark.parametrize(
    ("rules", "names", "text"),
    [
        pytest.param(
            [("vocab", "fsdp"), ("embed", "fsdp")],
            ("embed", "vocab"),
            "warning contested-axis: w: rule 0 'w': two of the names ('embed', 'vocab') want one"
            " axis. The list, by the order of rules, gives P(None, 'fsdp'); a `PartitionAxis`, by"
            " that of dims, would give P('fsdp',). Give each name an axis of its own, or remember"
            " it where rules move from one to the other.",
            id="a list",
        ),
        pytest.param(
            AXES,
            ("vocab", "hidden_state_axis"),
            "warning contested-axis: w: rule 0 'w': two of the names ('vocab', 'hidden_state_axis')"
            " want one axis. The `PartitionAxis`, by the order of dims, gives P('fsdp',); a list,"
            " by that of rules, would give P(None, 'fsdp'). Give each name an axis of its own, or"
            " remember it where rules move from one to the other.",
            id="a PartitionAxis",
        ),
        pytest.param([("vocab", "fsdp"), ("embed", "fsdp")], ("vocab", "embed"), None, id="agree"),
        pytest.param([("vocab", "tp"), ("embed", "tp")], ("embed", "vocab"), None, id="no axis"),
        pytest.param(
            [("vocab", "fsdp"), ("embed", "fsdp"), ("embed", "data")],
            ("embed", "vocab"),
            None,
            id="two rules of a name",
        ),
        pytest.param(AXES, ("hidden_state", "vocab"), None, id="the order of the fields"),
        pytest.param(ts.PartitionAxis(), ("vocab", "hidden_state"), None, id="none of the mesh"),
    ],
)
def test_an_axis_that_two_names_want(rules, names, text) -> None:
    with ts.logical_axis_rules(rules):
        plan = ts.plan(W, [("w", names)], MESH, min_size=0)
    told = [str(finding) for finding in plan.findings if finding.code == "contested-axis"]
    assert told == ([] if text is None else [text])
    in_box = {"w": nn.LogicallyPartitioned(struct(8, 16), names)}
    plan = ts.plan(in_box, [("w", ts.logical_partitioning(rules))], MESH, min_size=0)
    assert [x for x in map(str, plan.findings) if "contested-axis" in x] == told

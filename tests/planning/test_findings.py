"""Findings: planted mistakes that a plan tells, and sound trees of which it tells nothing."""

from itertools import product
from operator import itemgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts

ROWS, COLUMNS = P("fsdp"), P(None, "fsdp")
W = {"w": struct(8, 16)}
TWINS = {"a/b": struct(8), "a": {"b": struct(8)}}
BLOCK = {"up": struct(512, 2048), "down": struct(2048, 512), "norm": struct(512)}
PAIR = {"params": {"mlp": {"w": struct(64, 64)}}, "opt": {"mu": {"mlp": {"w": struct(64, 64)}}}}
ARRAY = np.ones((64, 16), "float32")
ARRAYS = [{"w": np.ones((64, 16), "float32")} for _ in range(3)]
ONE = np.zeros(1, "float32")
NAMES = np.array(["cat", "dog"])


def layers(count: int) -> Any:
    return {"layers": [{"mlp": {"up": struct(8, 16)}, "norm": struct(8)} for _ in range(count)]}


def told(tree: Any, rules: Any, mesh: str, **options: Any) -> list[str]:
    return list(map(str, ts.plan(tree, rules, mesh, **{"min_size": 0} | options).findings))


# ------------------------------------------------------------------ planted

# The tree, its rules, a part of the finding, and the mesh.
Q = {"layers": [{"q": struct(8, 6), "norm": struct(8)} for _ in range(80)]}
PLANTED = {
    "unmatched": (
        Q,
        [("norm", P("data"))],
        "error unmatched: layers/{0..79}/q: shape (8, 6), no rule matches."
        ' Add a rule such as ("q", ...), or a last one (".*", None).',
    ),
    "indivisible": (
        Q,
        [("q", P("data", "fsdp")), ("norm", None)],
        "error indivisible: layers/{0..79}/q: rule 0 'q': P('data', 'fsdp') splits dim 1 of"
        " shape (8, 6) into 4 parts, and 6 is not divisible by 4. Pad it to 8, or use another"
        " dim or axis.",
    ),
    "unknown axis": (
        W,
        [("w", P("fdsp"))],
        "error axis-not-in-mesh: w: rule 0 'w': the mesh has no axis 'fdsp'."
        " It has data=2, fsdp=4. Did you mean 'fsdp'?",
    ),
    "collision": (
        TWINS,
        [("b", ROWS)],
        "error path-collision: a/b: ['a']['b'] and ['a/b'] share this path. Rename a key: rules"
        " cannot distinguish these leaves, and files cannot hold both.",
    ),
    "dead": (
        {"embed": struct(8, 8)},
        [("embd", None), ("embed", ROWS)],
        "warning dead-rule: rule 0 'embd' matches no leaf. Did you mean 'embed'?"
        " Correct the pattern, or remove the rule.",
    ),
    "dead among numbered names": (
        {"block1": struct(8, 8), "block2": struct(8, 8)},
        [("block3", ROWS), ("block", ROWS)],
        "warning dead-rule: rule 0 'block3' matches no leaf. Did you mean 'block1'?"
        " Correct the pattern, or remove the rule.",
    ),
    "shadowed": (
        layers(80),
        [("norm", ROWS), ("up", ROWS), ("mlp/up$", P("data")), ("x", None)],
        "warning shadowed-rule: rule 2 'mlp/up$' decides no leaf: it matches 80 leaves,"
        " decided by rule 1 'up'. Move it above rule 1, or remove it.",
    ),
    "left whole by a rule": (
        W,
        [(".*", None)],
        "warning left-whole: w: not split over the idle 'fsdp' (4): 512 B per device, 4x an even"
        " split, 384 B more: rule 0 '.*', P(). Give it a spec or `fsdp`; if this is intended, a"
        " rule that names it, with None.",
    ),
    "left whole, no dim": (
        {"w": struct(7, 9)},
        [("w", ts.fsdp("fsdp"))],
        " more: rule 0 'w', no free dim of shape (7, 9) is divisible by 4. Free a dim, use another"
        " axis, or pad a dim in the model.",
    ),
    "left whole, too small": (
        W,
        [("w", ts.fsdp("fsdp", min_size=999))],
        "rule 0 'w', 128 elements, fewer than min_size=999. Lower `min_size`.",
    ),
    "idle beside fsdp": (
        BLOCK,
        [(".*", ts.fsdp("fsdp"))],
        "warning left-whole: down, up: not split over the idle 'tensor' (8): 2.0 MiB per"
        " device, 8x an even split, 1.8 MiB more: rule 0 '.*', fsdp('fsdp').",
        "fsdp=4,tensor=8",
    ),
    "a name without a rule": (
        {"w": nn.LogicallyPartitioned(struct(512, 512), ("embd", "mlp"))},
        [(".*", ts.logical_partitioning([("mlp", None), ("embed", "fsdp")]))],
        "rule 0 '.*', 'embd' has no logical rule. Did you mean 'embed'? Add a logical rule for it.",
    ),
    "state, another dim": (
        PAIR,
        [("mu", COLUMNS), ("w", ROWS)],
        "warning state-unlike-weight: opt/mu/mlp/w: P(None, 'fsdp') by rule 0 'mu', while its"
        " parameter, params/mlp/w, has P('fsdp',) by rule 1 'w'. Each step reshards one of them."
        " Use one rule for both, or `Plan.follow`.",
    ),
}


@pytest.mark.parametrize("case", PLANTED.values(), ids=PLANTED)
def test_a_mistake_is_told(case: Any) -> None:
    tree, rules, text, *mesh = case
    plan = ts.plan(tree, rules, *(mesh or ["data=2,fsdp=4"]), min_size=0)
    told = [finding for finding in plan.findings if text in str(finding)]
    assert told, [*map(str, plan.findings)]
    is_error = text.startswith("error ")
    assert {finding.severity for finding in told} == {"error" if is_error else "warning"}
    if is_error:
        with pytest.raises(ts.ShardingRuleError):
            plan.check()


# ------------------------------------------------------------------ sound

MATRIX = {**BLOCK, "more": struct(4096, 512)}
# Trees, rules and meshes without a finding.
SOUND = {
    "one device": (W, [("w", None)], "data=1"),
    "columns and rows": (
        MATRIX,
        [("up", P("fsdp", "tensor")), ("norm", None), (".*", P("tensor", "fsdp"))],
        "data=2,fsdp=4,tensor=8",
    ),
    "data splits the batch": (MATRIX, [(".*", ts.fsdp("fsdp"))], "data=8,fsdp=4"),
    "ZeRO-1, another dim": (PAIR, [("mu", P("fsdp", "data")), ("w", ROWS)], "data=2,fsdp=4"),
    "a shared array": (
        eqx.nn.Shared({"a": ARRAY, "b": ARRAY}, itemgetter("b"), itemgetter("a")),
        [("", ROWS)],
        "fsdp=4",
    ),
    "rules for several meshes": (
        {"w": nn.LogicallyPartitioned(struct(512, 512), ("embed", "mlp"))},
        [
            (
                ".*",
                ts.logical_partitioning(
                    [("embed", ("fsdp", "fsdp_transpose")), ("mlp", ("tensor", "expert"))]
                ),
            )
        ],
        "fsdp=4",
    ),
    "text": ({"a": NAMES, "b": NAMES, "w": ARRAY}, [("w", ROWS)], "fsdp=4"),
}


@pytest.mark.parametrize(("tree", "rules", "mesh"), SOUND.values(), ids=SOUND)
def test_nothing_is_told_of_a_sound_tree(tree: Any, rules: Any, mesh: str) -> None:
    assert told(tree, rules, mesh) == []


# ------------------------------------------------------------------ the same array


def test_one_array_at_two_paths_is_planned_as_two() -> None:
    tree = {"params": ARRAYS, "ema": ARRAYS}
    plan = ts.plan(tree, [("w", ROWS)], "fsdp=4", min_size=0)
    (finding,) = plan.findings
    assert str(finding) == (
        "warning same-array: params/{0..2}/w: shares memory with ema/{0..2}/w. Sharding or stepping"
        " makes a second copy, 3.0 KiB more on each device. To keep one array, use"
        " `equinox.nn.Shared`."
    )
    assert plan.bytes_per_device() == 1024 * 6
    copies = plan.follow({"mu": tree})
    for each in (copies, copies.on("fsdp=8")):
        (finding,) = each.findings
        assert finding.paths == tuple(f"mu/params/{i}/w" for i in range(3))
    assert not ts.plan(plan.structs, [("w", ROWS)], "fsdp=4", min_size=0).findings


def test_init_sharded_sees_the_same_array_twice_in_a_trace() -> None:
    def init() -> Any:
        embed = jnp.ones((64, 16))
        return {"embed": embed, "head": embed}

    state, plan = ts.init_sharded(init, rules=[(".*", ROWS)], mesh="fsdp=8", min_size=0)
    assert [finding.paths for finding in plan.findings] == [("head",)]
    assert state["embed"] is not state["head"]


# ------------------------------------------------------------------ rules and leaves


def test_a_spec_that_min_size_leaves_unused() -> None:
    tree = {"layers": [{"b": struct(8), "w": struct(8, 16)}] * 2}
    rules = [("b", ROWS), (".*", ROWS)]
    assert told(tree, rules, "fsdp=4", min_size=9) == [
        "warning explicit-spec-too-small: layers/{0..1}/b: rule 0 'b': P('fsdp',) is not used for"
        " leaves of fewer than 9 elements (`min_size`). To shard small leaves by such a spec, pass"
        " `min_size=0`. To replicate them, give them a rule with None."
    ]
    assert told(tree, rules, "fsdp=4", min_size=8) == []


def test_fsdp_that_splits_nothing_is_told_once() -> None:
    tree = {"w": struct(8, 8), "b": struct(8), "step": struct()}
    rules = [("b", None), (".*", ts.fsdp("fsdp"))]
    assert told(tree, rules, "data=2,fsdp=4", min_size=65) == [
        "warning all-too-small: fsdp splits no leaf: all 3 leaves have fewer than 65 elements"
        " (`min_size`). They take 292 B per device, 219 B more than an even split over 'fsdp' (4)."
        " To split them, pass a smaller `min_size`."
    ]
    assert told(tree, rules, "data=2,fsdp=4", min_size=64) == []
    assert told(tree, rules, "data=2,fsdp=1", min_size=65) == []
    assert told(tree, [(".*", None)], "data=2,fsdp=4", min_size=65) == []


# ------------------------------------------------------------------ left whole


def test_replicated_leaves_are_ordered_by_what_they_waste() -> None:
    tree = {"a": struct(8, 8), "b": struct(64, 8), "w": struct(512, 8)}
    rules = [("w", ROWS), ("^(?!b)", None), ("", None)]
    found = ts.plan(tree, rules, "fsdp=4", min_size=0).findings
    assert [(x.paths, x.wasted) for x in found] == [(("b",), 2048 * 3 // 4), (("a",), 256 * 3 // 4)]


def test_small_leaves_and_small_savings_are_not_findings() -> None:
    rules = [("w", P(("data", "fsdp"))), (".*", None)]
    tree = {"w": struct(4096, 64), "b": struct(64)}
    assert told(tree, rules, "data=2,fsdp=4") == []  # 224 of 131,328 bytes
    assert len(told(tree | {"b": struct(4096)}, rules, "data=2,fsdp=4")) == 1
    assert told(tree | {"b": struct(4096)}, rules, "data=2,fsdp=4", min_size=5000) == []


def test_state_that_is_small_or_does_not_fit_is_not_compared_with_its_parameter() -> None:
    split = [("mu", ts.fsdp("data", min_size=0)), ("w", ts.fsdp("fsdp", min_size=0))]
    wrong = [("mu", P("fdsp")), ("w", ROWS)]
    for rules, min_size, is_told in ((split, 4096, 1), (split, 4097, 0), (wrong, 0, 0)):
        findings = told(PAIR, rules, "data=2,fsdp=4", min_size=min_size)
        assert sum("state-unlike-weight" in finding for finding in findings) == is_told


def test_a_rule_that_names_leaves_and_replicates_them_means_it() -> None:
    actions = [None, P(), P(None, None), ts.replicate(), lambda *_: None]
    named = dict.fromkeys(["up|down", "(up|down)$", "^[a-z]*n", "u|d"], True)
    of_all = dict.fromkeys([".*", "", ".", "^.+$", r"\w+", "^(?!.*norm)", "up|.*"], False)
    tree = {"mlp": {"up": BLOCK["up"], "down": BLOCK["down"]}}
    for action, (pattern, is_meant) in product(actions, {**named, **of_all}.items()):
        rules = [(pattern, action), (".*", ts.fsdp("fsdp"))]
        plan = ts.plan(tree, rules, "fsdp=4")
        for each in (plan, plan.follow({"mu": plan.structs})):
            is_told = any(x.code == "left-whole" for x in each.findings)
            assert is_told == (not is_meant), (pattern, action)


def test_names_that_are_not_sharded_by_their_rules_are_meant() -> None:
    with ts.logical_axis_rules([("embed", None), ("mlp", ()), ("heads", "fsdp")]):
        assert told({"up": BLOCK["up"]}, [("up", ("embed", "mlp"))], "fsdp=4") == []
        (finding,) = told({"up": BLOCK["up"]}, [("up", ("embed", "head"))], "fsdp=4")
        (whole,) = told({"up": BLOCK["up"]}, [("up", ("embed", "heads"))], "tensor=4")
    assert "'head' has no logical rule. Did you mean 'heads'?" in finding
    assert whole.startswith("warning left-whole: up: ")
    assert "the logical rule for 'heads': the mesh has no axis 'fsdp'" in whole
    with ts.logical_axis_rules(ts.PartitionAxis()):  # whose defaults name axes that few meshes have
        assert told({"up": BLOCK["up"]}, [("up", ("head", "batch"))], "fsdp=4,tp=1") == []


def test_what_devices_narrow_is_planned_as_they_hold_it() -> None:
    tree = {
        "w": np.full((512, 512), 0.1),
        "ids": np.arange(1024),
        "z": np.ones((), "complex128"),
        "swapped": np.ones(8, ">f4"),
        "key": jax.random.key(0),
    }
    plan = ts.plan(tree, [("w", ts.fsdp("fsdp")), (".*", None)], "fsdp=8")
    placed = ts.shard(tree, ts.plan(tree, plan.rules, ts.make_mesh("fsdp=8")))
    assert [leaf.dtype for leaf in plan.leaves] == [x.dtype for x in jax.tree.leaves(placed)]
    np.testing.assert_array_equal(placed["ids"], np.arange(1024))
    np.testing.assert_array_equal(placed["swapped"], np.ones(8))
    of_each = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed)]
    assert plan.bytes_per_device() == sum(of_each)
    assert [str(finding) for finding in plan.findings] == [
        f"warning narrowed: {path}: {wide} in the tree, and {narrow} on devices, since JAX's x64"
        f" mode is off. To keep {wide}, call `jax.config.update('jax_enable_x64', True)` first;"
        " otherwise convert them with `.astype`."
        for path, wide, narrow in [
            ("ids", "int64", "int32"),
            ("w", "float64", "float32"),
            ("z", "complex128", "complex64"),
        ]
    ]
    moments = plan.follow({"mu": tree})
    assert [x.code for x in moments.on("fsdp=4").findings] == ["narrowed"] * 3
    with jax.enable_x64(True):
        wide = ts.plan(tree, plan.rules, "fsdp=8")
    assert wide.findings == ()
    assert wide.bytes_per_device() == 512 * 512 + 8 * 1024 + 16 + 32 + 8


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_step_takes_what_shard_made_of_64_bit_leaves(kind) -> None:
    tree = {"w": np.full((512, 512), 0.5)}
    plan = ts.plan(tree, [("w", ts.fsdp("fsdp"))], ts.make_mesh("fsdp=8", axis_types=kind))
    step = ts.jit_step(lambda state, batch: ({"w": state["w"] * 2}, batch.sum()), plan)
    for state in (ts.shard(tree, plan), tree):
        new, aux = step(state, jnp.ones(8))
        assert (new["w"].dtype, np.asarray(new["w"])[0, 0], float(aux)) == (np.float32, 1.0, 8.0)

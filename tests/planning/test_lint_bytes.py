"""Leaves that idle axes do not split: what is reported, what is meant so, and the text."""

from typing import Any

import pytest
from flax import linen as nn
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts

LAYER = {"up": struct(512, 2048), "down": struct(2048, 512), "norm": struct(512)}


def left_whole(tree: Any, rules: Any, mesh: str, **options: Any) -> list[ts.Finding]:
    findings = ts.plan(tree, rules, mesh, **options).findings
    return [finding for finding in findings if finding.code == "left-whole"]


def boxed(*names: str) -> Any:
    return {"w": nn.LogicallyPartitioned(struct(512, 512), names)}


def by_names(*rules: tuple[str, Any]) -> Any:
    return [(".*", ts.logical_partitioning(rules))]


MAXTEXT = [
    ("mlp", ("fsdp_transpose", "tensor", "tensor_sequence")),
    ("embed", ("fsdp", "fsdp_transpose", "expert")),
    ("embed", ("fsdp", "expert")),
]


@pytest.mark.parametrize(
    ("tree", "rules", "mesh", "times", "text"),
    [
        pytest.param(
            LAYER,
            [(".*", ts.fsdp("fsdp"))],
            "fsdp=4,tensor=8",
            8,
            "warning left-whole: down, up: not split over the idle 'tensor' (8): 2.0 MiB per"
            " device, 8x an even split, 1.8 MiB more: rule 0 '.*', fsdp('fsdp'). Use"
            " `fsdp(('fsdp', 'tensor'))`, or split another dim over 'tensor'.",
            id="fsdp beside tensor parallelism",
        ),
        pytest.param(
            LAYER,
            [(".*", ts.fsdp("data", skip=(0,)))],
            "data=2,fsdp=16",
            16,
            "warning left-whole: down, up: not split over the idle 'fsdp' (16): 4.0 MiB per"
            " device, 16x an even split, 3.8 MiB more: rule 0 '.*', fsdp('data', skip=(0,)). Use"
            " `fsdp(('data', 'fsdp'), skip=(0,))`, or split another dim over 'fsdp'.",
            id="fsdp over the axis for data",
        ),
        pytest.param(
            boxed("embed", "mlp"),
            by_names(*MAXTEXT[:2]),
            "fsdp=8,tensor=2",
            8,
            "warning left-whole: w: not split over the idle 'fsdp' (8): 512.0 KiB per device, 8x an"
            " even split, 448.0 KiB more: rule 0 '.*': 'embed' loses 'fsdp_transpose' to 'mlp', and"
            " with it 'fsdp'. Give a name another axis, in the logical rules.",
            id="MaxText's rules without the second of a name",
        ),
        pytest.param(
            boxed("embed", "heads"),
            by_names(("embed", "fsdp"), ("heads", "fsdp")),
            "fsdp=2,tensor=4",
            4,
            "warning left-whole: w: not split over the idle 'tensor' (4): 512.0 KiB per device, 4x"
            " an even split, 384.0 KiB more: rule 0 '.*': 'heads' loses 'fsdp' to 'embed'. Give a"
            " name another axis, in the logical rules.",
            id="a name that loses its axis",
        ),
        pytest.param(
            boxed("embed", "heads"),
            by_names(("embed", "fsdp"), ("heads", "tensr")),
            "fsdp=2,tensor=4",
            4,
            "warning left-whole: w: not split over the idle 'tensor' (4): 512.0 KiB per device, 4x"
            " an even split, 384.0 KiB more: rule 0 '.*': 'heads' has 'tensr', which the mesh"
            " lacks. Did you mean 'tensor'? Give a name another axis, in the logical rules.",
            id="a name with an axis that the mesh lacks",
        ),
        pytest.param(
            boxed("embed", "heads"),
            by_names(("embed", "fdsp"), ("heads", None)),
            "fsdp=4",
            4,
            "warning left-whole: w: shape (512, 512) is replicated, 768.0 KiB more per device than"
            " an even split over 'fsdp' (4): rule 0 '.*': 'embed' has 'fdsp', which the mesh lacks."
            " Did you mean 'fsdp'? Give a name another axis, in the logical rules.",
            id="names without an axis",
        ),
        pytest.param(
            {"w": struct(512, 512)},
            [("w", P("fsdp"))],
            "fsdp=2,tensor=4",
            4,
            "warning left-whole: w: not split over the idle 'tensor' (4): 512.0 KiB per device, 4x"
            " an even split, 384.0 KiB more: rule 0 'w', P('fsdp',). Split another dim over"
            " 'tensor', as in P('fsdp', 'tensor').",
            id="a spec",
        ),
        pytest.param(
            {"w": struct(512, 511)},
            [("w", ts.shard_dim("tensor", 0) | ts.fsdp("fsdp"))],
            "fsdp=2,tensor=4",
            2,
            "warning left-whole: w: not split over the idle 'fsdp' (2): 255.5 KiB per device, 2x an"
            " even split, 127.8 KiB more: rule 0 'w', fsdp('fsdp'): no free dim of shape (512, 511)"
            " is divisible by 2. Free a dim, or use another axis.",
            id="a tactic that finds no dim",
        ),
    ],
)
def test_an_idle_axis_is_named_with_what_it_costs(tree, rules, mesh, times, text) -> None:
    (found,) = left_whole(tree, rules, mesh)
    assert str(found) == text
    plan = ts.plan(tree, rules, mesh)
    held = sum(x.bytes_per_device(plan.mesh) for x in plan.leaves if x.path in found.paths)
    assert found.wasted == pytest.approx(held * (1 - 1 / times), rel=1e-3)


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ([(".*", ts.fsdp(("fsdp", "tensor")))], "fsdp=4,tensor=8"),
        ([("up", P("fsdp", "tensor")), (".*", P("tensor", "fsdp"))], "data=2,fsdp=4,tensor=8"),
        ([(".*", ts.fsdp("fsdp"))], "data=8,fsdp=4"),
        ([(".*", ts.fsdp("fsdp"))], "replica=8,fsdp=4,sp=2"),
        ([(".*", None)], "data=8"),
        ([(".*", None)], "dcn_data=2,dp=8"),
        ([("up", P("fsdp", "ep")), (".*", P("fsdp"))], "fsdp=4,ep=2"),
        ([("up", P("fsdp", "data")), (".*", P("fsdp"))], "data=2,fsdp=4"),
        ([(".*", ts.fsdp("fsdp"))], "fsdp=4,tensor=1"),
    ],
)
def test_axes_that_the_leaf_or_the_batch_uses_are_not_idle(rules, mesh) -> None:
    assert left_whole({**LAYER, "more": struct(4096, 512)}, rules, mesh) == []


def test_a_vector_is_split_as_far_as_its_matrix() -> None:
    tree = {"w": struct(2048, 2048), "b": struct(2**20)}
    rules = [("w", P("fsdp", "tensor")), ("b", P("tensor"))]
    assert left_whole(tree, rules, "fsdp=4,tensor=8") == []


def test_zero_1_keeps_parameters_replicated_along_the_batch() -> None:
    state = {"params": {"mlp": LAYER}, "opt": {"mu": {"mlp": LAYER}}}
    rules = [("opt", ts.fsdp(("data", "fsdp"))), (".*", ts.fsdp("fsdp"))]
    assert left_whole(state, rules, "data=4,fsdp=2") == []


@pytest.mark.parametrize("action", [None, P(), P(None, None), ts.replicate(), lambda *_: None])
@pytest.mark.parametrize(
    ("pattern", "is_meant"),
    [
        ("up|down", True),
        ("(up|down)$", True),
        ("^[a-z]*n", True),
        ("u|d", True),
        (".*", False),
        ("", False),
        (".", False),
        ("^.+$", False),
        (r"\w+", False),
        ("^(?!.*norm)", False),
        ("up|.*", False),
    ],
)
def test_a_rule_that_names_leaves_and_replicates_them_means_it(action, pattern, is_meant) -> None:
    rules = [(pattern, action), (".*", ts.fsdp("fsdp"))]
    plan = ts.plan({"mlp": {"up": LAYER["up"], "down": LAYER["down"]}}, rules, "fsdp=4")
    for each in (plan, plan.follow({"mu": plan.structs}), ts.Plan.from_json(plan.to_json())):
        assert any(x.code == "left-whole" for x in each.findings) == (not is_meant)


def test_names_that_are_not_sharded_by_their_rules_are_meant() -> None:
    with ts.logical_axis_rules([("embed", None), ("mlp", ()), ("heads", "tensr")]):
        meant = [("up", ("embed", "mlp"))]
        wrong = [("up", ("embed", "heads"))]
        assert left_whole({"up": LAYER["up"]}, meant, "fsdp=4") == []
        assert len(left_whole({"up": LAYER["up"]}, wrong, "fsdp=4")) == 1


def test_a_finding_for_each_rule_and_not_for_each_shape() -> None:
    tree = {"layers": [{"a": struct(512, n), "b": struct(n, 512)} for n in (256, 512, 1024)]}
    (found,) = left_whole(tree, [(".*", ts.fsdp("fsdp"))], "fsdp=4,tensor=8")
    assert len(found.paths) == 6
    both = left_whole(tree, [("a$", ts.fsdp("fsdp")), ("b$", P("fsdp"))], "fsdp=4,tensor=8")
    assert [finding.rule for finding in both] == [0, 1]

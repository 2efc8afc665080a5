"""Findings about a training state, each with a mistake and its correct twin."""

from typing import Any

import pytest
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts

LAYER = {"kernel": struct(512, 64), "bias": struct(64), "odd": struct(509, 67)}
STATE = {"params": LAYER, "opt": {"mu": LAYER, "nu": LAYER}}
STACKED = {"w": struct(8, 64, 64), "norm": struct(8, 64)}
MUON = {"params": STACKED, "opt": {"muon": {"mu": STACKED, "ns_coeffs": struct(3)}}}
SHAMPOO = {"params": LAYER, "opt": {"0": {"statistics": {"kernel": struct(512, 512)}, "mu": LAYER}}}
ZERO_1 = ts.fsdp("data", min_size=0)


def findings(tree: Any, rules: Any, mesh: str = "data=2,fsdp=4", **options: Any) -> dict[str, str]:
    plan = ts.plan(tree, rules, mesh, **{"min_size": 0} | options)
    return {x.code: str(x) for x in plan.findings}


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            [("mu/kernel", P(("fsdp", "data"))), ("kernel", P(("data", "fsdp"))), (".*", None)],
            "opt/mu/kernel: a dim is sharded over ('fsdp', 'data'), and the mesh and 2 other leaves"
            " have the order ('data', 'fsdp'), which puts the shards on other devices.",
        ),
        (
            [("kernel", P(("fsdp", "data"))), (".*", None)],
            "opt/mu/kernel, opt/nu/kernel, params/kernel: a dim is sharded over ('fsdp', 'data'),"
            " and the mesh has the order ('data', 'fsdp'), which puts the shards on other devices.",
        ),
        ([("kernel", P(("data", "fsdp"))), (".*", None)], None),
        ([("mu/kernel", P("fsdp", "data")), ("kernel", P("data", "fsdp")), (".*", None)], None),
    ],
)
def test_axes_in_another_order(rules: Any, says: str | None) -> None:
    found = findings(STATE, rules).get("axis-order")
    fix = " Write ('data', 'fsdp'); the other order costs collective-permutes."
    assert found == (says and f"warning axis-order: {says}{fix}")


def test_an_axis_of_size_1_has_no_order() -> None:
    rules = [("kernel", P(("fsdp", "data"))), (".*", None)]
    assert "axis-order" not in findings(STATE, rules, "data=1,fsdp=8")


@pytest.mark.parametrize(
    ("rules", "options", "says"),
    [
        (
            [("opt", ZERO_1), (".*", None)],
            {},
            "opt/mu/odd, opt/nu/odd: 'data' shards optimizer state further than its parameters, but"
            " nothing of these leaves: 266.4 KiB, 51% of that state.",
        ),
        (
            [("opt", ts.fsdp("data")), (".*", None)],
            {"min_size": 2**20},
            "opt/mu/bias, opt/mu/kernel, opt/mu/odd, opt/nu/bias, opt/nu/kernel and 1 more: 'data'"
            " was to shard the optimizer state further, and shards nothing of it.",
        ),
        ([("opt.*odd", None), ("odd", None), (".*", ts.fsdp("fsdp", min_size=0))], {}, None),
        ([(".*", None)], {}, None),
    ],
)
def test_state_that_zero_1_does_not_reach(rules: Any, options: Any, says: str | None) -> None:
    found = findings(STATE, rules, **options).get("zero1-no-op")
    fix = " Lower `min_size`, pad a dim to a multiple of 2, or shard another dim."
    assert found == (says and f"warning zero1-no-op: {says}{fix}")


def test_the_bytes_that_zero_1_could_save_are_those_of_a_device() -> None:
    layer = {"kernel": struct(512, 64), "odd": struct(509, 64)}
    rules = [("mu/kernel", P("data", "fsdp")), (".*", P(None, "fsdp"))]
    plan = ts.plan({"params": layer, "opt": {"mu": layer}}, rules, "data=2,fsdp=4", min_size=0)
    (finding,) = plan.findings
    assert (finding.code, finding.wasted) == ("zero1-no-op", 509 * 64 * 4 // 4 // 2)


def test_state_that_zero_1_reaches() -> None:
    layer = {name: x for name, x in LAYER.items() if name != "odd"}
    state = {"params": layer, "opt": {"mu": layer, "nu": layer}}
    assert "zero1-no-op" not in findings(state, [("opt", ZERO_1), (".*", None)])


@pytest.mark.parametrize(
    ("tree", "rules", "paths"),
    [
        (MUON, [("norm", None), ("w", P(None, "fsdp")), (".*", None)], "params/w"),
        (MUON, [("norm", None), ("w", P(None, None, "fsdp")), (".*", None)], "params/w"),
        (MUON, [("w", P("fsdp")), (".*", None)], None),
        (MUON, [(".*", None)], None),
        (SHAMPOO, [("kernel", P("fsdp")), (".*", None)], "params/kernel"),
        (STATE, [("kernel", P("fsdp")), (".*", None)], None),
    ],
)
def test_a_matrix_optimizer_on_sharded_matrices(tree: Any, rules: Any, paths: str | None) -> None:
    found = findings(tree, rules).get("matrix-optimizer")
    if paths is None:
        assert found is None
    else:
        assert f"matrix-optimizer: {paths}: a matrix" in str(found)
        assert "Use `training.by_matrix(optimizer, plan)`" in str(found)


PAIR = {"params": {"mlp": {"w": struct(64, 64)}}, "opt": {"mu": {"mlp": {"w": struct(64, 64)}}}}


@pytest.mark.parametrize(
    ("rules", "is_told"),
    [
        ([("mu", P(None, "fsdp")), ("w", P("fsdp"))], True),
        ([("mu", ts.fsdp("data")), ("w", P("fsdp"))], True),
        ([("mu", P("data", "fsdp")), ("w", P("fsdp"))], True),
        ([("w", P("fsdp"))], False),
        ([("mu", P("fsdp", "data")), ("w", P("fsdp"))], False),  # ZeRO-1
        ([("mu", P(("data", "fsdp"))), ("w", P("fsdp"))], False),
        ([("mu", ts.fsdp("data")), ("w", None)], False),
        ([("mu", None), ("w", P("fsdp"))], True),
        ([("mu", P(("fsdp", "data"))), ("w", P(("data", "fsdp")))], False),  # axis-order
    ],
)
def test_state_that_is_split_unlike_its_parameter(rules: Any, is_told: bool) -> None:
    assert ("state-unlike-weight" in findings(PAIR, rules)) == is_told


def test_the_text_names_the_parameter_and_both_rules() -> None:
    rules = [("mu", P(None, "fsdp")), ("w", P("fsdp"))]
    assert findings(PAIR, rules)["state-unlike-weight"] == (
        "warning state-unlike-weight: opt/mu/mlp/w: P(None, 'fsdp') by rule 0 'mu', while its"
        " parameter, params/mlp/w, has P('fsdp',) by rule 1 'w': each step moves one of them to the"
        " sharding of the other. Use one rule for both, or `Plan.follow`."
    )

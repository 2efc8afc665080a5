"""Plans as JSON: the format that other programs read."""

import json
import re
from typing import Any

import jax
import pytest
from helpers import mesh_of, struct
from jax.sharding import PartitionSpec as P

import treeshard as ts

MESH = mesh_of(data=2, fsdp=4)
BLOCK = {"weight": struct(16, 8), "bias": struct(8), "activation": jax.nn.gelu}
MODEL = {"blocks": [BLOCK] * 11, "key": jax.eval_shape(jax.random.key, 0)}


def written(rules: Any, mesh: Any = MESH, tree: Any = MODEL) -> Any:
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
    assert [note["kind"] for note in bias["adjustments"]] == ["rank"]
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
        (re.compile("W", re.IGNORECASE), P("fsdp"), "spec", "P('fsdp',)"),
        (".*", replicate_all, "function", "replicate_all"),
        (".*", ("rows", None), "names", "('rows', None)"),
    ],
    ids=["none", "tactic", "flags", "function", "names"],
)
def test_json_has_rules_as_text(pattern: Any, action: Any, kind: str, text: str) -> None:
    with ts.logical_axis_rules([("rows", None)]):
        (rule,) = written([(pattern, action)], tree={"b": struct(8), "w": struct(8, 8)})["rules"]
    assert rule == {"pattern": getattr(pattern, "pattern", pattern), "kind": kind, "action": text}


def test_leaves_that_share_a_path_are_not_written() -> None:
    twins = {"a/b": struct(8), "a": {"b": struct(8)}}
    with pytest.raises(ts.ShardingRuleError, match=r"\['a'\]\['b'\] and \['a/b'\] share this path"):
        written([("", None)], tree=twins)

"""Plans as JSON: the format that other programs read."""

import json
import re
from typing import Any

import jax
import numpy as np
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
    tree = {"w": struct(n, n), "b": struct(n)}
    raw = json.loads(ts.plan(tree, rules, mesh_of(fsdp=n), min_size=n).to_json())
    assert (raw["min_size"], raw["mesh"][0]["size"], raw["leaves"][0]["shape"]) == (4, 4, [4])
    texts = ["fsdp('fsdp', min_size=4, skip=(0,))", "shard_dim('fsdp', 0)"]
    assert [rule["action"] for rule in raw["rules"]] == texts


def test_leaves_that_share_a_path_are_not_written() -> None:
    twins = {"a/b": struct(8), "a": {"b": struct(8)}}
    with pytest.raises(ts.ShardingRuleError, match=r"\['a'\]\['b'\] and \['a/b'\] share this path"):
        written([("", None)], tree=twins)

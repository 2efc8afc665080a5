"""Plans as JSON: what it keeps, what it cannot store, and the errors for bad text."""

import json
import re
from typing import Any

import jax
import pytest
from helpers import mesh_of, struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.text import parse_dtype

MESH = mesh_of(data=2, fsdp=4)


def model() -> dict[str, Any]:
    block = {"weight": struct(16, 8), "bias": struct(8), "activation": jax.nn.gelu}
    return {
        "zeta": struct(8, 6, dtype="bfloat16"),
        "blocks": [block] * 11,
        "key": jax.eval_shape(jax.random.key, 0),
        "step": struct(dtype="int32"),
    }


RULES = [("bias", P("fsdp", "data")), ("zeta", P("data", "fsdp")), ("weight", ts.fsdp("fsdp"))]


def planned(rules: Any = RULES, tree: Any = None, mesh: Any = MESH) -> ts.Plan:
    return ts.plan(model() if tree is None else tree, rules, mesh, min_size=0)


def test_a_plan_survives_a_round_trip() -> None:
    decided = planned()
    back = ts.Plan.from_json(decided.to_json())
    assert back == decided
    assert hash(back) == hash(decided)
    assert sorted(back.leaves) == sorted(back.leaves, key=lambda leaf: leaf.path)
    assert {leaf.path: leaf for leaf in back.leaves} == {leaf.path: leaf for leaf in decided.leaves}
    assert (back.mesh, back.min_size) == (decided.mesh, 0)
    assert sorted(str(back).splitlines()) == sorted(str(decided).splitlines())
    assert set(map(str, back.findings)) == set(map(str, decided.findings))
    assert list(back.specs) == sorted(leaf.path for leaf in decided.leaves)
    assert back.specs["blocks/10/weight"] == P("fsdp")
    assert len({id(leaf.decision) for leaf in back.leaves if "weight" in leaf.path}) == 1
    dtypes = ["bfloat16", "float8_e4m3fn", "int4", "bool", "key<fry>", "key<rbg>"]
    plan = ts.plan({name: struct(8, dtype=parse_dtype(name)) for name in dtypes}, [], MESH)
    back = ts.Plan.from_json(plan.to_json())
    assert [leaf.dtype for leaf in back.leaves] == [leaf.dtype for leaf in plan.leaves]


def test_like_gives_the_plan_a_structure() -> None:
    decided = planned()
    back = ts.Plan.from_json(decided.to_json(), like=model())
    assert back.to_json() == decided.to_json()
    assert jax.tree.structure(back.specs) == jax.tree.structure(decided.specs)
    assert jax.tree.leaves(back.specs) == jax.tree.leaves(decided.specs)
    assert back.structs["blocks"][3]["activation"] is jax.nn.gelu
    assert str(back) == str(decided)


def test_json_names_no_devices_and_keeps_its_format(mesh) -> None:
    decided = planned(mesh=mesh)
    text = decided.to_json()
    assert "device" not in text.lower().replace("treeshard", "")
    assert "cpu" not in text.lower()
    assert text == planned().to_json()
    raw = json.loads(text)
    assert list(raw) == ["treeshard_plan", "mesh", "min_size", "mirrors", "rules", "leaves"]
    assert raw["mesh"][0] == {"axis": "data", "size": 2, "type": "auto"}
    assert raw["leaves"][1] == {
        "path": "blocks/0/weight",
        "shape": [16, 8],
        "dtype": "float32",
        "asked": "P('fsdp',)",
        "given": "P('fsdp',)",
        "rule": 2,
        "adjustments": [],
    }
    assert raw["rules"][2] == {
        "pattern": "weight",
        "flags": 0,
        "kind": "tactic",
        "action": "fsdp('fsdp')",
        "fsdp_axes": ["fsdp"],
    }


NO_RULES_IN_JSON = "stores what the rules decided and not the rules themselves. Plan again, with"


@pytest.mark.parametrize(
    "rules",
    [
        [(".*", None)],
        [(".*", ts.fsdp("fsdp", min_size=100) | ts.shard_dim("data", -1, ignore_ndim_error=True))],
        [(re.compile("WEIGHT", re.IGNORECASE), P("fsdp")), (re.compile("bias|zeta"), None)],
        [("weight", lambda path, leaf: P("fsdp")), (".*", None)],
        [(".*", ("rows", "columns"))],
    ],
    ids=["none", "composed", "flags", "function", "names"],
)
def test_a_plan_that_was_read_says_what_its_rules_were_and_does_not_apply_them(rules) -> None:
    with ts.logical_axis_rules([("rows", "fsdp"), ("columns", P.UNCONSTRAINED)]):
        decided = planned(rules)
    back = ts.Plan.from_json(decided.to_json(), like=model())
    assert back == decided
    assert str(back) == str(decided)
    assert back.to_json() == decided.to_json()
    assert back.fsdp_axes() == decided.fsdp_axes()
    for read in (back, back.follow({"mu": model()})):
        with pytest.raises(ts.FormatError, match=NO_RULES_IN_JSON):
            read.on("data=8,fsdp=1")
        with pytest.raises(ts.FormatError, match=NO_RULES_IN_JSON):
            read.padded()
    assert decided.on(MESH) == decided


def text_with(change: Any) -> str:
    raw = json.loads(planned([("zeta", P("data")), (".*", None)], {"zeta": struct(8, 8)}).to_json())
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.pop("treeshard_plan"), "The JSON is not a plan of version 1. Use what"),
        (lambda raw: raw.pop("rules"), "rules is None (NoneType), not a list."),
        (lambda raw: raw.update(min_size="1"), "min_size is '1' (str), not a number of elements."),
        (lambda raw: raw["mesh"][0].update(size=0), "mesh[0] cannot be read: the size is 0, not a"),
        (lambda raw: raw["mesh"][0].update(axis="fsdp"), "mesh: two axes have the same name."),
        (lambda raw: raw["rules"][0].update(pattern="("), "rules[0] cannot be read: missing )"),
        (lambda raw: raw["leaves"][0].update(shape=[-8]), "leaves[0] cannot be read: [-8] is not"),
        (lambda raw: raw["leaves"][0].update(dtype="x"), "leaves[0] cannot be read: 'x' is not a"),
        (lambda raw: raw["leaves"][0].update(rule=2), "rule 2 is none of 2 rules."),
        (
            lambda raw: raw["leaves"][0].update(given="P('dta')"),
            "leaves[0] cannot be read: P('dta',) does not fit: the mesh has no axis 'dta'. It has",
        ),
        (lambda raw: raw["leaves"][0].update(adjustments=[{}]), "cannot be read: KeyError('axes')"),
        (lambda raw: raw["leaves"].append(raw["leaves"][0]), "leaves: two have the same path."),
    ],
)
def test_bad_json(change, message) -> None:
    with pytest.raises(ts.FormatError) as raised:
        ts.Plan.from_json(text_with(change))
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]"])
def test_text_that_is_not_json_or_not_a_plan(text) -> None:
    with pytest.raises(ts.FormatError, match="is not JSON|is not a plan"):
        ts.Plan.from_json(text)


def test_other_arrays_and_arrays_that_share_a_path_are_errors() -> None:
    text = planned().to_json()
    other = {**model(), "zeta": struct(8, 7), "new": struct(3)}
    del other["step"]
    with pytest.raises(ts.FormatError) as raised:
        ts.Plan.from_json(text, like=other)
    assert str(raised.value).splitlines() == [
        "3 leaves of `like` differ from the plan:",
        "  step: int32[] in the plan, missing in `like`.",
        "  zeta: bfloat16[8,6] in the plan, float32[8,7] in `like`.",
        "  new: missing in the plan, float32[3] in `like`.",
    ]
    twins = {"a/b": struct(8), "a": {"b": struct(8)}}
    with pytest.raises(ts.FormatError, match="`like` has arrays that share a path"):
        ts.Plan.from_json(text, like=twins)
    with pytest.raises(ts.ShardingRuleError, match=r"\['a'\]\['b'\] and \['a/b'\] share this path"):
        ts.plan(twins, [("", None)], MESH).to_json()

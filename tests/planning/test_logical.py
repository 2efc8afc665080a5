"""Logical names are resolved by rules and by a `PartitionAxis`, on meshes and in contexts.

That they are as Flax resolves them is tested in tests/product/test_migration_maxtext.py.
"""

import sys
import threading
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import PartitionAxis, ShardingWarning, logical_axis_rules, logical_to_mesh_spec
from treeshard._core.specs import axes_of
from treeshard._planning.logical import current_logical_rules, resolve_names, rules_of_variable

U = P.UNCONSTRAINED
GENERATION = {"mode": "generation"}
TRAINING = ("batch", "query_sequence", "head", "attention_dim")

# ------------------------------------------------------------------ a list by priority

# Like MaxText's lists: several rules per name, and tuples.
RULES = [
    ("batch", ("data", "fsdp", "expert")),
    ("length", "context"),
    ("heads", ["tensor", "sequence"]),
    ("kv", []),
    ("mlp", ("fsdp_transpose", "tensor")),
    ("embed", ("fsdp", "context")),
    ("embed", "fsdp"),
    ("embed", ("context",)),
    ("heads", "data"),
]
MERGED = (("length", "kv", "mlp"), "embed")
SMALL = mesh_of(data=2, context=4)
# The names, the mesh, the shape, and the spec.
CASES: dict[str, tuple[Any, Any, Any, P]] = {
    "all axes of a tuple or none": (("length", "embed"), None, None, P("context", "fsdp")),
    "the first rule that applies": (("heads",), None, None, P(("tensor", "sequence"))),
    "several in one": (MERGED, None, None, P(("context", "fsdp_transpose", "tensor"), "fsdp")),
    "no names in one dim": (((), "length"), None, None, P(None, "context")),
    "an absent axis is used": (("batch", "embed"), SMALL, None, P("data", "context")),
    "uneven without a mesh": (("length",), None, (3,), P("context")),
    "fewer names than dims": (("length",), mesh_of(context=2), (4, 4), P("context")),
    "the longest prefix that divides": (("batch",), mesh_of(data=2, fsdp=4), (6,), P("data")),
    "unconstrained": ((U, "length"), mesh_of(data=2), (3, 4), P(U, None)),
}


@pytest.mark.parametrize(("names", "mesh", "shape", "spec"), CASES.values(), ids=CASES)
def test_rules_by_priority(names, mesh, shape, spec) -> None:
    assert logical_to_mesh_spec(names, RULES, mesh, shape) == spec


def test_a_dict_of_rules() -> None:
    assert logical_to_mesh_spec(("a", "b"), {"b": "x", "a": ("x", "y")}) == P(None, "x")


def test_a_partition_axis_assigns_axes_in_the_order_of_dims() -> None:
    names = ("vocab", "hidden_state", "batch")
    assert logical_to_mesh_spec(names, PartitionAxis()) == P("tp", None, ("fsdp", "dp"))
    spec = logical_to_mesh_spec(names, PartitionAxis(), mesh_of(fsdp=4, tp=2), (7, 8, 8))
    assert spec == P(None, None, "fsdp")


def test_rules_of_a_variable_are_added_to_a_partition_axis() -> None:
    rules = rules_of_variable(PartitionAxis(), (("own", "x"),))
    assert rules is not None
    assert logical_to_mesh_spec(("own", "batch"), rules) == P("x", ("fsdp", "dp"))
    with pytest.raises(ts.SpecError, match="the rules in force have 'head' as 'tp', and the var"):
        rules_of_variable(PartitionAxis(), (("head", "x"),))


# ------------------------------------------------------------------ bad input

NOT_A_TUPLE = "is not a tuple of logical names. Give a name or None for"
NO_NAME = "is not a logical name. Give a str, None, or a tuple"
ALL_NAMES = "PartitionAxis has data_parallel, .*generation_attention_dim."


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("names", "rules", "shape", "text"),
    [
        (("embed", None, "embed"), RULES, None, "'embed' occurs twice.*Use a different name"),
        (("batch", None), RULES, (8,), r"names 2 dims, but shape \(8,\) has 1"),
        (P("batch"), RULES, None, NOT_A_TUPLE),
        (3, RULES, None, NOT_A_TUPLE),
        ("batch", RULES, None, NOT_A_TUPLE),
        (("length", ["batch"]), RULES, None, NO_NAME),
        (("batch", 3), RULES, None, r"\('batch', 3\): 3 \(int\) is not a logical name"),
        (("head", ("batch", None)), PartitionAxis(), None, NO_NAME),
        (("head", ("batch", "batch")), PartitionAxis(), None, NO_NAME),
        (("heads",), PartitionAxis(), None, "'heads' is not a logical.*Did you mean 'head'"),
        (("bacth", "hed_axis"), PartitionAxis(), None, "'batch'?.*'hed_axis' .* 'head_axis'?"),
        (("bacth",), PartitionAxis(), None, ALL_NAMES),
    ],
)
def test_names_that_cannot_be_resolved(names, rules, shape, text) -> None:
    with pytest.raises(ts.SpecError, match=f"(?s){text}"):
        logical_to_mesh_spec(names, rules, None, shape)


@pytest.mark.usefixtures("unchecked")
def test_a_wrong_mode() -> None:
    with pytest.raises(ts.SpecError, match="'generate' is neither .* Did you mean 'generation'?"):
        PartitionAxis().resolve("batch", mode="generate")


@pytest.mark.usefixtures("unchecked")
def test_all_malformed_rules_are_listed() -> None:
    rules = [("good", "x"), "batch", (None, "x"), ("batch", 3), ("batch", ("x", "x"))]
    with pytest.raises(ts.ShardingRuleError) as error:
        logical_to_mesh_spec(("batch",), rules)
    message = str(error.value)
    assert message.startswith("4 logical rules are malformed:")
    assert "logical rule 1, 'batch', is not a pair (name, axes), such as" in message
    assert "logical rule 2, (None, 'x'), starts with NoneType. Give the logical name" in message
    for i in 3, 4:
        assert f"logical rule {i}, {rules[i]!r}, does not end with mesh axes. Give one" in message
    text = "logical rules are .* Give a list of .name, axes"
    with pytest.raises(ts.ShardingRuleError, match=text):
        logical_axis_rules({"batch": "x"}).__enter__()


@pytest.mark.usefixtures("unchecked")
def test_all_bad_fields_are_listed() -> None:
    with pytest.raises(ts.ShardingRuleError) as error:
        PartitionAxis(None, vocab_axis=3, batch_axis=("a", "a"), expert_gate_axis=...)
    several = "give a mesh axis, a tuple of them, or None."
    assert str(error.value).splitlines() == [
        "4 fields are not mesh axes:",
        "  PartitionAxis(data_parallel_axis=None): give a mesh axis.",
        f"  PartitionAxis(batch_axis=('a', 'a')): {several}",
        f"  PartitionAxis(vocab_axis=3): {several}",
        f"  PartitionAxis(expert_gate_axis=Ellipsis): {several}",
    ]


# ------------------------------------------------------------------ the context


def test_contexts_nest_and_end() -> None:
    assert current_logical_rules() is None
    with logical_axis_rules([("a", "x"), ("b", "y")]):
        assert resolve_names(("a", "b")) == P("x", "y")
        with logical_axis_rules(PartitionAxis()):
            assert resolve_names(("head",)) == P("tp")
        with logical_axis_rules([]):
            assert resolve_names(("a", "b")) == P(None, None)
        with pytest.raises(KeyError), logical_axis_rules([("a", "z")]):
            raise KeyError
        assert resolve_names(("a", "b"), mesh_of(x=2, y=2), (4, 3)) == P("x", None)
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(current_logical_rules()))
        thread.start()
        thread.join()
        assert seen == [None]
    assert current_logical_rules() is None


def test_flax_is_not_loaded(monkeypatch) -> None:
    for name in [x for x in sys.modules if x.split(".")[0] in ("flax", "haliax")]:
        monkeypatch.delitem(sys.modules, name)
    assert current_logical_rules() is None
    assert "flax" not in sys.modules


def test_names_that_do_not_resolve_are_listed_by_path(mesh: Mesh) -> None:
    tree = {"a": np.ones((8, 8)), "b": np.ones(8)}
    names = {"a": ("batch", "batch"), "b": ("bacth",)}
    with logical_axis_rules(PartitionAxis()), pytest.raises(ts.SpecError) as error:
        ts.with_sharding_constraint(tree, names, mesh)
    assert "a: ('batch', 'batch'): 'batch' occurs twice" in str(error.value)
    assert "b: 'bacth' is not a logical name of PartitionAxis. Did you me" in str(error.value)


# ------------------------------------------------------------------ the fields of a PartitionAxis

DEFAULTS = {
    "data_parallel_axis": "dp",
    "fully_sharded_data_parallel_axis": "fsdp",
    "tensor_parallel_axis": "tp",
    "sequence_parallel_axis": "sp",
    "expert_parallel_axis": "ep",
    "batch_axis": ("fsdp", "dp"),
    "sequence_axis": "sp",
    "query_sequence_axis": "sp",
    "head_axis": "tp",
    "key_sequence_axis": "sp",
    "hidden_state_axis": "tp",
    "mlp_intermediate_axis": "tp",
    "vocab_axis": "tp",
    "expert_axis": "ep",
    "expert_gate_axis": None,
    "attention_dim_axis": None,
    "bias_head_sequence_axis": None,
    "bias_key_sequence_axis": None,
    "generation_batch_axis": None,
    "generation_query_sequence_axis": None,
    "generation_head_axis": "tp",
    "generation_key_sequence_axis": "sp",
    "generation_attention_dim_axis": None,
    "custom": (),
}


def as_dict(axes: PartitionAxis) -> dict[str, object]:
    return {field.name: getattr(axes, field.name) for field in fields(axes)}


def test_fields_that_are_given_are_not_derived() -> None:
    assert as_dict(PartitionAxis()) == DEFAULTS
    for name in list(DEFAULTS)[5:-1]:  # from the first ones others are derived
        assert as_dict(PartitionAxis(**{name: "x"})) == {**DEFAULTS, name: "x"}
    axes = PartitionAxis(tensor_parallel_axis="model", vocab_axis=None, head_axis=["a", "b"])
    assert (axes.vocab_axis, axes.head_axis) == (None, ("a", "b"))
    again = replace(PartitionAxis(), tensor_parallel_axis="model", head_axis=...)
    assert (again.head_axis, again.vocab_axis) == ("model", "tp")
    assert jax.jit(lambda a, x: x * len(a.batch_axis))(again, 3) == 6  # a static argument


def test_derived_fields_follow_the_mesh_axes() -> None:
    renamed = {"dp": "replica", "fsdp": "data", "tp": "model", "sp": "seq", "ep": "expert"}
    axes = PartitionAxis(*renamed.values())
    for name, value in DEFAULTS.items():
        expected = tuple(renamed[axis] for axis in axes_of(value))
        assert axes_of(getattr(axes, name)) == expected, name
    assert PartitionAxis("data", "data").batch_axis == "data"


# The names, and what they resolve to, in training and without a mesh unless a row says else.
RESOLVED: dict[str, tuple[Any, P, dict[str, Any]]] = {
    "full names": (("batch_axis", "head_axis"), P(("fsdp", "dp"), "tp"), {}),
    "full names in generation": (("batch_axis", "head_axis"), P(None, "tp"), GENERATION),
    "unconstrained": ((U, "head"), P(U, "tp"), {}),
    "of a tuple, the rest": (("fully_sharded_data_parallel", "batch"), P("fsdp", "dp"), {}),
    "several in one, one taken": (("head", ("expert", "vocab")), P("tp", "ep"), {}),
    "several of one axis": ((("head", "vocab"), "mlp_intermediate"), P("tp", None), {}),
    "generation": (TRAINING, P(None, None, "tp", None), GENERATION),
    "by its generation name": (("generation_key_sequence",), P("sp"), {}),
    "absent axes": (("batch", "sequence"), P("fsdp", None), {"mesh": mesh_of(fsdp=2, tp=4)}),
}


@pytest.mark.parametrize(("names", "spec", "options"), RESOLVED.values(), ids=RESOLVED)
def test_resolve(names: Any, spec: P, options: Any) -> None:
    assert PartitionAxis().resolve(*names, **options) == spec


@pytest.mark.parametrize(
    ("mesh", "mode", "expected"),
    [
        ("data=2,fsdp=2,tensor=2", "train", P(("fsdp", "data"), None, "tensor", None)),
        ("replica=2,fsdp=2,sequence=2", "train", P(("fsdp", "replica"), "sequence", None, None)),
        ("data=2,fsdp=2,tensor=2", "generation", P(None, None, "tensor", None)),
    ],
)
def test_the_names_of_a_mesh(mesh: str, mode, expected) -> None:
    assert PartitionAxis.for_mesh(mesh).resolve(*TRAINING, mode=mode, mesh=mesh) == expected


def test_fields_beside_those_of_a_mesh() -> None:
    given = {"vocab_axis": None, "tensor_parallel_axis": "data", "custom": {"cache": "fsdp"}}
    axes = PartitionAxis.for_mesh("data=2,fsdp=2,tensor=2", **given)
    assert axes == PartitionAxis("data", **given)
    assert (axes.head_axis, axes.vocab_axis) == ("data", None)

    @dataclass(frozen=True)
    class Axes(PartitionAxis):
        cache_axis: Any = "data"

    assert isinstance(Axes.for_mesh("data=2"), Axes)
    assert Axes.for_mesh("data=2", cache_axis=None).resolve("cache", "batch") == P(
        None, ("fsdp", "data")
    )


# ------------------------------------------------------------------ names of one's own

CUSTOM = {"cache": "sp", "rows": ["fsdp", "dp"], "generation_cache": None, "window": "x"}


@pytest.mark.parametrize(
    ("names", "mode", "spec"),
    [
        (("batch", "cache"), "train", P(("fsdp", "dp"), "sp")),
        (("rows", "batch", "head"), "train", P(("fsdp", "dp"), None, "tp")),
        (("cache", "window", "head"), "generation", P(None, "x", "tp")),
        ((("cache", "window"), None), "train", P(("sp", "x"), None)),
    ],
)
def test_custom_names(names: Any, mode: Any, spec: P) -> None:
    axes = PartitionAxis(custom=CUSTOM)
    assert axes.resolve(*names, mode=mode) == spec
    if mode == "train":
        with logical_axis_rules(axes):
            assert resolve_names(names) == spec


def test_custom_names_are_values_as_all_else() -> None:
    axes = PartitionAxis(custom=CUSTOM)
    turned = PartitionAxis(custom=dict(reversed(CUSTOM.items())))
    assert axes == turned
    assert hash(axes) == hash(turned)
    assert replace(axes, head_axis=None).custom == axes.custom
    assert axes != PartitionAxis()
    assert jax.jit(lambda a, x: x * len(a.custom))(axes, 3) == 12  # a static argument
    with pytest.raises(ts.SpecError, match=r"(?s)'cach' is not .* 'cache'.* cache, .*window"):
        axes.resolve("cach")
    # An axis that only a custom name has is not idle.
    PartitionAxis(custom=CUSTOM).resolve("batch", mesh="x=2,fsdp=4")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("custom", "text"),
    [
        ({"batch": "x"}, "(custom={'batch': 'x'}): the field batch_axis has this name. Set it."),
        ({"head_axis": "x"}, "the field head_axis has this name. Set it."),
        ({"cache": "head_axis"}, "head_axis is a field. Give its mesh axes."),
        ({"cache": 3}, "(custom={'cache': 3}): give a name, and a mesh axis, a tuple of them, or"),
        ({3: "x"}, "(custom={3: 'x'}): give a name, and a mesh axis, a tuple of them, or None."),
        ({"cache": ("x", "x")}, "give a name, and a mesh axis, a tuple of them, or None."),
    ],
)
def test_bad_custom_names(custom: Any, text: str) -> None:
    with pytest.raises(ts.ShardingRuleError) as error:
        PartitionAxis(vocab_axis=3, custom={**custom, "fine": "x"})
    lines = str(error.value).splitlines()
    assert lines[0] == "2 fields are not mesh axes:"
    assert text in lines[2]


# ------------------------------------------------------------------ axes that no field names


def test_an_axis_that_no_field_names_is_told() -> None:
    message = "no field names 'data', 'tensor' of the mesh .data=2, fsdp=2, tensor=2., so no array"
    with pytest.warns(ShardingWarning, match=message):
        assert PartitionAxis().resolve("batch", mesh="data=2,fsdp=2,tensor=2") == P("fsdp")
    by_data = pytest.warns(ShardingWarning, match="'data'")
    with jax.set_mesh(ts.make_mesh("data=2,fsdp=4")), by_data:
        PartitionAxis().resolve("head")
    by_x = pytest.warns(ShardingWarning, match="'x'")
    with jax.set_mesh(ts.make_mesh("x=2,fsdp=4")), by_x:
        PartitionAxis().resolve("batch")
    by_tensor = pytest.warns(ShardingWarning, match="no field names 'tensor'")
    with jax.set_mesh(ts.make_mesh("data=4,tensor=2")), by_tensor:
        PartitionAxis(batch_axis=("dp", "data")).resolve("batch")
    PartitionAxis().resolve("batch", mesh="data=1,fsdp=8")  # an axis of one device

"""Logical names are resolved by rules, on meshes and shapes, and in contexts.

That they are as Flax resolves them is tested in tests/product/test_migration_maxtext.py.
"""

import sys
import threading
from typing import Any

import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import (
    PartitionAxis,
    ShardingRuleError,
    SpecError,
    logical_axis_rules,
    logical_to_mesh_spec,
)
from treeshard._planning.logical import current_logical_rules, resolve_names

U = P.UNCONSTRAINED


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
# The names, the mesh, the shape, and the spec.
CASES: dict[str, tuple[Any, Any, Any, P]] = {
    "all axes of a tuple or none": (("length", "embed"), None, None, P("context", "fsdp")),
    "the first rule that applies": (("heads",), None, None, P(("tensor", "sequence"))),
    "several names in one dim": (
        (("length", "kv", "mlp"), "embed"),
        None,
        None,
        P(("context", "fsdp_transpose", "tensor"), "fsdp"),
    ),
    "no names in one dim": (((), "length"), None, None, P(None, "context")),
    "an absent axis is free, and then used": (
        ("batch", "embed"),
        mesh_of(data=2, context=4),
        None,
        P("data", "context"),
    ),
    "uneven without a mesh": (("length",), None, (3,), P("context")),
    "fewer names than dims": (("length",), mesh_of(context=2), (4, 4), P("context")),
    "the longest prefix that divides": (("batch",), mesh_of(data=2, fsdp=4), (6,), P("data")),
    "unconstrained": ((U, "length"), mesh_of(data=2), (3, 4), P(U, None)),
}


def test_a_dict_of_rules() -> None:
    assert logical_to_mesh_spec(("a", "b"), {"b": "x", "a": ("x", "y")}) == P(None, "x")


def test_a_partition_axis_assigns_axes_in_the_order_of_dims() -> None:
    names = ("vocab", "hidden_state", "batch")
    assert logical_to_mesh_spec(names, PartitionAxis()) == P("tp", None, ("fsdp", "dp"))
    spec = logical_to_mesh_spec(names, PartitionAxis(), mesh_of(fsdp=4, tp=2), (7, 8, 8))
    assert spec == P(None, None, "fsdp")


@pytest.mark.parametrize(("names", "mesh", "shape", "spec"), CASES.values(), ids=CASES)
def test_rules_by_priority(names, mesh, shape, spec) -> None:
    assert logical_to_mesh_spec(names, RULES, mesh, shape) == spec


# ------------------------------------------------------------------ bad input


NOT_A_TUPLE = "is not a tuple of logical names. Give a name or None for"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("names", "rules", "shape", "text"),
    [
        (("embed", None, "embed"), RULES, None, "'embed' occurs twice.*Use a different name"),
        (("batch", None), RULES, (8,), r"names 2 dims, but shape \(8,\) has 1"),
        (P("batch"), RULES, None, NOT_A_TUPLE),
        (3, RULES, None, NOT_A_TUPLE),
        (("batch", 3), RULES, None, r"\('batch', 3\): 3 \(int\) is not a logical name"),
        (("heads",), PartitionAxis(), None, "'heads' is not a logical.*Did you mean 'head'"),
    ],
)
def test_names_that_cannot_be_resolved(names, rules, shape, text) -> None:
    with pytest.raises(SpecError, match=text):
        logical_to_mesh_spec(names, rules, None, shape)


@pytest.mark.usefixtures("unchecked")
def test_all_malformed_rules_are_listed() -> None:
    rules = [
        ("good", "x"),
        "batch",
        (None, "x"),
        ("batch", 3),
        ("batch", ("x", "x")),
    ]
    with pytest.raises(ShardingRuleError) as error:
        logical_to_mesh_spec(("batch",), rules)
    message = str(error.value)
    assert message.startswith("4 logical rules are malformed:")
    assert "logical rule 1, 'batch', is not a pair (name, axes), such as" in message
    assert "logical rule 2, (None, 'x'), starts with NoneType. Give the logical name" in message
    for i in 3, 4:
        assert f"logical rule {i}, {rules[i]!r}, does not end with mesh axes. Give one" in message
    with pytest.raises(ShardingRuleError, match="logical rules are .* Give a list of .name, axes"):
        logical_axis_rules({"batch": "x"}).__enter__()


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
    assert current_logical_rules() is None


def test_rules_do_not_reach_other_threads() -> None:
    seen: list[object] = []
    with logical_axis_rules([("a", "x")]):
        thread = threading.Thread(target=lambda: seen.append(current_logical_rules()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_flax_is_not_loaded(monkeypatch) -> None:
    for name in [x for x in sys.modules if x.split(".")[0] in ("flax", "haliax")]:
        monkeypatch.delitem(sys.modules, name)
    assert current_logical_rules() is None
    assert "flax" not in sys.modules


def test_names_that_do_not_resolve_are_listed_by_path(mesh: Mesh) -> None:
    tree = {"a": np.ones((8, 8)), "b": np.ones(8)}
    names = {"a": ("batch", "batch"), "b": ("bacth",)}
    with logical_axis_rules(PartitionAxis()), pytest.raises(SpecError) as error:
        ts.with_sharding_constraint(tree, names, mesh)
    message = str(error.value)
    assert "a: ('batch', 'batch'): 'batch' occurs twice" in message
    assert "b: 'bacth' is not a logical name of PartitionAxis. Did you mean 'batch'?" in message

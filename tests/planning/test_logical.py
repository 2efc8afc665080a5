"""Logical names are resolved by rules as in Flax, on meshes and shapes, and in contexts."""

import sys
import threading
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from helpers import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import (
    PartitionAxis,
    ShardingRuleError,
    SpecError,
    logical_axis_rules,
    logical_to_mesh_spec,
)
from treeshard._core.specs import axes_of, entries, entry_of
from treeshard._planning.logical import (
    current_logical_rules,
    resolve_names,
)

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
]
CASES = {
    "all axes of a tuple or none": (("length", "embed"), P("context", "fsdp")),
    "unconstrained": ((U, "length", U), P(U, "context", U)),
    "several names in one dim": (
        (("length", "kv", "mlp"), "embed"),
        P(("context", "fsdp_transpose", "tensor"), "fsdp"),
    ),
    "no names in one dim": (((), "length"), P(None, "context")),
}


@pytest.mark.parametrize(("names", "expected"), CASES.values(), ids=CASES)
def test_rules_by_priority(names, expected) -> None:
    assert logical_to_mesh_spec(names, RULES) == expected


def test_a_dict_of_rules() -> None:
    assert logical_to_mesh_spec(("a", "b"), {"b": "x", "a": ("x", "y")}) == P(None, "x")


def test_a_partition_axis_assigns_axes_in_the_order_of_dims() -> None:
    names = ("vocab", "hidden_state", "batch")
    assert logical_to_mesh_spec(names, PartitionAxis()) == P("tp", None, ("fsdp", "dp"))
    spec = logical_to_mesh_spec(names, PartitionAxis(), mesh_of(fsdp=4, tp=2), (7, 8, 8))
    assert spec == P(None, None, "fsdp")


MESHES = {
    "an absent axis is free, and then used": (
        ("batch", "embed"),
        {"data": 2, "context": 4},
        None,
        P("data", "context"),
    ),
    "uneven without a mesh": (("length",), None, (3,), P("context")),
    "fewer names than dims": (("length",), {"context": 2}, (4, 4), P("context")),
    "unconstrained": ((U, "length"), {"data": 2}, (3, 4), P(U, None)),
}


@pytest.mark.parametrize(("names", "sizes", "shape", "expected"), MESHES.values(), ids=MESHES)
def test_on_a_mesh_and_a_shape(names, sizes, shape, expected) -> None:
    mesh = None if sizes is None else mesh_of(**sizes)
    assert logical_to_mesh_spec(names, RULES, mesh, shape) == expected


# ------------------------------------------------------------------ compared with Flax

AXES = [f"axis{i}" for i in range(12)]
NAMES = [f"name{i}" for i in range(20)]

some_axes = st.one_of(
    st.sampled_from(AXES),
    st.lists(st.sampled_from(AXES), max_size=4, unique=True),
    st.lists(st.sampled_from(AXES), max_size=4, unique=True).map(tuple),
    st.sampled_from([None, U]),
)
rule_lists = st.lists(st.tuples(st.sampled_from(NAMES), some_axes), min_size=20, max_size=60)
# Few names, so that most have rules.
name_tuples = st.lists(
    st.sampled_from([*NAMES[:8], None, U]), max_size=5, unique_by=lambda n: n if n else object()
).map(tuple)
mesh_sizes = st.lists(st.sampled_from([1, 1, 1, 2, 3, 4]), min_size=12, max_size=12)


@given(name_tuples, rule_lists, mesh_sizes, st.data())
@settings(max_examples=60, deadline=None)
def test_resolves_names_as_flax(names, rules, sizes, data) -> None:
    flax = linen.logical_to_mesh_axes(names, rules)
    assert logical_to_mesh_spec(names, rules) == flax
    mesh = mesh_of(**dict(zip(AXES, sizes, strict=True)))
    assert logical_to_mesh_spec(names, rules, mesh) == flax
    # MaxText drops axes of size 1 afterwards: a mesh without them gives the same.
    large = {axis: size for axis, size in mesh.shape.items() if size > 1}
    kept = [
        entry if entry is U else entry_of([axis for axis in axes_of(entry) if axis in large])
        for entry in entries(flax)
    ]
    assert logical_to_mesh_spec(names, rules, mesh_of(**large)) == P(*kept)
    shape = tuple(data.draw(st.integers(0, 12)) for _ in names)
    for length, entry, before in zip(
        shape, entries(logical_to_mesh_spec(names, rules, mesh, shape)), entries(flax), strict=True
    ):
        axes, count = axes_of(before), 1
        for i, axis in enumerate(axes):
            if length % (count := count * mesh.shape[axis]):
                axes = axes[:i]
                break
        assert axes_of(entry) == axes


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
        ("batch",),
        (None, "x"),
        ("batch", 3),
        ("batch", ("x", None)),
        ("batch", ("x", "x")),
    ]
    with pytest.raises(ShardingRuleError) as error:
        logical_to_mesh_spec(("batch",), rules)
    message = str(error.value)
    assert message.startswith("6 logical rules are malformed:")
    assert "logical rule 1, 'batch', is not a pair (name, axes), such as" in message
    assert "logical rule 2, ('batch',), is not a pair" in message
    assert "logical rule 3, (None, 'x'), starts with NoneType. Give the logical name" in message
    for i in 4, 5, 6:
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


def test_rules_are_read_when_the_context_starts() -> None:
    rules = [("a", ["x"])]
    with logical_axis_rules(rules):
        rules[0][1].append("y")
        assert resolve_names(("a",)) == P("x")


def test_rules_do_not_reach_other_threads() -> None:
    seen: list[object] = []
    with logical_axis_rules([("a", "x")]):
        thread = threading.Thread(target=lambda: seen.append(current_logical_rules()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_names_without_rules_in_force() -> None:
    with pytest.raises(SpecError) as error:
        resolve_names(("batch", None))
    assert str(error.value) == (
        "('batch', None) is a tuple of logical names, and no rules are in force to resolve them."
        " Write P('batch', None) if these are mesh axes, or run inside"
        " `with treeshard.logical_axis_rules(rules):`."
    )


@pytest.mark.parametrize("context", [linen.logical_axis_rules, nnx.logical_axis_rules])
def test_the_rules_of_flax_apply_where_there_are_none_of_treeshard(context) -> None:
    with context((("a", "x"),)):
        assert resolve_names(("a",)) == P("x")
        with logical_axis_rules([("a", "y")]):
            assert resolve_names(("a",)) == P("y")
        assert resolve_names(("a",)) == P("x")
    assert current_logical_rules() is None


def test_flax_is_not_loaded(monkeypatch) -> None:
    for name in [x for x in sys.modules if x.split(".")[0] in ("flax", "haliax")]:
        monkeypatch.delitem(sys.modules, name)
    assert current_logical_rules() is None
    assert "flax" not in sys.modules


# ------------------------------------------------------------------ constraints by names

X = np.arange(8 * 4 * 8, dtype=np.float32).reshape(8, 4, 8)
EMBEDDED = [("batch", ("pod", "data")), ("sequence", None), ("embed", "fsdp")]


@pytest.mark.parametrize(
    ("execute", "rules_in_force"),
    [(jax.jit, logical_axis_rules), (lambda f: f, linen.logical_axis_rules)],
    ids=["jit", "eager-flax"],
)
def test_a_constraint_by_logical_names(execute, rules_in_force, mesh: Mesh) -> None:
    def f(tree: Any) -> Any:
        return ts.with_sharding_constraint(tree, {"x": ("batch", "sequence", "embed"), "y": None})

    with jax.set_mesh(mesh), rules_in_force(EMBEDDED):
        out = execute(f)({"x": X, "y": np.ones(3)})
    expected = NamedSharding(mesh, P("data", None, "fsdp"))
    assert out["x"].sharding.is_equivalent_to(expected, 3)
    np.testing.assert_array_equal(out["x"], X)


def test_one_jitted_function_under_two_lists_of_rules(mesh: Mesh) -> None:
    f = jax.jit(lambda x: ts.with_sharding_constraint(x, ("batch", None, "hidden_state"), mesh))
    with logical_axis_rules([("batch", "fsdp")]):
        assert f(X).sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 3)
    with logical_axis_rules(PartitionAxis("data", "pod", "fsdp")):
        assert f(X).sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "fsdp")), 3)


def test_names_that_do_not_resolve_are_listed_by_path(mesh: Mesh) -> None:
    tree = {"a": X, "b": X}
    names = {"a": ("batch", "batch"), "b": ("bacth",)}
    with logical_axis_rules(PartitionAxis()), pytest.raises(SpecError) as error:
        ts.with_sharding_constraint(tree, names, mesh)
    message = str(error.value)
    assert "a: ('batch', 'batch'): 'batch' occurs twice" in message
    assert "b: 'bacth' is not a logical name of PartitionAxis. Did you mean 'batch'?" in message

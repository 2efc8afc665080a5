"""Parts of a tree: leaves that `like` or the checkpoint leaves out, subtrees, empty containers."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import arange, assert_same
from jax.sharding import PartitionSpec as P
from rebuilt_classes import Checked, Rebuilt

import treeshard as ts
from tests.deprecations import tolerated
from treeshard.checkpoint import Checkpoints, restore, save
from treeshard.interchange import load_safetensors, save_safetensors

with tolerated("haliax"):
    import haliax as hax

A, B = arange(8, 2), arange(8)


class Pair(NamedTuple):
    a: Any
    b: Any


class Module(eqx.Module):
    a: Any
    b: Any


@flax.struct.dataclass
class Struct:
    a: Any
    b: Any


def named(x: Any, *axes: str) -> Any:
    return hax.NamedArray(x, tuple(hax.Axis(axis, 8 if axis == "n" else 2) for axis in axes))


# Containers of two leaves. The second one may be `None`, or `...`.
CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"a": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "ordered": lambda a, b: OrderedDict(a=a, b=b),
    "named tuple": Pair,
    "module": Module,
    "struct": Struct,
    "frozen": lambda a, b: flax.core.freeze({"a": a, "b": b}),
    "nested": lambda a, b: {"x": [Module({"a": a}, (b,))]},
    "boxes": lambda a, b: {"a": nn.Partitioned(a, ("x", None)), "b": nn.Partitioned(b, ("x",))},
    "variables": lambda a, b: {"a": nnx.Param(a), "b": nnx.Param(b)},
    "state": lambda a, b: nnx.State({"a": nnx.Param(a), "b": nnx.Param(b)}),
    "named arrays": lambda a, b: {"a": named(a, "n", "m"), "b": named(b, "n")},
}
FORMATS = {
    "checkpoint": (lambda path, tree: save(path, tree), restore),
    "safetensors": (
        lambda path, tree: save_safetensors(f"{path}.safetensors", tree),
        lambda path, *args, **options: load_safetensors(f"{path}.safetensors", *args, **options),
    ),
}
on_formats = pytest.mark.parametrize(("write", "read"), FORMATS.values(), ids=FORMATS)


def leaves_of(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


@pytest.mark.parametrize("rules", [None, [("", P())]], ids=["as like", "rules"])
@pytest.mark.parametrize("left_out", [None, ...], ids=repr)
@pytest.mark.parametrize("kind", CONTAINERS)
@on_formats
def test_what_is_none_or_dots_is_left_out(
    write, read, kind, left_out, rules, mesh, tmp_path
) -> None:
    make = CONTAINERS[kind]
    like = make(np.zeros_like(A), left_out)
    placing = {} if rules is None else {"rules": rules, "mesh": mesh}
    write(tmp_path / "x", make(A, B))
    with warnings.catch_warnings(action="error"):
        found = read(tmp_path / "x", like, partial=True, **placing)
    assert jax.tree.structure(found) == jax.tree.structure(like)
    a, b = leaves_of(found)
    assert_same(np.asarray(a), A)
    assert b is left_out
    with pytest.raises(ts.MismatchError, match="`partial=True`"):
        read(tmp_path / "x", like, **placing)


@pytest.mark.parametrize("kind", CONTAINERS)
@on_formats
def test_what_is_none_in_the_file_stays_as_in_like(write, read, kind, tmp_path) -> None:
    make = CONTAINERS[kind]
    like = make(np.zeros_like(A), np.ones_like(B))
    write(tmp_path / "x", make(A, None))
    with pytest.warns(ts.ShardingWarning, match="[b01]: not in "):
        found = read(tmp_path / "x", like, partial=True)
    assert jax.tree.structure(found) == jax.tree.structure(like)
    a, b = leaves_of(found)
    assert_same(a, A)
    assert b is leaves_of(like)[1]
    with pytest.raises(ts.MismatchError, match="`partial=True`"):
        read(tmp_path / "x", like)


@on_formats
def test_both_sides_of_a_partition(write, read, tmp_path) -> None:
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[0].weight, spec, True)
    parts = eqx.partition(model, spec)
    arrays = eqx.filter(model, eqx.is_array)
    empty = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, model)
    write(tmp_path / "all", model)
    for i, part in enumerate(parts):
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, part)
        assert_same(read(tmp_path / "all", zeros, partial=True), part)
        write(tmp_path / f"part {i}", part)
        assert_same(read(tmp_path / f"part {i}", zeros), part)
        with pytest.warns(ts.ShardingWarning):
            found = read(tmp_path / f"part {i}", empty, partial=True)
        assert_same(found, eqx.combine(part, empty))
    assert_same(read(tmp_path / "all", eqx.filter(empty, eqx.is_array), partial=True), arrays)


# ------------------------------------------------------------------ subtrees

STATE = {"params": {"w": A, "layers": [{"w": B}, {"w": B + 1}]}, "w": B + 2, "count": np.int32(1)}
RULES = [("w", P("data")), (".*", None)]


@on_formats
@pytest.mark.parametrize(
    ("path", "saved"),
    [
        ("params", STATE),
        ("params/layers", STATE),
        ("params/layers/1", STATE),
        ("params/layers/1/w", STATE),
        ("w", STATE),
        ("params", STATE["params"]),  # the subtree alone
        ("params/layers", STATE["params"]),  # a tree between
    ],
)
def test_the_plan_of_a_subtree_reads_it(write, read, path, saved, mesh, tmp_path) -> None:
    write(tmp_path / "x", saved)
    part = ts.plan(STATE, RULES, mesh, min_size=0)
    expected = STATE
    for key in path.split("/"):  # by one path, and key by key
        expected = expected[int(key)] if key.isdigit() else expected[key]
        part = part[key]
    for plan in (ts.plan(STATE, RULES, mesh, min_size=0)[path], part):
        found = read(tmp_path / "x", plan)
        assert_same(ts.gather(found), expected)
        assert not ts.diff_shardings(found, plan)


@on_formats
def test_a_subtree_that_differs_or_is_not_there(write, read, mesh, tmp_path) -> None:
    plan = ts.plan(STATE, RULES, mesh, min_size=0)
    write(tmp_path / "x", {**STATE, "params": {"w": A, "more": B}})
    with pytest.raises(ts.MismatchError) as told:
        read(tmp_path / "x", plan["params"])
    lines = str(told.value)
    assert "params/layers/0/w: not in " in lines
    assert "params/more: in " in lines
    assert "count" not in lines
    write(tmp_path / "y", {"count": STATE["count"]})
    with pytest.raises(ts.MismatchError, match="w: not in"):
        read(tmp_path / "y", plan["params"])


@on_formats
def test_other_leaves_of_these_names_are_not_read(write, read, mesh, tmp_path) -> None:
    """Although more of the names are stored there."""
    plan = ts.plan({"params": {"a": A, "b": B}}, [("", None)], mesh)
    write(tmp_path / "x", {"params": {"a": A}, "a": A + 1, "b": B + 1})
    with pytest.raises(ts.MismatchError, match="params/b: not in"):
        read(tmp_path / "x", plan["params"])


@on_formats
def test_a_tree_of_plans(write, read, mesh, tmp_path) -> None:
    write(tmp_path / "x", STATE)
    plan = ts.plan(STATE, RULES, mesh, min_size=0)
    found = read(tmp_path / "x", {"params": plan["params"], "w": None}, partial=True)
    assert found["w"] is None
    assert_same(ts.gather(found["params"]), STATE["params"])
    assert not ts.diff_shardings(found["params"], plan["params"])


@on_formats
def test_a_subtree_without_its_path_is_told(write, read, tmp_path) -> None:
    write(tmp_path / "x", {"params": STATE["params"], "count": STATE["count"]})
    says = r"under 'params'. Pass the plan of the subtree, `plan\['params'\]`, or a tree in which"
    with pytest.raises(ts.MismatchError, match=says):
        read(tmp_path / "x", STATE["params"])
    with pytest.warns(ts.ShardingWarning, match=says):
        read(tmp_path / "x", STATE["params"], partial=True)
    # Not if another leaf is missing, which is stored nowhere.
    with pytest.raises(ts.MismatchError, match="`partial=True` reads the leaves that both have"):
        read(tmp_path / "x", {**STATE["params"], "zero": np.zeros(3)})


def test_a_subtree_of_the_latest_step(mesh, tmp_path) -> None:
    plan = ts.plan(STATE, RULES, mesh, min_size=0)
    with Checkpoints(tmp_path / "run") as run:
        run.save(3, STATE)
        step, params = run.restore_latest(plan["params"]) or (0, None)
    assert step == 3
    assert_same(ts.gather(params), STATE["params"])


# ------------------------------------------------------------------ empty containers


@pytest.mark.parametrize(
    ("tree", "restored"),
    [
        ({"a": {}, "b": [], "c": ()}, {"a": {}, "b": [], "c": ()}),
        ({"a": {"b": {}, "c": 1}}, {"a": {"b": {}, "c": 1}}),
        ([{}, 2], {"0": {}, "1": 2}),
        ({"a": OrderedDict(), "b": flax.core.freeze({})}, {"a": {}, "b": {}}),
        ({"a": optax.EmptyState(), "b": optax.MaskedNode()}, {"a": (), "b": ()}),
        ({"a": None}, {"a": None}),
    ],
    ids=str,
)
def test_empty_containers_come_back(tree: Any, restored: Any, tmp_path: Path) -> None:
    tree = {"tree": tree, "w": A}
    save(tmp_path / "x", tree)
    found = restore(tmp_path / "x")
    assert found["tree"] == restored
    assert jax.tree.structure(found["tree"]) == jax.tree.structure(restored)
    again = restore(tmp_path / "x", tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)


def test_an_empty_container_hides_no_array_of_its_path(tmp_path: Path) -> None:
    b = np.ones(2, np.float32)
    for i, tree in enumerate([{"a": {"b": b}, "a/b": {}}, {"a": [b], "a/0": []}]):
        save(tmp_path / f"{i}", tree)
        [found] = jax.tree.leaves(restore(tmp_path / f"{i}"))
        np.testing.assert_array_equal(found, b)


# ------------------------------------------------------------------ classes that are rebuilt


@pytest.mark.parametrize("kind", [Checked, Rebuilt])
@on_formats
def test_no_class_is_rebuilt_from_specs(write, read, kind, mesh, tmp_path) -> None:
    tree, rules = {"x": kind(A, B), "n": None}, [(".*", P("data"))]
    write(tmp_path / "x", tree)
    plan = ts.plan(tree, rules, mesh, min_size=0)
    placing = {"rules": rules, "mesh": mesh, "min_size": 0}
    structs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))
    for like, options in [(tree, placing), (structs, placing), (plan, {})]:
        for part in (False, True):
            found = read(tmp_path / "x", like, partial=part, **options)
            assert_same(ts.gather(found), tree)
            assert {x.sharding.spec for x in jax.tree.leaves(found)} == {P("data")}

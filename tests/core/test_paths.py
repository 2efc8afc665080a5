"""Leaf paths, for every kind of container."""

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import treeshard as ts
from treeshard._core.paths import nest, pair, paths_of


class Pair(NamedTuple):
    first: int
    second: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    a: int
    b: int


CASES = {
    "a bare leaf": (1, [""]),
    "dict with int keys": ({10: 1, 9: 2}, ["9", "10"]),
    "ordered dict, in its order": (OrderedDict(b=1, a=2), ["b", "a"]),
    "list and tuple": ([1, (2, 3)], ["0", "1/0", "1/1"]),
    "namedtuple": (Pair(1, 2), ["first", "second"]),
    "dataclass": (Fields(1, 2), ["a", "b"]),
    "None is not a leaf": ({"a": None, "b": 1}, ["b"]),
    "colliding": ({"a/b": 1, "a": {"b": 2}}, ["a/b", "a/b"]),
    "optax": (optax.adam(1e-3).init({"w": jnp.zeros(2)}), ["0/count", "0/mu/w", "0/nu/w"]),
    "linen box": ({"w": nn.Partitioned(jnp.zeros(2), ("data",)), "b": 0}, ["b", "w"]),
    "box around a tree": ({"w": nn.Partitioned({"x": 1, "y": 2}, ("data",))}, ["w/x", "w/y"]),
}


@pytest.mark.parametrize(("tree", "paths"), CASES.values(), ids=CASES)
def test_leaf_paths(tree, paths) -> None:
    assert ts.leaf_paths(tree) == paths_of(jax.tree.structure(tree)) == paths
    mapped = ts.named_tree_map(lambda path, x: path, tree)
    assert jax.tree.leaves(mapped) == paths
    assert jax.tree.structure(mapped) == jax.tree.structure(tree)


def test_leaf_paths_stop_at_is_leaf() -> None:
    tree = {"a": Pair(1, 2), "b": None}
    assert ts.leaf_paths(tree, is_leaf=lambda x: isinstance(x, Pair)) == ["a"]
    assert ts.leaf_paths(tree, is_leaf=lambda x: x is None) == ["a/first", "a/second", "b"]


def test_named_tree_map_with_more_trees() -> None:
    tree = {"a": 1, "b": [2, 3]}
    rest = {"a": "x", "b": ["y", {"deep": "z"}]}
    mapped = ts.named_tree_map(lambda path, x, y: (path, x, y), tree, rest, sep=".")
    assert mapped["b"] == [("b.0", 2, "y"), ("b.1", 3, {"deep": "z"})]
    with pytest.raises(ValueError, match="b"):
        ts.named_tree_map(lambda *_: None, tree, {"a": 1, "c": 2})


def test_leaves_that_share_a_path_are_paired_in_their_order() -> None:
    pairs = pair([("w", 1), ("a", 2), ("w", 3)], [("w", 4), ("v", 5)])
    assert pairs == [("w", 1, 4), ("a", 2, None), ("w", 3, None), ("v", None, 5)]


def test_leaves_by_path_are_nested_but_not_through_a_leaf() -> None:
    flat = {"a": 1, "a/b": 2, "c/d/e": 3, "c/d": 4}
    assert nest(flat) == {"a": 1, "a/b": 2, "c": {"d/e": 3, "d": 4}}
    assert sorted(ts.leaf_paths(nest(flat))) == sorted(flat)

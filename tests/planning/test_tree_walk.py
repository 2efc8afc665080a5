"""The paths of leaves."""

import jax
import pytest
from flax import linen
from helpers import struct

from treeshard import leaf_paths
from treeshard._planning.tree_walk import name_leaves


@pytest.mark.parametrize("boxed", [False, True])
def test_leaves_are_named_as_by_leaf_paths(boxed: bool) -> None:
    weight = linen.Partitioned(struct(8), ("embed",)) if boxed else struct(8)
    layer = {"w1": weight, "b": None, "pair": (struct(), [struct(3)])}
    tree = {"layers": [layer] * 11, "layer_12": {"1w": 0, "w_3": {4: 0}}, "a/7": 0, "norm": 0}
    assert name_leaves(tree, jax.tree.structure(tree)) == leaf_paths(tree)

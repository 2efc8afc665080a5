"""Names the leaves of a tree.

`tree_flatten_with_path` builds a key path for every leaf, which takes three times as long as this:
a model repeats its layers, and layers of equal structure are walked once.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from treeshard._core.arrays import has_shape
from treeshard._core.paths import children_with_keys, is_wrapper

Shape = tuple[int, ...]
TreeDef = Any  # jax.tree_util.PyTreeDef, which type checkers do not accept as a type


class LeafNames(NamedTuple):
    """The paths of leaves, in the order in which JAX flattens their tree.

    Attributes:
        paths: The path of each leaf, as in `leaf_paths`.
        boxed: Whether there are boxes in the tree.
    """

    paths: list[str]
    boxed: bool


def name_leaves(tree: Any, treedef: TreeDef) -> LeafNames:
    """Names every leaf."""
    walk = _Walk()
    paths = [ending[1:] for ending in walk.endings(tree, treedef)]
    return LeafNames(paths, walk.boxed)


class _Walk:
    """Walks a tree beside its treedef."""

    def __init__(self) -> None:
        self.boxed = False
        self._known: dict[TreeDef, list[str]] = {}

    def endings(self, node: Any, treedef: TreeDef) -> list[str]:
        """What the paths of a node's leaves add to its own path: `/w`, `/attn/q`."""
        if not treedef.num_leaves:
            return []
        if treedef.num_nodes == 1:
            return [""]
        try:
            endings = self._known.get(treedef)
        except Exception:  # static fields are compared, and may be anything: arrays, say
            return self._of_children(node, treedef)
        if endings is None:
            endings = self._known[treedef] = self._of_children(node, treedef)
        return endings

    def _of_children(self, node: Any, treedef: TreeDef) -> list[str]:
        is_boxed = is_wrapper(node)  # a wrapper has no part in the paths
        self.boxed = self.boxed or is_boxed
        endings: list[str] = []
        for (name, child), child_def in zip(
            _children(node, treedef), treedef.children(), strict=True
        ):
            prefix = "" if is_boxed else f"/{name}"
            endings += [prefix + ending for ending in self.endings(child, child_def)]
        return endings


def _children(node: Any, treedef: TreeDef) -> Iterable[tuple[Any, Any]]:
    """The children of a node with their names; the common containers are read directly."""
    if type(node) is dict:
        return ((key, node[key]) for key in treedef.node_data()[1])
    if type(node) is list or type(node) is tuple:
        return enumerate(node)
    return children_with_keys(node)


def shape_of_each(leaves: list[Any]) -> list[Shape | None]:
    """The shape of each leaf, `None` for leaves without one."""
    known: dict[Any, bool] = {}
    shapes: list[Shape | None] = []
    for leaf in leaves:
        kind = type(leaf)
        # Whether a numpy array holds numbers depends on its dtype, else on the type alone.
        key = leaf.dtype if issubclass(kind, np.ndarray | np.generic) else kind
        shaped = known.get(key)
        if shaped is None:
            shaped = known[key] = has_shape(leaf)
        shapes.append(leaf.shape if shaped else None)
    return shapes

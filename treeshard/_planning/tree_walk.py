"""Names the leaves of a tree.

`tree_flatten_with_path` builds a key path for every leaf, which takes three times as long as this:
a model repeats its layers, and layers of equal structure are walked once.
"""

from collections.abc import Iterable
from typing import Any

from treeshard._core.paths import children_with_keys, is_wrapper

Shape = tuple[int, ...]
TreeDef = Any  # jax.tree_util.PyTreeDef, which type checkers do not accept as a type


def name_leaves(tree: Any, treedef: TreeDef) -> list[str]:
    """The path of every leaf, as in `leaf_paths`."""
    return [ending[1:] for ending in _endings(tree, treedef, {})]


def _endings(node: Any, treedef: TreeDef, known: dict[TreeDef, list[str]]) -> list[str]:
    """What the paths of a node's leaves add to its own path: `/w`, `/attn/q`."""
    if not treedef.num_leaves:
        return []
    if treedef.num_nodes == 1:
        return [""]
    try:
        endings = known.get(treedef)
    except Exception:  # static fields are compared, and may be anything: arrays, say
        return _endings_of_children(node, treedef, known)
    if endings is None:
        endings = known[treedef] = _endings_of_children(node, treedef, known)
    return endings


def _endings_of_children(node: Any, treedef: TreeDef, known: dict[TreeDef, list[str]]) -> list[str]:
    in_wrapper = is_wrapper(node)  # which has no part in the paths
    endings: list[str] = []
    children = zip(_children(node, treedef), treedef.children(), strict=True)
    for (name, child), child_def in children:
        prefix = "" if in_wrapper else f"/{name}"
        endings += [prefix + ending for ending in _endings(child, child_def, known)]
    return endings


def _children(node: Any, treedef: TreeDef) -> Iterable[tuple[Any, Any]]:
    """The children of a node with their names; the common containers are read directly."""
    if type(node) is dict:
        return ((key, node[key]) for key in treedef.node_data()[1])
    if type(node) is list or type(node) is tuple:
        return enumerate(node)
    return children_with_keys(node)

"""The paths of leaves: `layers/0/attn/q/weight`.

The paths equal `jax.tree_util.keystr` with a separator, except for arrays in wrappers of Flax and
haliax. There, JAX's path of a weight depends on the wrapper: `w/value`, `w/0` or `w`. Rules for one
of these paths would miss the others.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_structure

PyTree = Any  # any tree that `jax.tree` functions take
TreeDef = Any  # jax.tree_util.PyTreeDef, which type checkers do not accept as a type
IsLeaf = Callable[[Any], bool] | None
A = TypeVar("A")
B = TypeVar("B")


def is_box(x: Any) -> bool:
    """Whether `x` is a Flax box around an array: a Linen box, or an nnx variable."""
    # By attributes of the classes, because Flax may not be installed.
    kind = type(x)
    return hasattr(kind, "replace_boxed") or (
        hasattr(kind, "get_metadata") and hasattr(kind, "get_value")
    )


def is_box_of_leaf(x: Any) -> bool:
    """Whether `x` is a Flax box around one leaf. A box may also hold a tree, or be empty."""
    return is_box(x) and tree_structure(x).num_leaves == 1


def is_named_array(x: Any) -> bool:
    """Whether `x` is a `haliax.NamedArray`: an array with a named `Axis` for each dim."""
    # Its class registers itself with JAX, and its array is the only child.
    kind = type(x)
    return hasattr(kind, "resolve_axis") and hasattr(kind, "axis_size") and hasattr(x, "axes")


def is_wrapper(x: Any) -> bool:
    """Whether `x` is a wrapper that is not part of paths: a Flax box or a `NamedArray`."""
    return _may_wrap(type(x)) and (is_box(x) or is_named_array(x))


@lru_cache(4096)  # called for every node of a tree
def _may_wrap(kind: type) -> bool:
    """Whether objects of a class may be wrappers."""
    return any(hasattr(kind, x) for x in ("replace_boxed", "get_metadata", "resolve_axis"))


def leaf_paths(tree: PyTree, *, is_leaf: IsLeaf = None) -> list[str]:
    """Returns the path of every leaf of a tree, in the order in which JAX flattens it.

    A path joins dict keys, field names and indices by `/`. A tree that is itself a leaf has
    the path `""`. Flax boxes and haliax's `NamedArray`s count as leaves: `value` is not part of the
    path. Two leaves may share a path, as in `{"a/b": 1, "a": {"b": 2}}`.

    Args:
        tree: Any pytree.
        is_leaf: Returns whether a node counts as a leaf, as in `jax.tree.map`.

    Examples:
        >>> leaf_paths({"layers": [{"weight": 0, "bias": 0}], "scale": 0})
        ['layers/0/bias', 'layers/0/weight', 'scale']
    """
    return name_leaves(tree, tree_structure(tree, is_leaf=is_leaf))


def named_tree_map(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, sep: str = "/", is_leaf: IsLeaf = None
) -> PyTree:
    """Calls `f(path, leaf, *rest_leaves)` for each leaf, and returns a tree of the results.

    Args:
        f: Takes the leaf's path, the leaf, and the corresponding parts of `rest`.
        tree: Any pytree.
        rest: Trees that have the structure of `tree` as a prefix.
        sep: The separator between the parts of a path.
        is_leaf: Returns whether a node counts as a leaf, as in `jax.tree.map`.

    Returns:
        A tree with the structure of `tree`.

    Raises:
        ValueError: If a tree in `rest` does not have the structure of `tree` (JAX's own error).

    Examples:
        >>> named_tree_map(lambda path, x: f"{path}={x}", {"a": 1, "b": [2]})
        {'a': 'a=1', 'b': ['b/0=2']}

    Source:
        EasyLM's function of this name.
    """
    leaves, treedef = tree_flatten(tree, is_leaf=is_leaf)
    columns = [name_leaves(tree, treedef, sep), leaves, *map(treedef.flatten_up_to, rest)]
    return treedef.unflatten(map(f, *columns))


def children_with_keys(node: Any) -> list[tuple[str, Any]]:
    """The children of a node, each with the part that it adds to a path."""
    # Every other node counts as a leaf, so that JAX flattens one level.
    pairs, _ = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(keystr(keys, simple=True, separator="/"), child) for keys, child in pairs]


def nest(leaves: Mapping[str, Any]) -> PyTree:
    """Nests leaves in dicts by the parts of their paths. A single leaf with the path `""` is
    returned.

    If the path of one leaf starts with the path of another, the path stays one key:
    `{"a": x, "a/b": y}` does not change.
    """
    if list(leaves) == [""]:
        return leaves[""]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node, rest = tree, path
        while "/" in rest:
            key, _, after = rest.partition("/")
            # The node above `after` is a leaf, so it cannot be a dict.
            if path.removesuffix(f"/{after}") in leaves:
                break
            node, rest = node.setdefault(key, {}), after
        node[rest] = leaf
    return tree


# ------------------------------------------------------------------ names of leaves

# `tree_flatten_with_path` builds a key path for every leaf, which takes three times as long. This
# walk visits layers of equal structure once.


def name_leaves(tree: PyTree, treedef: TreeDef, sep: str = "/") -> list[str]:
    """The path of every leaf of a tree that has this structure, as in `leaf_paths`."""
    walk = _Walk(sep)
    walk.node(tree, treedef, "")
    return [path[len(sep) :] for path in walk.paths]


class _Walk:
    """Collects the paths of leaves, each with a separator in front."""

    def __init__(self, sep: str) -> None:
        self.sep = sep
        self.paths: list[str] = []
        # For the first node of each structure: where its paths begin and end in the list, and the
        # length of the node's own path, which starts each of them.
        self.known: dict[TreeDef, tuple[int, int, int]] = {}

    def node(self, node: Any, treedef: TreeDef, path: str) -> None:
        if treedef.num_nodes == 1:
            self.paths += [path] * treedef.num_leaves
            return
        try:
            known = self.known.get(treedef)
        except Exception:  # static fields may be arrays, whose comparison raises
            self._children(node, treedef, path)
            return
        if known is None:
            start = len(self.paths)
            self._children(node, treedef, path)
            self.known[treedef] = start, len(self.paths), len(path)
        else:
            start, end, length = known
            self.paths += [path + first[length:] for first in self.paths[start:end]]

    def _children(self, node: Any, treedef: TreeDef, path: str) -> None:
        in_wrapper = is_wrapper(node)  # wrappers are not part of paths
        children = zip(_children(node, treedef), treedef.children(), strict=True)
        for (name, child), child_def in children:
            self.node(child, child_def, path if in_wrapper else f"{path}{self.sep}{name}")


def _children(node: Any, treedef: TreeDef) -> Iterable[tuple[Any, Any]]:
    """The children of a node with their names. Common containers are read directly."""
    if type(node) is dict:
        return ((key, node[key]) for key in treedef.node_data()[1])
    if type(node) is list or type(node) is tuple:
        return enumerate(node)
    return children_with_keys(node)


def path_under(prefix: str, path: str) -> str:
    """Joins the path of a subtree and a path inside it; either may be empty."""
    return "/".join(part for part in (prefix, path) if part)


def paths_of(treedef: Any) -> list[str]:
    """The paths of the leaves of any tree with this structure."""
    return leaf_paths(treedef.unflatten(range(treedef.num_leaves)))


def shared_names(
    names: Iterable[str | None], tree: PyTree, *, is_leaf: IsLeaf = None
) -> dict[str, list[str]]:
    """The names that several leaves of a tree share, each with the key paths of these leaves.

    `names` has a name for each leaf, in order, or `None` for leaves without one.

    Examples:
        >>> tree = {"a/b": 1, "a": {"b": 2}}
        >>> shared_names(leaf_paths(tree), tree)
        {'a/b': ["['a']['b']", "['a/b']"]}
    """
    names = list(names)
    named = [name for name in names if name is not None]
    if len({*named}) == len(named):
        return {}
    counts = Counter(named)
    # `keystr` with quotes tells `['a']['b']` and `['a/b']` apart. It is slow, and rarely needed.
    shared: dict[str, list[str]] = defaultdict(list)
    keyed = tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    for name, (keys, _) in zip(names, keyed, strict=True):
        if name is not None and counts[name] > 1:
            shared[name].append(keystr(keys))
    return dict(shared)


def pair(
    a: Iterable[tuple[str, A]], b: Iterable[tuple[str, B]]
) -> list[tuple[str, A | None, B | None]]:
    """Matches the leaves of two trees by path.

    Returns each path with the leaves of both trees, or `None` for a tree that does not have it, in
    the order of `a`, then the paths of `b` alone. Leaves that share a path are matched in order.

    Examples:
        >>> pair([("w", 1), ("b", 2)], [("b", 3), ("c", 4)])
        [('w', 1, None), ('b', 2, 3), ('c', None, 4)]
    """
    in_a, in_b = _number_by_path(a), _number_by_path(b)
    return [(key[0], in_a.get(key), in_b.get(key)) for key in {**in_a, **in_b}]


def _number_by_path(leaves: Iterable[tuple[str, A]]) -> dict[tuple[str, int], A]:
    """Leaves by path, and by number among leaves of the same path."""
    counts: Counter[str] = Counter()
    numbered: dict[tuple[str, int], A] = {}
    for path, leaf in leaves:
        numbered[path, counts[path]] = leaf
        counts[path] += 1
    return numbered

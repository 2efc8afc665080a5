"""The paths of leaves: `layers/0/attn/q/weight`.

`jax.tree_util.keystr` with a separator gives them, but for arrays in wrappers, as Flax and haliax
have them: a weight would have the path `w/value`, `w/0` or `w`, as it is wrapped or not, and rules
for one would miss the others.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jax.tree_util import keystr, tree_flatten_with_path, tree_structure, tree_unflatten

PyTree = Any  # any tree that `jax.tree` functions take
IsLeaf = Callable[[Any], bool] | None
A = TypeVar("A")
B = TypeVar("B")


def is_box(x: Any) -> bool:
    """Whether `x` is a Flax box around an array: a Linen box, or an nnx variable."""
    # By what the classes have, since only users of Flax have it installed.
    kind = type(x)
    return hasattr(kind, "replace_boxed") or (
        hasattr(kind, "get_metadata") and hasattr(kind, "get_value")
    )


def is_box_of_leaf(x: Any) -> bool:
    """Whether `x` is a Flax box around one leaf: a box may also hold a tree, or nothing."""
    return is_box(x) and tree_structure(x).num_leaves == 1


def is_named_array(x: Any) -> bool:
    """Whether `x` is a `haliax.NamedArray`: an array with a named `Axis` for each dim."""
    # Its class registers itself with JAX, and its array is the only child.
    kind = type(x)
    return hasattr(kind, "resolve_axis") and hasattr(kind, "axis_size") and hasattr(x, "axes")


def is_wrapper(x: Any) -> bool:
    """Whether `x` wraps an array and adds nothing to its path: a Flax box or a `NamedArray`."""
    return is_box(x) or is_named_array(x)


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
    return _named_leaves(tree, "/", is_leaf)[0]


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
    paths, leaves = _named_leaves(tree, sep, is_leaf)
    treedef = tree_structure(tree, is_leaf=is_leaf)
    columns = [treedef.flatten_up_to(other) for other in rest]
    return tree_unflatten(treedef, [f(*row) for row in zip(paths, leaves, *columns, strict=True)])


def children_with_keys(node: Any) -> list[tuple[str, Any]]:
    """The children of a node, each with the part that it adds to a path."""
    # All but the node itself counts as a leaf, so that JAX flattens one level.
    pairs, _ = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(keystr(keys, simple=True, separator="/"), child) for keys, child in pairs]


def nested(leaves: Mapping[str, Any]) -> PyTree:
    """Dicts of dicts by the parts of paths; the path `""` alone is the leaf.

    Where a leaf already has a path that another one goes through, the rest of that is one key:
    `{"a": x, "a/b": y}` stays as it is.
    """
    if list(leaves) == [""]:
        return leaves[""]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node, rest = tree, path
        while "/" in rest:
            key, _, after = rest.partition("/")
            # What is above `after` is a leaf itself, which a dict cannot also be.
            if path.removesuffix(f"/{after}") in leaves:
                break
            node, rest = node.setdefault(key, {}), after
        node[rest] = leaf
    return tree


def _named_leaves(tree: PyTree, sep: str, is_leaf: IsLeaf) -> tuple[list[str], list[Any]]:
    def stop(x: Any) -> bool:
        return is_wrapper(x) or (is_leaf is not None and is_leaf(x))

    # Flattened twice: first to wrappers, whose path counts, then inside each, of whose path all but
    # the first key counts. That is empty for an array, and not for a tree in a box.
    paths: list[str] = []
    leaves: list[Any] = []
    for keys, leaf in tree_flatten_with_path(tree, is_leaf=stop)[0]:
        if is_wrapper(leaf) and not (is_leaf is not None and is_leaf(leaf)):
            # The first key inside a wrapper is its field, `value` or `0`.
            inside = tree_flatten_with_path(leaf, is_leaf=is_leaf)[0]
            paths += [keystr((*keys, *sub[1:]), simple=True, separator=sep) for sub, _ in inside]
            leaves += [value for _, value in inside]
        else:
            paths.append(keystr(keys, simple=True, separator=sep))
            leaves.append(leaf)
    return paths, leaves


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

    `names` has one for each leaf, in order; `None` for leaves that do not need one.

    Examples:
        >>> tree = {"a/b": 1, "a": {"b": 2}}
        >>> shared_names(leaf_paths(tree), tree)
        {'a/b': ["['a']['b']", "['a/b']"]}
    """
    names = list(names)
    counts = Counter(name for name in names if name is not None)
    if len(counts) == counts.total():
        return {}
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

    Returns each path with the leaf of either tree, `None` where a tree does not have it: in the
    order of `a`, then what only `b` has. Leaves that share a path are matched in their order.

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

"""The paths of leaves: `layers/0/attn/q/weight`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure, tree_unflatten

IsLeaf = Callable[[Any], bool] | None


def is_box(x: Any) -> bool:
    """Whether `x` is a Flax box around an array.

    Recognised without importing Flax: a Linen box has `replace_boxed`, an nnx variable has
    metadata.
    """
    kind = type(x)
    return hasattr(kind, "replace_boxed") or (
        hasattr(kind, "get_metadata") and hasattr(kind, "get_value")
    )


def leaf_paths(tree: Any, *, is_leaf: IsLeaf = None) -> list[str]:
    """Returns the path of every leaf of a tree, in the order in which JAX flattens it.

    Dict keys, field names and indices are joined by `/`. A tree that is itself a leaf has
    the path `""`. A Flax box is one leaf, so its `value` is not part of the path. Two leaves
    may share a path, as in `{"a/b": 1, "a": {"b": 2}}`.

    Args:
        tree: Any pytree.
        is_leaf: What counts as a leaf in addition, as in `jax.tree.map`.

    Examples:
        >>> leaf_paths({"layers": [{"weight": 0, "bias": 0}], "scale": 0})
        ['layers/0/bias', 'layers/0/weight', 'scale']
    """
    return _named_leaves(tree, "/", is_leaf)[0]


def named_tree_map(
    f: Callable[..., Any], tree: Any, *rest: Any, sep: str = "/", is_leaf: IsLeaf = None
) -> Any:
    """Maps `f(path, leaf, *rest_leaves)` over a tree, keeping its structure.

    Args:
        f: Takes the leaf's path, the leaf, and the corresponding parts of `rest`.
        tree: Any pytree.
        rest: Trees that have the structure of `tree` as a prefix.
        sep: The separator between the parts of a path.
        is_leaf: What counts as a leaf in addition, as in `jax.tree.map`.

    Raises:
        ValueError: If one of `rest` does not have `tree`'s structure (JAX's own error).

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
    pairs, _ = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(keystr(keys, simple=True, separator="/"), child) for keys, child in pairs]


def _named_leaves(tree: Any, sep: str, is_leaf: IsLeaf) -> tuple[list[str], list[Any]]:
    def stop(x: Any) -> bool:
        return is_box(x) or (is_leaf is not None and is_leaf(x))

    paths: list[str] = []
    leaves: list[Any] = []
    for keys, leaf in tree_flatten_with_path(tree, is_leaf=stop)[0]:
        if is_box(leaf) and not (is_leaf is not None and is_leaf(leaf)):
            # The first key inside a box is its field `value`.
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


def same_path_keys(tree: Any, path: str) -> list[str]:
    """The key paths, as JAX writes them, of all leaves that have the path `path`."""
    keyed = jax.tree_util.tree_flatten_with_path(tree)[0]
    pairs = zip(leaf_paths(tree), keyed, strict=True)
    return [keystr(keys) for leaf_path, (keys, _) in pairs if leaf_path == path]

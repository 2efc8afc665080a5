"""Names the leaves of a tree, and says which patterns distinguish repeated layers.

A model repeats its layers, so most paths differ only in an index. The key of a path has zeros
for the digits of its indices: a pattern that treats all indices of one length alike is matched
once for all leaves with equal keys.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from treeshard._core.arrays import has_shape
from treeshard._core.paths import children_with_keys, is_box

Shape = tuple[int, ...]
TreeDef = Any  # jax.tree_util.PyTreeDef, which type checkers do not accept as a type

# The digits at the start of a part of a path, where parts end at "/" and "_": `layers/12`,
# `layer_12`, but not `w1`.
_INDEX = re.compile("(?<![^/_])[0-9]+")


class LeafNames(NamedTuple):
    """The paths of leaves, in the order in which JAX flattens their tree.

    Attributes:
        paths: The path of each leaf, as in `leaf_paths`.
        keys: The same with the digits of indices replaced by zeros.
        boxed: Whether there are boxes in the tree.
    """

    paths: list[str]
    keys: list[str]
    boxed: bool


def name_leaves(tree: Any, treedef: TreeDef) -> LeafNames:
    """Names every leaf. Subtrees of equal structure are walked once."""
    walk = _Walk()
    ends, keys = walk.below(tree, treedef)
    paths = [end[1:] for end in ends]
    return LeafNames(paths, paths if keys is ends else [key[1:] for key in keys], walk.boxed)


class _Walk:
    """Walks a tree beside its treedef."""

    def __init__(self) -> None:
        self.boxed = False
        self._known: dict[TreeDef, tuple[list[str], list[str]]] = {}

    def below(self, node: Any, treedef: TreeDef) -> tuple[list[str], list[str]]:
        """What the paths of a node's leaves add to its own path, and what their keys add.

        Both are the same list if the paths contain no index.
        """
        if treedef.num_nodes == 1 or not treedef.num_leaves:
            return _LEAF if treedef.num_leaves else _EMPTY
        try:
            names = self._known.get(treedef)
        except Exception:  # static fields are compared, and may be anything: arrays, say
            return self._walk(node, treedef)
        if names is None:
            names = self._known[treedef] = self._walk(node, treedef)
        return names

    def _walk(self, node: Any, treedef: TreeDef) -> tuple[list[str], list[str]]:
        children: Iterable[tuple[Any, Any]]
        if type(node) is dict:
            children = ((key, node[key]) for key in treedef.node_data()[1])
        elif type(node) is list or type(node) is tuple:
            children = enumerate(node)
        else:
            children = children_with_keys(node)
        boxed = is_box(node)  # a box has no part in the paths
        self.boxed = self.boxed or boxed
        all_ends: list[str] = []
        all_keys: list[str] = []
        indexed = False
        for (name, child), child_def in zip(children, treedef.children(), strict=True):
            ends, keys = self.below(child, child_def)
            prefix = "" if boxed else f"/{name}"
            zeros = _INDEX.sub(_zeros, prefix)
            indexed = indexed or keys is not ends or zeros != prefix
            all_ends += [prefix + end for end in ends]
            all_keys += [zeros + key for key in keys]
        return all_ends, all_keys if indexed else all_ends


_NO_KEYS: list[str] = []
_OWN_PATH = [""]
_EMPTY = _NO_KEYS, _NO_KEYS
_LEAF = _OWN_PATH, _OWN_PATH
_HAS_DIGIT = re.compile("[0-9]").search


def _zeros(index: re.Match[str]) -> str:
    return "0" * len(index[0])


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


# ------------------------------------------------------------------ patterns

# The parts of a regular expression, read from the left so that sets end where they end.
_TOKEN = re.compile(
    r"""
    (?P<escape> \\.)
    | (?P<set> \[\^?\]? (?:\\.|[^]\\])* \])
    | (?P<quantifier> [*+?] | \{[0-9]+(?:,[0-9]*)?\} | \{,[0-9]+\})
    | (?P<group> \( (?:\?(?:[:=!>]|<[=!]|P<|[aiLmsu]+\)))? (?!\?))
    | (?P<literal> .)
    """,
    re.VERBOSE | re.DOTALL,
)
_ALIKE_ESCAPE = re.compile(r"\\(?:[dDwWsSbBAZ]|[^0-9A-Za-z])", re.DOTALL)
_ALIKE_IN_SET = re.compile(r"\\(?:[dDwWsS]|[^0-9A-Za-z])|(?<!-)0-9", re.DOTALL)


def _tokens(pattern: re.Pattern[str]) -> Iterator[tuple[str | None, str, bool]]:
    """The kind and the text of each part, and whether a quantifier follows."""
    tokens = [*_TOKEN.finditer(pattern.pattern)]
    for token, following in zip_longest(tokens, tokens[1:]):
        yield token.lastgroup, token[0], bool(following and following.lastgroup == "quantifier")


@lru_cache(maxsize=4096)
def tells_indices_apart(pattern: re.Pattern[str]) -> bool:
    """Whether a pattern may match one path and not another with the same key.

    False only for what is known to be harmless: patterns without digits, sets of all ten, and
    digits right after a letter, as in `w1` and `fc[12]`, which are never part of an index.
    """
    if pattern.flags & re.VERBOSE:
        return True
    after_letter = False  # or after digits that are themselves after a letter
    for kind, text, repeated in _tokens(pattern):
        if kind == "escape":
            if not _ALIKE_ESCAPE.fullmatch(text):
                return True
            after_letter = False
        elif text == "(" and kind == "literal":  # an unusual kind of group
            return True
        elif kind in ("set", "literal") and _HAS_DIGIT(_ALIKE_IN_SET.sub("", text)):
            if not after_letter or repeated:
                return True
            after_letter = kind == "literal"
        elif kind == "set":
            if "\\" in _ALIKE_IN_SET.sub("", text):
                return True
            after_letter = False
        else:
            after_letter = kind == "literal" and text.isalpha()
    return False


@lru_cache(maxsize=4096)
def needed_text(pattern: re.Pattern[str]) -> str:
    """A text that occurs in whatever the pattern matches; `""` if none is known.

    To look for it takes a fraction of the time of a search.
    """
    if pattern.flags & (re.VERBOSE | re.IGNORECASE):
        return ""
    longest = run = ""
    depth = 0
    for kind, text, repeated in _tokens(pattern):
        if kind == "literal" and (text == "(" or (text == "|" and not depth)):
            return ""
        if kind == "escape" and not _ALIKE_ESCAPE.fullmatch(text):
            return ""  # the text after it may be part of it
        if kind == "literal" and not depth and not repeated and text not in ".^$":
            run += text
            longest = max(longest, run, key=len)
        else:
            run = ""
            depth += (kind == "group" and text[-1] != ")") - (kind == "literal" and text == ")")
    return longest

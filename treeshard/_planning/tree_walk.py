"""Names the leaves of a tree, walking equal subtrees once."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import PyTreeDef as _PyTreeDef
from jax.tree_util import default_registry, tree_structure

from treeshard._core.arrays import has_shape
from treeshard._core.paths import children_with_keys, is_box
from treeshard._planning.decision import Decision, Shape

# ------------------------------------------------------------------
# What a regular expression depends on, read from its parse tree.
# A model repeats its layers, so most paths differ only in digits. A pattern that treats all
# ten digits alike decides them together; this says which patterns do.

_ZEROS = str.maketrans("123456789", "0" * 9)
_DIGITS = range(ord("0"), ord("9") + 1)

_END: list[tuple[str, Any]] = [("END", None)]

has_digit = re.compile("[0-9]").search


def zeroed(text: str) -> str:
    """`text` with every digit replaced by 0, one for one, so that its length stays."""
    return text.translate(_ZEROS)


class Reading(NamedTuple):
    """What is known of a pattern without running it.

    Attributes:
        tells_digits_apart: Whether `search(path)` may differ from `search(zeroed(path))`.
        tells_indices_apart: Whether it may differ where other digits stand for the keys of
            the path that are numbers.
        needs: At least one of these strings occurs in every text that matches.
    """

    tells_digits_apart: bool
    tells_indices_apart: bool
    needs: tuple[str, ...]


@lru_cache(maxsize=4096)
def read_pattern(pattern: re.Pattern[str]) -> Reading:
    """Reads a compiled pattern; of one that it does not understand it claims nothing."""
    try:
        # The text alone is not enough: `(?x)#[` and `[+-0-9]` mean other than they seem.
        tree: Any = re._parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)  # pyright: ignore
        same = _digits_alike(tree)
        same_indices = same or _digits_alike(tree, only_in_indices=True)
        # Ignoring case, the letters of the pattern are not the letters of the text.
        needs = ("",) if pattern.flags & re.IGNORECASE else _needed(tree)
        return Reading(not same, not same_indices, needs)
    except Exception:  # a private module of Python's: whatever it does, be slow and right
        return Reading(True, True, ("",))


def _digits_alike(tree: Any, only_in_indices: bool = False) -> bool:
    """Whether nothing in a parse tree can tell one digit from another.

    Only what is known to be harmless passes. References to groups are not: `(.)\\1`.
    With `only_in_indices`, a digit beside a letter passes, as in `w1`: among the digits of a
    key that is a number, what stands beside one is a digit, a slash, or nothing.
    """
    items = [(str(op), arg) for op, arg in tree]
    for place, (op, arg) in enumerate(items):
        match op:
            case "LITERAL" | "NOT_LITERAL":
                alike = arg not in _DIGITS
            case "RANGE":
                low, high = arg
                alike = sum(low <= digit <= high for digit in _DIGITS) in (0, 10)
            case "ANY" | "AT" | "CATEGORY" | "NEGATE":
                alike = True
            case "IN":
                alike = _digits_alike(arg)
            case "ATOMIC_GROUP":
                alike = _digits_alike(arg, only_in_indices)
            case "BRANCH":
                alike = all(_digits_alike(branch, only_in_indices) for branch in arg[1])
            case "SUBPATTERN" | "ASSERT" | "ASSERT_NOT" | "MAX_REPEAT" | "MIN_REPEAT":
                alike = _digits_alike(arg[-1], only_in_indices)
            case "POSSESSIVE_REPEAT":
                alike = _digits_alike(arg[-1], only_in_indices)
            case _:
                alike = False
        beside = items[max(place - 1, 0) : place] + items[place + 1 : place + 2]
        guarded = op in ("LITERAL", "NOT_LITERAL", "IN") and any(map(_is_letter, beside))
        if not alike and not (only_in_indices and guarded):
            return False
    return True


def _is_letter(item: tuple[str, Any]) -> bool:
    """Whether an item of a parse tree is one character, and neither digit nor slash."""
    return item[0] == "LITERAL" and item[1] not in _DIGITS and item[1] != ord("/")


def _needed(tree: Any) -> tuple[str, ...]:
    """Strings of which every match holds at least one; `("",)` if none is known."""
    best: tuple[str, ...] = ("",)
    run = ""
    for op, arg in chain(_in_line(tree), _END):
        if op == "LITERAL":
            run += chr(arg)
        elif op not in ("AT", "ASSERT", "ASSERT_NOT"):  # they consume nothing
            found: list[tuple[str, ...]] = [(run,)]
            if op == "BRANCH":
                found.append(tuple(text for branch in arg[1] for text in _needed(branch)))
            elif op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and arg[0] > 0:
                found.append(_needed(arg[2]))
            best = max(best, *found, key=lambda texts: min(map(len, texts)))
            run = ""
    return best


def _in_line(tree: Any) -> Iterator[tuple[str, Any]]:
    """The tree's items, with those of plain groups in place of the groups."""
    for op, arg in tree:
        if str(op) == "SUBPATTERN" and not arg[1] & re.IGNORECASE:
            yield from _in_line(arg[-1])
        elif str(op) == "ATOMIC_GROUP":
            yield from _in_line(arg)
        else:
            yield str(op), arg


TreeDef = Any  # jax.tree_util.PyTreeDef, which is no type to type checkers

# A leaf, by its index, that is decided later: what to ask, and what then decides.
Open = tuple[int, Any, Any]


def shape_of_each(leaves: list[Any]) -> list[Shape | None]:
    """The shape of each leaf that has one."""
    kinds = set(map(type, leaves))
    of_numpy = {kind for kind in kinds if issubclass(kind, np.ndarray | np.generic)}
    # Whether leaves of a type have a shape; numpy's by their dtype.
    known: dict[Any, bool] = {
        kind: has_shape(next(leaf for leaf in leaves if type(leaf) is kind))
        for kind in kinds - of_numpy
    }
    if not of_numpy and all(known.values()):
        return [leaf.shape for leaf in leaves]
    shapes: list[Shape | None] = []
    for leaf in leaves:
        key = leaf.dtype if type(leaf) in of_numpy else type(leaf)
        shaped = known.get(key)
        if shaped is None:
            shaped = known[key] = has_shape(leaf)
        shapes.append(leaf.shape if shaped else None)
    return shapes


class Walk:
    """Walks a tree beside its treedef, and names the leaves.

    Paths that differ in digits only are decided once, with zeros for the digits (`zeros`,
    `None` for a path that has none), and so are layers that look alike. Leaves whose
    true path matters are left open.

    Attributes:
        shapes: The shape of each leaf, in the order in which JAX flattens the tree.
        decisions: What was decided for each leaf that was walked so far.
        open: Those of them that are decided by their true path.
        boxed: Whether there are boxes in the tree.
    """

    def __init__(self, shapes: list[Shape | None]):
        self.shapes = shapes
        self.decisions: list[Decision] = []
        self.open: list[Open] = []
        self.boxed = False
        self._paths: list[str] = []
        # Runs of layers whose paths nobody has asked for: where, their paths, and what
        # follows these for each leaf of one.
        self._runs: list[tuple[int, list[str], list[str]]] = []
        self._names: dict[TreeDef, list[str]] = {}  # of the leaves of a subtree
        self._layers: dict[Any, Any] = {}

    def leaf(self, path: str, zeros: str | None) -> None:
        """Decides the next leaf, or leaves it open."""
        raise NotImplementedError

    def settled_for_all(self, open_: list[Open]) -> list[Open]:
        """Decides leaves that list indices make no difference to; returns the others."""
        raise NotImplementedError

    def walk(self, treedef: TreeDef, tree: Any) -> None:
        """Walks the whole tree."""
        if treedef.num_nodes == 1 and treedef.num_leaves == 1:
            self._add("", None)
        else:
            self._node(treedef, tree, "", None)

    @property
    def paths(self) -> list[str]:
        """The path of each leaf that was walked so far."""
        for start, layers, names in self._runs:
            end = start + len(layers) * len(names)
            self._paths[start:end] = [layer + name for layer in layers for name in names]
        self._runs.clear()
        return self._paths

    def _node(self, treedef: TreeDef, node: Any, prefix: str, zeros: str | None) -> None:
        kind = type(node)
        names: Iterable[str]
        children: Iterable[Any]
        if kind is dict:
            keys = treedef.node_data()[1]
            names, children = map(str, keys), map(node.__getitem__, keys)
        elif kind is list or kind is tuple:
            if self._all_alike(treedef, node, prefix, zeros):
                return
            names, children = map(str, range(len(node))), node
        elif is_box(node):
            self._box(treedef, node, prefix, zeros)
            return
        else:
            pairs = children_with_keys(node)
            names, children = [name for name, _ in pairs], [child for _, child in pairs]
        if treedef.num_nodes == treedef.num_leaves + 1:  # its children are leaves, all of them
            for name in names:
                self._add(prefix + name, _zeros_below(prefix, zeros, name))
            return
        for name, child, below in zip(names, children, treedef.children(), strict=True):
            path, zero = prefix + name, _zeros_below(prefix, zeros, name)
            if below.num_nodes == 1:
                if below.num_leaves:
                    self._add(path, zero)
            elif zero is not None and has_digit(name):
                self._layer(below, child, path, zero)
            else:
                self._subtree(below, child, path, zero)

    def _add(self, path: str, zeros: str | None) -> None:
        self._paths.append(path)
        self.leaf(path, zeros)

    def _box(self, treedef: TreeDef, box: Any, prefix: str, zeros: str | None) -> None:
        """A box is no part of a path: its value is called what the box is called."""
        self.boxed = True
        for (_, child), below in zip(children_with_keys(box), treedef.children(), strict=True):
            if below.num_nodes > 1:
                self._node(below, child, prefix, zeros)
            elif below.num_leaves:
                self._add(prefix[:-1], zeros and zeros[:-1])

    # What looks alike.

    def _names_since(self, start: int, path: str) -> list[str]:
        return [leaf_path[len(path) :] for leaf_path in self.paths[start:]]

    def _subtree(self, treedef: TreeDef, node: Any, path: str, zeros: str | None) -> None:
        """A subtree whose like may have been named before, under another path."""
        start = len(self._paths)
        try:
            names = self._names.get(treedef)
        except Exception:  # static fields are compared, and may be anything: arrays, say
            self._node(treedef, node, path + "/", zeros and zeros + "/")
            return
        if names is None:
            self._node(treedef, node, path + "/", zeros and zeros + "/")
            self._names[treedef] = self._names_since(start, path)
        else:
            for name in names:
                self._add(path + name, _zeros_below(path, zeros, name))

    def _layer(self, treedef: TreeDef, node: Any, path: str, zeros: str) -> None:
        """A subtree that has others beside it whose names differ in digits."""
        start, already = len(self._paths), len(self.open)
        key = (zeros, treedef, tuple(self.shapes[start : start + treedef.num_leaves]))
        try:
            seen = self._layers.get(key)
        except Exception:  # as above
            self._node(treedef, node, path + "/", zeros + "/")
            return
        if seen is None:
            self._node(treedef, node, path + "/", zeros + "/")
            open_ = [(index - start, *rest) for index, *rest in self.open[already:]]
            self._layers[key] = self._names_since(start, path), self.decisions[start:], open_
            return
        names, decisions, open_ = seen
        self._paths += map(path.__add__, names)
        self.decisions += decisions
        if open_:
            self.open += [(start + index, asked, rule) for index, asked, rule in open_]

    def _all_alike(
        self, treedef: TreeDef, node: Sequence[Any], prefix: str, zeros: str | None
    ) -> bool:
        """Walks a list of subtrees, if all have one structure and the same shapes."""
        count, leaves, start = len(node), treedef.num_leaves, len(self._paths)
        if count < 3 or leaves % count or (treedef.num_nodes - 1) % count:
            return False
        shapes, one = self.shapes[start : start + leaves], leaves // count
        if not one or treedef.num_nodes == leaves + 1 or shapes != shapes[:one] * count:
            return False
        layer = tree_structure(node[0])
        if not _repeats(treedef, layer, count):
            return False
        index = 0
        while index < count:  # patterns may tell how many digits an index has
            width = len(str(index))
            end = min(10**width, count)
            paths = [f"{prefix}{i}" for i in range(index, end)]
            self._run(layer, node[index], paths, (zeros or prefix) + "0" * width)
            index = end
        return True

    def _run(self, treedef: TreeDef, node: Any, layers: list[str], zeros: str) -> None:
        """The layers of these paths, of which `node` is the first."""
        start, already = len(self._paths), len(self.open)
        self._node(treedef, node, layers[0] + "/", zeros + "/")
        names = self._names_since(start, layers[0])
        open_ = self.open[already:] = self.settled_for_all(self.open[already:])
        decisions = self.decisions[start:]
        self._runs.append((len(self._paths), layers[1:], names))
        self._paths += names * (len(layers) - 1)
        self.decisions += decisions * (len(layers) - 1)
        for shift in range(len(names), len(names) * len(layers), len(names)) if open_ else ():
            self.open += [(shift + index, asked, rule) for index, asked, rule in open_]


def _zeros_below(prefix: str, zeros: str | None, name: str) -> str | None:
    if has_digit(name):
        return (prefix if zeros is None else zeros) + zeroed(name)
    return None if zeros is None else zeros + name


def _repeats(treedef: TreeDef, child: TreeDef, count: int) -> bool:
    """Whether a node's children are `count` times this one. (`children()` would make them all.)"""
    make: Callable[..., TreeDef] = _PyTreeDef.from_node_data_and_children
    try:
        return treedef == make(default_registry, treedef.node_data(), [child] * count)
    except Exception:  # static fields are compared, as above
        return False

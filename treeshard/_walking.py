"""Names the leaves of a tree, walking equal subtrees once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.tree_util import PyTreeDef as _PyTreeDef
from jax.tree_util import default_registry, tree_structure

from treeshard._decision import Decision, Shape
from treeshard._paths import children_with_keys, is_box
from treeshard._patterns import has_digit, zeroed
from treeshard._specs import has_shape

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

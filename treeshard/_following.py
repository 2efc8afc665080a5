"""What lies where in a tree that mirrors another: optimizer state, averages, gradients.

Such a tree holds copies of the original. Where a copy is whole, or has holes or small
lists in the place of leaves, its structure says which leaf goes with which; elsewhere the
ends of the paths do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._decision import Shape
from treeshard._kept_dims import Dims, all_dims, kept_dims, part_dims
from treeshard._paths import children_with_keys, leaf_paths
from treeshard._specs import entries, has_shape, with_entries

TreeDef = Any  # jax.tree_util.PyTreeDef, which is no type to type checkers


class Followed(NamedTuple):
    """What a leaf gets in a tree that mirrors another.

    Attributes:
        spec: Where it lies.
        like: The index of the original's leaf that it goes with; `None` if with none.
        dims: For each of its dims the dim of that leaf that it keeps; `None` for new ones.
    """

    spec: PartitionSpec
    like: int | None = None
    dims: Dims = ()


_ALONE = Followed(PartitionSpec())


class Original:
    """The tree that others mirror, with what was decided for it, leaf by leaf.

    Args:
        treedef: Its structure.
        shapes: The shape of each leaf; `None` for leaves that are no arrays.
        specs: The spec (or `NamedSharding`) of each leaf; `None` counts as `P()`.
        paths: Gives the path of each leaf. Often nobody has to ask.
    """

    def __init__(
        self,
        treedef: TreeDef,
        shapes: Sequence[Shape | None],
        specs: Sequence[Any],
        paths: Callable[[], Sequence[str]],
    ):
        self.treedef, self.shapes, self._paths = treedef, shapes, paths
        self.specs = [_bare(spec) for spec in specs]
        self._kept: dict[tuple[int, Dims], PartitionSpec] = {}
        # What a leaf of the same shape gets.
        self.same = [
            _ALONE if not shape else Followed(spec, index, tuple(range(len(shape))))
            for index, (spec, shape) in enumerate(zip(self.specs, shapes, strict=True))
        ]

    @cached_property
    def paths(self) -> Sequence[str]:
        """The path of each leaf."""
        return self._paths()

    @cached_property
    def names(self) -> dict[str, dict[Any, int]]:
        """The arrays by path: of those with equal path, spec and shape, one."""
        names: dict[str, dict[Any, int]] = {}
        for index, (path, shape) in enumerate(zip(self.paths, self.shapes, strict=True)):
            if shape is not None:
                names.setdefault(path, {}).setdefault((shape, self.specs[index]), index)
        return names

    @cached_property
    def endings(self) -> dict[str, dict[Any, int]]:
        """The same by the ends of their paths, as an optimizer of a subtree calls them: those
        that lose the fewest keys for it."""
        endings: dict[str, tuple[int, dict[Any, int]]] = {}
        for path, indices in self.names.items():
            keys = path.split("/")
            for lost in range(1, len(keys)):
                ending = "/".join(keys[lost:])
                least, others = endings.get(ending, (lost, {}))
                if lost <= least:
                    others = others if lost == least else {}
                    others.update(indices)
                    endings[ending] = lost, others
        return {ending: indices for ending, (_, indices) in endings.items()}

    def kept(self, index: int, dims: Dims) -> Followed:
        """What a leaf gets that keeps these dims of one of the original's."""
        spec = self.specs[index]
        key = id(spec), dims  # whole models share a few specs
        if key not in self._kept:
            padded = entries(spec) + (None,) * len(self.shapes[index] or ())
            new = [None if dim is None else padded[dim] for dim in dims]
            self._kept[key] = with_entries(spec, new)
        return Followed(self._kept[key], index, dims)


def _bare(spec: Any) -> PartitionSpec:
    if spec is None:
        return PartitionSpec()
    return spec.spec if isinstance(spec, NamedSharding) else spec


def follow(tree: Any, original: Original) -> list[Followed]:
    """What every leaf of `tree` gets by going with a leaf of the original, in the order in
    which JAX flattens it."""
    leaves, treedef = tree_flatten(tree)
    walk = _Walk(original, leaves)
    walk.node(treedef, tree, "")
    return walk.found


class _Walk:
    """Walks a tree from the root until it meets copies of the original."""

    def __init__(self, original: Original, leaves: list[Any]):
        self.original, self.leaves = original, leaves
        self.found: list[Followed] = []

    def node(self, treedef: TreeDef, node: Any, path: str) -> None:
        if not treedef.num_leaves:
            return
        if treedef.num_nodes < self.original.treedef.num_nodes:  # no room for a copy
            self._by_names(node, path)
        elif not self._copy(treedef, path):
            children = zip(children_with_keys(node), treedef.children(), strict=True)
            for (key, child), below in children:
                self.node(below, child, _joined(path, key))

    # By structure.

    def _copy(self, treedef: TreeDef, path: str) -> bool:
        """Whether this is a copy; what its leaves get is then found."""
        like = self.original.treedef
        field = path.rpartition("/")[2]
        place = len(self.found)
        parts: list[TreeDef] = []
        try:
            whole = treedef == like
            if not whole and not _lay_beside(treedef, like, parts):
                return False
        except Exception:  # static fields are compared, and may be anything: arrays, say
            return False
        if whole:
            leaves = self.leaves[place : place + like.num_leaves]
            self.found += [self._of(leaf, index, field) for index, leaf in enumerate(leaves)]
            return True
        found: list[Followed] = []
        for index, part in enumerate(parts):
            leaves = self.leaves[place : place + part.num_leaves]
            place += part.num_leaves
            if _is_leaf(part):
                found.append(self._of(leaves[0], index, field))
            elif (some := self._parts(part, leaves, index)) is not None:
                found += some
            else:
                return False
        self.found += found
        return True

    def _of(self, leaf: Any, index: int, field: str) -> Followed:
        original = self.original
        whole = original.shapes[index]
        shape = getattr(leaf, "shape", ())
        if shape == whole:
            return original.same[index]
        if not shape or not whole or not has_shape(leaf):
            return _ALONE
        dims = kept_dims(tuple(shape), whole, field)
        return _ALONE if dims is None else original.kept(index, dims)

    def _parts(self, part: TreeDef, leaves: list[Any], index: int) -> list[Followed] | None:
        """What stands in the place of one leaf, if it is a hole, moments per dim, or halves."""
        whole = self.original.shapes[index] or ()
        found: list[Followed] = []
        for position, leaf in enumerate(leaves):
            flat = part.num_nodes == part.num_leaves + 1 and has_shape(leaf)
            dims = part_dims(position, tuple(leaf.shape), whole) if flat else None
            if dims is None:
                return None
            found.append(self.original.kept(index, dims))
        return found

    # By name.

    def _by_names(self, node: Any, path: str) -> None:
        for below in leaf_paths(node):
            leaf = self.leaves[len(self.found)]
            shape = tuple(leaf.shape) if has_shape(leaf) else ()
            self.found.append(self._by_name(_joined(path, below), shape) if shape else _ALONE)

    def _by_name(self, path: str, shape: Shape) -> Followed:
        """A leaf goes with the one whose path its own ends in; else with those that share the
        most of its end, if all of them that it fits give it the same."""
        original = self.original
        parent, _, key = path.rpartition("/")
        position = int(key) if key.isdecimal() else -1
        own, above = _owners(path, original.names), _owners(parent, original.names)
        if not own and not above:
            own = _owners(path, original.endings)[:1]
            above = _owners(parent, original.endings)[:1]
        ways: list[tuple[list[_Owner], Callable[[Shape, str], Dims | None]]] = [
            (own, lambda whole, _: all_dims(shape, whole)),
            (above, lambda whole, _: part_dims(position, shape, whole)),
            (own, lambda whole, field: kept_dims(shape, whole, field)),
        ]
        for owners, dims_of in ways:
            for field, indices in owners:
                of_each = [(i, dims_of(original.shapes[i] or (), field)) for i in indices]
                kept = [original.kept(i, dims) for i, dims in of_each if dims is not None]
                if kept and all(other.spec == kept[0].spec for other in kept):
                    return kept[0]
        return _ALONE


def _is_leaf(treedef: TreeDef) -> bool:
    return treedef.num_nodes == treedef.num_leaves == 1


def _lay_beside(treedef: TreeDef, like: TreeDef, parts: list[TreeDef]) -> bool:
    """Whether a structure is another's with things in the place of leaves: these go to `parts`.

    (`flatten_up_to` would show the values of the whole tree when it is not.)
    """
    if _is_leaf(like):
        parts.append(treedef)
        return True
    children, alike = treedef.children(), like.children()
    if len(children) != len(alike) or treedef.node_data() != like.node_data():
        return False
    return all(_lay_beside(*pair, parts) for pair in zip(children, alike, strict=True))


_Owner = tuple[str, Iterable[int]]  # the field that holds a copy, and leaves of the original


def _owners(path: str, names: Mapping[str, Mapping[Any, int]]) -> list[_Owner]:
    """Who is named by an ending of `path`, the longest ending first."""
    owners: list[_Owner] = []
    ending = path
    while True:
        if ending in names:
            field = path[: len(path) - len(ending)].rstrip("/").rpartition("/")[2]
            owners.append((field, names[ending].values()))
        if not ending:
            return owners
        ending = ending.partition("/")[2]


def _joined(path: str, key: str) -> str:
    return f"{path}/{key}" if path and key else path or key

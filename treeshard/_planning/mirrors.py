"""The specs of a tree that holds copies of another: optimizer state, averages, gradients.

Each leaf of a copy is matched to a leaf of the original. If a copy has the original's structure,
possibly with missing leaves or with small lists instead of leaves, leaves are matched by structure.
Other leaves are matched by the ends of their paths.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import tree_structure

from treeshard._core.arrays import has_shape
from treeshard._core.paths import (
    TreeDef,
    children_with_keys,
    leaf_paths,
    path_under,
    paths_of,
)
from treeshard._core.specs import dim_entries, with_entries
from treeshard._planning.matching import PlannedLeaf, Shape

# For each dim of a leaf, the dim of its counterpart; `None` for a new dim.
Dims = tuple[int | None, ...]


class Followed(NamedTuple):
    """A leaf in a tree that mirrors another.

    Attributes:
        spec: The spec of the leaf.
        counterpart: The leaf of the original that it is a copy of, or `None`.
    """

    spec: PartitionSpec
    counterpart: PlannedLeaf | None = None


_ALONE = Followed(PartitionSpec())


class Original:
    """The planned tree that others mirror: a `PlannedLeaf` for each leaf, `None` for non-arrays."""

    def __init__(self, treedef: TreeDef, leaves: Sequence[PlannedLeaf | None]):
        self.treedef, self.leaves = treedef, leaves
        # Scalars and non-arrays, of shape `()`, have no dims to follow.
        self.shapes = [() if leaf is None else leaf.shape for leaf in leaves]
        self.specs = [PartitionSpec() if leaf is None else leaf.given for leaf in leaves]
        self._kept: dict[tuple[int, Dims], PartitionSpec] = {}

    @cached_property
    def names(self) -> dict[str, dict[Any, int]]:
        """For each path, the indices of its arrays, one for each shape and spec."""
        names: dict[str, dict[Any, int]] = defaultdict(dict)
        for index, path in enumerate(paths_of(self.treedef)):
            if self.leaves[index] is not None:
                names[path].setdefault((self.shapes[index], self.specs[index]), index)
        return dict(names)

    @cached_property
    def endings(self) -> dict[str, dict[Any, int]]:
        """For each ending of a path, the arrays whose paths are longer by the fewest keys. Endings
        are the paths in an optimizer of a subtree."""
        endings: dict[str, tuple[int, dict[Any, int]]] = {}
        for path, indices in self.names.items():
            keys = path.split("/")
            for dropped in range(1, len(keys)):
                ending = "/".join(keys[dropped:])
                fewest, members = endings.get(ending, (dropped, {}))
                if dropped <= fewest:
                    members = members if dropped == fewest else {}
                    members.update(indices)
                    endings[ending] = dropped, members
        return {ending: indices for ending, (_, indices) in endings.items()}

    @cached_property
    def in_full(self) -> list[Followed]:
        """For each leaf, the result for a copy of its shape, as most copies are."""
        pairs = enumerate(self.shapes)
        return [self.kept(i, tuple(range(len(x)))) if x else _ALONE for i, x in pairs]

    def kept(self, index: int, dims: Dims) -> Followed:
        """The spec of a leaf that keeps these dims of the original's leaf `index`."""
        spec = self.specs[index]
        key = id(spec), dims  # the leaves of a model share a few specs
        if key not in self._kept:
            of_dims = dim_entries(spec, len(self.shapes[index]))
            new = [None if dim is None else of_dims[dim] for dim in dims]
            self._kept[key] = with_entries(spec, new)
        return Followed(self._kept[key], self.leaves[index])


def follow(tree: Any, leaves: list[Any], treedef: TreeDef, original: Original) -> list[Followed]:
    """The spec of every leaf of `tree`, from its counterpart in the original, in JAX's order."""
    follower = _Follower(original, leaves)
    follower.node(treedef, tree, "")
    return follower.followed


class _Follower:
    """Walks a tree from the root until it meets copies of the original."""

    def __init__(self, original: Original, leaves: list[Any]):
        self.original, self.leaves = original, leaves
        self.followed: list[Followed] = []  # for the leaves visited so far

    def node(self, treedef: TreeDef, node: Any, path: str) -> None:
        if not treedef.num_leaves:
            return
        # A tree that is smaller than the original has no copy by structure. Its leaves may be
        # copies by name, as in an optimizer that is masked to a part of the tree.
        if treedef.num_nodes < self.original.treedef.num_nodes:
            self._match_by_names(node, path)
        elif not self._copy(treedef, path):
            children = zip(children_with_keys(node), treedef.children(), strict=True)
            for (key, child), below in children:
                self.node(below, child, path_under(path, key))

    # By structure.

    def _copy(self, treedef: TreeDef, path: str) -> bool:
        """Whether a subtree is a copy of the original. If so, its leaves are followed."""
        field = path.rpartition("/")[2]
        start = len(self.followed)
        try:
            if treedef == self.original.treedef:  # most copies
                self._follow_each(field)
                return True
            parts = _parts_of(treedef, self.original.treedef)
        except Exception:  # static fields may be arrays, whose comparison raises
            return False
        followed: list[Followed] = []
        for index, part in enumerate(parts):
            if part is _LEAF:
                followed.append(self._of(self.leaves[start], index, field))
                start += 1
                continue
            leaves = self.leaves[start : start + part.num_leaves]
            start += part.num_leaves
            several = self._parts(part, leaves, index)
            if several is None:
                return False
            followed += several
        self.followed += followed
        return bool(parts)

    def _follow_each(self, field: str) -> None:
        """Follows the leaves of a subtree that has the structure of the original."""
        original, start = self.original, len(self.followed)
        leaves = self.leaves[start : start + len(original.leaves)]
        self.followed += [
            in_full if getattr(leaf, "shape", None) == shape else self._of(leaf, index, field)
            for index, (leaf, shape, in_full) in enumerate(
                zip(leaves, original.shapes, original.in_full, strict=True)
            )
        ]

    def _of(self, leaf: Any, index: int, field: str) -> Followed:
        full = self.original.shapes[index]
        if not full or not has_shape(leaf) or not leaf.shape:
            return _ALONE
        dims = kept_dims(tuple(leaf.shape), full, field)
        return _ALONE if dims is None else self.original.kept(index, dims)

    def _parts(self, part: TreeDef, leaves: list[Any], index: int) -> list[Followed] | None:
        """The leaves instead of one leaf: empty, a moment per dim, or halves; otherwise `None`."""
        full = self.original.shapes[index]
        followed: list[Followed] = []
        for position, leaf in enumerate(leaves):
            flat = part.num_nodes == part.num_leaves + 1 and has_shape(leaf)
            dims = part_dims(position, tuple(leaf.shape), full) if flat else None
            if dims is None:
                return None
            followed.append(self.original.kept(index, dims))
        return followed

    # By name.

    def _match_by_names(self, node: Any, path: str) -> None:
        for below in leaf_paths(node):
            leaf = self.leaves[len(self.followed)]
            shape = tuple(leaf.shape) if has_shape(leaf) else ()
            self.followed.append(
                self._match_by_name(path_under(path, below), shape) if shape else _ALONE
            )

    def _match_by_name(self, path: str, shape: Shape) -> Followed:
        """Matches a leaf to the original's leaf whose path is the longest end of its own path.

        Otherwise, matches it to the leaves whose paths share the longest end with it. All of
        these leaves that fit its shape must give it the same spec.
        """
        original = self.original
        # `0/mu/mlp/w` is a copy of the array `mlp/w`. `0/mu/mlp/w/1` is its second part, as in SM3,
        # which has a part per dim. In an optimizer for `mlp` alone, the copy is `0/mu/w`.
        parent, _, key = path.rpartition("/")
        position = int(key) if key.isdecimal() else -1
        own, above = _owners(path, original.names), _owners(parent, original.names)
        if not own and not above:
            own = _owners(path, original.endings)[:1]
            above = _owners(parent, original.endings)[:1]
        # The array itself, then a part of it, `mu/w/0`, then an array computed from it.
        attempts: list[tuple[list[_Owner], Callable[[Shape, str], Dims | None]]] = [
            (own, lambda full, _: all_dims(shape, full)),
            (above, lambda full, _: part_dims(position, shape, full)),
            (own, lambda full, field: kept_dims(shape, full, field)),
        ]
        for owners, dims_of in attempts:
            for owner in owners:
                followed = self._alike(owner, dims_of)
                if followed is not None:
                    return followed
        return _ALONE

    def _alike(
        self, owner: "_Owner", dims_of: Callable[[Shape, str], Dims | None]
    ) -> Followed | None:
        """The result that all fitting leaves of an owner share; `None` if they differ."""
        field, indices = owner
        kept: list[Followed] = []
        for index in indices:
            dims = dims_of(self.original.shapes[index], field)
            if dims is not None:
                kept.append(self.original.kept(index, dims))
        is_clear = kept and all(other.spec == kept[0].spec for other in kept)
        return kept[0] if is_clear else None


_LEAF = tree_structure(0)


def _parts_of(treedef: TreeDef, original: TreeDef) -> list[TreeDef]:
    """The parts of `treedef` at the leaves of `original`; `[]` for another structure.

    `flatten_up_to` needs the tree itself, and prints all its values if the structures differ.
    """
    if treedef == original:
        return [_LEAF] * treedef.num_leaves
    if original == _LEAF:
        return [treedef]
    if treedef.node_data() != original.node_data():
        return []
    children, originals = treedef.children(), original.children()  # JAX copies them
    if len(children) != len(originals):
        return []
    parts: list[TreeDef] = []
    for child, of_original in zip(children, originals, strict=True):
        of_child = _parts_of(child, of_original)
        if not of_child and of_original.num_leaves:
            return []
        parts += of_child
    return parts


_Owner = tuple[str, Iterable[int]]  # the field that holds a copy; indices of original leaves


def _owners(path: str, names: Mapping[str, Mapping[Any, int]]) -> list[_Owner]:
    """The original leaves whose names are ends of `path`, longest first."""
    owners: list[_Owner] = []
    ending = path
    while True:
        if ending in names:
            field = path[: len(path) - len(ending)].rstrip("/").rpartition("/")[2]
            owners.append((field, names[ending].values()))
        if not ending:
            return owners
        ending = ending.partition("/")[2]


# ------------------------------------------------------------------ dims


@lru_cache(4096)
def kept_dims(shape: Shape, full: Shape, field: str) -> Dims | None:
    """Matches the dims of an array to the dims of the array that it was computed from.

    Dims may be dropped, as in factored moments; added in front, as in histories; replaced,
    as in projections and reductions that keep a dim of 1; or reordered. `field`, the optimizer's
    name for the computed array, distinguishes the factors of arrays with dims of equal length.

    Returns for each dim of `shape` the dim of `full`, or `None` for a new dim. Returns `None` if no
    dim matches.
    """
    new = len(shape) - len(full)
    if new > 0:
        return (*[None] * new, *range(len(full))) if shape[new:] == full else None
    if new == 0:
        return all_dims(shape, full) or _dims_by_length(shape, full)
    choices = [
        dims
        for dims in combinations(range(len(full)), len(shape))
        if all(full[dim] == length for dim, length in zip(dims, shape, strict=True))
    ]
    named = _factor_dims(full, field)
    if named in choices:
        return named
    # A dim that could be one of several gets no axes.
    return tuple(d[0] if len(set(d)) == 1 else None for d in zip(*choices, strict=True)) or None


def _factor_dims(full: Shape, field: str) -> Dims | None:
    """The dims that a factor of this name keeps. A row factor drops the longest dim, and a column
    factor the second longest, as in Adafactor, which sorts equal lengths like numpy."""
    # optax has `FactoredState(count, v_row, v_col, v)`; other names do not show the dims.
    if len(full) < 2 or not ("row" in field or "col" in field):
        return None
    by_length = np.argsort(full).tolist()
    dropped = by_length[-1] if "row" in field else by_length[-2]
    return tuple(dim for dim in range(len(full)) if dim != dropped)


def _dims_by_length(shape: Shape, full: Shape) -> Dims | None:
    """Dims of the same position and length, and other dims with a unique length."""
    dims = [dim if length == full[dim] else None for dim, length in enumerate(shape)]
    moved = [dim for dim, kept in enumerate(dims) if kept is None]
    for dim in moved:
        alike = [other for other in moved if full[other] == shape[dim]]
        if len(alike) == 1 and sum(shape[other] == shape[dim] for other in moved) == 1:
            dims[dim] = alike[0]
    return None if all(dim is None for dim in dims) else tuple(dims)


def part_dims(position: int, shape: Shape, full: Shape) -> Dims | None:
    """The dims of one part of an array: its moment along the dim of this position, or a half of the
    same shape, such as the real part."""
    if 0 <= position < len(full) and shape == (full[position],):
        return (position,)
    return all_dims(shape, full)


def all_dims(shape: Shape, full: Shape) -> Dims | None:
    return tuple(range(len(full))) if shape == full else None

"""The specs of a tree that holds copies of another: optimizer state, averages, gradients.

Each leaf of a copy is matched to a leaf of the original. If a copy has the original's structure,
possibly with missing leaves or with small lists instead of leaves, leaves are matched by structure.
Other leaves are matched by the ends of their paths.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import tree_structure

from treeshard._core.arrays import are_equal
from treeshard._core.paths import PathWalk, TreeDef
from treeshard._core.spec_trees import ResolvedSpec
from treeshard._core.specs import dim_entries, with_entries
from treeshard._planning.matching import PlannedLeaf, Shape

# For each dim of a leaf, the dim of its counterpart; `None` for a new dim.
Dims = tuple[int | None, ...]


_ALONE = ResolvedSpec(PartitionSpec(), PartitionSpec())


class Original:
    """The planned tree that others mirror: a `PlannedLeaf` for each leaf, `None` for non-arrays."""

    def __init__(self, treedef: TreeDef, leaves: Sequence[PlannedLeaf | None]):
        self.treedef, self.leaves = treedef, leaves
        self.shapes = [None if leaf is None else leaf.shape for leaf in leaves]
        # Scalars and non-arrays have no dims to follow.
        self.decisions = [
            leaf.decision if leaf is not None and leaf.shape else _ALONE for leaf in leaves
        ]
        self._kept: dict[tuple[int, Dims], ResolvedSpec] = {}

    @cached_property
    def names(self) -> dict[str, dict[Any, int]]:
        """For each path, the indices of its arrays, one for each shape and spec."""
        names: dict[str, dict[Any, int]] = defaultdict(dict)
        for index, leaf in enumerate(self.leaves):
            if leaf is not None:
                names[leaf.path].setdefault((leaf.shape, leaf.given), index)
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

    def kept(self, index: int, dims: Dims) -> ResolvedSpec:
        """The decision for a leaf that keeps these dims of the original's leaf `index`."""
        decision, rank = self.decisions[index], len(self.shapes[index] or ())
        if dims == tuple(range(rank)):
            return decision
        key = id(decision), dims  # the leaves of a model share a few decisions
        if key not in self._kept:
            of_dims = dim_entries(decision.spec, rank)
            new = [None if dim is None else of_dims[dim] for dim in dims]
            spec = with_entries(decision.spec, new)
            # The adjustments of a parameter's dims do not apply to other dims.
            self._kept[key] = replace(decision, requested=spec, spec=spec, adjustments=())
        return self._kept[key]


def follow(
    tree: Any, treedef: TreeDef, shapes: Sequence[Shape | None], original: Original
) -> tuple[list[str], list[ResolvedSpec]]:
    """The path and the decision of every leaf of `tree`, from its counterpart in the original.

    `shapes` has the shapes of the leaves, in JAX's order, and `None` for non-arrays.
    """
    follower = _Follower(original, shapes)
    follower.node(tree, treedef, None)
    return follower.walk.paths, follower.decisions


class _Follower:
    """Walks a tree from the root until it meets copies of the original."""

    def __init__(self, original: Original, shapes: Sequence[Shape | None]):
        self.original, self.shapes = original, shapes
        # For the leaves visited so far.
        self.walk = PathWalk()
        self.decisions: list[ResolvedSpec] = []
        # The plan has the paths in a copy. An empty path may be an empty key, or the root.
        paths = [leaf.path for leaf in original.leaves if leaf is not None]
        if all(paths) and len(paths) == len(original.leaves):
            self.walk.known[original.treedef] = [f"/{path}" for path in paths], 0

    def node(self, node: Any, treedef: TreeDef, path: str | None) -> None:
        if not treedef.num_leaves:
            return
        # A tree that is smaller than the original has no copy by structure. Its leaves may be
        # copies by name, as in an optimizer that is masked to a part of the tree.
        if treedef.num_nodes < self.original.treedef.num_nodes or not self.original.leaves:
            self.walk.node(node, treedef, path)
            self._match_by_names()
            return
        decisions = self._copy(treedef, (path or "").rpartition("/")[2])
        if decisions is None:
            for child_path, child, below in self.walk.children(node, treedef, path):
                self.node(child, below, child_path)
        else:
            self.walk.node(node, treedef, path)
            self.decisions += decisions

    # By structure.

    def _copy(self, treedef: TreeDef, field: str) -> list[ResolvedSpec] | None:
        """The decisions for the leaves of a subtree that is a copy; `None` for other subtrees."""
        original, start = self.original, len(self.decisions)
        shapes = self.shapes[start : start + treedef.num_leaves]
        # Static fields may be arrays, whose comparison raises.
        if are_equal(treedef, original.treedef):  # most copies
            return self._of_each(shapes, field)
        parts = _parts_of(treedef, original.treedef)
        decisions: list[ResolvedSpec] = []
        for index, part in enumerate(parts):
            first = len(decisions)
            of_part = shapes[first : first + part.num_leaves]
            if part is _LEAF:
                decisions.append(self._of(of_part[0], index, field))
            elif (several := self._parts(part, of_part, index)) is None:
                return None
            else:
                decisions += several
        return decisions if parts else None

    def _of_each(self, shapes: Sequence[Shape | None], field: str) -> list[ResolvedSpec]:
        """The decisions for the leaves of a subtree that has the structure of the original."""
        original = self.original
        if shapes == original.shapes:  # most copies
            return original.decisions
        known: dict[Any, ResolvedSpec] = {}  # a model has few shapes and decisions
        decisions: list[ResolvedSpec] = []
        rows = zip(shapes, original.shapes, original.decisions, strict=True)
        for index, (shape, full, decision) in enumerate(rows):
            key = shape, full, id(decision)
            if key not in known:
                known[key] = self._of(shape, index, field)
            decisions.append(known[key])
        return decisions

    def _of(self, shape: Shape | None, index: int, field: str) -> ResolvedSpec:
        full = self.original.shapes[index]
        dims = kept_dims(shape, full, field) if full and shape else None
        return _ALONE if dims is None else self.original.kept(index, dims)

    def _parts(
        self, part: TreeDef, shapes: Sequence[Shape | None], index: int
    ) -> list[ResolvedSpec] | None:
        """The leaves instead of one leaf: empty, a moment per dim, or halves; otherwise `None`."""
        full = self.original.shapes[index] or ()
        decisions: list[ResolvedSpec] = []
        for position, shape in enumerate(shapes):
            is_flat = part.num_nodes == part.num_leaves + 1
            dims = part_dims(position, shape, full) if is_flat and shape is not None else None
            if dims is None:
                return None
            decisions.append(self.original.kept(index, dims))
        return decisions

    # By name.

    def _match_by_names(self) -> None:
        """Matches the leaves that have a path and no decision yet."""
        for path in self.walk.paths[len(self.decisions) :]:
            shape = self.shapes[len(self.decisions)]
            self.decisions.append(self._match_by_name(path, shape) if shape else _ALONE)

    def _match_by_name(self, path: str, shape: Shape) -> ResolvedSpec:
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
                decision = self._alike(owner, dims_of)
                if decision is not None:
                    return decision
        return _ALONE

    def _alike(
        self, owner: "_Owner", dims_of: Callable[[Shape, str], Dims | None]
    ) -> ResolvedSpec | None:
        """The decision that all fitting leaves of an owner share; `None` if their specs differ."""
        field, indices = owner
        kept: list[ResolvedSpec] = []
        for index in indices:
            dims = dims_of(self.original.shapes[index] or (), field)
            if dims is not None:
                kept.append(self.original.kept(index, dims))
        is_clear = kept and all(other.spec == kept[0].spec for other in kept)
        return kept[0] if is_clear else None


_LEAF = tree_structure(0)


def _parts_of(treedef: TreeDef, original: TreeDef) -> list[TreeDef]:
    """The parts of `treedef` at the leaves of `original`; `[]` for another structure.

    `flatten_up_to` needs the tree itself, and prints all its values if the structures differ.
    """
    if are_equal(treedef, original):
        return [_LEAF] * treedef.num_leaves
    if original == _LEAF:
        return [treedef]
    if not are_equal(treedef.node_data(), original.node_data()):
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

"""The specs of leaves that belong to another one: LoRA factors, scales of blocks, averages.

A tactic sees one leaf, and these need the decision of another. So `Follow` only marks its leaves,
and `following` decides them once all others are decided: rules stay a list that is read once, in
any order of leaves.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import (
    Adjustment,
    Entry,
    all_axes,
    axes_of,
    dim_entries,
    part_count,
    with_entries,
)
from treeshard._planning.matching import Decision, PlannedLeaf, Shape, tails
from treeshard._planning.tactics import Refined, Step, Tactic

_Groups = dict[int, tuple[int, ...]]  # dims of a base that are one dim of its factor


def follow(base: str, *, blocks: bool = False) -> Tactic:
    """Shards a leaf as the base leaf that it belongs to, dim by dim.

    Examples:
        >>> tree = {"weight": np.ones((512, 256)), "a": np.ones((8, 256)), "b": np.ones((512, 8))}
        >>> rules = [("weight", P("fsdp", "tensor")), ("a|b", follow("weight"))]
        >>> plan(tree, rules, make_mesh("fsdp=4,tensor=2")).specs
        {'a': P(None, 'tensor'), 'b': P('fsdp',), 'weight': P('fsdp', 'tensor')}

    The base leaf is at the path `base` beside the leaf or beside one of its ancestors, the nearest
    first. If `base` is a branch, the base leaf is in it at the rest of the leaf's path: for
    `ema/mlp/w` and `"params"` it is `params/mlp/w`.

    Two leaves of one base whose product has its shape are the factors of a LoRA adapter, `(in, r)`
    and `(r, out)`: the dim that they share, the rank, is not sharded, whatever its length, and the
    others take the axes of the base's dims. A dim that is as long as several dims of the base
    together, such as heads and the dims of a head, takes the axes of the first of them.

    Of other leaves, one of the base's rank takes the axes of the base in each dim of the same
    length. With `blocks`, a dim also takes the axes if it has one entry for each block of the
    base's dim, as the scales of quantised weights have; a dim of one block is not sharded. A leaf
    of lower rank takes the axes of the dim of equal length, if the base has one only. A flat leaf,
    such as packed numbers of 4 bits, is split as dim 0 of a base that is sharded on no other.

    A leaf without a base whose path ends in that of another leaf of its shape, such as the moment
    of a factor, is sharded as that one.

    `plan` and `init_sharded` know bases; `match_partition_rules` replicates such leaves.

    Args:
        base: The path of the base leaf, or of a branch, relative to an ancestor of the leaf.
        blocks: Whether a shorter dim has an entry for each block of the base. A shape does not
            tell a scale of blocks from a factor of low rank.

    Returns:
        A tactic, for use as the action of a rule.
    """
    return Tactic((Follow(base, blocks),))


@dataclass(frozen=True, repr=False)
class Follow(Step):
    """Shards a leaf as its base. `following` decides it, once the base is decided."""

    name = "follow"
    base: str
    blocks: bool = False
    min_size = 0
    by_shape = True

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        return spec, ()


def following(
    leaves: Sequence[PlannedLeaf],
    rules: Sequence[tuple[Any, Any]],
    mesh: AnyMesh,
    pad: Callable[[PlannedLeaf], PlannedLeaf] = lambda leaf: leaf,
) -> dict[int, Decision]:
    """The decisions of leaves that follow a base, by index. `pad` is called on each base."""
    steps: dict[int | None, Follow] = {}
    for number, (_, action) in enumerate(rules):
        of_rule = action.steps if isinstance(action, Tactic) else ()
        steps.update((number, step) for step in of_rule if isinstance(step, Follow))
    if not steps:
        return {}
    followers = _Followers(leaves, steps, mesh, pad)
    return {i: followers.decide(i, frozenset([i])) for i in followers.bases_of}


class _Followers:
    """The leaves that follow a base, and their bases."""

    def __init__(
        self,
        leaves: Sequence[PlannedLeaf],
        steps: Mapping[int | None, Follow],
        mesh: AnyMesh,
        pad: Callable[[PlannedLeaf], PlannedLeaf],
    ):
        self.leaves, self.steps, self.mesh, self.pad = leaves, steps, mesh, pad
        self.decided: dict[int, Decision] = {}
        self.bases_of: dict[int, list[int]] = {}
        self.factors_of: dict[int, list[int]] = defaultdict(list)  # the followers of each base
        index_of = {leaf.path: i for i, leaf in enumerate(leaves)}
        for i, leaf in enumerate(leaves):
            if leaf.rule not in steps:
                continue
            step = steps[leaf.rule]
            paths = _base_paths(leaf.path, step.base)
            bases = [index_of[path] for path in paths if index_of.get(path, i) != i]
            self.bases_of[i] = bases
            if bases and not step.blocks:
                self.factors_of[bases[0]].append(i)
        # Those with a base, by their paths without the branch of a state.
        with_base = [i for i, bases in self.bases_of.items() if bases]
        self.by_tail = {leaves[i].path.partition("/")[2]: i for i in with_base}

    def decide(self, index: int, waiting: frozenset[int]) -> Decision:
        """The decision of a leaf. A base may follow another one; `waiting` breaks circles."""
        leaf = self.leaves[index]
        if leaf.rule not in self.steps:
            return leaf.decision
        if index not in self.decided:
            self.decided[index] = self._followed(index, self.steps[leaf.rule], waiting)
        return self.decided[index]

    def _followed(self, index: int, step: Follow, waiting: frozenset[int]) -> Decision:
        leaf = self.leaves[index]
        base = next((i for i in self.bases_of[index] if i not in waiting), None)
        if base is not None:
            of_base = self.decide(base, waiting | {base})
            padded = self.pad(self.leaves[base]._replace(decision=of_base))
            others = [self.leaves[i].shape for i in self.factors_of[base] if i != index]
            return _as_base(leaf, padded, self.mesh, step.blocks, others)
        # The base may be frozen: then the optimizer's state has moments of the factors alone.
        moments = (self.by_tail[tail] for tail in tails(leaf.path) if tail in self.by_tail)
        original = next((i for i in moments if self.leaves[i].shape == leaf.shape), None)
        if original is not None and original not in waiting:
            as_original = self.decide(original, waiting | {original})
            return as_original._replace(rule=leaf.rule, pattern=leaf.pattern)
        why = (
            f"no leaf {step.base!r} is beside it or its ancestors, so it is replicated. Give the"
            " path of the base relative to an ancestor of the leaf."
        )
        return leaf.decision._replace(adjustments=(Adjustment("no-base", why),))


def _base_paths(path: str, base: str) -> Iterator[str]:
    """Where the base of a leaf may be, the nearest first."""
    keys = path.split("/")
    for count in reversed(range(len(keys))):
        yield "/".join([*keys[:count], base])
        yield "/".join([*keys[:count], base, *keys[count + 1 :]])


def _as_base(
    leaf: PlannedLeaf, base: PlannedLeaf, mesh: AnyMesh, blocks: bool, others: Iterable[Shape]
) -> Decision:
    """The decision of a leaf by that of its base, and what of it could not be followed.

    `others` are the shapes of the other leaves that follow this base.
    """
    shape, sizes = leaf.shape, axis_sizes(mesh)
    of_base = dim_entries(base.given, len(base.shape))
    new: list[Entry] = [None] * len(shape)
    notes: list[Adjustment] = []
    dims, why = None, ""
    if not blocks:
        dims, why = _dims_of_factor(base, of_base, shape, others)
    if why:
        notes.append(Adjustment("no-dim", why))
    if dims is None:
        dims = _dims(base, of_base, shape, blocks)
    for dim, source in dims.items():
        entry = of_base[source]
        if shape[dim] % part_count(axes_of(entry), sizes) == 0:
            new[dim] = entry
        elif shape[dim] == (base.unpadded or base.shape)[source]:
            notes.append(Adjustment("indivisible", f"{base.path} is padded.", axes_of(entry), dim))
        else:
            why = (
                f"{base.path} has dim {source} split over {entry!r}, which would cut a block: dim"
                f" {dim} of shape {shape} is not divisible by it. Use larger shards of the base, or"
                " smaller blocks."
            )
            notes.append(Adjustment("cuts-block", why, axes_of(entry), dim))
    spec = with_entries(base.given, new)
    return leaf.decision._replace(
        asked=spec, given=spec, adjustments=tuple(notes), memory=base.memory
    )


def _dims_of_factor(
    base: PlannedLeaf, of_base: list[Entry], shape: Shape, others: Iterable[Shape]
) -> tuple[dict[int, int] | None, str]:
    """The dims of a LoRA factor that have the role of a dim of its base; `None` if no other leaf
    makes it a factor. And why no dim has one, if either could be the rank."""
    of_shape = base.unpadded or base.shape
    roles: list[_Groups] = []
    for other in others:
        left, right = _factor_dims(shape, other, of_shape), _factor_dims(other, shape, of_shape)
        roles += [dims for dims in (left and left[0], right and right[1]) if dims is not None]
    if not roles:
        return None, ""
    if any(dims != roles[0] for dims in roles):
        why = f"any dim of shape {shape} may be the rank of the factor, so it is replicated."
        return {}, why
    # Dims of the base that are one dim of the factor: its shards are theirs if the first is split.
    groups = roles[0]
    inner = [source for group in groups.values() for source in group[1:]]
    if base.unpadded is not None or any(of_base[source] is not None for source in inner):
        groups = {dim: group for dim, group in groups.items() if len(group) == 1}
    return {dim: group[0] for dim, group in groups.items()}, ""


def _factor_dims(left: Shape, right: Shape, base: Shape) -> tuple[_Groups, _Groups] | None:
    """The dims of both factors, each with the dims of the base that it has the role of; `None` if
    `left @ right` has another shape than the base.

    Factors are `(in, r)` and `(r, out)`, or `(n, in, r)` and `(n, r, out)` for n layers or experts.
    Dims of the base may be one dim of a factor: `(r, 32)` for heads `(4, 8)`.
    """
    if len(left) < 2 or len(right) < 2:
        return None
    for batch in range(min(len(left), len(right)) - 1):
        if left[:batch] != right[:batch] or left[-1] != right[batch]:
            continue
        groups = _merged(left[:-1] + right[batch + 1 :], base)
        if groups is not None:
            of_left, behind = groups[: len(left) - 1], groups[len(left) - 1 :]
            # Behind the dims of the batch, `right` has the rank first.
            of_right = dict(enumerate(groups[:batch])) | dict(enumerate(behind, batch + 1))
            return dict(enumerate(of_left)), of_right
    return None


def _merged(shape: Shape, base: Shape) -> list[tuple[int, ...]] | None:
    """For each dim of `shape`, the consecutive dims of the base that it has merged; `None` if it
    is not a reshaping of that kind."""
    groups: list[tuple[int, ...]] = []
    start = 0
    for length in shape:
        end = start + 1
        while end < len(base) and math.prod(base[start:end]) < length:
            end += 1
        if start >= len(base) or math.prod(base[start:end]) != length:
            return None
        groups.append(tuple(range(start, end)))
        start = end
    return groups if start == len(base) else None


def _dims(
    base: PlannedLeaf, of_base: list[Entry], shape: tuple[int, ...], blocks: bool
) -> dict[int, int]:
    """The dims of a leaf that have the role of a dim of its base."""
    of_shape = base.unpadded or base.shape
    if len(shape) == len(of_shape):
        both = enumerate(zip(shape, of_shape, strict=True))
        return {dim: dim for dim, (length, whole) in both if _fits(length, whole, blocks)}
    if _is_packed(shape, base.shape) and not all_axes(of_base[1:]):
        return {0: 0}
    choices = [[i for i, m in enumerate(of_shape) if m == n] for n in shape]
    return {dim: found[0] for dim, found in enumerate(choices) if len(found) == 1}


def _is_packed(shape: tuple[int, ...], of_base: tuple[int, ...]) -> bool:
    """Whether a flat array holds the rows of the base one after the other, several numbers in one:
    `uint8[32768]` for a base of 512 x 128 numbers of 4 bits."""
    if len(shape) != 1 or not of_base or 0 in (*shape, *of_base):
        return False
    return math.prod(of_base) % shape[0] == 0 and shape[0] % of_base[0] == 0


def _fits(length: int, of_base: int, blocks: bool) -> bool:
    """Whether a dim is that of the base, or has an entry for each block of it."""
    # One block of the whole dim belongs to every shard.
    return length == of_base or (blocks and length > 1 and of_base % length == 0)

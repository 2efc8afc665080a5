"""The specs of leaves that belong to another one: LoRA factors, scales of blocks, averages.

A tactic sees one leaf, and these need the decision of another. So `Follow` only marks its leaves,
and `following` decides them once all others are decided: rules stay a list that is read once, in
any order of leaves.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    entries,
    part_count,
    with_entries,
)
from treeshard._planning.matching import Decision, PlannedLeaf, Shape, tails
from treeshard._planning.tactics import Refined, Step, Tactic


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
) -> dict[int, Decision]:
    """The decisions of leaves that follow a base, by index."""
    steps: dict[int | None, Follow] = {}
    for number, (_, action) in enumerate(rules):
        of_rule = action.steps if isinstance(action, Tactic) else ()
        steps.update((number, step) for step in of_rule if isinstance(step, Follow))
    followers = {i: steps[leaf.rule] for i, leaf in enumerate(leaves) if leaf.rule in steps}
    if not followers:
        return {}
    index_of = {leaf.path: i for i, leaf in enumerate(leaves)}
    bases_of: dict[int, list[int]] = {}
    factors_of: dict[int, list[int]] = defaultdict(list)  # what may be factors of each base
    for i, step in followers.items():
        paths = _base_paths(leaves[i].path, step.base)
        bases_of[i] = [index_of[path] for path in paths if index_of.get(path, i) != i]
        if bases_of[i] and not step.blocks:
            factors_of[bases_of[i][0]].append(i)
    # Those with a base, by their paths without the branch of a state.
    by_tail = {leaves[i].path.partition("/")[2]: i for i, bases in bases_of.items() if bases}
    decided: dict[int, Decision] = {}
    waiting: set[int] = set()  # a base may follow another one, and both each other

    def decide(index: int) -> Decision:
        if index not in followers:
            return leaves[index].decision
        if index not in decided:
            waiting.add(index)
            decided[index] = followed(index)
            waiting.remove(index)
        return decided[index]

    def followed(index: int) -> Decision:
        leaf, step = leaves[index], followers[index]
        base = next((i for i in bases_of[index] if i not in waiting), None)
        if base is not None:
            at_base = leaves[base]._replace(decision=decide(base))
            beside = [leaves[i].shape for i in factors_of[base] if i != index]
            return _as_base(leaf, at_base, mesh, step.blocks, beside)
        # The base may be frozen: then the optimizer's state has moments of the factors alone.
        for tail in tails(leaf.path):
            original = by_tail.get(tail)
            if original is None or original in waiting:
                continue
            if leaves[original].shape == leaf.shape:
                as_original = decide(original)
                return as_original._replace(rule=leaf.rule, pattern=leaf.pattern)
        why = (
            f"no leaf {step.base!r} is beside it or its ancestors, so it is replicated. Give the"
            " path of the base relative to an ancestor of the leaf."
        )
        return leaf.decision._replace(adjustments=(Adjustment("no-base", why),))

    return {index: decide(index) for index in followers}


def _base_paths(path: str, base: str) -> Iterator[str]:
    """Where the base of a leaf may be, the nearest first."""
    keys = path.split("/")
    for count in reversed(range(len(keys))):
        yield "/".join([*keys[:count], base])
        yield "/".join([*keys[:count], base, *keys[count + 1 :]])


def _as_base(
    leaf: PlannedLeaf, base: PlannedLeaf, mesh: AnyMesh, blocks: bool, beside: Sequence[Shape]
) -> Decision:
    """The decision of a leaf by that of its base, and what of it could not be followed.

    `beside` are the shapes of the other leaves that follow this base.
    """
    shape, of_shape, sizes = leaf.shape, base.shape, axis_sizes(mesh)
    of_base = dim_entries(base.given, len(of_shape))
    notes: list[Adjustment] = []
    as_factor = (
        [] if blocks else [x for other in beside for x in _as_factor(shape, other, of_shape)]
    )
    if not as_factor:
        dims = _alike(shape, base, blocks)
    elif all(groups == as_factor[0] for groups in as_factor):
        dims = {}
        for dim, group in as_factor[0].items():
            # The shards of a dim that has merged several are those of the first, if it alone is
            # split.
            is_split_inside = any(of_base[source] is not None for source in group[1:])
            if len(group) == 1 or not is_split_inside:
                dims[dim] = group[0]
    else:
        dims = {}
        why = f"any dim of shape {shape} may be the rank of the factor, so it is replicated."
        notes.append(Adjustment("no-dim", why))
    new: list[Entry] = [None] * len(shape)
    for dim, source in dims.items():
        entry = of_base[source]
        if shape[dim] % part_count(axes_of(entry), sizes) == 0:
            new[dim] = entry
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


def _as_factor(shape: Shape, other: Shape, base: Shape) -> Iterator[dict[int, tuple[int, ...]]]:
    """The dims of a LoRA factor beside another one, each with the dims of the base that it has the
    role of: as the left factor, and as the right one, if their product has the base's shape.

    Factors are `(in, r)` and `(r, out)`, or `(n, in, r)` and `(n, r, out)` for n layers or experts.
    Dims of the base may be one dim of a factor: `(r, 32)` for heads `(4, 8)`.
    """
    for is_left in (True, False):
        left, right = (shape, other) if is_left else (other, shape)
        for batch in range(min(len(left), len(right)) - 1):
            if left[:batch] != right[:batch] or left[-1] != right[batch]:
                continue
            groups = _merged(left[:-1] + right[batch + 1 :], base)
            if groups is None:
                continue
            of_left, behind = groups[: len(left) - 1], groups[len(left) - 1 :]
            if is_left:
                yield dict(enumerate(of_left))
            else:  # behind the dims of the batch, `right` has the rank first
                yield dict(enumerate(groups[:batch])) | dict(enumerate(behind, batch + 1))


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


def _alike(shape: Shape, base: PlannedLeaf, blocks: bool) -> dict[int, int]:
    """The dims of a leaf that is no factor, each with the dim of the base that it has the role
    of."""
    of_shape = base.shape
    if len(shape) == len(of_shape):
        dims: dict[int, int] = {}
        for dim, (length, whole) in enumerate(zip(shape, of_shape, strict=True)):
            # One block of the whole dim belongs to every shard.
            are_blocks = blocks and length > 1 and whole % length == 0
            if length == whole or are_blocks:
                dims[dim] = dim
        return dims
    # A flat array may hold the rows of the base one after the other, several numbers in one:
    # `uint8[32768]` for a base of 512 x 128 numbers of 4 bits.
    if len(shape) == 1 and base.shape and 0 not in (*shape, *base.shape):
        is_packed = math.prod(base.shape) % shape[0] == 0 and shape[0] % base.shape[0] == 0
        if is_packed and not all_axes(entries(base.given)[1:]):
            return {0: 0}
    choices = [[i for i, m in enumerate(of_shape) if m == n] for n in shape]
    return {dim: found[0] for dim, found in enumerate(choices) if len(found) == 1}

"""The specs of leaves that belong to another one: LoRA factors, scales of blocks, averages.

A tactic sees one leaf, and these need the decision of another. So `Follow` only marks its leaves,
and `following` decides them once all others are decided: rules stay a list that is read once, in
any order of leaves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
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
from treeshard._planning.matching import Decision, PlannedLeaf
from treeshard._planning.tactics import Refined, Step, Tactic


def follow(base: str, *, blocks: bool = False) -> Tactic:
    """Shards a leaf as the base leaf that it belongs to, dim by dim.

    The base leaf is at the path `base` beside the leaf or beside one of its ancestors, the nearest
    first. If `base` is a branch, the base leaf is in it at the rest of the leaf's path: for
    `ema/mlp/w` and `"params"` it is `params/mlp/w`.

    A leaf of the base's rank takes the axes of the base in each dim of the same length. Other dims,
    such as the rank of a LoRA factor, are not sharded. With `blocks`, a dim also takes the axes if
    it has one entry for each block of the base's dim, as the scales of quantised weights have. A
    leaf of lower rank takes the axes of the dim of equal length, if the base has one only. A flat
    leaf, such as packed numbers of 4 bits, is split as dim 0 of a base that is sharded on no other.

    `plan` and `init_sharded` know bases; `match_partition_rules` replicates such leaves.

    Args:
        base: The path of the base leaf, or of a branch, relative to an ancestor of the leaf.
        blocks: Whether a shorter dim has an entry for each block of the base. A shape does not
            tell a scale of blocks from a factor of low rank.

    Returns:
        A tactic, for use as the action of a rule.

    Examples:
        >>> tree = {"weight": np.ones((512, 256)), "a": np.ones((8, 256)), "b": np.ones((512, 8))}
        >>> rules = [("weight", P("fsdp", "tensor")), ("a|b", follow("weight"))]
        >>> plan(tree, rules, make_mesh("fsdp=4,tensor=2")).specs
        {'a': P(None, 'tensor'), 'b': P('fsdp',), 'weight': P('fsdp', 'tensor')}
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
    index_of = {leaf.path: i for i, leaf in enumerate(leaves)}
    decided: dict[int, Decision] = {}

    def decide(index: int, waiting: frozenset[int]) -> Decision:
        """The decision of a leaf. A base may follow another one; `waiting` breaks circles."""
        leaf = leaves[index]
        if leaf.rule not in steps:
            return leaf.decision
        if index not in decided:
            step = steps[leaf.rule]
            bases = [index_of[x] for x in _base_paths(leaf.path, step.base) if x in index_of]
            base = next((i for i in bases if i not in waiting), None)
            if base is None:
                decided[index] = _without_base(leaf.decision, step)
            else:
                of_base = decide(base, waiting | {base})
                padded = pad(leaves[base]._replace(decision=of_base))
                decided[index] = _as_base(leaf, padded, mesh, step.blocks)
        return decided[index]

    followers = [i for i, leaf in enumerate(leaves) if leaf.rule in steps]
    return {i: decide(i, frozenset([i])) for i in followers}


def _base_paths(path: str, base: str) -> Iterator[str]:
    """Where the base of a leaf may be, the nearest first."""
    keys = path.split("/")
    for count in reversed(range(len(keys))):
        yield "/".join([*keys[:count], base])
        yield "/".join([*keys[:count], base, *keys[count + 1 :]])


def _without_base(undecided: Decision, step: Follow) -> Decision:
    why = (
        f"no leaf {step.base!r} is beside it or its ancestors, so it is replicated. Give the path"
        " of the base relative to an ancestor of the leaf."
    )
    return undecided._replace(adjustments=(Adjustment("no-base", why),))


def _as_base(leaf: PlannedLeaf, base: PlannedLeaf, mesh: AnyMesh, blocks: bool) -> Decision:
    """The decision of a leaf by that of its base, and what of it could not be followed."""
    shape, sizes = leaf.shape, axis_sizes(mesh)
    of_base = dim_entries(base.given, len(base.shape))
    new: list[Entry] = [None] * len(shape)
    notes: list[Adjustment] = []
    for dim, source in _dims(base, of_base, shape, blocks).items():
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
    return length == of_base or (blocks and length > 0 and of_base % length == 0)

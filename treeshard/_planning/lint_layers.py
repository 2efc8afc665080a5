"""The checks of leaves that belong together: layers, optimizer state, and attention heads.

A plan has paths and shapes and no model. Layers are recognised by the numbers in paths, state by
the path and the shape of its parameter, and heads by shapes that only attention has together.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.mesh import axis_sizes
from treeshard._core.specs import axes_of, dim_entries, entries, part_count, with_entries
from treeshard._planning.findings import Finding, decided_by, finding_about, grouped
from treeshard._planning.matching import PlannedLeaf, state_with_parameters
from treeshard.errors import counted

if TYPE_CHECKING:
    from treeshard._planning.plan import Plan

# ------------------------------------------------------------------ layers

# The number of a layer: a key, as in `layers/3/w`, or the end of the key of a module that has
# modules, as in `block_3/mlp/w`. In `Dense_3/kernel` it tells weights apart, and not layers.
_NUMBER = re.compile(r"(?:^|(?<=/))\d+(?=/)|(?<=[A-Za-z_])\d+(?=/[^/]+/)")
# Layers are unlike the others if they are at most this part of them. One of three may differ, and
# half of them too, for a reason.
_UNLIKE_PART = 1 / 4


def unlike_siblings(plan: "Plan") -> Iterator[Finding]:
    """Layers that are sharded unlike most others, by a rule that is not about them alone.

    A rule whose pattern does not match all layers is meant for those that it matches, unless it
    stops amid a number: `layers/1` matches `layers/10` too.
    """
    numbered = [(_NUMBER.sub("*", x.path), x) for x in plan.leaves]
    layers = [
        (name, x) for name, x in numbered if name != x.path and x.shape and not x.decision.errors
    ]
    for pairs in grouped(layers, lambda pair: (pair[0], pair[1].shape, pair[1].dtype)):
        siblings = [leaf for _, leaf in pairs]  # the leaves of one name and shape
        specs = Counter(map(_short_spec, siblings))
        common, count = specs.most_common(1)[0]
        if count == len(siblings):
            continue
        typical = next(leaf for leaf in siblings if _short_spec(leaf) == common)
        for members in grouped(siblings, lambda leaf: (leaf.rule, _short_spec(leaf))):
            leaf, pattern = members[0], members[0].pattern
            if pattern is not None and not all(re.search(pattern, x.path) for x in siblings):
                yield from _with_cut_numbers(members, pattern)
            elif _short_spec(leaf) != common and len(members) <= _UNLIKE_PART * len(siblings):
                by = "" if leaf.rule == typical.rule else f" by {decided_by(typical)}"
                values = {"count": count, "common": typical.given, "common_by": by}
                yield finding_about("unlike-siblings", members, **values)


def _with_cut_numbers(members: Sequence[PlannedLeaf], pattern: str) -> Iterator[Finding]:
    """The finding about layers that a rule takes for another one, whose number theirs contain."""
    of_key: dict[str, dict[str, PlannedLeaf]] = defaultdict(dict)
    for meant, other in permutations(members, 2):
        key = _cut_number(pattern, meant.path, other.path)
        if key is not None:
            of_key[key][other.path] = other
    for key, others in of_key.items():
        # A pattern for every other layer matches several numbers that contain no other.
        if len(others) == len(members) - 1:
            yield finding_about("unlike-siblings, number", [*others.values()], key=key)


def _cut_number(pattern: str, meant: str, other: str) -> str | None:
    """The key of a number in `meant` that a pattern takes for a part of that in `other`."""
    for match in _NUMBER.finditer(meant):
        before, number, after = meant[: match.start()], match[0], meant[match.end() :]
        longer = other.removeprefix(before).removesuffix(after)
        if before + longer + after != other or len(longer) <= len(number):
            continue
        # Other digits show that the pattern is not about `longer` itself, as `layers/(1|10)/` is.
        begins = longer.startswith(number) and re.search(pattern, f"{before}{number}777{after}")
        ends = longer.endswith(number) and re.search(pattern, f"{before}777{number}{after}")
        if begins or ends:
            return "/".join(f"{before}{number}".split("/")[-2:]) + "/"
    return None


def _short_spec(leaf: PlannedLeaf) -> PartitionSpec:
    """`P("data", None)` is not equal to `P("data")`, and both mean the same."""
    return with_entries(leaf.given, entries(leaf.given))


# ------------------------------------------------------------------ optimizer state


def state_unlike_weights(plan: "Plan") -> Iterator[Finding]:
    """Optimizer state that is split unlike its parameter, and not further in the same dims.

    State that is split further is as in ZeRO-1.
    """
    sizes = axis_sizes(plan.mesh)
    unlike: list[tuple[PlannedLeaf, PlannedLeaf]] = []
    for leaf, parameter in state_with_parameters(plan.leaves):
        is_wrong = leaf.decision.errors or parameter.decision.errors
        if is_wrong or leaf.size < plan.min_size:
            continue
        dims = zip(_split_by(leaf, sizes), _split_by(parameter, sizes), strict=True)
        if not all(of_parameter <= own for own, of_parameter in dims):
            unlike.append((leaf, parameter))
    for pairs in grouped(unlike, lambda pair: tuple((x.rule, x.given) for x in pair)):
        parameter = pairs[0][1]
        values = {"parameter": parameter.path, "of_parameter": parameter.given}
        values |= {"parameter_by": decided_by(parameter)}
        yield finding_about("state-unlike-weight", [leaf for leaf, _ in pairs], **values)


def _split_by(leaf: PlannedLeaf, sizes: Mapping[str, int]) -> list[set[str]]:
    """The axes that split each dim."""
    dims = dim_entries(leaf.given, len(leaf.shape))
    return [{axis for axis in axes_of(entry) if sizes[axis] > 1} for entry in dims]


# ------------------------------------------------------------------ attention heads

_HEAD_NORM = re.compile(r"(?:^|/|_)(?:(?:q|k|query|key)_?(?:layer_?)?norm|norm_?[qk])(?:/|$)")


class _Heads(NamedTuple):
    """A dim that holds attention heads."""

    dim: int
    heads: int  # 1 if the dim is inside of a head
    size: int  # of a head


def cut_heads(plan: "Plan") -> Iterator[Finding]:
    """Dims of attention heads that are split into parts of heads.

    When weights are used, they are not split along the axes over which they are gathered. Heads are
    recognised in two ways: by projections to and from them, of shapes `(embed, heads, size)` and
    `(heads, size, embed)`; and, where heads are fused in one dim, by a norm of queries or keys,
    which has the size of a head.
    """
    sizes, gathered = axis_sizes(plan.mesh), plan.fsdp_axes()
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for leaf, heads in _with_heads(plan.leaves):
        entry = dim_entries(leaf.given, len(leaf.shape))[heads.dim]
        axes = tuple(axis for axis in axes_of(entry) if axis not in gathered)
        if heads.heads % part_count(axes, sizes):
            alike[leaf.rule, leaf.given, heads, axes].append(leaf)
    for (*_, heads, axes), members in alike.items():
        values = {"dim": heads.dim, "heads": f"{counted(heads.heads, 'head')} of {heads.size}"}
        values |= {"axes": " and ".join(map(repr, axes)), "parts": part_count(axes, sizes)}
        yield finding_about("cuts-head", members, **values)


def _with_heads(leaves: Sequence[PlannedLeaf]) -> Iterator[tuple[PlannedLeaf, _Heads]]:
    """The leaves with a dim of attention heads, and that dim."""
    # The leaves of each subtree that may be an attention module: `attn/q` or `attn/q/kernel`.
    blocks: dict[str, list[PlannedLeaf]] = defaultdict(list)
    for leaf in leaves:
        keys = leaf.path.split("/")
        for depth in (1, 2):
            if len(keys) > depth:
                blocks["/".join(keys[:-depth])].append(leaf)
    seen: set[str] = set()
    for members in blocks.values():
        for leaf, heads in (*_separate_heads(members), *_fused_heads(members)):
            if leaf.path not in seen:
                seen.add(leaf.path)
                yield leaf, heads


def _separate_heads(block: Sequence[PlannedLeaf]) -> Iterator[tuple[PlannedLeaf, _Heads]]:
    """Of leaves `(embed, heads, size)` and `(heads, size, embed)`, the dim of a head's size."""
    ends = {leaf.shape[-3:] for leaf in block if len(leaf.shape) >= 3}
    for embed, heads, size in ends:
        if embed == size or (heads, size, embed) not in ends:
            continue
        for leaf in block:
            rank, end = len(leaf.shape), leaf.shape[-3:]
            if end[::2] == (embed, size) and end != (heads, size, embed):
                yield leaf, _Heads(rank - 1, 1, size)
            elif end[1:] == (size, embed):
                yield leaf, _Heads(rank - 2, 1, size)


def _fused_heads(block: Sequence[PlannedLeaf]) -> Iterator[tuple[PlannedLeaf, _Heads]]:
    """Of matrices beside a norm of queries or keys, the dim that is not that of the others."""
    norms = [leaf for leaf in block if leaf.shape and _HEAD_NORM.search(leaf.path)]
    matrices = [leaf for leaf in block if len(leaf.shape) >= 2 and leaf not in norms]
    head_sizes = {leaf.shape[-1] for leaf in norms}
    if not matrices or len(head_sizes) != 1:
        return
    common = set.intersection(*({*leaf.shape[-2:]} for leaf in matrices))
    if len(common) != 1:
        return
    [size], [embed] = head_sizes, common
    fused = [each for leaf in matrices for each in _dims_unlike(leaf, embed)]
    # A norm over all heads, as in OLMo 2, has the length of the queries.
    longest = max((length for *_, length in fused), default=0)
    for leaf, dim, length in fused:
        if length % size == 0 and size < longest:
            yield leaf, _Heads(dim, length // size, size)


def _dims_unlike(leaf: PlannedLeaf, length: int) -> list[tuple[PlannedLeaf, int, int]]:
    """Of the last two dims of a leaf, those of another length, and their lengths."""
    dims = [*enumerate(leaf.shape)][-2:]
    return [(leaf, dim, of_dim) for dim, of_dim in dims if of_dim != length]

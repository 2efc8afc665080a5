"""Rules in one string: `"attention|mlp->data,hidden->model"`.

The result is a function `(path, leaf) -> spec`, as in EasyDeL, which can be the action of a rule.
The parts do not become rules, because unmatched leaves get a default spec.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec

from treeshard._core.arrays import has_shape
from treeshard._core.mesh import MeshLike, axis_sizes, unknown_axis
from treeshard._core.specs import Entry, all_axes, entries, entry_of, trim_spec
from treeshard.errors import ShardingRuleError, UnknownAxisInRuleError, listed

# EasyDeL passes each dim to `PartitionSpec` as text, and so reads "None" as an axis.
_NOT_SHARDED = ("None", "_")


def create_pattern_based_partition_spec(
    pattern: str, mesh: MeshLike | None = None, default_spec: PartitionSpec | None = None
) -> Callable[[str, Any], PartitionSpec]:
    """Parses rules written as one string into a function `(path, leaf) -> PartitionSpec`.

    `"embed->tensor.fsdp, attention|mlp->fsdp"` has two rules: leaves whose path contains
    `embed` get `P("tensor", "fsdp")`, others with `attention` or `mlp` in their path get
    `P("fsdp")`. The first pattern that matches anywhere in the path (`re.search`) decides.
    Use the function as the action of a rule, or call it, as in `named_tree_map(f, params)`.

    Args:
        pattern: Rules `pattern->dims`, separated by `,` or `;`; patterns cannot contain these.
            Dims are separated by `.`. Each is a mesh axis, several joined by `+` (outermost
            first), or `None` or `_` for a dim that is not sharded.
        mesh: The mesh to check the axes against. Without it, the axes are checked when the specs
            are used.
        default_spec: The spec of leaves that no pattern matches; `P()` by default.

    Returns:
        A function `(path, leaf) -> PartitionSpec`. Scalars and leaves without a shape get
        `P()`.

    Raises:
        ShardingRuleError: If rules are malformed. All are listed. It is an
            `UnknownAxisError` too if the mesh lacks an axis.

    Examples:
        >>> by_name = create_pattern_based_partition_spec("attention|mlp->_.data,head->data+model")
        >>> by_name("layers/0/mlp/weight", jax.numpy.zeros((64, 64)))
        P(None, 'data')

    Source:
        The function of this name in EasyDeL.
    """
    rules: list[_Rule] = []
    bad: list[str] = []
    # All malformed rules are listed together, each with its own reason.
    for part in re.split("[,;]", pattern):
        try:
            rules.append(_read(part))
        except ShardingRuleError as error:
            bad.append(f"{part.strip()!r}: {error}")
    if bad:
        facts = listed(f"{len(bad)} rules are malformed:", bad)
        raise ShardingRuleError(f"{pattern!r}: {facts}\n{_HOW}")
    # For `None`, EasyDeL takes the mesh in force, and raises without one, although specs do not
    # need a mesh.
    if mesh is not None:
        _check(rules, mesh)
    otherwise = PartitionSpec() if default_spec is None else default_spec

    def partition_spec(path: str, leaf: Any) -> PartitionSpec:
        if not has_shape(leaf) or not leaf.shape:
            return PartitionSpec()
        return next((spec for pattern, spec in rules if pattern.search(path)), otherwise)

    return partition_spec


# The pattern to search for in a leaf's path, and the spec of matching leaves.
_Rule = tuple[re.Pattern[str], PartitionSpec]
_HOW = 'Write pattern->dims, such as "embed->tensor.fsdp, attention|mlp->fsdp".'


def _read(rule: str) -> _Rule:
    # EasyDeL skips a rule without an arrow silently.
    pattern, _, dims = (part.strip() for part in rule.partition("->"))
    if not pattern or not dims:
        raise ShardingRuleError("it is not a pattern, '->' and dims.")
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ShardingRuleError(f"the pattern does not compile: {error}.") from None
    spec = PartitionSpec(*[_dim(dim.strip()) for dim in dims.split(".")])
    for axis, count in Counter(all_axes(entries(spec))).items():
        if count > 1:
            raise ShardingRuleError(f"{axis!r} occurs twice. An axis can split only one dim.")
    return compiled, trim_spec(spec)


def _dim(text: str) -> Entry:
    if text in _NOT_SHARDED:
        return None
    axes = [axis.strip() for axis in text.split("+")]
    for axis in axes:
        if axis in _NOT_SHARDED or not re.fullmatch(r"[^\s>]+", axis):
            raise ShardingRuleError(f"{axis!r} is not a mesh axis. Write '_' for an unsharded dim.")
    return entry_of(axes)


def _check(rules: list[_Rule], mesh: MeshLike) -> None:
    sizes = axis_sizes(mesh)
    bad = [
        f"{pattern.pattern!r}: {unknown_axis(axis, sizes)}"
        for pattern, spec in rules
        for axis in all_axes(entries(spec))
        if axis not in sizes
    ]
    if bad:
        raise UnknownAxisInRuleError(listed(f"{len(bad)} axes are not in the mesh:", bad))

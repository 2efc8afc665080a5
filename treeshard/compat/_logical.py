"""One tuple of logical names, resolved by hand: Flax's `logical_to_mesh_axes`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from treeshard._core.mesh import MeshLike
from treeshard._core.specs import Entry
from treeshard._planning.logical import LogicalRules, read_logical_rules, resolve_by


def logical_to_mesh_spec(
    names: Sequence[Entry],
    rules: LogicalRules | Mapping[str, Any],
    mesh: MeshLike | None = None,
    shape: tuple[int, ...] | None = None,
) -> PartitionSpec:
    """Resolves the logical names of an array's dims to mesh axes.

    Args:
        names: One entry per dim: a name, `None` for a dim that is not sharded,
            `UNCONSTRAINED`, or a tuple of names for a dim that merges several.
        rules: As in `logical_axis_rules`, or a dict of them.
        mesh: If given, axes that it lacks are dropped after the rules were applied, so that
            an absent axis and an axis of size 1 give the same placement.
        shape: If given with a mesh, axes that do not divide their dim are dropped.

    Returns:
        A spec with one entry per name.

    Raises:
        ShardingRuleError: If rules are malformed. All are listed.
        SpecError: If a name occurs twice, `names` is not a tuple of names or is longer than
            `shape`, or a `PartitionAxis` lacks a name.

    Examples:
        >>> rules = [("batch", "x"), ("features", "x"), ("heads", "y"), ("batch", "z")]
        >>> logical_to_mesh_spec(("batch", "length", "heads", "features"), rules)
        P('x', None, 'y', None)

    Source:
        `flax.linen.logical_to_mesh_axes`, which MaxText builds on.
    """
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    return resolve_by(read_logical_rules(pairs), names, mesh, shape)

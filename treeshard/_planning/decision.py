"""The records of what was decided for each leaf, shared by rules and plans."""

import math
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.mesh import AnyMesh
from treeshard._core.specs import Adjustment, shard_size

Shape = tuple[int, ...]


class Decision(NamedTuple):
    """What the rules decided for a leaf. Leaves with equal results share one instance.

    Attributes:
        asked: The spec that the rule requests; `None` if no rule matched.
        given: The spec that the leaf gets.
        rule: The index of the rule that matched; `None` for scalars and unmatched leaves.
        pattern: The pattern of that rule.
        adjustments: How `given` differs from `asked`, and why.
    """

    asked: PartitionSpec | None
    given: PartitionSpec
    rule: int | None = None
    pattern: str | None = None
    adjustments: tuple[Adjustment, ...] = ()


class PlannedLeaf(NamedTuple):
    """The plan of one array.

    Attributes:
        path: Its path, as in `leaf_paths`.
        shape: Its full shape.
        dtype: Its dtype, which may be that of PRNG keys.
        decision: What the rules decided; its fields are also properties of the leaf.
    """

    path: str
    shape: Shape
    dtype: Any
    decision: Decision

    @property
    def asked(self) -> PartitionSpec | None:
        """The spec that the rule requests; `None` if no rule matched."""
        return self.decision.asked

    @property
    def given(self) -> PartitionSpec:
        """The spec that the leaf gets."""
        return self.decision.given

    @property
    def rule(self) -> int | None:
        """The index of the rule that matched; `None` for scalars and unmatched leaves."""
        return self.decision.rule

    @property
    def pattern(self) -> str | None:
        """The pattern of that rule."""
        return self.decision.pattern

    @property
    def adjustments(self) -> tuple[Adjustment, ...]:
        """How `given` differs from `asked`, and why."""
        return self.decision.adjustments

    @property
    def size(self) -> int:
        """The number of elements of the full array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the full array."""
        return self.size * self.dtype.itemsize

    def bytes_per_device(self, mesh: AnyMesh) -> int:
        """The bytes of its largest shard."""
        return shard_size(self.shape, self.given, mesh) * self.dtype.itemsize

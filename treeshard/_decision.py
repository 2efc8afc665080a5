"""What was decided for a leaf: the record that rules, plans and their readers share."""

import math
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from treeshard._mesh import AnyMesh
from treeshard._specs import Adjustment, shard_size

Shape = tuple[int, ...]


class Decision(NamedTuple):
    """What rules made of a leaf. Leaves that were decided alike share one.

    Attributes:
        asked: The spec that the rule says; `None` if no rule matched.
        given: The spec that the leaf gets.
        rule: The index of the rule that decided; `None` for scalars and unmatched leaves.
        pattern: That rule's pattern.
        adjustments: What was not done as asked, and why.
    """

    asked: PartitionSpec | None
    given: PartitionSpec
    rule: int | None = None
    pattern: str | None = None
    adjustments: tuple[Adjustment, ...] = ()


class PlannedLeaf(NamedTuple):
    """What is planned for one array.

    Attributes:
        path: Its name, as `leaf_paths` gives it.
        shape: Its whole shape.
        dtype: Its dtype, which may be that of PRNG keys.
        decision: What the rules made of it; its parts can be asked of the leaf itself.
    """

    path: str
    shape: Shape
    dtype: Any
    decision: Decision

    @property
    def asked(self) -> PartitionSpec | None:
        """The spec that the rule says; `None` if no rule matched."""
        return self.decision.asked

    @property
    def given(self) -> PartitionSpec:
        """The spec that the leaf gets."""
        return self.decision.given

    @property
    def rule(self) -> int | None:
        """The index of the rule that decided; `None` for scalars and unmatched leaves."""
        return self.decision.rule

    @property
    def pattern(self) -> str | None:
        """The pattern of that rule."""
        return self.decision.pattern

    @property
    def adjustments(self) -> tuple[Adjustment, ...]:
        """What was not done as asked, and why."""
        return self.decision.adjustments

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the whole array."""
        return self.size * self.dtype.itemsize

    def bytes_per_device(self, mesh: AnyMesh) -> int:
        """The bytes of its largest shard."""
        return shard_size(self.shape, self.given, mesh) * self.dtype.itemsize

"""Matches each collective of a program to a planned transfer. What has no match is unplanned."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from treeshard._communication import PlannedTransfer
from treeshard._moved import Collective
from treeshard._plan import Plan
from treeshard._spec_trees import get_names_from_partition_spec
from treeshard._unplanned import Unplanned, elements, explained, in_loop, is_scalar


@dataclass
class _Expected:
    """A planned transfer, and how many of its elements have no match yet."""

    planned: PlannedTransfer
    left: int

    @property
    def total(self) -> int:
        return elements(self.planned.total_bytes, self.planned.dtype) or 0


@dataclass
class Settlement:
    """Matches collectives to planned transfers, one by one, and collects those without a match.

    Attributes:
        plan: The plan of the step's state.
        planned: What the plan predicts.
        names: Path of an argument -> path of that leaf in the plan; `None` if it is not in it.
        batch_axes: The mesh axes that shard the batch.
        tensor_parallel: Filled with the collectives of computed values along axes that shard
            parameters but not the batch.
    """

    plan: Plan
    planned: Sequence[PlannedTransfer]
    names: Mapping[str, str | None]
    batch_axes: Sequence[str]
    tensor_parallel: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = [
            _Expected(x, elements(x.total_bytes, x.dtype) or 0)
            for x in self.planned
            if x.path is not None
        ]
        self.differences: dict[tuple[str, str, str], list[tuple[Collective, str | None]]] = {}
        used = get_names_from_partition_spec(self.plan)
        self.tensor_axes = {axis for axis in used if axis not in self.batch_axes}

    def take(self, collective: Collective) -> None:
        """Matches one collective, or files it under the code of the difference that it is."""
        if collective.axes == () or is_scalar(collective):
            return
        leaf = None if collective.path is None else self.names.get(collective.path)
        size = elements(collective.total_bytes, collective.dtype)
        if size is None or collective.wire_bytes is None:
            return self._add("unreadable", collective, leaf)
        if collective.axes is None:
            return self._add("across-axes", collective, leaf)
        if (planned := self._matched(collective, leaf, size)) is not None:
            if jnp.dtype(collective.dtype).itemsize > jnp.dtype(planned.dtype).itemsize:
                self._add("wider", collective, planned.path, planned.dtype)
        elif collective.kind == "all-reduce" and self._match_full_gradient(collective, size):
            self._add("all-reduce", collective, None)
        elif leaf is not None and collective.kind == "all-gather":
            is_planned = any(
                (x.planned.path, x.planned.kind) == (leaf, collective.kind) for x in self.expected
            )
            self._add("again" if is_planned else "sharded-further", collective, leaf)
        elif collective.path is not None and leaf is None:
            self._add("batch", collective, None)
        elif set(collective.axes) <= self.tensor_axes:
            self.tensor_parallel.append(collective)
        elif self._repeats_a_gradient(collective):
            self._match_full_gradient(collective, elements(collective.bytes, collective.dtype))
            self._add("again", collective, None)
        else:
            self._add("activation", collective, None)

    def _add(self, code: str, collective: Collective, leaf: str | None, detail: str = "") -> None:
        if code == "activation" and in_loop(collective):
            detail = "loop"
        members = self.differences.setdefault((code, detail, collective.kind), [])
        members.append((collective, leaf))

    def _matched(
        self, collective: Collective, leaf: str | None, size: int
    ) -> PlannedTransfer | None:
        """Matches it to a planned transfer of the same kind and axes, if there is one."""
        for expected in self.expected:
            planned = expected.planned
            if (planned.kind, planned.axes) != (collective.kind, collective.axes):
                continue
            if expected.left < size:
                continue
            if collective.kind == "all-gather" and planned.why != "update":
                fits = leaf is not None and leaf == planned.path
            else:
                # Gradients and updates have no path, so that only the full size identifies them.
                fits = expected.left == size and leaf in (None, planned.path)
            if fits:
                expected.left -= size
                return planned
        return None

    def _match_full_gradient(self, collective: Collective, size: int | None) -> bool:
        """Matches an all-reduce of a full gradient to all that is planned for that gradient: for
        instance a reduce-scatter, and an all-reduce of each device's part."""
        of_leaf: dict[str | None, list[_Expected]] = {}
        for expected in self.expected:
            if expected.planned.why == "gradient":
                of_leaf.setdefault(expected.planned.path, []).append(expected)
        for gradient in of_leaf.values():
            untouched = all(expected.left == expected.total for expected in gradient)
            axes = {axis for expected in gradient for axis in expected.planned.axes}
            if untouched and gradient[0].left == size and axes == set(collective.axes or ()):
                for expected in gradient:
                    expected.left = 0
                return True
        return False

    def _repeats_a_gradient(self, collective: Collective) -> bool:
        """Whether it looks like one more reduction of a gradient: it has the size of one, and
        runs in a loop or in the backward pass."""
        size = elements(collective.bytes, collective.dtype)
        backward = (collective.count or 1) > 1 or "transpose(" in (collective.op_name or "")
        return backward and any(
            expected.total == size and set(expected.planned.axes) <= set(collective.axes or ())
            for expected in self.expected
            if expected.planned.kind != "all-gather"
        )

    def unplanned(self) -> Iterator[Unplanned]:
        """The differences, and last the planned transfers that the program does not have."""
        for (code, detail, kind), members in self.differences.items():
            moved = tuple(collective for collective, _ in members)
            paths = tuple(leaf for _, leaf in members if leaf is not None)
            fact, hint = explained(code, kind, detail, moved, self.batch_axes)
            yield Unplanned(code, fact, hint, moved, paths)
        missing: dict[tuple[str, str], list[str]] = {}
        for expected in self.expected:
            if expected.left:
                key = expected.planned.kind, expected.planned.why
                missing.setdefault(key, []).append(expected.planned.path or "")
        for (kind, why), paths in missing.items():
            hint = (
                "The compiler gathers once and keeps the result, which takes memory until the"
                " gradient is computed. In a scan it does not."
                if "again" in why
                else "Check that the step uses the leaf, and that the plan is of this step."
            )
            fact = f"the planned {kind} ({why}) is not in the program."
            yield Unplanned("not-moved", fact, hint, (), tuple(paths))

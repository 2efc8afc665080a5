"""Matches the collectives of a program to the transfers that its plan predicts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import jax.numpy as jnp

from treeshard._core.mesh import axis_sizes
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._core.specs import axes_of, entries
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard.communication._collectives import Collective, is_scalar
from treeshard.communication._differences import Unplanned, explain
from treeshard.communication._forecast import PlannedTransfer

_REDUCTIONS = ("all-reduce", "reduce-scatter")


class _Expected:
    """A planned transfer, how many of its elements have no match yet, and over which axes."""

    def __init__(self, planned: PlannedTransfer) -> None:
        self.planned, self.axes = planned, frozenset(planned.axes)
        self.total = self.left = elements(planned.total_bytes, planned.dtype) or 0


Members = dict[tuple[str, str, str], list[tuple[Collective, str | None]]]


@dataclass
class Matcher:
    """Matches collectives to planned transfers, one by one, and collects those without a match.

    `names` has the plan's path of each argument, or `None`; `state` a leaf of the optimizer state
    of each parameter. `tensor_parallel` fills with collectives of computed values along axes that
    shard parameters but not the batch.
    """

    plan: Plan
    planned: Sequence[PlannedTransfer]
    names: Mapping[str, str | None]
    params: Mapping[str, PlannedLeaf]
    state: Mapping[str, PlannedLeaf]
    batch_axes: Sequence[str]
    platform: str | None
    tensor_parallel: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = [
            _Expected(x) for x in self.planned if x.path is not None and self.params[x.path].shape
        ]
        self.differences: Members = {}
        self.of_compiler: Members = {}
        used = get_names_from_partition_spec(self.plan)
        self.tensor_axes = {axis for axis in used if axis not in self.batch_axes}
        # Weights that are gathered along axes that do not split the batch, and in loops.
        self.gathered_for_nothing: set[str] = set()
        self.gathers_in_loop = False

    def match(self, collective: Collective) -> None:
        """Matches one collective, or files it under the code of the difference that it is."""
        if collective.axes == () or is_scalar(collective) or collective.completes is not None:
            return
        leaf = None if collective.path is None else self.names.get(collective.path)
        size = elements(collective.total_bytes, collective.dtype)
        if leaf is not None and _is_in_loop(collective):
            self.gathers_in_loop = True
        if size is None or collective.wire_bytes is None:
            self._add("unreadable", collective, leaf)
        elif collective.axes is None:
            if (path := self._gradient(collective)) is not None:
                self._match_all(path, ("gradient",))
            self._add("across-axes", collective, leaf)
        elif (planned := self._matched(collective, leaf, size)) is not None:
            self._compare_dtypes(collective, planned)
            if collective.kind == "all-gather" and collective.wire_bytes >= (collective.bytes or 0):
                self._add("by-all-reduce", collective, planned.path, is_own=True)
        elif (planned := self._matched_by_axes(collective, size)) is not None:
            self._compare_dtypes(collective, planned)
        elif collective.kind == "all-reduce" and self._match_full_gradient(collective, size):
            self._add("all-reduce", collective, is_own=self.platform == "cpu")
        elif leaf is not None and collective.kind == "all-gather":
            self._add_gather(collective, leaf)
        elif collective.path is not None and leaf is None:
            self._add("batch", collective)
        elif (path := self._updated(collective)) is not None:
            self._match_all(path, ("gradient", "update"))
            self._add("state-unlike-weight", collective, path)
        elif set(collective.axes) <= self.tensor_axes:
            self.tensor_parallel.append(collective)
        else:
            self._add_computed(collective)

    def _compare_dtypes(self, collective: Collective, planned: PlannedTransfer) -> None:
        sizes = [jnp.dtype(x.dtype).itemsize for x in (collective, planned)]
        if sizes[0] > sizes[1]:
            is_own = self.platform == "cpu" and self._is_widened(collective, planned)
            self._add("wider", collective, planned.path, planned.dtype, is_own=is_own)
        elif sizes[0] < sizes[1]:
            self._add("narrower", collective, planned.path, planned.dtype, is_own=True)

    def _add(
        self,
        code: str,
        collective: Collective,
        leaf: str | None = None,
        detail: str = "",
        *,
        is_own: bool = False,
    ) -> None:
        members = self.of_compiler if is_own else self.differences
        # Reductions of the gradients of such weights belong to their gathers.
        kind = "all-gather" if code == "batch-not-split" else collective.kind
        members.setdefault((code, detail, kind), []).append((collective, leaf))

    def _add_gather(self, collective: Collective, leaf: str) -> None:
        """Files the gather of a leaf that is not planned, or not so often."""
        planned = [
            x for x in self.expected if (x.planned.path, x.planned.kind) == (leaf, "all-gather")
        ]
        axes = {axis for x in planned for axis in x.planned.axes}
        kept = ", ".join(repr(axis) for axis in collective.axes or () if axis not in axes)
        if axes and kept:
            return self._add("sharded-further", collective, leaf, kept)
        if leaf in self.params and not set(collective.axes or ()) & set(self.batch_axes):
            self.gathered_for_nothing.add(leaf)
            self._match_all(leaf, ("gradient",))
            return self._add("batch-not-split", collective, leaf)
        for one in planned:  # it is gathered as planned too
            one.left = 0
        self._add("again" if planned else "sharded-further", collective, leaf)

    def _add_computed(self, collective: Collective) -> None:
        """Files an unplanned collective of computed values."""
        path = self._gradient(collective)
        if _is_in_loop(collective) and (weight := self._computed_weight(collective)) is not None:
            self._match_all(weight, ("weight",))
            self._add("again", collective, weight)
        elif path in self.gathered_for_nothing:
            self._add("batch-not-split", collective, path)
        elif path is not None and (_is_in_loop(collective) or self._is_reduced(path, collective)):
            for expected in self._reductions(path, collective):
                expected.left = 0
            if _is_in_loop(collective):
                self._add("reduction-inside-loop", collective, path)
            else:
                self._add("again", collective)
        else:
            in_loop = _is_in_loop(collective)
            detail = "" if not in_loop else "loop, gathered" if self.gathers_in_loop else "loop"
            self._add("activation", collective, None, detail)

    # ---------------------------------------------------------------- planned transfers

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
                # Gradients and updates have no path, so that only the full size identifies them;
                # of a loop from which some trips were taken out, the size of one trip.
                one_trip = elements(planned.bytes, planned.dtype) if planned.count > 1 else None
                is_part = elements(collective.bytes, collective.dtype) == one_trip
                fits = (expected.left == size or is_part) and leaf in (None, planned.path)
            if fits:
                expected.left -= size
                return planned
        return None

    def _matched_by_axes(self, collective: Collective, size: int) -> PlannedTransfer | None:
        """Matches an all-reduce over some axes to one that is planned over more of them, as of a
        replicated leaf that `training.value_and_grad` averages axis by axis."""
        axes = frozenset(collective.axes or ())
        for expected in self.expected:
            alike = expected.planned.kind == collective.kind == "all-reduce"
            if alike and expected.left == size and axes <= expected.axes:
                expected.axes -= axes
                expected.left = size if expected.axes else 0
                return expected.planned
        return None

    def _match_full_gradient(self, collective: Collective, size: int | None) -> bool:
        """Matches an all-reduce of a full gradient to what is planned for that gradient: to a
        reduce-scatter, or to it and an all-reduce of each device's part."""
        for gradient in self._gradients().values():
            for parts in (gradient, *([one] for one in gradient)):
                untouched = all(expected.left == expected.total for expected in parts)
                axes = {axis for expected in parts for axis in expected.planned.axes}
                if untouched and parts[0].left == size and axes == set(collective.axes or ()):
                    for expected in parts:
                        expected.left = 0
                    return True
        return False

    def _match_all(self, path: str, whys: Iterable[str]) -> None:
        """Matches all that is planned for a leaf, for these purposes."""
        for expected in self.expected:
            if expected.planned.path == path and expected.planned.why in whys:
                expected.left = 0

    def _gradients(self) -> dict[str | None, list[_Expected]]:
        """What is planned for each gradient."""
        of_leaf: dict[str | None, list[_Expected]] = {}
        for expected in self.expected:
            if expected.planned.why == "gradient":
                of_leaf.setdefault(expected.planned.path, []).append(expected)
        return of_leaf

    # ---------------------------------------------------------------- computed values

    def _is_reduced(self, path: str, collective: Collective) -> bool:
        """Whether the reductions of a gradient that are planned over these axes have a match."""
        return all(x.left < x.total for x in self._reductions(path, collective))

    def _reductions(self, path: str, collective: Collective) -> list[_Expected]:
        axes = set(collective.axes or self.batch_axes)
        return [x for x in self._gradients().get(path, ()) if x.axes <= axes]

    def _computed_weight(self, collective: Collective) -> str | None:
        """The parameter that it seems to gather, after the loop has changed it."""
        size = elements(collective.bytes, collective.dtype)
        for expected in self.expected:
            planned = expected.planned
            alike = (planned.kind, planned.axes) == (collective.kind, collective.axes)
            if alike and planned.why == "weight" and expected.left == expected.total == size:
                return planned.path
        return None

    def _gradient(self, collective: Collective) -> str | None:
        """The parameter whose gradient it seems to reduce: in the backward pass or in a loop, with
        the size of the full parameter, of one of its layers, or of a part of those."""
        backward = "transpose(" in (collective.op_name or "")
        if collective.kind not in _REDUCTIONS or not (backward or _is_in_loop(collective)):
            return None
        size = elements(collective.bytes, collective.dtype)
        counts: dict[str | None, int] = {x.planned.path: x.planned.count for x in self.expected}
        fitting = [
            path
            for path, leaf in self.params.items()
            if size in self._sizes(leaf, counts.get(path, 1))
        ]
        # One that is not reduced yet, if there is one.
        return min(fitting, key=lambda path: self._is_reduced(path, collective), default=None)

    def _sizes(self, leaf: PlannedLeaf, layers: int = 1) -> set[int]:
        """The elements of a leaf or of one of its layers, in full and split over some axes."""
        sizes = axis_sizes(self.plan.mesh)
        axes = [*get_names_from_partition_spec(leaf.given), *self.batch_axes]
        parts = {
            math.prod(sizes[axis] for axis in some)
            for count in range(len(axes) + 1)
            for some in combinations(dict.fromkeys(axes), count)
        }
        return {full // part for full in (leaf.size, leaf.size // layers) for part in parts}

    def _updated(self, collective: Collective) -> str | None:
        """The parameter whose update it seems to move, because its optimizer state is sharded
        unlike itself: neither in the forward nor in the backward pass, with its size."""
        name = collective.op_name or ""
        if collective.kind in _REDUCTIONS or "jvp(" in name or "transpose(" in name:
            return None
        size = elements(collective.bytes, collective.dtype)
        for path, state in self.state.items():
            if not self._is_alike(self.params[path], state):
                sizes = self._sizes(self.params[path]) | self._sizes(state)
                if size in sizes:
                    return path
        return None

    def _is_alike(self, leaf: PlannedLeaf, state: PlannedLeaf) -> bool:
        """Whether optimizer state is sharded as its parameter is, or further."""
        sizes = axis_sizes(self.plan.mesh)
        of_leaf, of_state = (
            [{axis for axis in axes_of(entry) if sizes[axis] > 1} for entry in entries(x.given)]
            for x in (leaf, state)
        )
        of_state += [set()] * len(of_leaf)
        return all(axes <= of_state[dim] for dim, axes in enumerate(of_leaf))

    def _is_widened(self, collective: Collective, planned: PlannedTransfer) -> bool:
        """Whether a CPU's compiler chose the wider dtype: it has no collectives of 16-bit floats,
        and gathers before a cast."""
        own = self.params[planned.path or ""].dtype
        return (
            collective.is_widened
            or own.itemsize <= jnp.dtype(planned.dtype).itemsize
            or (collective.op_name or "").endswith("convert_element_type")
        )

    # ---------------------------------------------------------------- differences

    def by_compiler(self) -> Iterator[Unplanned]:
        """The differences that are the compiler's own."""
        return self._unplanned(self.of_compiler)

    def unplanned(self) -> Iterator[Unplanned]:
        """The differences, and last the planned transfers that the program does not have."""
        yield from self._unplanned(self.differences)
        missing: dict[tuple[str, str], list[str]] = {}
        for expected in self.expected:
            if expected.left:
                key = expected.planned.kind, expected.planned.why
                missing.setdefault(key, []).append(expected.planned.path or "")
        for (kind, why), paths in missing.items():
            yield Unplanned("not-moved", *explain("not-moved", kind, why), (), tuple(paths))

    def _unplanned(self, members_of: Members) -> Iterator[Unplanned]:
        for (code, detail, kind), members in members_of.items():
            moved = tuple(collective for collective, _ in members)
            paths = tuple(leaf for _, leaf in members if leaf is not None)
            fact, hint = explain(code, kind, detail, moved, self.batch_axes, self.platform)
            yield Unplanned(code, fact, hint, moved, paths)


def _is_in_loop(collective: Collective) -> bool:
    return (collective.count or 0) > 1 or "while/body" in (collective.op_name or "")


def elements(size: int | None, dtype: str) -> int | None:
    """The number of elements in `size` bytes; `None` if it or the dtype is unknown."""
    if size is None:
        return None
    try:
        return size // jnp.dtype(dtype).itemsize
    except TypeError:
        return None

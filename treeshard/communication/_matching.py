"""Matches the collectives of a program to the transfers that its plan predicts.

By kind, axes and number of elements, and not op by op: compilers combine, split, reorder and peel
collectives, so that the ops of a program and the transfers of a plan are seldom one to one. What
has no match is filed under a code, by the first rule that applies to it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from treeshard._core.mesh import axis_sizes
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._core.specs import axes_of, dim_entries
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import BY_MATRIX
from treeshard._trace.roles import TRAINED, Roles
from treeshard.communication._collectives import TINY, Collective, is_scalar
from treeshard.communication._differences import Unplanned, explain
from treeshard.communication._forecast import PlannedTransfer

_REDUCTIONS = ("all-reduce", "reduce-scatter")
# The op that a name ends in: `jit(step)/reduce_sum`, or one of several that were combined:
# `jit(step)/(reduce_sum:transpose(jvp())/dot_general)`
_SUM = re.compile(r"\breduce_\w+(?=[:)]|$)")
# What is planned and what XLA's compiler for CPUs moves instead.
_WIDENED_ON_CPUS = (("bfloat16", "float32"), ("float16", "float32"))


class _Expected:
    """A planned transfer, how many of its elements have no match yet, and over which axes."""

    def __init__(self, planned: PlannedTransfer) -> None:
        self.planned, self.path, self.axes = planned, planned.path or "", frozenset(planned.axes)
        self.total = self.left = elements(planned.total_bytes, planned.dtype)
        self.over: Counter[frozenset[str]] = Counter()  # what is matched over some of the axes

    @property
    def is_untouched(self) -> bool:
        return self.left == self.total

    def is_like(self, collective: Collective) -> bool:
        """Whether it is of the same kind, along the same axes."""
        return (self.planned.kind, self.planned.axes) == (collective.kind, collective.axes)


class _Moved(NamedTuple):
    """A collective, and what the rules ask of it.

    `name` is its `op_name`, such as `jit(step)/jvp()/while/body/dot_general`; `leaf` the plan's
    path of the argument that it moves, if that is in the plan. `size` counts the elements of all
    its executions, and `size_of_one` those of one.
    """

    collective: Collective
    kind: str
    name: str
    leaf: str | None
    size: int
    size_of_one: int
    axes: frozenset[str]
    is_in_loop: bool


# The collectives of each case, kind and detail, with the leaf that they concern.
_Filed = dict[tuple[str, str, str], list[tuple[Collective, str | None]]]


@dataclass
class Matcher:
    """Matches collectives to planned transfers, one by one, and collects those without a match.

    `names` has the plan's path of each argument, or `None`. `activations` fills with collectives
    of computed values along axes that shard parameters but not the batch, or along which
    parameters stay split where they are used, `matrices` with those of `training.by_matrix`, and
    `leaves` with the leaf that each collective is of, or `None`.
    """

    plan: Plan
    planned: Sequence[PlannedTransfer]
    names: Mapping[str, str | None]
    roles: Roles
    batch_axes: Sequence[str]
    platform: str | None

    def __post_init__(self) -> None:
        leaves = {leaf.path: leaf for leaf in self.plan.leaves}
        self.params = {path: leaf for path, leaf in leaves.items() if self.roles[path].is_used}
        # What is as small as a scalar has no match: `match` leaves scalars out.
        of_leaves = [x for x in self.planned if x.path is not None and leaves[x.path].shape]
        self.expected = [_Expected(x) for x in of_leaves if x.bytes > TINY]
        self.of_leaf: dict[str, list[_Expected]] = {path: [] for path in self.params}
        for expected in self.expected:
            self.of_leaf[expected.path].append(expected)
        self.differences: _Filed = defaultdict(list)
        self.of_compiler: _Filed = defaultdict(list)
        self.activations: list[Collective] = []
        self.matrices: list[Collective] = []
        self.leaves: list[str | None] = []
        self.sums: list[_Moved] = []
        self.sizes = axis_sizes(self.plan.mesh)
        self.axes_of_activations = {*get_names_from_partition_spec(self.plan)} - {*self.batch_axes}
        self.axes_of_activations.update(*(role.split for role in self.roles.values()))
        self.sizes_of_gradient: dict[str, set[int]] = {}
        self.sizes_of_update: dict[str, set[int]] = {}
        self.computed: set[str] = set()  # what is changed before it is gathered
        self._read_roles(leaves)
        # Weights that are gathered along axes that do not split the batch, and in loops.
        self.gathered_for_nothing: set[str] = set()
        self.gathers_in_loop = False

    def _read_roles(self, leaves: Mapping[str, PlannedLeaf]) -> None:
        layers = {x.path: x.planned.count for x in self.expected}
        for path, leaf in self.params.items():
            role = self.roles[path]
            if role.name == TRAINED:
                self.sizes_of_gradient[path] = self._sizes(leaf, layers.get(path, 1))
            if any(gather.is_changed for gather in role.gathers):
                self.computed.add(path)
            for source in (leaves[path] for path in role.sources):
                if source.shape == leaf.shape and not self._is_alike(leaf, source):
                    sizes = self.sizes_of_update.setdefault(path, self._sizes(leaf))
                    sizes |= self._sizes(source)

    def match(self, collective: Collective) -> None:
        """Matches one collective, or files it under the case of the difference that it is."""
        leaf = None if collective.path is None else self.names.get(collective.path)
        self.leaves.append(leaf)
        if collective.axes == () or is_scalar(collective) or collective.completes is not None:
            return
        name = collective.op_name or ""
        moved = _Moved(
            collective,
            collective.kind,
            name,
            leaf,
            elements(collective.total_bytes, collective.dtype),
            elements(collective.bytes, collective.dtype),
            frozenset(collective.axes or ()),
            (collective.count or 0) > 1 or "while/body" in name,
        )
        if moved.leaf is not None and moved.is_in_loop:
            self.gathers_in_loop = True
        for rule in _RULES:
            if rule(self, moved):
                return

    def _add(
        self,
        case: str,
        moved: _Moved,
        leaf: str | None = None,
        detail: str = "",
        *,
        is_own: bool = False,
    ) -> bool:
        """Files a collective under a case; `is_own` if it is the compiler's own doing."""
        filed = self.of_compiler if is_own else self.differences
        self.leaves[-1] = self.leaves[-1] or leaf
        # Reductions of the gradients of such weights belong to their gathers.
        kind = "all-gather" if case == "batch-not-split" else moved.kind
        filed[case, kind, detail].append((moved.collective, leaf))
        return True

    # ---------------------------------------------------------------- rules

    def _file_unreadable(self, moved: _Moved) -> bool:
        if None not in (moved.collective.total_bytes, moved.collective.wire_bytes):
            return False
        return self._add("unreadable", moved, moved.leaf)

    def _file_across_axes(self, moved: _Moved) -> bool:
        if moved.collective.axes is not None:
            return False
        path = self._gradient(moved)
        if path is not None:
            _match(self._planned(path, "gradient"))
        return self._add("across-axes", moved, moved.leaf)

    def _match_planned(self, moved: _Moved) -> bool:
        """Whether a transfer of the same kind and axes is planned, and not matched yet."""
        for expected in self._nearest(moved):
            if self._fits(moved, expected):
                expected.left -= moved.size
                self._compare(moved, expected.planned)
                return True
        return False

    def _nearest(self, moved: _Moved) -> Iterator[_Expected]:
        """All that is expected, what has exactly the moved size first: the gradient of a final norm
        has the size of one layer of the other norms."""
        yield from (x for x in self.expected if x.left == moved.size)
        yield from (x for x in self.expected if x.left != moved.size)

    def _fits(self, moved: _Moved, expected: _Expected) -> bool:
        planned = expected.planned
        if not expected.is_like(moved.collective) or expected.left < moved.size:
            return False
        is_weight = planned.kind == "all-gather" and planned.why != "update"
        if is_weight and not (expected.path in self.computed and moved.leaf is None):
            return moved.leaf == planned.path
        # Gradients, updates and weights that the step changes before it gathers them have no path,
        # so that only the full size identifies them;
        # of a loop from which some trips were taken out, the size of one trip. GPUs peel one:
        # 11 executions of `%reduce-scatter-start` in the body of the loop, and one outside.
        one_trip = elements(planned.bytes, planned.dtype)
        is_part = planned.count > 1 and moved.size_of_one == one_trip
        is_part = is_part or self._is_of_some_layers(moved, expected)
        return (expected.left == moved.size or is_part) and moved.leaf in (None, planned.path)

    def _is_of_some_layers(self, moved: _Moved, expected: _Expected) -> bool:
        """Whether it may reduce the gradients of some layers of a leaf that is not gathered."""
        shape = self.params[expected.path].shape
        is_larger = moved.size < expected.total and expected.planned.why == "gradient"
        return is_larger and len(shape) > 1 and moved.size_of_one * shape[0] == expected.total

    def _match_some_of_axes(self, moved: _Moved) -> bool:
        """Whether it is a step of an all-reduce that is planned over more axes, as of a replicated
        leaf that `training.value_and_grad` averages axis by axis."""
        for expected in self._nearest(moved):
            alike = expected.planned.kind == moved.kind == "all-reduce"
            if not alike or not moved.axes <= expected.axes:
                continue
            if expected.left != moved.size and not self._is_of_some_layers(moved, expected):
                continue
            expected.over[moved.axes] += moved.size
            if expected.over[moved.axes] == expected.left:
                expected.axes -= moved.axes
                expected.left = expected.left if expected.axes else 0
            self._compare(moved, expected.planned)
            return True
        return False

    def _match_full_gradient(self, moved: _Moved) -> bool:
        """Whether it reduces a full gradient, where a reduce-scatter was planned, or that and an
        all-reduce of each device's part."""
        if moved.kind != "all-reduce":
            return False
        for path in self.of_leaf:
            gradient = self._planned(path, "gradient")
            for parts in (gradient, *zip(gradient)):  # all of it, or one transfer of it
                if _is_done_by(moved, parts):
                    _match_some(moved, parts)
                    self.leaves[-1] = path
                    is_followed = self.roles[path].is_scattered
                    case = "all-reduce, scattered" if is_followed else "all-reduce"
                    return self._add(case, moved, is_own=self.platform == "cpu")
        return False

    def _file_gather(self, moved: _Moved) -> bool:
        """Whether it gathers a leaf in a way that is not planned, or more often."""
        leaf = moved.leaf
        if leaf is None or moved.kind != "all-gather":
            return False
        planned = [x for x in self.of_leaf.get(leaf, ()) if x.planned.kind == "all-gather"]
        planned_axes = {axis for x in planned for axis in x.planned.axes}
        kept = [axis for axis in moved.collective.axes or () if axis not in planned_axes]
        if planned and kept:
            return self._add("sharded-further, axis", moved, leaf, ", ".join(map(repr, kept)))
        if leaf in self.params and moved.axes.isdisjoint(self.batch_axes):
            self.gathered_for_nothing.add(leaf)
            _match(self._planned(leaf, "gradient"))
            return self._add("batch-not-split", moved, leaf)
        _match(planned)  # it is gathered as planned too
        return self._add("again" if planned else "sharded-further", moved, leaf)

    def _file_matrix(self, moved: _Moved) -> bool:
        """Whether `training.by_matrix` moves it."""
        if f"{BY_MATRIX}/" not in moved.name:
            return False
        self.matrices.append(moved.collective)
        return True

    def _file_argument(self, moved: _Moved) -> bool:
        if moved.collective.path is None or moved.leaf is not None:
            return False
        # Rows of the batch that are sent to experts
        return self._file_expected_activation(moved) or self._add("batch", moved)

    def _file_update(self, moved: _Moved) -> bool:
        """Whether it seems to move the update of a weight whose optimizer state is sharded unlike
        it: neither in the forward nor in the backward pass, with the size of one of them."""
        # `jit(step)/jvp()/dot_general` is of the forward pass
        is_differentiated = "jvp(" in moved.name or "transpose(" in moved.name
        if moved.kind in _REDUCTIONS or is_differentiated:
            return False
        for path, sizes in self.sizes_of_update.items():
            if moved.size_of_one in sizes:
                _match(self._planned(path, "gradient", "update"))
                return self._add("state-unlike-weight", moved, path)
        return False

    def _file_expected_activation(self, moved: _Moved) -> bool:
        if not moved.axes <= self.axes_of_activations:
            return False
        self.activations.append(moved.collective)
        return True

    def _file_computed_weight(self, moved: _Moved) -> bool:
        """Whether it seems to gather a weight that a loop has changed."""
        if not moved.is_in_loop:
            return False
        for expected in self.expected:
            is_whole = expected.is_untouched and expected.left == moved.size_of_one
            is_weight = expected.planned.why == "weight" and expected.is_like(moved.collective)
            if is_whole and is_weight:
                _match(self._planned(expected.path, "weight"))
                return self._add("again", moved, expected.path)
        return False

    def _file_gradient(self, moved: _Moved) -> bool:
        """Whether it reduces a gradient that is reduced already, or in each trip of a loop."""
        path = self._gradient(moved)
        if path is None:
            return False
        if path in self.gathered_for_nothing:
            return self._add("batch-not-split", moved, path)
        if not moved.is_in_loop and not self._is_reduced(path, moved):
            return False
        for expected in self._reductions(path, moved):
            # Over some axes in the loop, and over the others after it
            expected.axes -= moved.axes
            expected.left = expected.left if expected.axes else 0
        if moved.is_in_loop:
            return self._add("reduction-inside-loop", moved, path)
        return self._add("again, gradients", moved)

    def _file_each_use(self, moved: _Moved) -> bool:
        """Whether it reduces the gradient of one of several uses of a weight, as of a table that is
        embedding and head."""
        if moved.kind not in _REDUCTIONS or moved.is_in_loop:
            return False
        for path, sizes in self.sizes_of_gradient.items():
            is_like = self.roles[path].uses > 1 and moved.size_of_one in sizes
            if is_like and self._is_reduced(path, moved):
                return self._add("each-use", moved, path)
        return False

    def _file_batch_sum(self, moved: _Moved) -> bool:
        """Whether it adds up values of all rows, as batch norm does, with the gradients of such."""
        if moved.kind != "all-reduce" or not moved.axes <= {*self.batch_axes}:
            return False
        path = self._gradient(moved)
        is_gradient = path is not None and (moved.is_in_loop or not self._is_reduced(path, moved))
        if is_gradient or not (_SUM.search(moved.name) or self._is_of_no_gradient(moved)):
            return False
        self.sums.append(moved)
        return True

    def _is_of_no_gradient(self, moved: _Moved) -> bool:
        """Whether only vectors have its size, each of them used once. TPUs name all results of a
        fusion alike: the sum over rows is a `transpose(jvp())/dot_general` too."""
        fitting = self._of_size(moved)
        is_once = all(self.roles[x].uses == 1 and len(self.params[x].shape) == 1 for x in fitting)
        return bool(fitting) and is_once and "psum" not in moved.name

    def _file_matrix_optimizer(self, moved: _Moved) -> bool:
        is_differentiated = "jvp(" in moved.name or "transpose(" in moved.name
        if is_differentiated or not any(role.is_multiplied for role in self.roles.values()):
            return False
        return self._add("matrix-optimizer", moved)

    def _file_activation(self, moved: _Moved) -> bool:
        if not moved.is_in_loop:
            return self._add("activation", moved)
        if not self.gathers_in_loop:
            return self._add("activation, loop", moved)
        return self._add("activation, loop, gathered", moved)

    # ---------------------------------------------------------------- as planned, and not quite

    def _compare(self, moved: _Moved, planned: PlannedTransfer) -> None:
        """Files a collective that is planned, but in another dtype or by another op."""
        collective, path = moved.collective, planned.path or ""
        self.leaves[-1] = path
        size, planned_size = (jnp.dtype(x.dtype).itemsize for x in (collective, planned))
        if size > planned_size:
            is_own = self.platform == "cpu" and self._is_widened(collective, planned)
            self._add("wider", moved, path, planned.dtype, is_own=is_own)
        elif size < planned_size:
            self._add("narrower", moved, path, planned.dtype, is_own=True)
        if planned.kind == "all-gather" and (collective.wire_bytes or 0) >= (collective.bytes or 0):
            self._add("by-all-reduce", moved, path, is_own=True)

    def _is_widened(self, collective: Collective, planned: PlannedTransfer) -> bool:
        """Whether a CPU's compiler chose the wider dtype: it has no collectives of 16-bit floats,
        and gathers before a cast."""
        if (planned.dtype, collective.dtype) not in _WIDENED_ON_CPUS:
            return False
        if self.params[planned.path or ""].dtype.itemsize <= jnp.dtype(planned.dtype).itemsize:
            return True
        is_cast = (collective.op_name or "").endswith("convert_element_type")
        return is_cast or collective.is_widened

    # ---------------------------------------------------------------- planned transfers

    def _planned(self, path: str, *whys: str) -> list[_Expected]:
        """What is planned for a leaf, for these purposes."""
        return [x for x in self.of_leaf.get(path, ()) if x.planned.why in whys]

    def _is_reduced(self, path: str, moved: _Moved) -> bool:
        """Whether the reductions of a gradient that are planned over these axes have a match."""
        return not any(x.is_untouched for x in self._reductions(path, moved))

    def _reductions(self, path: str, moved: _Moved) -> list[_Expected]:
        axes = moved.axes or {*self.batch_axes}
        return [x for x in self._planned(path, "gradient") if not x.axes.isdisjoint(axes)]

    # ---------------------------------------------------------------- computed values

    def _gradient(self, moved: _Moved) -> str | None:
        """The parameter whose gradient it seems to reduce: in the backward pass or in a loop, with
        the size of the full parameter, of one of its layers, or of a part of those."""
        # `jit(step)/transpose(jvp())/dot_general` is of the backward pass
        is_of_gradient = moved.is_in_loop or "transpose(" in moved.name
        if moved.kind not in _REDUCTIONS or not is_of_gradient:
            return None
        # One that is not reduced yet, if there is one.
        return min(
            self._of_size(moved), key=lambda path: self._is_reduced(path, moved), default=None
        )

    def _of_size(self, moved: _Moved) -> list[str]:
        """The leaves whose gradients have its size."""
        return [
            path for path, sizes in self.sizes_of_gradient.items() if moved.size_of_one in sizes
        ]

    def _sizes(self, leaf: PlannedLeaf, layers: int = 1) -> set[int]:
        """The elements of a leaf or of one of its layers, in full and split over some axes."""
        parts = {1}
        for axis in {*get_names_from_partition_spec(leaf.given), *self.batch_axes}:
            parts |= {part * self.sizes[axis] for part in parts}
        return {size // part for size in (leaf.size, leaf.size // layers) for part in parts}

    def _is_alike(self, leaf: PlannedLeaf, state: PlannedLeaf) -> bool:
        """Whether optimizer state is sharded as its parameter is, or further."""
        rank = len(leaf.shape)
        pairs = zip(self._split(leaf, rank), self._split(state, rank), strict=False)
        return all(of_leaf <= of_state for of_leaf, of_state in pairs)

    def _split(self, leaf: PlannedLeaf, rank: int) -> list[set[str]]:
        """The axes that split each dim."""
        split = {axis for axis, size in self.sizes.items() if size > 1}
        return [split.intersection(axes_of(entry)) for entry in dim_entries(leaf.given, rank)]

    # ---------------------------------------------------------------- differences

    def batch_sums(self) -> list[Collective]:
        """The sums over all rows. If weights are not gathered, they are what is moved instead."""
        return [] if self._are_weights_missing() else [moved.collective for moved in self.sums]

    def _are_weights_missing(self) -> bool:
        gathers = [x for x in self.expected if x.planned.kind == "all-gather"]
        return any(x.is_untouched and not self._is_merged(x) for x in gathers)

    def by_compiler(self) -> Iterator[Unplanned]:
        """The differences that are the compiler's own."""
        yield from self._explained(self.of_compiler)
        merged = [x.path for x in self.expected if self._is_merged(x)]
        if merged:
            yield explain("merged", paths=merged)

    def _is_merged(self, expected: _Expected) -> bool:
        """Whether the step gathers the same more often than the program: twice in one way, or in
        each trip of a loop that does not change it."""
        planned = expected.planned
        if planned.kind != "all-gather" or not expected.left:
            return False
        if expected.is_untouched:
            of_leaf = self.of_leaf[expected.path]
            return any(other.planned == planned and not other.left for other in of_leaf)
        layers = max(gather.parts for gather in self.roles[expected.path].gathers)
        of_all_layers = layers * elements(planned.bytes, planned.dtype)
        return expected.left % of_all_layers == 0

    def unplanned(self) -> Iterator[Unplanned]:
        """The differences, and last the planned transfers that the program does not have."""
        if self._are_weights_missing():
            for moved in self.sums:
                self._file_activation(moved)
        yield from self._explained(self.differences)
        missing: dict[tuple[str, str], list[str]] = defaultdict(list)
        for expected in self.expected:
            if expected.left and not self._is_merged(expected):
                missing[expected.planned.kind, expected.planned.why].append(expected.path)
        for (kind, why), paths in missing.items():
            case = "not-moved, again" if "again" in why else "not-moved"
            yield explain(case, kind, why, paths=paths)

    def _explained(self, filed: _Filed) -> Iterator[Unplanned]:
        for (case, kind, detail), members in filed.items():
            moved = [collective for collective, _ in members]
            paths = [leaf for _, leaf in members if leaf is not None]
            yield explain(case, kind, detail, moved, paths, self.batch_axes, self.platform)


# The first that applies to a collective settles it, and says so; the last always does.
_RULES = (
    Matcher._file_unreadable,
    Matcher._file_across_axes,
    Matcher._match_planned,
    Matcher._match_some_of_axes,
    Matcher._match_full_gradient,
    Matcher._file_matrix,
    Matcher._file_gather,
    Matcher._file_argument,
    Matcher._file_update,
    Matcher._file_expected_activation,
    Matcher._file_computed_weight,
    Matcher._file_each_use,
    Matcher._file_batch_sum,
    Matcher._file_gradient,
    Matcher._file_matrix_optimizer,
    Matcher._file_activation,
)


def _is_done_by(moved: _Moved, parts: Sequence[_Expected]) -> bool:
    """Whether an all-reduce moves what these transfers would, of which none has a match yet; or, of
    a loop from which some trips were taken out, some of them."""
    if frozenset[str]().union(*(x.planned.axes for x in parts)) != moved.axes or not parts:
        return False
    first = parts[0]
    one_trip = elements(first.planned.bytes, first.planned.dtype)
    is_part = first.planned.count > 1 and moved.size_of_one == one_trip
    if is_part:
        return moved.size <= first.left
    return moved.size == first.left and all(x.is_untouched for x in parts)


def _match_some(moved: _Moved, parts: Sequence[_Expected]) -> None:
    """Notes that an all-reduce moves this much of what these transfers would."""
    of_first = parts[0].total
    for transfer in parts:
        transfer.left -= transfer.total * moved.size // of_first


def _match(expected: Iterable[_Expected]) -> None:
    for transfer in expected:
        transfer.left = 0


def elements(size: int | None, dtype: str) -> int:
    """The number of elements in `size` bytes; 0 if that is unknown."""
    return 0 if size is None else size // jnp.dtype(dtype).itemsize

"""Books the collectives of a program on the transfers that its plan predicts.

Compilers combine, split, reorder and peel collectives, so that the ops of a program and the
transfers of a plan are seldom one to one. So each planned transfer is an account of elements, from
which each collective of its kind, axes and leaf takes what it moves. The text of a program names
the leaf of a gathered weight. It names none for a gradient: one of the same size stands for it.
What no account takes is a difference, filed under a code.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import jax.numpy as jnp

from treeshard._core.mesh import axis_sizes
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import BY_MATRIX
from treeshard._trace.roles import Roles
from treeshard.communication._collectives import TINY, Collective, is_scalar
from treeshard.communication._differences import Unplanned, explain
from treeshard.communication._forecast import PlannedTransfer

_REDUCTIONS = ("all-reduce", "reduce-scatter")
# The op that a name ends in: `jit(step)/reduce_sum`, or one of several that were combined:
# `jit(step)/(reduce_sum:transpose(jvp())/dot_general)`
_SUM = re.compile(r"\breduce_\w+(?=[:)]|$)")


class _Moved(NamedTuple):
    """A collective, and what is asked of it.

    `name` is its `op_name`, such as `jit(step)/jvp()/while/body/dot_general`; `leaf` the plan's
    path of the argument that it moves, if that is in the plan. `size` counts the elements of all
    its executions, and `one` those of one.
    """

    number: int
    collective: Collective
    kind: str
    name: str
    leaf: str | None
    size: int
    one: int
    axes: frozenset[str]
    is_in_loop: bool

    @property
    def is_differentiated(self) -> bool:
        # `jit(step)/jvp()/dot_general` is of the forward pass, `transpose(jvp())` of the backward
        return "jvp(" in self.name or "transpose(" in self.name


class _Gather:
    """The account of a planned all-gather."""

    def __init__(self, planned: PlannedTransfer) -> None:
        self.planned, self.path = planned, planned.path or ""
        self.axes = frozenset(planned.axes)
        self.one = elements(planned.bytes, planned.dtype)
        self.total = self.left = self.one * planned.count


class _Gradient:
    """The account of a leaf's gradient: over which axes how many of its elements are not reduced.

    `steps` are the planned transfers, each with the number of parts that those before it leave on
    each device. `units` are the elements that one reduction may have: all, or those of one trip of
    a loop; `layer` those of one layer of a leaf that is not scattered: no gather tells its layers.
    """

    def __init__(self, leaf: PlannedLeaf, planned: Sequence[PlannedTransfer]) -> None:
        self.path, self.shape = leaf.path, leaf.shape
        self.total = elements(planned[0].total_bytes, planned[0].dtype)
        of_steps = [elements(x.total_bytes, x.dtype) for x in planned]
        self.steps = [(x, self.total // size) for x, size in zip(planned, of_steps, strict=True)]
        self.left = {axis: self.total for x in planned for axis in x.axes}
        self.units = {self.total, elements(planned[0].bytes, planned[0].dtype)}
        self.scattered = {axis for x in planned if x.kind == "reduce-scatter" for axis in x.axes}
        is_stack = len(leaf.shape) > 1 and not self.scattered
        layers = math.prod(leaf.shape[:1]) if is_stack else 1
        self.layer = self.total // layers

    def take(self, axes: frozenset[str], size: int) -> None:
        for axis in axes & self.left.keys():
            self.left[axis] = max(self.left[axis] - size, 0)

    def has(self, axes: frozenset[str], size: int) -> bool:
        """Whether so many elements are left over each of some axes."""
        return bool(axes) and all(self.left.get(axis, 0) >= size for axis in axes)

    def missing(self) -> Iterator[PlannedTransfer]:
        for planned, _ in self.steps:
            if any(self.left[axis] for axis in planned.axes):
                yield planned


# The collectives of each case, kind and detail, with the leaf that they concern.
_Filed = dict[tuple[str, str, str], list[tuple[Collective, str | None]]]


class Matcher:
    """Books collectives on planned transfers, and collects what has no account.

    Args:
        plan: The plan of the step.
        planned: What it predicts.
        names: The plan's path of each argument, or `None`.
        roles: What the step does with each leaf.
        batch_axes: The axes that split the batch.
        platform: The platform of the program; `None` if that is unknown.

    Attributes:
        activations: Collectives of computed values along axes that shard parameters but not the
            batch, or along which parameters stay split where they are used.
        matrices: Those of `training.by_matrix`.
        leaves: The leaf that each collective is of, or `None`.
    """

    def __init__(
        self,
        plan: Plan,
        planned: Sequence[PlannedTransfer],
        names: Mapping[str, str | None],
        roles: Roles,
        batch_axes: Sequence[str],
        platform: str | None,
    ) -> None:
        self.names, self.roles, self.platform = names, roles, platform
        self.batch_axes, self.sizes = batch_axes, axis_sizes(plan.mesh)
        self.plan_leaves = {leaf.path: leaf for leaf in plan.leaves}
        self.axes_of_activations = {*get_names_from_partition_spec(plan)} - {*batch_axes}
        self.axes_of_activations.update(*(role.split for role in roles.values()))
        self.gathers: list[_Gather] = []
        self.gradients: list[_Gradient] = []
        self._open(planned)
        self.differences: _Filed = defaultdict(list)
        self.of_compiler: _Filed = defaultdict(list)
        self.activations: list[Collective] = []
        self.matrices: list[Collective] = []
        self.leaves: list[str | None] = []
        self.sums: list[_Moved] = []
        # Weights that are gathered along axes that do not split the batch.
        self.gathered_for_nothing: set[str] = set()

    def _open(self, planned: Sequence[PlannedTransfer]) -> None:
        """Opens the accounts, but for scalars: no text tells these from a loss."""
        of_gradients: dict[str, list[PlannedTransfer]] = defaultdict(list)
        for transfer in planned:
            if transfer.path is None or transfer.bytes <= TINY:
                continue
            if not self.plan_leaves[transfer.path].shape:
                continue
            if transfer.why == "gradient":
                of_gradients[transfer.path].append(transfer)
            else:
                self.gathers.append(_Gather(transfer))
        for path, transfers in of_gradients.items():
            self.gradients.append(_Gradient(self.plan_leaves[path], transfers))

    def match(self, compiled: Sequence[Collective]) -> None:
        """Books all collectives: first what is exactly as planned, then what may stand for it."""
        left = list(filter(None, map(self._moved, range(len(compiled)), compiled)))
        for rule in _RULES:
            left = [moved for moved in left if not rule(self, moved)]

    def _moved(self, number: int, collective: Collective) -> _Moved | None:
        leaf = None if collective.path is None else self.names.get(collective.path)
        self.leaves.append(leaf)
        if collective.axes == () or is_scalar(collective) or collective.completes is not None:
            return None
        name = collective.op_name or ""
        return _Moved(
            number,
            collective,
            collective.kind,
            name,
            leaf,
            elements(collective.total_bytes, collective.dtype),
            elements(collective.bytes, collective.dtype),
            frozenset(collective.axes or ()),
            (collective.count or 0) > 1 or "while/body" in name,
        )

    def _file(
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
        self.leaves[moved.number] = self.leaves[moved.number] or leaf
        # Reductions of the gradients of such weights belong to their gathers.
        kind = "all-gather" if case == "batch-not-split" else moved.kind
        filed[case, kind, detail].append((moved.collective, leaf))
        return True

    # ---------------------------------------------------------------- as planned

    def _file_unreadable(self, moved: _Moved) -> bool:
        if None in (moved.collective.total_bytes, moved.collective.wire_bytes):
            return self._file("other, unreadable", moved, moved.leaf)
        if moved.collective.axes is None:
            return self._file("other, devices", moved, moved.leaf)
        return False

    def _book_gather(self, moved: _Moved) -> bool:
        if moved.kind != "all-gather":
            return False
        for account in sorted(self.gathers, key=lambda x: x.left != moved.size):
            if account.axes == moved.axes and self._may_gather(account, moved):
                account.left -= moved.size
                self._note_dtype(moved, account.planned)
                return True
        return False

    def _may_gather(self, account: _Gather, moved: _Moved) -> bool:
        if account.left < moved.size:
            return False
        if account.planned.why != "update" and moved.leaf == account.path:
            return True
        # No text names the leaf of an update, or of a weight that the step changes first.
        is_changed = any(x.is_changed for x in self.roles[account.path].gathers)
        if moved.leaf is not None or not (account.planned.why == "update" or is_changed):
            return False
        return moved.size == account.left or moved.one == account.one

    def _book_gradient(self, moved: _Moved) -> bool:
        """Whether it is a planned reduction, of all or of some layers of a leaf."""
        for gradient in self._nearest(moved):
            for planned, parts in gradient.steps:
                is_like = (planned.kind, frozenset(planned.axes)) == (moved.kind, moved.axes)
                is_unit = moved.one * parts in {*gradient.units, gradient.layer}
                # Layer by layer, all together as much as is planned
                is_unit = is_unit or moved.size * parts == gradient.total
                if is_like and is_unit and gradient.has(moved.axes, moved.size * parts):
                    gradient.take(moved.axes, moved.size * parts)
                    self._note_dtype(moved, planned)
                    return True
        return False

    def _book_gradient_otherwise(self, moved: _Moved) -> bool:
        """Whether it reduces a gradient over some of its axes, in parts, or in full where a
        reduce-scatter was planned."""
        if moved.kind not in _REDUCTIONS:
            return False
        for gradient, parts in self._fitting(moved, by_layer=True):
            if not gradient.has(moved.axes, moved.size * parts):
                continue
            gradient.take(moved.axes, moved.size * parts)
            if moved.kind == "reduce-scatter" or moved.axes.isdisjoint(gradient.scattered):
                self._note_dtype(moved, gradient.steps[-1][0])
                return True
            is_asked = self.roles[gradient.path].is_scattered
            case = "all-reduce, scattered" if is_asked else "all-reduce"
            # XLA's compiler for CPUs never scatters what the partitioner reduces.
            is_own = self.platform == "cpu"
            return self._file(case, moved, None if is_own else gradient.path, is_own=is_own)
        return False

    def _nearest(self, moved: _Moved) -> Iterator[_Gradient]:
        """All gradients that it may be of, those of which exactly so much is left first: the
        gradient of a final norm has the size of one layer of the other norms."""
        fits = [x for x in self.gradients if moved.leaf in (None, x.path)]
        exact = [x for x in fits if moved.size in {x.left.get(axis) for axis in moved.axes}]
        yield from exact
        yield from (x for x in fits if x not in exact)

    def _fitting(self, moved: _Moved, *, by_layer: bool) -> Iterator[tuple[_Gradient, int]]:
        """The gradients that have its size if they are split into so many parts; last, if
        `by_layer`, those of which one layer has."""
        nearest = list(self._nearest(moved))
        parts = {gradient.path: self._parts(gradient, moved) for gradient in nearest}
        for is_layer in (False, True)[: 1 + by_layer]:
            for gradient in nearest:
                units = {gradient.layer} if is_layer else gradient.units
                fitting = [n for n in parts[gradient.path] if moved.one * n in units]
                if fitting:
                    yield gradient, fitting[0]

    def _parts(self, gradient: _Gradient, moved: _Moved) -> list[int]:
        """Into how many parts other axes than those of a reduction may split a gradient."""
        spec = self.plan_leaves[gradient.path].given
        split = {*get_names_from_partition_spec(spec)} - {*self.batch_axes}
        return _products([n for axis, n in self.sizes.items() if axis not in moved.axes | split])

    def _note_dtype(self, moved: _Moved, planned: PlannedTransfer) -> None:
        """Files a collective that is planned, but in another dtype or by another op."""
        collective, path = moved.collective, planned.path or ""
        self.leaves[moved.number] = path
        size, planned_size = (jnp.dtype(x.dtype).itemsize for x in (collective, planned))
        if size > planned_size:
            is_own = self.platform == "cpu" and self._is_widened(collective, planned)
            case = "wider" if is_own else "other, wider"
            self._file(case, moved, path, planned.dtype, is_own=is_own)
        elif size < planned_size:
            self._file("narrower", moved, path, planned.dtype, is_own=True)
        if planned.kind == "all-gather" and (collective.wire_bytes or 0) >= (collective.bytes or 0):
            self._file("by-all-reduce", moved, path, is_own=True)

    def _is_widened(self, collective: Collective, planned: PlannedTransfer) -> bool:
        """Whether a CPU's compiler chose the wider dtype: it has no collectives of 16-bit floats,
        and gathers before a cast."""
        if collective.dtype != "float32" or planned.dtype not in ("bfloat16", "float16"):
            return False
        own = self.plan_leaves[planned.path or ""].dtype
        if own.itemsize <= jnp.dtype(planned.dtype).itemsize:
            return True
        is_cast = (collective.op_name or "").endswith("convert_element_type")
        return is_cast or collective.is_widened

    # ---------------------------------------------------------------- differences

    def _take_matrix(self, moved: _Moved) -> bool:
        """Whether `training.by_matrix` moves it."""
        if f"{BY_MATRIX}/" not in moved.name:
            return False
        self.matrices.append(moved.collective)
        return True

    def _file_gather(self, moved: _Moved) -> bool:
        """Whether it gathers a leaf in a way that is not planned, or more often."""
        leaf = moved.leaf
        if leaf is None or moved.kind != "all-gather":
            return False
        planned = [x for x in self.gathers if x.path == leaf]
        known = frozenset[str]().union(*(x.axes for x in planned))
        kept = [axis for axis in moved.collective.axes or () if axis not in known]
        if planned and kept:
            return self._file("sharded-further, axis", moved, leaf, ", ".join(map(repr, kept)))
        if self.roles[leaf].is_used and moved.axes.isdisjoint(self.batch_axes):
            self.gathered_for_nothing.add(leaf)
            for gradient in self.gradients:
                if gradient.path == leaf:
                    gradient.left = dict.fromkeys(gradient.left, 0)
            return self._file("batch-not-split", moved, leaf)
        for account in planned:  # it is gathered as planned too
            account.left = 0
        return self._file("again" if planned else "sharded-further", moved, leaf)

    def _file_argument(self, moved: _Moved) -> bool:
        if moved.collective.path is None or moved.leaf is not None:
            return False
        # Rows of the batch that are sent to experts
        return self._take_activation(moved) or self._file("activation, batch", moved)

    def _take_activation(self, moved: _Moved) -> bool:
        if not moved.axes <= self.axes_of_activations:
            return False
        self.activations.append(moved.collective)
        return True

    def _take_batch_sum(self, moved: _Moved) -> bool:
        """Whether it adds up values of all rows, as batch norm does, with the gradients of such."""
        if moved.kind != "all-reduce" or not moved.axes <= {*self.batch_axes}:
            return False
        fitting = [x for x, _ in self._fitting(moved, by_layer=moved.is_in_loop)]
        if moved.is_in_loop and fitting:
            return False
        # TPUs name all results of a fusion alike: such a sum is a `transpose(jvp())/dot_general`
        # too. It is one where only vectors have its size, each of them used once.
        is_vector = all(self.roles[x.path].uses == 1 and len(x.shape) == 1 for x in fitting)
        is_of_vector = bool(fitting) and is_vector and "psum" not in moved.name
        if _SUM.search(moved.name) is None and not is_of_vector:
            return False
        self.sums.append(moved)
        return True

    def _file_gradient(self, moved: _Moved) -> bool:
        """Whether it reduces a gradient that is reduced already, or in each trip of a loop."""
        if moved.kind not in _REDUCTIONS:
            return False
        is_backward = moved.is_in_loop or "transpose(" in moved.name
        fitting = [x for x, _ in self._fitting(moved, by_layer=moved.is_in_loop)]
        fitting.sort(key=lambda x: not x.has(moved.axes, 1))  # what is not reduced yet, first
        for gradient in fitting:
            path = gradient.path
            if not is_backward and self.roles[path].uses < 2:
                continue
            if path in self.gathered_for_nothing:
                return self._file("batch-not-split", moved, path)
            gradient.take(moved.axes, gradient.total)
            return self._file("inside-loop" if moved.is_in_loop else "again, gradient", moved, path)
        return False

    def _file_activation(self, moved: _Moved) -> bool:
        is_multiplied = any(role.is_multiplied for role in self.roles.values())
        if is_multiplied and not moved.is_differentiated:
            return self._file("other, update", moved)
        return self._file("activation, loop" if moved.is_in_loop else "activation", moved)

    # ---------------------------------------------------------------- results

    def batch_sums(self) -> list[Collective]:
        """The sums over all rows. If weights are not gathered, they are what is moved instead."""
        return [] if self._are_weights_missing() else [moved.collective for moved in self.sums]

    def _are_weights_missing(self) -> bool:
        return any(x.left == x.total and not self._is_merged(x) for x in self.gathers)

    def by_compiler(self) -> Iterator[Unplanned]:
        """The differences that are the compiler's own."""
        yield from self._explained(self.of_compiler)
        merged = [x.path for x in self.gathers if x.left and self._is_merged(x)]
        if merged:
            yield explain("merged", paths=merged)

    def _is_merged(self, account: _Gather) -> bool:
        """Whether the step gathers the same more often than the program: twice in one way, or in
        each trip of a loop that does not change it."""
        if account.left == account.total:
            same = [x for x in self.gathers if x.planned == account.planned]
            return any(not x.left for x in same)
        layers = max(gather.parts for gather in self.roles[account.path].gathers)
        return account.left % (layers * account.one) == 0

    def unplanned(self) -> Iterator[Unplanned]:
        """The differences, and last the planned transfers that the program does not have."""
        if self._are_weights_missing():
            for moved in self.sums:
                self._file_activation(moved)
        yield from self._explained(self.differences)
        gathers = (x.planned for x in self.gathers if x.left and not self._is_merged(x))
        gradients = (x for gradient in self.gradients for x in gradient.missing())
        missing: dict[tuple[str, str], list[str]] = defaultdict(list)
        for transfer in chain(gathers, gradients):
            missing[transfer.kind, transfer.why].append(transfer.path or "")
        for (kind, why), paths in missing.items():
            yield explain("not-moved", kind, why, paths=paths)

    def _explained(self, filed: _Filed) -> Iterator[Unplanned]:
        for (case, kind, detail), members in filed.items():
            moved = [collective for collective, _ in members]
            paths = [leaf for _, leaf in members if leaf is not None]
            yield explain(case, kind, detail, moved, paths, self.batch_axes, self.platform)


# Each is tried on all that those before it leave. The last takes what is left.
_RULES: Sequence[Callable[[Matcher, _Moved], bool]] = (
    Matcher._file_unreadable,
    Matcher._book_gather,
    Matcher._book_gradient,
    Matcher._take_matrix,
    Matcher._book_gradient_otherwise,
    Matcher._file_gather,
    Matcher._file_argument,
    Matcher._take_activation,
    Matcher._take_batch_sum,
    Matcher._file_gradient,
    Matcher._file_activation,
)


def _products(numbers: Sequence[int]) -> list[int]:
    """The products of some of these numbers, of none of them first."""
    chosen = (combinations(numbers, count) for count in range(len(numbers) + 1))
    return sorted({math.prod(each) for each in chain.from_iterable(chosen)})


def elements(size: int | None, dtype: str) -> int:
    """The number of elements in `size` bytes; 0 if that is unknown."""
    return 0 if size is None else size // jnp.dtype(dtype).itemsize

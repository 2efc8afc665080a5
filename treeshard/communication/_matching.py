"""Books the collectives of a program on the transfers that its plan predicts.

Compilers combine, split, reorder and peel collectives, so the ops of a program and the transfers of
a plan are seldom one to one. Each planned transfer is therefore an account of elements. Each
collective of the same kind, axes and leaf takes its elements from the account. The text of a
program names the leaf of a gathered weight. It does not name the leaf of a gradient, so the size
decides. Large collectives choose first, and prefer an account that others began: a compiler may
peel a trip off a loop, and one layer of a leaf may be as large as another leaf.

The first rule that takes a collective decides. Exact rules come first, so that a collective that
may represent a transfer does not use up an account that another collective fits exactly.

 1. The axes or the bytes of the collective are unknown: `other`.
 2. It is an all-gather of a planned leaf, axes and size: booked.
 3. It is a planned reduction of a full gradient or of some layers: booked.
 4. It is an exchange of `training.by_matrix`, by its name: listed separately.
 5. It reduces a gradient over some of its axes, in parts, or in full where a reduce-scatter was
    planned: booked. In full, it is also reported as `all-reduce`, or as the compiler's choice.
 6. It reduces one layer in each trip of a loop, of a stack that is gathered before the loop: as 5.
 7. It runs an unknown number of times: it closes the account that it fits. In a loop, or if it fits
    no account, it is `other`.
 8. It moves a vector that the update broadcasts, as Adafactor does: listed separately.
 9. It is another all-gather of a leaf: `again`, `sharded-further`, or `batch-not-split`.
10. It moves computed values, or rows of the batch, along axes that do not split the batch, as in
    tensor parallelism and between experts: listed separately.
11. It is a sum over all rows of the batch, such as a sum of batch norm: listed separately.
12. It gathers a gradient for optimizer state that is sharded less: `state-unlike-weight`.
13. It is a reduction in the backward pass, and accounts are open for leaves that the step combines
    before the batch: `as-one-product`.
14. It reduces elements of the size of a booked gradient: `again`, or `inside-loop`.
15. Any other collective: `activation`, or `other` in an update that multiplies matrices.

An account that stays open is `as-one-product` for combined leaves, and otherwise `not-moved`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import AxisType

from treeshard._core.mesh import axes_of_type, axis_sizes
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import BY_MATRIX
from treeshard._trace.roles import CONSTRAINT, Role, Roles
from treeshard.communication._collectives import (
    TINY,
    Collective,
    bytes_text,
    is_scalar,
    total_bytes,
)
from treeshard.communication._differences import EXPLICIT, SCATTER_GRADIENTS, Unplanned, explain
from treeshard.communication._forecast import PlannedTransfer

_REDUCTIONS = ("all-reduce", "reduce-scatter")
# A sum at the end of a name: `jit(step)/reduce_sum`, or among combined ops:
# `jit(step)/(reduce_sum:transpose(jvp())/dot_general)`
_SUM = re.compile(r"\breduce_\w+(?=[:)]|$)")
# Elementwise ops do not sum, but the partitioner may move a sum behind them.
_SUM_BEHIND = re.compile(r"\b(neg|add_any|sub|mul|div)(?=[:)]|$)")
# Differences of dtypes that the step or the compiler may have caused
_OF_GRADIENTS = "{{size}} in {} instead of {}"
# Choices of the compiler
_IN_FULL = "all-reduces full gradients ({size}) where a reduce-scatter was planned"
_IN_DTYPE = "communicates {{size}} in {} instead of {}"
_BY_REDUCING = "gathers {size} by all-reduces, which send twice the bytes"
_MERGED = "gathers once what the step gathers several times"


class _Moved(NamedTuple):
    """A collective, with the properties that the rules use."""

    number: int  # its place in the program
    collective: Collective
    kind: str
    name: str  # JAX's name of the operation
    leaf: str | None  # the plan's path of the argument that it moves, if the plan has it
    size: int  # the elements of all its executions
    one: int  # the elements of one execution
    axes: frozenset[str]
    is_in_loop: bool
    is_uncounted: bool

    @property
    def is_forward_sum(self) -> bool:
        """Whether it is a sum of the forward pass, and therefore never a gradient."""
        is_forward = "jvp(" in self.name and "transpose(" not in self.name
        return is_forward and _SUM.search(self.name) is not None

    @property
    def is_of_loss(self) -> bool:
        # `jit(step)/jvp()/dot_general` is of the forward pass, `transpose(jvp())` of the backward.
        return "jvp(" in self.name or "transpose(" in self.name or bool(self.collective.path)


class _Difference(NamedTuple):
    """The properties that collectives of one report share: see `explain`."""

    code: str
    kind: str  # empty if the report has collectives of several kinds
    detail: str
    axes: tuple[str, ...]  # the axes that the report names


_PRODUCT = _Difference("as-one-product", "", "", ())


class _Gather:
    """The account of a planned all-gather."""

    def __init__(self, planned: PlannedTransfer, role: Role) -> None:
        self.planned, self.path = planned, planned.path
        self.axes = frozenset(planned.axes)
        self.one = _elements(planned.bytes, planned.dtype)
        self.total = self.left = self.one * planned.count
        self.is_update = planned.why == "update"
        # No text names the leaf of an update, or of a weight that the step changes first.
        self.may_be_unnamed = self.is_update or any(x.is_changed for x in role.gathers)
        # The elements of all layers, gathered once each
        self.all_layers = self.one * max((gather.parts for gather in role.gathers), default=1)

    def has(self, moved: _Moved) -> bool:
        if self.axes != moved.axes or self.left < moved.size:
            return False
        if moved.leaf is not None:
            return moved.leaf == self.path and not self.is_update
        return self.may_be_unnamed and (moved.size == self.left or moved.one == self.one)


class _Gradient:
    """The account of a leaf's gradient: for each axis, the number of elements not yet reduced.

    `units` has the numbers of elements that one reduction may have: the full gradient, or one trip
    of a loop. `layer` is the number of elements in one layer of a leaf that is not scattered,
    because gathers do not show its layers.
    """

    def __init__(self, leaf: PlannedLeaf, planned: Sequence[PlannedTransfer]) -> None:
        self.path, self.shape, self.planned = leaf.path, leaf.shape, planned
        self.split = {*get_names_from_partition_spec(leaf.given)}
        self.total = _elements(planned[0].total_bytes, planned[0].dtype)
        self.left = {axis: self.total for x in planned for axis in x.axes}
        self.units = {self.total, _elements(planned[0].bytes, planned[0].dtype)}
        self.scattered = {axis for x in planned if x.kind == "reduce-scatter" for axis in x.axes}
        of_one_layer = self.total // math.prod(leaf.shape[:1])
        self.layer = self.total if self.scattered or len(leaf.shape) < 2 else of_one_layer
        # the elements of one layer of a stack that is gathered before the loop
        self.slice = of_one_layer

    def is_vector(self, *, by_layer: bool = False) -> bool:
        """Whether the leaf, or each of its layers, is a vector."""
        return sum(dim > 1 for dim in self.shape[by_layer:]) <= 1

    def take(self, axes: frozenset[str], size: int) -> None:
        for axis in axes & self.left.keys():
            self.left[axis] = max(self.left[axis] - size, 0)

    def has(self, axes: frozenset[str], size: int) -> bool:
        """Whether at least `size` elements are left over each of some axes."""
        return bool(axes) and all(self.left.get(axis, 0) >= size for axis in axes)

    def is_planned(self, moved: _Moved, planned: PlannedTransfer, parts: int) -> bool:
        """Whether a collective is a planned reduction of all or some layers of the gradient.

        The gradient is split into `parts` before the reduction.
        """
        if (planned.kind, frozenset(planned.axes)) != (moved.kind, moved.axes):
            return False
        # Layer by layer, the reductions together have the planned size.
        is_all = moved.size * parts == self.total
        is_unit = moved.one * parts in {*self.units, self.layer}
        return (is_unit or is_all) and self.has(moved.axes, moved.size * parts)


class Matcher:
    """Books collectives on planned transfers, and collects the collectives without an account.

    Args:
        plan: The plan of the step.
        planned: The transfers that the plan predicts.
        names: By the path of an argument, the path of its leaf in the plan.
        roles: What the step does with each leaf.
        batch_axes: The axes that split the batch.
        platform: The platform of the program; `None` if that is unknown.

    Attributes:
        activations: Collectives of computed values along axes that shard parameters but not the
            batch, or along which parameters stay split where they are used.
        matrices: The exchanges of `training.by_matrix`.
        sums: The sums over all rows of the batch.
        moments: The collectives of vectors that the update broadcasts.
        leaves: By the number of a collective, the path of its leaf, or `None`.
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
        self.axes_of_activations = {*get_names_from_partition_spec(plan)} - {*batch_axes}
        self.axes_of_activations.update(*(role.split for role in roles.values()))
        self.activations: list[Collective] = []
        self.matrices: list[Collective] = []
        self.sums: list[Collective] = []
        self.moments: list[Collective] = []
        self.leaves: list[str | None] = []
        # Weights that are gathered along axes that do not split the batch.
        self.needlessly_gathered: dict[str, tuple[str, ...]] = {}
        # The collectives of each difference, with the leaf that they concern.
        self.filed: dict[_Difference, list[tuple[Collective, str | None]]] = defaultdict(list)
        # The collectives of each choice of the compiler, by its phrase.
        self.choices: dict[str, list[Collective]] = defaultdict(list)
        # The collectives of gradients and updates in another dtype than planned, by a phrase.
        self.cast: dict[str, list[Collective]] = defaultdict(list)
        self.gathers: list[_Gather] = []
        of_gradients: dict[str, list[PlannedTransfer]] = defaultdict(list)
        leaves = {leaf.path: leaf for leaf in plan.leaves}
        for transfer in planned:
            # The text does not distinguish scalars from a loss.
            if transfer.path is None or transfer.bytes <= TINY or not leaves[transfer.path].shape:
                continue
            if transfer.why == "gradient":
                of_gradients[transfer.path].append(transfer)
            else:
                self.gathers.append(_Gather(transfer, roles[transfer.path]))
        self.gradients = {path: _Gradient(leaves[path], x) for path, x in of_gradients.items()}
        self.is_explicit = bool(axes_of_type(plan.mesh, AxisType.Explicit))
        self.vectors = {x.size for x in plan.leaves if roles[x.path].is_broadcast}
        # Arrays of optimizer state that are sharded less than their leaf, each with its gradient.
        self.less_sharded = [
            (source, gradient)
            for path, gradient in self.gradients.items()
            for source in sorted(roles[path].sources)
            if leaves[source].shape == gradient.shape
            and not gradient.scattered <= {*get_names_from_partition_spec(leaves[source].given)}
        ]

    def match(self, compiled: Sequence[Collective]) -> None:
        """Books all collectives: exact matches first, then collectives that may match."""
        self.leaves = [None if x.path is None else self.names.get(x.path) for x in compiled]
        left = [
            _read_moved(number, collective, self.leaves[number])
            for number, collective in enumerate(compiled)
            # A collective that completes another one belongs to it.
            if collective.axes != () and not is_scalar(collective) and collective.completes is None
        ]
        for rule in (
            self._file_unreadable,  # 1
            self._book_gather,  # 2
            self._book_gradient,  # 3
            self._take_matrix,  # 4
            self._book_gradient_otherwise,  # 5
            self._book_layer,  # 6
            self._book_uncounted,  # 7
            self._take_vector,  # 8
            self._file_gather,  # 9
            self._take_activation,  # 10
            self._take_batch_sum,  # 11
            self._file_for_state,  # 12
            self._file_product,  # 13
            self._file_gradient,  # 14
            self._file_activation,  # 15
        ):
            # Each rule sees the collectives that the rules before it left, large ones first: a
            # compiler may peel a trip off a loop, whose sums fit many accounts.
            booked = {x.number for x in sorted(left, key=lambda x: -x.size) if rule(x)}
            left = [moved for moved in left if moved.number not in booked]

    def _file(
        self,
        code: str,
        moved: _Moved,
        leaf: str | None = None,
        detail: str = "",
        axes: Sequence[str] = (),
    ) -> bool:
        self.leaves[moved.number] = self.leaves[moved.number] or leaf
        # The sums of needlessly gathered weights belong to their gathers.
        kind = "" if code in ("batch-not-split", "as-one-product") else moved.kind
        difference = _Difference(code, kind, detail, tuple(axes))
        self.filed[difference].append((moved.collective, leaf))
        return True

    # ---------------------------------------------------------------- as planned

    def _file_unreadable(self, moved: _Moved) -> bool:
        collective = moved.collective
        if None in (collective.bytes, collective.wire_bytes):
            return self._file("other", moved, moved.leaf, "with unknown axes or bytes")
        between = "between devices that do not form axes of the mesh"
        return collective.axes is None and self._file("other", moved, moved.leaf, between)

    def _book_gather(self, moved: _Moved) -> bool:
        if moved.kind != "all-gather" or moved.is_uncounted:
            return False
        accounts = [account for account in self.gathers if account.has(moved)]
        if not accounts:
            return False
        account = min(accounts, key=lambda x: x.left != moved.size)
        account.left -= moved.size
        self._note_planned(moved, account.planned)
        return True

    def _book_gradient(self, moved: _Moved) -> bool:
        if moved.is_uncounted:
            return False
        for gradient in self._sort_by_fit(moved):
            for planned in gradient.planned:
                parts = gradient.total // _elements(planned.total_bytes, planned.dtype)
                if gradient.is_planned(moved, planned, parts):
                    gradient.take(moved.axes, moved.size * parts)
                    self._note_planned(moved, planned)
                    return True
        return False

    def _book_gradient_otherwise(self, moved: _Moved) -> bool:
        """Whether it reduces a gradient over some of its axes, in parts, or in full where a
        reduce-scatter was planned."""
        if moved.kind not in _REDUCTIONS or moved.is_uncounted:
            return False
        for gradient, parts in self._find_fitting(moved, by_layer=True):
            if gradient.has(moved.axes, moved.size * parts):
                gradient.take(moved.axes, moved.size * parts)
                self._note_reduction(moved, gradient)
                return True
        return False

    def _book_layer(self, moved: _Moved) -> bool:
        """Whether each trip of a loop reduces the gradient of another layer."""
        if moved.kind not in _REDUCTIONS or not moved.is_in_loop or moved.is_uncounted:
            return False
        for gradient in self._sort_by_fit(moved):
            for parts in self._parts(gradient, moved):
                size = moved.size * parts
                # A slice of a matrix is a vector: the matrix is a stack only if all slices are
                # reduced in this way.
                is_stack = len(gradient.shape) > 2 or size == gradient.total
                is_slice = is_stack and moved.one * parts == gradient.slice
                if is_slice and gradient.has(moved.axes, size):
                    gradient.take(moved.axes, size)
                    self._note_reduction(moved, gradient)
                    return True
        return False

    def _book_uncounted(self, moved: _Moved) -> bool:
        """Whether it runs an unknown number of times, as in a branch, so it may match the plan."""
        if not moved.is_uncounted:
            return False
        path = self._close_gather(moved) if moved.kind == "all-gather" else self._close(moved)
        if path and (self.roles[path].is_updated_in_loop or not moved.is_in_loop):
            self.leaves[moved.number] = path
            return True
        return self._file("other", moved, moved.leaf, "that runs an unknown number of times")

    def _close_gather(self, moved: _Moved) -> str | None:
        """Closes the accounts of equal gathers of a leaf; returns the leaf's path."""
        fits = [x for x in self.gathers if (x.axes, x.one) == (moved.axes, moved.one)]
        fits = [x for x in fits if moved.leaf in (None, x.path)]
        fits.sort(key=lambda x: not x.left)
        for account in fits:
            if account.path == fits[0].path:
                account.left = 0
        return fits[0].path if fits else None

    def _close(self, moved: _Moved) -> str | None:
        """Closes the account of a gradient; returns the path of its leaf."""
        fits = [x for x, _ in self._find_fitting(moved, by_layer=True)]
        # Several branches may reduce the same gradient, or different gradients of one size.
        fits.sort(key=lambda x: not x.has(moved.axes, 1))
        if moved.kind not in _REDUCTIONS or not fits:
            return None
        fits[0].take(moved.axes, fits[0].total)
        return fits[0].path

    def _sort_by_fit(self, moved: _Moved) -> list[_Gradient]:
        """All gradients that it may reduce, exact fits first: the gradient of a final norm has the
        size of one layer of the other norms."""
        gradients = () if moved.is_forward_sum else self.gradients.values()
        fits = [x for x in gradients if moved.leaf in (None, x.path)]
        return sorted(fits, key=lambda x: self._fit(x, moved))

    def _fit(self, gradient: _Gradient, moved: _Moved) -> int:
        """0 if it completes an account that others began, 1 if it is all of one, otherwise 2."""
        sizes = {moved.size * parts for parts in self._parts(gradient, moved)}
        left = {gradient.left.get(axis) for axis in moved.axes}
        if left.isdisjoint(sizes):
            return 2
        return int(gradient.total in left)

    def _find_fitting(self, moved: _Moved, *, by_layer: bool) -> list[tuple[_Gradient, int]]:
        """The gradients that have its size if they are split into parts, with the number of parts.
        If `by_layer`, gradients with one layer of this size follow."""
        found = [(x, parts) for x in self._sort_by_fit(moved) for parts in self._parts(x, moved)]
        full = [(x, parts) for x, parts in found if moved.one * parts in x.units]
        layers = [(x, parts) for x, parts in found if moved.one * parts == x.layer]
        return full + layers if by_layer else full

    def _parts(self, gradient: _Gradient, moved: _Moved) -> list[int]:
        """The numbers of parts into which axes outside of a reduction may split a gradient: the
        products of the sizes of some of these axes, from 1."""
        done = moved.axes | (gradient.split - {*self.batch_axes})
        sizes = [size for axis, size in self.sizes.items() if axis not in done]
        counts = range(len(sizes) + 1)
        return sorted({math.prod(some) for count in counts for some in combinations(sizes, count)})

    def _note_planned(self, moved: _Moved, planned: PlannedTransfer) -> None:
        """Records a planned collective, which may have another dtype or be another op than planned.

        The planned gather of a weight has the dtype of the trace, so another dtype is the
        compiler's choice: CPUs have no collectives of 16-bit floats, and products on TPUs round to
        bfloat16. A planned reduction has the dtype of its gather, and an update the dtype of its
        leaf. For these, the trace may cast too.
        """
        collective = moved.collective
        self.leaves[moved.number] = planned.path
        dtypes = collective.dtype, planned.dtype
        if jnp.dtype(dtypes[0]).itemsize != jnp.dtype(dtypes[1]).itemsize:
            if planned.why in ("gradient", "update"):
                self.cast[_OF_GRADIENTS.format(*dtypes)].append(collective)
            else:
                self.choices[_IN_DTYPE.format(*dtypes)].append(collective)
        if planned.kind == "all-gather" and (collective.wire_bytes or 0) >= (collective.bytes or 0):
            self.choices[_BY_REDUCING].append(collective)

    def _note_reduction(self, moved: _Moved, gradient: _Gradient) -> None:
        """Records a reduction that replaces a planned one."""
        if moved.kind == "reduce-scatter" or moved.axes.isdisjoint(gradient.scattered):
            self._note_planned(moved, gradient.planned[-1])
        elif self.platform == "cpu":
            # The compiler for CPUs does so for every program.
            self.leaves[moved.number] = gradient.path
            self.choices[_IN_FULL].append(moved.collective)
        else:
            scattered = self.roles[gradient.path].scattered
            # On Explicit axes, the types already contain the constraint.
            if self.is_explicit and scattered in ("", CONSTRAINT):
                scattered = EXPLICIT
            self._file("all-reduce", moved, gradient.path, SCATTER_GRADIENTS[scattered])

    # ---------------------------------------------------------------- differences

    def _take_matrix(self, moved: _Moved) -> bool:
        """Whether `training.by_matrix` moves it."""
        return f"{BY_MATRIX}/" in moved.name and _append(self.matrices, moved)

    def _file_gather(self, moved: _Moved) -> bool:
        """Whether it gathers a leaf in another way than planned, or more often."""
        leaf = moved.leaf
        if leaf is None or moved.kind != "all-gather":
            return False
        planned = [x for x in self.gathers if x.path == leaf]
        known = frozenset[str]().union(*(x.axes for x in planned))
        further = [axis for axis in moved.collective.axes or () if axis not in known]
        is_for_nothing = self.roles[leaf].is_used and moved.axes.isdisjoint(self.batch_axes)
        if is_for_nothing and not planned:
            # Its gradients are summed over the same axes, and belong to the gathers: see rule 14.
            if leaf in self.gradients:
                self.gradients[leaf].left.clear()
            axes = self.needlessly_gathered.setdefault(leaf, moved.collective.axes or ())
            return self._file("batch-not-split", moved, leaf, axes=axes)
        if further:
            return self._file("sharded-further", moved, leaf, axes=further)
        # One report per leaf is enough: its planned gathers do not count as missing too.
        for account in planned:
            account.left = 0
        return self._file("again", moved, leaf)

    def _take_activation(self, moved: _Moved) -> bool:
        return moved.axes <= self.axes_of_activations and _append(self.activations, moved)

    def _take_vector(self, moved: _Moved) -> bool:
        """Whether it moves a vector that the update broadcasts."""
        if moved.leaf is not None:
            return self.roles[moved.leaf].is_broadcast and _append(self.moments, moved)
        is_known = moved.one in self.vectors and not moved.is_of_loss
        return is_known and _append(self.moments, moved)

    def _take_batch_sum(self, moved: _Moved) -> bool:
        """Whether it adds up values of all rows, or their gradients, as batch norm does."""
        if moved.kind != "all-reduce" or not moved.axes <= {*self.batch_axes}:
            return False
        fitting = [x for x, _ in self._find_fitting(moved, by_layer=moved.is_in_loop)]
        is_backward = "transpose(" in moved.name
        # In a loop, a sum of the size of a gradient reduces that gradient in each trip.
        is_sum = _SUM.search(moved.name) is not None and not (moved.is_in_loop and fitting)
        is_behind = is_backward and not fitting and _SUM_BEHIND.search(moved.name) is not None
        if not (is_sum or is_behind or self._has_size_of_vector(moved, fitting)):
            return False
        # If weights are not gathered, the step communicates such sums instead.
        if not self._has_all_gathers():
            return self._file_activation(moved)
        if is_backward and not fitting:
            self._close_vector(moved)
        return _append(self.sums, moved)

    def _has_size_of_vector(self, moved: _Moved, fitting: Sequence[_Gradient]) -> bool:
        """Whether it may be a sum, because only vectors have its size, and each is used once."""
        # TPUs give all results of a fusion one name, so the name of such a sum may be
        # `transpose(jvp())/dot_general`.
        if not fitting or "psum" in moved.name:
            return False
        if not moved.is_in_loop:
            return all(self.roles[x.path].uses == 1 and x.is_vector() for x in fitting)
        # Each trip reduces another layer, and these layers are booked already.
        stacks = [x for x in fitting if moved.size == x.total > x.layer]
        return any(x.is_vector(by_layer=True) for x in stacks)

    def _close_vector(self, moved: _Moved) -> None:
        """Closes the account of a vector whose elements may be sums of these elements."""
        # The partitioner reduces the gradient of `scale[:, None, None] * image` over the rows, and
        # then adds up its pixels. Every vector gets its sum, so only the assignment is uncertain.
        for gradient in self.gradients.values():
            is_part = gradient.is_vector() and moved.one % gradient.total == 0
            if is_part and gradient.has(moved.axes, gradient.total):
                gradient.take(moved.axes, gradient.total)
                self.leaves[moved.number] = gradient.path
                return

    def _file_for_state(self, moved: _Moved) -> bool:
        """Whether it gathers a gradient for optimizer state that is sharded less than its leaf."""
        if moved.kind != "all-gather" or moved.leaf is not None or moved.is_of_loss:
            return False
        for number, (path, gradient) in enumerate(self.less_sharded):
            fits = any(moved.one * x == gradient.total for x in self._parts(gradient, moved))
            if fits and moved.axes <= gradient.scattered:
                del self.less_sharded[number]
                return self._file("state-unlike-weight", moved, path)
        return False

    def _file_product(self, moved: _Moved) -> bool:
        """Whether it may reduce one gradient for several leaves that the step combines."""
        if moved.kind not in _REDUCTIONS or "transpose(" not in moved.name:
            return False
        fitting = [x for x, _ in self._find_fitting(moved, by_layer=False)]
        if fitting and (moved.is_in_loop or any(self.roles[x.path].uses > 1 for x in fitting)):
            return False
        is_open = any(x.has(moved.axes, 1) for x in self._find_combined())
        return is_open and self._file("as-one-product", moved)

    def _find_combined(self) -> list[_Gradient]:
        """The open gradients of leaves that are combined before the batch."""
        if not self._has_all_gathers():
            return []
        gradients = self.gradients.values()
        return [x for x in gradients if self.roles[x.path].is_combined and any(x.left.values())]

    def _has_all_gathers(self) -> bool:
        return not any(x.left == x.total and not self._is_merged(x) for x in self.gathers)

    def _file_gradient(self, moved: _Moved) -> bool:
        """Whether it reduces a gradient that is reduced already, or in each trip of a loop."""
        if moved.kind not in _REDUCTIONS:
            return False
        is_backward = moved.is_in_loop or "transpose(" in moved.name
        fitting = [x for x, _ in self._find_fitting(moved, by_layer=moved.is_in_loop)]
        fitting = [x for x in fitting if is_backward or self.roles[x.path].uses > 1]
        if not fitting:
            return False
        # Several gradients may have this size. For a gradient that is not reduced yet, this is the
        # planned reduction in another place.
        gradient = next((x for x in fitting if x.has(moved.axes, 1)), fitting[0])
        if gradient.path in self.needlessly_gathered:  # its reductions belong to its gathers
            axes = self.needlessly_gathered[gradient.path]
            return self._file("batch-not-split", moved, gradient.path, axes=axes)
        gradient.take(moved.axes, gradient.total)
        return self._file("inside-loop" if moved.is_in_loop else "again", moved, gradient.path)

    def _file_activation(self, moved: _Moved) -> bool:
        is_multiplied = any(role.is_multiplied for role in self.roles.values())
        # An update does not use rows of the batch.
        if is_multiplied and not moved.is_of_loss:
            return self._file("other", moved, detail="in an update that multiplies matrices")
        return self._file("activation", moved)

    # ---------------------------------------------------------------- results

    def list_compiler_choices(self) -> Iterator[str]:
        """The choices of the compiler, a phrase each."""
        yield from _with_sizes(self.choices)
        if any(x.left and self._is_merged(x) for x in self.gathers):
            yield _MERGED

    def list_other_dtypes(self) -> Iterator[str]:
        """The gradients and updates in another dtype than planned."""
        yield from _with_sizes(self.cast)

    def list_unplanned(self) -> Iterator[Unplanned]:
        """The differences, followed by the planned transfers that the program does not have."""
        combined = [x.path for x in self._find_combined()]
        products = self.filed.pop(_PRODUCT, [])
        for difference, members in self.filed.items():
            yield explain(
                **difference._asdict(),
                moved=[collective for collective, _ in members],
                paths=[leaf for _, leaf in members if leaf is not None],
                batch_axes=self.batch_axes,
                is_explicit=self.is_explicit,
            )
        if combined:
            moved = [collective for collective, _ in products]
            yield explain("as-one-product", moved=moved, paths=combined)
        missing: dict[tuple[str, str], list[str]] = defaultdict(list)
        for transfer in self._list_missing():
            if transfer.why != "gradient" or transfer.path not in combined:
                missing[transfer.kind, transfer.why].append(transfer.path or "")
        for (kind, why), paths in missing.items():
            yield explain("not-moved", kind=kind, detail=why, paths=paths)

    def _list_missing(self) -> list[PlannedTransfer]:
        """The planned transfers that the program does not have."""
        missing = [x.planned for x in self.gathers if x.left and not self._is_merged(x)]
        for gradient in self.gradients.values():
            missing += [x for x in gradient.planned if any(map(gradient.left.get, x.axes))]
        return missing

    def _is_merged(self, account: _Gather) -> bool:
        """Whether the compiler merged equal gathers: the step gathers twice in the same way, or in
        each trip of a loop that does not change the leaf."""
        if account.left == account.total:
            return any(not x.left for x in self.gathers if x.planned == account.planned)
        return account.left % account.all_layers == 0


def _with_sizes(moved: Mapping[str, Sequence[Collective]]) -> Iterator[str]:
    for text, collectives in sorted(moved.items()):
        yield text.format(size=bytes_text(total_bytes(collectives)))


def _append(collected: list[Collective], moved: _Moved) -> bool:
    collected.append(moved.collective)
    return True


def _read_moved(number: int, collective: Collective, leaf: str | None) -> _Moved:
    name = collective.op_name or ""
    return _Moved(
        number,
        collective,
        collective.kind,
        name,
        leaf,
        _elements(collective.total_bytes, collective.dtype),
        _elements(collective.bytes, collective.dtype),
        frozenset(collective.axes or ()),
        (collective.count or 0) > 1 or "while/body" in name,
        collective.count is None,
    )


def _elements(size: int | None, dtype: str) -> int:
    """The number of elements in `size` bytes; 0 if that is unknown."""
    return 0 if size is None else size // jnp.dtype(dtype).itemsize

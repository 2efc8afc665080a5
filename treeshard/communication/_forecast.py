"""Predicts what a training step has to move between devices, from its plan alone.

From the plan, and not from a trace of the step: it needs no model, no devices and no compiler, and
it says what *has* to be moved, which is what a program is compared with.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike

from treeshard._core.mesh import axis_sizes, check_axes
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec
from treeshard._core.specs import axes_of, entries, shard_size
from treeshard._planning.matching import PlannedLeaf, parameters, state_of_parameters
from treeshard._planning.plan import Plan
from treeshard._trace.roles import ONLY_UPDATED, TRAINED, Role, Roles
from treeshard._trace.uses import Gather

Leaves = bool | str  # all leaves, none, or those whose path matches a pattern (`re.search`)


@dataclass(frozen=True)
class PlannedTransfer:
    """One transfer that a training step requires.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"` or `"all-reduce"`.
        axes: The mesh axes that its device groups span, in the mesh's order.
        bytes: The payload of one execution, on the full-size side, as in `Collective`.
        count: The number of executions in a step.
        dtype: The dtype that is moved.
        path: The path of the leaf; `None` for the loss.
        why: Its purpose: `"weight"`, `"weight, again for its gradient"`, `"gradient"`,
            `"update"` or `"loss"`.

    Examples:
        >>> PlannedTransfer("all-gather", ("fsdp",), 4096, 2, "float32", "w", "weight").total_bytes
        8192
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    dtype: str
    path: str | None
    why: str

    @property
    def total_bytes(self) -> int:
        """The payload of all executions together."""
        return self.bytes * self.count


def predict_communication(
    plan: Plan,
    *,
    batch: SpecTree,
    remat: Leaves = False,
    scan: Leaves = False,
    params: str | None = None,
    dtype: DTypeLike | None = None,
) -> list[PlannedTransfer]:
    """Lists what a step of data parallel, FSDP or ZeRO-1 training has to move, leaf by leaf.

    - A parameter that is sharded along an axis of the batch is all-gathered for use, and its
      gradient is reduce-scattered along that axis.
    - Gradients are all-reduced along the other axes of the batch.
    - If the optimizer state is sharded further than its parameter (ZeRO-1), the gradient is
      reduce-scattered as far, and the update is all-gathered.
    - A parameter stays sharded along axes that do not shard the batch (tensor parallelism). The
      activations that are moved for it depend on the model, and are not predicted.

    Args:
        plan: The plan of the parameters, or of a state that contains them. It needs no devices.
        batch: The specs of the batch, as in `jit_step`.
        remat: The leaves that are gathered a second time, because the forward pass is repeated
            for the gradients: all (`True`), or those whose path matches this pattern.
        scan: The leaves that stack layers on dim 0 for a `lax.scan`, likewise. They are gathered
            one layer at a time.
        params: A pattern of the paths of the parameters. By default, all floating-point leaves,
            except for a top-level branch whose leaves all mirror those of another branch, as
            optimizer state does.
        dtype: The dtype in which weights are gathered; by default their own.

    Returns:
        A `PlannedTransfer` per leaf and op, in the order of the plan, and one for the loss.

    Raises:
        UnknownAxisError: If `batch` names an axis that the plan's mesh lacks.

    Examples:
        >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
        >>> decided = plan(tree, [("w", P("fsdp"))], make_mesh("fsdp=8"))
        >>> [(x.kind, x.bytes) for x in predict_communication(decided, batch=P("fsdp"))]
        [('all-gather', 4194304), ('reduce-scatter', 4194304), ('all-reduce', 4)]

    Source:
        ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.
    """
    check_axes(
        get_names_from_partition_spec(batch), axis_sizes(plan.mesh), "predict_communication: batch"
    )
    roles = roles_by_name(plan, batch, remat=remat, scan=scan, params=params, dtype=dtype)
    return predict_by_role(plan, batch, roles)


def roles_by_name(
    plan: Plan,
    batch: SpecTree,
    *,
    remat: Leaves = False,
    scan: Leaves = False,
    params: str | None = None,
    dtype: DTypeLike | None = None,
) -> Roles:
    """The roles that leaves seem to have, by their paths, where there is no trace."""
    along = batch_axes(plan, batch)
    state = state_of_parameters(plan.leaves, params)
    roles = {leaf.path: Role(ONLY_UPDATED) for leaf in plan.leaves}
    for leaf in parameters(plan.leaves, params):
        gathers: list[Gather] = []
        axes = frozenset(get_names_from_partition_spec(leaf.given)).intersection(along)
        if axes:
            layers = leaf.shape[0] if leaf.shape and _chosen(scan, leaf) else 1
            known = leaf.dtype if dtype is None else jnp.dtype(dtype)
            once = Gather(axes, str(known), known.itemsize, layers, layers, is_again=False)
            again = once._replace(is_again=True)
            gathers = [once, again] if _chosen(remat, leaf) else [once]
        sources = frozenset({state[leaf.path].path} if leaf.path in state else ())
        roles[leaf.path] = Role(TRAINED, tuple(gathers), frozenset(), sources, uses=0)
    return roles


def batch_axes(plan: Plan, batch: SpecTree) -> tuple[str, ...]:
    """The axes over which a batch is split, in the mesh's order."""
    named = get_names_from_partition_spec(batch)
    return tuple(axis for axis, size in axis_sizes(plan.mesh).items() if axis in named and size > 1)


def predict_by_role(plan: Plan, batch: SpecTree, roles: Roles) -> list[PlannedTransfer]:
    """Lists what a step has to move, by what it does with each leaf."""
    along = batch_axes(plan, batch)
    forecast = _Forecast(plan, along, roles)
    transfers = [transfer for leaf in plan.leaves for transfer in forecast.of_leaf(leaf)]
    if along:
        transfers.append(PlannedTransfer("all-reduce", along, 4, 1, "float32", None, "loss"))
    return transfers


def _chosen(which: Leaves, leaf: PlannedLeaf) -> bool:
    return which if isinstance(which, bool) else re.search(which, leaf.path) is not None


class _Forecast:
    """What each leaf has to move; `along` are the axes of the batch, in the mesh's order."""

    def __init__(self, plan: Plan, along: tuple[str, ...], roles: Roles) -> None:
        self.along, self.roles, self.mesh = along, roles, plan.mesh
        self.leaves = {leaf.path: leaf for leaf in plan.leaves}

    def of_leaf(self, leaf: PlannedLeaf) -> Iterator[PlannedTransfer]:
        """The gathers of a leaf, then the reductions of its gradient, then its update."""
        role = self.roles[leaf.path]
        for gather in role.gathers:
            if gather.is_counted:
                yield from self._gathers(leaf, gather)
        if role.name == TRAINED:
            yield from self._of_gradient(leaf, role)

    def _gathers(self, leaf: PlannedLeaf, gather: Gather) -> Iterator[PlannedTransfer]:
        why = "weight, again for its gradient" if gather.is_again else "weight"
        # Dim by dim: each gather has the result of the one before.
        size = shard_size(leaf.shape, leaf.given, self.mesh) // gather.parts
        for axes in self._dims(leaf, gather.axes):
            size *= self._parts(axes)
            payload = size * gather.itemsize
            yield PlannedTransfer(
                "all-gather", axes, payload, gather.times, gather.dtype, leaf.path, why
            )

    def _of_gradient(self, leaf: PlannedLeaf, role: Role) -> Iterator[PlannedTransfer]:
        """What is moved of a gradient: scattered over the axes over which the leaf is gathered, and
        over those that shard its optimizer state; reduced over the others."""
        gathers = role.gathers
        gathered = frozenset[str]().union(*(gather.axes for gather in gathers))
        parts = max((gather.parts for gather in gathers), default=1)
        scattered = self._dims(leaf, gathered)
        size = shard_size(leaf.shape, leaf.given, self.mesh)
        size *= self._parts(axis for axes in scattered for axis in axes)
        for axes in scattered:
            # The gradient of a weight that is gathered in bfloat16 is reduced in bfloat16.
            transfer = partial(_transfer, leaf.path, gathers[0].dtype, parts * role.updates)
            yield transfer("reduce-scatter", axes, size // parts, "gradient")
            size //= self._parts(axes)
        transfer = partial(_transfer, leaf.path, str(leaf.dtype), role.updates)
        done = {*gathered, *role.split}
        further = self._in_order(self._axes_of_state(leaf, role) - done)
        if further:
            yield transfer("reduce-scatter", further, size, "gradient")
        rest = self._in_order({*self.along} - done - {*further})
        if rest:
            yield transfer("all-reduce", rest, size // self._parts(further), "gradient")
        if further:
            yield transfer("all-gather", further, size, "update")

    def _axes_of_state(self, leaf: PlannedLeaf, role: Role) -> set[str]:
        """The axes that shard the optimizer state of a leaf: an array of its shape, from which its
        new value is computed."""
        state = [self.leaves[path] for path in sorted(role.sources)]
        return {
            axis
            for source in state
            if source.shape == leaf.shape
            for axis in get_names_from_partition_spec(source.given)
        }

    def _dims(self, leaf: PlannedLeaf, axes: Collection[str]) -> list[tuple[str, ...]]:
        """Those of some axes that split each dim of a leaf."""
        of_dims = [self._in_order({*axes_of(entry)} & {*axes}) for entry in entries(leaf.given)]
        return [of_dim for of_dim in of_dims if of_dim]

    def _in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of some axes that split the batch."""
        chosen = set(axes)
        return tuple(axis for axis in self.along if axis in chosen)

    def _parts(self, axes: Iterable[str]) -> int:
        sizes = axis_sizes(self.mesh)
        return math.prod(sizes[axis] for axis in axes)


def _transfer(
    path: str, dtype: str, count: int, kind: str, axes: tuple[str, ...], size: int, why: str
) -> PlannedTransfer:
    """A transfer of `size` elements in each of `count` executions."""
    payload = size * jnp.dtype(dtype).itemsize
    return PlannedTransfer(kind, axes, payload, count, dtype, path, why)

"""Predicts what a training step has to communicate, from its plan and the roles of its leaves.

The prediction does not use the compiled program, which is compared with it. The plan alone is not
enough: names and shapes do not show which leaves are trained, or how often a weight is gathered.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from treeshard._core.mesh import axis_sizes
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec
from treeshard._core.specs import axes_of, entries, shard_size
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._trace.roles import TRAINED, Role, Roles
from treeshard._trace.uses import Gather


@dataclass(frozen=True)
class PlannedTransfer:
    """One transfer that a training step requires.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"` or `"all-reduce"`.
        axes: The mesh axes that its device groups span, in the mesh's order.
        bytes: The payload of one execution, on the full-size side, as in `Collective`.
        count: The number of executions in a step.
        dtype: The dtype that is communicated.
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


def batch_axes(plan: Plan, batch: SpecTree) -> tuple[str, ...]:
    """The axes over which a batch is split, in the mesh's order."""
    named = get_names_from_partition_spec(batch)
    return tuple(axis for axis, size in axis_sizes(plan.mesh).items() if axis in named and size > 1)


def predict_transfers(plan: Plan, batch: SpecTree, roles: Roles) -> list[PlannedTransfer]:
    """Lists what a step of data parallel, FSDP or ZeRO-1 training has to communicate.

    1. A leaf is all-gathered wherever the step needs it in full along an axis of the batch, in the
       dtype that it has at that point.
    2. Its gradient is reduce-scattered over the axes along which it is gathered.
    3. If its optimizer state is sharded further than the leaf (ZeRO-1), the gradient is
       reduce-scattered over the same axes as the state, and the update is all-gathered.
    4. The gradient is all-reduced over the other axes of the batch, unless the leaf stays split
       along them where it is used, as weights of experts do.
    5. The loss is all-reduced.

    A leaf stays sharded along axes that do not split the batch (tensor parallelism). The
    communication of activations for such a leaf depends on the model, and is not predicted.

    Source:
        ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.
    """
    along = batch_axes(plan, batch)
    forecast = _Forecast(plan, along, roles)
    transfers = [transfer for leaf in plan.leaves for transfer in forecast.predict_leaf(leaf)]
    if along:
        transfers.append(PlannedTransfer("all-reduce", along, 4, 1, "float32", None, "loss"))
    return transfers


class _Forecast:
    """What each leaf has to communicate; `along` are the axes of the batch, in the mesh's order."""

    def __init__(self, plan: Plan, along: tuple[str, ...], roles: Roles) -> None:
        self.along, self.roles, self.mesh = along, roles, plan.mesh
        self.leaves = {leaf.path: leaf for leaf in plan.leaves}

    def predict_leaf(self, leaf: PlannedLeaf) -> Iterator[PlannedTransfer]:
        """The gathers of a leaf, then the reductions of its gradient, then its update."""
        role = self.roles[leaf.path]
        for gather in role.gathers:
            if gather.is_counted:
                yield from self._predict_gathers(leaf, gather)
        if role.name == TRAINED:
            yield from self._predict_gradient(leaf, role)

    def _predict_gathers(self, leaf: PlannedLeaf, gather: Gather) -> Iterator[PlannedTransfer]:
        why = "weight, again for its gradient" if gather.is_again else "weight"
        size = shard_size(leaf.shape, leaf.given, self.mesh) // gather.parts
        # Dim by dim: each gather has the result of the one before.
        for axes in self._dims(leaf, gather.axes):
            size *= self._parts(axes)
            payload = size * gather.itemsize
            yield PlannedTransfer(
                "all-gather", axes, payload, gather.times, gather.dtype, leaf.path, why
            )

    def _predict_gradient(self, leaf: PlannedLeaf, role: Role) -> Iterator[PlannedTransfer]:
        gathered = frozenset[str]().union(*(gather.axes for gather in role.gathers))
        parts = max((gather.parts for gather in role.gathers), default=1)
        scattered = self._dims(leaf, gathered)
        size = shard_size(leaf.shape, leaf.given, self.mesh)
        size *= self._parts(axis for axes in scattered for axis in axes)
        for axes in scattered:
            # A gradient is reduced as its weight is gathered: in the same dtype, and, for a stack
            # that is gathered layer by layer, layer by layer.
            yield _transfer(
                "reduce-scatter",
                axes,
                size // parts,
                role.gathers[0].dtype,
                parts * role.updates,
                leaf.path,
                "gradient",
            )
            size //= self._parts(axes)
        rest = (str(leaf.dtype), role.updates, leaf.path)
        # Along axes over which the leaf stays split, each device has the gradient of its own part.
        done = {*gathered, *role.split}
        further = self._sort_axes(self._axes_of_state(leaf, role) - done)
        if further:
            yield _transfer("reduce-scatter", further, size, *rest, "gradient")
        others = self._sort_axes({*self.along} - done - {*further})
        if others:
            yield _transfer("all-reduce", others, size // self._parts(further), *rest, "gradient")
        if further:
            yield _transfer("all-gather", further, size, *rest, "update")

    def _axes_of_state(self, leaf: PlannedLeaf, role: Role) -> set[str]:
        """The axes that shard the optimizer state of a leaf: arrays of its shape from which its new
        value is computed."""
        state = [self.leaves[path] for path in role.sources]
        return {
            axis
            for source in state
            if source.shape == leaf.shape
            for axis in get_names_from_partition_spec(source.given)
        }

    def _dims(self, leaf: PlannedLeaf, axes: Collection[str]) -> list[tuple[str, ...]]:
        """The axes, among some, that split each dim of a leaf."""
        of_dims = [self._sort_axes({*axes_of(entry)} & {*axes}) for entry in entries(leaf.given)]
        return [of_dim for of_dim in of_dims if of_dim]

    def _sort_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes, among some, that split the batch."""
        chosen = set(axes)
        return tuple(axis for axis in self.along if axis in chosen)

    def _parts(self, axes: Iterable[str]) -> int:
        sizes = axis_sizes(self.mesh)
        return math.prod(sizes[axis] for axis in axes)


def _transfer(
    kind: str, axes: tuple[str, ...], size: int, dtype: str, count: int, path: str, why: str
) -> PlannedTransfer:
    """A transfer of `size` elements in each of `count` executions."""
    payload = size * jnp.dtype(dtype).itemsize
    return PlannedTransfer(kind, axes, payload, count, dtype, path, why)

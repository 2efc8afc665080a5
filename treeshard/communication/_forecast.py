"""Predicts what a training step has to move between devices, from its plan alone.

From the plan, and not from a trace of the step: it needs no model, no devices and no compiler, and
it says what *has* to be moved, which is what a program is compared with.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from treeshard._core.mesh import AnyMesh, axis_sizes, check_axes
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec
from treeshard._core.specs import axes_of, entries, shard_size
from treeshard._planning.matching import PlannedLeaf, parameters, state_of_parameters
from treeshard._planning.plan import Plan

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
    sizes = axis_sizes(plan.mesh)
    batch_axes = get_names_from_partition_spec(batch)
    check_axes(batch_axes, sizes, "predict_communication: batch")
    along = tuple(axis for axis in sizes if axis in batch_axes and sizes[axis] > 1)
    forecast = _Forecast(plan.mesh, along, dtype)
    transfers: list[PlannedTransfer] = []
    state = state_of_parameters(plan.leaves, params)
    for leaf in parameters(plan.leaves, params):
        layers = leaf.shape[0] if leaf.shape and _chosen(scan, leaf) else 1
        whys = ["weight", "weight, again for its gradient"] if _chosen(remat, leaf) else ["weight"]
        transfers += forecast.of_leaf(leaf, state.get(leaf.path), layers, whys)
    if along:
        transfers.append(PlannedTransfer("all-reduce", along, 4, 1, "float32", None, "loss"))
    return transfers


def _chosen(which: Leaves, leaf: PlannedLeaf) -> bool:
    return which if isinstance(which, bool) else re.search(which, leaf.path) is not None


@dataclass(frozen=True)
class _Forecast:
    """What each leaf has to move; `along` are the axes of the batch, in the mesh's order."""

    mesh: AnyMesh
    along: tuple[str, ...]
    dtype: DTypeLike | None

    def of_leaf(
        self, leaf: PlannedLeaf, state: PlannedLeaf | None, layers: int, whys: Sequence[str]
    ) -> Iterator[PlannedTransfer]:
        """The gathers of a parameter, then the reductions of its gradient, then its update."""
        dtype = jnp.dtype(leaf.dtype if self.dtype is None else self.dtype)
        transfer = partial(_transfer, leaf.path, dtype, layers)
        # Axis by axis: each gather has the result of the one before.
        size = shard_size(leaf.shape, leaf.given, self.mesh)
        gathered: list[tuple[str, ...]] = []
        for entry in entries(leaf.given):
            axes = self._in_order(axes_of(entry))
            if axes:
                size *= self._parts(axes)
                gathered.append(axes)
                yield from (transfer("all-gather", axes, size, why) for why in whys)
        for axes in gathered:
            yield transfer("reduce-scatter", axes, size, "gradient")
            size //= self._parts(axes)
        yield from self._of_gradient(
            leaf, state, {axis for axes in gathered for axis in axes}, size
        )

    def _of_gradient(
        self, leaf: PlannedLeaf, state: PlannedLeaf | None, reduced: set[str], size: int
    ) -> Iterator[PlannedTransfer]:
        """What is moved of a gradient that is reduced along some axes of the batch already."""
        transfer = partial(_transfer, leaf.path, jnp.dtype(leaf.dtype), 1)
        further: tuple[str, ...] = ()  # the axes that shard the optimizer state, but not the leaf
        if state is not None and state.shape == leaf.shape:
            further = self._in_order({*get_names_from_partition_spec(state.given)} - reduced)
        rest = self._in_order({*self.along} - reduced - {*further})
        part = size // self._parts(further)
        if further:
            yield transfer("reduce-scatter", further, size, "gradient")
        if rest:
            yield transfer("all-reduce", rest, part, "gradient")
        if further:
            yield transfer("all-gather", further, size, "update")

    def _in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of some axes that split the batch."""
        chosen = set(axes)
        return tuple(axis for axis in self.along if axis in chosen)

    def _parts(self, axes: Iterable[str]) -> int:
        sizes = axis_sizes(self.mesh)
        return math.prod(sizes[axis] for axis in axes)


def _transfer(
    path: str,
    dtype: np.dtype,
    count: int,
    kind: str,
    axes: tuple[str, ...],
    size: int,
    why: str,
) -> PlannedTransfer:
    payload = size * dtype.itemsize // count
    return PlannedTransfer(kind, axes, payload, count, str(dtype), path, why)

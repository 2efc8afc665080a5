"""Predicts what a training step has to move between devices, from its plan alone."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
    transfers: list[PlannedTransfer] = []
    state = state_of_parameters(plan.leaves, params)
    for leaf in parameters(plan.leaves, params):
        layers = leaf.shape[0] if leaf.shape and _chosen(scan, leaf) else 1
        transfers += _transfers(
            leaf, state.get(leaf.path), plan.mesh, along, dtype, layers, _chosen(remat, leaf)
        )
    if along:
        transfers.append(PlannedTransfer("all-reduce", along, 4, 1, "float32", None, "loss"))
    return transfers


def _chosen(which: Leaves, leaf: PlannedLeaf) -> bool:
    return which if isinstance(which, bool) else re.search(which, leaf.path) is not None


def _transfers(
    leaf: PlannedLeaf,
    state: PlannedLeaf | None,
    mesh: AnyMesh,
    along: tuple[str, ...],
    dtype: DTypeLike | None,
    layers: int,
    again: bool,
) -> Iterator[PlannedTransfer]:
    """The gathers of a parameter, then the reductions of its gradient, then its update."""
    sizes = axis_sizes(mesh)
    weight_dtype = jnp.dtype(leaf.dtype if dtype is None else dtype)

    def in_order(axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in sizes if axis in set(axes) & set(along))

    def transfer(
        kind: str, axes: tuple[str, ...], size: int, why: str, dtype: np.dtype, count: int
    ) -> PlannedTransfer:
        payload = size * dtype.itemsize // count
        return PlannedTransfer(kind, axes, payload, count, str(dtype), leaf.path, why)

    whys = ["weight", "weight, again for its gradient"] if again else ["weight"]
    gathered = [axes for entry in entries(leaf.given) if (axes := in_order(axes_of(entry)))]
    size = shard_size(leaf.shape, leaf.given, mesh)
    for axes in gathered:
        size *= math.prod(sizes[axis] for axis in axes)
        for why in whys:
            yield transfer("all-gather", axes, size, why, weight_dtype, layers)
    for axes in gathered:
        yield transfer("reduce-scatter", axes, size, "gradient", weight_dtype, layers)
        size //= math.prod(sizes[axis] for axis in axes)

    reduced = {axis for axes in gathered for axis in axes}
    further: tuple[str, ...] = ()  # the axes that shard the optimizer state, but not the leaf
    if state is not None and state.shape == leaf.shape:
        further = in_order(set(get_names_from_partition_spec(state.given)) - reduced)
    own_dtype, full = jnp.dtype(leaf.dtype), size
    if further:
        yield transfer("reduce-scatter", further, size, "gradient", own_dtype, 1)
        size //= math.prod(sizes[axis] for axis in further)
    if rest := in_order(set(along) - reduced - set(further)):
        yield transfer("all-reduce", rest, size, "gradient", own_dtype, 1)
    if further:
        yield transfer("all-gather", further, full, "update", own_dtype, 1)

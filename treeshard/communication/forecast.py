"""Predicts what a training step has to move between devices, from its plan alone."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from treeshard._core.mesh import axis_sizes, check_axes
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._core.specs import axes_of, entries, shard_size
from treeshard._planning.decision import PlannedLeaf
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
    batch: Any,
    remat: Leaves = False,
    scan: Leaves = False,
    params: str | None = None,
    dtype: Any = None,
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
    split = get_names_from_partition_spec(batch)
    check_axes(split, sizes, "predict_communication: batch")
    along = [axis for axis in sizes if axis in split and sizes[axis] > 1]
    transfers: list[PlannedTransfer] = []
    state = state_of_parameters(plan, params)
    for leaf in parameters(plan, params):
        forecast = _Forecast(plan, leaf, along, dtype, _chosen(scan, leaf), _chosen(remat, leaf))
        transfers += forecast.transfers(state.get(leaf.path))
    if along:
        transfers.append(PlannedTransfer("all-reduce", tuple(along), 4, 1, "float32", None, "loss"))
    return transfers


def _chosen(which: Leaves, leaf: PlannedLeaf) -> bool:
    return which if isinstance(which, bool) else re.search(which, leaf.path) is not None


class _Forecast:
    """The transfers of one parameter."""

    def __init__(
        self,
        plan: Plan,
        leaf: PlannedLeaf,
        along: Sequence[str],
        dtype: Any,
        scanned: bool,
        again: bool,
    ) -> None:
        self.plan, self.leaf, self.along, self.again = plan, leaf, along, again
        self.sizes = axis_sizes(plan.mesh)
        self.times = leaf.shape[0] if scanned and leaf.shape else 1
        self.wire = np.dtype(leaf.dtype) if dtype is None else jnp.dtype(dtype)
        spec = [axes_of(entry) for entry in entries(leaf.given)]
        gathered = [tuple(axis for axis in axes if axis in along) for axes in spec]
        self.steps = [self._in_order(axes) for axes in gathered if axes]
        self.held = shard_size(leaf.shape, leaf.given, plan.mesh)

    def transfers(self, state: PlannedLeaf | None) -> Iterator[PlannedTransfer]:
        """The gathers of the weight, then the reductions of its gradient, then its update."""
        size = self.held
        for axes in self.steps:
            size *= math.prod(self.sizes[axis] for axis in axes)
            yield self._weight(axes, size, "weight")
            if self.again:
                yield self._weight(axes, size, "weight, again for its gradient")
        for axes in self.steps:
            yield self._transfer("reduce-scatter", axes, size, "gradient", self.wire, self.times)
            size //= math.prod(self.sizes[axis] for axis in axes)
        rest = [axis for axis in self.along if not any(axis in axes for axes in self.steps)]
        further = self._further(state, rest)
        if further:
            full = size
            yield self._transfer("reduce-scatter", further, size, "gradient")
            size //= math.prod(self.sizes[axis] for axis in further)
            if rest := [axis for axis in rest if axis not in further]:
                yield self._transfer("all-reduce", tuple(rest), size, "gradient")
            yield self._transfer("all-gather", further, full, "update")
        elif rest:
            yield self._transfer("all-reduce", tuple(rest), size, "gradient")

    def _weight(self, axes: tuple[str, ...], size: int, why: str) -> PlannedTransfer:
        return self._transfer("all-gather", axes, size, why, self.wire, self.times)

    def _transfer(
        self,
        kind: str,
        axes: tuple[str, ...],
        size: int,
        why: str,
        dtype: np.dtype[Any] | None = None,
        times: int = 1,
    ) -> PlannedTransfer:
        dtype = np.dtype(self.leaf.dtype) if dtype is None else dtype
        payload = size * dtype.itemsize // times
        return PlannedTransfer(kind, axes, payload, times, str(dtype), self.leaf.path, why)

    def _further(self, state: PlannedLeaf | None, rest: Sequence[str]) -> tuple[str, ...]:
        """The axes that shard the parameter's optimizer state, but not the parameter."""
        if state is None or state.shape != self.leaf.shape:
            return ()
        return self._in_order(get_names_from_partition_spec(state.given), rest)

    def _in_order(self, axes: Sequence[str], among: Sequence[str] | None = None) -> tuple[str, ...]:
        return tuple(a for a in self.sizes if a in axes and (among is None or a in among))


# ------------------------------------------------------------------ which are parameters


def parameters(plan: Plan, pattern: str | None = None) -> list[PlannedLeaf]:
    """The leaves of a plan that have gradients."""
    floats = [leaf for leaf in plan.leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if pattern is not None:
        return [leaf for leaf in floats if re.search(pattern, leaf.path)]
    mirrors = {mirror for mirror, _ in _mirrored(floats)}
    return [leaf for leaf in floats if _branch(leaf) not in mirrors]


def state_of_parameters(plan: Plan, pattern: str | None = None) -> dict[str, PlannedLeaf]:
    """Path of a parameter -> one leaf of its optimizer state, if it has any."""
    chosen = parameters(plan, pattern)
    paths = {leaf.path for leaf in chosen}
    tails = {leaf.path.partition("/")[2]: leaf for leaf in chosen}
    state: dict[str, PlannedLeaf] = {}
    for leaf in plan.leaves:
        if leaf.path in paths or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        mirrored = next((tails[tail] for tail in _tails(leaf.path) if tail in tails), None)
        if mirrored is not None and mirrored.shape == leaf.shape:
            state.setdefault(mirrored.path, leaf)
    return state


def _mirrored(floats: Sequence[PlannedLeaf]) -> Iterator[tuple[str, str]]:
    """Pairs of top-level branches where the first mirrors the second."""
    branches: dict[str, list[str]] = defaultdict(list)
    for leaf in floats:
        if leaf.shape:
            branches[_branch(leaf)].append(leaf.path)
    for mirror, paths in branches.items():
        for source, sources in branches.items():
            tails = {path.partition("/")[2] for path in sources} - {""}
            if mirror != source and all(tails.intersection(_tails(path)) for path in paths):
                yield mirror, source


def _branch(leaf: PlannedLeaf) -> str:
    return leaf.path.partition("/")[0]


def _tails(path: str) -> list[str]:
    """The tails of a path without its first two parts or more, longest first."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(2, len(parts))]

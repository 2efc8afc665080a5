"""What a training step has to move between devices, told from its plan alone."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from treeshard._decision import PlannedLeaf
from treeshard._mesh import axis_sizes, check_axes
from treeshard._plan import Plan
from treeshard._spec_trees import get_names_from_partition_spec
from treeshard._specs import axes_of, entries, shard_size

Leaves = bool | str  # all, none, or those whose path a pattern is found in


@dataclass(frozen=True)
class PlannedTransfer:
    """One transfer that a step cannot do without.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"` or `"all-reduce"`.
        axes: The mesh axes along which devices take part, in the mesh's order.
        bytes: The payload of one execution, on the full-size side, as of a `Collective`.
        count: How often it runs in a step.
        dtype: What is moved.
        path: The leaf; `None` for the loss.
        why: What for: `"weight"`, `"weight, again for its gradient"`, `"gradient"`, `"update"` or
            `"loss"`.

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
        """The payload of all executions."""
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

    Along the axes of the batch, a parameter that is sharded is gathered for use and its gradient
    reduce-scattered; gradients are then all-reduced along the batch's other axes. Where the
    optimizer's state is sharded further than its parameter, the gradient is scattered that far,
    and the update gathered. What is sharded along axes that the batch is not split over stays so
    (tensor parallel); the activations that this moves depend on the model, and are not told.

    Args:
        plan: The plan of the parameters, or of a state that holds them. No devices are needed.
        batch: The specs of the batch, as in `jit_step`.
        remat: Whether the forward pass is run again for the gradients, so that weights are
            gathered twice: for all leaves, or for those whose path has this pattern.
        scan: Which leaves are layers stacked on dim 0 that a `lax.scan` runs over, likewise:
            each is gathered a layer at a time.
        params: A pattern of the paths that are parameters. By default all floating leaves, but for
            a top-level branch in which all of them mirror those of another branch, deeper
            down, as optimizer state does.
        dtype: The dtype in which weights are gathered; by default their own.

    Returns:
        A `PlannedTransfer` per leaf and op, gathers in the order of the plan, and one for the loss.

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
    found: list[PlannedTransfer] = []
    state = state_of_parameters(plan, params)
    for leaf in parameters(plan, params):
        forecast = _Forecast(plan, leaf, along, dtype, _chosen(scan, leaf), _chosen(remat, leaf))
        found += forecast.transfers(state.get(leaf.path))
    if along:
        found.append(PlannedTransfer("all-reduce", tuple(along), 4, 1, "float32", None, "loss"))
    return found


def _chosen(which: Leaves, leaf: PlannedLeaf) -> bool:
    return which if isinstance(which, bool) else re.search(which, leaf.path) is not None


class _Forecast:
    """What one parameter moves."""

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
        """Gathers, then what its gradient needs, then its update."""
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
            whole = size
            yield self._transfer("reduce-scatter", further, size, "gradient")
            size //= math.prod(self.sizes[axis] for axis in further)
            if rest := [axis for axis in rest if axis not in further]:
                yield self._transfer("all-reduce", tuple(rest), size, "gradient")
            yield self._transfer("all-gather", further, whole, "update")
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
        """The axes that shard the parameter's optimizer state, and not itself."""
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
    """A leaf of the optimizer's state for each parameter that has one, by its path."""
    chosen = parameters(plan, pattern)
    paths = {leaf.path for leaf in chosen}
    tails = {leaf.path.partition("/")[2]: leaf for leaf in chosen}
    found: dict[str, PlannedLeaf] = {}
    for leaf in plan.leaves:
        if leaf.path in paths or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        mirrored = next((tails[tail] for tail in _tails(leaf.path) if tail in tails), None)
        if mirrored is not None and mirrored.shape == leaf.shape:
            found.setdefault(mirrored.path, leaf)
    return found


def _mirrored(floats: Sequence[PlannedLeaf]) -> Iterator[tuple[str, str]]:
    """Pairs of top-level branches of which the first mirrors the second."""
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
    """The ends of a path that lie at least two steps down, the longest first."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(2, len(parts))]

"""The ways to train a model on a number of devices, and what the plan alone says of each.

All factorings are tried, and no search is needed: a model has a few strategies of two or three axes
each, so there are hundreds of candidates, and planning one takes milliseconds. A plan says exactly
what leaves send; that orders candidates well enough to compile only a few.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from treeshard._core.mesh import describe_sizes
from treeshard._core.specs import axes_of, entry_of
from treeshard._core.text import human_bytes
from treeshard._core.topologies import Chip, Topology
from treeshard._planning.plan import Plan, plan
from treeshard._planning.tactics import fsdp
from treeshard._trace.roles import Roles
from treeshard.communication._collectives import bytes_on_the_wire
from treeshard.communication._device_groups import axes_that_change
from treeshard.communication._forecast import predict_by_role, roles_on
from treeshard.errors import TreeShardError
from treeshard.programs._links import Links, arranged_torus

# The axes that split the batch; devices along all others compute parts of one example.
BATCH_AXES = ("data", "fsdp")


class Strategy(NamedTuple):
    """A way to shard a state.

    Attributes:
        name: For reports.
        axes: The mesh axes that its rules name. `data` and `fsdp` split the batch too.
        rules: As in `treeshard.match_partition_rules`.
        divides: What the size of an axis must divide, such as the number of attention heads.

    Examples:
        >>> rules = [("attn/q", P("fsdp", "tensor")), (".*", ts.fsdp("fsdp"))]
        >>> ts.programs.Strategy("FSDP x TP", ("fsdp", "tensor"), rules).axes
        ('fsdp', 'tensor')
    """

    name: str
    axes: tuple[str, ...]
    rules: Sequence[tuple[Any, Any]]
    divides: Mapping[str, int] = MappingProxyType({})


NAMED = ("DP", "ZeRO-1", "FSDP", "HSDP")


def named_strategies(roles: Roles) -> dict[str, Strategy]:
    """The strategies that need no rules for the model: data parallel, ZeRO-1, FSDP and HSDP."""
    branches = sorted({path.partition("/")[0] for path, role in roles.items() if role.is_used})
    weights = f"^({'|'.join(map(re.escape, branches))})(/|$)"
    replicated, split = [(".*", None)], [(".*", fsdp("fsdp"))]
    strategies = [
        Strategy("DP", ("data",), replicated),
        Strategy("ZeRO-1", ("data",), [(weights, None), (".*", fsdp("data"))]),
        Strategy("FSDP", ("fsdp",), split),
        Strategy("HSDP", ("data", "fsdp"), split),
    ]
    return {strategy.name: strategy for strategy in strategies}


@dataclass(frozen=True)
class Candidate:
    """One mesh, strategy and choice of what the user's function offers: `remat`, `accumulate`.

    The outermost axis comes first; it runs over all slices, or nodes of GPUs.
    """

    strategy: Strategy
    axes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    slices: int = 1

    @property
    def mesh(self) -> str:
        return describe_sizes(self.axes).replace(" ", "")

    @property
    def mesh_arguments(self) -> tuple[str, str | None]:
        """What `make_mesh` takes: the axes within a slice, and `dcn_axes`."""
        if self.slices == 1:
            return self.mesh, None
        outer = next(iter(self.axes))
        return describe_sizes(self.within).replace(" ", ""), f"{outer}={self.slices}"

    @property
    def within(self) -> dict[str, int]:
        """The sizes of the axes within a slice."""
        outer = next(iter(self.axes))
        return {**self.axes, outer: self.axes[outer] // self.slices}

    @property
    def batch_devices(self) -> int:
        """Over how many devices the batch is split."""
        return math.prod(self.axes.get(axis, 1) for axis in BATCH_AXES)

    @property
    def passes(self) -> int:
        """Into how many passes gradients are accumulated."""
        return self.options.get("accumulate", 1)

    @property
    def remat(self) -> bool:
        """Whether the forward pass is repeated for the gradients."""
        return bool(self.options.get("remat"))

    @property
    def complexity(self) -> tuple[int, bool, int]:
        """Its place in an order from the simplest: replicated, ZeRO-1, FSDP, two axes and more."""
        rules, axes = self.strategy.rules, self.strategy.axes
        is_replicated = all(action is None for _, action in rules)
        kind = 0 if is_replicated else 1 if axes == ("data",) else 1 + len(self.axes)
        return kind, self.remat, self.passes

    @property
    def described(self) -> str:
        """The mesh, and the options that are not off."""
        parts = [self.mesh]
        if self.remat:
            parts.append("remat")
        if self.passes > 1:
            parts.append(f"accumulate={self.passes}")
        return ", ".join(parts)

    def __str__(self) -> str:
        return f"{self.strategy.name} on {self.described}"


def candidates(
    strategies: Sequence[Strategy],
    devices: int,
    slices: int,
    offered: Mapping[str, Sequence[Any]],
) -> Iterator[Candidate]:
    """All factorings of the devices into the axes of each strategy, with each option, and with a
    larger `data` axis around them."""
    choices = [dict(zip(offered, values, strict=True)) for values in product(*offered.values())]
    for strategy in strategies:
        meshes = [*_factorings(strategy.axes, devices)]
        # FSDP inside a data axis is HSDP.
        if "data" not in strategy.axes and strategy.axes != ("fsdp",):
            meshes += _factorings(("data", *strategy.axes), devices)
        for axes, options in product(meshes, choices):
            yield Candidate(strategy, axes, options, slices)


def _factorings(names: tuple[str, ...], devices: int) -> Iterator[dict[str, int]]:
    """Sizes of axes, each above 1, whose product is the number of devices."""
    if len(names) == 1:
        yield {names[0]: devices}
        return
    divisors = [size for size in range(2, devices) if devices % size == 0]
    for sizes in product(divisors, repeat=len(names)):
        if math.prod(sizes) == devices:
            yield dict(zip(names, sizes, strict=True))


# ------------------------------------------------------------------ what the plan says


class Estimate(NamedTuple):
    """What the plan alone says of a candidate.

    `state_bytes` are those of the fullest device: less than what a step needs. `moved_bytes` are
    exact for leaves, and rough for the activations of tensor parallelism.
    """

    state_bytes: int
    moved_bytes: int
    seconds: float


_REASONS = {
    "slices": "{axis}={size} cannot be split over {slices} slices or nodes",
    "divides": "{axis}={size} does not divide {number}",
    "batch": "a batch of {rows} does not divide by {devices} devices{passes}",
    "memory": "does not fit: the state alone needs {need} of {capacity}",
}


@dataclass
class Estimator:
    """Plans candidates: those that differ in their options only, once.

    `roles` has what the step does with each leaf; `arrays` are those of the batch that have rows.
    """

    state: Any
    roles: Roles
    arrays: Sequence[Any]
    chip: Chip | None
    capacity: int | None
    topology: Topology | None = None
    plans: "dict[tuple[int, str], _Planned | str]" = field(default_factory=dict)

    def estimate(self, candidate: Candidate) -> Estimate | str:
        """What the plan of a candidate says; or why it cannot be, as text."""
        reason = _uneven_axis(candidate) or _uneven_batch(candidate, self.arrays)
        if reason is not None:
            return reason
        key = id(candidate.strategy.rules), candidate.mesh  # names need not differ
        if key not in self.plans:
            self.plans[key] = self._planned(candidate)
        planned = self.plans[key]
        if isinstance(planned, str):
            return planned
        moved, seconds = 0, 0.0
        torus = arranged_torus(candidate.within, self.topology)
        links = Links(self.chip, _network_axes(candidate), torus)
        for transfer, size in planned.transfers[candidate.remat].items():
            if transfer.in_each_pass:
                size *= candidate.passes
            devices = math.prod(candidate.axes[axis] for axis in transfer.axes)
            sent = bytes_on_the_wire(transfer.kind, size, devices)
            seconds += links.seconds(transfer.kind, sent, transfer.axes) or 0.0
            moved += size
        return Estimate(planned.state_bytes, moved, seconds)

    def _planned(self, candidate: Candidate) -> "_Planned | str":
        try:
            planned = plan(self.state, candidate.strategy.rules, candidate.mesh)
        except TreeShardError as error:
            return str(error)
        for finding in planned.findings:
            if finding.severity == "error":
                return str(finding)
        need = planned.bytes_per_device()
        if self.capacity is not None and need > self.capacity:
            sizes = {"need": human_bytes(need), "capacity": human_bytes(self.capacity)}
            return _REASONS["memory"].format(**sizes)
        of_activations = _transfers_of_activations(planned, candidate, self.roles, self.arrays)
        transfers = {
            remat: of_activations
            + _transfers_of_leaves(planned, candidate, self.roles, remat=remat)
            for remat in (False, True)
        }
        return _Planned(need, transfers)


def _uneven_axis(candidate: Candidate) -> str | None:
    outer, size = next(iter(candidate.axes.items()))
    if size % candidate.slices:
        return _REASONS["slices"].format(axis=outer, size=size, slices=candidate.slices)
    for axis, number in candidate.strategy.divides.items():
        size = candidate.axes.get(axis, 1)
        if number % size:
            return _REASONS["divides"].format(axis=axis, size=size, number=number)
    return None


def _uneven_batch(candidate: Candidate, arrays: Sequence[Any]) -> str | None:
    devices = candidate.batch_devices
    passes = f" of {candidate.passes} passes" if candidate.passes > 1 else ""
    for array in arrays:
        rows = array.shape[0]
        if rows % (devices * candidate.passes):
            return _REASONS["batch"].format(rows=rows, devices=devices, passes=passes)
    return None


class _Transfer(NamedTuple):
    """A kind of transfer, and whether each pass of an accumulation has it: each gathers the weights
    and scatters the gradients again."""

    kind: str
    axes: tuple[str, ...]
    in_each_pass: bool = False


class _Planned(NamedTuple):
    """The bytes of the state on the fullest device, and those of each kind of transfer: without and
    with a repeated forward pass, which gathers weights again."""

    state_bytes: int
    transfers: Mapping[bool, Counter[_Transfer]]


def _transfers_of_leaves(
    state_plan: Plan, candidate: Candidate, known: Roles, *, remat: bool
) -> Counter[_Transfer]:
    batch = PartitionSpec(entry_of(tuple(axis for axis in candidate.axes if axis in BATCH_AXES)))
    gathered = state_plan.fsdp_axes()
    transfers: Counter[_Transfer] = Counter()
    roles = roles_on(state_plan, batch, known, remat=remat)
    for predicted in predict_by_role(state_plan, batch, roles):
        in_each_pass = predicted.path is not None and not gathered.isdisjoint(predicted.axes)
        transfer = _Transfer(predicted.kind, predicted.axes, in_each_pass)
        transfers[transfer] += predicted.total_bytes
    return transfers


def _transfers_of_activations(
    state_plan: Plan, candidate: Candidate, roles: Roles, arrays: Sequence[Any]
) -> Counter[_Transfer]:
    """What tensor parallelism sends, roughly: for each weight that is split along an axis that does
    not split the batch, an all-reduce of its other dim, for each row of this device's batch."""
    # Of a pair of weights, the product with one that is split by rows is a partial sum on each
    # device; the gradient of the input is, for one that is split by columns. So each has one
    # all-reduce in a step (Shoeybi et al. 2019, arXiv:1909.08053, figure 4).
    rows = max(map(_rows, arrays), default=0) // candidate.batch_devices
    transfers: Counter[_Transfer] = Counter()
    for leaf in state_plan.leaves:
        split_by = [set(axes_of(entry)) - set(BATCH_AXES) for entry in leaf.given]
        axes = tuple(axis for axis in candidate.axes if any(axis in dim for dim in split_by))
        if not axes or len(leaf.shape) < 2 or not roles[leaf.path].is_used:
            continue
        first_split = next(dim for dim, axes_of_dim in enumerate(split_by) if axes_of_dim)
        other = math.prod(leaf.shape) // leaf.shape[first_split]  # with the layers of a scan
        transfers[_Transfer("all-reduce", axes)] += rows * other * leaf.dtype.itemsize
    return transfers


def _rows(x: Any) -> int:
    """The rows of a batch: `int32[8,1024]` has 8,192 tokens, `float32[8,256,768]` 2,048 patches."""
    dims = x.shape if x.dtype.kind in "iu" else x.shape[:-1]
    return math.prod(dims)


def _network_axes(candidate: Candidate) -> set[str]:
    """The axes that run over the slow network, where slices or nodes follow each other."""
    sizes = tuple(candidate.axes.values())
    places = np.arange(math.prod(sizes)) * candidate.slices // math.prod(sizes)
    return axes_that_change(places.reshape(sizes), candidate.axes)


def slices_of(topology: Topology | None) -> int:
    """The parts of a topology with a slow network between them."""
    if topology is None:
        return 1
    return topology.slices if topology.chip.dims else topology.shape[0]

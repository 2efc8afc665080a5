"""The ways to train a model on a number of devices, and what the plan alone says of each."""

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
from jax.tree_util import tree_leaves

from treeshard._core.arrays import has_shape
from treeshard._core.mesh import describe_sizes
from treeshard._core.specs import axes_of, entry_of
from treeshard._core.text import human_bytes
from treeshard._core.topologies import Chip, Topology
from treeshard._planning.matching import parameters
from treeshard._planning.plan import Plan, plan
from treeshard._planning.tactics import fsdp
from treeshard.communication._collectives import bytes_on_the_wire
from treeshard.communication._device_groups import axes_that_change
from treeshard.communication._forecast import predict_communication
from treeshard.errors import TreeShardError
from treeshard.programs._cost import link_seconds

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


def named_strategies(state: Any) -> dict[str, Strategy]:
    """The strategies that need no rules for the model: data parallel, ZeRO-1, FSDP and HSDP."""
    everything = [(".*", fsdp("fsdp"))]
    leaves = parameters(plan(state, [(".*", None)], "data=1").leaves)
    branches = sorted({leaf.path.partition("/")[0] for leaf in leaves})
    held = f"^({'|'.join(map(re.escape, branches))})(/|$)"
    parts = [
        (("data",), [(".*", None)]),
        (("data",), [(held, None), (".*", fsdp("data"))]),
        (("fsdp",), everything),
        (("data", "fsdp"), everything),
    ]
    return {name: Strategy(name, *part) for name, part in zip(NAMED, parts, strict=True)}


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
        within = describe_sizes({**self.axes, outer: self.axes[outer] // self.slices})
        return within.replace(" ", ""), f"{outer}={self.slices}"

    @property
    def batch_parts(self) -> int:
        """Into how many parts the batch is split, passes of an accumulation included."""
        across = math.prod(self.axes.get(axis, 1) for axis in BATCH_AXES)
        return across * self.options.get("accumulate", 1)

    def __str__(self) -> str:
        return f"{self.strategy.name} on {self.described}"

    @property
    def described(self) -> str:
        """The mesh, and the options that are not off."""
        chosen = ["remat"] if self.options.get("remat") else []
        passes = self.options.get("accumulate", 1)
        return ", ".join([self.mesh, *chosen, *([f"accumulate={passes}"] if passes > 1 else [])])


def candidates(
    strategies: Sequence[Strategy],
    devices: int,
    slices: int,
    offered: Mapping[str, Sequence[Any]],
) -> Iterator[Candidate]:
    """All factorings of the devices into the axes of each strategy, with each option, and with a
    larger `data` axis around them."""
    for strategy in strategies:
        for extra in ((), ("data",)):
            if set(extra) & set(strategy.axes) or (extra and strategy.axes == ("fsdp",)):
                continue  # FSDP inside a data axis is HSDP
            for axes in _factorings((*extra, *strategy.axes), devices):
                for options in product(*offered.values()):
                    chosen = dict(zip(offered, options, strict=True))
                    yield Candidate(strategy, axes, chosen, slices)


def _factorings(names: tuple[str, ...], devices: int) -> Iterator[dict[str, int]]:
    if len(names) == 1:
        yield {names[0]: devices}
        return
    for size in range(2, devices):
        if devices % size == 0:
            for rest in _factorings(names[1:], devices // size):
                if min(rest.values()) > 1:
                    yield {names[0]: size, **rest}


# ------------------------------------------------------------------ what the plan says


class Estimate(NamedTuple):
    """What the plan alone says of a candidate.

    `state_bytes` are those of the fullest device: less than what a step needs. `moved_bytes` are
    exact for leaves, and rough for the activations of tensor parallelism.
    """

    state_bytes: int
    moved_bytes: int
    seconds: float


@dataclass
class Estimator:
    """Plans candidates: those that differ in their options only, once."""

    state: Any
    batch: Any
    chip: Chip | None
    capacity: int | None
    plans: "dict[tuple[int, str], _Planned | str]" = field(default_factory=dict)

    def estimate(self, candidate: Candidate) -> Estimate | str:
        """Why a candidate cannot be, or what its plan says."""
        outer = next(iter(candidate.axes.items()))
        if outer[1] % candidate.slices:
            return f"{outer[0]}={outer[1]} cannot be split over {candidate.slices} slices or nodes"
        for axis, number in candidate.strategy.divides.items():
            if number % candidate.axes.get(axis, 1):
                return f"{axis}={candidate.axes[axis]} does not divide {number}"
        arrays = [x for x in tree_leaves(self.batch) if has_shape(x) and x.shape]
        for x in arrays:
            if x.shape[0] % candidate.batch_parts:
                passes = candidate.options.get("accumulate", 1)
                of = f" of {passes} passes" if passes > 1 else ""
                parts = candidate.batch_parts // passes
                return f"a batch of {x.shape[0]} does not divide by {parts} devices{of}"
        key = id(candidate.strategy.rules), candidate.mesh  # names need not differ
        if key not in self.plans:
            self.plans[key] = self._planned(candidate, arrays)
        planned = self.plans[key]
        if isinstance(planned, str):
            return planned
        moved, seconds = 0, 0.0
        between = network_axes(candidate)
        for sent, size in planned.sent.items():
            if sent.is_again and not candidate.options.get("remat"):
                continue
            size *= candidate.options.get("accumulate", 1) if sent.in_each_pass else 1
            devices = math.prod(candidate.axes[axis] for axis in sent.axes)
            on_wire = bytes_on_the_wire(sent.kind, size, devices)
            seconds += link_seconds(on_wire, sent.axes, self.chip, between) or 0.0
            moved += size
        return Estimate(planned.state_bytes, moved, seconds)

    def _planned(self, candidate: Candidate, batch: Sequence[Any]) -> "_Planned | str":
        try:
            planned = plan(self.state, candidate.strategy.rules, candidate.mesh)
        except TreeShardError as error:
            return str(error)
        for finding in planned.findings:
            if finding.severity == "error":
                return str(finding)
        need = planned.bytes_per_device()
        if self.capacity is not None and need > self.capacity:
            return (
                f"does not fit: the state alone needs {human_bytes(need)} of"
                f" {human_bytes(self.capacity)}"
            )
        return _Planned(need, _sent(planned, candidate) + _activations(planned, candidate, batch))


class _Sent(NamedTuple):
    """A kind of transfer: whether only a repeated forward pass has it, and whether each pass of an
    accumulation does, which gathers the weights and scatters the gradients again."""

    kind: str
    axes: tuple[str, ...]
    is_again: bool = False
    in_each_pass: bool = False


class _Planned(NamedTuple):
    """The bytes of the state on the fullest device, and those of each kind of transfer."""

    state_bytes: int
    sent: Counter[_Sent]


def _sent(planned: Plan, candidate: Candidate) -> Counter[_Sent]:
    along = tuple(axis for axis in candidate.axes if axis in BATCH_AXES)
    gathered = planned.fsdp_axes()
    sent: Counter[_Sent] = Counter()
    for one in predict_communication(planned, batch=PartitionSpec(entry_of(along)), remat=True):
        in_each_pass = one.path is not None and not gathered.isdisjoint(one.axes)
        sent[_Sent(one.kind, one.axes, "again" in one.why, in_each_pass)] += one.total_bytes
    return sent


def _activations(planned: Plan, candidate: Candidate, batch: Sequence[Any]) -> Counter[_Sent]:
    """What tensor parallelism sends, roughly: for each weight that is split along an axis that does
    not split the batch, an all-reduce of its other dim, for each row of this device's batch."""
    across = math.prod(candidate.axes.get(axis, 1) for axis in BATCH_AXES)
    rows = max((_rows(x) for x in batch), default=0) // across
    sent: Counter[_Sent] = Counter()
    for leaf in parameters(planned.leaves):
        own = {axis for entry in leaf.given for axis in axes_of(entry)} - set(BATCH_AXES)
        if own and len(leaf.shape) > 1:
            axes = tuple(axis for axis in candidate.axes if axis in own)
            dim = next(i for i, entry in enumerate(leaf.given) if own & set(axes_of(entry)))
            other = math.prod(leaf.shape) // leaf.shape[dim]  # with the layers of a scan
            sent[_Sent("all-reduce", axes)] += rows * other * leaf.dtype.itemsize
    return sent


def _rows(x: Any) -> int:
    """The rows of a batch: tokens, or all dims but the last of floats."""
    return math.prod(x.shape if x.dtype.kind in "iu" else x.shape[:-1])


def network_axes(candidate: Candidate) -> set[str]:
    """The axes that run over the slow network, where slices or nodes follow each other."""
    sizes = tuple(candidate.axes.values())
    places = np.arange(math.prod(sizes)) * candidate.slices // math.prod(sizes)
    return axes_that_change(places.reshape(sizes), candidate.axes)


def slices_of(topology: Topology | None) -> int:
    """The parts of a topology with a slow network between them."""
    if topology is None:
        return 1
    return topology.slices if topology.chip.dims else topology.shape[0]

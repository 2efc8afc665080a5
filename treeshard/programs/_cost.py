"""What a compiled step computes and moves on one device, and the least time that this takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from treeshard._core.make_mesh import with_devices
from treeshard._core.text import columns, human_bytes
from treeshard._core.topologies import Chip, chip_of
from treeshard._planning.plan import Plan
from treeshard.communication._collectives import Collective, CollectiveReader, total
from treeshard.communication._dataflow import Dataflow
from treeshard.communication._device_groups import axes_that_change
from treeshard.communication._differences import collective_lines
from treeshard.communication._program import ReadProgram
from treeshard.programs._flops import compiled_flops, traced_flops
from treeshard.programs._memory import host_bytes
from treeshard.programs._traffic import memory_traffic

_ESTIMATE = "an estimate from published peaks that no chip has confirmed"


@dataclass(frozen=True)
class Cost:
    """The work of one step on one device, and a roofline; `str()` of it is a table.

    The seconds divide the work by the published peaks of the device, rings assumed. **No chip has
    confirmed them**: they serve to compare programs and to see what bounds them, not to predict
    the time of a step. What cannot be counted is `None`.

    Attributes:
        flops: Floating-point operations of matrix products and convolutions in the program, with
            the trips of loops.
        even_flops: Those of the step as it was traced, divided evenly over the devices. Scans and
            what `jax.checkpoint` repeats are counted. If they are fewer than `flops`, devices
            repeat each other's work.
        memory_bytes: Bytes that the program's ops read and write in main memory.
        hidden_bytes: Bytes that the device sends in collectives that can overlap with other work.
        exposed_bytes: Bytes that it sends while it waits.
        compute_seconds: `flops` at the peak for bfloat16.
        memory_seconds: `memory_bytes` at the peak of the memory.
        hidden_seconds: The time of the collectives that can overlap with other work.
        exposed_seconds: The time of those that cannot.
        exposed: The collectives that cannot overlap, the slowest first.
        unknown: Why something could not be counted.
        device: The kind of device.

    Examples:
        >>> cost = ts.programs.Cost(
        ...     4 * 10**12, 10**12, 2**33, 0, 2**30, 0.02, 0.01, 0.0, 0.03, (), (), "TPU v5 lite"
        ... )
        >>> cost.bound, round(cost.seconds, 3)
        ('collectives, exposed', 0.05)
    """

    flops: int | None
    even_flops: int | None
    memory_bytes: int | None
    hidden_bytes: int | None
    exposed_bytes: int | None
    compute_seconds: float | None
    memory_seconds: float | None
    hidden_seconds: float | None
    exposed_seconds: float | None
    exposed: tuple[Collective, ...]
    unknown: tuple[str, ...]
    device: str

    @property
    def bound(self) -> str | None:
        """What takes longest: `"compute"`, `"memory"`, `"collectives, hidden"` or `"collectives,
        exposed"`; `None` if some of it is unknown."""
        times = {name: seconds for name, _, seconds in self._rows()}
        if None in times.values():
            return None
        return max(times, key=lambda name: times[name] or 0)

    @property
    def seconds(self) -> float | None:
        """The least time at these peaks: the longest of what can overlap, and what is exposed."""
        overlapping = self.compute_seconds, self.memory_seconds, self.hidden_seconds
        known = [seconds for seconds in overlapping if seconds is not None]
        if len(known) < 3 or self.exposed_seconds is None:
            return None
        return max(known) + self.exposed_seconds

    def _rows(self) -> list[tuple[str, str, float | None]]:
        return [
            ("compute", _operations(self.flops), self.compute_seconds),
            ("memory", _size(self.memory_bytes), self.memory_seconds),
            ("collectives, hidden", _size(self.hidden_bytes), self.hidden_seconds),
            ("collectives, exposed", _size(self.exposed_bytes), self.exposed_seconds),
        ]

    def __str__(self) -> str:
        rows = [(name, size, _time(seconds)) for name, size, seconds in self._rows()]
        lines = [f"per step and {self.device}, {_ESTIMATE}:", columns(rows, right=1)]
        if self.seconds is not None:
            lines.append(f"at least {_time(self.seconds)}, bound by {self.bound}")
        if self.flops is not None and self.even_flops:
            ratio = self.flops / self.even_flops
            if ratio > 1.05:
                lines.append(
                    f"Each device does {ratio:.2f} x an even share of the step's operations:"
                    " devices repeat each other's work. Split the batch over every axis that does"
                    " not split the computation."
                )
        lines += [f"unknown: {reason}" for reason in self.unknown]
        shown = collective_lines(self.exposed, 5)
        return "\n".join([*lines, *(["exposed, the slowest first:", *shown] if shown else [])])


def _operations(count: int | None) -> str:
    if count is None:
        return "unknown"
    power = min(len(f"{count:d}") - 1, 18) // 3
    return f"{count / 1000**power:,.1f} {('', 'K', 'M', 'G', 'T', 'P', 'E')[power]}FLOP"


def _size(count: int | None) -> str:
    return "unknown" if count is None else human_bytes(count)


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:,.2f} ms"


def cost_of(read: ReadProgram, jaxpr: ClosedJaxpr, plan: Plan, chip: Chip | None = None) -> Cost:
    """Adds up the work of a program, which is the step `jaxpr`, compiled for the plan's mesh."""
    mesh = with_devices(plan.mesh, "cost", compile_only=True)
    device = mesh.devices.flat[0]
    chip = chip or chip_of(device)
    flow = Dataflow(read.graph)
    flops, traced, moved = compiled_flops(flow), traced_flops(jaxpr.jaxpr), memory_traffic(flow)
    unknown = [*sorted(flops.unknown | traced.unknown)]
    if moved is None:
        unknown.append("bytes of memory in a loop or a branch that depends on data")
    if chip is None:
        unknown.append(f"the peaks of {device.device_kind}")
    if host := host_bytes(plan):
        unknown.append(f"the time to copy {human_bytes(host)} of the state from the host and back")
    between = _network_axes(mesh)
    moves = [
        (one, link_seconds(_sent([one]), one.axes, chip, between))
        for one in CollectiveReader(read).all()
    ]
    if any(one.wire_bytes is None or one.count is None for one, _ in moves):
        unknown.append("bytes of collectives, see `communication()`")
    hidden = [(one, time) for one, time in moves if one.is_async]
    exposed = [(one, time) for one, time in moves if not one.is_async]
    exposed.sort(key=lambda pair: -(pair[1] or 0))
    return Cost(
        flops=flops.number,
        even_flops=None if traced.number is None else -(-traced.number // mesh.size),
        memory_bytes=moved,
        hidden_bytes=_sent(one for one, _ in hidden),
        exposed_bytes=_sent(one for one, _ in exposed),
        compute_seconds=flops.number / chip.flops if chip and flops.number is not None else None,
        memory_seconds=moved / chip.memory_bandwidth if chip and moved is not None else None,
        hidden_seconds=_added(time for _, time in hidden),
        exposed_seconds=_added(time for _, time in exposed),
        exposed=tuple(one for one, _ in exposed if one.wire_bytes != 0),
        unknown=tuple(unknown),
        device=device.device_kind,
    )


def _sent(moved: Iterable[Collective]) -> int | None:
    return total(
        None if one.wire_bytes is None or one.count is None else one.wire_bytes * one.count
        for one in moved
    )


def _added(times: Iterable[float | None]) -> float | None:
    known = list(times)
    return None if None in known else sum((time or 0.0 for time in known), 0.0)


def link_seconds(
    sent: int | None, axes: Sequence[str] | None, chip: Chip | None, between: set[str]
) -> float | None:
    """The time to send bytes along mesh axes: over two links of a torus, over all links of a GPU,
    or over a device's share of the network for the axes `between` slices or nodes."""
    if sent == 0:
        return 0.0
    if chip is None or sent is None or axes is None:
        return None
    links = (2 if chip.dims else 1) * chip.link_bandwidth
    return sent / (chip.network_bandwidth if between & set(axes) else links)


def _network_axes(mesh: Mesh) -> set[str]:
    """The axes that run over the network: between slices of TPUs, or nodes of GPUs."""
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    number = np.vectorize(lambda x: x.process_index if is_gpu else getattr(x, "slice_index", 0))
    return axes_that_change(number(mesh.devices), mesh.axis_names)

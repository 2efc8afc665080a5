"""What a compiled step computes and moves on one device, and the least time that this takes.

The compiler has a cost analysis of its own. It counts the body of a loop once, says neither which
bytes are collectives nor whether these overlap with other work, and differs between backends; so
the ops are counted here, and only peaks that are published turn counts into times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from treeshard._core.make_mesh import with_devices
from treeshard._core.text import columns
from treeshard._core.topologies import Chip, chip_of
from treeshard._planning.plan import Plan
from treeshard.communication._collectives import (
    Collective,
    CollectiveReader,
    bytes_text,
    total,
)
from treeshard.communication._dataflow import Dataflow
from treeshard.communication._device_groups import axes_that_change
from treeshard.communication._differences import collective_lines
from treeshard.communication._program import ReadProgram
from treeshard.programs._flops import compiled_flops, traced_flops
from treeshard.programs._memory import host_bytes
from treeshard.programs._traffic import host_traffic, memory_traffic

_ESTIMATE = "an estimate from published peaks that no chip has confirmed"
_REPEATED = (
    "Each device does {share:.2f} x an even share of the step's operations: devices repeat each"
    " other's work. Split the batch over every axis that does not split the computation."
)
_MOST_SHARE = 1.05  # rounding, and the padding of small dims


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
        to_host_bytes: Bytes that the program copies to the memory of the device's host, such as
            what a policy of `jax.checkpoint` offloads. Their time is not known.
        from_host_bytes: Bytes that it copies back.

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
    to_host_bytes: int | None = 0
    from_host_bytes: int | None = 0

    @property
    def bound(self) -> str | None:
        """What takes longest: `"compute"`, `"memory"`, `"collectives, hidden"` or `"collectives,
        exposed"`; `None` if some of it is unknown."""
        times = self._times()
        return max(times, key=times.__getitem__, default=None)

    @property
    def seconds(self) -> float | None:
        """The least time at these peaks: the longest of what can overlap, and what is exposed."""
        times = self._times()
        if not times:
            return None
        exposed = times.pop("collectives, exposed")
        return max(times.values()) + exposed

    @property
    def share(self) -> float | None:
        """The operations of a device, x an even share of the step's; `None` if unknown."""
        return self.flops / self.even_flops if self.flops and self.even_flops else None

    def _rows(self) -> list[tuple[str, str, float | None]]:
        return [
            ("compute", _operations(self.flops), self.compute_seconds),
            ("memory", _size(self.memory_bytes), self.memory_seconds),
            ("collectives, hidden", _size(self.hidden_bytes), self.hidden_seconds),
            ("collectives, exposed", _size(self.exposed_bytes), self.exposed_seconds),
        ]

    def _times(self) -> dict[str, float]:
        """The seconds of each kind of work; empty if one is unknown."""
        rows = self._rows()
        times = {name: seconds for name, _, seconds in rows if seconds is not None}
        return times if len(times) == len(rows) else {}

    def __str__(self) -> str:
        rows = [(name, size, _time(seconds)) for name, size, seconds in self._rows()]
        of_host = {"to the host": self.to_host_bytes, "from the host": self.from_host_bytes}
        rows += [(name, _size(size), "unknown") for name, size in of_host.items() if size != 0]
        lines = [f"per step and {self.device}, {_ESTIMATE}:", columns(rows, right=1)]
        if self.seconds is not None:
            lines.append(f"at least {_time(self.seconds)}, bound by {self.bound}")
        if self.share is not None and self.share > _MOST_SHARE:
            lines.append(_REPEATED.format(share=self.share))
        lines += [f"unknown: {reason}" for reason in self.unknown]
        if exposed := collective_lines(self.exposed, 5):
            lines += ["exposed, the slowest first:", *exposed]
        return "\n".join(lines)


def _operations(count: int | None) -> str:
    if count is None:
        return "unknown"
    power = min(len(str(count)) - 1, 18) // 3
    return f"{count / 1000**power:,.1f} {('', 'K', 'M', 'G', 'T', 'P', 'E')[power]}FLOP"


def _size(count: int | None) -> str:
    return bytes_text(count, "unknown")


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:,.2f} ms"


# ------------------------------------------------------------------ from a program


class _Transfer(NamedTuple):
    """A collective with the bytes that a device sends in a step, and their time."""

    collective: Collective
    sent: int | None
    seconds: float | None


def cost_of(read: ReadProgram, jaxpr: ClosedJaxpr, plan: Plan, chip: Chip | None = None) -> Cost:
    """Adds up the work of a program, which is the step `jaxpr`, compiled for the plan's mesh."""
    mesh = with_devices(plan.mesh, "cost", compile_only=True)
    device = mesh.devices.flat[0]
    chip = chip or chip_of(device)
    flow = Dataflow(read.graph)
    flops, traced = compiled_flops(flow), traced_flops(jaxpr.jaxpr)
    memory_bytes = memory_traffic(flow)
    host = host_bytes(plan)
    copies = host_traffic(flow)
    # Programs for CPUs, which have one memory, do not name that of the host.
    copied = 2 * host if copies == (0, 0) else total(copies)
    transfers = _transfers(read, mesh, chip)
    hidden = [transfer for transfer in transfers if transfer.collective.is_async]
    exposed = [transfer for transfer in transfers if not transfer.collective.is_async]
    exposed.sort(key=lambda transfer: -(transfer.seconds or 0))
    has_unknown_links = chip is not None and any(
        transfer.sent is not None and transfer.seconds is None for transfer in transfers
    )
    reasons = {
        "bytes of memory in a loop or a branch that depends on data": memory_bytes is None,
        f"the peaks of {device.device_kind}": chip is None,
        f"the time to copy {_size(copied)} to the host and back": copied != 0,
        "bytes of collectives, see `communication()`": _total_sent(transfers) is None,
        "the links of collectives between devices that do not form axes": has_unknown_links,
    }
    return Cost(
        flops=flops.number,
        even_flops=None if traced.number is None else -(-traced.number // mesh.size),
        memory_bytes=memory_bytes,
        hidden_bytes=_total_sent(hidden),
        exposed_bytes=_total_sent(exposed),
        compute_seconds=_seconds(flops.number, chip and chip.flops),
        memory_seconds=_seconds(memory_bytes, chip and chip.memory_bandwidth),
        hidden_seconds=_total_seconds(hidden),
        exposed_seconds=_total_seconds(exposed),
        exposed=tuple(transfer.collective for transfer in exposed if transfer.sent != 0),
        unknown=(
            *sorted(flops.unknown | traced.unknown),
            *(reason for reason, is_unknown in reasons.items() if is_unknown),
        ),
        device=device.device_kind,
        to_host_bytes=copies.to_host,
        from_host_bytes=copies.from_host,
    )


def _transfers(read: ReadProgram, mesh: Mesh, chip: Chip | None) -> list[_Transfer]:
    between = _network_axes(mesh)
    transfers: list[_Transfer] = []
    for collective in CollectiveReader(read).all():
        sent = None
        if collective.wire_bytes is not None and collective.count is not None:
            sent = collective.wire_bytes * collective.count
        seconds = link_seconds(sent, _axes_of(collective, between), chip, between)
        transfers.append(_Transfer(collective, sent, seconds))
    return transfers


def _axes_of(collective: Collective, between: set[str]) -> tuple[str, ...] | None:
    """The axes whose links a collective uses; `None` if they are not known.

    A part of an axis has the links of the axis. Of an axis that runs over the network, a part may
    be one slice or node, or cross them.
    """
    if collective.axes is not None or collective.within is None:
        return collective.axes
    return collective.within if between.isdisjoint(collective.within) else None


def _total_sent(transfers: Iterable[_Transfer]) -> int | None:
    return total(transfer.sent for transfer in transfers)


def _total_seconds(transfers: Iterable[_Transfer]) -> float | None:
    times = [transfer.seconds for transfer in transfers]
    known = [seconds for seconds in times if seconds is not None]
    return sum(known, 0.0) if len(known) == len(times) else None


def _seconds(amount: int | None, per_second: float | None) -> float | None:
    return None if amount is None or per_second is None else amount / per_second


def link_seconds(
    sent: int | None, axes: Sequence[str] | None, chip: Chip | None, between: set[str]
) -> float | None:
    """The time to send bytes along mesh axes: over two links of a torus, over all links of a GPU,
    or over a device's share of the network for the axes `between` slices or nodes."""
    if sent == 0:
        return 0.0
    if chip is None or sent is None or axes is None:
        return None
    if not between.isdisjoint(axes):
        return sent / chip.network_bandwidth
    # A ring along an axis of a torus sends in both directions at once. The links of a GPU are
    # published together, since any of them reaches every other GPU of the node.
    links = 2 if chip.dims else 1
    return sent / (links * chip.link_bandwidth)


def _network_axes(mesh: Mesh) -> set[str]:
    """The axes that run over the network: between slices of TPUs, or nodes of GPUs."""
    numbers = np.vectorize(_slice_or_node)(mesh.devices)
    return axes_that_change(numbers, mesh.axis_names)


def _slice_or_node(device: Any) -> int:
    # GPUs do not tell their node: a process stands for it. Where TPUs have one slice, JAX may leave
    # out `slice_index`.
    if device.platform == "gpu":
        return device.process_index
    return getattr(device, "slice_index", 0)

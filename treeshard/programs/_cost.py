"""What a compiled step computes and moves on one device, and the time that this takes.

The compiler has a cost analysis of its own. It counts the body of a loop once, says neither which
bytes are collectives nor whether these overlap with other work, and differs between backends; so
the ops are counted here, and only peaks that are published turn counts into times. Each time has an
error bar: the published runs of `benchmarks/published_runs.py` lie within it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from treeshard._core.make_mesh import with_devices
from treeshard._core.text import columns, fold, human_bytes
from treeshard._core.topologies import Chip, chip_of
from treeshard._planning.plan import Plan
from treeshard._trace.uses import region_of
from treeshard.communication._collectives import Collective, axes_text, is_scalar, total
from treeshard.communication._dataflow import Dataflow
from treeshard.communication._differences import collective_lines
from treeshard.communication._program import ReadProgram
from treeshard.programs._flops import (
    Kernels,
    compiled_flops,
    least_flops,
    traced_flops,
    written_out_attention,
)
from treeshard.programs._links import Links, network_axes, torus_of
from treeshard.programs._memory import host_bytes
from treeshard.programs._traffic import host_traffic, memory_traffic

# The least share of a peak that the published runs imply: see the table of
# docs/guide/the-pod-you-do-not-have.md.
REACHED = 0.5
_ESTIMATE = (
    "computed from published peak speeds, not measured; published runs reached"
    f" {REACHED:.0%} of these or more"
)
_REPEATED = (
    "Each device does {share:.2f} x an even share of the step's operations: devices repeat each"
    " other's work. Split the batch over every axis that does not split the computation."
)
_WRITTEN_OUT = (
    "Attention is written out: its scores, {scores}, go through memory. A kernel keeps them on the"
    " chip, which changes memory and time: jax.nn.dot_product_attention(implementation='cudnn') on"
    " GPUs, splash_attention of jax.experimental.pallas.ops.tpu on TPUs."
)
_MOST_SHARE = 1.05  # rounding, and the padding of small dims


@dataclass(frozen=True)
class Transfer:
    """One collective of a step, with its time at the published peaks.

    Attributes:
        collective: What is moved; `is_async` says whether it can overlap with other work.
        leaf: The leaf that is moved or whose gradient is reduced, by its path in the plan; `None`
            for other values, such as activations. As `Comparison.leaves`.
        axes: The mesh axes whose links carry it; `None` if unknown.
        bytes: What a device sends in all executions; `None` if unknown.
        seconds: The time of all executions; `None` if unknown.

    Examples:
        >>> moved = ts.communication.Collective(
        ...     "all-gather", "float32", 4096, 3584, ("fsdp",), count=12
        ... )
        >>> ts.programs.Transfer(moved, "w", ("fsdp",), 12 * 3584, 1e-6).collective.kind
        'all-gather'
    """

    collective: Collective
    leaf: str | None
    axes: tuple[str, ...] | None
    bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class Cost:
    """The work of one step on one device, and a roofline; `str()` of it is a table.

    `treeshard.draw(cost)` draws it along time, with the collectives of each leaf, and
    `treeshard.draw(cost, "cost.svg")` writes that as a picture.

    The seconds divide the work by the published peaks of the device, and by the links between chips
    that each collective uses. They are estimates, to compare programs and to see what bounds them.
    The error bar of each reaches to twice of it: published runs reached half of the peaks or
    more. What cannot be counted is in `unknown`, and the rest of its row is a lower bound.

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
        transfers: The collectives, in the order of the program, with the leaf and the time of each.
        unknown: What could not be counted.
        device: The kind of device.
        to_host_bytes: Bytes that the program copies to the memory of the device's host, such as
            what a policy of `jax.checkpoint` offloads. Their time is not known.
        from_host_bytes: Bytes that it copies back.
        least_seconds: A bound: this program takes no less than its matrix products at the peak, or
            than what it sends over all links of the chip at once.
        incomplete: The rows that lack something, such as `"compute"` without a kernel.
        advice: What would change the memory and the time.

    Examples:
        >>> cost = ts.programs.Cost(
        ...     4 * 10**12, 10**12, 2**33, 0, 2**30, 0.02, 0.01, 0.0, 0.03, (), (), "TPU v5 lite",
        ...     least_seconds=0.02,
        ... )
        >>> cost.bound, round(cost.seconds, 3), [round(x, 3) for x in cost.range]
        ('collectives, exposed', 0.05, [0.02, 0.1])
    """

    flops: int
    even_flops: int | None
    memory_bytes: int
    hidden_bytes: int
    exposed_bytes: int
    compute_seconds: float | None
    memory_seconds: float | None
    hidden_seconds: float | None
    exposed_seconds: float | None
    transfers: tuple[Transfer, ...]
    unknown: tuple[str, ...]
    device: str
    to_host_bytes: int | None = 0
    from_host_bytes: int | None = 0
    least_seconds: float | None = None
    incomplete: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def exposed(self) -> tuple[Collective, ...]:
        """The collectives that cannot overlap with other work, the slowest first."""
        waits = [x for x in self.transfers if not x.collective.is_async and x.bytes != 0]
        return tuple(x.collective for x in sorted(waits, key=lambda x: -(x.seconds or 0)))

    @property
    def bound(self) -> str | None:
        """What takes longest: `"compute"`, `"memory"`, `"collectives, hidden"` or `"collectives,
        exposed"`; `None` if some of it is unknown."""
        if self.incomplete:
            return None
        times = self._times()
        return max(times, key=times.__getitem__, default=None)

    @property
    def seconds(self) -> float | None:
        """The time at these peaks: the longest of what can overlap, and what is exposed; without
        what `unknown` lists. `None` if the peaks are not known."""
        times = self._times()
        if not times:
            return None
        exposed = times.pop("collectives, exposed")
        return max(times.values()) + exposed

    @property
    def range(self) -> tuple[float, float] | None:
        """The error bar of `seconds`: from the bound to what a chip takes that reaches half of its
        peaks; `None` if some of it is unknown."""
        if self.seconds is None or self.incomplete:
            return None
        return self.least_seconds or 0.0, self.seconds / REACHED

    @property
    def share(self) -> float | None:
        """The operations of a device, x an even share of the step's; `None` if unknown."""
        if not self.flops or not self.even_flops or "compute" in self.incomplete:
            return None
        return self.flops / self.even_flops

    def _rows(self) -> list[tuple[str, str, float | None]]:
        return [
            ("compute", _operations(self.flops), self.compute_seconds),
            ("memory", human_bytes(self.memory_bytes), self.memory_seconds),
            ("collectives, hidden", human_bytes(self.hidden_bytes), self.hidden_seconds),
            ("collectives, exposed", human_bytes(self.exposed_bytes), self.exposed_seconds),
        ]

    def _times(self) -> dict[str, float]:
        """The seconds of each kind of work; empty if the peaks are not known."""
        rows = self._rows()
        times = {name: seconds for name, _, seconds in rows if seconds is not None}
        return times if len(times) == len(rows) else {}

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for name, size, seconds in self._rows():
            is_least = name in self.incomplete
            rows.append((name, f"> {size}" if is_least else size, _bar(seconds, is_least)))
        of_host = {"to the host": self.to_host_bytes, "from the host": self.from_host_bytes}
        rows += [(name, _size(size), "unknown") for name, size in of_host.items() if size != 0]
        lines = [f"per step and {self.device}, {_ESTIMATE}:", columns(rows, right=1)]
        lines += self._in_all()
        if self.share is not None and self.share > _MOST_SHARE:
            lines.append(_REPEATED.format(share=self.share))
        lines += [f"unknown: {reason}" for reason in self.unknown]
        lines += self.advice
        if exposed := collective_lines(self.exposed, 5):
            lines += ["exposed, the slowest first:", *exposed]
        return "\n".join(lines)

    def _in_all(self) -> list[str]:
        """The time of the step and its error bar, in words; nothing if the peaks are unknown."""
        if self.seconds is not None and self.incomplete:
            return [f"{_time(self.seconds)}, and the time of what is unknown"]
        if self.range is None:
            return []
        least, most = map(_time, self.range)
        return [
            f"about {_time(self.seconds)}, bound by {self.bound}",
            f"at least {least}, and {most} where a chip reaches {REACHED:.0%} of them",
        ]

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        bars = _scale(self.seconds)
        table = Table("", "", "pass", "runs", bars, "time", box=None, header_style="")
        table.columns[3].justify = table.columns[5].justify = "right"
        for name, size, seconds in self._rows():
            is_exposed = name == "collectives, exposed"
            begin = self._before_exposed() if is_exposed else 0.0
            is_least = name in self.incomplete
            time = f"> {_time(seconds)}" if is_least and seconds is not None else _time(seconds)
            bar = _Bar(begin, seconds, self.seconds, _COLOURS[name])
            table.add_row(Text(name, "bold"), Text(size), "", "", bar, Text(time, "bold"))
            of_lane = [x for x in self.transfers if x.collective.is_async != is_exposed]
            for row in _drawn(of_lane) if name in _LANES else ():
                bar = _Bar(begin, row.seconds, self.seconds, _COLOURS[name])
                table.add_row(*map(Text, row.cells), bar, Text(_time(row.seconds)))
                begin += row.seconds or 0.0
        title = f"one step along time, on each {self.device}"
        notes = [_CAPTION, *([_ALIKE] if _has_alike(self.transfers) else [])]
        notes += [*self._in_all(), *(f"unknown: {reason}" for reason in self.unknown)]
        return Group(Text(title, "bold"), "", table, "", *map(Text, notes))

    def _before_exposed(self) -> float:
        return (self.seconds or 0.0) - (self.exposed_seconds or 0.0)


def _size(size: int | None) -> str:
    return "unknown" if size is None else human_bytes(size)


def _operations(count: int) -> str:
    power = min(len(str(count)) - 1, 18) // 3
    return f"{count / 1000**power:,.1f} {('', 'K', 'M', 'G', 'T', 'P', 'E')[power]}FLOP"


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:,.2f} ms"


def _bar(seconds: float | None, is_least: bool) -> str:
    """A time with its error bar: `100.00 to 166.67 ms`; `> 100.00 ms` if it lacks something."""
    if seconds is not None and is_least:
        return f"> {_time(seconds)}"
    if not seconds:
        return _time(seconds)
    return f"{1000 * seconds:,.2f} to {_time(seconds / REACHED)}"


# ------------------------------------------------------------------ along time

_LANES = ("collectives, hidden", "collectives, exposed")
_COLOURS = {
    "compute": "#7570b3",
    "memory": "#a6761d",
    "collectives, hidden": "#1b9e77",
    "collectives, exposed": "#d95f02",
}
_BAR_WIDTH = 40
_BLOCKS = ("", *"▏▎▍▌▋▊▉█")  # by eighths of a character
_MOST_DRAWN = 12  # rows of a lane
_LONGEST_NAME = 30
_CAPTION = (
    "Time is computed from published peaks, and not measured. Compute, memory and hidden"
    " collectives overlap.\nThe device waits for exposed ones: these are drawn at the end, and in"
    " the program come in between."
)
_GRADIENT = "gradient"
_ALIKE = "Gradients of leaves of one size are told apart by their order only."


class _Drawn(NamedTuple):
    """Collectives of one kind and leaf, or of leaves that differ only in numbers, in one row."""

    name: str
    what: str
    of_pass: str
    times: str
    seconds: float | None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        name = self.name
        if len(name) > _LONGEST_NAME:
            name = f"...{name[3 - _LONGEST_NAME :]}"
        return f"  {name}", self.what, self.of_pass, self.times


def _scale(seconds: float | None) -> str:
    """The head of the bars: where they begin and end."""
    return "" if seconds is None else f"0{_time(seconds):>{_BAR_WIDTH - 1}}"


class _Bar(NamedTuple):
    """A bar over a part of the time of a step, or words where that is unknown.

    It begins at a full character, as `rich.bar` does not, so that the lengths of two can be
    compared by eye.
    """

    begin: float
    seconds: float | None
    whole: float | None
    colour: str

    def __rich__(self) -> Any:
        from rich.text import Text

        if self.seconds is None or not self.whole:
            return Text("time unknown" if self.seconds is None else "", "italic")
        scale = _BAR_WIDTH / self.whole
        eighths = round(8 * self.seconds * scale) or bool(self.seconds)
        blocks = _BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8]
        return Text(" " * int(self.begin * scale) + blocks, self.colour)


def _drawn(transfers: Iterable[Transfer]) -> Iterator[_Drawn]:
    """A row for each leaf, kind and pass, in the order of the program; of many, the slowest."""
    moving = [x for x in transfers if x.bytes != 0]
    keyed = ((_name(x), (*_what(x), x.seconds is None), x) for x in moving)
    rows = [(name, members, _seconds_of(members)) for name, members in fold(keyed)]
    # What is unknown is not left out.
    slowest = sorted(rows, key=lambda row: -(float("inf") if row[2] is None else row[2]))
    shown, others = slowest[:_MOST_DRAWN], slowest[_MOST_DRAWN:]
    for row in filter(shown.__contains__, rows):
        name, members, seconds = row
        yield _Drawn(name, *_what(members[0]), _times(members), seconds)
    for is_unknown in (False, True):
        rest = [row for row in others if (row[2] is None) == is_unknown]
        if rest:
            of_rest = [x for _, members, _ in rest for x in members]
            yield _Drawn(f"and {len(rest)} more", "", "", _times(of_rest), _seconds_of(of_rest))


def _has_alike(transfers: Iterable[Transfer]) -> bool:
    """Whether there are gradients of several leaves of one size."""
    gradients = {(x.leaf, x.bytes) for x in transfers if x.leaf and _what(x)[1] == _GRADIENT}
    return len({size for _, size in gradients}) < len(gradients)


def _name(transfer: Transfer) -> str:
    moved = transfer.collective
    if is_scalar(moved):
        return "scalars, such as the loss"
    line = os.path.basename(moved.source) if moved.source else None
    return transfer.leaf or moved.path or line or "(no line)"


def _what(transfer: Transfer) -> tuple[str, str]:
    """`("all-gather fsdp", "forward")`, `("reduce-scatter fsdp", "gradient")`.

    Of some ops, programs do not say in which pass they are: `?`.
    """
    moved = transfer.collective
    is_reduction = moved.kind in ("all-reduce", "reduce-scatter")
    of_pass = "?" if moved.op_name is None else region_of(moved.op_name) or "update"
    if transfer.leaf is not None and is_reduction:
        of_pass = _GRADIENT
    axes = moved.within if moved.axes is None else moved.axes
    return f"{moved.kind} {axes_text(axes)}", of_pass


def _times(transfers: Iterable[Transfer]) -> str:
    count = total(x.collective.count for x in transfers)
    return "x ?" if count is None else f"x {count:,}"


def _seconds_of(transfers: Iterable[Transfer]) -> float | None:
    times = [x.seconds for x in transfers]
    return None if None in times else sum(x or 0.0 for x in times)


# ------------------------------------------------------------------ from a program


def cost_of(
    read: ReadProgram,
    moved: Iterable[tuple[Collective, str | None]],
    jaxpr: ClosedJaxpr,
    plan: Plan,
    chip: Chip | None = None,
    kernels: Kernels = MappingProxyType({}),
) -> Cost:
    """Adds up the work of a program, which is the step `jaxpr`, compiled for the plan's mesh.

    `moved` has its collectives, each with its leaf.
    """
    mesh = with_devices(plan.mesh, "cost", compile_only=True)
    device = mesh.devices.flat[0]
    chip = chip or chip_of(device)
    flow = Dataflow(read.graph)
    flops, traced = compiled_flops(flow, kernels), traced_flops(jaxpr.jaxpr, kernels)
    traffic = memory_traffic(flow)
    host = host_bytes(plan)
    copies = host_traffic(flow)
    # Programs for CPUs, which have one memory, do not name that of the host.
    copied = 2 * host if copies == (0, 0) else total(copies)
    links = Links(chip, network_axes(mesh), torus_of(mesh.devices, mesh.axis_names, chip))
    transfers = [_transfer(*each, links) for each in moved]
    hidden = _Sent([transfer for transfer in transfers if transfer.collective.is_async])
    exposed = _Sent([transfer for transfer in transfers if not transfer.collective.is_async])
    lacking = {
        "compute": bool(flops.unknown),
        "memory": not traffic.is_complete or copied != 0,
        "collectives, hidden": hidden.lacks_some,
        "collectives, exposed": exposed.lacks_some,
    }
    reasons = {
        "bytes of memory in a loop or a branch that depends on data": not traffic.is_complete,
        f"the peaks of {device.device_kind}": chip is None,
        f"the time to copy {_size(copied)} to the host and back": copied != 0,
        "bytes of collectives, see `communication()`": hidden.lacks_bytes or exposed.lacks_bytes,
        "the links of collectives between devices that do not form axes": (
            chip is not None and (hidden.lacks_links or exposed.lacks_links)
        ),
    }
    return Cost(
        flops=flops.number,
        even_flops=None if traced.unknown else -(-traced.number // mesh.size),
        memory_bytes=traffic.bytes,
        hidden_bytes=hidden.bytes,
        exposed_bytes=exposed.bytes,
        compute_seconds=_seconds(flops.number, chip and chip.flops),
        memory_seconds=_seconds(traffic.bytes, chip and chip.memory_bandwidth),
        hidden_seconds=hidden.seconds if chip else None,
        exposed_seconds=exposed.seconds if chip else None,
        transfers=tuple(transfers),
        unknown=(*sorted(flops.unknown | traced.unknown), *_those_true(reasons)),
        device=device.device_kind,
        to_host_bytes=copies.to_host,
        from_host_bytes=copies.from_host,
        least_seconds=_least_seconds(flow, transfers, links),
        incomplete=_those_true(lacking),
        advice=_advice(jaxpr),
    )


def _those_true(facts: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(name for name, is_true in facts.items() if is_true)


def _least_seconds(flow: Dataflow, transfers: Sequence[Transfer], links: Links) -> float | None:
    if links.chip is None:
        return None
    sending = links.least_seconds((each.bytes, each.axes) for each in transfers)
    return max(least_flops(flow) / links.chip.flops, sending)


def _advice(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    scores = written_out_attention(jaxpr)
    return () if scores is None else (_WRITTEN_OUT.format(scores=scores),)


class _Sent(NamedTuple):
    """What a device sends in some collectives, as far as it is known."""

    transfers: Sequence[Transfer]

    @property
    def bytes(self) -> int:
        return sum(transfer.bytes or 0 for transfer in self.transfers)

    @property
    def seconds(self) -> float:
        return sum((transfer.seconds or 0.0 for transfer in self.transfers), 0.0)

    @property
    def lacks_bytes(self) -> bool:
        return any(transfer.bytes is None for transfer in self.transfers)

    @property
    def lacks_links(self) -> bool:
        """Whether it is not known over which links one is sent."""
        return any(transfer.bytes != 0 and transfer.axes is None for transfer in self.transfers)

    @property
    def lacks_some(self) -> bool:
        return self.lacks_bytes or self.lacks_links


def _transfer(collective: Collective, leaf: str | None, links: Links) -> Transfer:
    sent = None
    if collective.wire_bytes is not None and collective.count is not None:
        sent = collective.wire_bytes * collective.count
    axes = _axes_of(collective, links.between)
    seconds = links.seconds(collective.kind, sent, axes, collective.links)
    return Transfer(collective, leaf, axes, sent, seconds)


def _axes_of(collective: Collective, between: set[str]) -> tuple[str, ...] | None:
    """The axes whose links a collective uses; `None` if they are not known.

    A part of an axis has the links of the axis. Of an axis that runs over the network, a part may
    be one slice or node, or cross them.
    """
    if collective.axes is not None or collective.within is None:
        return collective.axes
    return collective.within if between.isdisjoint(collective.within) else None


def _seconds(amount: int, per_second: float | None) -> float | None:
    return None if per_second is None else amount / per_second

"""What a compiled step needs in the memory of one device, against what the device has."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from treeshard._core.arrays import has_shape
from treeshard._core.make_mesh import is_attached, with_devices
from treeshard._core.text import columns, fold_paths, human_bytes
from treeshard._core.topologies import chip_of
from treeshard._planning.matching import parameters
from treeshard._planning.plan import Plan
from treeshard.communication._dataflow import Context, Dataflow, value
from treeshard.communication._hlo import HloProgram
from treeshard.communication._program import argument_path
from treeshard.errors import DoesNotFitError
from treeshard.programs._buffers import Buffer, LiveBuffer, peak_of


@dataclass(frozen=True)
class Memory:
    """Bytes per device of a compiled step; `str()` of it is a table.

    Attributes:
        kinds: The bytes of its arguments: `"parameters"`, `"other state"` (optimizer state,
            counters, keys) and `"batch"`.
        arguments: The bytes of all arguments, as the compiler lays them out.
        results: The bytes of results that do not reuse the memory of donated arguments.
        temporaries: The bytes of intermediate values at most.
        code: The bytes of the program itself, where it is in the device's memory.
        capacity: The bytes that programs can use on such a device; `None` if that is unknown.
        device: The kind of device.
        at_peak: The temporaries that are live when most memory is in use, the largest first. On
            TPUs, buffers in the chip's vector memory are not among them. Their sum is near
            `temporaries`; it is larger where the compiler puts them into the memory of donated
            arguments, as it does on TPUs with replicated weights.
        advice: What would lower the total by a tenth or more, a sentence each.
        host: The bytes of the state that the plan places in the memory of the device's host. They
            are not in `total`.

    Examples:
        >>> kinds = {"parameters": 2**30, "other state": 2**31, "batch": 2**20}
        >>> memory = ts.programs.Memory(kinds, 3 * 2**30, 0, 2**33, 0, 2**34, "TPU v5 lite", ())
        >>> memory.total // 2**30, memory.fits
        (11, True)
    """

    kinds: dict[str, int]
    arguments: int
    results: int
    temporaries: int
    code: int
    capacity: int | None
    device: str
    at_peak: tuple[LiveBuffer, ...]
    advice: tuple[str, ...] = ()
    host: int = 0

    @property
    def total(self) -> int:
        """All of it together."""
        return self.arguments + self.results + self.temporaries + self.code

    @property
    def fits(self) -> bool | None:
        """Whether it fits; `None` if the capacity is unknown."""
        return None if self.capacity is None else self.total <= self.capacity

    def assert_fits(self) -> None:
        """Raises `DoesNotFitError` unless the step fits.

        Raises:
            DoesNotFitError: If it needs more than the device has, or if that is unknown.
        """
        if self.capacity is None:
            raise DoesNotFitError(
                f"The step needs {human_bytes(self.total)} per device, and the memory of"
                f" {self.device} is not known: compare it yourself."
            )
        if not self.fits:
            raise DoesNotFitError(
                f"The step needs {human_bytes(self.total)} per device, and {self.device} has"
                f" {human_bytes(self.capacity)}.\n{self}",
                self.total,
                self.capacity,
            )

    def __str__(self) -> str:
        rows = [(kind, human_bytes(size)) for kind, size in self.kinds.items() if size]
        rows += [
            ("results", human_bytes(self.results)),
            ("temporaries", human_bytes(self.temporaries)),
            ("code", human_bytes(self.code)),
            ("in all", human_bytes(self.total)),
        ]
        rows += [("and on the host", human_bytes(self.host))] if self.host else []
        capacity = "unknown" if self.capacity is None else human_bytes(self.capacity)
        lines = [columns(rows, right=1), f"of {capacity} on {self.device}"]
        if self.device == "cpu":
            lines.append(
                "The temporaries are those of the CPU's program; accelerators need others."
            )
        if self.at_peak:
            lines.append("live when most memory is in use:")
            lines += [f"    {_line(buffer)}" for buffer in self.at_peak[:10]]
        lines += ["what would help:", *(f"    {x}" for x in self.advice)] if self.advice else []
        return "\n".join(lines)


def _line(buffer: LiveBuffer) -> str:
    parts = [f"{human_bytes(buffer.bytes)} {buffer.array}"]
    parts += [f"of {buffer.path}"] if buffer.path else []
    parts += [f"in {buffer.op_name}"] if buffer.op_name and not buffer.path else []
    parts += [f"at {buffer.source}"] if buffer.source else []
    return ", ".join(parts)


def memory_of(
    compiled: jax.stages.Compiled, program: HloProgram, plan: Plan, batch: Sequence[Any]
) -> Memory:
    """Reads the memory of a compiled step; `program` is its text, parsed, and `batch` has
    shardings."""
    analysis: Any = compiled.memory_analysis()
    device = with_devices(plan.mesh, "memory", compile_only=True).devices.flat[0]
    params = {leaf.path for leaf in parameters(plan.leaves)}
    kinds = {"parameters": 0, "other state": 0}
    for leaf in plan.leaves:
        if leaf.memory is None:
            kind = "parameters" if leaf.path in params else "other state"
            kinds[kind] += leaf.bytes_per_device(plan.mesh)
    host = host_bytes(plan)
    kinds["batch"] = sum(map(_local_bytes, filter(has_shape, batch)))
    peak = sorted(peak_of(program).buffers, key=lambda buffer: -buffer.array.bytes)
    flow = Dataflow(program)
    # The compiler for CPUs, which have one memory, counts what is on the host with the rest.
    apart = host if device.platform == "cpu" else 0
    memory = Memory(
        kinds,
        arguments=analysis.argument_size_in_bytes - apart,
        results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporaries=temporaries_of(analysis, device.platform),
        code=analysis.generated_code_size_in_bytes,
        capacity=_capacity(device),
        device=device.device_kind,
        at_peak=tuple(_described(buffer, flow) for buffer in peak if buffer.array.bytes),
        host=host,
    )
    advice = advise(memory.total, memory.results, memory.temporaries, memory.at_peak, plan)
    return replace(memory, advice=tuple(advice))


def host_bytes(plan: Plan) -> int:
    """The bytes of the state that a plan places in the memory of a device's host."""
    leaves = (leaf for leaf in plan.leaves if leaf.memory is not None)
    return sum(leaf.bytes_per_device(plan.mesh) for leaf in leaves)


def temporaries_of(analysis: Any, platform: str) -> int:
    """The bytes of intermediate values at most, from what the compiler says of a program.

    The compiler for TPUs says two numbers. That of temporaries counts some memory twice, which may
    come to more than a device has in programs that it accepts. The peak is of all memory, also what
    is on the host and in the chip's vector memory. The smaller is near the addresses that it
    assigns.
    """
    temporaries: int = analysis.temp_size_in_bytes
    if platform != "tpu":
        return temporaries
    others = (
        analysis.argument_size_in_bytes
        + (analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
        + analysis.host_argument_size_in_bytes
        + (analysis.host_output_size_in_bytes - analysis.host_alias_size_in_bytes)
    )
    return min(temporaries, analysis.peak_memory_in_bytes - others)


def _local_bytes(x: Any) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return jax.dtypes.canonicalize_dtype(x.dtype).itemsize * math.prod(shape)


def _capacity(device: Any) -> int | None:
    if is_attached(device):
        return (device.memory_stats() or {}).get("bytes_limit")
    chip = chip_of(device)
    return None if chip is None else chip.memory


def _described(buffer: Buffer, flow: Dataflow) -> LiveBuffer:
    op = buffer.op
    path = None
    if buffer.computation is flow.program.entry:
        origins = flow.origins(value(Context(buffer.computation), op.name))
        if len(origins.parameters) == 1 and not origins.computed:
            path = argument_path(next(iter(origins.parameters)))
    source = flow.program.source(op)
    return LiveBuffer(buffer.array.bytes, buffer.array.text, path, op.op_name, source)


# ------------------------------------------------------------------ what would lower it

_WORTH = 0.1  # parts of all memory that are worth a line


def advise(
    total: int, results: int, temporaries: int, at_peak: Sequence[LiveBuffer], plan: Plan
) -> Iterator[str]:
    """Yields a sentence for each thing that would save a tenth of the memory of a step or more.

    `results` are the bytes of those that do not reuse the memory of donated arguments.
    """
    least = _WORTH * total
    held = sum(leaf.bytes_per_device(plan.mesh) for leaf in plan.leaves)
    if results >= max(least, held / 2):
        yield (
            f"Donate the state (`donate=True`): the new state takes {human_bytes(results)} beside"
            " the old one."
        )
    full = [
        x for x in plan.leaves if plan.mesh.size > 1 and x.bytes_per_device(plan.mesh) == x.bytes
    ]
    if (size := sum(leaf.bytes for leaf in full)) >= least:
        full.sort(key=lambda leaf: -leaf.bytes)
        paths = ", ".join(fold_paths(leaf.path for leaf in full[:3]))
        yield f"Shard the leaves that are replicated, {human_bytes(size)} on each device: {paths}."
    weights = [x for x in at_peak if x.path in {f"state/{leaf.path}" for leaf in plan.leaves}]
    if (size := sum(x.bytes for x in weights)) >= least and len(weights) > 2:
        yield (
            f"Gather the weights of each layer just before their use, in a scan with"
            f" `jax.checkpoint` around the layer: {len(weights)} gathered ones are live at once,"
            f" {human_bytes(size)}."
        )
    names = " ".join(x.op_name or "" for x in at_peak)
    # What a scan keeps has no name.
    kept = [x for x in at_peak if x.path is None and "transpose(" not in (x.op_name or "")]
    size = sum(x.bytes for x in kept)
    if size >= least and "transpose(" in names and "checkpoint" not in names:
        yield (
            f"Put `jax.checkpoint` around the layers: {human_bytes(size)} of values of the forward"
            f" pass are kept for the gradients, of which the largest is {kept[0].array}."
        )
    elif temporaries >= total / 2:
        yield (
            "Split the batch over more devices, or run it in minibatches (`accumulate_gradients`):"
            f" {human_bytes(temporaries)} are values that grow with its rows, or gathered weights."
        )

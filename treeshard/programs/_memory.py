"""Compares the memory that a compiled step needs on one device with the memory of the device.

The amounts are the compiler's numbers. The compiler does not name the arrays behind them: the names
come from the text of the program (`_buffers`) and from the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from treeshard._core.make_mesh import is_attached, with_devices
from treeshard._core.text import columns, human_bytes
from treeshard._core.topologies import chip_of, usable_memory
from treeshard._planning.plan import Plan
from treeshard.communication._arguments import paths_by_number
from treeshard.communication._collectives import bytes_text, path_of
from treeshard.communication._dataflow import Context, Dataflow, value
from treeshard.communication._program import ReadProgram
from treeshard.errors import DoesNotFitError
from treeshard.programs._buffers import Buffer, peak_of


class LiveBuffer(NamedTuple):
    """Temporary memory that is in use when a step needs the most memory.

    Attributes:
        bytes: Its size on one device.
        array: Its dtype and shape, in the compiler's notation.
        path: The leaf whose data it holds, such as a gathered weight; `None` if it is computed.
        op_name: JAX's name of the operation that made it.
        source: The line of user code that it comes from, as `file:line`.

    Examples:
        >>> ts.programs.LiveBuffer(2**24, "f32[1024,4096]", "state/w", None, "train.py:31").path
        'state/w'
    """

    bytes: int
    array: str
    path: str | None
    op_name: str | None
    source: str | None

    def __str__(self) -> str:
        """`16.0 MiB f32[1024,4096], of state/w, at train.py:31`"""
        parts = [f"{human_bytes(self.bytes)} {self.array}"]
        if self.path:
            parts.append(f"of {self.path}")
        elif self.op_name:
            parts.append(f"in {self.op_name}")
        if self.source:
            parts.append(f"at {self.source}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Memory:
    """Bytes per device of a compiled step; `str()` of it is a table.

    Attributes:
        arguments: The bytes of the state and the batch, as the compiler lays them out.
        results: The bytes of results that do not reuse the memory of donated arguments.
        temporaries: The largest number of bytes that intermediate values need at once.
        code: The bytes of the program itself, if it is in the device's memory.
        capacity: The bytes that programs can use on such a device; `None` if unknown. On GPUs, the
            bytes that JAX allocates: 75% of the memory, or `XLA_CLIENT_MEM_FRACTION`.
        device: The kind of device.
        at_peak: The temporaries that are live when the most memory is in use, the largest first,
            without buffers in the vector memory of a TPU. Their sum is near `temporaries`. The sum
            is larger if the compiler puts them into the memory of donated arguments, as on TPUs
            with replicated weights.
        host: The bytes of the state that the plan places in the memory of the device's host.
            `total` does not include them.

    Examples:
        >>> memory = ts.programs.Memory(3 * 2**30, 0, 2**33, 0, 2**34, "TPU v5 lite", ())
        >>> memory.total // 2**30, memory.fits
        (11, True)
    """

    arguments: int
    results: int
    temporaries: int
    code: int
    capacity: int | None
    device: str
    at_peak: tuple[LiveBuffer, ...]
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of arguments, results, temporaries and code."""
        return self.arguments + self.results + self.temporaries + self.code

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; `None` if the capacity is unknown."""
        return None if self.capacity is None else self.total <= self.capacity

    def assert_fits(self) -> None:
        """Raises `DoesNotFitError` unless the step fits.

        Raises:
            DoesNotFitError: If the step needs more than the device has, or the capacity is unknown.
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
        rows = [
            ("arguments", self.arguments),
            ("results", self.results),
            ("temporaries", self.temporaries),
            ("code", self.code),
            ("in all", self.total),
        ]
        if self.host:
            rows.append(("and on the host", self.host))
        lines = [columns([(name, human_bytes(size)) for name, size in rows], right=1)]
        lines.append(f"of {bytes_text(self.capacity, 'unknown')} on {self.device}")
        if self.at_peak:
            lines.append("live at the peak:")
            lines += [f"    {buffer}" for buffer in self.at_peak[:10]]
        return "\n".join(lines)


def memory_of(compiled: jax.stages.Compiled, program: ReadProgram, plan: Plan) -> Memory:
    """Reads the memory of a compiled step; `program` is its text, parsed."""
    analysis: Any = compiled.memory_analysis()
    device = with_devices(plan.mesh, "memory", compile_only=True).devices.flat[0]
    host = host_bytes(plan)
    # CPUs have one memory, and their compiler counts the part on the host with the rest.
    counted_host = host if device.platform == "cpu" else 0
    return Memory(
        arguments=analysis.argument_size_in_bytes - counted_host,
        results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporaries=temporaries_of(analysis, device.platform),
        code=analysis.generated_code_size_in_bytes,
        capacity=_capacity(device),
        device=device.device_kind,
        at_peak=_live_at_peak(program),
        host=host,
    )


def host_bytes(plan: Plan) -> int:
    """The bytes of the state that a plan places in the memory of a device's host."""
    leaves = (leaf for leaf in plan.leaves if leaf.memory is not None)
    return sum(leaf.bytes_per_device(plan.mesh) for leaf in leaves)


def temporaries_of(analysis: Any, platform: str) -> int:
    """The bytes that intermediate values need at most, from the compiler's analysis.

    The compiler for TPUs reports two numbers. The size of temporaries counts some memory twice, and
    may exceed the device's memory in programs that the compiler accepts. The peak includes memory
    on the host and in the chip's vector memory. The smaller number is near the addresses that the
    compiler assigns. For some programs the compiler reports a peak of 0.
    """
    temporaries: int = analysis.temp_size_in_bytes
    if platform != "tpu":
        return temporaries
    others = (
        analysis.argument_size_in_bytes
        + (analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
        + analysis.host_argument_size_in_bytes
        + (analysis.host_output_size_in_bytes - analysis.host_alias_size_in_bytes)
        + analysis.host_temp_size_in_bytes
    )
    at_peak = analysis.peak_memory_in_bytes - others
    return min(temporaries, at_peak) if at_peak > 0 else temporaries


def _capacity(device: Any) -> int | None:
    if is_attached(device):
        # CPUs return `None`; GPUs {"bytes_limit": 63753420800, "bytes_in_use": 0, ...}, where the
        # limit is what JAX allocates in advance: 75% by default.
        return (device.memory_stats() or {}).get("bytes_limit")
    chip = chip_of(device)
    return None if chip is None else usable_memory(chip)


def _live_at_peak(program: ReadProgram) -> tuple[LiveBuffer, ...]:
    flow, paths = Dataflow(program.graph), paths_by_number(program.arguments)
    buffers = [buffer for buffer in peak_of(program.graph).buffers if buffer.array.bytes]
    buffers.sort(key=lambda buffer: -buffer.array.bytes)
    return tuple(_describe_buffer(buffer, flow, paths) for buffer in buffers)


def _describe_buffer(buffer: Buffer, flow: Dataflow, paths: Mapping[int, str]) -> LiveBuffer:
    op = buffer.op
    path = None
    if buffer.computation is flow.program.entry:
        path = path_of(flow.origins(value(Context(buffer.computation), op.name)), paths)
    source = flow.program.source(op)
    return LiveBuffer(buffer.array.bytes, buffer.array.text, path, op.op_name, source)

"""Counts the bytes that the ops of a scheduled program read and write in memory, a device's or its
host's.

The compiler's cost analysis has such a number, but takes the body of a loop once, and so one layer
of a scan over all of them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from treeshard.communication._collectives import total
from treeshard.communication._dataflow import Context, Dataflow, Executions
from treeshard.communication._hlo import Computation, HloProgram, Op
from treeshard.programs._buffers import Buffer, Schedule, flat, read_type

_RUNS_OTHERS = ("call", "conditional", "while")
# Ops that read and write nothing themselves.
_FREE = frozenset(
    {
        *_RUNS_OTHERS,
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
# Ops that read only as much of their first operand as their result has.
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATE = "dynamic-update-slice"
# Memory spaces of layouts: `f32[4,8]{1,0:S(5)}` is in the memory of the device's host.
MAIN, HOST = 0, 5


class Traffic(NamedTuple):
    """Bytes; a lower bound if what a loop or a branch reads and writes depends on data."""

    bytes: int
    is_complete: bool


def memory_traffic(flow: Dataflow) -> Traffic:
    """The bytes that a step reads and writes in main memory.

    Each op reads its operands once and writes its results once; the inside of a fusion does not go
    through memory.
    """
    return _in_all(flow, _Touched(flow.program).bytes)


class HostTraffic(NamedTuple):
    """The bytes that a step copies from a device to its host, and back; `None` if that depends on
    data."""

    to_host: int | None
    from_host: int | None


def host_traffic(flow: Dataflow) -> HostTraffic:
    """What a step copies between a device's memory and that of its host."""
    touched = _Touched(flow.program)
    to_host = _in_all(flow, lambda computation, op: touched.host(computation, op).to_host or 0)
    from_host = _in_all(flow, lambda computation, op: touched.host(computation, op).from_host or 0)
    return HostTraffic(*(x.bytes if x.is_complete else None for x in (to_host, from_host)))


def _in_all(flow: Dataflow, bytes_of: Callable[[Computation, Op], int]) -> Traffic:
    """The bytes of all ops of a program that run one by one, with the trips of loops."""
    size_of_all, is_complete = 0, True
    for context, op, times in Executions(flow, _moves_bytes).all():
        if not _is_scheduled(flow.program, context):
            continue
        size = bytes_of(context.computation, op)
        if size and times is None:
            is_complete = False
        size_of_all += size * (times or 0)
    return Traffic(size_of_all, is_complete)


def _moves_bytes(op: Op) -> bool:
    return op.opcode not in _FREE and not op.opcode.endswith(("-done", "-update"))


def _is_scheduled(program: HloProgram, context: Context) -> bool:
    """Whether a computation runs op by op, unlike those of fusions and reductions."""
    if context.op is None:
        return context.computation is program.entry
    return context.op.opcode in _RUNS_OTHERS


class _Touched:
    """What each op of a program reads and writes."""

    def __init__(self, program: HloProgram) -> None:
        self.program, self.schedule = program, Schedule(program)
        self._touched: dict[str, Mapping[int, int | None]] = {}

    def bytes(self, computation: Computation, op: Op) -> int:
        """What one op reads and writes in main memory."""
        values = self.schedule.values(computation)
        written = _size_in(MAIN, (x for x in flat(values[op.name]) if x.op is op))
        return written + self._touched_in(MAIN, computation, op)

    def host(self, computation: Computation, op: Op) -> HostTraffic:
        """What one op copies to the host's memory, or from there."""
        result = self.schedule.values(computation)[op.name]
        if op.opcode.endswith("-start") and isinstance(result, list) and len(result) > 1:
            # The result stands beside the operands, first in a copy-start and second elsewhere.
            result = result[0] if op.opcode == "copy-start" else result[1]
        on_host = _size_in(HOST, flat(result))
        touched = self._touched_in(HOST, computation, op)
        if not on_host:
            return HostTraffic(0, touched)
        # An update in place touches what it writes. What has no operands only reserves memory.
        written = touched or (on_host if op.operands else 0)
        return HostTraffic(written, 0)

    def _touched_in(self, space: int, computation: Computation, op: Op) -> int:
        """The bytes of an op's operands in a memory that it reads, or updates in place."""
        values = self.schedule.values(computation)
        size = 0
        for position, name in enumerate(op.operands):
            whole = _size_in(space, flat(values.get(name, [])))
            part = self._part(computation, op, position)
            size += whole if part is None else min(part, whole)
        return size

    def _part(self, computation: Computation, op: Op, position: int) -> int | None:
        """The bytes that an op touches of an operand; `None` for all of it."""
        opcode = op.opcode.removesuffix("-start")
        if opcode == "fusion":
            return self._in_fusion(op.called["calls"][0]).get(position)
        if position > 0:
            return None
        if opcode in _SLICES:
            return _size(op)
        if opcode == _UPDATE:
            # dynamic-update-slice(%big, %row, %i, %zero) writes as much of %big as %row has.
            return _size(computation.ops[op.operands[1]])
        return None

    def _in_fusion(self, name: str) -> Mapping[int, int | None]:
        """The bytes that a fusion touches of each parameter; `None` for all of it."""
        if name not in self._touched:
            self._touched[name] = self._in_body(self.program.computations[name])
        return self._touched[name]

    def _in_body(self, body: Computation) -> Mapping[int, int | None]:
        # %p0 = f32[16,1024]{1,0} parameter(0)
        # %flat = f32[16384]{0} bitcast(%p0), which is parameter 0 by another name
        # ROOT %row = f32[1024]{0} dynamic-slice(%flat, %i), dynamic_slice_sizes={1024}
        number_of: dict[str, int] = {}
        touched: dict[int, int | None] = {}
        for op in body.ops.values():
            if op.opcode == "parameter" and op.index is not None:
                number_of[op.name], touched[op.index] = op.index, 0
            for position, operand in enumerate(op.operands):
                number = number_of.get(operand)
                if number is None:
                    continue
                if op.opcode == "bitcast":
                    number_of[op.name] = number
                else:
                    touched[number] = total([touched[number], self._part(body, op, position)])
        return touched


def _size_in(space: int, buffers: Iterable[Buffer]) -> int:
    return sum(buffer.array.bytes for buffer in buffers if buffer.array.space == space)


def _size(op: Op) -> int:
    """The bytes of the first array of a result, as it is laid out."""
    array = read_type(op.type_text)
    if op.opcode.endswith("-start") and isinstance(array, list):
        array = array[1]  # behind the operands
    while isinstance(array, list):
        array = array[0]
    return array.bytes

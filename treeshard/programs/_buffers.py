"""Finds the temporary buffers of a scheduled program that are live at its peak of memory.

The compiler reports the bytes of temporaries as one number. Its buffer assignment is a serialized
protobuf without a schema in Python, and the text of the program does not have its ids. The text has
the order of ops and their layouts, and they show which arrays are live together. The sum of these
arrays is near the compiler's number: the text does not show how the allocator packs buffers.

1. Each array of an op's result has memory of its own, or shares the memory of another value
   (`Dataflow.home`).
2. That memory is live from the first op that writes a result into it to the last op that reads it.
3. The live bytes are added up op by op, with the bytes that a loop or a call needs while it runs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from treeshard.communication._dataflow import Context, Dataflow, Path, Value
from treeshard.communication._hlo import DTYPES, Computation, HloProgram, Op

# ------------------------------------------------------------------ types

# `(`, `)`, or an array: `bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}`, `s32[]`, `token[]`. Comments such
# as `/*index=5*/` are skipped.
_TYPE_PARTS = re.compile(r"[()]|([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")


class Array(NamedTuple):
    """One array of a program's types, with its layout in memory."""

    text: str  # its dtype and shape, `f32[512,1024]`
    bytes: int  # padded to the tiles of its layout
    space: int  # the memory space: 0 is the device's main memory


def read_type(text: str) -> dict[Path, Array]:
    """The arrays of a type by their paths: `(f32[8]{0}, (u32[]))` has `(0,)` and `(1, 0)`. A type
    that is one array has `()`."""
    arrays: dict[Path, Array] = {}
    place: list[int] = []
    for part in _TYPE_PARTS.finditer(text):
        if part[0] == "(":
            place.append(0)
            continue
        if part[0] == ")":
            place.pop()
        else:
            arrays[tuple(place)] = _array(part[1], part[2], part[3] or "")
        if place:  # the next member of the same tuple
            place[-1] += 1
    return arrays


def _array(dtype: str, shape: str, layout: str) -> Array:
    _, bits = DTYPES.get(dtype, (dtype, 0))
    elements = math.prod(_pad_to_tiles(numbers(shape), layout))
    space = re.search(r"S\((\d+)\)", layout)
    number = 0 if space is None else int(space[1])
    return Array(f"{dtype}[{shape}]", -(-elements * bits // 8), number)


def _pad_to_tiles(dims: list[int], layout: str) -> list[int]:
    """The dims, rounded up to multiples of the tile."""
    # `{0,1:T(8,128)}`: dim 0 varies fastest in memory, and a tile has 128 of dim 0 and 8 of dim 1.
    # A second tile, `T(8,128)(2,1)`, orders the elements inside the first, without padding.
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile is None:
        return dims
    fastest_first = numbers(layout.partition(":")[0])
    for dim, length in zip(fastest_first, reversed(numbers(tile[1])), strict=False):
        dims[dim] = -(-dims[dim] // length) * length
    return dims


def numbers(text: str) -> list[int]:
    """The numbers in a text such as `16,64` or `"1","2"`."""
    return [int(number) for number in re.findall(r"\d+", text)]


# ------------------------------------------------------------------ what is live

# Ops whose results do not count as temporaries.
_NOT_TEMPORARY = frozenset({"after-all", "constant", "parameter", "partition-id", "replica-id"})


@dataclass(frozen=True)
class Buffer:
    """Memory that one op fills."""

    home: Value  # identifies the buffer
    array: Array

    @property
    def op(self) -> Op:
        """The op that fills it."""
        return self.home.op

    @property
    def computation(self) -> Computation:
        """The computation that has the op."""
        return self.home.context.computation

    @property
    def is_temporary(self) -> bool:
        return self.array.space == 0 and self.op.opcode not in _NOT_TEMPORARY


class Peak(NamedTuple):
    """The temporary buffers that are live at one step, and the sum of their bytes."""

    bytes: int
    buffers: list[Buffer]


def peak_of(program: HloProgram) -> Peak:
    """The temporaries that are live when they need the most memory, by the program's schedule.

    Results of the program are not temporaries. The buffers of loops and calls count where these
    run. An allocator may need a little more, because it cannot reuse every free range.
    """
    return Schedule(program).peak(program.entry)


class Schedule:
    """The memory that the ops of a scheduled program read and fill."""

    def __init__(self, program: HloProgram) -> None:
        self.program, self.flow = program, Dataflow(program)
        self._peaks: dict[str, Peak] = {}

    def peak(self, computation: Computation) -> Peak:
        """The temporaries that are live when a computation needs the most memory."""
        if computation.name not in self._peaks:
            self._peaks[computation.name] = Peak(0, [])  # ends a cycle in a damaged text
            self._peaks[computation.name] = self._search(computation)
        return self._peaks[computation.name]

    def _search(self, computation: Computation) -> Peak:
        starts: dict[int, list[Buffer]] = defaultdict(list)
        ends: dict[int, list[Buffer]] = defaultdict(list)
        for buffer, (first, last) in self._lifetimes(computation).items():
            starts[first].append(buffer)
            ends[last].append(buffer)
        live: dict[Buffer, None] = {}
        size, best = 0, Peak(0, [])
        for step, op in enumerate(computation.ops.values()):
            live |= dict.fromkeys(starts[step])
            size += sum(buffer.array.bytes for buffer in starts[step])
            inner = self._inner(op)
            if size + inner.bytes > best.bytes:
                best = Peak(size + inner.bytes, [*live, *inner.buffers])
            for buffer in ends[step]:
                del live[buffer]
                size -= buffer.array.bytes
        return best

    def _inner(self, op: Op) -> Peak:
        """The largest peak of the computations that an op runs; fusions have no peak."""
        if op.opcode not in ("while", "conditional", "call", "async-start"):
            return Peak(0, [])
        names = [name for called in op.called.values() for name in called]
        computations = [self.program.computations.get(name) for name in names]
        peaks = [self.peak(computation) for computation in computations if computation]
        return max(peaks, key=lambda peak: peak.bytes, default=Peak(0, []))

    def _lifetimes(self, computation: Computation) -> Mapping[Buffer, tuple[int, int]]:
        """The temporary buffers of a computation, each with its first and last step."""
        buffers = self._buffers(computation)
        first: dict[Buffer, int] = {}
        last: dict[Buffer, int] = {}
        for step, op in enumerate(computation.ops.values()):
            for buffer in buffers[op.name]:
                first.setdefault(buffer, step)
                last[buffer] = step
            if op.opcode == "get-tuple-element":  # it needs no other element of the tuple
                continue
            # TPUs, whose layouts have tiles, all-reduce in place and overwrite the operand.
            in_place = op.opcode == "all-reduce" and ":T(" in op.type_text
            for name in op.operands:
                last |= dict.fromkeys(buffers.get(name, []), step - in_place)
        results = set(buffers.get(computation.root, []))
        return {
            buffer: (step, last[buffer])
            for buffer, step in first.items()
            if buffer.is_temporary and buffer not in results
        }

    def _buffers(self, computation: Computation) -> Mapping[str, list[Buffer]]:
        """The memory of each op's result, by the op's name."""
        context = Context(computation)
        arrays = {
            Value(context, op, path): array
            for op in computation.ops.values()
            for path, array in read_type(op.type_text).items()
        }
        buffers: dict[str, list[Buffer]] = defaultdict(list)
        for value, array in arrays.items():
            home = self.flow.home(value)
            buffers[value.op.name].append(Buffer(home, arrays.get(home, array)))
        return buffers

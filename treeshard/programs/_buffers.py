"""Which temporary buffers of a scheduled program are live when most bytes are."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from treeshard.communication._hlo import DTYPES, Computation, HloProgram, Op

_LEAF = re.compile(r"\s*(?:/\*.*?\*/)?\s*([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SKIP = re.compile(r"(?:[\s,]|/\*.*?\*/)*")
_ALIASING = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}\)")
# Ops whose result is their first operand's memory.
_SAME_MEMORY = frozenset(
    {
        "add-dependency",
        "bitcast",
        "dynamic-update-slice",
        "optimization-barrier",
        "while",
    }
)
# Ops without memory of their own that is counted as temporary.
_NOT_TEMPORARY = frozenset({"after-all", "constant", "parameter", "partition-id", "replica-id"})
# `-start` ops that return their operands before their results.
_RETURNS_OPERANDS = frozenset(
    {"all-gather-start", "collective-permute-start", "reduce-scatter-start", "slice-start"}
)


class LiveBuffer(NamedTuple):
    """Temporary memory that is in use when a step needs most.

    Attributes:
        bytes: Its size on one device.
        array: Its dtype and shape, in the compiler's notation.
        path: The leaf whose data it has, such as a gathered weight; `None` if it is computed.
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


class Array(NamedTuple):
    """One array of a program's types, as it is laid out in memory.

    Attributes:
        text: Its dtype and shape, `f32[512,1024]`.
        bytes: Its bytes, padded to the tiles of its layout.
        space: The memory space: 0 is the device's main memory.
    """

    text: str
    bytes: int
    space: int


ArrayTree = Array | list["ArrayTree"]


def read_type(text: str) -> ArrayTree:
    """Reads `(f32[8]{0}, (u32[], bf16[2,4]{1,0:T(8,128)}))` as a list of lists."""
    return _read(text, 0)[0]


def _read(text: str, at: int) -> tuple[ArrayTree, int]:
    if text.startswith("(", at):
        members: list[ArrayTree] = []
        at = _skip(text, at + 1)
        while at < len(text) and text[at] != ")":
            member, at = _read(text, at)
            members.append(member)
            at = _skip(text, at)
        return members, at + 1
    match = _LEAF.match(text, at)
    if match is None:
        return Array("token", 0, 0), len(text) if "," not in text[at:] else text.index(",", at)
    return _array(match[1], match[2], match[3] or ""), match.end()


def _skip(text: str, at: int) -> int:
    match = _SKIP.match(text, at)
    return at if match is None else match.end()


def _array(dtype: str, shape: str, layout: str) -> Array:
    dims = [int(dim) for dim in re.findall(r"\d+", shape)]
    bits = DTYPES.get(dtype, (dtype, 0))[1]
    space = re.search(r"S\((\d+)\)", layout)
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile is not None and dims:
        minor_first = [int(i) for i in re.findall(r"\d+", layout.split(":")[0])]
        sizes = [int(size) for size in tile[1].split(",")]
        dims = [dims[i] for i in reversed(minor_first)] if len(minor_first) == len(dims) else dims
        for i in range(1, min(len(sizes), len(dims)) + 1):
            dims[-i] = -(-dims[-i] // sizes[-i]) * sizes[-i]
    size = -(-math.prod(dims) * bits // 8)
    return Array(f"{dtype}[{shape}]", size, 0 if space is None else int(space[1]))


class Buffer:
    """Memory that one op fills. Its identity is what tells it from others."""

    __slots__ = ("array", "computation", "first", "is_temporary", "last", "op")

    def __init__(self, array: Array, op: Op, computation: Computation, is_temporary: bool) -> None:
        self.array, self.op, self.computation = array, op, computation
        self.is_temporary = is_temporary and array.space == 0
        self.first, self.last = -1, -1  # the steps of the schedule between which it is needed


BufferTree = Buffer | list["BufferTree"]


class Peak(NamedTuple):
    """The temporary buffers that are live at one step, and their bytes together."""

    bytes: int
    buffers: list[Buffer]


def peak_of(program: HloProgram) -> Peak:
    """The temporaries that are live when they need most memory, by the program's schedule.

    Results of the program are not temporary. What loops and calls need is counted where they
    run. An allocator may need a little more, since it cannot always reuse what is free.
    """
    return Schedule(program).peak(program.entry)


class Schedule:
    """The memory that the ops of a scheduled program read and fill."""

    def __init__(self, program: HloProgram) -> None:
        self.program = program
        self._peaks: dict[str, Peak] = {}
        self._values: dict[str, dict[str, BufferTree]] = {}

    def values(self, computation: Computation) -> Mapping[str, BufferTree]:
        """The memory of the result of each op, by its name."""
        values = self._values.setdefault(computation.name, {})
        if not values:
            for op in computation.ops.values():
                values[op.name] = self._value(op, values, computation)
        return values

    def peak(self, computation: Computation) -> Peak:
        if (known := self._peaks.get(computation.name)) is not None:
            return known
        self._peaks[computation.name] = Peak(0, [])  # ends a cycle in a damaged text
        buffers = self._lifetimes(computation)
        starts: dict[int, list[Buffer]] = defaultdict(list)
        ends: dict[int, list[Buffer]] = defaultdict(list)
        for buffer in buffers:
            starts[buffer.first].append(buffer)
            ends[buffer.last].append(buffer)
        live: dict[int, Buffer] = {}
        size, best = 0, Peak(0, [])
        for step, op in enumerate(computation.ops.values()):
            for buffer in starts[step]:
                live[id(buffer)] = buffer
                size += buffer.array.bytes
            inner = self._inner(op)
            if size + inner.bytes > best.bytes:
                best = Peak(size + inner.bytes, [*live.values(), *inner.buffers])
            for buffer in ends[step]:
                del live[id(buffer)]
                size -= buffer.array.bytes
        self._peaks[computation.name] = best
        return best

    def _inner(self, op: Op) -> Peak:
        """The largest peak of the computations that an op runs; those of fusions have none."""
        if op.opcode not in ("while", "conditional", "call", "async-start"):
            return Peak(0, [])
        names = [name for called in op.called.values() for name in called]
        found = [self.program.computations[n] for n in names if n in self.program.computations]
        return max(map(self.peak, found), key=lambda peak: peak.bytes, default=Peak(0, []))

    def _lifetimes(self, computation: Computation) -> list[Buffer]:
        """The temporary buffers of a computation, with the steps between which each is needed."""
        values = self.values(computation)
        known: dict[int, Buffer] = {}
        for step, op in enumerate(computation.ops.values()):
            for buffer in flat(values[op.name]):
                buffer.first = step if buffer.first < 0 else buffer.first
                buffer.last = step
                known[id(buffer)] = buffer
            # Reading one element of a tuple needs no other element; TPUs all-reduce in place.
            in_place = op.opcode == "all-reduce" and ":T(" in op.type_text
            for name in () if op.opcode == "get-tuple-element" else op.operands:
                for buffer in flat(values.get(name, [])):
                    buffer.last = step - in_place
        results = {id(buffer) for buffer in flat(values.get(computation.root, []))}
        return [b for key, b in known.items() if b.is_temporary and key not in results]

    def _value(
        self, op: Op, values: Mapping[str, BufferTree], computation: Computation
    ) -> BufferTree:
        """The memory of an op's result: that of operands, as far as it is computed in place."""
        operands = [values.get(name, []) for name in op.operands]
        first = operands[0] if operands else []

        def new(array: ArrayTree) -> BufferTree:
            if isinstance(array, list):
                return [new(member) for member in array]
            return Buffer(array, op, computation, op.opcode not in _NOT_TEMPORARY)

        match op.opcode:
            case "tuple":
                return operands
            case "get-tuple-element":
                index = op.index or 0
                return first[index] if isinstance(first, list) and index < len(first) else []
            case code if code in _SAME_MEMORY:
                return first
            case code if code.endswith("-done"):
                if not isinstance(first, list):
                    return first
                start = computation.ops.get(op.operands[0])
                is_copy = start is not None and start.opcode == "copy-start"
                return first[0 if is_copy or len(first) == 1 else 1] if first else []
        result = new(read_type(op.type_text))
        if op.opcode == "copy-start" and isinstance(result, list):
            result[1:2] = [first]  # (destination, source, context)
        elif op.opcode in _RETURNS_OPERANDS and isinstance(result, list):
            result[0] = operands if isinstance(result[0], list) else first
        elif op.opcode in ("fusion", "custom-call"):
            return self._in_place(op, result, operands)
        return result

    def _in_place(self, op: Op, result: BufferTree, operands: list[BufferTree]) -> BufferTree:
        aliasing = op.attribute("output_to_operand_aliasing")
        for output, number, element in _ALIASING.findall(aliasing or ""):
            operand = operands[int(number)]
            if element and isinstance(operand, list):
                operand = operand[int(element)]
            if output and isinstance(result, list):
                result[int(output)] = operand
            else:
                result = operand
        updated = None if aliasing or isinstance(result, list) else self._updated(op)
        return result if updated is None else operands[updated]

    def _updated(self, op: Op) -> int | None:
        """The operand that a fusion updates in place, if its result is such an update."""
        names = op.called.get("calls", ())
        body = self.program.computations.get(names[0]) if names else None
        last = None if body is None else body.ops.get(body.root)
        while body is not None and last is not None and last.opcode in ("bitcast", "copy"):
            last = body.ops.get(last.operands[0])
        if body is None or last is None or last.opcode != "dynamic-update-slice":
            return None
        target = body.ops.get(last.operands[0])
        while target is not None and target.opcode == "bitcast":
            target = body.ops.get(target.operands[0])
        return target.index if target is not None and target.opcode == "parameter" else None


def flat(tree: BufferTree) -> Iterator[Buffer]:
    """The buffers of a nested value."""
    if isinstance(tree, list):
        for member in tree:
            yield from flat(member)
    else:
        yield tree

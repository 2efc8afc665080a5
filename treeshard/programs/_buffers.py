"""Which temporary buffers of a scheduled program are live when most bytes are.

The compiler tells the bytes of temporaries as one number. Its own buffer assignment comes only as a
serialized protobuf, for which there is no schema in Python, with ids that the text does not have.
The text has the order of ops and their layouts: enough to say which arrays are live together and to
come near that number, but not how the allocator packs them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treeshard.communication._hlo import DTYPES, Computation, HloProgram, Op

# ------------------------------------------------------------------ types

# `(`, `)`, or an array: `bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}`, `s32[]`, `token[]`. Comments such
# as `/*index=5*/` match nothing.
_TYPE_PARTS = re.compile(r"[()]|([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")


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
    types: list[ArrayTree] = []
    open_tuples = [types]
    for part in _TYPE_PARTS.finditer(text):
        if part[0] == "(":
            members: list[ArrayTree] = []
            open_tuples[-1].append(members)
            open_tuples.append(members)
        elif part[0] == ")":
            open_tuples.pop()
        else:
            open_tuples[-1].append(_array(part[1], part[2], part[3] or ""))
    return types[0]


def _array(dtype: str, shape: str, layout: str) -> Array:
    _, bits = DTYPES.get(dtype, (dtype, 0))
    elements = math.prod(_pad_to_tiles(numbers(shape), layout))
    space = re.search(r"S\((\d+)\)", layout)
    number = 0 if space is None else int(space[1])
    return Array(f"{dtype}[{shape}]", -(-elements * bits // 8), number)


def _pad_to_tiles(dims: list[int], layout: str) -> list[int]:
    """The dims, rounded up to whole tiles."""
    # `{0,1:T(8,128)}`: dim 0 varies fastest in memory, and a tile has 128 of it and 8 of dim 1. A
    # second tile, `T(8,128)(2,1)`, is the order of elements inside of the first, and pads nothing.
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


# ------------------------------------------------------------------ what each op fills

# Ops whose result is their first operand's memory.
_SAME_MEMORY = frozenset(
    {
        "add-dependency",
        "bitcast",
        "dynamic-update-slice",
        "opt-barrier",
        "while",
    }
)
# Ops without memory of their own that is counted as temporary.
_NOT_TEMPORARY = frozenset({"after-all", "constant", "parameter", "partition-id", "replica-id"})
# The elements of the results of `-start` ops that are the memory of operands:
#   %ag = (f32[16,128]{1,0}, f32[16,512]{1,0}) all-gather-start(%x), dimensions={1}, ...
#   %rs = ((f32[4096,1024]{1,0}), f32[1024,1024]{1,0}) reduce-scatter-start(%x), ...
#   %ds = ((f32[4,8]{1,0:S(5)}, s32[], s32[]), f32[1,8]{1,0}, u32[]) dynamic-slice-start(%x, %i, %j)
# An all-reduce-start returns its results only, and a copy-start the copy before its operand:
#   %cs = (f32[8]{0}, f32[8]{0:S(1)}, u32[]{:S(2)}) copy-start(%x)
_OPERANDS_AT = {
    "all-gather-start": [0],
    "collective-permute-start": [0],
    "copy-start": [1],
    "dynamic-slice-start": [0],
    "dynamic-update-slice-start": [0, 1],
    "fusion-start": [0],
    "reduce-scatter-start": [0],
    "slice-start": [0],
}
# output_to_operand_aliasing={{0}: (1, {}), {1}: (0, {2})}: element 0 of the result is operand 1,
# and element 1 is element 2 of operand 0. `{}: (0, {})` is a result that is no tuple.
_ALIASING = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}\)")


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory that one op fills. Its identity is what tells it from others."""

    array: Array
    op: Op
    computation: Computation

    @property
    def is_temporary(self) -> bool:
        return self.array.space == 0 and self.op.opcode not in _NOT_TEMPORARY


BufferTree = Buffer | list["BufferTree"]


def flat(tree: BufferTree) -> Iterator[Buffer]:
    """The buffers of a nested value."""
    if isinstance(tree, list):
        for member in tree:
            yield from flat(member)
    else:
        yield tree


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
                operands = [values.get(name, []) for name in op.operands]
                values[op.name] = self._value(op, operands, computation)
        return values

    def _value(self, op: Op, operands: list[BufferTree], computation: Computation) -> BufferTree:
        """The memory of an op's result: that of operands, as far as it is computed in place."""
        first = operands[0] if operands else []
        if op.opcode == "tuple":
            return operands
        if op.opcode == "get-tuple-element":
            return _element(first, op.index or 0)
        if op.opcode in _SAME_MEMORY:
            return first
        if op.opcode.endswith("-done"):
            return _read_done(op, first)
        result = _new_buffers(read_type(op.type_text), op, computation)
        if op.opcode in ("fusion", "custom-call"):
            return self._reuse_operands(op, result, operands)
        if op.opcode == "call":
            return self._map_returned_operands(op, result, operands)
        if isinstance(result, list):
            for number in _OPERANDS_AT.get(op.opcode, ()):
                result[number] = operands if isinstance(result[number], list) else first
        return result

    def _reuse_operands(self, op: Op, result: BufferTree, operands: list[BufferTree]) -> BufferTree:
        """The result of a fusion or a custom call, which may be the memory of operands."""
        aliases = _ALIASING.findall(op.attribute("output_to_operand_aliasing"))
        for output, number, element in aliases:
            operand = operands[int(number)]
            if element:
                operand = _element(operand, int(element))
            if output and isinstance(result, list):
                result[int(output)] = operand
            else:
                result = operand
        if aliases or op.opcode != "fusion":
            return result
        body = self.program.computations[op.called["calls"][0]]
        root = body.ops[body.root]
        if isinstance(result, list) and root.opcode == "tuple":
            updates = [_updated_parameter(body, name) for name in root.operands]
            pairs = zip(result, updates, strict=True)
            return [x if updated is None else operands[updated] for x, updated in pairs]
        updated = _updated_parameter(body, body.root)
        return result if updated is None else operands[updated]

    def _map_returned_operands(
        self, op: Op, result: BufferTree, operands: list[BufferTree]
    ) -> BufferTree:
        """The result of a call, which may return operands as they are."""
        # The CPU's compiler calls small loops, whose results are the memory of their operands:
        #   %while.24_computation (tuple.32: (s32[], f32[8])) -> (s32[], f32[8]) {
        #     %tuple.32 = (s32[], f32[8]{0}) parameter(0)
        #     ROOT %while.30 = (s32[], f32[8]{0}) while(%tuple.32), body=%region_0, ...
        #   }
        #   %call.4 = (s32[], f32[8]{0}) call(%tuple.25), to_apply=%while.24_computation
        body = self.program.computations[op.called["calls"][0]]
        values = self.values(body)
        operand_of: dict[Buffer, Buffer] = {}
        for inner in body.ops.values():
            if inner.opcode == "parameter":
                passed = flat(operands[inner.index or 0])
                operand_of |= zip(flat(values[inner.name]), passed, strict=False)
        return _with_operands(result, values.get(body.root, []), operand_of)

    # -------------------------------------------------------------- the peak

    def peak(self, computation: Computation) -> Peak:
        """The temporaries that are live when a computation needs most memory."""
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
        """The largest peak of the computations that an op runs; those of fusions have none."""
        if op.opcode not in ("while", "conditional", "call", "async-start"):
            return Peak(0, [])
        names = [name for called in op.called.values() for name in called]
        computations = [self.program.computations.get(name) for name in names]
        peaks = [self.peak(computation) for computation in computations if computation]
        return max(peaks, key=lambda peak: peak.bytes, default=Peak(0, []))

    def _lifetimes(self, computation: Computation) -> Mapping[Buffer, tuple[int, int]]:
        """The temporary buffers of a computation, with the steps between which each is needed."""
        values = self.values(computation)
        first: dict[Buffer, int] = {}
        last: dict[Buffer, int] = {}
        for step, op in enumerate(computation.ops.values()):
            for buffer in flat(values[op.name]):
                first.setdefault(buffer, step)
                last[buffer] = step
            if op.opcode == "get-tuple-element":  # it needs no other element of the tuple
                continue
            # TPUs, whose layouts have tiles, all-reduce in place: the operand is gone by then.
            in_place = op.opcode == "all-reduce" and ":T(" in op.type_text
            for name in op.operands:
                last |= dict.fromkeys(flat(values.get(name, [])), step - in_place)
        results = set(flat(values.get(computation.root, [])))
        return {
            buffer: (step, last[buffer])
            for buffer, step in first.items()
            if buffer.is_temporary and buffer not in results
        }


def _new_buffers(array: ArrayTree, op: Op, computation: Computation) -> BufferTree:
    if isinstance(array, list):
        return [_new_buffers(member, op, computation) for member in array]
    return Buffer(array, op, computation)


def _with_operands(
    result: BufferTree, returned: BufferTree, operand_of: Mapping[Buffer, Buffer]
) -> BufferTree:
    """A call's result, with an operand's memory where the computation returned a parameter."""
    if isinstance(result, list):
        if not isinstance(returned, list):
            return result
        pairs = zip(result, returned, strict=False)
        return [_with_operands(new, inner, operand_of) for new, inner in pairs]
    if isinstance(returned, list):
        return result
    return operand_of.get(returned, result)


def _read_done(op: Op, started: BufferTree) -> BufferTree:
    """The result of a `-done` op, among what its `-start` op returned."""
    # %r = (f32[8]{0}, u32[], token[]) recv(%t); %rd = (f32[8]{0}, token[]) recv-done(%r)
    if op.opcode in ("all-reduce-done", "recv-done") or not isinstance(started, list):
        return started
    if op.opcode == "copy-done":
        return _element(started, 0)
    return _element(started, 1)


def _element(value: BufferTree, number: int) -> BufferTree:
    """An element of a tuple; nothing, if it is unknown."""
    if not isinstance(value, list) or number >= len(value):
        return []
    return value[number]


def _updated_parameter(body: Computation, name: str) -> int | None:
    """The parameter of a fusion that one of its results updates in place, if it is an update."""
    # %big = f32[16,1024]{1,0} parameter(0)
    # ROOT %new = f32[16,1024]{1,0} dynamic-update-slice(%big, %row, %i, %zero)
    update = _behind(body, name, ("bitcast", "copy"))
    if update.opcode != "dynamic-update-slice":
        return None
    target = _behind(body, update.operands[0], ("bitcast",))
    return target.index if target.opcode == "parameter" else None


def _behind(body: Computation, name: str, opcodes: Sequence[str]) -> Op:
    """The op whose result a name has, through ops of these kinds."""
    op = body.ops[name]
    while op.opcode in opcodes:
        op = body.ops[op.operands[0]]
    return op

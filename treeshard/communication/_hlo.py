"""Parses HLO text, the format of `jax.stages.Compiled.as_text`.

Every backend returns text, also for devices that are not attached, and users save and paste text.
JAX has no public access to the protobuf, and its schema changes with XLA.

A program may have hundreds of thousands of lines, of ops that are mostly irrelevant. Each line is
parsed up to its opcode. The rest is parsed when one of its properties is read.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treeshard.errors import FormatError, user_line

# HLO's name of a dtype -> JAX's name, and the bits of an element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "pred": ("bool", 8),
    **{f"s{bits}": (f"int{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": (f"uint{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
    **{f"f{bits}": (f"float{bits}", bits) for bits in (16, 32, 64)},
    "bf16": ("bfloat16", 16),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
    "f4e2m1fn": ("float4_e2m1fn", 4),
    **{
        f"f8{kind}": (f"float8_{kind}", 8)
        for kind in ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz")
    },
    "f8e8m0fnu": ("float8_e8m0fnu", 8),
}

# `%fused_computation.72 (param_0.130: bf16[512,1024]) -> bf16[4096,1024] {`, or the same after
# `ENTRY `. Dumps of XLA leave out the percent signs.
_HEAD = re.compile(r"(ENTRY )?%?([^\s(%]+)\s.*\{\s*$")
# `  ROOT %add.3 = f32[8]{0} add(%x, %y), metadata={op_name="jit(f)/add" stack_frame_id=2}`. A tuple
# type, `(f32[8]{0:T(256)}, u32[])`, ends before ` opcode(`: parentheses inside it are of layouts.
_OP = re.compile(r"\s+(ROOT )?%?([^\s=%]+) = (\(.*?\)|[^\s(]\S*) ([a-z][a-z0-9\-_]*)\(")
# `calls=%fused_computation.72`, or `branch_computations={%region_8.9_spmd, %region_9.10_spmd}`
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|branch_computations|true_computation|false_computation"
    r"|called_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_ROLES = {
    "condition": "condition",
    "body": "body",
    "branch_computations": "branches",
    "true_computation": "branches",
    "false_computation": "branches",
}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")  # `bf16[512,1024]`
_NAME = re.compile(r"%([^\s,)}]+)")
# Parts of operands without `%` that are not names: `/*index=5*/`, `[512,1024]`, `{1,0:T(8,128)}`
_NO_NAME = re.compile(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}")
# the type of a tuple that is left after that: `(f32, s32)`
_TUPLE_TYPE = re.compile(r"\((?:[^()]|\([^()]*\))*\)")
# The comma in `mesh['axis_0'=4], device_ids=([4]) {'axis_0'}` does not end an attribute.
_TOKEN = re.compile(r'[(\[{]|[)\]}]|,(?! device_ids=)|"(?:[^"\\]|\\.)*"')
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
# In the `backend_config` of a loop. XLA's pass while-loop-trip-count-annotator, which runs for CPUs
# and GPUs, writes it.
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COLLECTIVE = re.compile(
    r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)


class Buffer(NamedTuple):
    """An array of an op; `bytes` is `None` for an unknown dtype or a dynamic shape."""

    dtype: str
    bytes: int | None
    rank: int


@dataclass(eq=False, slots=True)
class Op:
    """One operation: a line of HLO. Missing properties are empty, or `None` for numbers."""

    name: str
    opcode: str
    type_text: str  # of its result, with layouts
    _text: str  # all that follows the opening parenthesis

    @property
    def operands(self) -> Sequence[str]:
        """The names of its operands."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        arguments = self._arguments
        if "%" in arguments:
            return _NAME.findall(arguments)
        # In texts without `%`, a name may follow its type: `(f32[8]{0}, s32[]) tuple.3`.
        names = _TUPLE_TYPE.sub("", _NO_NAME.sub("", arguments))
        return [part.split()[-1] for part in names.split(",") if part.strip()]

    @property
    def types(self) -> Sequence[Buffer]:
        """The arrays that it produces, with tuples flattened."""
        arrays = _ARRAY.findall(self.type_text)
        return [_buffer(dtype, shape) for dtype, shape in arrays if dtype != "token"]

    @property
    def called(self) -> Mapping[str, Sequence[str]]:
        """The computations that it calls, by role: `body`, `condition`, `branches`, `calls`."""
        callees: dict[str, list[str]] = {}
        if "=" not in self._text:
            return callees
        for key, several, single in _CALLED.findall(self._text):
            names = [name.strip().lstrip("%") for name in (several or single).split(",")]
            callees.setdefault(_ROLES.get(key, "calls"), []).extend(names)
        return callees

    def attribute(self, name: str) -> str:
        """The text of one attribute, up to the first comma outside of brackets."""
        attributes = self._text[self._end_of_arguments :]
        match = re.search(rf", {name}=", attributes)
        if match is None:
            return ""
        start = match.end()
        return attributes[start : _end(attributes, start, ",")].strip()

    @property
    def op_name(self) -> str | None:
        """The name that JAX gave it; for a parameter of the entry, `state['w']`."""
        name = _first(r'op_name="((?:[^"\\]|\\.)*)"', self.attribute("metadata"))
        return name.replace("\\'", "'").replace('\\"', '"') or None

    @property
    def target(self) -> str:
        """The function that a `custom-call` runs; empty for other ops."""
        if self.opcode != "custom-call":
            return ""
        return self.attribute("custom_call_target").strip('"')

    def frontend(self, name: str) -> str:
        """One of the attributes that JAX or an early pass of XLA wrote: `{chain_id="1"}`."""
        return _first(rf'[{{,]{name}="([^"]*)"', self.attribute("frontend_attributes"))

    @property
    def index(self) -> int | None:
        """The element that a `get-tuple-element` selects, or the number of a `parameter`."""
        is_parameter = self.opcode == "parameter"
        return _number(self._arguments if is_parameter else self.attribute("index"))

    @property
    def number(self) -> int | None:
        """The value of a constant that is a single integer."""
        return _number(self._arguments) if self.opcode == "constant" else None

    @property
    def is_zero(self) -> bool:
        """Whether it is a constant of zeros: `constant(0)`, or `constant({0, 0})`."""
        return self.opcode == "constant" and set(self._arguments) <= set("-0, {}")

    @property
    def trips(self) -> int | None:
        """The trip count of a `while`, if the text states it."""
        return _number(_first(_TRIPS, self._text))

    @property
    def _arguments(self) -> str:
        """The text inside the parentheses."""
        return self._text[: self._end_of_arguments]

    @property
    def _end_of_arguments(self) -> int:
        return _end(self._text, 0, ")")


def _end(text: str, start: int, token: str) -> int:
    """The position of the next token outside of brackets and quotes, or the end."""
    depth = 0
    for match in _TOKEN.finditer(text, start):
        if match[0] == token and depth == 0:
            return match.start()
        depth += _DEPTH.get(match[0], 0)
    return len(text)


def _first(pattern: str | re.Pattern[str], text: str, default: str = "") -> str:
    """The first group of the first match."""
    match = re.search(pattern, text)
    return default if match is None else match[1]


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*-?\d+\s*", text) else None


def _buffer(dtype: str, shape: str) -> Buffer:
    name, bits = DTYPES.get(dtype, (dtype, None))
    dims = shape.split(",") if shape else []
    if bits is None or not all(map(str.isdigit, dims)):  # a dynamic dim is `<=8`
        return Buffer(name, None, len(dims))
    return Buffer(name, -(-math.prod(map(int, dims)) * bits // 8), len(dims))


@dataclass(eq=False, slots=True)
class Computation:
    """Ops by name, and the name of the op whose result the computation returns."""

    name: str
    ops: dict[str, Op] = field(default_factory=dict)
    root: str = ""


class HloProgram:
    """A module of HLO text. Raises `FormatError` if the text is truncated or damaged.

    Only programs of `pmap` have more than one replica. `devices` is `None` if the text does not
    have the number of devices.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self._tables: dict[str, dict[int, str]] = {}
        # The user's line of each call stack. Many ops share a call stack.
        self._lines: dict[int, str | None] = {}
        head, entry = self._read(enumerate(text.split("\n"), 1))
        self.entry = self.computations[entry]
        self.replicas = int(_first(r"\breplica_count=(\d+)", head, "1"))
        self.partitions = int(_first(r"\bnum_partitions=(\d+)", head, "1"))
        is_stated = "replica_count=" in head or "num_partitions=" in head
        self.devices = self.replicas * self.partitions if is_stated else None

    def _read(self, lines: Iterator[tuple[int, str]]) -> tuple[str, str]:
        """Fills the computations and tables; returns the first line and the entry's name."""
        head, entry, table = "", "", {}
        for _, line in lines:
            if not line.strip() or line.startswith("//"):
                continue
            if not head:
                head = line
            elif (match := _HEAD.match(line)) is not None:
                is_entry, name = match.groups()
                self.computations[name] = _read_computation(name, lines)
                entry = name if is_entry else entry
            elif line[0].isdigit():  # `2 {file_location_id=2 parent_frame_id=2}`
                number, _, row = line.partition(" ")
                table[int(number)] = row
            else:  # `StackFrames`
                table = self._tables.setdefault(line.strip(), {})
        if not entry:
            raise FormatError("the program has no ENTRY computation: the text is truncated.")
        return head, entry

    @property
    def parameters(self) -> list[Op]:
        """The parameters of the entry."""
        return [op for op in self.entry.ops.values() if op.opcode == "parameter"]

    @property
    def takes_tuple(self) -> bool:
        """Whether its arguments are one tuple, without names, as on TPUs if they are over 2,000."""
        parameters = self.parameters
        return len(parameters) == 1 and parameters[0].type_text.startswith("(")

    def source(self, op: Op) -> str | None:
        """The line of the user's code that an op comes from, as `file:line`."""
        metadata = op.attribute("metadata")
        file = _first(r'source_file="([^"]*)"', metadata)
        if file:  # `source_file="model.py" source_line=3`, in texts without tables
            line = _first(r"source_line=(\d+)", metadata)
            return f"{file}:{line}" if line else file
        frame = _field(metadata, "stack_frame_id")
        if frame not in self._lines:
            self._lines[frame] = user_line(self._stack(frame)) or None
        return self._lines[frame]

    def _stack(self, frame: int) -> Iterator[str]:
        """The lines of a call stack, innermost first.

        `stack_frame_id=3` leads through the tables before the first computation:

            FileNames
            2 "/home/me/model.py"
            FileLocations
            5 {file_name_id=2 function_name_id=1 line=14 end_line=14 column=13 end_column=13}
            StackFrames
            3 {file_location_id=5 parent_frame_id=2}
        """
        names, locations, frames = (
            self._tables.get(name, {}) for name in ("FileNames", "FileLocations", "StackFrames")
        )
        seen: set[int] = set()
        while frame in frames and frame not in seen:
            seen.add(frame)
            row = frames[frame]
            location = locations.get(_field(row, "file_location_id"))
            if location is not None:
                file = names.get(_field(location, "file_name_id"), "")
                yield f"{file.strip(chr(34))}:{_field(location, 'line')}"
            frame = _field(row, "parent_frame_id") - 1  # stored plus one, so that 1 means no parent


def _read_computation(name: str, lines: Iterator[tuple[int, str]]) -> Computation:
    """Reads lines up to the one that closes the computation."""
    computation = Computation(name)
    for number, line in lines:
        if line.startswith("}"):
            return computation
        match = _OP.match(line)
        if match is None:
            _check_is_no_op(number, line, name)
            continue
        is_root, op, result, opcode = match.groups()
        if op in computation.ops:
            raise FormatError(f"line {number} defines {op!r} a second time: the text is damaged.")
        text = line[match.end() :]
        if text.endswith("{"):
            text += _rest_of_op(lines)
        computation.ops[op] = Op(op, opcode, result, text)
        if is_root:
            computation.root = op
    raise FormatError(f"the program ends inside its computation {name!r}: the text is truncated.")


def _rest_of_op(lines: Iterator[tuple[int, str]]) -> str:
    """The further lines of an op, as of a Pallas kernel with its own metadata:

    frontend_attributes={kernel_metadata={
    "xprof_metadata":"{\\"block_q\\": 128}"
    }}, metadata={op_name="jit(f)/pallas_call"}
    """
    text = ""
    for _, line in lines:
        text += line
        if line.startswith("}}"):
            break
    return text


def _check_is_no_op(number: int, line: str, computation: str) -> None:
    if line[:1] not in ("", " ", "\t"):
        raise FormatError(
            f"line {number} starts a new section inside the computation {computation!r}, which is"
            " not closed: the text is truncated or damaged."
        )
    if _COLLECTIVE.search(line):
        raise FormatError(f"line {number} has a collective that cannot be parsed: {line[:120]!r}.")


def _field(row: str, name: str) -> int:
    return int(_first(rf"\b{name}=(\d+)", row, "0"))

"""Parses HLO text, the format of `jax.stages.Compiled.as_text`.

A program may have hundreds of thousands of lines, and few of them matter here. Each line is
parsed up to its opcode; the rest is parsed when one of its properties is read.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treeshard.errors import HIDDEN, FormatError, own_lines

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

# A tuple type ends before ` opcode(`. Parentheses inside it belong to layouts.
_OP = re.compile(r"\s+(ROOT )?%?([^\s=%]+) = (\(.*?\)|[^\s(]\S*) ([a-z][a-z0-9\-_]*)\(")
_HEAD = re.compile(r"(ENTRY )?%?([^\s(%]+)\s.*\{\s*$")
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
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_NAME = re.compile(r"%([^\s,)}]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COLLECTIVE = re.compile(
    r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)
_MESH = re.compile(r"#sdy\.mesh<\[([^\]]*)\]")
_AXIS = re.compile(r'\\?"([^"\\]+)\\?"\s*=\s*(\d+)')


class Buffer(NamedTuple):
    """An array of an op; `bytes` is `None` for an unknown dtype or a dynamic shape."""

    dtype: str
    bytes: int | None
    rank: int


@dataclass(eq=False, slots=True)
class Op:
    """One operation: a line of HLO."""

    name: str
    opcode: str
    type_text: str  # of its result, with layouts
    _text: str  # all that follows the opening parenthesis

    @property
    def operands(self) -> Sequence[str]:
        """The names of its operands."""
        arguments, _ = self._split()
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        if "%" in arguments:
            return _NAME.findall(arguments)
        # In texts without `%`, a name may follow its type.
        bare = re.sub(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}", "", arguments)
        return [part.split()[-1] for part in bare.split(",") if part.strip()]

    @property
    def types(self) -> Sequence[Buffer]:
        """The arrays that it produces, with tuples flattened."""
        arrays = _ARRAY.findall(self.type_text)
        return [_buffer(dtype, shape) for dtype, shape in arrays if dtype != "token"]

    @property
    def called(self) -> Mapping[str, Sequence[str]]:
        """The computations that it calls, by role: `body`, `condition`, `branches`, `calls`."""
        callees: dict[str, list[str]] = {}
        if "=" in self._text:
            for key, several, single in _CALLED.findall(self._text):
                names = [name.strip().lstrip("%") for name in (several or single).split(",")]
                callees.setdefault(_ROLES.get(key, "calls"), []).extend(names)
        return callees

    def attribute(self, name: str) -> str | None:
        """The text of one attribute, up to the first comma outside of brackets."""
        rest = self._split()[1]
        match = re.search(rf", {name}=", rest)
        if match is None:
            return None
        text, depth = rest[match.end() :], 0
        for match in re.finditer(r'[(\[{]|[)\]}]|,|"(?:[^"\\]|\\.)*"', text):
            if match[0] == "," and depth == 0:
                # Device groups may contain a comma: `mesh[...], device_ids=(...) {...}`.
                if text[match.end() :].startswith(" device_ids="):
                    continue
                return text[: match.start()].strip()
            depth += 1 if match[0] in "([{" else -1 if match[0] in ")]}" else 0
        return text.strip()

    @property
    def op_name(self) -> str | None:
        """The name that JAX gave it; for a parameter of the entry, `state['w']`."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attribute("metadata") or "")
        return None if match is None else match[1].replace("\\'", "'").replace('\\"', '"')

    @property
    def target(self) -> str:
        """The function that a `custom-call` runs; empty for other ops."""
        name = self.attribute("custom_call_target") if self.opcode == "custom-call" else None
        return "" if name is None else name.strip('"')

    def frontend(self, name: str) -> str | None:
        match = re.search(rf'[{{,]{name}="([^"]*)"', self.attribute("frontend_attributes") or "")
        return None if match is None else match[1]

    @property
    def index(self) -> int | None:
        """The element that a `get-tuple-element` selects, or the number of a `parameter`."""
        number = self._split()[0] if self.opcode == "parameter" else self.attribute("index")
        return int(number) if number is not None and number.strip().isdigit() else None

    @property
    def number(self) -> int | None:
        """The value of a constant that is a single integer."""
        text = self._split()[0].strip()
        return int(text) if self.opcode == "constant" and re.fullmatch(r"-?\d+", text) else None

    @property
    def trips(self) -> int | None:
        """The trip count of a `while`, if the text states it."""
        match = _TRIPS.search(self._text)
        return None if match is None else int(match[1])

    def _split(self) -> tuple[str, str]:
        """The text inside the parentheses, and the text after them."""
        text, depth = self._text, 1
        for match in re.finditer(r'[()]|"(?:[^"\\]|\\.)*"', text):
            depth += {"(": 1, ")": -1}.get(match[0], 0)
            if depth == 0:
                return text[: match.start()], text[match.end() :]
        return text, ""


def _buffer(dtype: str, shape: str) -> Buffer:
    name, bits = DTYPES.get(dtype, (dtype, None))
    dims = [part.strip() for part in shape.split(",")] if shape else []
    if bits is None or not all(dim.isdigit() for dim in dims):
        return Buffer(name, None, len(dims))
    return Buffer(name, -(-math.prod(map(int, dims)) * bits // 8), len(dims))


@dataclass(eq=False, slots=True)
class Computation:
    """Ops by name, and the name of the one whose result the computation returns."""

    name: str
    ops: dict[str, Op] = field(default_factory=dict)
    root: str = ""


class HloProgram:
    """A module of HLO text. Raises `FormatError` if the text is truncated or damaged.

    `axes` are those of the mesh that the text names, `None` if it names none or several. There is
    more than one replica only under `pmap`.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self._tables: dict[str, list[str]] = {}
        self._frames: dict[str, dict[int, str]] | None = None
        head, entry = self._read(text)
        self.entry = self.computations[entry]
        meshes = {tuple(_AXIS.findall(mesh)) for mesh in _MESH.findall(head)} - {()}
        self.axes: Mapping[str, int] | None = None
        if len(meshes) == 1:
            self.axes = {name: int(size) for name, size in meshes.pop()}
        sizes = [re.search(rf"\b{key}=(\d+)", head) for key in ("replica_count", "num_partitions")]
        self.replicas, self.partitions = (1 if size is None else int(size[1]) for size in sizes)
        self.devices: int | None = self.replicas * self.partitions if any(sizes) else None
        if self.devices is None and self.axes is not None:
            self.partitions = self.devices = math.prod(self.axes.values())

    def _read(self, text: str) -> tuple[str, str]:
        """Fills the computations and tables; returns the first line and the entry's name."""
        head, entry, table = "", "", ""
        current: Computation | None = None
        for number, line in enumerate(text.split("\n"), 1):
            if current is not None:
                if line[:1] == "}":
                    current = None
                elif (match := _OP.match(line)) is not None:
                    root, name, result, opcode = match.groups()
                    if name in current.ops:
                        raise FormatError(
                            f"line {number} defines {name!r} a second time: the text is damaged."
                        )
                    current.ops[name] = Op(name, opcode, result, line[match.end() :])
                    if root:
                        current.root = name
                elif line[:1] not in ("", " ", "\t"):
                    raise FormatError(
                        f"line {number} starts a new section inside the computation"
                        f" {current.name!r}, which is not closed: the text is truncated or damaged."
                    )
                elif _COLLECTIVE.search(line):
                    raise FormatError(
                        f"line {number} has a collective that cannot be parsed: {line[:120]!r}."
                    )
            elif not line.strip() or line.startswith("//"):
                continue
            elif not head:
                head = line
            elif (match := _HEAD.match(line)) is not None:
                current = self.computations[match[2]] = Computation(match[2])
                entry = match[2] if match[1] else entry
            elif line[0].isdigit():
                self._tables.setdefault(table, []).append(line)
            else:
                table = line.strip()
        if current is not None:
            raise FormatError(
                f"the program ends inside its computation {current.name!r}: the text is truncated."
            )
        if not entry:
            raise FormatError("the program has no ENTRY computation: the text is truncated.")
        return head, entry

    @property
    def parameters(self) -> list[Op]:
        """The parameters of the entry."""
        return [op for op in self.entry.ops.values() if op.opcode == "parameter"]

    def source(self, op: Op) -> str | None:
        """The line of the user's code that an op comes from, as `file:line`."""
        metadata = op.attribute("metadata") or ""
        if (file := re.search(r'source_file="([^"]*)"', metadata)) is not None:
            line = re.search(r"source_line=(\d+)", metadata)
            return file[1] if line is None else f"{file[1]}:{line[1]}"
        if (frame := re.search(r"stack_frame_id=(\d+)", metadata)) is None:
            return None
        # The innermost line that is neither treeshard's nor, if others remain, a package's.
        stack = list(self._stack(int(frame[1])))
        outside = [line for line in stack if not line.startswith(HIDDEN)]
        return next(iter(own_lines(outside) or outside or stack), None)

    def _stack(self, frame: int) -> Iterator[str]:
        """The lines of a call stack, innermost first."""
        if self._frames is None:
            self._frames = {table: dict(_rows(lines)) for table, lines in self._tables.items()}
        seen: set[int] = set()
        while frame not in seen and (row := self._frames.get("StackFrames", {}).get(frame)):
            seen.add(frame)
            location = self._frames.get("FileLocations", {}).get(_field(row, "file_location_id"))
            if location is not None:
                file = self._frames.get("FileNames", {}).get(_field(location, "file_name_id"), "")
                yield f"{file.strip(chr(34))}:{_field(location, 'line')}"
            frame = _field(row, "parent_frame_id") - 1  # stored plus one, so that 1 means no parent


def _rows(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    for line in lines:
        number, _, row = line.partition(" ")
        if number.isdigit():
            yield int(number), row


def _field(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return 0 if match is None else int(match[1])

"""Parses HLO text, the format of `jax.stages.Compiled.as_text`.

A program may have hundreds of thousands of lines, and few of them matter here. Each line is
parsed up to its opcode; the rest is parsed when one of its properties is read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from treeshard.communication.program import (
    Buffer,
    Computation,
    Op,
    Place,
    Program,
    device_counts,
    first_outside,
    one_mesh,
    size_of,
)
from treeshard.errors import FormatError

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


class HloOp(Op):
    """One line of HLO."""

    __slots__ = ("_text", "_type")

    def __init__(self, name: str, opcode: str, result: str, text: str, line: int) -> None:
        # `result` is the text of its type; `text` is all that follows the opening parenthesis.
        super().__init__(name, opcode, line)
        self._type, self._text = result, text

    @property
    def operands(self) -> Sequence[str]:
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
        return [
            size_of(dtype, [int(n) if n.strip().isdigit() else None for n in _dims(shape)])
            for dtype, shape in _ARRAY.findall(self._type)
            if dtype != "token"
        ]

    @property
    def called(self) -> Mapping[str, Sequence[str]]:
        callees: dict[str, list[str]] = {}
        if "=" in self._text:
            for key, several, single in _CALLED.findall(self._text):
                names = [name.strip().lstrip("%") for name in (several or single).split(",")]
                callees.setdefault(_ROLES.get(key, "calls"), []).extend(names)
        return callees

    def attribute(self, name: str) -> str | None:
        rest = self._split()[1]
        match = re.search(rf", {name}=", rest)
        return None if match is None else _value(rest[match.end() :])

    @property
    def index(self) -> int | None:
        if self.opcode == "parameter":
            number = self._split()[0].strip()
            return int(number) if number.isdigit() else None
        number = self.attribute("index")
        return int(number) if number is not None and number.isdigit() else None

    @property
    def number(self) -> int | None:
        text = self._split()[0].strip()
        return int(text) if self.opcode == "constant" and re.fullmatch(r"-?\d+", text) else None

    @property
    def trips(self) -> int | None:
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


def _dims(shape: str) -> list[str]:
    return shape.split(",") if shape else []


def _value(text: str) -> str:
    """The text of an attribute: everything up to the first comma outside of brackets."""
    depth = 0
    for match in re.finditer(r'[(\[{]|[)\]}]|,|"(?:[^"\\]|\\.)*"', text):
        if match[0] == "," and depth == 0:
            # Replica groups may contain a comma: `mesh[...], device_ids=(...) {...}`.
            if text[match.end() :].startswith(" device_ids="):
                continue
            return text[: match.start()].strip()
        depth += 1 if match[0] in "([{" else -1 if match[0] in ")]}" else 0
    return text.strip()


class HloProgram(Program):
    """A module of HLO text."""

    tupled = True

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self._tables: dict[str, list[str]] = {}
        self.entry = ""
        head = self._read(text)
        self.axes = one_mesh([_AXIS.findall(axes) for axes in _MESH.findall(head)])
        sizes = [re.search(rf"\b{key}=(\d+)", head) for key in ("replica_count", "num_partitions")]
        self.replicas, self.partitions, self.devices = device_counts(sizes, self.axes)
        self._frames: dict[str, dict[int, str]] | None = None

    def _read(self, text: str) -> str:
        head, table = "", ""
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
                    current.ops[name] = HloOp(name, opcode, result, line[match.end() :], number)
                    if root:
                        current.results = [name]
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
                self.entry = match[2] if match[1] else self.entry
            elif line[0].isdigit():
                self._tables.setdefault(table, []).append(line)
            else:
                table = line.strip()
        if current is not None:
            raise FormatError(
                f"the program ends inside its computation {current.name!r}: the text is truncated."
            )
        if not self.entry:
            raise FormatError("the program has no ENTRY computation: the text is truncated.")
        return head

    def argument(self, op: Op) -> str | None:
        metadata = op.attribute("metadata")
        match = None if metadata is None else re.search(r'op_name="((?:[^"\\]|\\.)*)"', metadata)
        return None if match is None else match[1].replace("\\'", "'").replace('\\"', '"')

    def sharding(self, op: Op) -> str | None:
        return op.attribute("sharding")

    def place(self, op: Op) -> Place:
        metadata = op.attribute("metadata") or ""
        file = re.search(r'source_file="([^"]*)"', metadata)
        line = re.search(r"source_line=(\d+)", metadata)
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        source = None
        if file is not None:
            source = f"{file[1]}:{line[1]}" if line is not None else file[1]
        elif frame is not None:
            source = first_outside(self._stack(int(frame[1])))
        return Place(self.argument(op), source)

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

"""The reader of StableHLO text, as `jax.stages.Lowered.as_text` gives it.

Every op starts on a line of its own, and a region opens and closes at the end of one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

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

_OP = re.compile(r'(?:%(\w+)(?::\d+)? = )?(?:"([\w.$]+)"|([a-z_]\w*\.[\w.]+))(.*)', re.S)
_FUNC = re.compile(r"func\.func (?:(?:public|private|nested) )?@([^\s(]+)\((.*)\{")
_ARGUMENT = re.compile(r"%(\w+): ([^\s,()]+)")
_USE = re.compile(r"%(\w+(?:#\d+)?)")
_TENSOR = re.compile(r"tensor<((?:(?:\d+|\?)x)*)([^>x,]+|complex<\w+>)[^>]*>")
_LOC = re.compile(r"\s*loc\((#\w+|unknown)\)$")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_RETURN = re.compile(r"(?:(?:stablehlo|mhlo|sdy|func)\.)?return\b(.*)")
_OPCODES = {
    "func.call": "call",
    "sdy.manual_computation": "call",
    "sdy.sharding_constraint": "copy",
    "sdy.reshard": "copy",
    "stablehlo.case": "conditional",
    "stablehlo.if": "conditional",
    "stablehlo.broadcast_in_dim": "broadcast",
}
_ROLES = {"while": ("condition", "body"), "conditional": ("branches",)}


class MlirOp(Op):
    """One op of StableHLO; `_text` follows its name, `_kind` has its types."""

    def __init__(self, name: str, opcode: str, text: str, line: int, index: int | None = None):
        super().__init__(name, opcode, line)
        self._text = text
        self.calls: dict[str, list[str]] = {}
        self.loc: str | None = None
        self.kind = text
        self._index = index
        if opcode == "call" and (match := re.match(r" @([^\s(]+)\(", text)) is not None:
            self.calls = {"calls": [match[1]]}

    @property
    def operands(self) -> Sequence[str]:
        head = re.split(r" : | in_shardings|\) <\{", self._text, maxsplit=1)[0]
        if self.opcode == "while":
            return re.findall(r"%\w+ = %(\w+(?:#\d+)?)", head)
        return _USE.findall(head)

    @property
    def called(self) -> Mapping[str, Sequence[str]]:
        return self.calls

    @property
    def types(self) -> Sequence[Buffer]:
        given = re.split(r" -> | : ", self.kind)[-1]
        return [_buffer(dims, dtype) for dims, dtype in _TENSOR.findall(given)]

    def attribute(self, name: str) -> str | None:
        text = self._text
        if name == "direction":
            match = re.match(r" (\w+),", text)
            return None if match is None else match[1]
        if name == "custom_call_target":
            match = re.match(r" @([\w.$]+)", text)
            match = match or re.search(r'call_target_name = "([^"]*)"', text)
            return None if match is None else match[1]
        if name in ("replica_groups", "source_target_pairs"):
            match = re.search(rf"{name} = dense<([^>]*)> : tensor<(\d+)x(\d+)xi64>", text)
            return None if match is None else _table(match[1], int(match[2]), int(match[3]))
        if name == "use_global_device_ids":
            return "true" if name in text else None
        if name == "channel_id":
            return "1" if "channel_handle" in text else None
        if name == "dimensions":  # what tells an all-to-all of one array from that of many
            return "" if "split_dimension" in text else None
        return None

    @property
    def index(self) -> int | None:
        return self._index

    @property
    def number(self) -> int | None:
        match = re.match(r" dense<(-?\d+)> : tensor<\w+>", self._text)
        return int(match[1]) if self.opcode == "constant" and match is not None else None


def _buffer(dims: str, dtype: str) -> Buffer:
    shape = [int(n) if n.isdigit() else None for n in dims.split("x")[:-1]]
    short = {"i1": "pred", "complex<f32>": "c64", "complex<f64>": "c128"}.get(dtype, dtype)
    short = re.sub(r"^ui(\d+)$", r"u\1", re.sub(r"^i(\d+)$", r"s\1", short))
    return size_of(short.lower(), shape)


def _table(text: str, rows: int, columns: int) -> str | None:
    """A table of ids, in HLO's spelling."""
    if text.startswith('"0x'):  # long tables are bytes
        ids = np.frombuffer(bytes.fromhex(text[3:].rstrip('"')), "<i8")
    else:
        ids = np.array([int(n) for n in re.findall(r"-?\d+", text)])
    if ids.size not in (1, rows * columns):
        return None
    ids = np.broadcast_to(ids, rows * columns) if ids.size == 1 else ids
    rows_as_text = (",".join(map(str, row)) for row in ids.reshape(rows, columns).tolist())
    return "{{" + "},{".join(rows_as_text) + "}}"


class StableHloProgram(Program):
    """A module of StableHLO text."""

    tupled = False

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self._names: dict[tuple[str, str], str] = {}  # of arguments
        self._shardings: dict[tuple[str, str], str] = {}
        self._locs: dict[str, str] = {}
        self._stack: list[tuple[Computation | None, MlirOp | None]] = []
        self._pending: MlirOp | None = None
        self.entry, head, closed = "", "", False
        meshes: list[str] = []
        for number, line in enumerate(text.split("\n"), 1):
            line = line.strip()
            if line.startswith("#"):
                name, _, value = line.partition(" = ")
                self._locs[name] = value
            elif line.startswith("sdy.mesh"):
                meshes.append(line)
            elif line.startswith("module"):
                head = line
            elif line and not line.startswith("//"):
                if line[:1] == "}" and not self._stack:
                    closed = True
                    continue
                self._take(line, number)
        if self._stack:
            raise FormatError("the program ends inside a function: the text is cut short.")
        if "main" not in self.computations and len(self.computations) != 1:
            raise FormatError("the program has no function `main`: the text is cut short.")
        if head and not closed:
            raise FormatError("the module is not closed: the text is cut short.")
        self.entry = "main" if "main" in self.computations else next(iter(self.computations))
        self.axes = one_mesh([_AXIS.findall(line.split("stablehlo.")[0]) for line in meshes])
        sizes = [re.search(rf"{key} = (\d+)", head) for key in ("num_replicas", "num_partitions")]
        self.replicas, self.partitions, self.devices = device_counts(sizes, self.axes)

    # ---------------------------------------------------------------- one line

    def _take(self, line: str, number: int) -> None:
        loc = _LOC.search(line)
        bare = line if loc is None else line[: loc.start()]
        if (match := _FUNC.match(bare)) is not None:
            self._open(Computation(match[1]), None, match[2])
        elif not self._stack:
            raise FormatError(f"line {number} is outside of every function: {line[:120]!r}.")
        elif bare[0] == "}":
            self._close(bare, None if loc is None else loc[1])
        elif bare[0] == "^":
            here = self._stack[-1][0]
            if here is not None:
                self._arguments(here, bare)
        elif (match := _RETURN.match(bare)) is not None:
            if (here := self._stack[-1][0]) is not None:
                here.results = _USE.findall(match[1].split(" : ")[0])
        elif bare.endswith("{") and self._pending is not None and not bare.startswith(("%", '"')):
            self._region(self._pending, bare)  # `cond {`, `reducer(...) {`
        elif (match := _OP.match(bare)) is not None:
            self._op(match, None if loc is None else loc[1], number)
        elif re.search(r"stablehlo\.(all_|reduce_scatter|collective_)", bare):
            fact = f"line {number} has a collective that cannot be parsed: {line[:120]!r}."
            raise FormatError(fact)

    def _op(self, match: re.Match[str], loc: str | None, number: int) -> None:
        name, generic, pretty, text = match.groups()
        full = generic or pretty
        opcode = _OPCODES.get(full, full.removeprefix("stablehlo.").replace("_", "-"))
        op = MlirOp(name or f"line {number}", opcode, text, number)
        op.loc = loc
        here = self._stack[-1][0]
        if here is not None:
            here.ops[op.name] = op
        self._pending = op
        if text.endswith("{"):
            self._region(op, text)

    def _region(self, op: MlirOp, text: str) -> None:
        roles = _ROLES.get(op.opcode, ("calls",))
        count = sum(map(len, op.calls.values()))
        region = Computation(f"{op.line}.{count}", inside=self._stack[-1][0])
        op.calls.setdefault(roles[min(count, len(roles) - 1)], []).append(region.name)
        if op.opcode == "while":
            carried = re.findall(r"%(\w+) = %", op._text.split(" : ")[0])
            text = ", ".join(f"%{name}: _" for name in carried)
        else:
            text = text.rpartition(" manual_axes=")[2]
        self._open(region, op, text)

    def _open(self, region: Computation, op: MlirOp | None, arguments: str) -> None:
        self.computations[region.name] = region
        self._arguments(region, arguments)
        self._stack.append((region, op))
        self._pending = None

    def _arguments(self, region: Computation, text: str) -> None:
        found = list(_ARGUMENT.finditer(text))
        ends = [*(match.start() for match in found[1:]), len(text)]
        for index, (match, end) in enumerate(zip(found, ends, strict=False)):
            op = MlirOp(match[1], "parameter", f" : {match[2]}", 0, index)
            region.ops[match[1]] = op
            rest = text[match.end() : end]
            if "#sdy.sharding<" in rest:
                self._shardings[region.name, match[1]] = rest
            name = re.search(r'loc\("((?:[^"\\]|\\.)*)"', rest)
            if name is not None:
                self._names[region.name, match[1]] = name[1].replace("\\22", '"')

    def _close(self, bare: str, loc: str | None) -> None:
        _, op = self._stack.pop()
        self._pending = op
        if op is None:
            return
        op.loc = loc or op.loc
        if bare.endswith("{"):
            self._region(op, bare)
        elif " : " in bare:
            op.kind = bare

    # ---------------------------------------------------------------- names

    def argument(self, op: Op) -> str | None:
        return self._names.get((self.entry, op.name))

    def sharding(self, op: Op) -> str | None:
        return self._shardings.get((self.entry, op.name))

    def place(self, op: Op) -> Place:
        loc = self._locs.get(getattr(op, "loc", None) or "")
        if loc is None:
            return Place(None, None)
        match = re.match(r'loc\("((?:[^"\\]|\\.)*)"(?!:)', loc)
        return Place(None if match is None else match[1], first_outside(self._stack_of(loc, set())))

    def _stack_of(self, loc: str, seen: set[str]) -> Iterator[str]:
        """The lines of one location, the innermost first."""
        if (file := re.match(r'loc\("([^"]*)":(\d+)', loc)) is not None:
            yield f"{file[1]}:{file[2]}"
            return
        for alias in re.findall(r"#loc\w*", loc):
            if alias not in seen:
                seen.add(alias)
                yield from self._stack_of(self._locs.get(alias, ""), seen)

"""A second way of counting what a program moves: line by line, knowing nothing of data flow.

It shares no code with `treeshard.communication`, so that the two can be compared.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
SMALLEST = 512  # bytes of what is no scalar in a tile
_DEEPEST = 8  # loops in loops
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z\-]+)\(([^)]*)\)(.*)$")


def _sizes(text: str) -> list[int]:
    """The bytes of each array in the text of a type."""
    found = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", text)
    return [
        BYTES.get(dtype, 0) * math.prod(int(dim) for dim in dims.split(",") if dim)
        for dtype, dims in found
    ]


class _Moved(NamedTuple):
    """One collective: its kind, its payload in a step, and the number of loops that it runs in."""

    kind: str
    bytes: int
    depth: int


def kind_in_text(one: Any) -> str:
    """The kind of the op of a `Collective`: some gathers are all-reduces, of shards in zeros."""
    is_sum = one.kind == "all-gather" and one.wire_bytes >= one.bytes
    return "all-reduce" if is_sum else one.kind


def count_bytes(text: str, *, slices: int = 1, trips: int) -> Mapping[str, int]:
    """Kind of collective -> bytes of payload of one step; scalars are left out.

    `trips` is for loops that do not state theirs.
    """
    totals: Counter[str] = Counter()
    for one in _all_moved(text, slices, [trips] * _DEEPEST):
        totals[one.kind] += one.bytes
    return {kind: size for kind, size in totals.items() if size}


def count_in_loops(text: str, *, trips: Sequence[int]) -> Mapping[tuple[str, int], int]:
    """Kind of collective and the number of loops that it runs in -> bytes of payload of one step;
    scalars are left out.

    `trips` is for loops that do not state theirs: those of the outermost, then of loops in it.
    """
    totals: Counter[tuple[str, int]] = Counter()
    for one in _all_moved(text, 1, trips):
        totals[one.kind, one.depth] += one.bytes
    return {key: size for key, size in totals.items() if size}


def _all_moved(text: str, slices: int, trips: Sequence[int]) -> Iterator[_Moved]:
    bodies: dict[str, list[tuple[str, str, str, str, str]]] = defaultdict(list)
    entry = current = ""
    for line in text.split("\n"):
        if (head := _HEAD.match(line)) is not None:
            current = head[2]
            entry = current if head[1] else entry
        elif (op := _LINE.match(line)) is not None:
            bodies[current].append((op[1], op[2], op[3], op[4], op[5]))
    least = SMALLEST + ("_xla_megascale_" in text)

    def visit(name: str, times: int, depth: int) -> Iterator[_Moved]:
        types = {op[0]: op[1] for op in bodies[name]}
        has_start = any("AsyncCollectiveStart" in op[4] for op in bodies[name])
        for _, result, code, operands, rest in bodies[name]:
            names = re.findall(r"%([\w.\-]+)", operands)
            kind = code.removesuffix("-start")
            if code == "send" and "_xla_megascale_transfer_type" in rest:
                kind = re.search(r'transfer_type="(\w+)"', rest)[1].lower().replace("_", "-")
                size = _sizes(types[names[0]])[0]
                if size > 512:  # a scalar in a tile
                    whole = size * (slices if kind == "all-gather" else 1)
                    yield _Moved(kind, times * whole, depth)
            elif kind in KINDS:
                if "chain_id=" in rest and not has_start:
                    continue
                given = [_sizes(types[n])[0] for n in names]
                sizes = _sizes(result)[-len(names) :] if kind == "all-gather" else given
                if kind == "all-gather" and code.endswith("-start"):
                    sizes = _sizes(result)[len(names) : 2 * len(names)]
                if name.startswith("all-reduce-scatter"):
                    # What it reduces is what it gets, before any padding.
                    given = list(types.values())[: len(names)]
                    kind, sizes = "reduce-scatter", [_sizes(one)[0] for one in given]
                # A scalar is joined to an array, or has 4 bytes; between slices, those of a tile.
                sizes = [size - 4 if size % 512 == 4 else size for size in sizes if size >= least]
                yield _Moved(kind, times * sum(sizes), depth)
            stated = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
            for called in re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", rest):
                is_loop = code == "while"
                again = 1 if not is_loop else trips[depth] if stated is None else int(stated[1])
                yield from visit(called, times * again, depth + is_loop)

    yield from visit(entry, 1, 0)

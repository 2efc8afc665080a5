"""Finds the values of a trace in the compiled program: how they are split, and where they are.

A compiled program has no shardings any more, only the shapes of one device's parts. JAX's names and
source lines, which compilers keep, say which equation an op was; the quotient of the two shapes
says how it is split.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.specs import (
    all_axes,
    axes_of,
    dim_entries,
    entries,
    entry_of,
    with_entries,
)
from treeshard._trace.lines import TracedValue
from treeshard._trace.uses import region_of
from treeshard.communication._hlo import Computation, HloProgram, Op
from treeshard.programs._buffers import Array, read_type

# By line, pass and operation: what an equation and the ops that a compiler made of it share.
Key = tuple[str, str, str]
# JAX traces it once for all scans, so that it has the line of the first scan of the process.
_UPDATE = "dynamic_update_slice"
# Ops that move elements, and keep the name of what they move them for.
_MOVES = frozenset(
    {
        "bitcast",
        "copy",
        "convert",
        "dynamic-slice",
        "reshape",
        "slice",
        "transpose",
    }
)
# Ops that are not values of their own.
_NO_VALUES = frozenset(
    {
        "call",
        "conditional",
        "constant",
        "get-tuple-element",
        "iota",
        "parameter",
        "tuple",
        "while",
    }
)
# What the partitioner moves for an op, such as an operand of a product, has the name of that op.
_BETWEEN_DEVICES = ("all-gather", "all-to-all", "collective-permute")
# Operations of JAX whose results are what is moved.
_MOVERS = frozenset(
    {
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_to_all",
        "ppermute",
        "reshard",
        "sharding_constraint",
    }
)


class FoundOp(NamedTuple):
    """An op of the program that an equation became.

    Attributes:
        shape: That of its result on one device.
        is_stored: Whether its result takes memory: an op inside a fusion computes into registers.
        is_move: Whether it only moves elements.
    """

    shape: tuple[int, ...]
    is_stored: bool
    is_move: bool


class Split(NamedTuple):
    """How a value is split, as far as it is known.

    Attributes:
        elements: The elements of one device's part.
        spec: Its spec; `None` if dims are joined or moved in the program, or if several fit.
        axes: The axes that split it; `None` if several sets fit, as where two axes have one size.
    """

    elements: int
    spec: PartitionSpec | None
    axes: tuple[str, ...] | None


def ops_by_line(program: HloProgram) -> Mapping[Key, Sequence[FoundOp]]:
    """The ops of a program, by the line, the pass and the operation that their names tell."""
    fused = {
        name
        for computation in program.computations.values()
        for op in computation.ops.values()
        if op.opcode == "fusion"
        for name in op.called.get("calls", ())
    }
    ops: dict[Key, list[FoundOp]] = defaultdict(list)
    for computation in program.computations.values():
        stored = _results(computation) if computation.name in fused else None
        for op in computation.ops.values():
            name = op.op_name
            if name is None or op.opcode in _NO_VALUES:
                continue
            operation = name.rpartition("/")[2]
            if op.opcode.startswith(_BETWEEN_DEVICES) and operation not in _MOVERS:
                continue
            is_stored = stored is None or op.name in stored
            line = "" if operation == _UPDATE else program.source(op) or ""
            key = (line, region_of(name), operation)
            ops[key] += [FoundOp(shape, is_stored, op.opcode in _MOVES) for shape in shapes_of(op)]
    return ops


def _results(computation: Computation) -> set[str]:
    """The ops whose results a fusion stores: `ROOT %tuple.3 = (...) tuple(%add.1, %mul.2)`."""
    root = computation.ops.get(computation.root)
    if root is None:
        return set()
    return {root.name, *(root.operands if root.opcode == "tuple" else ())}


def shapes_of(op: Op) -> Iterator[tuple[int, ...]]:
    """The shapes of the arrays that an op returns."""
    tree = read_type(op.type_text)
    for array in tree if isinstance(tree, list) else [tree]:
        if isinstance(array, Array):
            yield dims_of_text(array.text)


def dims_of_text(array: str) -> tuple[int, ...]:
    """16 and 64 of `f32[16,64]`; a dynamic dim counts as its bound, `<=8`."""
    inside = array.partition("[")[2].rstrip("]")
    return tuple(int(dim.lstrip("<=")) for dim in inside.split(",") if dim)


def key_of(value: TracedValue) -> Key:
    """The key under which the ops of a value are."""
    # Of the stacked results of a scan, one trip writes its slice.
    if value.op in ("scan", _UPDATE):
        return "", value.region, _UPDATE
    return value.line, value.region, value.op


def split_of_type(value: TracedValue) -> Split | None:
    """How a value is split by its type; `None` if that leaves it to a compiler."""
    if value.open:
        return None
    return Split(math.prod(value.local_shape), value.spec, tuple(all_axes(entries(value.spec))))


def placed(
    value: TracedValue, ops: Sequence[FoundOp], sizes: Mapping[str, int]
) -> tuple[str, Split | None]:
    """Where a value is in a program, and how it is split there.

    Args:
        value: A value of the trace.
        ops: The ops with its key.
        sizes: Those of its open axes.

    Returns:
        `"memory"`, `"fused"` (computed inside of another op, and never stored) or `"absent"` (no
        op has its line and a part of its shape); and its `Split`, unless that is unknown.
    """
    shape = value.local_shape
    parts = [op for op in ops if specs_for(shape, op.shape, sizes)]
    parts = parts or [op for op in ops if _axes_by_size(shape, op.shape, sizes)]
    if not parts:
        return "absent", None
    where = "memory" if any(op.is_stored for op in parts) else "fused"
    parts = [op for op in parts if not op.is_move] or parts
    if len({math.prod(op.shape) for op in parts}) > 1:  # other values have this line and name
        return where, None
    return where, _split_into(value, parts, sizes)


def _split_into(value: TracedValue, parts: Sequence[FoundOp], sizes: Mapping[str, int]) -> Split:
    """How a value is split of which these ops, all of one size, make one device's part."""
    shape, first = value.local_shape, parts[0].shape
    specs = {spec for op in parts for spec in specs_for(shape, op.shape, sizes)}
    axes = {frozenset(all_axes(entries(spec))) for spec in specs_for(shape, first, sizes)}
    axes = axes or _axes_by_size(shape, first, sizes)
    if axes == {frozenset()}:
        specs = {PartitionSpec()}
    return Split(
        math.prod(first),
        _joined(value, specs.pop()) if len(specs) == 1 else None,
        (*all_axes(entries(value.spec)), *sorted(axes.pop())) if len(axes) == 1 else None,
    )


def _axes_by_size(
    shape: Sequence[int], local: Sequence[int], sizes: Mapping[str, int]
) -> set[frozenset[str]]:
    """The sets of axes by which an array of one size has parts of another."""
    whole, part = math.prod(shape), math.prod(local)
    return {frozenset(axes) for axes in _subsets(sizes) if part * _size(axes, sizes) == whole}


def specs_for(
    shape: Sequence[int], local: Sequence[int], sizes: Mapping[str, int]
) -> list[PartitionSpec]:
    """The specs by which an array of one shape has parts of another."""
    if len(shape) != len(local):
        return []
    subsets = _subsets(sizes)
    choices = [
        [axes for axes in subsets if -(-whole // _size(axes, sizes)) == part]
        for whole, part in zip(shape, local, strict=True)
    ]
    specs: list[PartitionSpec] = []
    for each in product(*choices):
        used = [axis for axes in each for axis in axes]
        if len(used) == len(set(used)):
            specs.append(with_entries(PartitionSpec(), [entry_of(axes) for axes in each]))
    return specs


def _joined(value: TracedValue, spec: PartitionSpec) -> PartitionSpec:
    """What a type tells of a value's spec, and what its program tells."""
    rank = len(value.shape)
    pairs = zip(dim_entries(value.spec, rank), dim_entries(spec, rank), strict=True)
    return with_entries(value.spec, [entry_of([*axes_of(x), *axes_of(y)]) for x, y in pairs])


def _subsets(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    counts = range(len(sizes) + 1)
    return [axes for count in counts for axes in combinations(sizes, count)]


def _size(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)

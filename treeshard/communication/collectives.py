"""Assertions on how much a program moves, for tests."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves

from treeshard._core.mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._core.text import columns, human_bytes
from treeshard.communication.dataflow import Context, Dataflow, value
from treeshard.communication.device_groups import (
    UNKNOWN,
    Groups,
    axes_of_pairs,
    groups_of,
    read_pairs,
)
from treeshard.communication.hlo import HloProgram
from treeshard.communication.program import Buffer, Computation, Op, Program
from treeshard.communication.stablehlo import StableHloProgram
from treeshard.errors import CommunicationError, FormatError, MeshError

# ------------------------------------------------------------------
# Walks a program in execution order, and lists what each op moves between devices.

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_OTHERS = ("collective-broadcast", "ragged-all-to-all", "send")
_NAMED_LIKE_ONE = re.compile(
    r"all.?gather|all.?reduce|reduce.?scatter|all.?to.?all|collective|psum|nccl", re.I
)


@dataclass(frozen=True)
class Collective:
    """One buffer that a program moves between devices.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"`, `"all-reduce"`, `"all-to-all"`,
            `"collective-permute"`; rarely `"collective-broadcast"`, `"ragged-all-to-all"`,
            `"send"`, or `"unknown"` for an op whose name looks like that of a collective.
        dtype: The dtype that is moved. A backend may have widened it.
        bytes: The payload of one execution, measured on the full-size side: an all-gather's
            output, a reduce-scatter's input, and for other kinds one device's buffer.
        wire_bytes: The bytes that a device sends in one execution, if devices form a ring.
        axes: The mesh axes that its device groups span; `None` if they do not span whole axes,
            or the mesh is unknown.
        count: The number of executions, including trips of loops; `None` if it depends on data.
        path: The argument whose data it moves, such as `state/layers/0/w`; `None` for computed
            values, such as activations and gradients.
        op_name: JAX's name of the operation.
        source: The line of user code that it comes from, as `file:line`.
        is_async: Whether it can overlap with other work (`-start` and `-done`).
        rank: The number of dims of the buffer; 0 for a scalar such as a loss.

    Examples:
        >>> Collective("all-gather", "float32", 4096, 3584, ("fsdp",), count=12).total_bytes
        49152
    """

    kind: str
    dtype: str
    bytes: int | None
    wire_bytes: int | None
    axes: tuple[str, ...] | None
    count: int | None
    path: str | None = None
    op_name: str | None = None
    source: str | None = None
    is_async: bool = False
    rank: int = 0

    @property
    def total_bytes(self) -> int | None:
        """The payload of all executions together."""
        return None if self.bytes is None or self.count is None else self.bytes * self.count


class Reader:
    """Walks a program in execution order, from the entry into loops and calls."""

    def __init__(self, program: Program, axes: Mapping[str, int] | None) -> None:
        self.program, self.axes = program, axes
        self.flow = Dataflow(program)
        self._devices = program.devices
        if self._devices is None and axes is not None:
            self._devices = math.prod(axes.values())
        self._calls: dict[str, list[tuple[Op, str, int, str]]] = {}
        self._ops: dict[str, list[Op]] = {}  # the collectives of each computation
        for name, computation in program.computations.items():
            self._scan(name, computation)
        self._holding = self._with_collectives()
        self._paths: dict[str, str | None] = {}
        self._reached: set[str] = set()

    def all(self) -> Iterator[Collective]:
        entry = self.program.computations[self.program.entry]
        yield from self._visit(Context(entry), 1)
        for name in self._ops:
            if name not in self._reached:
                yield from self._visit(Context(self.program.computations[name]), None)

    def _scan(self, name: str, computation: Computation) -> None:
        for op in computation.ops.values():
            if _kind(op) is not None:
                self._ops.setdefault(name, []).append(op)
                continue
            for role, called in op.called.items():
                for branch, callee in enumerate(called):
                    self._calls.setdefault(name, []).append((op, role, branch, callee))

    def _with_collectives(self) -> set[str]:
        callers: dict[str, list[str]] = {}
        for name, calls in self._calls.items():
            for *_, callee in calls:
                callers.setdefault(callee, []).append(name)
        holding, queue = set(self._ops), list(self._ops)
        while queue:
            for name in callers.get(queue.pop(), ()):
                if name not in holding:
                    holding.add(name)
                    queue.append(name)
        return holding

    def _visit(self, context: Context, count: int | None) -> Iterator[Collective]:
        name = context.computation.name
        self._reached.add(name)
        steps = [(op.line, op, None) for op in self._ops.get(name, ())]
        steps += [
            (call[0].line, call[0], call)
            for call in self._calls.get(name, ())
            if call[3] in self._holding
        ]
        for _, op, call in sorted(steps, key=lambda step: step[0]):
            if call is None:
                yield from self._moved(context, op, count)
                continue
            _, role, branch, callee = call
            if _runs(context, callee):
                raise FormatError(
                    f"collectives: the computation {callee!r} calls itself. The text is damaged."
                )
            inner = self.flow.enter(context, op, callee, role, branch)
            if inner is not None:
                yield from self._visit(inner, self._times(context, op, role, count))

    def _times(self, context: Context, op: Op, role: str, count: int | None) -> int | None:
        if role == "branches" or count is None:
            return None  # the choice of the branch depends on data
        if op.opcode != "while":
            return count
        trips = self.flow.trips(context, op)
        return None if trips is None else count * (trips + (role == "condition"))

    # ---------------------------------------------------------------- one op

    def _moved(self, context: Context, op: Op, count: int | None) -> Iterator[Collective]:
        kind = _kind(op) or ""
        if kind == "all-reduce" and context.computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # as TPUs fuse it
        groups = self._groups(kind, op)
        place = self.program.place(op)
        is_async = op.opcode.endswith("-start") or (
            context.op is not None and context.op.opcode == "async-start"
        )
        for dtype, size, rank, refs in self._buffers(context, kind, op, groups):
            yield Collective(
                kind=kind,
                dtype=dtype,
                bytes=size,
                wire_bytes=_on_the_wire(kind, size, groups.size),
                axes=groups.axes,
                count=count,
                path=self._path(context, refs),
                op_name=place.op_name,
                source=place.source,
                is_async=is_async,
                rank=rank,
            )

    def _buffers(
        self, context: Context, kind: str, op: Op, groups: Groups
    ) -> Iterator[tuple[str, int | None, int, Sequence[str]]]:
        """The dtype, payload, rank and operands of each buffer that an op moves."""
        operands, types = list(op.operands), list(op.types)
        inputs = [self._type(context, ref) for ref in operands]
        if kind in ("unknown", "ragged-all-to-all"):
            yield (types[0].dtype if types else "unknown"), None, 0, operands
            return
        if kind == "send":
            yield from (
                (x.dtype, x.bytes, x.rank, [r]) for x, r in zip(inputs, operands[:1], strict=False)
            )
            return
        number = len(operands)
        # A `-start` may return its operands before its results, and context values after them.
        results = types if len(types) == number else types[number : 2 * number]
        if not operands or len(results) != number:
            yield "unknown", None, 0, operands
            return
        if kind == "all-to-all" and op.attribute("dimensions") is None:
            sizes = [x.bytes for x in results]
            payload = None if None in sizes else sum(size or 0 for size in sizes)
            yield results[0].dtype, payload, results[0].rank, operands
            return
        for ref, before, after in zip(operands, inputs, results, strict=True):
            size = after.bytes
            if kind == "reduce-scatter" and op.opcode.startswith("reduce-scatter"):
                size = before.bytes
                if size is None and after.bytes is not None and groups.size is not None:
                    size = after.bytes * groups.size
            yield after.dtype, size, after.rank, [ref]

    def _type(self, context: Context, ref: str) -> Buffer:
        operand = value(context, ref)
        types = [] if operand is None else list(operand.op.types)
        element = 0 if operand is None or operand.element is None else operand.element
        return types[element] if element < len(types) else Buffer("unknown", None, 0)

    def _path(self, context: Context, refs: Sequence[str]) -> str | None:
        origins = [self.flow.origins(context, ref) for ref in refs]
        names = {name for origin in origins for name in origin.parameters}
        if len(names) != 1 or any(origin.computed for origin in origins):
            return None
        [name] = names
        if name not in self._paths:
            op = self.program.computations[self.program.entry].ops[name]
            self._paths[name] = as_path(self.program.argument(op))
        return self._paths[name]

    def _groups(self, kind: str, op: Op) -> Groups:
        if kind == "collective-permute":
            pairs = read_pairs(op.attribute("source_target_pairs"))
            return UNKNOWN if pairs is None else axes_of_pairs(pairs, self.axes)
        if kind in ("unknown", "send"):
            return UNKNOWN
        text = op.attribute("replica_groups")
        program = self.program
        if op.attribute("use_global_device_ids") is None and program.partitions > 1:
            # The groups number replicas, except for these kinds: they number partitions.
            of_partitions = kind in ("all-to-all", "ragged-all-to-all", "collective-broadcast")
            if program.replicas > 1:
                return UNKNOWN
            if op.attribute("channel_id") is None:
                return Groups(1, ())
            text = text if of_partitions else "{}"
        return groups_of(text, self._devices, self.axes)


def _runs(context: Context | None, name: str) -> bool:
    while context is not None and context.computation.name != name:
        context = context.caller
    return context is not None


def _kind(op: Op) -> str | None:
    plain = op.opcode.removesuffix("-start")
    if plain in KINDS or plain in _OTHERS:
        if plain == "send" and op.attribute("is_host_transfer") == "true":
            return None
        return plain
    if op.opcode.endswith(("-done", "-update")):
        return None
    name = op.opcode
    if name == "custom-call":
        name = op.attribute("custom_call_target") or ""
    return "unknown" if _NAMED_LIKE_ONE.search(name) else None


def _on_the_wire(kind: str, size: int | None, devices: int | None) -> int | None:
    if size is None or devices is None or kind == "unknown":
        return None
    if kind in ("all-gather", "reduce-scatter", "all-to-all"):
        return size * (devices - 1) // devices
    if kind == "all-reduce":
        return 2 * size * (devices - 1) // devices
    return size if devices > 1 else 0


_KEY = re.compile(r"""\['([^']*)'\]|\["([^"]*)"\]|\[(\d+)\]|\.(\w+)|\[<flat index (\d+)>\]""")


def as_path(name: str | None) -> str | None:
    """`state['layers'][0].w` -> `state/layers/0/w`."""
    match = None if name is None else re.match(r"\w+", name)
    if name is None or match is None:
        return name
    parts, position = [match[0]], match.end()
    while position < len(name):
        key = _KEY.match(name, position)
        if key is None:
            return name
        parts.append(next(part for part in key.groups() if part is not None))
        position = key.end()
    return "/".join(parts)


# ------------------------------------------------------------------
# Lists the collectives of a compiled or lowered program.


def collectives(program: Any, mesh: AnyMesh | None = None) -> list[Collective]:
    """Lists what a program moves between devices, with the tree paths of the arrays it moves.

    An op on several buffers gives one entry per buffer; only an all-to-all gives one for all,
    since its buffers are the parts of one array. What cannot be determined is `None`, never a
    guess.

    Args:
        program: A `jax.stages.Compiled`: what runs. Or a `jax.stages.Lowered`: what was traced,
            before the partitioner adds its own collectives, so only what was written by hand.
            Or the text of either, HLO or StableHLO.
        mesh: The mesh that the program runs on, to name its axes. By default it is read from
            the program's shardings; the text of HLO alone does not name axes.

    Returns:
        A `Collective` per buffer, in program order. If a program calls one function from several
        places, there is one per place.

    Raises:
        FormatError: If the text is not a program, is truncated, or contains a collective that
            cannot be parsed.
        MeshError: If the program is partitioned over another number of devices than `mesh` has.
        TypeError: If `program` is none of these, such as a function that was not compiled.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> w = jax.ShapeDtypeStruct((64, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
        >>> whole = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
        >>> [moved] = collectives(whole.lower(w).compile())
        >>> moved.kind, moved.axes, moved.bytes, moved.wire_bytes, moved.count
        ('all-gather', ('fsdp',), 2048, 1792, 1)
    """
    read, axes = read_program(program, mesh)
    return list(Reader(read, axes).all())


def read_program(
    program: Any, mesh: AnyMesh | None = None
) -> tuple[Program, Mapping[str, int] | None]:
    """The graph of a program, and the axes of its mesh if they are known."""
    found = mesh
    if isinstance(program, jax.stages.Compiled):
        text = program.as_text()
        found = mesh or _mesh_of(program)
    elif isinstance(program, jax.stages.Lowered):
        text = program.as_text(debug_info=True)
    elif isinstance(program, str):
        text = program
    else:
        raise TypeError(
            f"collectives: {type(program).__name__} is not a program. Compile it first:"
            " `step.lower(state, batch).compile()`, or pass the text of one."
        )
    if not text:
        raise FormatError("collectives: the text is empty. This backend may not provide one.")
    read = _parse(text)
    if found is None:
        return read, read.axes
    count = math.prod(axis_sizes(found).values())
    if read.devices is not None and read.devices != count:
        raise MeshError(
            f"collectives: the program runs on {read.devices} device(s), but the mesh"
            f" ({describe_mesh(found)}) has {count}. Pass the mesh that it was compiled for."
        )
    return read, axis_sizes(found)


def _parse(text: str) -> Program:
    first = re.search(r"^(?!\s*$|//|#)\s*(\w+(?:\.\w+)?)", text, re.M)
    try:
        if first is not None and first[1] == "HloModule":
            return HloProgram(text)
        if first is not None and first[1] in ("module", "func.func"):
            return StableHloProgram(text)
    except FormatError as error:
        raise FormatError(f"collectives: {error} Pass the full `as_text()`.") from error
    raise FormatError(
        f"collectives: the text is not a program. HLO starts with `HloModule` and StableHLO with"
        f" `module`; this starts with {text.strip()[:40]!r}."
    )


def _mesh_of(program: jax.stages.Compiled) -> AnyMesh | None:
    """The mesh of a program's arguments and results, if they agree on one."""
    shardings = tree_leaves((program.input_shardings, program.output_shardings))
    meshes = {x.mesh for x in shardings if isinstance(x, NamedSharding)}
    sizes = {tuple(axis_sizes(mesh).items()) for mesh in meshes}
    return next(iter(meshes)) if len(sizes) == 1 else None


def table(moved: Sequence[Collective]) -> str:
    """Collectives as an aligned table; equal ones share a line."""
    heads = ("kind", "axes", "count", "bytes each", "total", "array", "moves", "source")
    rows: dict[tuple[str, ...], int] = {}
    for one in moved:
        axes = "unknown" if one.axes is None else ", ".join(one.axes) or "none"
        size = "unknown" if one.bytes is None else human_bytes(one.bytes)
        moves = one.path or one.op_name or ""
        row = (one.kind, axes, size, str(one.bytes), str(one.count), one.dtype, moves)
        rows[(*row, one.source or "")] = rows.get((*row, one.source or ""), 0) + 1
    lines: list[tuple[str, ...]] = [heads]
    for (kind, axes, size, exact, count, dtype, moves, source), times in rows.items():
        known = count != "None" and exact != "None"
        runs = "unknown" if count == "None" else str(times * int(count))
        total = human_bytes(times * int(count) * int(exact)) if known else "unknown"
        lines.append((kind, axes, runs, size, total, dtype, moves, source))
    return columns(lines, right=4) if rows else "nothing"


Budget = int | tuple[int | None, int | None] | None


def assert_collectives(
    program: Any,
    mesh: AnyMesh | None = None,
    *,
    all_gather: Budget = None,
    reduce_scatter: Budget = None,
    all_reduce: Budget = None,
    all_to_all: Budget = None,
    collective_permute: Budget = None,
    max_bytes: int | None = None,
) -> None:
    """Checks how often a program runs each kind of collective, and how many bytes it moves.

    Args:
        program: As in `collectives`.
        mesh: As in `collectives`.
        all_gather: The exact number of executions, per buffer and including trips of loops; or
            `(count, bytes)`, where `bytes` is the most that all executions together may move,
            and either may be `None`. `None` leaves the kind unchecked.
        reduce_scatter: As `all_gather`.
        all_reduce: As `all_gather`.
        all_to_all: As `all_gather`.
        collective_permute: As `all_gather`.
        max_bytes: The most that all kinds together may move, in bytes of payload.

    Raises:
        CommunicationError: If a budget is exceeded, or a number in it is unknown. It is also an
            `AssertionError`. The message lists all collectives as a table.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> w = jax.ShapeDtypeStruct((64, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
        >>> whole = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
        >>> assert_collectives(whole.lower(w).compile(), all_gather=(1, 2048), all_reduce=0)

    Source:
        PyTorch's `CommDebugMode` counts collectives in tests.
    """
    budgets = (all_gather, reduce_scatter, all_reduce, all_to_all, collective_permute)
    moved = collectives(program, mesh)
    facts: list[str] = []
    for kind, budget in zip(KINDS, budgets, strict=True):
        count, most = budget if isinstance(budget, tuple) else (budget, None)
        these = [one for one in moved if one.kind == kind]
        runs = _sum(one.count for one in these)
        if count is not None and runs != count:
            facts.append(f"{kind}: {_or_unknown(runs)} executions, but {count:,} are expected.")
        facts += _over(kind, these, most)
    facts += _over("all collectives", moved, max_bytes)
    if facts:
        raise CommunicationError("\n".join([*facts, table(moved)]))


def _over(what: str, moved: Sequence[Collective], most: int | None) -> list[str]:
    total = _sum(one.total_bytes for one in moved)
    if most is None or (total is not None and total <= most):
        return []
    return [f"{what}: {_or_unknown(total)} bytes, but at most {most:,} are allowed."]


def _sum(numbers: Iterator[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number or 0 for number in known)


def _or_unknown(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"

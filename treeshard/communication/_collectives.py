"""Lists the collectives of a compiled program, and asserts budgets on them."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from treeshard._core.mesh import MeshLike
from treeshard._core.text import columns, human_bytes
from treeshard.communication._dataflow import Context, Dataflow, value
from treeshard.communication._device_groups import (
    UNKNOWN,
    Groups,
    axes_of_pairs,
    groups_of,
    read_pairs,
)
from treeshard.communication._hlo import Buffer, Computation, HloProgram, Op
from treeshard.communication._program import CompiledProgram, argument_path, read_program
from treeshard.errors import CommunicationError, FormatError

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
RARE_KINDS = ("collective-broadcast", "ragged-all-to-all", "send")
_NAMED_LIKE_ONE = re.compile(
    r"all.?gather|all.?reduce|reduce.?scatter|all.?to.?all|collective|psum|nccl", re.I
)

Budget = int | tuple[int | None, int | None] | None


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
        op_name: JAX's name of the operation. One that the partitioner inserted without a name has
            the name of the first operation that uses its result.
        source: The line of user code that this operation comes from, as `file:line`.
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


def collectives(program: CompiledProgram, mesh: MeshLike | None = None) -> list[Collective]:
    """Lists what a program moves between devices, with the tree paths of the arrays it moves.

    An op on several buffers gives one entry per buffer; only an all-to-all gives one for all,
    since its buffers are the parts of one array. What cannot be determined is `None`, never a
    guess.

    Args:
        program: A `jax.stages.Compiled`, or the text of one (HLO). A `jax.stages.Lowered` is
            refused: the partitioner adds most collectives when it compiles.
        mesh: The mesh that the program runs on, to name its axes: a mesh, or text such as
            `"data=2,fsdp=4"`. By default it is read from the program's shardings; the text of
            HLO alone does not name axes.

    Returns:
        A `Collective` per buffer, in program order. If a program calls one function from several
        places, there is one per place.

    Raises:
        FormatError: If the text is not HLO, is truncated, or contains a collective that cannot be
            parsed.
        MeshError: If the program is partitioned over another number of devices than `mesh` has.
        TypeError: If `program` is none of these, such as a function that was not compiled.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> w = jax.ShapeDtypeStruct((64, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
        >>> full = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
        >>> [moved] = collectives(full.lower(w).compile())
        >>> moved.kind, moved.axes, moved.bytes, moved.wire_bytes, moved.count
        ('all-gather', ('fsdp',), 2048, 1792, 1)
    """
    graph, axes = read_program(program, mesh)
    return list(CollectiveReader(graph, axes).all())


# ------------------------------------------------------------------ budgets


def assert_collectives(
    program: CompiledProgram,
    mesh: MeshLike | None = None,
    *,
    all_gather: Budget = None,
    reduce_scatter: Budget = None,
    all_reduce: Budget = None,
    all_to_all: Budget = None,
    collective_permute: Budget = None,
    max_bytes: int | None = None,
) -> None:
    """Checks how often a program runs each kind of collective, and how many bytes it moves.

    An op that looks like a collective but cannot be read fails the check, whatever the budgets.

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
        >>> full = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
        >>> assert_collectives(full.lower(w).compile(), all_gather=(1, 2048), all_reduce=0)

    Source:
        PyTorch's `CommDebugMode` counts collectives in tests.
    """
    budgets = (all_gather, reduce_scatter, all_reduce, all_to_all, collective_permute)
    moved = collectives(program, mesh)
    facts: list[str] = []
    for kind, budget in zip(KINDS, budgets, strict=True):
        count, most = budget if isinstance(budget, tuple) else (budget, None)
        of_kind = [one for one in moved if one.kind == kind]
        runs = total(one.count for one in of_kind)
        if count is not None and runs != count:
            facts.append(f"{kind}: {_or_unknown(runs)} executions, expected {count:,}.")
        facts += _over(kind, of_kind, most)
    facts += _over("all collectives", moved, max_bytes)
    if unknown := dict.fromkeys(one.op_name or "" for one in moved if one.kind == "unknown"):
        names = ", ".join(list(unknown)[:5])
        facts.append(f"these ops look like collectives, but cannot be read: {names}.")
    if facts:
        raise CommunicationError("\n".join([*facts, _table(moved)]))


def _over(what: str, moved: Sequence[Collective], most: int | None) -> list[str]:
    size = total(one.total_bytes for one in moved)
    if most is None or (size is not None and size <= most):
        return []
    return [f"{what}: {_or_unknown(size)} bytes, at most {most:,} allowed."]


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; `None` if a number is unknown."""
    known = list(numbers)
    return None if None in known else sum(number or 0 for number in known)


def _or_unknown(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"


def _table(moved: Sequence[Collective]) -> str:
    """Collectives as an aligned table; equal ones share a line."""
    lines = [("kind", "axes", "count", "bytes each", "total", "array", "moves", "source")]
    rows = Counter(
        (one.kind, one.axes, one.bytes, one.count, one.dtype, one.path or one.op_name, one.source)
        for one in moved
    )
    for (kind, axes, size, count, dtype, moves, source), times in rows.items():
        runs = None if count is None else times * count
        lines.append(
            (
                kind,
                "unknown" if axes is None else ", ".join(axes) or "none",
                "unknown" if runs is None else str(runs),
                "unknown" if size is None else human_bytes(size),
                "unknown" if size is None or runs is None else human_bytes(size * runs),
                dtype,
                moves or "",
                source or "",
            )
        )
    return columns(lines, right=4) if moved else "nothing"


# ------------------------------------------------------------------ reading


class CollectiveReader:
    """Walks a program in execution order, from the entry into loops and calls."""

    def __init__(self, program: HloProgram, axes: Mapping[str, int] | None) -> None:
        self.program, self.axes = program, axes
        self.flow = Dataflow(program)
        self._arguments = {parameter.op_name for parameter in program.parameters}
        self._devices = program.devices
        if self._devices is None and axes is not None:
            self._devices = math.prod(axes.values())
        self._ops: dict[str, list[Op]] = {}  # the collectives of each computation
        self._calls: dict[str, list[tuple[Op, str, int, str]]] = {}
        for computation in program.computations.values():
            self._scan(computation)
        self._holding = self._with_collectives()
        self._reached: set[str] = set()

    def all(self) -> Iterator[Collective]:
        """The collectives that the entry reaches, and those of computations without a caller."""
        yield from self._visit(Context(self.program.entry), 1)
        for name in self._ops:
            if name not in self._reached:
                yield from self._visit(Context(self.program.computations[name]), None)

    def _scan(self, computation: Computation) -> None:
        for op in computation.ops.values():
            if _kind(op) is not None:
                self._ops.setdefault(computation.name, []).append(op)
                continue
            for role, callees in op.called.items():
                for branch, callee in enumerate(callees):
                    call = op, role, branch, callee
                    self._calls.setdefault(computation.name, []).append(call)

    def _with_collectives(self) -> set[str]:
        """The computations that run a collective, themselves or in what they call."""
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
        op_name, source = op.op_name, self.program.source(op)
        if source is None and (op_name in self._arguments or _is_inserted(op, op_name)):
            # JAX 0.11 and newer: it has no name, or only that of the argument that it gathers.
            user = self.flow.first_user(context.computation, op)
            if user is not None:
                op_name, source = user.op_name, self.program.source(user)
        if kind == "unknown" and op_name is None:
            op_name = _callee(op)
        is_async = op.opcode.endswith("-start") or (
            context.op is not None and context.op.opcode == "async-start"
        )
        for buffer, operands in self._buffers(context, kind, op, groups):
            yield Collective(
                kind=kind,
                dtype=buffer.dtype,
                bytes=buffer.bytes,
                wire_bytes=_on_the_wire(kind, buffer.bytes, groups.size),
                axes=groups.axes,
                count=count,
                path=self._path(context, operands),
                op_name=op_name,
                source=source,
                is_async=is_async,
                rank=buffer.rank,
            )

    def _buffers(
        self, context: Context, kind: str, op: Op, groups: Groups
    ) -> Iterator[tuple[Buffer, Sequence[str]]]:
        """Each buffer that an op moves, with its payload as `bytes`, and its operands."""
        operands, types = list(op.operands), list(op.types)
        inputs = [self._type(context, operand) for operand in operands]
        number = len(operands)
        # A `-start` may return its operands before its results, and context values after them.
        results = types if len(types) == number else types[number : 2 * number]
        if kind in ("unknown", "ragged-all-to-all"):
            yield Buffer(types[0].dtype if types else "unknown", None, 0), operands
        elif kind == "send":
            yield from zip(inputs[:1], [operands[:1]], strict=False)
        elif not operands or len(results) != number:
            yield Buffer("unknown", None, 0), operands
        elif kind == "all-to-all" and op.attribute("dimensions") is None:
            yield results[0]._replace(bytes=total(part.bytes for part in results)), operands
        else:
            for operand, before, after in zip(operands, inputs, results, strict=True):
                size = after.bytes
                if op.opcode.startswith("reduce-scatter"):
                    size = before.bytes
                    if size is None and after.bytes is not None and groups.size is not None:
                        size = after.bytes * groups.size
                yield after._replace(bytes=size), [operand]

    def _type(self, context: Context, name: str) -> Buffer:
        operand = value(context, name)
        types = [] if operand is None else operand.op.types
        return types[0] if types else Buffer("unknown", None, 0)

    def _path(self, context: Context, operands: Sequence[str]) -> str | None:
        """The argument whose data the operands are, if it is one and they are nothing else."""
        origins = [self.flow.origins(context, operand) for operand in operands]
        parameters = {parameter for origin in origins for parameter in origin.parameters}
        if len(parameters) != 1 or any(origin.computed for origin in origins):
            return None
        return argument_path(parameters.pop())

    def _groups(self, kind: str, op: Op) -> Groups:
        if kind == "collective-permute":
            pairs = read_pairs(op.attribute("source_target_pairs"))
            return UNKNOWN if pairs is None else axes_of_pairs(pairs, self.axes)
        if kind in ("unknown", "send"):
            return UNKNOWN
        text = op.attribute("replica_groups")
        if op.attribute("use_global_device_ids") is None and self.program.partitions > 1:
            # The groups number replicas, except for these kinds: they number partitions.
            of_partitions = kind in ("all-to-all", "ragged-all-to-all", "collective-broadcast")
            if self.program.replicas > 1:
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
    """The kind of a collective; `None` for other ops, and for the second half of an async one."""
    plain = op.opcode.removesuffix("-start")
    if plain == "send" and op.attribute("is_host_transfer") == "true":
        # Between slices of TPUs, data moves through the hosts.
        between_slices = "_xla_megascale" in (op.attribute("frontend_attributes") or "")
        return "unknown" if between_slices else None
    if plain in KINDS or plain in RARE_KINDS:
        return plain
    if op.opcode.endswith(("-done", "-update")):
        return None
    return "unknown" if _NAMED_LIKE_ONE.search(_callee(op)) else None


def _is_inserted(op: Op, op_name: str | None) -> bool:
    """Whether the partitioner inserted an op for those that use it, and gave it no name."""
    return op_name is None and "is_spmd_generated" in (op.attribute("frontend_attributes") or "")


def _callee(op: Op) -> str:
    """The opcode, or the function that a custom call runs."""
    target = op.attribute("custom_call_target") if op.opcode == "custom-call" else None
    return op.opcode if target is None else target.strip('"')


def _on_the_wire(kind: str, size: int | None, devices: int | None) -> int | None:
    if size is None or devices is None or kind == "unknown":
        return None
    if kind in ("all-gather", "reduce-scatter", "all-to-all"):
        return size * (devices - 1) // devices
    if kind == "all-reduce":
        return 2 * size * (devices - 1) // devices
    return size if devices > 1 else 0

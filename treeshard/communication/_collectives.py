"""Lists the collectives of a compiled program, and asserts budgets on them."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from treeshard._core.mesh import MeshLike
from treeshard._core.text import columns, human_bytes
from treeshard.communication._dataflow import (
    Context,
    Dataflow,
    Executions,
    Origins,
    Value,
    value,
)
from treeshard.communication._device_groups import (
    UNKNOWN,
    Groups,
    groups_of,
    groups_of_pairs,
)
from treeshard.communication._hlo import Buffer, Computation, Op
from treeshard.communication._program import (
    MEGASCALE,
    CompiledProgram,
    ReadProgram,
    argument_path,
    read_program,
)
from treeshard.errors import CommunicationError

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
RARE_KINDS = ("collective-broadcast", "ragged-all-to-all", "send")
_NAMED_LIKE_ONE = re.compile(
    r"all.?gather|all.?reduce|reduce.?scatter|all.?to.?all|collective|psum|nccl", re.I
)

# Ops whose result has the elements of their operand, perhaps in another shape.
_WRAPPERS = (
    "all-reduce",
    "bitcast",
    "call",
    "copy",
    "fusion",
    "get-tuple-element",
    "parameter",
    "reshape",
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
        wire_bytes: The bytes that a device sends in one execution, if devices form a ring. Twice as
            many as needed for an all-gather that a backend makes an all-reduce, of shards in arrays
            of zeros.
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
        completes: The kind of the collective that it belongs to, if it only shifts the rows of
            a padded result into place; else `None`.
        is_widened: Whether the text shows that the backend widened the dtype: the data has a
            narrower one before.
        is_inserted: Whether XLA marks it as inserted by its partitioner; only newer versions do.

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
    completes: str | None = None
    is_widened: bool = False
    is_inserted: bool = False

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
    return list(CollectiveReader(read_program(program, mesh)).all())


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


def is_scalar(one: Collective) -> bool:
    """Whether it reduces a scalar, such as a loss, which no plan has."""
    return one.kind == "all-reduce" and one.rank == 0 and one.bytes is not None


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; `None` if a number is unknown."""
    known = list(numbers)
    return None if None in known else sum(number or 0 for number in known)


def bytes_text(size: int | None, unknown: str = "an unknown number of bytes") -> str:
    return unknown if size is None else human_bytes(size)


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
                bytes_text(size, "unknown"),
                bytes_text(None if size is None or runs is None else size * runs, "unknown"),
                dtype,
                moves or "",
                source or "",
            )
        )
    return columns(lines, right=4) if moved else "nothing"


# ------------------------------------------------------------------ reading


class CollectiveReader:
    """Finds the collectives of a program, in execution order."""

    def __init__(self, read: ReadProgram) -> None:
        self.program, self.axes, self.between = read.graph, read.within, read.between
        self.flow = Dataflow(self.program)
        self._devices = self.program.devices
        if self._devices is None and self.axes is not None:
            self._devices = math.prod(self.axes.values())
        self._arguments = {parameter.op_name for parameter in self.program.parameters}
        # The ids of chains; see `_chains_started`.
        computations = self.program.computations.values()
        self._started = {chain for each in computations for chain in _chains_started(each)}

    def all(self) -> Iterator[Collective]:
        """The collectives that the entry reaches, and those of computations without a caller."""
        for context, op, count in Executions(self.flow, lambda op: _kind(op) is not None).all():
            yield from self._moved(context, op, count)

    # ---------------------------------------------------------------- one op

    def _moved(self, context: Context, op: Op, count: int | None) -> Iterator[Collective]:
        kind, chain = _kind(op) or "", op.frontend("chain_id")
        if chain and chain not in _chains_started(context.computation):
            if chain in self._started:
                return  # a further piece of a collective that is already counted
            kind = "unknown"
        if kind == "all-reduce" and _is_scatter(context.computation.name):
            kind = "reduce-scatter"
        groups = self._groups(kind, op)
        op_name, source = op.op_name, self.program.source(op)
        is_inserted = "is_spmd_generated" in op.attribute("frontend_attributes")
        if source is None and (op_name in self._arguments or (is_inserted and op_name is None)):
            # JAX 0.11 and newer: it has no name, or only that of the argument that it gathers.
            user = self.flow.first_user(context.computation, op)
            if user is not None:
                op_name, source = user.op_name, self.program.source(user)
        if kind == "unknown" and op_name is None:
            op_name = op.target or op.opcode
        for buffer, operands in self._buffers(context, kind, op, groups):
            shard = self._shard_in_zeros(operands) if kind == "all-reduce" else None
            origins = [self.flow.origins(operand) for operand in (shard or operands)]
            yield Collective(
                kind="all-gather" if shard else kind,
                dtype=buffer.dtype,
                bytes=buffer.bytes,
                wire_bytes=bytes_on_the_wire(kind, buffer.bytes, groups.size),
                axes=groups.axes,
                count=count,
                path=_path(origins),
                op_name=op_name,
                source=source,
                is_async=_is_async(context, op),
                rank=buffer.rank,
                completes=self._completes(kind, operands),
                is_widened=_is_widened(op, buffer.dtype, origins),
                is_inserted=is_inserted,
            )

    def _buffers(
        self, context: Context, kind: str, op: Op, groups: Groups
    ) -> Iterator[tuple[Buffer, Sequence[Value | None]]]:
        """Each buffer that an op moves, with its payload as `bytes`, and its operands."""
        operands, types = [value(context, name) for name in op.operands], list(op.types)
        number = len(operands)
        # A `-start` may return its operands before its results, and context values after them.
        results = types if len(types) == number else types[number : 2 * number]
        if kind in ("unknown", "ragged-all-to-all"):
            yield Buffer(types[0].dtype if types else "unknown", None, 0), operands
        elif op.opcode == "send":
            operand = operands[0] if operands else None
            buffer = _type(operand)
            if kind == "all-gather" and buffer.bytes is not None and groups.size is not None:
                buffer = buffer._replace(bytes=buffer.bytes * groups.size)
            yield from self._unjoined(kind, operand, buffer)
        elif not operands or len(results) != number:
            yield Buffer("unknown", None, 0), operands
        elif kind == "all-to-all" and not op.attribute("dimensions"):
            yield results[0]._replace(bytes=total(part.bytes for part in results)), operands
        else:
            for operand, after in zip(operands, results, strict=True):
                if op.opcode.startswith("reduce-scatter"):
                    size = _type(operand).bytes
                    if size is None and after.bytes is not None and groups.size is not None:
                        size = after.bytes * groups.size
                    after = after._replace(bytes=size)
                elif kind == "reduce-scatter" and operand and operand.op.opcode == "pad":
                    operand = value(operand.context, operand.op.operands[0])
                    after = _type(operand)
                yield from self._unjoined(kind, operand, after)

    def _unjoined(
        self, kind: str, operand: Value | None, buffer: Buffer
    ) -> Iterator[tuple[Buffer, Sequence[Value | None]]]:
        """The arrays that a backend joined into one flat buffer, or that buffer alone."""
        at = self._unwrapped(operand) if kind == "all-reduce" else None
        if at is not None and at.op.opcode == "concatenate":
            for name in at.op.operands:
                part = value(at.context, name)
                yield _type(self._unwrapped(part)), [part]
        elif at is not None and _type(at).rank == 0:
            yield _type(at), [operand]  # a scalar, padded to a tile
        else:
            yield buffer, [operand]

    def _unwrapped(self, at: Value | None) -> Value | None:
        """Where a value was before it got another shape or became an argument."""
        while at is not None and at.op.opcode in _WRAPPERS:
            if at.op.opcode == "all-reduce":
                sources = [value(at.context, name) for name in at.op.operands]
            else:
                sources = self.flow.sources(at) or []
            if len(sources) != 1 or sources[0] is None:
                break
            at = sources[0]
        return at

    def _shard_in_zeros(self, operands: Sequence[Value | None]) -> list[Value | None] | None:
        """The shard that each device writes into an array of zeros, if the sum over devices only
        joins these shards."""
        at = self._unwrapped(operands[0]) if len(operands) == 1 else None
        if at is None or at.op.opcode != "dynamic-update-slice":
            return None
        target, shard = (self._unwrapped(value(at.context, name)) for name in at.op.operands[:2])
        if target is None or target.op.opcode != "broadcast":
            return None
        filling = self._unwrapped(value(target.context, target.op.operands[0]))
        return [shard] if filling is not None and filling.op.number == 0 else None

    def _completes(self, kind: str, operands: Sequence[Value | None]) -> str | None:
        """The kind of the collective whose padded result this op shifts into place, if any."""
        at = operands[0] if kind == "collective-permute" and operands else None
        while at is not None and at.op.opcode != "fusion":
            sources = self.flow.sources(at) or (None,)
            at = sources[0] if len(sources) == 1 else None
        callees = [] if at is None else [name for names in at.op.called.values() for name in names]
        bodies = [self.program.computations[name] for name in callees if _is_scatter(name)]
        is_padded = any(op.opcode == "pad" for body in bodies for op in body.ops.values())
        return "reduce-scatter" if is_padded else None

    def _groups(self, kind: str, op: Op) -> Groups:
        if kind == "collective-permute":
            return groups_of_pairs(op.attribute("source_target_pairs"), self.axes)
        if kind in ("unknown", "send") or (op.opcode == "send" and not self.between):
            return UNKNOWN
        if op.opcode == "send":  # between slices
            return Groups(math.prod(self.between.values()), tuple(self.between))
        text = op.attribute("replica_groups")
        if not op.attribute("use_global_device_ids") and self.program.partitions > 1:
            # The groups number replicas, except for these kinds: they number partitions.
            of_partitions = kind in ("all-to-all", "ragged-all-to-all", "collective-broadcast")
            if self.program.replicas > 1:
                return UNKNOWN
            if not op.attribute("channel_id"):
                return Groups(1, ())
            text = text if of_partitions else "{}"
        return groups_of(text, self._devices, self.axes)


def _path(origins: Sequence[Origins]) -> str | None:
    """The argument whose data some values are, if it is one and they are nothing else."""
    parameters = {parameter for origin in origins for parameter in origin.parameters}
    if len(parameters) != 1 or any(origin.computed for origin in origins):
        return None
    return argument_path(parameters.pop())


def _is_widened(op: Op, dtype: str, origins: Sequence[Origins]) -> bool:
    """Whether a float that is moved had a narrower dtype before, or is reduced by a function that
    the compiler promoted to a wider one."""
    if op.attribute("to_apply").endswith("_promoted"):
        return True
    narrower = {"float32": ("bfloat16", "float16"), "float64": ("bfloat16", "float16", "float32")}
    return any(origin.dtypes & set(narrower.get(dtype, ())) for origin in origins)


def _kind(op: Op) -> str | None:
    """The kind of a collective; `None` for other ops, and for the second half of an async one."""
    plain = op.opcode.removesuffix("-start")
    if plain == "send" and op.attribute("is_host_transfer") == "true":
        # Between slices of TPUs, data moves through the hosts.
        transfer = op.frontend(f"{MEGASCALE}_transfer_type")
        if not transfer:
            return "unknown" if MEGASCALE in op.attribute("frontend_attributes") else None
        kind = transfer.lower().replace("_", "-")
        return kind if kind in KINDS else "unknown"
    if plain in KINDS or plain in RARE_KINDS:
        return plain
    if op.opcode.endswith(("-done", "-update")) or op.target in (_CHAIN_START, _CHAIN_DONE):
        return None
    return "unknown" if _NAMED_LIKE_ONE.search(op.target or op.opcode) else None


# TPUs spread an async collective over a chain of fusions, so that each can overlap with it. Every
# fusion has a copy of the op, with the same `chain_id`; only the first one feeds this custom call.
_CHAIN_START, _CHAIN_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


def _chains_started(computation: Computation) -> set[str]:
    """The ids of the chains whose first piece a computation has."""
    first = [
        computation.ops.get(name)
        for op in computation.ops.values()
        if op.target == _CHAIN_START
        for name in op.operands
    ]
    return {chain for op in first if op is not None and (chain := op.frontend("chain_id"))}


def _is_async(context: Context, op: Op) -> bool:
    if op.frontend("chain_id") or op.opcode == "send":
        return True
    start = op.opcode.endswith("-start")
    in_async = context.op is not None and context.op.opcode == "async-start"
    return (start or in_async) and '"is_sync":true' not in op.attribute("backend_config")


def _is_scatter(computation: str) -> bool:
    """Whether a computation is a reduce-scatter as TPUs fuse it: an all-reduce and a slice."""
    return computation.startswith("all-reduce-scatter")


def _type(operand: Value | None) -> Buffer:
    types = [] if operand is None else operand.op.types[operand.element or 0 :]
    return types[0] if types else Buffer("unknown", None, 0)


def bytes_on_the_wire(kind: str, size: int | None, devices: int | None) -> int | None:
    """What each of some devices in a ring sends of a payload."""
    if size is None or devices is None or kind == "unknown":
        return None
    if kind in ("all-gather", "reduce-scatter", "all-to-all"):
        return size * (devices - 1) // devices
    if kind == "all-reduce":
        return 2 * size * (devices - 1) // devices
    return size if devices > 1 else 0

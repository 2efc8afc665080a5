"""Lists the collectives of a compiled program, and asserts budgets on them.

A jaxpr or a lowered program is not enough: XLA's partitioner adds most collectives, and each
backend then combines, fuses, widens and splits them in its own way.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from treeshard._core.mesh import MeshLike
from treeshard._core.text import columns, human_bytes
from treeshard.communication._arguments import paths_by_number
from treeshard.communication._dataflow import (
    Context,
    Dataflow,
    Origins,
    Value,
    executions,
    keeps,
    operands,
)
from treeshard.communication._device_groups import UNKNOWN, Groups, groups_of, groups_of_pairs
from treeshard.communication._hlo import Buffer, Computation, Op
from treeshard.communication._program import (
    MEGASCALE,
    CompiledProgram,
    ReadProgram,
    read_program,
)
from treeshard.errors import CommunicationError

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
RARE_KINDS = ("collective-broadcast", "ragged-all-to-all", "send")
_NAMED_LIKE_ONE = re.compile(
    r"all.?gather|all.?reduce|reduce.?scatter|all.?to.?all|collective|psum|nccl", re.I
)

Budget = int | tuple[int | None, int | None] | None


@dataclass(frozen=True)
class Collective:
    """One buffer that a program communicates between devices.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"`, `"all-reduce"`, `"all-to-all"`,
            `"collective-permute"`; rarely `"collective-broadcast"`, `"ragged-all-to-all"`,
            `"send"`, or `"unknown"` for an op whose name looks like a collective's.
        dtype: The dtype that is communicated. A backend may have widened it.
        bytes: The payload of one execution, measured on the full-size side: an all-gather's
            output, a reduce-scatter's input, and one device's buffer for other kinds.
        wire_bytes: The bytes that a device sends in one execution, if the devices form a ring. The
            number doubles if a backend turns an all-gather into an all-reduce of shards in arrays
            of zeros.
        axes: The mesh axes that its device groups span; `None` if they span only a part of an
            axis, or the mesh is unknown.
        count: The number of executions, including trips of loops; `None` if it depends on data.
        path: The argument whose data it communicates, such as `state/layers/0/w`; `None` for
            computed values, such as activations and gradients.
        op_name: JAX's name of the operation. If the partitioner inserted the operation without a
            name, the name of the first operation that uses its result.
        source: The line of user code that this operation comes from, as `file:line`.
        is_async: Whether it can overlap with other work (`-start` and `-done`).
        rank: The number of dims of the buffer; 0 for a scalar such as a loss.
        completes: If it only shifts the rows of a padded result into place, the kind of the
            collective that it completes; otherwise `None`.
        is_widened: Whether the step or the backend has cast the data to a wider dtype before.
        is_inserted: Whether XLA marks it as inserted by its partitioner. Only newer versions do.
        within: If groups span only a part of the axes, as with `axis_index_groups`, the mesh axes
            along which the devices of a group differ; otherwise `None`.
        part: The number of devices of a group, and their distance along the axes of `within`;
            `None` if the distances differ, or if groups span full axes.

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
    within: tuple[str, ...] | None = None
    part: tuple[int, int] | None = None

    @property
    def total_bytes(self) -> int | None:
        """The payload of all executions together."""
        return _product(self.bytes, self.count)


def collectives(program: CompiledProgram, mesh: MeshLike | None = None) -> list[Collective]:
    """Lists what a program communicates, with the tree paths of the arrays.

    An op on several buffers gives one entry per buffer. An all-to-all gives one entry, because its
    buffers are the parts of one array. Attributes that the program does not show are `None`.

    Args:
        program: A `jax.stages.Compiled`, also as `Step.compile` or `eqx.filter_jit` wraps it, or
            its text (HLO). A `jax.stages.Lowered` raises an error, because the partitioner adds
            most collectives when it compiles.
        mesh: The mesh that the program runs on, to name its axes: a mesh, or text such as
            `"data=2,fsdp=4"`. By default it is read from the program's shardings; the text of
            HLO alone does not name axes.

    Returns:
        A `Collective` per buffer, in program order. A function that the program calls from several
        places has a `Collective` per place.

    Raises:
        FormatError: If the text is not HLO, is truncated, or contains a collective that cannot be
            parsed.
        MeshError: If the program is partitioned over another number of devices than `mesh` has.
        TypeError: If `program` is something else, such as a function that was not compiled.

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
    """Checks how often a program runs each kind of collective, and how many bytes it communicates.

    An op that looks like a collective but cannot be read fails the check, whatever the budgets are.
    Rare kinds, such as `"send"`, count only for `max_bytes`.

    Args:
        program: As in `collectives`.
        mesh: As in `collectives`.
        all_gather: The exact number of executions, per buffer and including trips of loops; or
            `(count, bytes)`, where `bytes` is the maximum for all executions together. `None`, also
            instead of either number, disables the check.
        reduce_scatter: As `all_gather`.
        all_reduce: As `all_gather`.
        all_to_all: As `all_gather`.
        collective_permute: As `all_gather`.
        max_bytes: The maximum for all kinds together, in bytes of payload.

    Raises:
        CommunicationError: If a budget is exceeded, or a number in it is unknown. It is also an
            `AssertionError`. The message lists all collectives as a table.
        FormatError, MeshError, TypeError: As `collectives`.

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
        facts += _over(kind, [x for x in moved if x.kind == kind], budget)
    facts += _over("all collectives", moved, (None, max_bytes))
    unknown = list(dict.fromkeys(x.op_name or "" for x in moved if x.kind == "unknown"))
    if unknown:
        names = ", ".join(unknown[:5])
        facts.append(f"these ops look like collectives, but cannot be read: {names}.")
    if facts:
        raise CommunicationError("\n".join([*facts, _table(moved)]))


def _over(what: str, moved: Sequence[Collective], budget: Budget) -> Iterator[str]:
    """How some collectives exceed a budget."""
    count, most = budget if isinstance(budget, tuple) else (budget, None)
    runs, size = total(x.count for x in moved), total_bytes(moved)
    if count not in (None, runs):
        yield f"{what}: {count_text(runs)} executions, expected {count:,}."
    if most is not None and (size is None or size > most):
        yield f"{what}: {count_text(size)} bytes, at most {most:,} allowed."


# A buffer of at most this many bytes counts as a scalar.
TINY = 4


def _is_tiny(buffer: Buffer) -> bool:
    """Whether a buffer is as small as a scalar. A loss over part of a batch may be `float32[1]`."""
    return buffer.bytes is not None and buffer.bytes <= TINY


def is_scalar(collective: Collective) -> bool:
    """Whether it reduces a scalar, such as a loss. Plans have no scalars."""
    return collective.kind == "all-reduce" and collective.rank == 0 and collective.bytes is not None


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; `None` if a number is unknown."""
    known = list(numbers)
    # One unknown number makes the sum unknown: sums are never guessed.
    return None if None in known else sum(number or 0 for number in known)


def total_bytes(collectives: Iterable[Collective]) -> int | None:
    """The payload of all executions together; `None` if one payload is unknown."""
    return total(x.total_bytes for x in collectives)


def _product(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second


def bytes_text(size: int | None, unknown: str = "an unknown number of bytes") -> str:
    return unknown if size is None else human_bytes(size)


def axes_text(axes: tuple[str, ...] | None) -> str:
    return "unknown" if axes is None else ", ".join(axes) or "none"


def count_text(number: int | None, unknown: str = "an unknown number of") -> str:
    return unknown if number is None else f"{number:,}"


def _table(moved: Sequence[Collective]) -> str:
    """Collectives as an aligned table; equal ones share a line."""
    if not moved:
        return "nothing"
    lines = [("kind", "axes", "count", "bytes each", "total", "array", "moves", "source")]
    rows = Counter(
        (x.kind, x.axes, x.bytes, x.count, x.dtype, x.path or x.op_name, x.source) for x in moved
    )
    for (kind, axes, size, count, dtype, moves, source), times in rows.items():
        runs = _product(times, count)
        counted = count_text(runs, "unknown")
        each = bytes_text(size, "unknown")
        together = bytes_text(_product(size, runs), "unknown")
        row = (kind, axes_text(axes), counted, each, together, dtype, moves or "", source or "")
        lines.append(row)
    return columns(lines, right=4)


# ------------------------------------------------------------------ several steps


def join_steps(moved: Sequence[Collective], sizes: Mapping[str, int]) -> list[Collective]:
    """Joins the steps of each collective that runs along its axes in several steps.

    A scatter of N bytes over 256 devices may run first over groups of 16 devices at distance 16,
    and then, with N / 16 bytes, over groups of 16 neighbours. A gather runs in the opposite order.
    The step between the most distant devices has all N bytes, and represents the collective, if
    the other steps together communicate exactly the rest.
    """
    left: dict[int, Collective] = dict(enumerate(moved))
    for kinds in _IN_STEPS:
        steps: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, each in left.items():
            if each.kind in kinds and each.within and each.part:
                steps[each.within].append(number)
        for within, numbers in steps.items():
            size = math.prod(sizes[axis] for axis in within)
            if _form_one_collective([left[i] for i in numbers], size):
                of_axes = {i: left.pop(i) for i in numbers}
                left |= _join(of_axes, within, size)
    return [left[i] for i in sorted(left)]


# To scatter small arrays, TPUs all-reduce the part that a device keeps, in each step or in the
# steps after the first.
_REDUCTIONS = ("reduce-scatter", "all-reduce")
_IN_STEPS = (("all-gather",), *((kind,) for kind in _REDUCTIONS), _REDUCTIONS)


def _join(
    steps: Mapping[int, Collective], within: tuple[str, ...], size: int
) -> dict[int, Collective]:
    """The steps between the most distant devices, with the wire bytes of all steps."""
    first: dict[int, Collective] = {}
    payload = sent = 0
    for number, step in steps.items():
        devices, stride = step.part or (0, 0)
        sent += bytes_on_the_wire(step.kind, step.total_bytes, devices) or 0
        if devices * stride == size:
            first[number] = step
            payload += step.total_bytes or 0
    for number, step in first.items():
        wire = (step.bytes or 0) * sent // payload
        first[number] = replace(step, axes=within, wire_bytes=wire, within=None, part=None)
    return first


def _form_one_collective(steps: Sequence[Collective], size: int) -> bool:
    """Whether each step communicates what the step before it leaves, down to neighbours."""
    payloads: Counter[tuple[int, int]] = Counter()
    for each in steps:
        if each.part is None or each.total_bytes is None:
            return False
        payloads[each.part] += each.total_bytes
    left = None
    for devices, stride in sorted(payloads, key=lambda part: -part[1]):
        if devices * stride != size or left not in (None, payloads[devices, stride]):
            return False
        left = payloads[devices, stride] // devices
        size = stride
    return size == 1


# ------------------------------------------------------------------ reading


_Payloads = list[tuple[Buffer, list[Value]]]  # the buffers of an op, and what each reads
_UNREAD = Buffer("unknown", None, 0)


class CollectiveReader:
    """Finds the collectives of a program, in execution order."""

    def __init__(self, read: ReadProgram) -> None:
        self.program, self.axes, self.between = read.graph, read.within, read.between
        self.flow = Dataflow(self.program)
        self._devices = self.program.devices
        if self._devices is None and self.axes:
            self._devices = math.prod(self.axes.values())
        # Groups are cached: a program has few distinct ones, and each has all of its devices.
        self._groups_of = cache(partial(groups_of, devices=self._devices, axes=self.axes))
        self._arguments = {parameter.op_name for parameter in self.program.parameters}
        self._paths = paths_by_number(read.arguments)
        computations = self.program.computations.values()
        self._started = set[str]().union(*map(_find_chain_starts, computations))

    def all(self) -> Iterator[Collective]:
        """The collectives that the entry reaches, then the collectives of uncalled computations."""
        for context, op, count in executions(self.flow, lambda op: _kind(op) != ""):
            kind = self._kind_in(context, op)
            if kind:
                yield from self._read_op(context, op, kind, count)

    # ---------------------------------------------------------------- one op

    def _read_op(
        self, context: Context, op: Op, kind: str, count: int | None
    ) -> Iterator[Collective]:
        groups = self._groups(kind, op)
        is_inserted = "is_spmd_generated" in op.attribute("frontend_attributes")
        op_name, source = self._find_name(context.computation, op, is_inserted)
        if kind == "unknown" and op_name is None:
            op_name = op.target or op.opcode
        buffers = self._buffers(context, kind, op, groups)
        for buffer, read in buffers:
            # An all-reduce of shards in arrays of zeros is an all-gather of the shards.
            shard = self._shard_in_zeros(kind, read)
            origins = self.flow.origins(*(shard or read))
            if len(buffers) > 1:
                op_name, source = self._find_part_name(read) or (op_name, source)
            yield Collective(
                kind="all-gather" if shard else kind,
                dtype=buffer.dtype,
                bytes=buffer.bytes,
                wire_bytes=bytes_on_the_wire(kind, buffer.bytes, groups.size),
                axes=groups.axes,
                count=count,
                path=path_of(origins, self._paths),
                op_name=op_name,
                source=source,
                is_async=_is_async(context, op),
                rank=0 if _is_tiny(buffer) else buffer.rank,
                completes=self._completes(kind, read),
                is_widened=_is_widened(op, buffer.dtype, origins),
                is_inserted=is_inserted,
                within=groups.within,
                part=None if groups.stride is None else (groups.size or 0, groups.stride),
            )

    def _kind_in(self, context: Context, op: Op) -> str:
        """The kind of a collective; empty for a further piece of a counted collective."""
        chain = op.frontend("chain_id")
        if chain and chain not in _find_chain_starts(context.computation):
            return "" if chain in self._started else "unknown"
        kind = _kind(op)
        if kind == "all-reduce" and _is_scatter(context.computation.name):
            return "reduce-scatter"
        return kind

    def _find_name(
        self, computation: Computation, op: Op, is_inserted: bool
    ) -> tuple[str | None, str | None]:
        """JAX's name of an op, and its line.

        In JAX 0.11 and newer, the gather of a weight has no line, and at most the name of the
        argument that it gathers. Its first user has a name and a line.
        """
        op_name, source = op.op_name, self.program.source(op)
        is_unnamed = op_name in self._arguments or (is_inserted and op_name is None)
        if source is None and is_unnamed:
            op = self.flow.first_user(computation, op) or op
        return op.op_name, self.program.source(op)

    def _find_part_name(self, read: Sequence[Value]) -> tuple[str, str | None] | None:
        """The name and the line of one array that a combined op communicates. The op itself has the
        names of all: `op_name="jit(f)/(reduce_sum:transpose(jvp())/dot_general)"`."""
        for op in (self._unwrap(each).op for each in read):
            if op.op_name and op.op_name not in self._arguments:
                return op.op_name, self.program.source(op)
        return None

    # ---------------------------------------------------------------- buffers

    def _buffers(self, context: Context, kind: str, op: Op, groups: Groups) -> _Payloads:
        """Each buffer that an op communicates, with its payload as `bytes`, and what it reads."""
        read = operands(Value(context, op))
        if kind in ("unknown", "ragged-all-to-all"):
            return [(next(iter(op.types), _UNREAD)._replace(bytes=None, rank=0), read)]
        if op.opcode == "send" and read:
            # `(f32[512,8,128], u32[], token[]) send(%bitcast, %after-all), channel_id=2`
            part = _type(read[0])
            # An all-gather sends the part of one slice.
            parts = groups.size if kind == "all-gather" else 1
            payload = part._replace(bytes=_product(part.bytes, parts))
            return self._split_joined(kind, read[0], payload)
        results = _results(op)
        if not read or len(results) != len(read):
            return [(_UNREAD, read)]
        if kind == "all-to-all" and not op.attribute("dimensions"):
            # `(f32[8], f32[8]) all-to-all(%part.0, %part.1)`: the parts of one array
            return [(results[0]._replace(bytes=total(part.bytes for part in results)), read)]
        buffers: _Payloads = []
        for operand, result in zip(read, results, strict=True):
            buffers += self._split_operand(kind, op, operand, result, groups)
        return buffers

    def _split_operand(
        self, kind: str, op: Op, operand: Value, result: Buffer, groups: Groups
    ) -> _Payloads:
        if op.opcode.startswith("reduce-scatter"):
            # `f32[512,1024] reduce-scatter(%fusion.12)`, of f32[4096,1024]
            full = _type(operand)
            if full.bytes is None:
                full = result._replace(bytes=_product(result.bytes, groups.size))
            return [(full, [operand])]
        if kind == "reduce-scatter" and operand.op.opcode == "pad":
            # `%pad = f32[4128,1024] pad(%input, %constant.63), padding=0_32x0_0`, on TPUs
            unpadded = operands(operand)[0]
            return [(_type(unpadded), [unpadded])]
        return self._split_joined(kind, operand, result)

    def _split_joined(self, kind: str, operand: Value, buffer: Buffer) -> _Payloads:
        """The arrays that a backend joined into one flat buffer, or that buffer alone."""
        if kind != "all-reduce":
            return [(buffer, [operand])]
        joined = self._unwrap(operand)
        if joined.op.opcode == "concatenate":
            # `f32[4194305]{0} concatenate(%param_0.84, %param_1.132)`: GPUs, a gradient and a loss
            return [(_type(self._unwrap(part)), [part]) for part in operands(joined)]
        scalar = _type(joined)
        if joined.op.types and (scalar.rank == 0 or _is_tiny(scalar)):
            # `%all-reduce.17 = f32[1,1,128] all-reduce(%bitcast.16)`, of f32[]: padded to a tile
            return [(scalar, [operand])]
        return [(buffer, [operand])]

    def _unwrap(self, at: Value, through: str = "") -> Value:
        """The value before reshapes, all-reduces and ops named `through`, outside of calls."""
        at = self.flow.trace(at, lambda each: not keeps(each.op) and each.op.opcode != through)
        if at.op.opcode != "all-reduce" or len(at.op.operands) != 1:
            return at
        return self._unwrap(operands(at)[0], through)

    def _shard_in_zeros(self, kind: str, read: Sequence[Value]) -> list[Value]:
        """The shard that each device writes into an array of zeros, if the sum over devices only
        joins these shards.

        XLA's pass all-gather-decomposer, and TPUs for small shards, gather this way:

            %filled = f32[16]{0} broadcast(%zero), dimensions={}
            %placed = f32[16]{0} dynamic-update-slice(%filled, %w, %at)
            %sum = f32[16]{0} all-reduce(%placed), to_apply=%add
        """
        if kind != "all-reduce" or len(read) != 1:
            return []
        placed = self._unwrap(read[0], "convert")
        if placed.op.opcode != "dynamic-update-slice":
            return []
        filled, shard = (self._unwrap(each, "convert") for each in operands(placed)[:2])
        if filled.op.opcode == "broadcast":
            filled = self._unwrap(operands(filled)[0], "convert")
        return [shard] if filled.op.is_zero else []

    def _completes(self, kind: str, read: Sequence[Value]) -> str | None:
        """The kind of the collective whose padded result this op shifts into place, if any.

        TPUs pad arrays that do not divide into tiles, and then send misplaced rows to their device:

            %fusion.1 = f32[1032,1024] fusion(%fusion.13), kind=kCustom, calls=%all-reduce-scatter.1
            %slice.1 = f32[24,1024] slice(%fusion.1), slice={[1008:1032], [0:1024]}
            %collective-permute-start.1 = (...) collective-permute-start(%slice.1), channel_id=1
        """
        if kind != "collective-permute" or not read:
            return None
        at = self.flow.trace(read[0], lambda each: each.op.opcode == "fusion")
        computations = self.program.computations
        fused = [computations.get(name) for name in at.op.called.get("calls", ())]
        return "reduce-scatter" if any(map(_is_padded_scatter, filter(None, fused))) else None

    # ---------------------------------------------------------------- device groups

    def _groups(self, kind: str, op: Op) -> Groups:
        if kind in ("unknown", "send"):
            return UNKNOWN
        if op.opcode == "send":
            size = math.prod(self.between.values())
            return Groups(size, tuple(self.between)) if self.between else UNKNOWN
        if kind == "collective-permute":
            return groups_of_pairs(op.attribute("source_target_pairs"), self.axes)
        groups = op.attribute("replica_groups")
        if op.attribute("use_global_device_ids") or self.program.partitions == 1:
            return self._groups_of(groups)
        # Groups contain the numbers of replicas, and for these kinds the numbers of partitions.
        if self.program.replicas > 1:
            return UNKNOWN
        if not op.attribute("channel_id"):
            return Groups(1, ())  # among replicas, and the program has one replica
        of_partitions = kind in ("all-to-all", "ragged-all-to-all", "collective-broadcast")
        return self._groups_of(groups if of_partitions else "{}")


def _results(op: Op) -> Sequence[Buffer]:
    """The arrays that an op communicates, one for each operand, as they are afterwards.

    A `-start` may return its operands before its results, and context values after them:
    `(f32[24,1024], f32[24,1024], u32[], u32[]) collective-permute-start(%slice.1)`.
    """
    types, number = op.types, len(op.operands)
    return types if len(types) == number else types[number : 2 * number]


def _type(of: Value) -> Buffer:
    """The array of a value; for a tuple, the first array."""
    number = of.path[-1] if of.path else 0
    return next(iter(of.op.types[number:]), _UNREAD)


def path_of(origins: Origins, paths: Mapping[int, str]) -> str | None:
    """The path of the one argument whose data the values are; `None` if they have other data."""
    if len(origins.arguments) != 1 or origins.computed:
        return None
    [number] = origins.arguments
    return paths.get(number) or None


_NARROWER = {"float32": {"bfloat16", "float16"}, "float64": {"bfloat16", "float16", "float32"}}


def _is_widened(op: Op, dtype: str, origins: Origins) -> bool:
    """Whether a communicated float had a narrower dtype before, or its reduction was promoted to a
    wider dtype by the compiler."""
    # `all-reduce(%convert.3), to_apply=%add.clone_promoted`: XLA's pass all-reduce-promotion, for
    # CPUs, which have no collectives of 16-bit floats
    if op.attribute("to_apply").endswith("_promoted"):
        return True
    return not origins.dtypes.isdisjoint(_NARROWER.get(dtype, ()))


def _kind(op: Op) -> str:
    """The kind of a collective; empty for other ops, and for the second half of an async one."""
    if op.opcode == "send" and op.attribute("is_host_transfer") == "true":
        return _kind_of_host_transfer(op)
    plain = op.opcode.removesuffix("-start")
    if plain in KINDS or plain in RARE_KINDS:
        return plain
    if op.opcode.endswith(("-done", "-update")) or op.target in (_CHAIN_START, _CHAIN_DONE):
        return ""
    return "unknown" if _NAMED_LIKE_ONE.search(op.target or op.opcode) else ""


def _kind_of_host_transfer(op: Op) -> str:
    """The kind of a `send`. Between slices, TPUs send data through the hosts, with attributes:

    `_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"`. Other sends to
    the host are callbacks.
    """
    transfer = op.frontend(f"{MEGASCALE}_transfer_type")
    if transfer:
        kind = transfer.lower().replace("_", "-")
        return kind if kind in KINDS else "unknown"
    return "unknown" if MEGASCALE in op.attribute("frontend_attributes") else ""


# TPUs spread an async collective over a chain of fusions, which overlap with it. Every fusion has a
# copy of the op, with the same `chain_id`. Only the first copy is an operand of this custom call:
# `%all-gather.49 = bf16[4096,1024] all-gather(%param_0.130), frontend_attributes={chain_id="1"}`
# `ROOT %custom-call.5 = (...) custom-call(%all-gather.49), custom_call_target=...`
# The channel_id does not help: collectives by hand all have channel 1.
_CHAIN_START, _CHAIN_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


def _find_chain_starts(computation: Computation) -> set[str]:
    """The ids of the chains whose first piece a computation has."""
    starts = [op for op in computation.ops.values() if op.target == _CHAIN_START]
    first = [computation.ops.get(name) for start in starts for name in start.operands]
    return {op.frontend("chain_id") for op in first if op is not None} - {""}


def _is_async(context: Context, op: Op) -> bool:
    if op.frontend("chain_id") or op.opcode == "send":
        return True
    # `backend_config={"is_sync":true}`: GPUs write `-start` for collectives without overlap too
    if '"is_sync":true' in op.attribute("backend_config"):
        return False
    in_async = context.op is not None and context.op.opcode == "async-start"
    return op.opcode.endswith("-start") or in_async


def _is_scatter(computation: str) -> bool:
    """Whether a computation is a reduce-scatter as TPUs fuse it: an all-reduce and a slice.

    `%all-reduce-scatter (input: f32[4096,1024]) -> f32[512,1024] {`
    """
    return computation.startswith("all-reduce-scatter")


def _is_padded_scatter(computation: Computation) -> bool:
    opcodes = {op.opcode for op in computation.ops.values()}
    return _is_scatter(computation.name) and "pad" in opcodes


# How often a ring sends each part of a payload to a neighbour.
_ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}


def bytes_on_the_wire(kind: str, size: int | None, devices: int | None) -> int | None:
    """The bytes of a payload that each device in a ring sends."""
    if size is None or devices is None or kind == "unknown":
        return None
    if kind in _ROUNDS:
        return _ROUNDS[kind] * size * (devices - 1) // devices
    return size if devices > 1 else 0

"""Compares the communication of a compiled step with what its plan predicts.

Leaf by leaf, and not by totals: the totals of a step that gathers one weight twice and another not
at all are right. So arguments of the program are matched to leaves of the plan first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from treeshard._core.mesh import MeshLike, axis_sizes, check_axes
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec
from treeshard._core.text import columns, human_bytes
from treeshard._planning.matching import PlannedLeaf, parameters
from treeshard._planning.plan import Plan
from treeshard._trace.roles import Roles
from treeshard.communication._arguments import Argument, leaves_of_arguments
from treeshard.communication._collectives import (
    Collective,
    CollectiveReader,
    axes_text,
    bytes_text,
    count_text,
    is_scalar,
    total,
    total_bytes,
    with_steps_joined,
)
from treeshard.communication._device_groups import axes_of_sharding
from treeshard.communication._differences import Unplanned, by_compiler_lines, explain
from treeshard.communication._forecast import (
    Leaves,
    PlannedTransfer,
    predict_by_role,
    roles_by_name,
)
from treeshard.communication._hlo import HloProgram, Op
from treeshard.communication._matching import Matcher
from treeshard.communication._program import (
    MEGASCALE,
    CompiledProgram,
    ReadProgram,
    platform_of,
    read_program,
)
from treeshard.errors import SpecError, counted


@dataclass(frozen=True)
class Row:
    """The planned and the compiled collectives of one kind along the same axes."""

    kind: str
    axes: tuple[str, ...] | None
    planned_count: int
    planned_bytes: int
    count: int | None
    bytes: int | None


def _cells(row: Row) -> tuple[str, ...]:
    planned = f"{row.planned_count:,} x, {human_bytes(row.planned_bytes)}"
    compiled = f"{count_text(row.count, '?')} x, {bytes_text(row.bytes, '? bytes')}"
    return row.kind, axes_text(row.axes), planned, compiled


@dataclass(frozen=True)
class Comparison:
    """The communication of a plan beside that of a program; `str()` of it is a table.

    Attributes:
        planned: What the plan predicts, leaf by leaf.
        compiled: What the program moves, op by op; the steps of a scatter or a gather that runs
            over one dim of a torus after the other are one.
        unplanned: How they differ, and why. Empty if the program moves what was planned.
        activations: Computed values that are moved along axes that split weights where they are
            used, as in tensor parallelism and between experts. A plan says nothing of them.
        batch_sums: Sums over all rows of the batch, such as those of batch norm. Likewise.
        matrices: What `training.by_matrix` moves: gradients of matrices to the devices that update
            them, and the updates back. Likewise.
        by_compiler: What differs only because of the platform's compiler, in every program, as
            opposed to `unplanned`: on CPUs, full gradients that are all-reduced, and 16-bit
            floats that are widened; elsewhere, what is moved in a narrower dtype than planned, and
            all-gathers that became all-reduces. The text has a line for it.
        platform: The platform of the program, such as `"cpu"`; `None` for a text.
        leaves: For each of `compiled`, the leaf that it moves or whose gradient it reduces, by its
            path in the plan; `None` for other values. Gradients of one size have one of the leaves
            of that size.

    Examples:
        >>> planned = PlannedTransfer("all-gather", ("fsdp",), 4096, 2, "float32", "w", "weight")
        >>> print(Comparison((planned,), (), ()))
        kind        axes       planned  compiled
        all-gather  fsdp  2 x, 8.0 KiB  0 x, 0 B
    """

    planned: tuple[PlannedTransfer, ...]
    compiled: tuple[Collective, ...]
    unplanned: tuple[Unplanned, ...]
    activations: tuple[Collective, ...] = ()
    batch_sums: tuple[Collective, ...] = ()
    matrices: tuple[Collective, ...] = ()
    by_compiler: tuple[Unplanned, ...] = ()
    platform: str | None = None
    leaves: tuple[str | None, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """Counts and bytes per kind and axes, without scalars such as the loss."""
        planned = [x for x in self.planned if x.path is not None]
        compiled = [x for x in self.compiled if not is_scalar(x)]
        rows: list[Row] = []
        for key in dict.fromkeys((x.kind, x.axes) for x in [*planned, *compiled]):
            of_plan = [x for x in planned if (x.kind, x.axes) == key]
            of_program = [x for x in compiled if (x.kind, x.axes) == key]
            rows.append(
                Row(
                    *key,
                    sum(x.count for x in of_plan),
                    sum(x.total_bytes for x in of_plan),
                    total(x.count for x in of_program),
                    total_bytes(of_program),
                )
            )
        return rows

    def __str__(self) -> str:
        lines = [("kind", "axes", "planned", "compiled"), *map(_cells, self.rows)]
        text = columns(lines, right=2)
        scalars = sum(map(is_scalar, self.compiled))
        if scalars:
            text += f"\nplus {counted(scalars, 'scalar')}, such as the loss"
        return "\n".join([text, *self._notes(), *map(str, self.unplanned)])

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the program does not move the bytes that are planned, a line for each reason."""
        return (*self._notes(), *(str(difference).splitlines()[0] for difference in self.unplanned))

    def _notes(self) -> list[str]:
        """What differs without being a fault."""
        axes = dict.fromkeys(axis for x in self.activations for axis in x.axes or ())
        groups = (
            (self.activations, "activation", f" along {', '.join(axes)}"),
            (self.batch_sums, "sum", " over all rows, such as batch norm's"),
            (self.matrices, "exchange", " of matrices for their update"),
        )
        return [
            *(
                f"including {counted(len(moved), what)}{of_what}, {bytes_text(total_bytes(moved))},"
                " of which a plan says nothing"
                for moved, what, of_what in groups
                if moved
            ),
            *by_compiler_lines(self.by_compiler, self.platform),
        ]


def compare_communication(
    plan: Plan,
    program: CompiledProgram,
    *,
    batch: SpecTree = None,
    mesh: MeshLike | None = None,
    remat: Leaves = False,
    scan: Leaves = False,
    params: str | None = None,
    dtype: DTypeLike | None = None,
) -> Comparison:
    """Compares what a step's program moves with what its plan predicts, and explains differences.

    Args:
        plan: The plan of the step's state, or of its parameters: of the part of the program's
            arguments that has its paths, with arrays of their shapes and dtypes. If several have
            them, such as weights and their moments, it is of one that is sharded as planned, and
            of the outermost.
        program: The compiled step, as in `collectives`.
        batch: The specs of the batch. By default they are read from the program's arguments that
            are not in the plan.
        mesh: As in `collectives`; by default the plan's.
        remat: As in `predict_communication`.
        scan: As in `predict_communication`.
        params: As in `predict_communication`.
        dtype: As in `predict_communication`.

    Returns:
        A `Comparison`. Its `unplanned` has an entry for each way in which the program differs.

    Raises:
        SpecError: If no argument of the program is a parameter of the plan, or several parts of
            the arguments may be what it plans; if an argument differs from its leaf in the plan;
            if `batch` is needed and cannot be read.
        FormatError, MeshError, TypeError: As `collectives`.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> decided = plan({"w": jnp.ones((8, 8))}, [("w", P("fsdp"))], mesh, min_size=0)
        >>> @jit_step(plan=decided, batch=P("fsdp"))
        ... def step(state, batch):
        ...     grad = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        ...     return {"w": state["w"] - grad}, 0
        >>> program = step.lower(decided.structs, np.ones((16, 8), "float32")).compile()
        >>> compared = compare_communication(decided, program)
        >>> compared.unplanned, [one.code for one in compared.by_compiler]
        ((), ['all-reduce'])
    """
    read = read_program(program, plan.mesh if mesh is None else mesh)
    weights = parameters(plan.leaves, params)
    names = leaves_of_arguments(plan, read.arguments)
    _check_has_any(names, weights, read.arguments)
    if batch is None:
        batch = _batch_of(names, read.arguments, read.axes)
    check_axes(
        get_names_from_partition_spec(batch), axis_sizes(plan.mesh), "compare_communication: batch"
    )
    roles = roles_by_name(plan, batch, remat=remat, scan=scan, params=params, dtype=dtype)
    return _compared(plan, program, read, names, batch, roles)


def compare_step(
    plan: Plan,
    program: jax.stages.Compiled,
    batch: SpecTree,
    roles: Roles,
    read: ReadProgram | None = None,
) -> Comparison:
    """Compares what a step's program moves with what its plan predicts for these roles.

    The program is one of `training.Step`, whose first arguments are the arrays of the state.
    """
    read = read or read_program(program, plan.mesh)
    state = zip(read.arguments, plan.leaves, strict=False)
    names = {argument.path: leaf.path for argument, leaf in state}
    return _compared(plan, program, read, names, batch, roles)


def _compared(
    plan: Plan,
    program: CompiledProgram,
    read: ReadProgram,
    names: Mapping[str, str | None],
    batch: SpecTree,
    roles: Roles,
) -> Comparison:
    planned = predict_by_role(plan, batch, roles)
    compiled = with_steps_joined(list(CollectiveReader(read).all()), read.within)
    batch_axes, platform = get_names_from_partition_spec(batch), platform_of(program)
    matcher = Matcher(plan, planned, names, roles, batch_axes, platform)
    matcher.match(compiled)
    return Comparison(
        tuple(planned),
        tuple(compiled),
        (*matcher.unplanned(), *_idle_axes(plan, batch_axes, compiled), *_to_host(read.graph)),
        tuple(matcher.activations),
        tuple(moved.collective for moved in matcher.sums),
        tuple(matcher.matrices),
        tuple(matcher.by_compiler()),
        platform,
        tuple(matcher.leaves),
    )


def _idle_axes(
    plan: Plan, batch_axes: Sequence[str], compiled: Sequence[Collective]
) -> Iterator[Unplanned]:
    """The axes that shard neither the plan nor the batch, and along which nothing is moved."""
    moved = [x.axes for x in compiled]
    if None in moved:
        return
    used = {*get_names_from_partition_spec(plan), *batch_axes}
    used.update(*filter(None, moved))
    sizes = axis_sizes(plan.mesh)
    idle = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    if not idle:
        return
    used_and_idle = [axis for axis in sizes if axis in (*batch_axes, *idle)]
    yield explain(
        "batch-not-split, idle", detail=", ".join(map(repr, idle)), batch_axes=used_and_idle
    )


def _to_host(graph: HloProgram) -> Iterator[Unplanned]:
    """The arrays that callbacks take to the host. Scalars may go there."""
    for computation in graph.computations.values():
        for op in filter(_is_callback, computation.ops.values()):
            operands = [computation.ops[name] for name in op.operands if name in computation.ops]
            arrays = [x for operand in operands for x in operand.types if x.rank]
            if arrays:
                where = f"{bytes_text(total(x.bytes for x in arrays))} to the host in each step"
                yield explain("other, host", detail=f"{where}, at {graph.source(op)}")


def _is_callback(op: Op) -> bool:
    # `custom-call(%x), custom_call_target="xla_ffi_python_cpu_callback"`
    if "callback" in op.target:
        return True
    # `(f32[8], u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true`, on TPUs,
    # whose data moves so between slices too
    if op.opcode != "send" or op.attribute("is_host_transfer") != "true":
        return False
    return not op.frontend(f"{MEGASCALE}_transfer_type")


# ------------------------------------------------------------------ arguments


def _check_has_any(
    names: Mapping[str, str | None], params: Sequence[PlannedLeaf], arguments: Sequence[Argument]
) -> None:
    if params and not {leaf.path for leaf in params}.intersection(names.values()):
        paths = ", ".join([x.path for x in arguments if x.path][:5]) or "no names"
        raise SpecError(
            "compare_communication: the program has none of the plan's parameters, such as"
            f" {params[0].path!r}. Its arguments: {paths}."
        )


def _batch_of(
    names: Mapping[str, str | None], arguments: Sequence[Argument], axes: Mapping[str, int]
) -> PartitionSpec:
    """The axes that shard the arguments that are not in the plan, as one spec."""
    split: set[str] = set()
    for argument in arguments:
        if argument.path not in names:
            split.update(_split_along(argument, axes))
    in_order = tuple(axis for axis in axes if axis in split)
    return PartitionSpec(in_order) if in_order else PartitionSpec()


def _split_along(argument: Argument, axes: Mapping[str, int]) -> Iterable[str]:
    """The axes that shard an argument, by the text of the program or by JAX."""
    split = axes_of_sharding(argument.annotation, axes)
    if split is not None:
        return split
    sharding = None if argument.struct is None else argument.struct.sharding
    if isinstance(sharding, NamedSharding):  # newer versions of XLA leave it out of the text
        return get_names_from_partition_spec(sharding)
    if argument.local is not None and argument.local.rank:
        raise SpecError(
            "compare_communication: the program does not say how its argument"
            f" {argument.path!r} is sharded. Pass the specs of the batch: `batch=P(...)`."
        )
    return ()

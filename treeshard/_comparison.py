"""Compares the communication of a compiled step with what its plan predicts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from treeshard._collectives import collectives, read_program
from treeshard._communication import (
    Leaves,
    PlannedTransfer,
    parameters,
    predict_communication,
)
from treeshard._describe import columns, human_bytes
from treeshard._errors import SpecError, listed
from treeshard._groups import axes_of_sharding
from treeshard._mesh import AnyMesh
from treeshard._moved import Collective, as_path
from treeshard._plan import Plan
from treeshard._program import Program
from treeshard._settling import Settlement
from treeshard._spec_trees import get_names_from_partition_spec
from treeshard._unplanned import Unplanned, is_scalar, total


@dataclass(frozen=True)
class Row:
    """The planned and the compiled collectives of one kind along the same axes."""

    kind: str
    axes: tuple[str, ...] | None
    planned_count: int
    planned_bytes: int
    count: int | None
    bytes: int | None


@dataclass(frozen=True)
class Comparison:
    """The communication of a plan beside that of a program; `str()` of it is a table.

    Attributes:
        planned: What the plan predicts, leaf by leaf.
        compiled: What the program moves, op by op.
        unplanned: How they differ, and why. Empty if the program moves what was planned.
        tensor_parallel: Activations that are moved along axes that shard parameters but not the
            batch. A plan cannot predict their number.

    Examples:
        >>> planned = PlannedTransfer("all-gather", ("fsdp",), 4096, 2, "float32", "w", "weight")
        >>> print(Comparison((planned,), (), ()))
        kind        axes       planned  compiled
        all-gather  fsdp  2 x, 8.0 KiB  0 x, 0 B
    """

    planned: tuple[PlannedTransfer, ...]
    compiled: tuple[Collective, ...]
    unplanned: tuple[Unplanned, ...]
    tensor_parallel: tuple[Collective, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """Counts and bytes per kind and axes, without scalars such as the loss."""
        planned: dict[Any, list[PlannedTransfer]] = defaultdict(list)
        compiled: dict[Any, list[Collective]] = defaultdict(list)
        for transfer in self.planned:
            if transfer.path is not None:
                planned[transfer.kind, transfer.axes].append(transfer)
        for collective in self.compiled:
            if not is_scalar(collective):
                compiled[collective.kind, collective.axes].append(collective)
        return [
            Row(
                key[0],
                key[1],
                sum(x.count for x in planned[key]),
                sum(x.total_bytes for x in planned[key]),
                total([x.count for x in compiled[key]]),
                total([x.total_bytes for x in compiled[key]]),
            )
            for key in dict.fromkeys([*planned, *compiled])
        ]

    def __str__(self) -> str:
        lines = [("kind", "axes", "planned", "compiled")]
        for row in self.rows:
            axes = "unknown" if row.axes is None else ", ".join(row.axes) or "none"
            planned = f"{row.planned_count:,} x, {human_bytes(row.planned_bytes)}"
            count = "?" if row.count is None else f"{row.count:,}"
            moved = "? bytes" if row.bytes is None else human_bytes(row.bytes)
            lines.append((row.kind, axes, planned, f"{count} x, {moved}"))
        text = columns(lines, right=2)
        scalars = sum(map(is_scalar, self.compiled))
        text += f"\nplus {scalars} scalars, such as the loss" if scalars else ""
        if self.tensor_parallel:
            text += f"\nincluding {len(self.tensor_parallel)} tensor-parallel activations"
        return "\n".join([text, *map(str, self.unplanned)])


def compare_communication(
    plan: Plan,
    program: Any,
    *,
    batch: Any = None,
    mesh: AnyMesh | None = None,
    remat: Leaves = False,
    scan: Leaves = False,
    params: str | None = None,
    dtype: Any = None,
) -> Comparison:
    """Compares what a step's program moves with what its plan predicts, and explains differences.

    Args:
        plan: The plan of the step's state, or of its parameters.
        program: The compiled step, as in `collectives`. A `Lowered` one shows only what was
            written by hand.
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
        SpecError: If no argument of the program is a parameter of the plan; if an argument
            differs in size from its leaf in the plan; if `batch` is needed and cannot be read.
        FormatError, MeshError, TypeError: As `collectives`.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> decided = plan({"w": jnp.ones((8, 8))}, [("w", P("fsdp"))], mesh, min_size=0)
        >>> @jit_step(plan=decided, batch=P("fsdp"))
        ... def step(state, batch):
        ...     grad = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        ...     return {"w": state["w"] - grad}, 0
        >>> program = step.lower(decided.structs, np.ones((16, 8), "float32")).compile()
        >>> [found.code for found in compare_communication(decided, program).unplanned]
        ['all-reduce']
    """
    mesh = plan.mesh if mesh is None else mesh
    read, axes = read_program(program, mesh)
    names = _leaf_names(plan, read, parameters(plan, params))
    batch = _batch_of(read, names, axes or {}) if batch is None else batch
    planned = predict_communication(
        plan, batch=batch, remat=remat, scan=scan, params=params, dtype=dtype
    )
    moved = collectives(program, mesh)
    matcher = Settlement(plan, planned, names, get_names_from_partition_spec(batch))
    for collective in moved:
        matcher.take(collective)
    return Comparison(
        tuple(planned), tuple(moved), tuple(matcher.unplanned()), tuple(matcher.tensor_parallel)
    )


def _leaf_names(plan: Plan, program: Program, params: Sequence[Any]) -> dict[str, str | None]:
    """The program's path of each argument -> the plan's path of that leaf, if it has it.

    The argument's path ends in the leaf's: `state/w` is the leaf `w`.
    """
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    names: dict[str, str | None] = {}
    facts: list[str] = []
    for op in program.computations[program.entry].ops.values():
        if op.opcode != "parameter":
            continue
        path = as_path(program.argument(op)) or ""
        tails = [path.split("/", n)[-1] for n in range(path.count("/") + 1)]
        name = next((tail for tail in tails if tail in leaves), None)
        names[path] = name
        size = sum(x.bytes or 0 for x in op.types)
        if name is not None and jnp.issubdtype(leaves[name].dtype, jnp.number):
            local = leaves[name].bytes_per_device(plan.mesh)
            if size not in (local, leaves[name].bytes):
                facts.append(
                    f"{name}: {size:,} bytes per device in the program, {local:,} in the plan."
                )
    if facts:
        headline = f"{len(facts)} arguments of the program differ from the plan:"
        raise SpecError(listed(headline, facts) + "\nCompile the step for this plan.")
    if params and not {leaf.path for leaf in params}.intersection(map(str, names.values())):
        raise SpecError(
            "compare_communication: the program has none of the plan's parameters, such as"
            f" {params[0].path!r}. Its arguments: {', '.join(list(names)[:5]) or 'no names'}."
        )
    return names


def _batch_of(
    program: Program, names: Mapping[str, str | None], axes: Mapping[str, int]
) -> PartitionSpec:
    """The axes that shard the arguments that are not in the plan, as one spec."""
    batch_axes: set[str] = set()
    for op in program.computations[program.entry].ops.values():
        if op.opcode == "parameter" and names[as_path(program.argument(op)) or ""] is None:
            sharded = axes_of_sharding(program.sharding(op), axes)
            if sharded is None and any(x.rank for x in op.types):
                raise SpecError(
                    "compare_communication: the program does not say how its argument"
                    f" {program.argument(op) or op.name!r} is sharded. Pass the specs of the batch:"
                    " `batch=P(...)`."
                )
            batch_axes.update(sharded or ())
    names_in_order = tuple(axis for axis in axes if axis in batch_axes)
    return PartitionSpec(names_in_order) if names_in_order else PartitionSpec()

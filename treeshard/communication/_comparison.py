"""Compares what a compiled step communicates with what its plan predicts.

The comparison is per leaf: totals would be right for a step that gathers one weight twice and
another weight never. It needs the trace of the step, which shows what the step does with each
leaf: which leaves are trained, how often each is gathered, and in which dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import StaticSplit, array_text, device_dtype, has_shape
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import PyTree, leaf_paths, pair
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec
from treeshard._core.text import columns, human_bytes
from treeshard._planning.axis_names import idle_axes
from treeshard._planning.plan import Plan
from treeshard._trace.roles import Roles, roles_of
from treeshard.communication._collectives import (
    Collective,
    CollectiveReader,
    axes_text,
    bytes_text,
    count_text,
    is_scalar,
    join_steps,
    total,
    total_bytes,
)
from treeshard.communication._differences import Unplanned, explain
from treeshard.communication._forecast import PlannedTransfer, batch_axes, predict_transfers
from treeshard.communication._hlo import HloProgram, Op
from treeshard.communication._matching import Matcher
from treeshard.communication._program import MEGASCALE, ReadProgram, read_program
from treeshard.errors import SpecError, counted, listed

# The path of an argument, and its sharding in the program; `None` if JAX drops it.
_Placed = tuple[str, Any]


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
    """What a plan predicts and what a program communicates; `str()` of it is a table.

    Attributes:
        planned: What the plan predicts, leaf by leaf.
        compiled: What the program communicates, op by op. A scatter or gather that runs over the
            dims of a torus in sequence is one entry.
        unplanned: How the program differs from the plan, and why. Empty if it does not differ.
        activations: Computed values that are communicated along axes that split weights where they
            are used, as in tensor parallelism and between experts. No plan predicts them.
        batch_sums: Sums over all rows of the batch, such as the sums of batch norm. No plan
            predicts them.
        matrices: What `training.by_matrix` communicates: gradients of matrices to the devices that
            update them, and the updates back. No plan predicts them.
        moments: Vectors of optimizer state that the update broadcasts, such as Adafactor's means of
            rows and columns. No plan predicts them.
        by_compiler: Choices of the platform's compiler, a phrase each. On CPUs it all-reduces full
            gradients and widens 16-bit weights. On other platforms, gathers may have a narrower
            dtype, or become all-reduces.
        other_dtypes: The gradients and updates that are communicated in another dtype than planned,
            a phrase for each pair of dtypes. The step or the compiler casts them.
        platform: The platform of the program, such as `"cpu"`.
        leaves: For each entry of `compiled`, the path of the leaf that it gathers or whose gradient
            it reduces; `None` for other values. For a gradient, the leaf is one with the right
            size.

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
    moments: tuple[Collective, ...] = ()
    by_compiler: tuple[str, ...] = ()
    other_dtypes: tuple[str, ...] = ()
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

    def _notes(self) -> list[str]:
        """The differences that are not faults."""
        axes = dict.fromkeys(axis for x in self.activations for axis in x.axes or ())
        groups = (
            (self.activations, "activation", f" along {', '.join(axes)}"),
            (self.batch_sums, "sum", " over all rows, such as batch norm's"),
            (self.matrices, "exchange", " of matrices for their update"),
            (self.moments, "exchange", " of moments of rows or columns, such as Adafactor's"),
        )
        notes = [
            f"including {counted(len(moved), what)}{of_what}, {bytes_text(total_bytes(moved))},"
            " which a plan does not predict"
            for moved, what, of_what in groups
            if moved
        ]
        if self.by_compiler:
            name = f"{self.platform.upper()} compiler" if self.platform else "compiler"
            # Compilers for accelerators may do the same, depending on the mesh and its axis types.
            hint = _COMPILE_FOR_TARGET if self.platform == "cpu" else ""
            notes.append(f"The {name} {' and '.join(self.by_compiler)}.{hint}")
        if self.other_dtypes:
            notes.append(f"Gradients and updates: {' and '.join(self.other_dtypes)}.")
        return notes


_COMPILE_FOR_TARGET = (
    ' For a TPU or GPU, compile the step on its mesh: `make_mesh("fsdp=8", topology="v5e:2x4")`.'
)


def compare_communication(plan: Plan, step: Any, state: PyTree, batch: PyTree) -> Comparison:
    """Compares what a step of your own loop communicates with what its plan predicts.

    The step is traced and compiled for these arguments, and does not run. For a step of `jit_step`
    or `shard_map_step`, call `step.communication(state, batch)`.

    Args:
        plan: The plan of `state`.
        step: The function that you pass to `jax.jit` or `eqx.filter_jit`, or the jitted function.
            It is called as `step(state, batch)`, and returns the new state first: `new_state`, or
            `(new_state, loss)`. For a step of another form, pass a function that calls it:
            `lambda state, batch: train_step(*state, *batch)`.
        state: The state, placed as planned, or `plan.structs`.
        batch: A batch, placed as in your loop, or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        A `Comparison`. Its `unplanned` has an entry for each way in which the program differs.

    Raises:
        SpecError: If the state does not match the plan, or is not sharded as planned; if the step
            does not return a new state first; if the compiled program does not show how the
            batch is sharded.
        MeshError: If the plan was made for an abstract mesh.
        TypeError: If `step` is not a function, such as a compiled program.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> decided = plan({"w": jnp.ones((8, 8))}, [("w", P("fsdp"))], mesh, min_size=0)
        >>> @jax.jit
        ... def step(state, batch):
        ...     grad = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        ...     return {"w": state["w"] - grad}
        >>> batch = jax.device_put(np.ones((16, 8), "float32"), NamedSharding(mesh, P("fsdp")))
        >>> compared = compare_communication(decided, step, decided.structs, batch)
        >>> compared.unplanned, compared.by_compiler
        ((), ('all-reduces full gradients (256 B) where a reduce-scatter was planned',))
    """
    if not callable(step) or isinstance(step, jax.stages.Compiled):
        raise TypeError(
            f"compare_communication: the second argument is a {type(step).__name__}, not a"
            " function. Pass the function that you jit: `compare_communication(plan, step, state,"
            " batch)`."
        )
    _check_state(plan, state)
    with_devices(plan.mesh, "compare_communication", compile_only=True)
    traced = _trace_step(step, state, batch)
    _check_returns_state(plan, traced.jaxpr.out_avals)
    read = read_program(traced.lower().compile(), plan.mesh)
    # Only the compiled program has all shardings: the step may constrain its arguments. A struct of
    # a scalar has no truth value, because JAX gives structs a length.
    shardings = [(x.path, getattr(x.struct, "sharding", None)) for x in read.arguments]
    count = len(plan.leaves)
    _check_placed(plan, shardings[:count])
    along = _batch_spec(plan, shardings[count:])
    roles = roles_of(traced.jaxpr.jaxpr, plan, batch_axes(plan, along))
    return compare_step(plan, along, roles, read)


def compare_step(plan: Plan, batch: SpecTree, roles: Roles, read: ReadProgram) -> Comparison:
    """Compares what a step's program communicates with what its plan predicts for these roles.

    The first arguments of the program are the arrays of the state.
    """
    planned = predict_transfers(plan, batch, roles)
    # On a torus, a scatter over one axis may run dim by dim, as several collectives.
    compiled = join_steps(list(CollectiveReader(read).all()), read.within)
    state = zip(read.arguments, plan.leaves, strict=False)
    names = {argument.path: leaf.path for argument, leaf in state}
    split = get_names_from_partition_spec(batch)
    matcher = Matcher(plan, planned, names, roles, split, read.platform)
    matcher.match(compiled)
    return Comparison(
        tuple(planned),
        tuple(compiled),
        (*matcher.list_unplanned(), *_idle_axes(plan, split, compiled), *_to_host(read.graph)),
        tuple(matcher.activations),
        tuple(matcher.sums),
        tuple(matcher.matrices),
        tuple(matcher.moments),
        tuple(matcher.list_compiler_choices()),
        tuple(matcher.list_other_dtypes()),
        read.platform,
        tuple(matcher.leaves),
    )


def _idle_axes(
    plan: Plan, batch_axes: Sequence[str], compiled: Sequence[Collective]
) -> Iterator[Unplanned]:
    """The axes that shard neither the plan nor the batch, and along which no data is sent."""
    moved = [x.axes for x in compiled]
    # A collective with unknown axes may run along any axis.
    if None in moved:
        return
    used = {*get_names_from_partition_spec(plan), *batch_axes}
    used.update(*filter(None, moved))
    idle = idle_axes(plan.mesh, used)
    if not idle:
        return
    yield explain("batch-not-split", batch_axes=batch_axes, axes=idle)


def _to_host(graph: HloProgram) -> Iterator[Unplanned]:
    """The arrays that callbacks copy to the host, scalars excepted."""
    for computation in graph.computations.values():
        for op in filter(_is_callback, computation.ops.values()):
            operands = [computation.ops[name] for name in op.operands if name in computation.ops]
            arrays = [x for operand in operands for x in operand.types if x.rank]
            if arrays:
                size = bytes_text(total(x.bytes for x in arrays))
                where = f"of {size} to the host in each step, at {graph.source(op)}"
                yield explain("other", kind="callback", detail=where)


def _is_callback(op: Op) -> bool:
    # `custom-call(%x), custom_call_target="xla_ffi_python_cpu_callback"`
    if "callback" in op.target:
        return True
    # `(f32[8], u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true`, on TPUs,
    # which also send data between slices in this way
    if op.opcode != "send" or op.attribute("is_host_transfer") != "true":
        return False
    return not op.frontend(f"{MEGASCALE}_transfer_type")


# ------------------------------------------------------------------ a step of one's own loop


def _trace_step(step: Callable[[Any, Any], Any], state: PyTree, batch: PyTree) -> jax.stages.Traced:
    """The trace of a step as a function of the arrays of its arguments, in one jit.

    Other leaves are constants of the program, as in `eqx.filter_jit`. A jitted function is traced
    in this way too: not every wrapper has `trace`, and an inner jit is part of the program.
    """
    splits = [StaticSplit(*tree_flatten(tree), has_shape) for tree in (state, batch)]
    arrays = [
        split.fill_static(split.dynamic(tree_leaves(tree)))
        for split, tree in zip(splits, (state, batch), strict=True)
    ]

    # Collectives are reported with the names of these arguments: `state/w`.
    def run(state: PyTree, batch: PyTree) -> list[Any]:
        pairs = zip(splits, (state, batch), strict=True)
        results = step(*(split.combine(tree_leaves(tree)) for split, tree in pairs))
        return [x for x in tree_leaves(results) if has_shape(x)]

    return jax.jit(run).trace(*arrays)


def _check_state(plan: Plan, state: PyTree) -> None:
    pairs = zip(leaf_paths(state), tree_leaves(state), strict=True)
    arrays = [(path, x) for path, x in pairs if has_shape(x)]
    planned = [(leaf.path, leaf) for leaf in plan.leaves]
    if [(path, _form(x)) for path, x in arrays] == [(path, _form(x)) for path, x in planned]:
        return
    facts = [
        f"{path}: {_describe(x)} in the state, {_describe(leaf)} in the plan."
        for path, x, leaf in pair(arrays, planned)
        if x is None or leaf is None or _form(x) != _form(leaf)
    ]
    headline = "compare_communication: the state does not match the plan:"
    facts = facts or ["it has the same arrays in another order."]
    raise SpecError(listed(headline, facts, headed=True))


def _form(leaf: Any) -> tuple[Any, Any]:
    return leaf.shape, device_dtype(leaf.dtype)


def _describe(x: Any) -> str:
    return "nothing" if x is None else array_text(x)


def _check_returns_state(plan: Plan, results: Sequence[Any]) -> None:
    planned = [_form(leaf) for leaf in plan.leaves]
    if [(x.shape, x.dtype) for x in results[: len(planned)]] != planned:
        raise SpecError(
            "compare_communication: the step does not return the new state first. End it with"
            " `return new_state, loss`; for a function that returns no state, such as an"
            " evaluation, pass `lambda state, batch: (state, evaluate(state, batch))`."
        )


def _check_placed(plan: Plan, shardings: Sequence[_Placed]) -> None:
    facts: list[str] = []
    for (_, actual), leaf, planned in zip(
        shardings, plan.leaves, plan.sharding_of_each(), strict=True
    ):
        # JAX drops unused arguments, and has no sharding for them.
        if actual is not None and not actual.is_equivalent_to(planned, len(leaf.shape)):
            spec = getattr(actual, "spec", actual)
            facts.append(f"{leaf.path}: sharded as {spec} in the program, planned as {leaf.given}.")
    if facts:
        headline = "compare_communication: the step does not take the state as planned:"
        place = "\nPlace it with `treeshard.shard(state, plan)`, or pass `plan.structs`."
        raise SpecError(listed(headline, facts, headed=True) + place)


def _batch_spec(plan: Plan, shardings: Sequence[_Placed]) -> PartitionSpec:
    """The axes that shard the arguments after the state, as one spec."""
    split: set[str] = set()
    for path, sharding in shardings:
        if isinstance(sharding, NamedSharding):
            split.update(get_names_from_partition_spec(sharding))
        elif sharding is not None and not sharding.is_fully_replicated:
            raise SpecError(
                f"compare_communication: {path}: the program does not say along which axes"
                " it is sharded. Place the batch as in your loop, for example with"
                " `treeshard.shard(batch, specs, mesh)`."
            )
    in_order = tuple(axis for axis in axis_sizes(plan.mesh) if axis in split)
    return PartitionSpec(in_order) if in_order else PartitionSpec()

"""Compares the communication of a compiled step with what its plan predicts."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves
from jax.typing import DTypeLike

from treeshard._core.mesh import MeshLike
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec
from treeshard._core.text import columns, fold_paths, human_bytes
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard.communication._collectives import Collective, CollectiveReader, total
from treeshard.communication._device_groups import axes_of_sharding
from treeshard.communication._forecast import (
    Leaves,
    PlannedTransfer,
    parameters,
    predict_communication,
)
from treeshard.communication._hlo import HloProgram
from treeshard.communication._program import CompiledProgram, argument_path, read_program
from treeshard.errors import SpecError, listed


class Unplanned(NamedTuple):
    """One way in which a program's communication differs from its plan.

    Attributes:
        code: `"activation"`, `"batch"`, `"again"` (moved more often than planned),
            `"sharded-further"` (a leaf that a step should not gather), `"all-reduce"` (where a
            reduce-scatter was planned), `"wider"` (in a larger dtype), `"across-axes"` (between
            devices that do not form axes of the mesh), `"unreadable"`, or `"not-moved"`
            (planned, but not in the program).
        fact: What was found.
        hint: What to do about it, or why nothing can be done.
        collectives: The ops; empty for `"not-moved"`.
        paths: The leaves that it concerns, where they are known.
    """

    code: str
    fact: str
    hint: str
    collectives: tuple[Collective, ...] = ()
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The fact and the hint, then a line per op, at most ten."""
        shown = ", ".join(fold_paths(dict.fromkeys(self.paths)))
        head = f"{self.code}: {shown + ': ' if shown else ''}{self.fact} {self.hint}"
        counts = Counter(map(_shown, self.collectives))
        lines = [f"    {times} x {line}" for line, times in counts.items()]
        more = [f"    ... and {len(lines) - 10} more"] if len(lines) > 10 else []
        return "\n".join([head, *lines[:10], *more])


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
        if scalars:
            text += f"\nplus {scalars} scalar{'s' if scalars > 1 else ''}, such as the loss"
        if self.tensor_parallel:
            text += f"\nincluding {len(self.tensor_parallel)} tensor-parallel activations"
        return "\n".join([text, *map(str, self.unplanned)])


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
        plan: The plan of the step's state, or of its parameters.
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
        >>> [one.code for one in compare_communication(decided, program).unplanned]
        ['all-reduce']
    """
    read = read_program(program, plan.mesh if mesh is None else mesh)
    graph, axes = read.graph, read.axes
    names = _leaf_names(plan, graph, parameters(plan, params))
    batch = _batch_of(program, graph, names, axes or {}) if batch is None else batch
    planned = predict_communication(
        plan, batch=batch, remat=remat, scan=scan, params=params, dtype=dtype
    )
    compiled = list(CollectiveReader(read).all())
    matcher = Matcher(plan, planned, names, get_names_from_partition_spec(batch))
    for collective in compiled:
        matcher.match(collective)
    return Comparison(
        tuple(planned), tuple(compiled), tuple(matcher.unplanned()), tuple(matcher.tensor_parallel)
    )


def _leaf_names(
    plan: Plan, graph: HloProgram, params: Sequence[PlannedLeaf]
) -> dict[str, str | None]:
    """The program's path of each argument -> the plan's path of that leaf, if it has it.

    The argument's path ends in the leaf's: `state/w` is the leaf `w`.
    """
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    names: dict[str, str | None] = {}
    facts: list[str] = []
    for parameter in graph.parameters:
        path = argument_path(parameter) or ""
        tails = [path.split("/", n)[-1] for n in range(path.count("/") + 1)]
        name = next((tail for tail in tails if tail in leaves), None)
        names[path] = name
        size = sum(x.bytes or 0 for x in parameter.types)
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
    program: CompiledProgram,
    graph: HloProgram,
    names: Mapping[str, str | None],
    axes: Mapping[str, int],
) -> PartitionSpec:
    """The axes that shard the arguments that are not in the plan, as one spec."""
    is_compiled = isinstance(program, jax.stages.Compiled)
    shardings = dict(enumerate(tree_leaves(program.input_shardings) if is_compiled else []))
    batch_axes: set[str] = set()
    for parameter in graph.parameters:
        if names[argument_path(parameter) or ""] is not None:
            continue
        sharded = axes_of_sharding(parameter.attribute("sharding"), axes)
        sharding = shardings.get(-1 if parameter.index is None else parameter.index)
        if sharded is None and isinstance(sharding, NamedSharding):
            # Newer versions of XLA leave it out of the text.
            sharded = get_names_from_partition_spec(sharding)
        if sharded is None and any(x.rank for x in parameter.types):
            raise SpecError(
                "compare_communication: the program does not say how its argument"
                f" {parameter.op_name or parameter.name!r} is sharded. Pass the specs of the batch:"
                " `batch=P(...)`."
            )
        batch_axes.update(sharded or ())
    in_order = tuple(axis for axis in axes if axis in batch_axes)
    return PartitionSpec(in_order) if in_order else PartitionSpec()


# ------------------------------------------------------------------ matching


@dataclass
class _Expected:
    """A planned transfer, and how many of its elements have no match yet."""

    planned: PlannedTransfer
    left: int

    @property
    def total(self) -> int:
        return elements(self.planned.total_bytes, self.planned.dtype) or 0


@dataclass
class Matcher:
    """Matches collectives to planned transfers, one by one, and collects those without a match.

    Attributes:
        plan: The plan of the step's state.
        planned: What the plan predicts.
        names: Path of an argument -> path of that leaf in the plan; `None` if it is not in it.
        batch_axes: The mesh axes that shard the batch.
        tensor_parallel: Filled with the collectives of computed values along axes that shard
            parameters but not the batch.
    """

    plan: Plan
    planned: Sequence[PlannedTransfer]
    names: Mapping[str, str | None]
    batch_axes: Sequence[str]
    tensor_parallel: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = [
            _Expected(x, elements(x.total_bytes, x.dtype) or 0)
            for x in self.planned
            if x.path is not None
        ]
        self.differences: dict[tuple[str, str, str], list[tuple[Collective, str | None]]] = {}
        used = get_names_from_partition_spec(self.plan)
        self.tensor_axes = {axis for axis in used if axis not in self.batch_axes}

    def match(self, collective: Collective) -> None:
        """Matches one collective, or files it under the code of the difference that it is."""
        if collective.axes == () or is_scalar(collective) or collective.completes is not None:
            return
        leaf = None if collective.path is None else self.names.get(collective.path)
        size = elements(collective.total_bytes, collective.dtype)
        if size is None or collective.wire_bytes is None:
            return self._add("unreadable", collective, leaf)
        if collective.axes is None:
            return self._add("across-axes", collective, leaf)
        if (planned := self._matched(collective, leaf, size)) is not None:
            if jnp.dtype(collective.dtype).itemsize > jnp.dtype(planned.dtype).itemsize:
                self._add("wider", collective, planned.path, planned.dtype)
        elif collective.kind == "all-reduce" and self._match_full_gradient(collective, size):
            self._add("all-reduce", collective)
        elif leaf is not None and collective.kind == "all-gather":
            is_planned = any(
                (x.planned.path, x.planned.kind) == (leaf, collective.kind) for x in self.expected
            )
            self._add("again" if is_planned else "sharded-further", collective, leaf)
        elif collective.path is not None and leaf is None:
            self._add("batch", collective)
        elif set(collective.axes) <= self.tensor_axes:
            self.tensor_parallel.append(collective)
        elif self._repeats_a_gradient(collective):
            self._match_full_gradient(collective, elements(collective.bytes, collective.dtype))
            self._add("again", collective)
        else:
            self._add("activation", collective)

    def _add(
        self, code: str, collective: Collective, leaf: str | None = None, detail: str = ""
    ) -> None:
        is_in_loop = (collective.count or 0) > 1 or "while/body" in (collective.op_name or "")
        if code == "activation" and is_in_loop:
            detail = "loop"
        members = self.differences.setdefault((code, detail, collective.kind), [])
        members.append((collective, leaf))

    def _matched(
        self, collective: Collective, leaf: str | None, size: int
    ) -> PlannedTransfer | None:
        """Matches it to a planned transfer of the same kind and axes, if there is one."""
        for expected in self.expected:
            planned = expected.planned
            if (planned.kind, planned.axes) != (collective.kind, collective.axes):
                continue
            if expected.left < size:
                continue
            if collective.kind == "all-gather" and planned.why != "update":
                fits = leaf is not None and leaf == planned.path
            else:
                # Gradients and updates have no path, so that only the full size identifies them.
                fits = expected.left == size and leaf in (None, planned.path)
            if fits:
                expected.left -= size
                return planned
        return None

    def _match_full_gradient(self, collective: Collective, size: int | None) -> bool:
        """Matches an all-reduce of a full gradient to all that is planned for that gradient: for
        instance a reduce-scatter, and an all-reduce of each device's part."""
        of_leaf: dict[str | None, list[_Expected]] = {}
        for expected in self.expected:
            if expected.planned.why == "gradient":
                of_leaf.setdefault(expected.planned.path, []).append(expected)
        for gradient in of_leaf.values():
            untouched = all(expected.left == expected.total for expected in gradient)
            axes = {axis for expected in gradient for axis in expected.planned.axes}
            if untouched and gradient[0].left == size and axes == set(collective.axes or ()):
                for expected in gradient:
                    expected.left = 0
                return True
        return False

    def _repeats_a_gradient(self, collective: Collective) -> bool:
        """Whether it looks like one more reduction of a gradient: it has the size of one, and
        runs in a loop or in the backward pass."""
        size = elements(collective.bytes, collective.dtype)
        backward = (collective.count or 1) > 1 or "transpose(" in (collective.op_name or "")
        return backward and any(
            expected.total == size and set(expected.planned.axes) <= set(collective.axes or ())
            for expected in self.expected
            if expected.planned.kind != "all-gather"
        )

    def unplanned(self) -> Iterator[Unplanned]:
        """The differences, and last the planned transfers that the program does not have."""
        for (code, detail, kind), members in self.differences.items():
            moved = tuple(collective for collective, _ in members)
            paths = tuple(leaf for _, leaf in members if leaf is not None)
            fact, hint = _explain(code, kind, detail, moved, self.batch_axes)
            yield Unplanned(code, fact, hint, moved, paths)
        missing: dict[tuple[str, str], list[str]] = {}
        for expected in self.expected:
            if expected.left:
                key = expected.planned.kind, expected.planned.why
                missing.setdefault(key, []).append(expected.planned.path or "")
        for (kind, why), paths in missing.items():
            hint = (
                "The compiler gathers once and keeps the result, which takes memory until the"
                " gradient is computed. In a scan it does not."
                if "again" in why
                else "Check that the step uses the leaf, and that the plan is of this step."
            )
            fact = f"the planned {kind} ({why}) is not in the program."
            yield Unplanned("not-moved", fact, hint, (), tuple(paths))


# ------------------------------------------------------------------ describing


def _explain(
    code: str, kind: str, detail: str, moved: Sequence[Collective], batch_axes: Sequence[str]
) -> tuple[str, str]:
    """The fact and the hint of a difference."""
    moves = total([one.total_bytes for one in moved])
    size = "an unknown number of bytes" if moves is None else human_bytes(moves)
    match code:
        case "activation":
            fact = f"unplanned {kind} of computed values, {size}."
            if detail == "loop":
                return fact, (
                    "Gather the layer's weights at the start of the scan's body, so that the"
                    " activations stay where they are: `unshard(layer, layer_specs(specs), axis)`."
                )
            return fact, (
                "Constrain the value to the axes of the batch:"
                f" `with_sharding_constraint(x, P({tuple(batch_axes)!r}))`, and gather weights"
                " with `unshard`."
            )
        case "across-axes":
            return (
                f"{kind} between devices that do not form axes of the mesh, {size}.",
                "A reshape splits a sharded dim differently from the mesh. To split a batch for"
                " accumulation, reshape it to (batch / k, k), swap the dims, and constrain it:"
                " `with_sharding_constraint(x, P(None, axis))`.",
            )
        case "batch":
            return (
                f"{kind} of an argument that is not a parameter, {size}.",
                "To split a batch for accumulation, reshape it to (batch / k, k) and swap the dims,"
                " or constrain the result: `with_sharding_constraint(x, P(None, axis))`.",
            )
        case "again" if kind != "all-gather":
            return (
                f"{kind} of the size of a gradient that is already reduced, {size}.",
                "The partitioner reduces the gradient of each use of a weight, and of each"
                " minibatch in a loop, before it adds them. Use `accumulate_gradients` or"
                " `treeshard.manual` to reduce once.",
            )
        case "again":
            return (
                f"{kind} more often than planned, {size} too much.",
                "If the forward pass is repeated for the gradients, pass `remat=`. In a loop over"
                " minibatches, gather before the loop and reduce after it: `accumulate_gradients`.",
            )
        case "sharded-further":
            return (
                f"{kind} of a leaf that a step does not have to gather, {size}.",
                "Shard the leaf like the arrays that it is used with: optimizer state with"
                " `Plan.follow`, and weights along the axis of the activations.",
            )
        case "all-reduce":
            return (
                f"all-reduce of full gradients, {size}, where a reduce-scatter was planned.",
                "The CPU compiler always does so. On other backends, constrain the gradients to"
                " the plan's specs, or reduce-scatter them by hand (`treeshard.manual`).",
            )
        case "wider":
            return (
                f"{kind} in a wider dtype than the planned {detail}.",
                "The CPU compiler widens 16-bit dtypes. On other backends, cast before the gather.",
            )
    what = "op that looks like a collective," if kind == "unknown" else kind
    return (
        f"{what} with unknown axes, bytes or count.",
        "Pass the mesh. A loop whose trips depend on data has no count.",
    )


def is_scalar(one: Collective) -> bool:
    """Whether it reduces a scalar, such as a loss, which no plan has."""
    return one.kind == "all-reduce" and one.rank == 0 and one.bytes is not None


def elements(size: int | None, dtype: str) -> int | None:
    """The number of elements in `size` bytes; `None` if it or the dtype is unknown."""
    if size is None:
        return None
    try:
        return size // jnp.dtype(dtype).itemsize
    except TypeError:
        return None


def _shown(one: Collective) -> str:
    """A collective as one line."""
    size = "unknown bytes" if one.bytes is None else human_bytes(one.bytes)
    times = "? times" if one.count is None else f"{one.count:,} times"
    axes = "unknown axes" if one.axes is None else " and ".join(map(repr, one.axes))
    parts = [f"{one.kind} of {size} ({one.dtype}) along {axes}, {times}"]
    parts += [f"in {_short(one.op_name)}"] if one.op_name else []
    parts += [f"at {one.source}"] if one.source else []
    return ", ".join(parts)


def _short(op_name: str) -> str:
    # A combined op has the names of all the ops that it combines.
    return op_name if len(op_name) <= 100 else f"{op_name[:60]}...{op_name[-37:]}"

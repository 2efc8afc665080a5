"""Lists the values that a step computes, with the line of the user's code that makes each.

The walk that finds the roles of leaves passes every equation once, and knows what each runs on and
how often. A second walk for the types of the results would have to know loops, branches and
`shard_map` again.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from jax.sharding import AxisType, PartitionSpec

from treeshard._core.jax_private import shard_map_axes, varying_axes_of_type, without_unused
from treeshard._core.mesh import axes_of_type
from treeshard._core.specs import axes_of, dim_entries, entries, with_entries
from treeshard._planning.plan import Plan
from treeshard._trace.roles import run_walk
from treeshard._trace.uses import Finals, Place, Walk, bodies, region_of, stack_of
from treeshard._trace.values import Value
from treeshard.errors import HIDDEN, user_line

CONSTRAINTS = ("sharding_constraint", "reshard")


class TracedValue(NamedTuple):
    """One result of an equation.

    Attributes:
        eqn: The equation.
        number: Which of its results.
        line: The line of the user's code, as `file:line`; empty if there is none.
        function: The function that has this line, `Block.__call__`; empty if there is none.
        region: `"forward"` or `"backward"` if it is differentiated, else `""`.
        scope: The names of `jax.named_scope` around it, `encoder/attn`.
        known: What the walk knows of it: the leaves that it comes from, and more.
        shape: Its shape as the code sees it: in `shard_map`, that of one device's part.
        spec: How it is split, as far as its type or a constraint tells.
        local_shape: The shape of one device's part, by `spec`.
        open: The mesh axes over which a compiler decides how it is split.
        by_hand: The axes of `shard_map` along which devices may have different ones.
        place: Where its equation stands.
        op: The operation that makes it; for a `shard_map` of the library, the last one in it.
        is_passed_on: Whether another constraint on the same line takes it, as in `unshard`.
    """

    eqn: Any
    number: int
    line: str
    function: str
    region: str
    scope: str
    known: Value
    shape: tuple[int, ...]
    spec: PartitionSpec
    local_shape: tuple[int, ...]
    open: frozenset[str]
    by_hand: frozenset[str]
    place: Place
    op: str
    is_passed_on: bool = False

    @property
    def dtype(self) -> Any:
        return self.eqn.outvars[self.number].aval.dtype


class _LineWalk(Walk):
    """A walk that lists the values which the equations make."""

    def __init__(self, along: Collection[str], scalars: Collection[int]) -> None:
        super().__init__(along, scalars)
        self.values: list[TracedValue] = []
        self.constraints: dict[int, str] = {}  # the line, by the id of a variable
        self.passed_on: set[int] = set()  # ids of variables
        self.arguments: set[int] = set()  # of the step, the same

    def run(self, jaxpr: Any, given: Sequence[Value], finals: Finals, at: Place) -> list[Value]:
        if not at.within:
            self.arguments = set(map(id, jaxpr.invars))
        return super().run(jaxpr, given, finals, at)

    def note(self, eqn: Any, results: Sequence[Value], at: Place) -> None:
        line = line_of(eqn, at)
        # JAX 0.12 names the function in a `custom_jvp_call` as the call itself.
        names = [name for name, _ in groupby(map(stack_of, (*at.within, eqn)))]
        name = "/".join(names)
        ops = self._ops(eqn, line)
        if eqn.primitive.name in CONSTRAINTS:
            self._pass_on(eqn, line, results[0])
        for number in _made_here(eqn):
            variable = eqn.outvars[number]
            if not hasattr(variable.aval, "shape"):  # a token
                continue
            value = TracedValue(
                eqn,
                number,
                line,
                function_of(eqn, at, line),
                region_of(name),
                scope_of(name),
                results[number],
                variable.aval.shape,
                *_split(eqn, number, at),
                place=at,
                op=ops[number],
            )
            self.values.append(value)

    def _ops(self, eqn: Any, line: str) -> Sequence[str]:
        """The operations that make the results of an equation.

        Of what the library does in a `shard_map` for one line of the user's, only the results are
        kept, and the last operation of each: it has that name in the compiled program.
        """
        names = [eqn.primitive.name] * len(eqn.outvars)
        if eqn.primitive.name != "shard_map":
            return names
        kept = [x for x in self.values if x.line != line or id(eqn) not in x.place.path]
        if len(kept) == len(self.values):
            return names
        self.values[:] = kept
        [inner] = bodies(eqn)
        makers = {variable: each for each in inner.eqns for variable in each.outvars}
        ops = (makers.get(x) for x in inner.outvars)
        return [
            name if op is None else op.primitive.name for name, op in zip(names, ops, strict=True)
        ]

    def _pass_on(self, eqn: Any, line: str, known: Value) -> None:
        """Notes the result of a constraint, and that it takes that of another, if it does. A batch
        is constrained first of all."""
        before, after = id(eqn.invars[0]), id(eqn.outvars[0])
        if self.constraints.get(before) == line:
            self.passed_on.add(before)
        if before in self.arguments and known.is_of_batch:
            self.passed_on.add(after)
        self.constraints[after] = line


def traced(jaxpr: Any, plan: Plan, batch_axes: Collection[str]) -> list[TracedValue]:
    """The values that a step makes, in the order of the trace, without those that nothing uses.

    Args:
        jaxpr: The trace of a step: its first arguments, and its first results, are the leaves.
        plan: The plan of the state.
        batch_axes: The mesh axes that split the batch.
    """
    walk = run_walk(without_unused(jaxpr), plan.leaves, batch_axes, _LineWalk)
    return [
        value._replace(is_passed_on=id(value.eqn.outvars[value.number]) in walk.passed_on)
        for value in walk.values
    ]


def line_of(eqn: Any, at: Place) -> str:
    """The line of the user's code that an equation comes from; empty if there is none.

    JAX traces functions such as `jax.nn.relu` once, and later calls have no line of their own in
    them: then it is the line of the call.
    """
    lines = [_line_of_frame(frame) for frame in _stack(eqn, at)]
    return user_line(line for line in lines if not line.startswith(HIDDEN))


# `<locals>` of `make.<locals>.loss`, and comprehensions, which are functions until Python 3.11.
_NO_FUNCTION = re.compile(r"\.<(?:locals|listcomp|setcomp|dictcomp)>")


def function_of(eqn: Any, at: Place, line: str) -> str:
    """The function that has a line of `line_of`: `make.loss`, or `Block.__call__`."""
    names = [frame.function_name for frame in _stack(eqn, at) if _line_of_frame(frame) == line]
    return _NO_FUNCTION.sub("", names[0]) if names else ""


def _stack(eqn: Any, at: Place) -> list[Any]:
    """The frames of an equation's stack and of those around it, the innermost first."""
    tracebacks = [each.source_info.traceback for each in (eqn, *reversed(at.within))]
    return [frame for traceback in tracebacks if traceback for frame in traceback.frames]


def _line_of_frame(frame: Any) -> str:
    return f"{frame.file_name}:{frame.line_num}"


# Words of JAX in the names of equations, and the patterns of `einsum`.
_NO_SCOPE = re.compile(
    r"jit\([^()]*\)|\b(?:jvp|transpose|vmap|shard_map|rematted_computation|checkpoint|remat2|while"
    r"|body|cond|closed_call)\b|[^/()]*->[^/()]*"
)


def scope_of(name: str) -> str:
    """`encoder/attn` of `transpose(jvp(encoder))/rematted_computation/attn/btd,bsd->bts`."""
    return "/".join(re.findall(r"[^/()]+", _NO_SCOPE.sub("", name)))


def _made_here(eqn: Any) -> Iterator[int]:
    """The numbers of the results that an equation makes, and not the programs in it."""
    inner = bodies(eqn)
    if eqn.primitive.name == "scan":
        # What all trips return of one result is stacked: `float32[4,8,32]` of `float32[8,32]`.
        pairs = zip(eqn.outvars, inner[0].outvars, strict=True)
        yield from (i for i, (x, y) in enumerate(pairs) if x.aval.shape != y.aval.shape)
    elif eqn.primitive.name == "shard_map" or not inner or eqn.primitive.name == "pallas_call":
        yield from range(len(eqn.outvars))


_Split = tuple[PartitionSpec, tuple[int, ...], frozenset[str], frozenset[str]]


def _split(eqn: Any, number: int, at: Place) -> _Split:
    """How a result is split: its spec, its local shape, which axes are open, and which by hand."""
    aval = eqn.outvars[number].aval
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    by_hand = at.manual & (varying_axes_of_type(aval) | at.unchecked)
    auto = {*axes_of_type(mesh, AxisType.Auto)} - at.manual
    if eqn.primitive.name == "shard_map":
        spec = eqn.params["out_specs"][number]
        auto -= {*shard_map_axes(eqn.params)}
    asked = eqn.params.get("sharding")
    if eqn.primitive.name == "sharding_constraint" and hasattr(asked, "spec"):
        # sharding_constraint[sharding=NamedSharding(..., P('fsdp')) unconstrained_dims={}] x
        spec = asked.spec
        if not eqn.params["unconstrained_dims"]:
            auto = set()
    spec = with_entries(spec, entries(spec))  # without trailing `None`s
    local = shard_shape(aval.shape, spec, mesh.shape)
    sizes = {axis for axis in auto if mesh.shape[axis] > 1}
    return spec, local, frozenset(sizes), by_hand


def shard_shape(
    shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of one device's part."""
    local: list[int] = []
    for length, entry in zip(shape, dim_entries(spec, len(shape)), strict=True):
        for axis in axes_of(entry):
            length = -(-length // sizes[axis])
        local.append(length)
    return tuple(local)

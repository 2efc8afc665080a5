"""Traces a program's values back to their origins, through loops and calls.

By dataflow, and not by names: compilers rename, fuse and clone ops, and an all-gather of a weight
is named after whatever was traced last. What the gather reads can be followed back, op by op, to
the parameter `state['w']` of the program.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treeshard.communication._hlo import Computation, HloProgram, Op
from treeshard.errors import FormatError

_MAX_STEPS = 10_000
# Stands for an op that a text does not have: it is computed from nothing.
_MISSING = Op("", "", "", "")


@dataclass(frozen=True)
class Context:
    """A computation as it is called from one place: by `op` in the context `caller`."""

    computation: Computation
    caller: "Context | None" = None
    op: Op | None = None
    role: str = ""
    branch: int = 0


class Value(NamedTuple):
    """The result of an op in its context; if it is a tuple, the element numbered `element`."""

    context: Context
    op: Op
    element: int | None = None


class Origins(NamedTuple):
    """The numbers of the arguments that data comes from; whether it is more; its earlier dtypes."""

    arguments: frozenset[int]
    computed: bool
    dtypes: frozenset[str] = frozenset()


def value(context: Context, name: str, element: int | None = None) -> Value:
    return Value(context, context.computation.ops.get(name, _MISSING), element)


def operands(of: Value) -> list[Value]:
    return [value(of.context, name) for name in of.op.operands]


class Dataflow:
    """The origins of values, and the trip counts of loops, of one program."""

    def __init__(self, program: HloProgram) -> None:
        self.program = program
        self._takes_tuple = program.takes_tuple
        self._users: dict[str, Mapping[str, Sequence[Op]]] = {}

    def enter(self, at: Context, op: Op, name: str, role: str, branch: int = 0) -> Context:
        """The context of a computation that `op` calls."""
        computation = self.program.computations.get(name) or Computation(name)
        return Context(computation, at, op, role, branch)

    def first_user(self, computation: Computation, op: Op) -> Op | None:
        """The nearest op with a source line that uses a value, itself or through others."""
        users = self._users_in(computation)
        seen, queue = {op.name}, [op]
        for producer in queue:
            for user in users.get(producer.name, ()):
                if self.program.source(user) is not None:
                    return user
                if user.name not in seen:
                    seen.add(user.name)
                    queue.append(user)
        return None

    def _users_in(self, computation: Computation) -> Mapping[str, Sequence[Op]]:
        if computation.name not in self._users:
            users: dict[str, list[Op]] = defaultdict(list)
            for user in computation.ops.values():
                for operand in user.operands:
                    users[operand].append(user)
            self._users[computation.name] = users
        return self._users[computation.name]

    # ---------------------------------------------------------------- data

    def origins(self, *starts: Value) -> Origins:
        """The arguments of the program whose data some values contain."""
        arguments: set[int] = set()
        dtypes: set[str] = set()
        computed = False
        seen: set[Value] = set()
        queue = [*starts]
        while queue and len(seen) <= _MAX_STEPS:
            at = queue.pop()
            if at in seen:
                continue
            seen.add(at)
            if at.op.opcode == "convert":  # `%convert.8 = bf16[1024,512]{1,0} convert(%param.5)`
                dtypes.update(buffer.dtype for buffer in at.op.types)
            number = self._argument(at)
            if number is not None:
                arguments.add(number)
                continue
            sources = self.sources(at)
            computed = computed or not sources
            queue += sources
        return Origins(frozenset(arguments), computed or bool(queue), frozenset(dtypes))

    def _argument(self, at: Value) -> int | None:
        """The number of the argument that a value is, if it is one."""
        if at.op.opcode != "parameter" or at.context.computation is not self.program.entry:
            return None
        return at.element if self._takes_tuple else at.op.index

    def sources(self, at: Value) -> list[Value]:
        """The values that this one takes its data from, unchanged; none if it is computed."""
        opcode = at.op.opcode
        # `%all-gather-done.1 = f32[16]{0} all-gather-done(%all-gather-start.1)`
        if opcode.endswith(("-done", "-update")):
            return _operand(at, 0, at.element)
        follow = _SOURCES.get(at.op.target or opcode.removesuffix("-start"))
        return [] if follow is None else follow(self, at)

    def trace(self, at: Value, until: Callable[[Value], bool]) -> Value:
        """The first value that meets a condition, on the way back to what `at` takes its data from;
        or the last before the way divides or ends."""
        for _ in range(_MAX_STEPS):
            if until(at):
                break
            sources = self.sources(at)
            if len(sources) != 1:
                break
            at = sources[0]
        return at

    def _from_caller(self, at: Value) -> list[Value]:
        """The arguments that the caller passes for a computation's parameter."""
        context, number = at.context, at.op.index
        op, caller = context.op, context.caller
        if op is None or caller is None or number is None:
            return []
        passed = Value(caller, op, at.element)
        if op.opcode == "while":
            is_test = context.role == "condition"
            return _operand(passed, 0, at.element) if is_test else self._of_loop(passed, context)
        if op.opcode == "conditional":
            # `conditional(%index, %tuple.1, %tuple.2)`: each branch has one parameter
            return _operand(passed, 1 + context.branch, at.element)
        return _operand(passed, number, at.element)

    def _of_loop(self, loop: Value, body: Context) -> list[Value]:
        """What an element that a loop carries is before the first trip, and after each trip unless
        all of them pass it on as it is."""
        start = _operand(loop, 0, loop.element)
        after = result(body, loop.element)
        origin = self.trace(after, lambda each: _is_carried_by(body, each) or not keeps(each.op))
        is_kept = _is_carried_by(body, origin) and origin.element == loop.element
        return start if is_kept else [*start, after]

    def _after_loop(self, loop: Value) -> list[Value]:
        [name] = loop.op.called.get("body", ("",))
        return self._of_loop(loop, self.enter(loop.context, loop.op, name, "body"))

    def _results(self, at: Value, role: str) -> list[Value]:
        """What the computations that an op calls return."""
        contexts = [
            self.enter(at.context, at.op, name, role, branch)
            for branch, name in enumerate(at.op.called.get(role, ()))
        ]
        return [result(context, at.element) for context in contexts]

    # ---------------------------------------------------------------- loops

    def trips(self, context: Context, op: Op) -> int | None:
        """The trip count of a `while`: as stated, or computed if it counts between constants."""
        if op.trips is not None:
            return op.trips
        called = op.called
        roles = "condition", "body"
        condition, body = (self.enter(context, op, called.get(x, ("",))[0], x) for x in roles)
        test = self._resolved(result(condition))
        direction = test.op.attribute("direction")
        if test.op.opcode != "compare" or direction not in ("LT", "LE", "GT", "GE"):
            return None
        loop = _Loop(Value(context, op), condition, body)
        try:
            left, right = (self._sequence(loop, side) for side in operands(test))
        except ValueError:
            return None
        if direction.startswith("G"):  # `n > i` is `i < n`
            left, right = right, left
        distance, step = right[0] - left[0], left[1] - right[1]
        return len(range(0, distance + direction.endswith("E"), step)) if step > 0 else None

    def _sequence(self, loop: "_Loop", side: Value) -> tuple[int, int]:
        """What one side of a loop's condition is in the first trip, and what each trip adds to it.

        Raises `ValueError` if that depends on data.
        """
        element, offset = self._sum(side, loop.condition)
        if element is None:
            return offset, 0
        before = value(loop.at.context, loop.at.op.operands[0], element)
        computed, first = self._sum(before, loop.at.context)
        carried, step = self._sum(result(loop.body, element), loop.body)
        if computed is not None or carried != element:
            raise ValueError
        return first + offset, step

    def _sum(self, at: Value, loop: Context) -> tuple[int | None, int]:
        """A value as a number, or as an element that a loop carries and a number added to it.

        `%add.3 = s32[] add(%i, %one)`, or `subtract`. Raises `ValueError` for other values.
        """
        number = 0
        at = self._resolved(at)
        for _ in range(_MAX_STEPS):
            if at.op.opcode not in ("add", "subtract"):
                break
            left, right = map(self._resolved, operands(at))
            if at.op.opcode == "add" and left.op.number is not None:
                left, right = right, left
            if right.op.number is None:
                raise ValueError
            number += right.op.number if at.op.opcode == "add" else -right.op.number
            at = left
        if at.op.number is not None:
            return None, at.op.number + number
        if at.op.opcode != "parameter" or at.context is not loop or at.element is None:
            raise ValueError
        return at.element, number

    def _resolved(self, at: Value) -> Value:
        """Where a value is computed, or the parameter of a loop that carries it."""
        return self.trace(at, _is_carried_or_part)


def keeps(op: Op) -> bool:
    """Whether the result of an op has the elements of its operand, perhaps in another shape or in
    other memory."""
    opcode = op.opcode
    for suffix in ("-start", "-update", "-done"):
        opcode = opcode.removesuffix(suffix)
    return (op.target or opcode) in _KEEPING


def _is_carried_by(body: Context, at: Value) -> bool:
    return at.op.opcode == "parameter" and at.context == body


def _is_carried_or_part(at: Value) -> bool:
    # A loop, perhaps an outer one, may change what it carries.
    is_carried = at.op.opcode == "parameter" and at.context.role in ("body", "condition")
    return is_carried or at.op.opcode in _PARTS


def _moved(flow: Dataflow, at: Value) -> list[Value]:
    # A combined op moves several arrays. A `-start` returns its operands before its results:
    # `((f32[2], f32[4]), (f32[16], f32[32])) all-gather-start(%x, %y)`.
    names = at.op.operands
    if at.element is None or not names:
        return _operand(at, 0)
    return _operand(at, at.element % len(names))


def _joined(flow: Dataflow, at: Value) -> list[Value]:
    return operands(at)


def _of_call(flow: Dataflow, at: Value) -> list[Value]:
    return flow._results(at, "calls")


def _reshaped(flow: Dataflow, at: Value) -> list[Value]:
    """The operand, if the op has as many elements, and so only adds or removes dims of size 1."""
    sizes = [[(x.dtype, x.bytes) for x in each.op.types] for each in (at, *_operand(at, 0))]
    return _operand(at, 0) if len(sizes[0]) == 1 and sizes[1:] == sizes[:1] else []


# How each op passes data on: by its opcode, without the suffix of `copy-start(%param.4)`, or by the
# target of a custom call.
_SOURCES: Mapping[str, Callable[[Dataflow, Value], list[Value]]] = {
    # `%p = (s32[], f32[8]{0}) parameter(0)` of a loop; `%param_1.2 = f32[8]{0} parameter(1)`
    "parameter": Dataflow._from_caller,
    # `%w.3 = f32[8]{0} get-tuple-element(%while.28), index=2`. An element of an element, of a tuple
    # in a tuple, is not followed.
    "get-tuple-element": lambda flow, at: (
        _operand(at, 0, at.op.index) if at.element is None else []
    ),
    # `%tuple.70 = (s32[], f32[8]{0}) tuple(%constant.3, %copy.2)`
    "tuple": lambda flow, at: [] if at.element is None else _operand(at, at.element),
    # `%while.28 = (s32[], f32[8]{0}) while(%tuple.70), condition=%region_1.2, body=%region_0.1`
    "while": lambda flow, at: flow._after_loop(at),
    # `(f32[16]{0}) conditional(%i, %tuple.1, %tuple.2), branch_computations={%region_8, %region_9}`
    "conditional": lambda flow, at: flow._results(at, "branches"),
    # `%fusion.109 = bf16[1024,4096]{1,0} fusion(%param_9.2), kind=kLoop, calls=%bitcast_fusion.27`
    "fusion": _of_call,
    # `%call.1 = f32[8]{0} call(%x), to_apply=%gathered`: a jitted function in a jitted one
    "call": _of_call,
    # `((f32[8,128]), f32[2,128]) async-start(%doubled), calls=%async_computation`: GPUs, for ops
    # that have no `-start` of their own
    "async": _of_call,
    # `%concatenate.1 = f32[4096]{0} concatenate(%bitcast.1, %bitcast.2), dimensions={0}`: GPUs join
    # gradients for one all-reduce
    "concatenate": _joined,
    # `f32[4,8]{1,0} dynamic-update-slice(%stacked, %layer, %i, %zero)`: how scans stack results.
    # The operands after the first two say where.
    "dynamic-update-slice": lambda flow, at: operands(at)[:2],
    # `%reduce.55 = bf16[256]{0} reduce(%dynamic-slice.82, %zero), dimensions={0}`, of bf16[1,256]:
    # TPUs reshape so
    "reduce": _reshaped,
    "broadcast": _reshaped,
    # `(f32[8]{0}, f32[4]{0}) opt-barrier(%tuple.3)`: of `lax.optimization_barrier`, also in remat
    "opt-barrier": lambda flow, at: _operand(at, 0, at.element),
    # `f32[1024,512] custom-call(%slice-done.8, %slice-done.9), custom_call_target="ConcatBitcast"`:
    # TPUs copy an array to fast memory in slices, which this joins
    "ConcatBitcast": _joined,
    **dict.fromkeys(
        (
            "all-gather",
            "all-to-all",
            "bitcast",
            "bitcast-convert",
            "collective-permute",
            "convert",
            "copy",
            "dynamic-slice",
            "reshape",
            "reverse",
            "slice",
            "transpose",
            # The ends of an async collective that TPUs spread over a chain of fusions
            "AsyncCollectiveStart",
            "AsyncCollectiveDone",
            # What JAX writes to annotate a value; the partitioner removes them
            "Sharding",
            "SPMDFullToShardShape",
            "SPMDShardToFullShape",
            "annotate_device_placement",
        ),
        _moved,
    ),
}
# Those of them that pass on each element as it is: see `keeps`. A text may have the others between
# their halves too, such as `%copy-done.28 = f32[256]{0:S(1)} copy-done(%copy-start.28)`, with which
# TPUs bring an array to fast memory.
_KEEPING = frozenset(
    {
        "Sharding",
        "annotate_device_placement",
        "async",
        "bitcast",
        "broadcast",
        "call",
        "copy",
        "fusion",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "reduce",
        "reshape",
        "tuple",
        "while",
    }
)
# Ops that pass on a part of what they read, or more: no number of a loop is followed through them.
_PARTS = ("dynamic-slice", "slice", "concatenate")


class _Loop(NamedTuple):
    """A `while`, and the computations that it calls."""

    at: Value
    condition: Context
    body: Context


def result(context: Context, element: int | None = None) -> Value:
    """What a computation returns."""
    return value(context, context.computation.root, element)


def _operand(of: Value, number: int, element: int | None = None) -> list[Value]:
    """One operand; none if the op has fewer."""
    names = of.op.operands[number : number + 1]
    return [value(of.context, name, element) for name in names]


# ------------------------------------------------------------------ executions


def executions(
    flow: Dataflow, wanted: Callable[[Op], bool]
) -> Iterator[tuple[Context, Op, int | None]]:
    """Some of a program's ops in execution order, from the entry into loops and calls: each in each
    context, and how often it runs; `None` if that depends on data.

    The ops of computations without a caller come last, with an unknown number of executions.
    """
    reached: set[str] = set()

    def visit(context: Context, count: int | None) -> Iterator[tuple[Context, Op, int | None]]:
        reached.add(context.computation.name)
        for op in context.computation.ops.values():
            if wanted(op):
                yield context, op, count
                continue
            for role, names in op.called.items():
                for branch, name in enumerate(names):
                    inner = flow.enter(context, op, name, role, branch)
                    _check_is_no_circle(inner)
                    yield from visit(inner, _times(flow, inner, count))

    yield from visit(Context(flow.program.entry), 1)
    for name, computation in flow.program.computations.items():
        if name not in reached and any(map(wanted, computation.ops.values())):
            yield from visit(Context(computation), None)


def _check_is_no_circle(context: Context) -> None:
    name, outer = context.computation.name, context.caller
    while outer is not None:
        if outer.computation.name == name:
            raise FormatError(
                f"collectives: the computation {name!r} calls itself. The text is damaged."
            )
        outer = outer.caller


def _times(flow: Dataflow, context: Context, count: int | None) -> int | None:
    """How often a computation runs whose caller runs so often."""
    op, caller = context.op, context.caller
    if count is None or op is None or caller is None or context.role == "branches":
        return None  # the choice of a branch depends on data
    if op.opcode != "while":
        return count
    trips = flow.trips(caller, op)
    return None if trips is None else count * (trips + (context.role == "condition"))

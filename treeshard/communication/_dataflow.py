"""Follows a program's values back to the data that they come from, and to the memory that they use.

Names are not enough: compilers rename, fuse and clone ops, and an all-gather of a weight may have
the name of an unrelated op. The operand of the gather can be followed back, op by op, to the
parameter `state['w']` of the program.

A value is an op's result, or an element of the result, in the context of a call. Two questions
share this representation:

1. Where does its data come from? `sources` has one table by opcode. An all-gather passes data on,
   and a product does not.
2. Which memory does it use? `home` follows ops that compute in place. An all-gather has its own
   memory. A `bitcast` or a loop uses the memory of its operand.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treeshard.communication._hlo import Computation, HloProgram, Op
from treeshard.errors import FormatError

_MAX_STEPS = 10_000
# A placeholder without operands, for an op that a text does not have.
_MISSING = Op("", "", "", "")


@dataclass(frozen=True)
class Context:
    """A computation in one of its calls: by `op` in the context `caller`."""

    computation: Computation
    caller: "Context | None" = None
    op: Op | None = None
    role: str = ""
    branch: int = 0


Path = tuple[int, ...]  # the place in nested tuples: `(1, 0)` is the first element of the second


class Value(NamedTuple):
    """The result of an op in its context; if it is a tuple, the element at `path`."""

    context: Context
    op: Op
    path: Path = ()


class Origins(NamedTuple):
    """Where data comes from: the numbers of arguments, whether some is computed, earlier dtypes."""

    arguments: frozenset[int]
    computed: bool
    dtypes: frozenset[str] = frozenset()


def value(context: Context, name: str, path: Path = ()) -> Value:
    return Value(context, context.computation.ops.get(name, _MISSING), path)


def operands(of: Value) -> list[Value]:
    return [value(of.context, name) for name in of.op.operands]


class Dataflow:
    """The origins and the memory of values, and the trip counts of loops, of one program."""

    def __init__(self, program: HloProgram) -> None:
        self.program = program
        self._takes_tuple = program.takes_tuple
        self._users: dict[str, Mapping[str, Sequence[Op]]] = {}
        self._homes: dict[Value, Value] = {}

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
        if self._takes_tuple:
            return at.path[0] if at.path else None
        return at.op.index

    def sources(self, at: Value) -> list[Value]:
        """The values whose data this one passes on unchanged; empty if it is computed."""
        opcode = at.op.opcode
        # `%all-gather-done.1 = f32[16]{0} all-gather-done(%all-gather-start.1)`
        if opcode.endswith("-done"):
            return _find_started(at)
        if opcode.endswith("-update"):
            return _operand(at, 0, at.path)
        follow = _SOURCES.get(at.op.target or opcode.removesuffix("-start"))
        return [] if follow is None else follow(self, at)

    def home(self, at: Value) -> Value:
        """The value whose memory another value uses: itself, unless it is computed in place."""
        passed: list[Value] = []
        while at not in self._homes and len(passed) < _MAX_STEPS:
            passed.append(at)
            source = _find_in_place(self, at)
            if not source:
                break
            [at] = source
        home = self._homes.get(at, at)
        self._homes |= dict.fromkeys(passed, home)
        return home

    def trace(self, at: Value, until: Callable[[Value], bool]) -> Value:
        """Follows the data of `at` back to the first value that meets a condition, or to the last
        value with a single source."""
        for _ in range(_MAX_STEPS):
            if until(at):
                break
            sources = self.sources(at)
            if len(sources) != 1:
                break
            at = sources[0]
        return at

    def _follow_parameter(self, at: Value) -> list[Value]:
        """The arguments that the caller passes for a computation's parameter."""
        context, number = at.context, at.op.index
        op, caller = context.op, context.caller
        if op is None or caller is None or number is None:
            return []
        passed = Value(caller, op, at.path)
        if op.opcode == "while":
            is_test = context.role == "condition"
            return _operand(passed, 0, at.path) if is_test else self._follow_loop(passed, context)
        if op.opcode == "conditional":
            # `conditional(%index, %tuple.1, %tuple.2)`: each branch has one parameter
            return _operand(passed, 1 + context.branch, at.path)
        return _operand(passed, number, at.path)

    def _follow_loop(self, loop: Value, body: Context) -> list[Value]:
        """The sources of an element that a loop carries: its value before the first trip and, if
        trips change it, its value after each trip."""
        start = _operand(loop, 0, loop.path)
        after = result(body, loop.path)
        origin = self.trace(after, lambda each: _is_carried_by(body, each) or not keeps(each.op))
        is_kept = _is_carried_by(body, origin) and origin.path == loop.path
        return start if is_kept else [*start, after]

    def _follow_loop_results(self, loop: Value) -> list[Value]:
        [name] = loop.op.called.get("body", ("",))
        return self._follow_loop(loop, self.enter(loop.context, loop.op, name, "body"))

    def _results(self, at: Value, role: str) -> list[Value]:
        """The results of the computations that an op calls."""
        contexts = [
            self.enter(at.context, at.op, name, role, branch)
            for branch, name in enumerate(at.op.called.get(role, ()))
        ]
        return [result(context, at.path) for context in contexts]

    # ---------------------------------------------------------------- loops

    def trips(self, context: Context, op: Op) -> int | None:
        """The trip count of a `while`: as the text states it, or computed from constant bounds."""
        if op.trips is not None:
            return op.trips
        called = op.called
        roles = "condition", "body"
        condition, body = (self.enter(context, op, called.get(x, ("",))[0], x) for x in roles)
        test = self._resolve(result(condition))
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
        """One side of a loop's condition: its value in the first trip, and its increment per trip.

        Raises `ValueError` if that depends on data.
        """
        path, offset = self._sum(side, loop.condition)
        if path is None:
            return offset, 0
        before = value(loop.at.context, loop.at.op.operands[0], path)
        computed, first = self._sum(before, loop.at.context)
        carried, step = self._sum(result(loop.body, path), loop.body)
        if computed is not None or carried != path:
            raise ValueError
        return first + offset, step

    def _sum(self, at: Value, loop: Context) -> tuple[Path | None, int]:
        """A value as a number, or as an element that a loop carries and a number added to it.

        `%add.3 = s32[] add(%i, %one)`, or `subtract`. Raises `ValueError` for other values.
        """
        number = 0
        at = self._resolve(at)
        for _ in range(_MAX_STEPS):
            if at.op.opcode not in ("add", "subtract"):
                break
            left, right = map(self._resolve, operands(at))
            if at.op.opcode == "add" and left.op.number is not None:
                left, right = right, left
            if right.op.number is None:
                raise ValueError
            number += right.op.number if at.op.opcode == "add" else -right.op.number
            at = left
        if at.op.number is not None:
            return None, at.op.number + number
        if at.op.opcode != "parameter" or at.context is not loop or not at.path:
            raise ValueError
        return at.path, number

    def _resolve(self, at: Value) -> Value:
        """Where a value is computed, or the parameter of a loop that carries it."""
        return self.trace(at, _is_carried_or_part)


def keeps(op: Op) -> bool:
    """Whether the result of an op has the elements of its operand, perhaps in another shape or
    another memory."""
    opcode = op.opcode
    for suffix in ("-start", "-update", "-done"):
        opcode = opcode.removesuffix(suffix)
    return (op.target or opcode) in _KEEPING


def _is_carried_by(body: Context, at: Value) -> bool:
    return at.op.opcode == "parameter" and at.context == body


def _is_carried_or_part(at: Value) -> bool:
    # A loop, also an outer one, may change the values that it carries.
    is_carried = at.op.opcode == "parameter" and at.context.role in ("body", "condition")
    return is_carried or at.op.opcode in _PARTS


def _follow_element(flow: Dataflow, at: Value) -> list[Value]:
    # A combined op moves several arrays. A `-start` may return its operands before its results:
    # `((f32[2], f32[4]), (f32[16], f32[32])) all-gather-start(%x, %y)`.
    names = at.op.operands
    if not at.path or not names:
        return _operand(at, 0)
    return _operand(at, at.path[-1] % len(names))


def _follow_all(flow: Dataflow, at: Value) -> list[Value]:
    return operands(at)


def _follow_call(flow: Dataflow, at: Value) -> list[Value]:
    return flow._results(at, "calls")


def _follow_async_call(flow: Dataflow, at: Value) -> list[Value]:
    # `((f32[8,128]), f32[2,128]) async-start(%doubled)`: what it calls returns the second element.
    return flow._results(at._replace(path=at.path[1:]), "calls")


def _follow_reshape(flow: Dataflow, at: Value) -> list[Value]:
    """The operand, if the op has as many elements, and so only adds or removes dims of size 1."""
    sizes = [[(x.dtype, x.bytes) for x in each.op.types] for each in (at, *_operand(at, 0))]
    return _operand(at, 0) if len(sizes[0]) == 1 and sizes[1:] == sizes[:1] else []


# How each op passes data on, by its opcode without the suffix, as in `copy-start(%param.4)`, or by
# the target of a custom call.
_SOURCES: Mapping[str, Callable[[Dataflow, Value], list[Value]]] = {
    # `%p = (s32[], f32[8]{0}) parameter(0)` of a loop; `%param_1.2 = f32[8]{0} parameter(1)`
    "parameter": Dataflow._follow_parameter,
    # `%w.3 = f32[8]{0} get-tuple-element(%while.28), index=2`
    "get-tuple-element": lambda flow, at: _operand(at, 0, (at.op.index or 0, *at.path)),
    # `%tuple.70 = (s32[], f32[8]{0}) tuple(%constant.3, %copy.2)`
    "tuple": lambda flow, at: _operand(at, at.path[0], at.path[1:]) if at.path else [],
    # `%while.28 = (s32[], f32[8]{0}) while(%tuple.70), condition=%region_1.2, body=%region_0.1`
    "while": lambda flow, at: flow._follow_loop_results(at),
    # `(f32[16]{0}) conditional(%i, %tuple.1, %tuple.2), branch_computations={%region_8, %region_9}`
    "conditional": lambda flow, at: flow._results(at, "branches"),
    # `%fusion.109 = bf16[1024,4096]{1,0} fusion(%param_9.2), kind=kLoop, calls=%bitcast_fusion.27`
    "fusion": _follow_call,
    # `%call.1 = f32[8]{0} call(%x), to_apply=%gathered`: a jitted function in a jitted one
    "call": _follow_call,
    # `((f32[8,128]), f32[2,128]) async-start(%doubled), calls=%async_computation`: GPUs, for ops
    # that have no `-start` of their own
    "async": _follow_async_call,
    # `%concatenate.1 = f32[4096]{0} concatenate(%bitcast.1, %bitcast.2), dimensions={0}`: GPUs join
    # gradients for one all-reduce
    "concatenate": _follow_all,
    # `f32[4,8]{1,0} dynamic-update-slice(%stacked, %layer, %i, %zero)`: how scans stack results.
    # The operands after the first two say where.
    "dynamic-update-slice": lambda flow, at: operands(at)[:2],
    # `%reduce.55 = bf16[256]{0} reduce(%dynamic-slice.82, %zero), dimensions={0}`, of bf16[1,256]:
    # TPUs reshape so
    "reduce": _follow_reshape,
    "broadcast": _follow_reshape,
    # `(f32[8]{0}, f32[4]{0}) opt-barrier(%tuple.3)`: of `lax.optimization_barrier`, also in remat
    "opt-barrier": lambda flow, at: _operand(at, 0, at.path),
    # `f32[1024,512] custom-call(%slice-done.8, %slice-done.9), custom_call_target="ConcatBitcast"`:
    # TPUs copy an array to fast memory in slices, which this joins
    "ConcatBitcast": _follow_all,
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
        _follow_element,
    ),
}
# The ops among them that pass on each element unchanged: see `keeps`. A text may have the others
# between their halves too, such as `%copy-done.28 = f32[256]{0:S(1)} copy-done(%copy-start.28)`,
# with which TPUs bring an array to fast memory.
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
# Ops that return a part of their operand, or join operands. Loop counters are not followed through
# these ops.
_PARTS = ("dynamic-slice", "slice", "concatenate")


class _Loop(NamedTuple):
    """A `while`, and the computations that it calls."""

    at: Value
    condition: Context
    body: Context


def result(context: Context, path: Path = ()) -> Value:
    """The result of a computation."""
    return value(context, context.computation.root, path)


def _operand(of: Value, number: int, path: Path = ()) -> list[Value]:
    """One operand in a list; empty if the op has fewer operands."""
    names = of.op.operands[number : number + 1]
    return [value(of.context, name, path) for name in names]


def _find_started(done: Value) -> list[Value]:
    """The result of a `-done` op, among what its `-start` op returns."""
    opcode = done.op.opcode
    # `%r = (f32[8]{0}, u32[], token[]) recv(%t)`, `%rd = (f32[8]{0}, token[]) recv-done(%r)`; and
    # an all-reduce-start returns its results alone.
    if opcode in ("all-reduce-done", "recv-done"):
        return _operand(done, 0, done.path)
    # `%cs = (f32[8]{0}, f32[8]{0:S(1)}, u32[]) copy-start(%x)` returns the copy first.
    return _operand(done, 0, (0 if opcode == "copy-done" else 1, *done.path))


# ------------------------------------------------------------------ memory

# Ops whose result is in their first operand's memory.
_SAME_MEMORY = frozenset(
    {"add-dependency", "bitcast", "dynamic-update-slice", "opt-barrier", "while"}
)
# The elements of the results of `-start` ops that are in the memory of operands:
#   %ag = (f32[16,128]{1,0}, f32[16,512]{1,0}) all-gather-start(%x), dimensions={1}, ...
#   %rs = ((f32[4096,1024]{1,0}), f32[1024,1024]{1,0}) reduce-scatter-start(%x), ...
#   %ds = ((f32[4,8]{1,0:S(5)}, s32[], s32[]), f32[1,8]{1,0}, u32[]) dynamic-slice-start(%x, %i, %j)
_OPERANDS_AT = {
    "all-gather-start": (0,),
    "collective-permute-start": (0,),
    "copy-start": (1,),
    "dynamic-slice-start": (0,),
    "dynamic-update-slice-start": (0, 1),
    "fusion-start": (0,),
    "reduce-scatter-start": (0,),
    "slice-start": (0,),
}
# output_to_operand_aliasing={{0}: (1, {}), {1}: (0, {2})}: element 0 of the result is operand 1,
# and element 1 is element 2 of operand 0. `{}: (0, {})` is a result that is not a tuple.
_ALIASING = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}\)")


def _find_in_place(flow: Dataflow, at: Value) -> list[Value]:
    """The value in whose memory another one is computed; empty if it has its own memory."""
    opcode = at.op.opcode
    if opcode in ("tuple", "get-tuple-element"):
        return flow.sources(at)
    if opcode in _SAME_MEMORY:
        return _operand(at, 0, at.path)
    if opcode.endswith("-done"):
        return _find_started(at)
    if opcode in ("fusion", "custom-call"):
        return _find_in_place_of_fusion(flow, at)
    if opcode == "call":
        return _find_passed_operand(flow, at)
    if at.path[:1] and at.path[0] in _OPERANDS_AT.get(opcode, ()):
        # one operand of several in a tuple, otherwise the first
        number = at.path[1] if len(at.path) > 1 else 0
        return _operand(at, number, at.path[2:])
    return []


def _find_in_place_of_fusion(flow: Dataflow, at: Value) -> list[Value]:
    aliases = _ALIASING.findall(at.op.attribute("output_to_operand_aliasing"))
    for output, number, element in aliases:
        if not output or at.path[:1] == (int(output),):
            path = (int(element),) if element else ()
            return _operand(at, int(number), (*path, *at.path[1:]))
    if aliases or at.op.opcode != "fusion":
        return []
    # A fusion without aliasing may update a parameter in place:
    #   %big = f32[16,1024]{1,0} parameter(0)
    #   ROOT %new = f32[16,1024]{1,0} dynamic-update-slice(%big, %row, %i, %zero)
    [returned] = flow._results(at, "calls")
    if returned.op.opcode == "tuple":
        [returned] = flow.sources(returned)
    update = flow.trace(returned, lambda each: each.op.opcode not in ("bitcast", "copy"))
    if update.op.opcode != "dynamic-update-slice":
        return []
    target = flow.trace(operands(update)[0], lambda each: each.op.opcode != "bitcast")
    is_parameter = target.op.opcode == "parameter"
    return _operand(at, target.op.index or 0, target.path) if is_parameter else []


def _find_passed_operand(flow: Dataflow, at: Value) -> list[Value]:
    """The operand that a call returns unchanged."""
    # The compiler for CPUs wraps small loops in calls. Their results use their operands' memory:
    #   %while.24_computation (tuple.32: (s32[], f32[8])) -> (s32[], f32[8]) {
    #     %tuple.32 = (s32[], f32[8]{0}) parameter(0)
    #     ROOT %while.30 = (s32[], f32[8]{0}) while(%tuple.32), body=%region_0, ...
    #   }
    #   %call.4 = (s32[], f32[8]{0}) call(%tuple.25), to_apply=%while.24_computation
    [returned] = flow._results(at, "calls")
    origin = flow.home(returned)
    is_parameter = origin.op.opcode == "parameter"
    return _operand(at, origin.op.index or 0, origin.path) if is_parameter else []


# ------------------------------------------------------------------ executions


def executions(
    flow: Dataflow, wanted: Callable[[Op], bool]
) -> Iterator[tuple[Context, Op, int | None]]:
    """Some of a program's ops in execution order, in each context in which they are called.

    Each has the number of its executions, or `None` if the number depends on data. The ops
    of computations without a caller come last, also with `None`.
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
    """How often a computation runs, from how often its caller runs."""
    op, caller = context.op, context.caller
    if count is None or op is None or caller is None or context.role == "branches":
        return None  # the choice of a branch depends on data
    if op.opcode != "while":
        return count
    trips = flow.trips(caller, op)
    return None if trips is None else count * (trips + (context.role == "condition"))

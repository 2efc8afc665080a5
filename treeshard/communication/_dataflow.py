"""Traces a program's values back to their origins, through loops and calls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from treeshard.communication._hlo import Computation, HloProgram, Op
from treeshard.errors import FormatError

# Ops that move the data of their first operand and compute nothing.
_MOVES = frozenset(
    {
        "all-gather",
        "all-to-all",
        "bitcast",
        "bitcast-convert",
        "collective-permute",
        "convert",
        "copy",
        "dynamic-slice",
        "optimization-barrier",
        "reshape",
        "reverse",
        "slice",
        "transpose",
    }
)
# Custom calls that return their first operand.
_MARKERS = frozenset(
    {
        "AsyncCollectiveDone",
        "AsyncCollectiveStart",
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "annotate_device_placement",
    }
)
_MAX_STEPS = 10_000


@dataclass(frozen=True, eq=False)
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
    """The parameters that data comes from; whether it is more; and its earlier dtypes."""

    parameters: frozenset[Op]
    computed: bool
    dtypes: frozenset[str] = frozenset()


def value(context: Context, name: str, element: int | None = None) -> Value | None:
    op = context.computation.ops.get(name)
    return None if op is None else Value(context, op, element)


class Dataflow:
    """The origins of values, and the trip counts of loops, of one program."""

    def __init__(self, program: HloProgram) -> None:
        self.program = program
        self._users: dict[str, dict[str, list[Op]]] = {}

    def enter(self, at: Context, op: Op, name: str, role: str, branch: int = 0) -> Context | None:
        """The context of a computation that `op` calls."""
        computation = self.program.computations.get(name)
        return None if computation is None else Context(computation, at, op, role, branch)

    # ---------------------------------------------------------------- data

    def first_user(self, computation: Computation, op: Op) -> Op | None:
        """The nearest op with a source line that uses a value, itself or through others."""
        if computation.name not in self._users:
            users = self._users[computation.name] = {}
            for user in computation.ops.values():
                for operand in user.operands:
                    users.setdefault(operand, []).append(user)
        users, seen, queue = self._users[computation.name], {op.name}, [op]
        for one in queue:
            for user in users.get(one.name, ()):
                if self.program.source(user) is not None:
                    return user
                if user.name not in seen:
                    seen.add(user.name)
                    queue.append(user)
        return None

    def origins(self, start: Value | None) -> Origins:
        """The parameters of the program whose data a value contains."""
        parameters: set[Op] = set()
        dtypes: set[str] = set()
        computed = False
        seen: set[tuple[Any, ...]] = set()
        queue = [start]
        while queue:
            at = queue.pop()
            if at is None or len(seen) > _MAX_STEPS:
                return Origins(frozenset(parameters), True)
            calls = [(each.computation.name, each.op) for each in _with_callers(at.context)]
            key = (*calls, at.op, at.element)
            if key in seen:
                continue
            seen.add(key)
            if at.op.opcode == "convert":
                dtypes.update(buffer.dtype for buffer in at.op.types)
            if at.op.opcode == "parameter" and at.context.caller is None:
                if at.context.computation is not self.program.entry:
                    return Origins(frozenset(), True)  # its callers are unknown
                parameters.add(at.op)
                continue
            sources = self.sources(at)
            if sources is None:
                computed = True
            else:
                queue += sources
        return Origins(frozenset(parameters), computed, frozenset(dtypes))

    def sources(self, at: Value) -> list[Value | None] | None:
        """The values that this one takes its data from, unchanged; `None` if it is computed."""
        op, context, element = at.op, at.context, at.element
        operands = op.operands
        match op.opcode:
            case "parameter":
                return self._arguments(at)
            case "get-tuple-element":
                return [value(context, operands[0], op.index)] if element is None else None
            case "tuple":
                if element is None or element >= len(operands):
                    return None
                return [value(context, operands[element])]
            case "while":
                if element is None:
                    return None
                start = value(context, operands[0], element)
                return [start, *self._results(context, op, "body", element)]
            case "conditional":
                return self._results(context, op, "branches", element)
            case "fusion" | "call" | "async-start":
                return self._results(context, op, "calls", element) or None
            case "concatenate":
                return [value(context, name) for name in operands]
            case "dynamic-update-slice":
                return [value(context, name) for name in operands[:2]]
            case "custom-call":
                if op.target == "ConcatBitcast":  # how TPUs join the pieces of a copy
                    return [value(context, name) for name in operands]
                is_marker = op.target in _MARKERS
                return [value(context, operands[0])] if is_marker and operands else None
            case "copy-start":  # (destination, source, context)
                return [value(context, operands[0])]
        if op.opcode.endswith(("-done", "-update")):
            return [value(context, operands[0], element)]
        plain = op.opcode.removesuffix("-start")
        if plain not in _MOVES or not operands:
            return None
        if plain == "optimization-barrier":
            return [value(context, operands[0], element)]
        # A combined op moves several arrays. A `-start` returns its operands before its results.
        number = 0 if element is None else element % len(operands)
        return [value(context, operands[number])]

    def _arguments(self, at: Value) -> list[Value | None] | None:
        """The arguments that the caller passes for a computation's parameter."""
        context, number = at.context, at.op.index
        op, caller = context.op, context.caller
        if op is None or caller is None or number is None:
            return None
        if op.opcode == "while":
            if at.element is None:
                return None
            again = [] if context.role == "condition" else [_result(context, at.element)]
            return [value(caller, op.operands[0], at.element), *again]
        position = 1 + context.branch if op.opcode == "conditional" else number
        if position >= len(op.operands):
            return None
        return [value(caller, op.operands[position], at.element)]

    def _results(
        self, context: Context, op: Op, role: str, element: int | None
    ) -> list[Value | None]:
        results: list[Value | None] = []
        for branch, name in enumerate(op.called.get(role, ())):
            callee = self.enter(context, op, name, role, branch)
            results.append(None if callee is None else _result(callee, element))
        return results

    # ---------------------------------------------------------------- loops

    def trips(self, context: Context, op: Op) -> int | None:
        """The trip count of a `while`: as stated, or computed if it counts between constants."""
        if op.trips is not None:
            return op.trips
        condition, body = (
            self.enter(context, op, op.called.get(role, ("",))[0], role)
            for role in ("condition", "body")
        )
        if condition is None or body is None:
            return None
        test = self._resolve(_result(condition, None), condition)
        if test is None or test.op.opcode != "compare":
            return None
        sides = [self._resolve(value(test.context, name), condition) for name in test.op.operands]
        direction = test.op.attribute("direction")
        counter, limit = sides if len(sides) == 2 else (None, None)
        if counter is None or limit is None or not direction:
            return None
        if counter.op.opcode != "parameter":
            counter, limit = limit, counter
            direction = direction.translate(str.maketrans("LG", "GL"))
        element = _carried(counter, condition)
        if element is None:
            return None
        return _count(
            self._constant(value(context, op.operands[0], element)),
            self._limit(limit, condition, body, op, context),
            self._step(body, element),
            direction,
        )

    def _limit(
        self, at: Value, condition: Context, body: Context, loop: Op, context: Context
    ) -> int | None:
        if (element := _carried(at, condition)) is None:
            return self._constant(at)
        # A carried value is a limit only if the body returns it unchanged.
        if _carried(self._resolve(_result(body, element), body), body) != element:
            return None
        return self._constant(value(context, loop.operands[0], element))

    def _step(self, body: Context, element: int) -> int | None:
        new = self._resolve(_result(body, element), body)
        if new is None or new.op.opcode not in ("add", "subtract"):
            return None
        sides = [self._resolve(value(new.context, name), body) for name in new.op.operands]
        if len(sides) != 2:
            return None
        if new.op.opcode == "add" and _carried(sides[1], body) == element:
            sides = sides[::-1]
        if _carried(sides[0], body) != element:
            return None
        step = self._constant(sides[1])
        return -step if step is not None and new.op.opcode == "subtract" else step

    def _constant(self, at: Value | None) -> int | None:
        at = self._resolve(at, None)
        return None if at is None else at.op.number

    def _resolve(self, at: Value | None, stop: Context | None) -> Value | None:
        """Follows moved data back to where it is computed, or to a parameter of `stop`."""
        for _ in range(_MAX_STEPS):
            if at is None or (at.op.opcode == "parameter" and at.context is stop):
                return at
            if at.op.opcode in ("while", "dynamic-slice", "slice", "concatenate"):
                return at
            if at.op.opcode == "parameter" and at.context.role in ("body", "condition"):
                # Of an outer loop, which may change what it carries.
                return at
            sources = self.sources(at)
            if sources is None or len(sources) != 1:
                return at
            at = sources[0]
        return None


class Executions:
    """Finds some of a program's ops in execution order, from the entry into loops and calls."""

    def __init__(self, flow: Dataflow, wanted: Callable[[Op], bool]) -> None:
        self.flow, self.program = flow, flow.program
        # By computation, in order: the wanted ops, and the calls of others as (role, branch, name).
        self._steps: dict[str, list[tuple[Op, tuple[str, int, str] | None]]] = {}
        callers: dict[str, list[str]] = {}
        for name, computation in self.program.computations.items():
            steps = self._steps[name] = []
            for op in computation.ops.values():
                if wanted(op):
                    steps.append((op, None))
                    continue
                for role, callees in op.called.items():
                    for branch, callee in enumerate(callees):
                        steps.append((op, (role, branch, callee)))
                        callers.setdefault(callee, []).append(name)
        self._wanted = [
            name for name, steps in self._steps.items() if any(call is None for _, call in steps)
        ]
        # The computations that run a wanted op, themselves or in what they call.
        self._holding, queue = set(self._wanted), [*self._wanted]
        while queue:
            new = set(callers.get(queue.pop(), ())) - self._holding
            self._holding |= new
            queue += new
        self._reached: set[str] = set()

    def all(self) -> Iterator[tuple[Context, Op, int | None]]:
        """Each op in each context, and how often it runs; `None` if that depends on data.

        The ops of computations without a caller come last, with an unknown number of executions.
        """
        yield from self._visit(Context(self.program.entry), 1)
        for name in self._wanted:
            if name not in self._reached:
                yield from self._visit(Context(self.program.computations[name]), None)

    def _visit(
        self, context: Context, count: int | None
    ) -> Iterator[tuple[Context, Op, int | None]]:
        name = context.computation.name
        self._reached.add(name)
        for op, call in self._steps[name]:
            if call is None:
                yield context, op, count
                continue
            role, branch, callee = call
            if callee not in self._holding:
                continue
            if any(each.computation.name == callee for each in _with_callers(context)):
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


def _with_callers(context: Context | None) -> Iterator[Context]:
    while context is not None:
        yield context
        context = context.caller


def _result(context: Context, element: int | None) -> Value | None:
    return value(context, context.computation.root, element)


def _carried(at: Value | None, loop: Context) -> int | None:
    """The number of the carried value that this is: an element of the loop's parameter."""
    is_parameter = at is not None and at.op.opcode == "parameter" and at.context is loop
    return at.element if at is not None and is_parameter else None


def _count(first: int | None, limit: int | None, step: int | None, direction: str) -> int | None:
    if first is None or limit is None or not step:
        return None
    if direction not in ("LT", "LE", "GT", "GE") or (step > 0) != direction.startswith("L"):
        return None
    distance = (limit - first if step > 0 else first - limit) + direction.endswith("E")
    return max(0, -(-distance // abs(step)))

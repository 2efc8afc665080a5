"""Traces a program's values back to their origins, through loops and calls."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from treeshard.communication.program import Computation, Op, Program

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
_MARKERS = frozenset(
    {
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "xla.sdy.GlobalToLocalShape",
        "xla.sdy.LocalToGlobalShape",
        "xla.sdy.FuncResultSharding",
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
    """The result of an op in its context; if there are several, the one numbered `element`."""

    context: Context
    op: Op
    element: int | None = None


class Origins(NamedTuple):
    """The parameters of the program that data comes from; `computed` if not from them alone."""

    parameters: frozenset[str]
    computed: bool


def value(context: Context, ref: str, element: int | None = None) -> Value | None:
    """The value of a name; StableHLO's `6#5` is result 5 of `6`."""
    name, _, which = ref.partition("#")
    scope: Context | None = context
    while scope is not None:
        op = scope.computation.ops.get(name)
        if op is not None:
            return Value(scope, op, int(which) if which else element)
        scope = scope.caller if scope.computation.inside is not None else None
    return None


class Dataflow:
    """The origins of values, and the trip counts of loops, of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def enter(self, at: Context, op: Op, name: str, role: str, branch: int) -> Context | None:
        """The context of a computation that `op` calls."""
        computation = self.program.computations.get(name)
        if computation is None:
            return None
        return Context(computation, at, op, role, branch)

    # ---------------------------------------------------------------- data

    def origins(self, context: Context, ref: str) -> Origins:
        """The parameters of the program whose data a value contains."""
        parameters: set[str] = set()
        computed = False
        seen: set[tuple[object, ...]] = set()
        start = value(context, ref)
        queue = [start]
        while queue:
            at = queue.pop()
            if at is None or len(seen) > _MAX_STEPS:
                return Origins(frozenset(parameters), True)
            key = (*self._key(at.context), at.op.name, at.element)
            if key in seen:
                continue
            seen.add(key)
            if at.op.opcode == "parameter" and at.context.caller is None:
                if at.context.computation.name != self.program.entry:
                    return Origins(frozenset(), True)  # its callers are unknown
                parameters.add(at.op.name)
                continue
            sources = self._sources(at)
            if sources is None:
                computed = True
            else:
                queue += sources
        return Origins(frozenset(parameters), computed)

    def _key(self, context: Context) -> Iterator[str]:
        scope: Context | None = context
        while scope is not None:
            yield scope.computation.name
            yield "" if scope.op is None else scope.op.name
            scope = scope.caller

    def _sources(self, at: Value) -> list[Value | None] | None:
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
                before = self._carried(context, op, element)
                return [before, *self._results(context, op, "body", element)]
            case "conditional":
                return self._results(context, op, "branches", element)
            case "fusion" | "call" | "async-start":
                return self._results(context, op, "calls", element) or None
            case "concatenate":
                return [value(context, ref) for ref in operands]
            case "dynamic-update-slice":
                return [value(context, ref) for ref in operands[:2]]
            case "custom-call":
                target = op.attribute("custom_call_target") or ""
                is_marker = target.strip('"') in _MARKERS
                return [value(context, operands[0])] if is_marker and operands else None
            case "copy-start":  # (destination, source, context)
                return [value(context, operands[0])]
        plain = op.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        if op.opcode.endswith(("-done", "-update")):
            return [value(context, operands[0], element)]
        if plain not in _MOVES or not operands:
            return None
        if self.program.tupled and plain == "optimization-barrier":
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
            element = at.element if self.program.tupled else number
            if element is None:
                return None
            again = [] if context.role == "condition" else [self._result(context, element)]
            return [self._carried(caller, op, element), *again]
        position = 1 + context.branch if op.opcode == "conditional" else number
        if position >= len(op.operands):
            return None
        return [value(caller, op.operands[position], at.element)]

    def _carried(self, context: Context, op: Op, element: int) -> Value | None:
        """The initial value of what a loop carries."""
        if self.program.tupled:
            return value(context, op.operands[0], element)
        return value(context, op.operands[element]) if element < len(op.operands) else None

    def _result(self, context: Context, element: int | None) -> Value | None:
        results = context.computation.results
        if self.program.tupled:
            return value(context, results[0], element) if results else None
        position = element or 0
        return value(context, results[position]) if position < len(results) else None

    def _results(
        self, context: Context, op: Op, role: str, element: int | None
    ) -> list[Value | None]:
        results: list[Value | None] = []
        for branch, name in enumerate(op.called.get(role, ())):
            callee = self.enter(context, op, name, role, branch)
            results.append(None if callee is None else self._result(callee, element))
        return results

    # ---------------------------------------------------------------- loops

    def trips(self, context: Context, op: Op) -> int | None:
        """The trip count of a `while`: as stated, or computed if it counts between constants."""
        if op.trips is not None:
            return op.trips
        condition, body = (
            self.enter(context, op, name, "condition", 0)
            for name in (op.called.get(role, ("",))[0] for role in ("condition", "body"))
        )
        if condition is None or body is None:
            return None
        test = self._resolve(self._result(condition, None), condition)
        if test is None or test.op.opcode != "compare":
            return None
        sides = [self._resolve(value(test.context, ref), condition) for ref in test.op.operands]
        direction = test.op.attribute("direction")
        counter, limit = sides if len(sides) == 2 else (None, None)
        if counter is None or limit is None or direction is None:
            return None
        if counter.op.opcode != "parameter":
            counter, limit = limit, counter
            direction = direction.translate(str.maketrans("LG", "GL"))
        element = self._slot(counter)
        if element is None or counter.context is not condition:
            return None
        return _count(
            self._constant(self._carried(context, op, element)),
            self._limit(limit, condition, op, context),
            self._step(body, element),
            direction,
        )

    def _slot(self, at: Value) -> int | None:
        """The number of the carried value that a parameter of a loop is."""
        if at.op.opcode != "parameter":
            return None
        return at.element if self.program.tupled else at.op.index

    def _limit(self, at: Value, condition: Context, loop: Op, context: Context) -> int | None:
        if (element := self._slot(at)) is None or at.context is not condition:
            return self._constant(at)
        # A carried value is a limit only if the body returns it unchanged.
        body = self.enter(context, loop, loop.called["body"][0], "body", 0)
        kept = None if body is None else self._resolve(self._result(body, element), body)
        if kept is None or kept.context is not body or self._slot(kept) != element:
            return None
        return self._constant(self._carried(context, loop, element))

    def _step(self, body: Context, element: int) -> int | None:
        new = self._resolve(self._result(body, element), body)
        if new is None or new.op.opcode not in ("add", "subtract"):
            return None
        sides = [self._resolve(value(new.context, ref), body) for ref in new.op.operands]
        if len(sides) != 2:
            return None
        if new.op.opcode == "add" and sides[1] is not None and sides[1].context is body:
            sides = sides[::-1] if self._slot(sides[1]) == element else sides
        old, by = sides
        if old is None or old.context is not body or self._slot(old) != element:
            return None
        step = self._constant(by)
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
            sources = self._sources(at)
            if sources is None or len(sources) != 1:
                return at
            at = sources[0]
        return None


def _count(first: int | None, limit: int | None, step: int | None, direction: str) -> int | None:
    if first is None or limit is None or not step:
        return None
    if direction not in ("LT", "LE", "GT", "GE") or (step > 0) != direction.startswith("L"):
        return None
    distance = (limit - first if step > 0 else first - limit) + direction.endswith("E")
    return max(0, -(-distance // abs(step)))

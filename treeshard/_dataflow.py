"""Walks a program's values back to where they come from, through loops and calls."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from treeshard._program import Computation, Op, Program

# Ops whose result is the data of their first operand, moved.
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
    """A computation as it is run from one place: by `op` of the context `caller`."""

    computation: Computation
    caller: "Context | None" = None
    op: Op | None = None
    role: str = ""
    branch: int = 0


class Value(NamedTuple):
    """An op's result, in its context; `element` is which one, if it has several."""

    context: Context
    op: Op
    element: int | None = None


class Origins(NamedTuple):
    """Where data comes from: parameters of the program, and whether it was computed too."""

    parameters: frozenset[str]
    computed: bool


def value(context: Context, ref: str, element: int | None = None) -> Value | None:
    """What a name stands for: StableHLO's `6#5` is the fifth result of `6`."""
    name, _, which = ref.partition("#")
    here: Context | None = context
    while here is not None:
        op = here.computation.ops.get(name)
        if op is not None:
            return Value(here, op, int(which) if which else element)
        here = here.caller if here.computation.inside is not None else None
    return None


class Dataflow:
    """Answers questions about one program's values."""

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
        """The program's parameters whose data a value is, if it is moved data only."""
        found: set[str] = set()
        computed = False
        seen: set[tuple[object, ...]] = set()
        start = value(context, ref)
        queue = [start]
        while queue:
            at = queue.pop()
            if at is None or len(seen) > _MAX_STEPS:
                return Origins(frozenset(found), True)
            key = (*self._key(at.context), at.op.name, at.element)
            if key in seen:
                continue
            seen.add(key)
            if at.op.opcode == "parameter" and at.context.caller is None:
                if at.context.computation.name != self.program.entry:
                    return Origins(frozenset(), True)  # nobody is known to call it
                found.add(at.op.name)
                continue
            sources = self._sources(at)
            if sources is None:
                computed = True
            else:
                queue += sources
        return Origins(frozenset(found), computed)

    def _key(self, context: Context) -> Iterator[str]:
        here: Context | None = context
        while here is not None:
            yield here.computation.name
            yield "" if here.op is None else here.op.name
            here = here.caller

    def _sources(self, at: Value) -> list[Value | None] | None:
        """The values whose data this one is; `None` if it is computed."""
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
                known = op.attribute("custom_call_target") or ""
                moved = known.strip('"') in _MARKERS
                return [value(context, operands[0])] if moved and operands else None
            case "copy-start":  # (to, from, a token)
                return [value(context, operands[0])]
        plain = op.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        if op.opcode.endswith(("-done", "-update")):
            return [value(context, operands[0], element)]
        if plain not in _MOVES or not operands:
            return None
        if self.program.tupled and plain == "optimization-barrier":
            return [value(context, operands[0], element)]
        # Combined ops move several arrays; a `-start` gives its operands before its results.
        number = 0 if element is None else element % len(operands)
        return [value(context, operands[number])]

    def _arguments(self, at: Value) -> list[Value | None] | None:
        """What a called computation's parameter is, where it is called."""
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
        place = 1 + context.branch if op.opcode == "conditional" else number
        if place >= len(op.operands):
            return None
        return [value(caller, op.operands[place], at.element)]

    def _carried(self, context: Context, op: Op, element: int) -> Value | None:
        """What a loop starts with."""
        if self.program.tupled:
            return value(context, op.operands[0], element)
        return value(context, op.operands[element]) if element < len(op.operands) else None

    def _result(self, context: Context, element: int | None) -> Value | None:
        results = context.computation.results
        if self.program.tupled:
            return value(context, results[0], element) if results else None
        place = element or 0
        return value(context, results[place]) if place < len(results) else None

    def _results(
        self, context: Context, op: Op, role: str, element: int | None
    ) -> list[Value | None]:
        found: list[Value | None] = []
        for branch, name in enumerate(op.called.get(role, ())):
            inside = self.enter(context, op, name, role, branch)
            found.append(None if inside is None else self._result(inside, element))
        return found

    # ---------------------------------------------------------------- loops

    def trips(self, context: Context, op: Op) -> int | None:
        """How often a `while` runs: by its own word, or if it counts between constants."""
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
        """Which carried value of its loop a parameter is."""
        if at.op.opcode != "parameter":
            return None
        return at.element if self.program.tupled else at.op.index

    def _limit(self, at: Value, condition: Context, loop: Op, context: Context) -> int | None:
        if (element := self._slot(at)) is None or at.context is not condition:
            return self._constant(at)
        # Carried, and a limit only if the body hands it on as it is.
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
        """Follows moved data to where it is computed, or to a parameter of `stop`."""
        for _ in range(_MAX_STEPS):
            if at is None or (at.op.opcode == "parameter" and at.context is stop):
                return at
            if at.op.opcode in ("while", "dynamic-slice", "slice", "concatenate"):
                return at
            if at.op.opcode == "parameter" and at.context.role in ("body", "condition"):
                # Of a loop further out: what it carries may change.
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

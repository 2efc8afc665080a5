"""Findings about the values of a step: what moves, or takes memory, without need.

The trace has what the code asks for; where axes are Auto, the compiled program has what became of
it. A finding needs both where the trace alone could be right: a constraint moves nothing if the
compiler had split the value so already.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AxisType, PartitionSpec

from treeshard._core.mesh import axes_of_type
from treeshard._core.specs import all_axes, entries, entry_of
from treeshard._core.text import human_bytes
from treeshard._trace.lines import CONSTRAINTS, Trace, TracedValue
from treeshard._trace.uses import GATHERS, bodies
from treeshard._trace.values import ELEMENTWISE
from treeshard.errors import counted
from treeshard.programs._memory import LiveBuffer
from treeshard.programs._places import dims_of_text

LEAST = 2**20  # bytes that are worth a finding, as of the warning about activations
_LEAST_AT_PEAK = 2**24
_SHARE_OF_PEAK = 0.5


class ValueFinding(NamedTuple):
    """Something about a value of a step that costs time or memory without need.

    Attributes:
        code: `"replicated"` (over an axis of the batch), `"resharded-twice"`,
            `"gathered-to-reduce"` (gathered for a sum that each device could do for its part),
            `"reduced-in-loop"`, `"reduced-twice"`, `"widened"` (to float32, and then moved) or
            `"dominates-peak"`.
        line: The line of the user's code, as `file:line`.
        bytes: What it costs on one device: bytes that are stored or moved, for one execution.
        fact: What was found.
        fix: What to do about it.

    Examples:
        >>> print(ts.programs.ValueFinding("widened", "model.py:7", 2**20, "It is wide.", "Cast."))
        widened: model.py:7: It is wide. Cast.
    """

    code: str
    line: str
    bytes: int
    fact: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: {self.line}: {self.fact} {self.fix}"


_WORDS = {
    "replicated": (
        "{array} has the rows of the batch, and is replicated over {axes}, {size} on each device"
        "{more}.",
        "Constrain it to the axes of the batch where it is made:"
        " `with_sharding_constraint(x, P({batch}))`.",
    ),
    "resharded-twice": (
        "{array} is moved from {before} to {between}, and from there at once to {after} at {next}:"
        " {size} on each device in between.",
        "Remove the first of the two, or move it to where its sharding is used.",
    ),
    "gathered-to-reduce": (
        "{array} is gathered over {axes}, {size} on each device, and then only reduced.",
        "Reduce it as it is sharded: each device reduces its part, and one small sum follows.",
    ),
    "reduced-in-loop": (
        "{array} is summed over {axes} in each of {trips} trips, {size} each, before it is added to"
        " what the loop carries.",
        "Add first, and sum once after the loop: keep what is carried `unreduced`"
        " (`accumulate_gradients` does).",
    ),
    "reduced-twice": (
        "{array} is summed over {axes} {count} times, {size} each.",
        "Sum it once, and use the result.",
    ),
    "widened": (
        "{array} is widened from {narrow}, and then moved from {before} to {after}: {size} on each"
        " device, {times}x as much as before.",
        "Move it first, and widen the result.",
    ),
    "dominates-peak, logits": (
        "{array} and what is computed from it take {size} of {total} that are live at the peak.",
        "Compute the loss for a part of the rows at a time, in a scan with `jax.checkpoint`; or"
        " split the vocabulary over an axis.",
    ),
    "dominates-peak, scores": (
        "{array} and what is computed from it take {size} of {total} that are live at the peak.",
        "Use an attention that does not store the scores (`jax.nn.dot_product_attention`, a flash"
        " kernel), or put `jax.checkpoint` around it.",
    ),
}


class Known(NamedTuple):
    """A value of the trace with its spec and the elements of one device's part; `None` if unknown.

    `axes` are those that split it, by type, by hand or in the program.
    """

    value: TracedValue
    spec: PartitionSpec | None
    axes: frozenset[str] | None
    elements: int | None

    @property
    def bytes(self) -> int:
        """Of one device's part; 0 if that is unknown, which no finding reaches."""
        return (self.elements or 0) * self.value.dtype.itemsize


class Findings:
    """Looks for findings among the values of one step.

    Args:
        trace: The values of the trace, and their uses.
        known: What is known of each.
        sizes: The sizes of the mesh axes.
        batch: The axes that split the batch.
        rows: The lengths of the dims of the batch that are split.
        at_peak: What is live at the peak of the compiled program; nothing before it is compiled.
    """

    def __init__(
        self,
        trace: Trace,
        known: Sequence[Known],
        sizes: Mapping[str, int],
        batch: Collection[str],
        rows: Collection[int],
        at_peak: Sequence[LiveBuffer] = (),
    ) -> None:
        self.trace, self.known, self.sizes = trace, known, sizes
        self.batch, self.rows, self.at_peak = batch, rows, at_peak
        self._by_variable = {id(x.value.eqn.outvars[x.value.number]): x for x in known}

    def all(self) -> Iterator[ValueFinding]:
        """All findings, in the order of the trace."""
        yield from self._replicated()
        for x in self.known:
            yield from self._of_move(x)
        yield from self._dominating()

    # ---------------------------------------------------------------- replicated

    def _replicated(self) -> Iterator[ValueFinding]:
        """Values with the rows of the batch that are replicated over its axes: the first of them,
        since what is computed from it follows."""
        found = [(x, axes) for x in self.known if (axes := self._needless(x))]
        if not found:
            return
        first, axes = found[0]
        lines = {x.value.line for x, _ in found} - {first.value.line}
        more = f", as at {counted(len(lines), 'line')} after it" if lines else ""
        yield _finding("replicated", first, axes=_listed(axes), more=more, batch=_entry(self.batch))

    def _needless(self, x: Known) -> list[str]:
        """The axes of the batch over which a value with its rows is replicated."""
        value = x.value
        if x.axes is None or x.bytes < LEAST:
            return []
        if not value.known.is_of_batch or value.known.leaves or not self._has_rows(value):
            return []
        split = x.axes | value.by_hand
        return [axis for axis in self.batch if self.sizes[axis] > 1 and axis not in split]

    def _has_rows(self, value: TracedValue) -> bool:
        by_hand = math.prod(self.sizes[axis] for axis in value.by_hand)
        rows = {length // by_hand for length in self.rows}
        return len(value.shape) > 1 and not rows.isdisjoint(value.shape)

    # ---------------------------------------------------------------- moved

    def _of_move(self, x: Known) -> Iterator[ValueFinding]:
        """What is wrong with a value that is another one, split otherwise."""
        if not _is_move(x.value) or x.spec is None:
            return
        before = self._spec_of(x.value.eqn.invars[0])
        if before is None or _is_same(before, x.spec):
            return
        yield from self._resharded(x, before)
        yield from self._widened(x, before)
        yield from self._only_reduced(x, before)
        yield from self._summed(x, before)

    def _spec_of(self, variable: Any) -> PartitionSpec | None:
        """The spec of a variable; `None` if it is unknown."""
        if isinstance(variable, Literal):
            return None
        known = self._by_variable.get(id(variable))
        if known is not None:
            return known.spec
        sharding = variable.aval.sharding  # of an argument
        return None if axes_of_type(sharding.mesh, AxisType.Auto) else sharding.spec

    def _made_from(self, x: Known) -> Known | None:
        """What a move takes, behind constraints that move nothing, as `unshard` has one."""
        source = self._by_variable.get(id(x.value.eqn.invars[0]))
        while source is not None and source.value.eqn.primitive.name in CONSTRAINTS:
            before = self._by_variable.get(id(source.value.eqn.invars[0]))
            if before is None or before.spec is None or source.spec is None:
                return source
            if not _is_same(before.spec, source.spec):
                return source
            source = before
        return source

    def _resharded(self, x: Known, before: PartitionSpec) -> Iterator[ValueFinding]:
        value = x.value
        uses = self.trace.uses.get(id(value.eqn.outvars[0]), ())
        nexts = [use for use, _ in uses]
        if len(nexts) != 1 or nexts[0] is None or nexts[0].primitive.name not in CONSTRAINTS:
            return
        after = self._by_variable.get(id(nexts[0].outvars[0]))
        if after is None or after.spec is None:
            return
        assert x.spec is not None
        if x.bytes >= LEAST and not _is_same(after.spec, x.spec) and not _is_sum(before, x.spec):
            yield _finding(
                *("resharded-twice", x),
                before=before,
                between=x.spec,
                after=after.spec,
                next=after.value.line,
            )

    def _widened(self, x: Known, before: PartitionSpec) -> Iterator[ValueFinding]:
        source = self._made_from(x)
        if source is None or source.value.eqn.primitive.name != "convert_element_type":
            return
        narrow, wide = source.value.eqn.invars[0].aval.dtype, x.value.dtype
        both_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (narrow, wide))
        if both_floats and narrow.itemsize < wide.itemsize and x.bytes >= LEAST:
            times = wide.itemsize // narrow.itemsize
            yield _finding("widened", x, before=before, after=x.spec, narrow=narrow, times=times)

    def _only_reduced(self, x: Known, before: PartitionSpec) -> Iterator[ValueFinding]:
        assert x.spec is not None
        gathered = [axis for axis in all_axes(entries(before)) if axis not in _axes(x.spec)]
        if not gathered or x.bytes < LEAST:
            return
        if self._is_only_reduced(x.value.eqn.outvars[0]):
            yield _finding("gathered-to-reduce", x, axes=_listed(gathered))

    def _is_only_reduced(self, variable: Any) -> bool:
        """Whether the forward pass reduces a value, and does nothing else but ops on each element
        before; what the backward pass does with it is of that reduction."""
        queue, is_reduced = [variable], False
        for each in queue:
            for eqn, region in self.trace.uses.get(id(each), ()):
                if region == "backward":
                    continue
                if eqn is None:  # a program returns it
                    return False
                names = _names(eqn)
                others = [name for name in names if not name.startswith("reduce_")]
                if not ELEMENTWISE.issuperset(others) or len(queue) > _MOST_OPS:
                    return False
                if len(others) < len(names):
                    is_reduced = True
                else:
                    queue += eqn.outvars
        return is_reduced

    def _summed(self, x: Known, before: PartitionSpec) -> Iterator[ValueFinding]:
        """Sums of an `unreduced` value."""
        value = x.value
        assert x.spec is not None
        summed = sorted({*before.unreduced} - {*x.spec.unreduced})
        if not summed or x.bytes < LEAST:
            return
        facts = {"axes": _listed(summed)}
        uses = [eqn for eqn, _ in self.trace.uses.get(id(value.eqn.invars[0]), ())]
        moves = [eqn for eqn in uses if eqn is not None and eqn.primitive.name in CONSTRAINTS]
        if len(moves) > 1 and moves[0] is value.eqn:
            yield _finding("reduced-twice", x, count=len(moves), **facts)
        if value.place.loop and value.place.trips > 1 and self._is_added_up(value):
            yield _finding("reduced-in-loop", x, trips=value.place.trips, **facts)

    def _is_added_up(self, value: TracedValue) -> bool:
        """Whether a loop adds a value to what it carries, which is an argument of its program."""
        uses = [eqn for eqn, _ in self.trace.uses.get(id(value.eqn.outvars[0]), ())]
        adds = [eqn for eqn in uses if eqn is not None and eqn.primitive.name in ("add", "add_any")]
        others = [x for eqn in adds for x in eqn.invars if x is not value.eqn.outvars[0]]
        carried = {id(x) for inner in bodies(value.place.within[-1]) for x in inner.invars}
        return any(id(x) in carried for x in others)

    # ---------------------------------------------------------------- the peak

    def _dominating(self) -> Iterator[ValueFinding]:
        """A product of matrices that is much larger than both, if it is most of the peak."""
        total = sum(buffer.bytes for buffer in self.at_peak)
        of_size = Counter[int]()
        for buffer in self.at_peak:
            of_size[_elements(buffer.array)] += buffer.bytes
        for x in self.known:
            size = of_size[x.elements or 0]
            is_product = x.value.op == "dot_general" and x.value.region != "backward"
            if not is_product or size < max(_LEAST_AT_PEAK, _SHARE_OF_PEAK * total):
                continue
            operands = x.value.eqn.invars[:2]
            if math.prod(x.value.shape) < 2 * max(math.prod(y.aval.shape) for y in operands):
                continue
            sources = [self._by_variable.get(id(y)) for y in operands]
            is_of_leaf = any(y is not None and y.value.known.leaves for y in sources)
            row = f"dominates-peak, {'logits' if is_of_leaf else 'scores'}"
            yield _finding(row, x, total=human_bytes(total))._replace(bytes=size)
            return


_MOST_OPS = 16


def _elements(array: str) -> int:
    return math.prod(dims_of_text(array))


def _names(eqn: Any) -> list[str]:
    """The operations of an equation, or of the programs in it."""
    inner = [name for body in bodies(eqn) for each in body.eqns for name in _names(each)]
    return inner or [eqn.primitive.name]


def _is_move(value: TracedValue) -> bool:
    """Whether it is a constraint, or a gather of the library, which is a `shard_map`."""
    name = value.eqn.primitive.name
    return name in CONSTRAINTS or (name == "shard_map" and value.op in GATHERS)


def _axes(spec: PartitionSpec) -> list[str]:
    return all_axes(entries(spec))


def _is_same(first: PartitionSpec, second: PartitionSpec) -> bool:
    """Whether two specs say the same, whatever the gradient does."""
    return _trimmed(first) == _trimmed(second) and {*first.unreduced} == {*second.unreduced}


def _trimmed(spec: PartitionSpec) -> list[Any]:
    dims = list(entries(spec))
    while dims and dims[-1] is None:
        dims.pop()
    return dims


def _is_sum(before: PartitionSpec, after: PartitionSpec) -> bool:
    return {*before.unreduced} != {*after.unreduced}


def _listed(axes: Collection[str]) -> str:
    return ", ".join(map(repr, axes))


def _entry(axes: Collection[str]) -> str:
    """`'fsdp'` or `('data', 'fsdp')`, as a spec splits one dim over them."""
    return repr(entry_of([*axes]))


def _finding(row: str, x: Known, **words: Any) -> ValueFinding:
    shape = ",".join(map(str, x.value.shape))
    words = {"array": f"{x.value.dtype}[{shape}]", "size": human_bytes(x.bytes), **words}
    fact, fix = (text.format(**words) for text in _WORDS[row])
    return ValueFinding(row.partition(",")[0], x.value.line, x.bytes, fact, fix)

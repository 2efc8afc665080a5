"""The values between the arguments and the results of a step, one row for each line and type.

A plan explains the leaves of a state. What lies between is as large, and its sharding comes from
types on Explicit axes, and from the compiler on Auto axes. On Explicit axes the trace suffices:
nothing has to be compiled to read it.
"""

import html
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._core.text import columns, fold_paths, html_table, human_bytes, is_line
from treeshard._planning.plan import Plan
from treeshard._planning.tactics import DEFAULT_MIN_SIZE
from treeshard._trace.lines import TracedValue, shard_shape
from treeshard._trace.uses import region_of
from treeshard.communication._hlo import HloProgram
from treeshard.errors import counted
from treeshard.programs._memory import LiveBuffer
from treeshard.programs._places import (
    Split,
    dims_of_text,
    key_of,
    ops_by_line,
    placed,
    split_of_type,
)

_SHOWN = 60  # rows of a table


class StepValue(NamedTuple):
    """The values of one type that a line of a step makes.

    Attributes:
        line: The line of the user's code, as `file:line`; empty if JAX knows none.
        part: `"forward"` or `"backward"` for what is differentiated, else `"update"`.
        name: The names of `jax.named_scope` around it, or the leaf of which it is, if any.
        ops: The operations of JAX that make it.
        dtype: Its dtype.
        shape: Its shape as the code sees it: in `shard_map`, that of one device's part.
        local_shape: The shape of one device's part; `None` if that is unknown.
        spec: Its spec; `None` if that is unknown.
        axes: The mesh axes that split it; `None` if that is unknown.
        by_hand: The axes of `shard_map` along which devices may have different ones.
        bytes: The bytes of one of them on one device; `None` if that is unknown.
        times: How often one is made in a step; `None` if that depends on data.
        where: `"memory"` in a compiled program; `"fused"` if it is computed inside of another op
            and never stored; `"absent"` if no op of the program has its line and a part of its
            shape; empty before the step is compiled.
        at_peak: Whether one is live when the program needs most memory; `None` before it is
            compiled, and if its bytes are unknown.
        function: The function that has the line, such as `Block.__call__`; empty if JAX knows none.

    Examples:
        >>> value = ts.programs.StepValue(
        ...     "model.py:7", "forward", "mlp", ("dot_general",), "float32", (64, 128), (8, 128),
        ...     P("fsdp"), ("fsdp",), (), 4096, 12, "", None
        ... )
        >>> value.total_bytes
        49152
    """

    line: str
    part: str
    name: str
    ops: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...] | None
    spec: PartitionSpec | None
    axes: tuple[str, ...] | None
    by_hand: tuple[str, ...]
    bytes: int | None
    times: int | None
    where: str
    at_peak: bool | None
    function: str = ""

    @property
    def total_bytes(self) -> int | None:
        """The bytes of all of them on one device; `None` if that is unknown."""
        return None if self.bytes is None or self.times is None else self.bytes * self.times


@dataclass(frozen=True)
class Types:
    """The values that a step computes; `str()` of it is a table, and iterating gives the rows.

    Print it with `treeshard.draw(types)` for styles, `treeshard.draw(types, "types.svg")` for a
    picture. What is unknown is `None`, and `?` in the table.

    Attributes:
        values: A `StepValue` for each line and type, in the order of the trace.
        mesh: The mesh of the step.
        min_size: The least number of elements of the values that are listed.
        smaller: How many values are smaller.
        is_compiled: Whether they were looked up in a compiled program.

    Examples:
        >>> mesh = jax.make_mesh((8,), ("fsdp",))
        >>> plan = ts.plan({"w": jnp.ones((64, 64))}, [("w", P())], mesh)
        >>> step = ts.jit_step(
        ...     lambda state, x: (state, jnp.sum(jnp.tanh(x @ state["w"]))), plan, batch=P("fsdp")
        ... )
        >>> [value] = step.types(plan.structs, np.ones((512, 64), "float32"))
        >>> value.ops, value.shape, value.spec, value.local_shape, value.bytes
        (('dot_general', 'tanh'), (512, 64), P('fsdp',), (64, 64), 16384)
    """

    values: tuple[StepValue, ...]
    mesh: AnyMesh
    min_size: int
    smaller: int
    is_compiled: bool

    def __iter__(self) -> Any:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def at(self, line: str) -> tuple[StepValue, ...]:
        """The rows of one line: `"model.py:31"`, or a path that ends so."""
        return tuple(value for value in self.values if is_line(value.line, line))

    def __str__(self) -> str:
        rows = [_HEAD, *map(_cells, self._shown)]
        return "\n".join([self._title, columns(rows, right=5), *self._notes])

    def _repr_html_(self) -> str:
        rows = [_HEAD, *map(_cells, self._shown)]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes)
        return f"<p>{html.escape(self._title)}</p>{html_table(rows, right=5)}{notes}"

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(*_HEAD, box=None)
        for value in self._shown:
            table.add_row(*map(Text, _cells(value)), style=_style(value))
        return Group(Text(self._title), table, *map(Text, self._notes))

    @property
    def _shown(self) -> list[StepValue]:
        """The largest rows, in the order of the trace."""
        largest = sorted(self.values, key=lambda value: -(value.bytes or 0))[:_SHOWN]
        kept = set(map(id, largest))
        return [value for value in self.values if id(value) in kept]

    @property
    def _title(self) -> str:
        how = "in the compiled program" if self.is_compiled else "by its types, before compiling"
        return f"values of a step on {describe_mesh(self.mesh)}, {how}"

    @property
    def _notes(self) -> list[str]:
        notes: list[str] = []
        if len(self.values) > _SHOWN:
            notes.append(f"... and {len(self.values) - _SHOWN:,} rows of smaller values")
        if self.smaller:
            what = counted(self.smaller, "value")
            notes.append(f"{what} of fewer than {self.min_size:,} elements (`min_size`) left out")
        if any(value.bytes is None and value.where != "absent" for value in self.values):
            notes.append(_NOT_TOLD if self.is_compiled else _NOT_TYPED)
        notes += [text for where, text in _NOTES.items() if self._has(where)]
        return notes

    def _has(self, where: str) -> bool:
        return any(value.where == where for value in self.values)


_HEAD = ("line", "pass", "name", "value", "spec", "on a device", "times", "where")
_NOTES = {
    "fused": "fused: computed inside of another op, and never in memory",
    "absent": "absent: the compiler removed it, or made it part of what has another line or shape",
}
_UNKNOWN = "?"
_NOT_TOLD = "?: the program has parts of several sizes for it, such as before and after a reduction"
_NOT_TYPED = (
    "?: the compiler decides, as inside of `auto_axes`: `step.compile(...).types()` looks it up"
)


def _cells(value: StepValue) -> tuple[str, ...]:
    shape = ",".join(map(str, value.shape))
    where = value.where
    if where == "memory" and value.at_peak is not False:
        where = "memory, peak" if value.at_peak else f"memory, peak {_UNKNOWN}"
    return (
        _short_line(value.line),
        value.part,
        value.name or ", ".join(value.ops[:2]),
        f"{value.dtype}[{shape}]",
        _spec_text(value),
        _local_text(value),
        _UNKNOWN if value.times is None else f"{value.times:,}",
        where,
    )


def _spec_text(value: StepValue) -> str:
    own = f"{', '.join(value.by_hand)} by hand" if value.by_hand else ""
    if value.where == "absent":
        return own
    if value.spec is not None:
        spec = f"{value.spec}"
    elif value.axes is not None:
        spec = f"over {', '.join(value.axes)}"
    else:
        spec = _UNKNOWN
    return ", ".join(filter(None, (spec, own)))


def _local_text(value: StepValue) -> str:
    if value.where == "absent":
        return ""
    if value.bytes is None:
        return _UNKNOWN
    size = human_bytes(value.bytes)
    if value.local_shape is None:
        return size
    return f"[{','.join(map(str, value.local_shape))}] {size}"


def _style(value: StepValue) -> str:
    if value.where in ("fused", "absent"):
        return "dim"
    return "bold" if value.at_peak else ""


def _short_line(line: str) -> str:
    """The line, its file relative to the directory of the process if it is inside."""
    here = os.path.join(os.getcwd(), "")
    return line.removeprefix(here) or "(no line)"


# ------------------------------------------------------------------ from a trace and a program


class _Found(NamedTuple):
    """A value of the trace, and what is known of it."""

    value: TracedValue
    split: Split | None
    where: str


def types_of(
    values: Iterable[TracedValue],
    plan: Plan,
    min_size: int | None,
    program: HloProgram | None = None,
    at_peak: Sequence[LiveBuffer] = (),
) -> Types:
    """The rows of the values of at least `min_size` elements and of more than one; they are looked
    up in a program, of which `at_peak` is live when most memory is in use."""
    min_size = DEFAULT_MIN_SIZE if min_size is None else min_size
    sizes = axis_sizes(plan.mesh)
    found = list(_looked_up(values, sizes, program))
    shown = [each for each in found if not each.value.is_passed_on]
    large = [each for each in shown if math.prod(each.value.shape) >= max(min_size, 2)]
    groups: dict[Any, list[_Found]] = defaultdict(list)
    for each in large:
        value = each.value
        key = (value.line, value.region, value.shape, value.dtype, value.by_hand)
        groups[key].append(each)
    peak = None if program is None else _peak(at_peak)
    rows = [row for group in groups.values() for row in _by_split(group)]
    return Types(
        tuple(_step_value(row, plan, peak) for row in rows),
        plan.mesh,
        min_size,
        len(shown) - len(large),
        program is not None,
    )


def _looked_up(
    values: Iterable[TracedValue], sizes: Mapping[str, int], program: HloProgram | None
) -> Iterator[_Found]:
    """Each value, with how it is split by its type, or else in the program."""
    ops = {} if program is None else ops_by_line(program)
    for value in values:
        where, split = "", split_of_type(value)
        if program is not None:
            open_sizes = {axis: size for axis, size in sizes.items() if axis in value.open}
            where, in_program = placed(value, ops.get(key_of(value), ()), open_sizes)
            split = split or in_program
        yield _Found(value, split, where)


def _by_split(group: Sequence[_Found]) -> Iterator[list[_Found]]:
    """The values of one line and type, by how they are split. Of those of which that is unknown,
    another operation of the line may tell: they go with the first."""
    rows: dict[Split | None, list[_Found]] = defaultdict(list)
    for found in group:
        rows[found.split].append(found)
    unknown = rows.pop(None, [])
    if rows:
        next(iter(rows.values())).extend(unknown)
        unknown = []
    yield from filter(None, (*rows.values(), unknown))


_Peak = set[tuple[str, str, int]]


def _peak(buffers: Iterable[LiveBuffer]) -> _Peak:
    """The line, the pass and the elements of what is live at the peak."""
    return {
        (
            buffer.source or "",
            region_of(buffer.op_name or ""),
            math.prod(dims_of_text(buffer.array)),
        )
        for buffer in buffers
    }


def _step_value(row: Sequence[_Found], plan: Plan, peak: _Peak | None) -> StepValue:
    value, split, _ = row[0]
    sizes = axis_sizes(plan.mesh)
    # The values of which least is known do not hide that another is in memory.
    where = next((x for x in ("memory", "fused", "absent") if any(f.where == x for f in row)), "")
    local_shape = None
    if split is not None and split.spec is not None:
        local_shape = shard_shape(value.shape, split.spec, sizes)
    return StepValue(
        value.line,
        value.region or "update",
        _name([found.value for found in row], plan),
        tuple(dict.fromkeys(found.value.op for found in row)),
        str(value.dtype),
        value.shape,
        local_shape,
        None if split is None else split.spec,
        None if split is None else split.axes,
        tuple(axis for axis in sizes if axis in value.by_hand),
        None if split is None else split.elements * value.dtype.itemsize,
        _times([found.value for found in row]),
        where,
        _is_at_peak(value, split, where, peak),
        value.function,
    )


def _is_at_peak(
    value: TracedValue, split: Split | None, where: str, peak: _Peak | None
) -> bool | None:
    if peak is None:
        return None
    if where != "memory":
        return False
    return None if split is None else (value.line, value.region, split.elements) in peak


def _name(values: Sequence[TracedValue], plan: Plan) -> str:
    """The leaf that values are of, or the scopes that they are made in."""
    leaves = {number for value in values for number in value.known.leaves}
    scopes = [value.scope for value in values if value.scope]
    names = [plan.leaves[number].path for number in sorted(leaves)] or list(dict.fromkeys(scopes))
    return ", ".join(fold_paths(names))


def _times(values: Sequence[TracedValue]) -> int | None:
    """How often a line makes a value: as often as the operation of it that runs most often."""
    if not all(value.place.is_counted for value in values):
        return None
    runs: Counter[tuple[str, int]] = Counter()
    for value in values:
        runs[value.op, value.number] += value.place.trips
    return max(runs.values())

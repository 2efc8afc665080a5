"""Other ways to write an expression that JAX cannot type on Explicit axes.

Each is only a text here: which of them type-check is found by tracing them (`_type_errors`).
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import AxisType, PartitionSpec

from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes
from treeshard._core.specs import all_axes, axes_of, dim_entries, entries, entry_of, without_axes
from treeshard.training._failing_line import Expression, spec_of


@dataclass(frozen=True)
class Operand:
    """A part of an expression that may be changed alone.

    Attributes:
        node: Where it stands.
        types: The types of its arrays; `None` where they are known only inside, as in a `lambda`.
        is_gathered: Whether it may be leaves of the state that the plan splits over FSDP axes.
        is_named: Whether it is called like them too.
    """

    node: ast.expr
    types: list[Any] | None
    is_gathered: bool = False
    is_named: bool = False


class Proposals:
    """What may stand in the place of an expression."""

    def __init__(
        self,
        expression: Expression,
        operands: Sequence[Operand],
        mesh: AnyMesh,
        rows: Sequence[str],
    ) -> None:
        self._expression, self._operands = expression, operands
        self._mesh, self._rows = mesh, rows

    def preferred(self) -> Iterator[str]:
        """What most models need: weights gathered, and the two functions for it."""
        yield from self._unsharded()
        yield from self._by_name()

    def others(self) -> Iterator[str]:
        """What else JAX offers."""
        yield from self._with_out_sharding()
        yield from self._resharded()
        yield from self._left_to_the_compiler()

    def _unsharded(self) -> Iterator[str]:
        """Weights gathered where they are used."""
        gathered = [x for x in self._operands if x.is_gathered]
        gathered = [x.node for x in gathered if x.is_named] or [x.node for x in gathered]
        alone = [[node] for node in gathered]
        for nodes in [*alone, gathered] if len(gathered) > 1 else alone:
            yield self._changed(nodes, f"{self._treeshard}.unshard({{}})")

    def _by_name(self) -> Iterator[str]:
        """The two operations that have a function of their own."""
        text, ours = self._expression.text_of, self._treeshard
        match self._expression.node:
            case ast.Subscript(value=table, slice=index) if not isinstance(index, ast.Slice):
                if any(x.is_gathered for x in self._operands if x.node is table):
                    yield f"{ours}.lookup({ours}.unshard({text(table)}), {text(index)})"
                yield f"{ours}.lookup({text(table)}, {text(index)})"
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                yield f"{ours}.matmul({text(left)}, {text(right)})"
            case _:
                return

    def _with_out_sharding(self) -> Iterator[str]:
        """The result's sharding given to the operation, where that takes it."""
        text = self._expression.text_of
        for spec in self._result_specs:
            match self._expression.node:
                case ast.Subscript(value=value, slice=index):
                    keyword = f"out_sharding={self._spec(spec)}"
                    yield f"{text(value)}.at[{text(index)}].get({keyword})"
                case ast.Call(func=func) as call:
                    given = [*map(text, call.args), *map(_keyword(text), call.keywords)]
                    given.append(f"out_sharding={self._spec(spec)}")
                    yield f"{text(func)}({', '.join(given)})"
                case _:
                    return

    def _resharded(self) -> Iterator[str]:
        """Operands split otherwise: each alone, then all alike."""
        for operand in self._operands:
            for spec in self._specs_for(operand):
                yield self._changed([operand.node], self._reshard(spec))
        if len(self._operands) > 1:
            nodes = [x.node for x in self._operands]
            for spec in dict.fromkeys(x for o in self._operands for x in self._specs_for(o)):
                yield self._changed(nodes, self._reshard(spec))

    def _left_to_the_compiler(self) -> Iterator[str]:
        """The expression on Auto axes."""
        names = [name for name in self._expression.names if name in self._expression.with_arrays]
        arguments = ", ".join(names)
        explicit = axes_of_type(self._mesh, AxisType.Explicit)
        some = len(explicit) < len(self._mesh.axis_names)
        axes = f", axes={explicit!r}" if some else ""
        text = self._expression.source.text
        for spec in self._result_specs:
            yield (
                f"{self._jax}.sharding.auto_axes(lambda {arguments}: {text}{axes},"
                f" out_sharding={self._spec(spec)})({arguments})"
            )

    # -------------------------------------------------------------- specs

    @cached_property
    def _result_specs(self) -> list[PartitionSpec]:
        """How the result may be split: like the operands' dims of its lengths, by rows, or not."""
        results = self._expression.result()
        if len(results) != 1:
            return [PartitionSpec()]
        shape = results[0].shape
        types = [x for o in self._operands for x in o.types or ()]
        by_rows = [_like_dims(shape, types, entries(rows)) for rows in self._by_rows(shape)]
        return list(dict.fromkeys([*by_rows, _like_dims(shape, types), PartitionSpec()]))

    def _specs_for(self, operand: Operand) -> list[PartitionSpec]:
        """How an operand may be split: as others of its rank are, by rows, or not."""
        others = [x for o in self._operands if o is not operand for x in o.types or ()]
        types = [*others, *self._expression.structs]
        specs = [*self._expression.specs, *(spec_of(x) for x in types)]
        if operand.types is None:
            return list(dict.fromkeys([*specs, PartitionSpec()]))
        if not operand.types:
            return []
        rank = max(x.ndim for x in operand.types)
        fitting = [spec for spec in specs if len(spec) <= rank]
        alike = [
            _like_dims(operand.types[0].shape, [x])
            for x in types
            if rank > 0 and x.ndim > rank  # a row, or a layer, of something
        ]
        by_rows = self._by_rows(operand.types[0].shape)
        all_specs = dict.fromkeys([*fitting, *alike, *by_rows, PartitionSpec()])
        now = {spec_of(x) for x in operand.types}
        return [spec for spec in all_specs if {spec} != now]

    def _by_rows(self, shape: Sequence[int]) -> list[PartitionSpec]:
        explicit = axes_of_type(self._mesh, AxisType.Explicit)
        rows = [axis for axis in self._rows if axis in explicit]
        sizes = axis_sizes(self._mesh)
        parts = 1
        for axis in rows:
            parts *= sizes[axis]
        fits = bool(rows and shape) and shape[0] % parts == 0
        return [PartitionSpec(entry_of(rows))] if fits else []

    # -------------------------------------------------------------- texts

    @property
    def _treeshard(self) -> str:
        return self._expression.name_of("treeshard")

    @property
    def _jax(self) -> str:
        return self._expression.name_of("jax")

    def _reshard(self, spec: PartitionSpec) -> str:
        return f"{self._treeshard}.with_sharding_constraint({{}}, {self._spec(spec)})"

    def _spec(self, spec: PartitionSpec) -> str:
        return f"{self._expression.name_of_spec}({', '.join(map(repr, spec))})"

    def _changed(self, nodes: Sequence[ast.expr], around: str) -> str:
        text = self._expression.text_of
        return self._expression.replaced({node: around.format(text(node)) for node in nodes})


def operand_nodes(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of an expression that are its operands."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from (left, right)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Compare(left=left, comparators=others):
            yield from (left, *others)
        case ast.Subscript(value=value, slice=index):
            yield value
            yield from _inside(index)
        case ast.Call(func=func, args=args, keywords=keywords):
            # `jax.vmap(layer)(x)` has operands in both brackets.
            if isinstance(func, ast.Call):
                yield from operand_nodes(func)
            else:
                yield func.value if isinstance(func, ast.Attribute) else func
            for part in [*args, *(keyword.value for keyword in keywords)]:
                yield from _inside(part)
        case _:
            return


def _inside(node: ast.expr) -> Iterator[ast.expr]:
    """An argument, or the parts of one that is written as a tuple, a list, a dict or a lambda."""
    match node:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                yield from _inside(element)
        case ast.Dict(values=values):
            for value in values:
                yield from _inside(value)
        case ast.Lambda(body=body):
            yield body
        case ast.Constant() | ast.Starred() | ast.Slice():
            return
        case _:
            yield node


def _like_dims(
    shape: Sequence[int], types: Sequence[Any], first: Sequence[Any] = ()
) -> PartitionSpec:
    """Splits each dim as the first dim of the same length is split in `types`, after `first`."""
    splits: list[tuple[int, Any]] = []
    for x in types:
        pairs = zip(x.shape, dim_entries(spec_of(x), x.ndim), strict=True)
        splits += [(length, entry) for length, entry in pairs if entry is not None]
    chosen: list[Any] = [*first]
    for length in shape[len(first) :]:
        used = set(all_axes(chosen))
        fitting = (e for n, e in splits if n == length and not used & set(axes_of(e)))
        chosen.append(next(fitting, None))
    return without_axes(PartitionSpec(*chosen), ())


def _keyword(text: Any) -> Any:
    def written(keyword: ast.keyword) -> str:
        return f"{keyword.arg}={text(keyword.value)}" if keyword.arg else f"**{text(keyword.value)}"

    return written

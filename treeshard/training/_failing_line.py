"""The expression of the user's code at which a trace failed, which can be traced again.

Python's tracebacks have, of each call, the function's variables and the place in the source: from
the line that failed to the very expression. The arrays among the variables are tracers of a trace
that is over. In their place come other values of the same types, and so the expression, or another
one instead of it, can be traced by itself.
"""

import ast
import dis
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import CellType, FunctionType, TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import has_gradient, is_array
from treeshard._core.jax_private import outside_transforms
from treeshard._core.mesh import AnyMesh
from treeshard._core.specs import without_axes
from treeshard.errors import own_lines

# What runs an expression more than once with another result, or not where it stands.
_NOT_AGAIN = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def failing_expressions(error: BaseException, mesh: AnyMesh) -> Iterator["Expression"]:
    """The user's expressions that were being evaluated, from the innermost.

    There are none if the user's own code raised the error.
    """
    calls: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        calls.append(traceback)
        traceback = traceback.tb_next
    # JAX may have removed its own frames, so that the last one does not tell who raised it.
    if calls and _raises(calls[-1]):
        return
    for call in reversed(calls):
        found = _expression(call, mesh)
        if found is not None:
            yield found


def _raises(call: TracebackType) -> bool:
    """Whether the instruction of a user's frame is a `raise`, and no call."""
    if not own_lines([f"{call.tb_frame.f_code.co_filename}:{call.tb_lineno}"]):
        return False
    return dis.opname[call.tb_frame.f_code.co_code[call.tb_lasti]] == "RAISE_VARARGS"


def _expression(call: TracebackType, mesh: AnyMesh) -> "Expression | None":
    code, frame = call.tb_frame.f_code, call.tb_frame
    place = f"{code.co_filename}:{call.tb_lineno}"
    if not own_lines([place]):
        return None
    positions = list(code.co_positions())[call.tb_lasti // 2]
    source = _source(code.co_filename, frame.f_globals, positions)
    source = source and _as_expression(source)
    if source is None:
        return None
    parsed = ast.parse(f"({source.text})", mode="eval").body
    if any(isinstance(node, _NOT_AGAIN) for node in ast.walk(parsed)):
        return None
    return Expression(place, source, parsed, {**frame.f_globals, **frame.f_locals}, mesh)


class _Source(NamedTuple):
    """The text of an expression, and what is left and right of it on its lines."""

    before: str
    text: str
    after: str


def _source(file: str, names: dict[str, Any], positions: tuple[Any, ...]) -> _Source | None:
    first, last, begin, end = positions
    lines = linecache.getlines(file, names)
    if None in positions or last > len(lines):  # code that was not read from a file
        return None
    # Columns count the bytes of UTF-8.
    head, tail = lines[first - 1].encode(), lines[last - 1].encode()
    inner = [*lines[first - 1 : last - 1], tail[:end].decode()]
    text = "".join(inner).encode()[begin:].decode()
    return _Source(head[:begin].decode().lstrip(), text, tail[end:].decode().rstrip())


def _as_expression(source: _Source) -> _Source | None:
    """`h += w` as `h = h + w`; `None` for other statements."""
    try:
        statements = ast.parse(source.text.strip()).body
    except SyntaxError:  # several lines of an expression in brackets
        return source
    match statements:
        case [ast.Expr()]:
            return source
        case [ast.AugAssign(target=target, op=op, value=value)]:
            # As an operand, and not as what is written to.
            operand = ast.parse(ast.unparse(target), mode="eval").body
            text = ast.unparse(ast.BinOp(operand, op, value))
            return _Source(f"{source.before}{ast.unparse(target)} = ", text, source.after)
        case _:
            return None


class _Array(NamedTuple):
    """The type of an array outside of all `vmap`, and the axis and the dim that each maps."""

    type: Any
    maps: list[tuple[Any, int | None]]


class Expression:
    """An expression, the variables in it, and the mesh that it was traced on."""

    def __init__(
        self, place: str, source: _Source, node: ast.expr, scope: dict[str, Any], mesh: AnyMesh
    ) -> None:
        self.place, self.source, self.node, self._mesh = place, source, node, mesh
        # What is proposed may name modules that the user's file does not import.
        own = {name: sys.modules[name] for name in ("jax", "treeshard")}
        self._scope = scope | {name: scope.get(name, own[name]) for name in own}
        self._imported = scope.keys()
        used = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        self.names = {name: scope[name] for name in sorted(used & scope.keys())}
        self._arrays: list[_Array] = []
        self._rebuild = {name: self._described(x, ()) for name, x in self.names.items()}

    def _described(self, value: Any, within: tuple[int, ...]) -> Callable[[list[Any]], Any]:
        """Registers the arrays in a value; returns what makes it again, of other arrays."""
        if _is_typed(value):
            self._arrays.append(_Array(*outside_transforms(value)))
            index = len(self._arrays) - 1
            return lambda arrays: arrays[index]
        if isinstance(value, FunctionType) and value.__closure__ and id(value) not in within:
            return self._described_function(value, (*within, id(value)))
        leaves, treedef = tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return lambda _: value
        parts = [self._described(x, within) for x in leaves]
        return lambda arrays: treedef.unflatten([part(arrays) for part in parts])

    def _described_function(self, fn: FunctionType, within: tuple[int, ...]) -> Callable[..., Any]:
        cells = [self._described(cell.cell_contents, within) for cell in fn.__closure__ or ()]

        def again(arrays: list[Any]) -> FunctionType:
            closure = tuple(CellType(cell(arrays)) for cell in cells)
            new = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure)
            new.__kwdefaults__ = fn.__kwdefaults__
            return new

        return again

    # -------------------------------------------------------------- tracing it again

    def name_of(self, module: str) -> str:
        """What the user's code calls a module; its own name if it does not."""
        value = sys.modules[module]
        names = (name for name, x in self._scope.items() if x is value)
        return next(names, module)

    @property
    def name_of_spec(self) -> str:
        """What the user's code calls `PartitionSpec`."""
        names = (name for name, x in self._scope.items() if x is PartitionSpec)
        return next(names, f"{self.name_of('jax')}.P")

    @property
    def with_arrays(self) -> set[str]:
        """Those of the names whose values have arrays."""
        return {name for name, x in self.names.items() if any(map(_is_typed, tree_leaves(x)))}

    @property
    def specs(self) -> list[PartitionSpec]:
        """The specs that are written in it."""
        return [x for x in map(self._spec, ast.walk(self.node)) if x is not None]

    def _spec(self, node: ast.AST) -> PartitionSpec | None:
        value = None
        match node:
            case ast.Call(func=ast.Name(id=name)) if self._scope.get(name) is PartitionSpec:
                value = eval(ast.unparse(node), dict(self._scope))
            case ast.Name(id=name):
                value = self.names.get(name)
        return value if isinstance(value, PartitionSpec) else None

    def imports(self, lines: Sequence[str]) -> list[str]:
        """The imports that these lines need and the user's file lacks."""
        own = {"jax": "import jax", "treeshard": "import treeshard"}
        missing = [statement for name, statement in own.items() if name not in self._imported]
        called = [statement.partition(" ")[2] for statement in missing]
        return [
            f"  {statement}"
            for statement, name in zip(missing, called, strict=True)
            if any(f"{name}." in line for line in lines)
        ]

    def text_of(self, node: ast.expr) -> str:
        """A part of the expression, as it is written."""
        begin, end = self._span(node)
        return self._bytes[begin:end].decode()

    def replaced(self, changes: Mapping[ast.expr, str]) -> str:
        """The expression with other texts for some of its parts."""
        text = self._bytes
        for node in sorted(changes, key=self._span, reverse=True):
            begin, end = self._span(node)
            text = text[:begin] + changes[node].encode() + text[end:]
        return text.decode()[1:-1]

    @cached_property
    def _bytes(self) -> bytes:
        # The brackets let it have several lines.
        return f"({self.source.text})".encode()

    def _span(self, node: ast.expr) -> tuple[int, int]:
        starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return first, last

    def is_about_types(self) -> bool:
        """Whether it can be traced with arrays that are not split, and not with those it has."""
        if self.has_types(self.source.text):
            return False
        kinds = (AxisType.Auto, AxisType.Explicit)
        return any(self._traced_or_none(self._whole(kind)) is not None for kind in kinds)

    def _traced_or_none(self, structs: Sequence[Any]) -> list[Any] | None:
        try:
            return self._traced(self.source.text, structs)
        except Exception:  # whatever the user's code raises
            return None

    def result(self) -> list[Any]:
        """The types of the arrays that it gives for arrays that are not split."""
        return self._traced_or_none(self._whole(AxisType.Auto)) or []

    def types_or_none(self, text: str) -> list[Any] | None:
        """The types of the arrays that another expression gives in its place."""
        try:
            return self._traced(text, self.structs)
        except Exception:  # a part that stands inside a function has no value here
            return None

    def _whole(self, kind: AxisType) -> list[Any]:
        """The arrays of its variables, not split, on axes of one type."""
        kinds = (kind,) * len(self._mesh.axis_names)
        mesh = self._mesh.abstract_mesh.update(axis_types=kinds)
        return [_struct(x.type, NamedSharding(mesh, PartitionSpec())) for x in self._arrays]

    @cached_property
    def structs(self) -> list[Any]:
        """The arrays of its variables as they are split."""
        return [_struct(x.type, NamedSharding(self._mesh, spec_of(x.type))) for x in self._arrays]

    def _traced(self, text: str, structs: Sequence[Any]) -> list[Any]:
        mesh = structs[0].sharding.mesh if structs else self._mesh
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            # What `eval_shape` returns does not tell how it is split over some Explicit axes.
            types: list[Any] = []
            jax.eval_shape(self._function(text, types), list(structs))
        return types

    def has_types(self, text: str) -> bool:
        """Whether another expression can be traced in its place, with its gradient."""
        run = self._function(text)

        def total(floats: list[Any], arrays: list[Any]) -> Any:
            rest = iter(floats)
            given = [next(rest) if has_gradient(x) else x for x in arrays]
            return sum(jnp.sum(x) for x in run(given) if has_gradient(x)) + 0.0

        def gradient(arrays: list[Any]) -> Any:
            return jax.grad(total)([x for x in arrays if has_gradient(x)], arrays)

        try:
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                jax.eval_shape(gradient, self.structs)
        except Exception:  # whatever it raises, it is no way to write it
            return False
        return True

    def compiled(self, text: str) -> jax.stages.Compiled:
        """Another expression in its place, compiled for the mesh."""
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            return jax.jit(self._function(text)).lower(self.structs).compile()

    def line_with(self, text: str) -> str:
        """The line of the user's code with another expression in its place."""
        return f"{self.source.before}{text}{self.source.after}"

    def _function(self, text: str, types: list[Any] | None = None) -> Callable[[list[Any]], Any]:
        """An expression in its place as a function of the arrays in its variables.

        With `types`, a trace puts the types of the arrays that it gives there, and it gives none.
        """
        code = compile(f"({text})", self.place, "eval")

        def plain(arrays: list[Any]) -> Any:
            values = {name: rebuild(arrays) for name, rebuild in self._rebuild.items()}
            out = eval(code, {**self._scope, **values})
            found = [x for x in tree_leaves(out) if is_array(x)]
            if types is None:
                return found
            types[:] = map(jax.typeof, found)
            return []

        run: Callable[[list[Any]], Any] = plain
        for axis in self._vmapped:
            run = _mapped(run, axis, [_dim_of(axis, x.maps) for x in self._arrays])
        return run

    @property
    def _vmapped(self) -> list[Any]:
        """The axes of the `vmap` around it, from the innermost."""
        deepest = max((x.maps for x in self._arrays), key=len, default=[])
        return [axis for axis, _ in deepest]


def spec_of(type_: Any) -> PartitionSpec:
    """How a type is split, without the `None` of its last dims."""
    return without_axes(type_.sharding.spec, ())


def _is_typed(x: Any) -> bool:
    """Whether a value's type tells how it is split: numpy's arrays have none."""
    return is_array(x) and isinstance(x, jax.Array)


def _mapped(
    run: Callable[[list[Any]], Any], axis: Any, dims: Sequence[int | None]
) -> Callable[[list[Any]], Any]:
    """`run` under a `vmap` over some dims of its arrays."""

    def mapped(arrays: list[Any]) -> Any:
        # JAX lets a `vmap` close over arrays that its axes split, and does not take them unmapped.
        def of_one(parts: dict[int, Any]) -> Any:
            return run([parts.get(i, x) for i, x in enumerate(arrays)])

        of_parts = {i: dim for i, dim in enumerate(dims) if dim is not None}
        vmapped = jax.vmap(
            of_one,
            in_axes=(of_parts,),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        return vmapped({i: arrays[i] for i in of_parts})

    return mapped


def _dim_of(axis: Any, maps: Sequence[tuple[Any, int | None]]) -> int | None:
    return next((dim for other, dim in maps if other is axis), None)


def _struct(type_: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(
        type_.shape, type_.dtype, sharding=sharding, weak_type=type_.weak_type
    )

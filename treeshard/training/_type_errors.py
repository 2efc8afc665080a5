"""JAX's errors about types on Explicit axes, with the user's line, its leaves and what to write.

JAX's message tells which operation failed, and `TABLE` what to write in its place. Python's
traceback has the place of the failing expression, and the variables in it. Nothing runs again.
"""

import ast
import linecache
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import AxisType
from jax.tree_util import tree_leaves

from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes
from treeshard._core.specs import all_axes, dim_entries, without_axes
from treeshard._core.text import fold
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan_in_force import PlanInForce
from treeshard.errors import ShardingTypeError, TreeShardError, user_line


class Row(NamedTuple):
    """An operation that JAX cannot type on Explicit axes, and what to write in its place.

    Attributes:
        operation: Its name.
        fails: An example: `x`, `h` and `ids` are values of a batch, all others are weights.
        says: A part of JAX's message.
        write: The example, written so that JAX can type it.
    """

    operation: str
    fails: str
    says: str
    write: str


# The page "Explicit axes" has the same table. Of an error, the first row tells `says`, and all rows
# with that are shown. No line replicates a result that the batch's axes split: every device would
# then train all rows, with right numbers.
TABLE = (
    Row("a lookup", "table[ids]", "for the gather indexing", "ts.lookup(table, ids)"),
    Row("a product", "x @ w", "dot_general operation with inputs", "x @ ts.unshard(w)"),
    Row(
        "a product",
        'jnp.einsum("td,sd->ts", x, x)',
        "dot_general operation with inputs",
        'jnp.einsum("td,sd->ts", x, ts.with_sharding_constraint(x, P()))',
    ),
    Row(
        "a product along a split dim",
        "h @ down",
        "Contracting dimensions are sharded",
        "ts.matmul(h, down)",
    ),
    Row(
        "a product along a split dim",
        'jnp.einsum("bh,hd->bd", h, down)',
        "Contracting dimensions are sharded",
        'jnp.einsum("bh,hd->bd", h, down, out_sharding=P(("data", "fsdp")))',
    ),
    Row("an elementwise operation", "x + b", "operation with inputs", "x + ts.unshard(b)"),
    Row(
        "a choice",
        "jnp.where(a > 0, a, c)",
        "select cases must have the same shardings",
        'jnp.where(a > 0, a, ts.with_sharding_constraint(c, P("fsdp")))',
    ),
    Row(
        "a concatenation",
        "jnp.stack([a, c])",
        "All operands should have the same sharding",
        'jnp.stack([a, ts.with_sharding_constraint(c, P("fsdp"))])',
    ),
    Row("a slice", "layers[0]", "slicing on sharded dims", "ts.unshard(layers)[0]"),
    Row(
        "a slice",
        "h[:, :3]",
        "slicing on sharded dims",
        'ts.with_sharding_constraint(h, P(("data", "fsdp")))[:, :3]',
    ),
    Row(
        "a convolution",
        'lax.conv_general_dilated(x[..., None], kernel, (1,), "SAME")',
        "parameter of `conv_general_dilated`",
        'lax.conv_general_dilated(x[..., None], ts.unshard(kernel), (1,), "SAME")',
    ),
    Row(
        "a loop",
        "lax.fori_loop(0, 2, lambda i, s: s + x, jnp.zeros((16, 8)))",
        "carry output must have equal types",
        "lax.fori_loop(0, 2, lambda i, s: s + x, jnp.zeros_like(x))",
    ),
    Row(
        "a scan over a split dim",
        "lax.scan(lambda s, w: (jnp.tanh(s @ w), None), x, layers)",
        "0th dimension of all xs should be replicated",
        "lax.scan(lambda s, w: (jnp.tanh(s @ w), None), x, ts.unshard(layers))",
    ),
    Row(
        "a cond",
        "lax.cond(x.sum() > 3, lambda: a, lambda: c)",
        "branches must have equal output types",
        'lax.cond(x.sum() > 3, lambda: a, lambda: ts.with_sharding_constraint(c, P("fsdp")))',
    ),
    Row(
        "a vmap with a weight",
        "jax.vmap(lambda row, w: row @ w, (0, None))(x, w)",
        "cannot be sharded along the mesh axis you are vmapping over",
        "jax.vmap(lambda row, w: row @ w, (0, None))(x, ts.unshard(w))",
    ),
    Row(
        "a vmap over dims that are split differently",
        "jax.vmap(jnp.dot)(a, c)",
        "inputs passed to vmap should be sharded the same",
        'jax.vmap(jnp.dot)(a, ts.with_sharding_constraint(c, P("fsdp")))',
    ),
    Row(
        "a shard_map that closes over a weight",
        'jax.shard_map(lambda x: x @ w, in_specs=P(("data", "fsdp")),'
        ' out_specs=P(("data", "fsdp")))(x)',
        "Closing over inputs to shard_map",
        'jax.shard_map(lambda x, w: x @ w, in_specs=(P(("data", "fsdp")), P()),'
        ' out_specs=P(("data", "fsdp")))(x, ts.unshard(w))',
    ),
    Row(
        "a shard_map",
        'jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))(a)',
        "in_specs passed to shard_map",
        'jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))'
        '(ts.with_sharding_constraint(a, P("data")))',
    ),
    Row(
        "a repetition",
        "jnp.repeat(h, 2, 1)",
        "Please pass sharding to `jnp.repeat`",
        'jnp.repeat(h, 2, 1, out_sharding=P(("data", "fsdp"), "tensor"))',
    ),
    # All others.
    Row(
        "an operation",
        "jnp.sort(h)",
        "",
        'jax.sharding.auto_axes(jnp.sort, out_sharding=P(("data", "fsdp")))(h)',
    ),
)
_SHOWN = 3  # arrays of one operand


@contextmanager
def sharding_type_errors(mesh: AnyMesh, step: PlanInForce | None) -> Iterator[None]:
    """Raises JAX's errors about types on Explicit axes as `ShardingTypeError`."""
    try:
        yield
    except TreeShardError:
        raise
    except Exception as error:
        rows = _rows_of(error)
        if not rows or not axes_of_type(mesh, AxisType.Explicit):
            raise
        raise ShardingTypeError(_message(error, rows, mesh, step)) from error


def _rows_of(error: Exception) -> list[Row]:
    """The rows of the operation that failed; none if the error is not about types."""
    text = str(error)
    is_about_types = type(error).__name__ == "ShardingTypeError"  # it has no public name
    if "do not match" in text:  # of the values in a loop: "so the shapes do not match"
        return []
    found = (x.says for x in TABLE if x.says in text and (x.says or is_about_types))
    says = next(found, None)
    return [row for row in TABLE if row.says == says]


def _message(error: Exception, rows: list[Row], mesh: AnyMesh, step: PlanInForce | None) -> str:
    call = _call_of_user(error)
    file, number = call.tb_frame.f_code.co_filename, call.tb_lineno
    sizes = axis_sizes(mesh)
    explicit = ", ".join(f"{axis}={sizes[axis]}" for axis in axes_of_type(mesh, AxisType.Explicit))
    lines = [
        f"{file}:{number}: JAX cannot tell how the result of {rows[0].operation} is split over the"
        f" Explicit axes {explicit}.",
        f"  {linecache.getline(file, number, call.tb_frame.f_globals).strip()}",
    ]
    ways = [f"{row.write}  # in place of {row.fails}" for row in rows]
    expression = _expression(call)
    if expression is not None:
        scope = {**call.tb_frame.f_globals, **call.tb_frame.f_locals}
        lines += [f"  {line}" for line in _operands(expression, scope, step)]
        if rows[0] is TABLE[0]:
            ways = _lookup(expression, scope) or ways
    lines += ["Write:", *(f"  {way}" for way in ways), f"JAX says: {str(error).splitlines()[0]}"]
    return "\n".join(lines)


# ------------------------------------------------------------------ the user's line


def _call_of_user(error: Exception) -> TracebackType:
    """The innermost call of a traceback that is in the user's code."""
    calls: dict[str, TracebackType] = {}
    traceback = error.__traceback__
    while traceback is not None:
        calls[f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"] = traceback
        traceback = traceback.tb_next
    return calls[user_line(reversed(calls))]


def _expression(call: TracebackType) -> ast.AST | None:
    """The expression that a call was evaluating; `None` without its source."""
    code = call.tb_frame.f_code
    first, last, begin, end = list(code.co_positions())[call.tb_lasti // 2]
    lines = linecache.getlines(code.co_filename, call.tb_frame.f_globals)
    if first is None or last is None or not lines[first - 1 : last]:
        return None
    lines = lines[first - 1 : last]
    # Columns count the bytes of UTF-8.
    lines[-1] = lines[-1].encode()[:end].decode()
    lines[0] = lines[0].encode()[begin:].decode()
    text = "".join(lines)
    with suppress(SyntaxError):
        return ast.parse(f"({text})", mode="eval").body
    with suppress(SyntaxError):  # `x += w` is a statement
        return ast.parse(text)
    return None


def _value(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    """The value of `x`, `layer.weight` or `params["w"]`; `None` of all else. It runs no code."""
    match node:
        case ast.Name(id=name):
            return scope.get(name)
        case ast.Attribute(value=owner, attr=name):
            return getattr(_value(owner, scope), "__dict__", {}).get(name)
        case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
            container = _value(owner, scope)
            if type(container) is dict:
                return container.get(key)
            rows = container if type(container) in (list, tuple) else ()
            return rows[key] if isinstance(key, int) and key < len(rows) else None
        case _:
            return None


def _lookup(node: ast.AST, scope: Mapping[str, Any]) -> list[str]:
    """A lookup in the words of the user's code; none if it is written in another way."""
    match node:
        case ast.Subscript(value=table, slice=ids):
            return [f"ts.lookup({ast.unparse(table)}, {ast.unparse(ids)})"]
        case ast.Call(func=ast.Call(args=[layer]), args=[ids]) | ast.Call(func=layer, args=[ids]):
            if isinstance(_value(layer, scope), eqx.nn.Embedding):
                return [f"ts.lookup({ast.unparse(layer)}.weight, {ast.unparse(ids)})"]
    return []


# ------------------------------------------------------------------ operands


def _operands(node: ast.AST, scope: Mapping[str, Any], step: PlanInForce | None) -> Iterator[str]:
    """A line for each array in an expression: its type, and the leaves of that type."""
    value = _value(node, scope)
    if value is None:
        for child in ast.iter_child_nodes(node):
            yield from _operands(child, scope, step)
        return
    types = [jax.typeof(x) for x in tree_leaves(value) if isinstance(x, jax.Array)]
    for type_ in types[:_SHOWN]:
        leaves = step.plan.leaves if step else ()
        alike = fold((leaf.path, leaf.rule, leaf) for leaf in leaves if _has_type(leaf, type_))
        origin = ", ".join(
            path if leaf.rule is None else f"{path} by rule {leaf.rule} {leaf.pattern!r}"
            for path, [leaf, *_] in alike
        )
        of_leaves = f", as {origin}" if origin else ""
        yield f"{ast.unparse(node)}: {type_.str_short()}{of_leaves}"


def _has_type(leaf: PlannedLeaf, type_: Any) -> bool:
    """Whether a leaf that is split, or each of its layers on dim 0, has a type."""
    spec = type_.sharding.spec
    if leaf.dtype != type_.dtype or not all_axes(dim_entries(spec, type_.ndim)):
        return False
    given = without_axes(leaf.given, axes_of_type(type_.sharding.mesh, AxisType.Auto))
    dims = list(zip(leaf.shape, dim_entries(given, len(leaf.shape)), strict=True))
    of_type = list(zip(type_.shape, dim_entries(spec, type_.ndim), strict=True))
    return of_type in (dims, dims[1:])

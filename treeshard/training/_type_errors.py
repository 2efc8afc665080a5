"""JAX's errors about types on Explicit axes, with the line of the user that failed.

JAX's text has the types, and Python's traceback has the line. What to write in its place is said
only where it works: a choice or a loop may mean several things, and a guess that replicates rows
would train with right numbers on every device at once. For these, the message links to a page with
an example. Without an example, it is JAX's text.
"""

import dis
import linecache
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from jax.sharding import AxisType

from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes, is_all_explicit
from treeshard.errors import ShardingTypeError, TreeShardError, calling_line, user_line

PAGE = (
    "https://treeshard.github.io/treeshard/guide/explicit-axes/"
    "#operations-that-fail-and-what-to-write-instead"
)


class Suggestion(NamedTuple):
    """What to write instead of an operation that JAX cannot type.

    A suggestion with an operator applies if that is what failed: other lookups and products have
    the same message. All others gather an operand over the axes that `unshard` gathers over, so
    they apply if the result would be split twice over these axes alone.
    """

    says: str  # a part of JAX's message
    operation: str  # its name
    fails: str  # an example: `x`, `h` and `ids` are values of a batch, all others are weights
    write: str  # the example, written so that JAX can type it
    operator: str = ""


# The first whose `says` is in JAX's message applies: products are operations with inputs too.
SUGGESTIONS = (
    Suggestion("for the gather indexing", "a lookup", "table[ids]", "ts.lookup(table, ids)", "[]"),
    Suggestion("dot_general operation with inputs", "a product", "x @ w", "x @ ts.unshard(w)"),
    Suggestion(
        "Contracting dimensions are sharded",
        "a product along a split dim",
        "h @ down",
        "ts.matmul(h, down)",
        "@",
    ),
    Suggestion("operation with inputs", "an elementwise operation", "x + b", "x + ts.unshard(b)"),
)

# Parts of the messages about types for which JAX raises `TypeError`, `ValueError` or
# `NotImplementedError`, as it does for mistakes of all kinds. First those with an example.
_OF_OTHER_CLASSES_ON_PAGE = (
    "carry output must have equal types",  # of a loop
    "branches must have equal output types",
    "0th dimension of all xs should be replicated",  # of a scan
    "0th dimension of leaf passed to `jax.lax.map`",
    "cannot be sharded along the mesh axis you are vmapping over",
    "inputs passed to vmap should be sharded the same",
    "Closing over inputs to shard_map",
    "in_specs passed to shard_map",
    "Please pass sharding to `jnp.repeat`",
    "should match the aval mesh",  # of a function of `auto_axes` that closes over a weight
)
_OF_OTHER_CLASSES = (
    *_OF_OTHER_CLASSES_ON_PAGE,
    "Incompatible types for broadcasting",
    "Explicit sharding inference for",  # of a ragged product
    "with partial slices does not support nontrivial array sharding",
    "Cannot apply nonzero over sharded axes",
    "unreduced rule for",  # of weights whose gradients wait
    "non-empty unreduced/reduced set",
    "unreduced/reduced rule for",
)

# The messages for which the page has an example.
ON_PAGE = (
    *(suggestion.says for suggestion in SUGGESTIONS),
    *_OF_OTHER_CLASSES_ON_PAGE,
    "lhs batch dimensions and rhs batch dimensions",
    "for the scatter update",
    "select cases must have the same shardings",
    "All operands should have the same sharding",
    "slicing on sharded dims",
    "parameter of `conv_general_dilated`",
    "This reshape is not supported",
)


@contextmanager
def sharding_type_errors(mesh: AnyMesh, gathered_axes: Collection[str] = ()) -> Iterator[None]:
    """Raises JAX's errors about types on Explicit axes as `ShardingTypeError`.

    Args:
        mesh: The mesh.
        gathered_axes: Those over which `unshard` gathers; none if no plan is in force.
    """
    try:
        yield
    except TreeShardError:
        raise
    except Exception as error:  # of four classes, one of which has no public name
        if not axes_of_type(mesh, AxisType.Explicit) or not _is_about_types(error):
            raise
        raise ShardingTypeError(_message(error, mesh, gathered_axes)) from error


def _is_about_types(error: Exception) -> bool:
    if type(error).__name__ == "ShardingTypeError":
        return True
    text = str(error)
    if "do not match" in text:  # a loop whose shapes or dtypes differ, whatever their types
        return False
    meshes = re.search("context mesh (.*) should match the aval mesh (.*) for shape ", text)
    if meshes is not None:  # of other axes, or of the same axes with other types
        context, aval = (re.sub(r"axis_types=\([^)]*\)", "", mesh) for mesh in meshes.groups())
        return context == aval
    if "Incompatible types for broadcasting" in text:
        return _can_broadcast(text)
    return any(says in text for says in _OF_OTHER_CLASSES)


def _can_broadcast(text: str) -> bool:
    """Whether the first shape in a text, as in `float32[16@(data,fsdp),8]`, fits the second."""
    types = re.findall(r"\[(.*?)\]", text)
    given, wanted = (re.findall(r"(?:^|,)(\d+)(?=[@,]|$)", dims) for dims in types[:2])
    pairs = zip(reversed(given), reversed(wanted), strict=False)
    return len(given) <= len(wanted) and all(dim in ("1", other) for dim, other in pairs)


def _message(error: Exception, mesh: AnyMesh, gathered_axes: Collection[str]) -> str:
    calls = _calls(error)
    call = calls[user_line(calls)]
    file, number = call.tb_frame.f_code.co_filename, call.tb_lineno
    text = str(error).strip()
    source = f"  {linecache.getline(file, number, call.tb_frame.f_globals).strip()}"
    waiting: list[str] = []
    if "unreduced" in text:
        waiting.append(
            "Gradients wait here for one sum, as `axis_names=` asks, and JAX has types for that in"
            " products alone. Without `axis_names` the numbers are the same."
        )
    if not any(says in text for says in ON_PAGE):
        return "\n".join([f"{file}:{number}: {text}", source, *waiting])
    found = next((x for x in SUGGESTIONS if x.says in text), None)
    if found is not None and found.operator:
        works = found.operator == _operator(calls[calling_line(calls)])
    else:
        works = _is_solved_by_gathering(text, mesh, gathered_axes)
    operation, write = "an operation", []
    if found is not None and works:
        operation = found.operation
        write = [f"Write `{found.write}` instead of `{found.fails}`."]
    sizes = axis_sizes(mesh)
    explicit = ", ".join(f"{axis}={sizes[axis]}" for axis in axes_of_type(mesh, AxisType.Explicit))
    lines = [
        f"{file}:{number}: JAX cannot tell how the result of {operation} is split over the"
        f" Explicit axes {explicit}.",
        source,
        f"JAX says: {text}",
        *write,
        *waiting,
        f"Operations that fail, and what to write instead: {PAGE}",
    ]
    return "\n".join(lines)


def _is_solved_by_gathering(text: str, mesh: AnyMesh, gathered_axes: Collection[str]) -> bool:
    """Whether `unshard` of an operand removes each axis that the type of a result has twice.

    On a mesh with Auto axes, `unshard` takes leaves of the plan alone.
    """
    result = text.rpartition("illegally sharded result: ")[2]
    names = Counter(re.split(r"[@(), \[\]]+", result))
    repeated = {axis for axis in mesh.axis_names if names[axis] > 1}
    return is_all_explicit(mesh) and bool(repeated) and repeated <= {*gathered_axes}


def _operator(call: TracebackType) -> str:
    """The operator of Python that failed, such as `@`; `[]` for an index that is no tuple."""
    code = dis.get_instructions(call.tb_frame.f_code)
    # Python 3.11 may point behind an instruction, to its cache.
    *_, before, failed = (x for x in code if x.offset <= call.tb_lasti)
    if failed.opname == "BINARY_OP" and failed.argrepr != "[]":  # which Python 3.14 has there
        return failed.argrepr
    is_index = failed.opname in ("BINARY_SUBSCR", "BINARY_OP")
    return "[]" if is_index and before.opname != "BUILD_TUPLE" else ""


def _calls(error: Exception) -> dict[str, TracebackType]:
    """The calls of a traceback by their lines, innermost first."""
    calls: list[tuple[str, TracebackType]] = []
    traceback = error.__traceback__
    while traceback is not None:
        line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        calls.append((line, traceback))
        traceback = traceback.tb_next
    # Of two calls at one line, the inner one is the operation's.
    innermost: dict[str, TracebackType] = {}
    for line, call in reversed(calls):
        innermost.setdefault(line, call)
    return innermost

"""JAX's errors about types on Explicit axes, with the line of the user that failed.

JAX's text has the types, and Python's traceback has the line. The message suggests a replacement
only if it works: a choice or a loop may mean several things, and a guess that replicates rows would
repeat the work on every device with right numbers. For these, the message links to a page with
an example. If the page has no example, the message is JAX's text.
"""

import dis
import linecache
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType

from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes, is_all_explicit
from treeshard.errors import ShardingTypeError, TreeShardError, calling_line, user_line

PAGE = "https://treeshard.github.io/treeshard/reference/explicit-axes/"


class Suggestion(NamedTuple):
    """What to write instead of an operation that JAX cannot type.

    A suggestion with an operator applies only if this operator failed: other lookups and products
    have the same message. All others gather an operand over the axes that `unshard` gathers over,
    so they apply if the result would be split twice over these axes alone.
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
    "Explicit sharding inference for",  # of a ragged product
    "with partial slices does not support nontrivial array sharding",
    "Cannot apply nonzero over sharded axes",
    "unreduced rule for",  # of weights whose gradients wait
    "non-empty unreduced/reduced set",
    "unreduced/reduced rule for",
    "cannot be of instance `tuple` when self",
)
# Messages with two types, whose shapes may differ.
_OF_TWO_TYPES = (
    "Incompatible types for",
    "Expected cotangent type",
    "Custom VJP bwd rule",
    "argument to VJP function",
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
def sharding_type_errors(
    mesh: AnyMesh, gathered_axes: Collection[str] = (), *, is_waiting: bool = False
) -> Iterator[None]:
    """Raises JAX's errors about types on Explicit axes as `ShardingTypeError`.

    Args:
        mesh: The mesh.
        gathered_axes: The axes over which `unshard` gathers; empty if no plan is in force.
        is_waiting: Whether `unshard` returns weights whose gradients wait for one sum.
    """
    try:
        yield
    except TreeShardError:
        raise
    except Exception as error:  # of four classes; one has no public name
        if not axes_of_type(mesh, AxisType.Explicit) or not _is_about_types(error):
            raise
        can_gather = _is_solved_by_gathering(f"{error}", mesh, gathered_axes, is_waiting)
        waits = is_waiting and "reduced" in f"{error}"  # JAX's word for the types of waiting sums
        raise ShardingTypeError(_message(error, mesh, can_gather, waits)) from error


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
    if any(says in text for says in _OF_TWO_TYPES):
        return _do_shapes_fit(text)
    return any(says in text for says in _OF_OTHER_CLASSES)


def _do_shapes_fit(text: str) -> bool:
    """Whether the shapes of two types in JAX's text, such as `float32[16@(data,fsdp),8]`, fit."""
    types = re.findall(r"(?:\d|bool)\[(.*?)\]", text)
    if len(types) < 2:  # another wording
        return False
    sizes = (re.findall(r"(?:^|,)(\d+)", dims) for dims in types[:2])
    given, wanted = (tuple(map(int, each)) for each in sizes)
    if "for matmul" in text:
        given, wanted = given[:-2], wanted[:-2]
    try:
        both = np.broadcast_shapes(given, wanted)
    except ValueError:
        return False
    return given == wanted or "for matmul" in text or ("broadcasting" in text and both == wanted)


def _message(error: Exception, mesh: AnyMesh, can_gather: bool, waits: bool) -> str:
    calls = _calls(error)
    call = calls[user_line(calls)]
    file, number = call.tb_frame.f_code.co_filename, call.tb_lineno
    text = str(error).strip()
    source = f"  {linecache.getline(file, number, call.tb_frame.f_globals).strip()}"
    waiting: list[str] = []
    if waits:
        waiting.append(
            "Gradients wait here for one sum, as `axis_names=` asks, and JAX has types for that in"
            " products alone. Without `axis_names` the numbers are the same."
        )
    if not any(says in text for says in ON_PAGE):
        return "\n".join([f"{file}:{number}: {text}", source, *waiting])
    found = _find_suggestion(text, calls[calling_line(calls)], can_gather)
    operation = "an operation" if found is None else found.operation
    write = [] if found is None else [f"Write `{found.write}` instead of `{found.fails}`."]
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


def _find_suggestion(text: str, call: TracebackType, can_gather: bool) -> Suggestion | None:
    """The suggestion for the call that failed, if it works there."""
    found = next((x for x in SUGGESTIONS if x.says in text), None)
    if found is None:
        return None
    works = found.operator == _operator(call) if found.operator else can_gather
    return found if works else None


def _is_solved_by_gathering(
    text: str, mesh: AnyMesh, gathered_axes: Collection[str], is_waiting: bool
) -> bool:
    """Whether `unshard` of an operand removes each axis that the type of a result has twice.

    On a mesh with Auto axes, `unshard` takes only leaves of the plan. If gradients wait, JAX
    accepts the type of its results only in products.
    """
    if not is_all_explicit(mesh) or (is_waiting and "dot_general" not in text):
        return False
    result = text.rpartition("illegally sharded result: ")[2]
    names = Counter(re.split(r"[@(), \[\]]+", result))
    repeated = {axis for axis in mesh.axis_names if names[axis] > 1}
    return bool(repeated) and repeated <= {*gathered_axes}


def _operator(call: TracebackType) -> str:
    """The operator of Python that failed, such as `@`; `[]` for an index that is not a tuple."""
    frame = call.tb_frame
    # Python 3.11 may point after an instruction, to its cache.
    code = [x for x in dis.get_instructions(frame.f_code) if x.offset <= call.tb_lasti]
    operators = {"BINARY_OP": code[-1].argrepr, "BINARY_SUBSCR": "[]"}
    operator = operators.get(code[-1].opname, "")
    return "" if operator == "[]" and _is_tuple(code[-2], frame.f_locals) else operator


def _is_tuple(instruction: dis.Instruction, names: Mapping[str, Any]) -> bool:
    """Whether an instruction makes a tuple, or loads one by its name."""
    name = instruction.argval
    if isinstance(name, tuple):  # Python 3.13 may load two names at once
        name = name[-1]
    return instruction.opname == "BUILD_TUPLE" or isinstance(names.get(name), tuple)


def _calls(error: BaseException | None) -> dict[str, TracebackType]:
    """The calls of a traceback by their lines, innermost first."""
    if error is None:
        return {}
    calls: list[tuple[str, TracebackType]] = []
    traceback = error.__traceback__
    while traceback is not None:
        line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        calls.append((line, traceback))
        traceback = traceback.tb_next
    # For an error in the backward pass, the cause has the calls that led to the operation.
    by_cause = _calls(error.__cause__)
    # If two calls are on one line, the inner call is the operation's.
    innermost: dict[str, TracebackType] = {}
    for line, call in reversed(calls):
        if line not in by_cause:
            innermost.setdefault(line, call)
    return innermost | by_cause

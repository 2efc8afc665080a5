"""JAX's errors about types on Explicit axes, with the line of the user that failed.

JAX's text has the types, and Python's traceback has the line. What to write in its place is said
only where the operation alone decides: a choice or a loop may mean several things, and a guess that
replicates rows would train with right numbers on every device at once. The page that each message
links to has an example for each operation.
"""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from jax.sharding import AxisType

from treeshard._core.mesh import AnyMesh, axes_of_type, axis_sizes
from treeshard.errors import ShardingTypeError, TreeShardError, user_line

PAGE = (
    "https://treeshard.github.io/treeshard/guide/explicit-axes/"
    "#operations-that-fail-and-what-to-write-instead"
)


class Suggestion(NamedTuple):
    """What to write instead of an operation that JAX cannot type."""

    says: str  # a part of JAX's message
    operation: str  # its name
    fails: str  # an example: `x`, `h` and `ids` are values of a batch, all others are weights
    write: str  # the example, written so that JAX can type it


# The first whose `says` is in JAX's message applies: products are operations with inputs too.
SUGGESTIONS = (
    Suggestion("for the gather indexing", "a lookup", "table[ids]", "ts.lookup(table, ids)"),
    Suggestion("dot_general operation with inputs", "a product", "x @ w", "x @ ts.unshard(w)"),
    Suggestion(
        "Contracting dimensions are sharded",
        "a product along a split dim",
        "h @ down",
        "ts.matmul(h, down)",
    ),
    Suggestion("operation with inputs", "an elementwise operation", "x + b", "x + ts.unshard(b)"),
)

# Parts of the messages about types for which JAX raises `TypeError`, `ValueError` or
# `NotImplementedError`, as it does for mistakes of all kinds.
_OF_OTHER_CLASSES = (
    "carry output must have equal types",  # of a loop
    "branches must have equal output types",
    "0th dimension of all xs should be replicated",  # of a scan
    "cannot be sharded along the mesh axis you are vmapping over",
    "inputs passed to vmap should be sharded the same",
    "Closing over inputs to shard_map",
    "in_specs passed to shard_map",
    "Please pass sharding to `jnp.repeat`",
    "unreduced rule for",  # of weights whose gradients wait
    "non-empty unreduced/reduced set",
    "unreduced/reduced rule for",
)


@contextmanager
def sharding_type_errors(mesh: AnyMesh) -> Iterator[None]:
    """Raises JAX's errors about types on Explicit axes as `ShardingTypeError`."""
    try:
        yield
    except TreeShardError:
        raise
    except Exception as error:  # of four classes, one of which has no public name
        if not axes_of_type(mesh, AxisType.Explicit) or not _is_about_types(error):
            raise
        raise ShardingTypeError(_message(error, mesh)) from error


def _is_about_types(error: Exception) -> bool:
    text = str(error)
    if "do not match" in text:  # a loop whose shapes or dtypes differ, whatever their types
        return False
    is_of_class = type(error).__name__ == "ShardingTypeError"
    return is_of_class or any(says in text for says in _OF_OTHER_CLASSES)


def _message(error: Exception, mesh: AnyMesh) -> str:
    call = _call_of_user(error)
    file, number = call.tb_frame.f_code.co_filename, call.tb_lineno
    source = linecache.getline(file, number, call.tb_frame.f_globals).strip()
    text = str(error).strip()
    found = next((x for x in SUGGESTIONS if x.says in text), None)
    operation = "an operation" if found is None else found.operation
    sizes = axis_sizes(mesh)
    explicit = ", ".join(f"{axis}={sizes[axis]}" for axis in axes_of_type(mesh, AxisType.Explicit))
    lines = [
        f"{file}:{number}: JAX cannot tell how the result of {operation} is split over the"
        f" Explicit axes {explicit}.",
        f"  {source}",
        f"JAX says: {text}",
    ]
    if found is not None:
        lines.append(f"Write `{found.write}` instead of `{found.fails}`.")
    if "unreduced" in text:
        lines.append(
            "Gradients wait here for one sum, as `axis_names=` asks, and JAX has types for that in"
            " products alone. Without `axis_names` the numbers are the same."
        )
    return "\n".join([*lines, f"Operations that fail, and what to write instead: {PAGE}"])


def _call_of_user(error: Exception) -> TracebackType:
    """The innermost call of a traceback that is in the user's code."""
    calls: dict[str, TracebackType] = {}
    traceback = error.__traceback__
    while traceback is not None:
        calls[f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"] = traceback
        traceback = traceback.tb_next
    return calls[user_line(reversed(calls))]

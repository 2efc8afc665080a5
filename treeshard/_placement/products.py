"""Lookups and products that work on Auto, Explicit and Manual axes.

On Explicit axes, `table[ids]` and `x @ w` with a sharded contraction raise a `ShardingTypeError`,
because the result could be sharded in several ways. Models nearly always mean one of these ways.
"""

from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from treeshard._core.jax_private import vmapped_axes
from treeshard._core.mesh import axes_of_type
from treeshard._core.specs import all_axes, axes_of, dim_entries
from treeshard._placement.reduced import drop_reduced


def lookup(table: Any, ids: Any) -> jax.Array:
    """Looks up rows of a table, like `table[ids]`, on axes of any type.

    On Explicit axes, the first dims of the result are sharded like `ids`, and the last dims like
    the last dims of the table. On Auto axes and without a mesh it returns `table[ids]`.

    Args:
        table: An array of shape `(rows, ...)`, such as an embedding.
        ids: An array of integers, of any shape. An index outside of the table reads the nearest
            row, as in JAX.

    Returns:
        An array of shape `(*ids.shape, *table.shape[1:])`, in the dtype of the table.

    Raises:
        TypeError: If `ids` is neither an array of integers nor of booleans, as in JAX.

    Examples:
        >>> mesh = jax.make_mesh((8,), ("fsdp",))  # Explicit axes
        >>> with jax.set_mesh(mesh):
        ...     ids = jax.device_put(jnp.arange(16), P("fsdp"))
        ...     jax.typeof(lookup(jnp.ones((32, 4)), ids))
        ShapedArray(float32[16@fsdp,4])

    Source:
        `table.at[ids].get(out_sharding=...)` in JAX.
    """
    by_ids = _explicit_entries(ids)
    by_table = _explicit_entries(table)
    if by_ids is None and by_table is None:
        return table[ids]
    if not jnp.ndim(ids):  # one index is a slice to JAX, whose result takes no sharding in a `vmap`
        return lookup(table, jnp.expand_dims(ids, 0))[0]
    split = by_ids or [None] * jnp.ndim(ids)  # on a mesh of the table alone
    of_table = jax.typeof(table).sharding.spec
    if of_table.reduced and not any(by_table or ()) and of_table.reduced == {*all_axes(split)}:
        # Each device looks up its own rows, so that the gradient waits for its sum.
        rows = PartitionSpec(*split)
        return jax.shard_map(_rows_of, in_specs=(of_table, rows), out_specs=rows)(table, ids)
    # The gradient of JAX 0.10 to 0.12 is wrong for a table that is `reduced`.
    table = drop_reduced(table)
    used = {*all_axes(split), *vmapped_axes()}
    rest = [None if set(axes_of(e)) & used else e for e in (by_table or [None])[1:]]
    return table.at[ids].get(out_sharding=_sharding([*split, *rest], table, ids))


def _rows_of(table: Any, ids: Any) -> Any:
    return table[ids]


def matmul(x: Any, w: Any) -> jax.Array:
    """Multiplies activations by a matrix, like `x @ w`, on axes of any type.

    On Explicit axes, the contracted dim may be sharded, and the partial products are summed. This
    is the row-parallel product of tensor parallelism. The result is sharded like the first dims of
    `x` and the last dim of `w`, without axes that already shard another dim of the result. On Auto
    axes and without a mesh it returns `x @ w`.

    Args:
        x: An array of shape `(..., k)`.
        w: An array of shape `(k, n)`, or of shape `(..., k, n)` as in `jnp.matmul`.

    Returns:
        An array of shape `(..., n)`, in the dtype of `x @ w`.

    Raises:
        TypeError: If the shapes do not match, as in `jnp.matmul`.

    Examples:
        >>> mesh = jax.make_mesh((2, 4), ("data", "tensor"))  # Explicit axes
        >>> with jax.set_mesh(mesh):
        ...     x = jax.device_put(jnp.ones((8, 16)), P("data", "tensor"))
        ...     w = jax.device_put(jnp.ones((16, 4)), P("tensor"))
        ...     jax.typeof(matmul(x, w))
        ShapedArray(float32[8@data,4])

    Source:
        `jnp.matmul(x, w, out_sharding=...)` in JAX, and the row-parallel layers of Megatron
        (https://arxiv.org/abs/1909.08053).
    """
    by_x, by_w = _explicit_entries(x), _explicit_entries(w)
    if by_x is None and by_w is None:
        return x @ w
    of_x, of_w = by_x or [None] * jnp.ndim(x), by_w or [None] * jnp.ndim(w)
    # The last dim of `x` and the last but one of `w` are summed over, whatever splits them.
    batches = zip_longest(reversed(of_x[:-2]), reversed(of_w[:-2]))
    batch = [x_entry or w_entry for x_entry, w_entry in batches][::-1]
    rows = [*batch, *of_x[-2:-1]]
    used = {*all_axes(rows)}
    columns = [None if used & {*axes_of(entry)} else entry for entry in of_w[1:][-1:]]
    return jnp.matmul(x, w, out_sharding=_sharding([*rows, *columns], x, w))


def _sharding(by_dims: list[Any], *operands: Any) -> NamedSharding:
    """A sharding on the mesh of the operands' types, which may differ from the current mesh."""
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    mesh = next(mesh for mesh in meshes if not mesh.empty)
    return NamedSharding(mesh, PartitionSpec(*by_dims))


def _explicit_entries(x: Any) -> list[Any] | None:
    """The entries of a value's type, one for each dim; `None` if no axis is Explicit."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not axes_of_type(sharding.mesh, AxisType.Explicit):
        return None
    return dim_entries(sharding.spec, jnp.ndim(x))

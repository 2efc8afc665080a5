"""EasyDeL's functions for the axes of a mesh."""

import math
from collections.abc import Sequence

import jax

from treeshard._core.mesh import (
    MeshLike,
    axis_sizes,
    axis_tuple,
    check_bound,
    current_or_given,
    get_incontext_mesh,
)


def names_in_current_mesh(*names: str) -> bool:
    """Whether the mesh in force has all of `names` as axes; false if no mesh is in force.

    Examples:
        >>> with jax.set_mesh(make_mesh("data=2,fsdp=4")):
        ...     names_in_current_mesh("data"), names_in_current_mesh("data", "tensor")
        (True, False)

    Source:
        EasyLM and EasyDeL's function of this name.
    """
    mesh = get_incontext_mesh(raise_error=False)
    return mesh is not None and set(names) <= set(axis_sizes(mesh))


def get_mesh_axis_names(mesh: MeshLike | None = None) -> list[str]:
    """Returns the axis names of `mesh`, or of the mesh in force, outermost first.

    Raises:
        NoMeshError: If `mesh` is `None` and no mesh is in force.

    Examples:
        >>> get_mesh_axis_names(make_mesh("data=2,fsdp=4"))
        ['data', 'fsdp']
    """
    return list(axis_sizes(current_or_given(mesh)))


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """Returns the product of the sizes of some axes, inside `shard_map`.

    Args:
        axis_names: One axis or several. The product of no axes is 1.

    Raises:
        TypeError: If `axis_names` is neither a string nor a sequence of strings.
        UnknownAxisError: If an axis is not bound here: outside `shard_map`, or if this
            `shard_map` is not manual over it.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> f = lambda x: x + get_mesh_axis_size(("data", "fsdp"))
        >>> jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(0)
        Array(8, dtype=int32, weak_type=True)
    """
    names = axis_tuple(axis_names, "get_mesh_axis_size")
    check_bound(names, "get_mesh_axis_size")  # JAX's own error is a bare `NameError`
    return math.prod(jax.lax.axis_size(name) for name in names)


def get_submesh_device_index(axis_names: str | Sequence[str]) -> jax.Array | int:
    """Returns this device's row-major index along some axes, inside `shard_map`.

    The first name is the most major, which is the order of the shards of `P(("a", "b"))`.

    Args:
        axis_names: One axis or several. The index along no axes is 0.

    Returns:
        An int32 array of shape `()` that differs per device, or the int 0 for no axes.

    Raises:
        TypeError, UnknownAxisError: As `get_mesh_axis_size`.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> f = lambda: get_submesh_device_index(("data", "fsdp"))[None]
        >>> jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P(("data", "fsdp")))()
        Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    names = axis_tuple(axis_names, "get_submesh_device_index")
    check_bound(names, "get_submesh_device_index")
    # JAX counts several axes row-major, as it does the shards of `P(("a", "b"))`.
    return jax.lax.axis_index(tuple(names)) if names else 0

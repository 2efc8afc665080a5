"""The axes of a mesh, and the mesh that is in force.

Only this module knows where the current mesh comes from. JAX has three sources:

1. `jax.set_mesh`: `get_abstract_mesh` has the axes, and a private context the devices.
2. `with mesh:`, the older way, which `jax.set_mesh` overrides: only a private context has it.
3. The trace, inside `jax.set_mesh`: its mesh has no devices, but the Manual axes of `shard_map`.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, SupportsIndex, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from treeshard._core.jax_private import (
    is_tracing,
    mesh_of_set_mesh,
    mesh_of_with_statement,
    varying_axes,
)
from treeshard.errors import MeshError, NoMeshError, UnknownAxisError, did_you_mean, short

AnyMesh = Mesh | AbstractMesh
# The type of `mesh` in public functions: a mesh, or its axes as text, `"data=2,fsdp=4"`.
MeshLike = Mesh | AbstractMesh | str
M = TypeVar("M", bound=Mesh | AbstractMesh | None)


# ------------------------------------------------------------------ axes of a mesh


def axis_sizes(mesh: MeshLike) -> Mapping[str, int]:
    """Axis names to sizes, in the mesh's order."""
    return as_mesh(mesh).shape


def same_axes(a: AnyMesh, b: AnyMesh) -> bool:
    """Whether two meshes have the same axes and sizes; types and devices may differ."""
    return list(axis_sizes(a).items()) == list(axis_sizes(b).items())


def axes_of_type(mesh: AnyMesh, kind: AxisType) -> tuple[str, ...]:
    """The axes of one type, in the mesh's order."""
    return tuple(a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == kind)


@lru_cache(1024)  # every constraint asks
def auto_and_explicit(mesh: AnyMesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The Auto axes and the Explicit axes, in the mesh's order."""
    return axes_of_type(mesh, AxisType.Auto), axes_of_type(mesh, AxisType.Explicit)


def is_all_explicit(mesh: AnyMesh | None) -> bool:
    """Whether every axis of a mesh is Explicit. JAX types values as `reduced` only there."""
    kinds = () if mesh is None else mesh.axis_types
    return bool(kinds) and all(kind == AxisType.Explicit for kind in kinds)


def can_wait(mesh: AnyMesh | None) -> bool:
    """Whether gradients can wait for their sums. On a mesh of one device, JAX 0.10 to 0.12 cannot
    lower the scatter of a waiting gradient."""
    return mesh is not None and mesh.size > 1 and is_all_explicit(mesh)


def describe_mesh(mesh: MeshLike | None) -> str:
    """`data=2, fsdp=4`, as messages show a mesh."""
    return "no mesh" if mesh is None else describe_sizes(axis_sizes(mesh))


def describe_sizes(sizes: Mapping[str, SupportsIndex]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"


def unknown_axis(name: str, sizes: Mapping[str, int]) -> str:
    """The text that the mesh lacks an axis, with the axes that it has."""
    return (
        f"the mesh has no axis {name!r}. It has {describe_sizes(sizes)}.{did_you_mean(name, sizes)}"
    )


def check_axes(names: Sequence[str], sizes: Mapping[str, int], where: str) -> None:
    """Raises `UnknownAxisError` for the first of `names` that is not an axis of the mesh."""
    for name in names:
        if name not in sizes:
            raise UnknownAxisError(f"{where}: {unknown_axis(name, sizes)}")


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh | None:
    """Returns the current mesh, from `jax.set_mesh`, `with mesh:` or the trace.

    If both contexts are set, `jax.set_mesh` wins, as in JAX. Inside a trace and under
    `use_abstract_mesh`, the mesh is an `AbstractMesh`. Inside `shard_map`, its `manual_axes` are
    the axes over which the code runs once per device.

    Args:
        raise_error: Whether to raise if there is no current mesh.

    Returns:
        The mesh, or `None` if there is no current mesh and `raise_error` is false.

    Raises:
        NoMeshError: If there is no current mesh and `raise_error` is true.

    Examples:
        >>> with jax.set_mesh(make_mesh("fsdp=8")):
        ...     get_incontext_mesh().shape["fsdp"]
        8

    Source:
        eformer's function of this name.
    """
    mesh = context_mesh()
    if mesh is None:
        mesh = mesh_of_with_statement()
    elif is_tracing():
        # Only the mesh of the trace says which axes are Manual here.
        mesh = jax.sharding.get_abstract_mesh()
    if mesh is None and raise_error:
        raise NoMeshError(f"get_incontext_mesh: {_NO_MESH}")
    return mesh


_NO_MESH = (
    "no mesh is in force. Pass one (`mesh=...`), run inside `with jax.set_mesh(mesh):`, or give"
    ' `NamedSharding`s, which carry their own mesh. `treeshard.make_mesh("data=2,fsdp=-1")` makes'
    " one."
)


def current_or_given(mesh: MeshLike | None, where: str) -> AnyMesh:
    """Returns `mesh`, without devices if it is text, or by default the mesh in force.

    Raises `NoMeshError`, in the name of `where`, if no mesh is in force.
    """
    if mesh is not None:
        return as_mesh(mesh)
    current = get_incontext_mesh(raise_error=False)
    if current is None:
        raise NoMeshError(f"{where}: {_NO_MESH}")
    return current


def context_mesh() -> AnyMesh | None:
    """The mesh that JAX checks types against here, with its devices if they are known.

    Differs from `get_incontext_mesh` in two ways: it ignores `with mesh:`, which JAX's types
    do not depend on, and it keeps the devices of `jax.set_mesh` inside traces.
    """
    abstract = jax.sharding.get_abstract_mesh()
    # JAX returns an empty mesh rather than `None`.
    return None if abstract.empty else mesh_of_set_mesh(abstract)


def get_axes_size_in_mesh(axis_names: str | Sequence[str], mesh: MeshLike | None = None) -> int:
    """Returns the number of devices along one or several axes of a mesh.

    Inside `shard_map`, use `get_mesh_axis_size`, which needs no mesh.

    Args:
        axis_names: One axis or several, whose sizes multiply. Without axes, the size is 1.
        mesh: The mesh, or its axes as text; by default the current mesh.

    Returns:
        An int.

    Raises:
        TypeError: If `axis_names` is neither a string nor a sequence of strings.
        UnknownAxisError: If the mesh lacks an axis.
        NoMeshError: If `mesh` is `None` and there is no current mesh.
        MeshError: If `mesh` is not a mesh.

    Examples:
        >>> get_axes_size_in_mesh(("data", "fsdp"), make_mesh("data=2,fsdp=4"))
        8

    Source:
        eformer's function of this name.
    """
    names = axis_tuple(axis_names, "get_axes_size_in_mesh")
    sizes = axis_sizes(current_or_given(mesh, "get_axes_size_in_mesh"))
    check_axes(names, sizes, "get_axes_size_in_mesh")
    return math.prod(sizes[name] for name in names)


def get_mesh_axis_names(mesh: MeshLike | None = None) -> list[str]:
    """Returns the axis names of a mesh, outermost first.

    Args:
        mesh: The mesh, or its axes as text; by default the current mesh.

    Raises:
        NoMeshError: If `mesh` is `None` and there is no current mesh.
        MeshError: If `mesh` is not a mesh.

    Examples:
        >>> get_mesh_axis_names(make_mesh("data=2,fsdp=4"))
        ['data', 'fsdp']

    Source:
        eformer's function of this name.
    """
    return list(axis_sizes(current_or_given(mesh, "get_mesh_axis_names")))


def names_in_current_mesh(*names: str) -> bool:
    """Returns whether the current mesh has all of these axes; false if there is no current mesh.

    Examples:
        >>> with jax.set_mesh(make_mesh("data=2,fsdp=4")):
        ...     names_in_current_mesh("data"), names_in_current_mesh("data", "tensor")
        (True, False)

    Source:
        EasyLM and EasyDeL's function of this name.
    """
    mesh = get_incontext_mesh(raise_error=False)
    return mesh is not None and set(names) <= set(axis_sizes(mesh))


# ------------------------------------------------------------------ meshes as text


def parse_axes(axes: Mapping[str, SupportsIndex] | str) -> dict[str, int]:
    """The sizes of `"data=2,fsdp=-1"`, or of a mapping. One may be -1."""
    if isinstance(axes, str):
        sizes: dict[str, SupportsIndex] = {}
        for part in axes.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*", part)
            if match is None:
                raise MeshError(
                    f"{axes!r}: cannot read {part.strip()!r}. Write name=size pairs separated"
                    ' by commas, as in "data=2,fsdp=-1".'
                )
            if match[1] in sizes:
                raise MeshError(f"{axes!r}: the axis {match[1]!r} is repeated.")
            sizes[match[1]] = int(match[2])
    else:
        sizes = dict(axes)
    numbers: dict[str, int] = {}
    for name, size in sizes.items():
        try:
            numbers[name] = operator.index(size)  # numpy's numbers too
        except TypeError:
            numbers[name] = 0
        if numbers[name] == 0 or numbers[name] < -1:
            raise MeshError(
                f"{describe_sizes(sizes)}: the size of {name!r} must be a positive number, or"
                " -1 for the remaining devices."
            )
    return numbers


def abstract_mesh(axes: Mapping[str, SupportsIndex] | str) -> AbstractMesh:
    """A mesh of Auto axes without devices, of any size. Starts no backend."""
    sizes = parse_axes(axes)
    if unknown := [name for name, size in sizes.items() if size == -1]:
        raise MeshError(
            f"{describe_sizes(sizes)}: the size of {unknown[0]!r} cannot be -1 without devices."
            " Give it a number."
        )
    # Auto is also the default of `make_mesh`.
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def as_mesh(mesh: M | str, make: Callable[[str], AnyMesh] = abstract_mesh) -> M | AnyMesh:
    """Turns text into a mesh, by `make_mesh` if arrays are placed. Returns a mesh unchanged.

    Raises `MeshError` for other types.
    """
    if mesh is None or isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    if isinstance(mesh, str):
        return make(mesh)
    # Users of other libraries pass a number of devices.
    axes = f"fsdp={mesh}" if isinstance(mesh, int) else "data=2,fsdp=4"
    raise MeshError(
        f"the mesh is {short(repr(mesh))} ({type(mesh).__name__}). Give a mesh, or its axes and"
        f' their sizes as text: `treeshard.make_mesh("{axes}")`, or `"{axes}"` alone.'
    )


# ------------------------------------------------------------------ inside shard_map


def axis_tuple(axis_names: str | Sequence[str], where: str) -> tuple[str, ...]:
    """One axis name or several, as a tuple. In the message, `where` names the caller, or shows its
    call: `"vary(tree, axis_names)"`."""
    if isinstance(axis_names, str):
        return (axis_names,)
    if isinstance(axis_names, Sequence) and all(isinstance(name, str) for name in axis_names):
        return tuple(axis_names)
    name, is_call, _ = where.partition("(")
    raise TypeError(
        f"{name}: {short(repr(axis_names))} is {type(axis_names).__name__}; axis names are a string"
        f" or a sequence of strings.{f' Call `{where}`.' * bool(is_call)}"
    )


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """Returns the number of devices along one or several axes, inside `shard_map`.

    Outside `shard_map`, use `get_axes_size_in_mesh`.

    Args:
        axis_names: One axis or several, whose sizes multiply. Without axes, the size is 1.

    Returns:
        An int.

    Raises:
        TypeError: If `axis_names` is neither a string nor a sequence of strings.
        UnknownAxisError: If the call is outside `shard_map`, or the `shard_map` is not manual over
            an axis.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> f = lambda x: x + get_mesh_axis_size(("data", "fsdp"))
        >>> jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(0)
        Array(8, dtype=int32, weak_type=True)

    Source:
        eformer's function of this name.
    """
    names = axis_tuple(axis_names, "get_mesh_axis_size")
    check_bound(names, "get_mesh_axis_size")  # JAX's own error is a bare `NameError`
    return math.prod(jax.lax.axis_size(name) for name in names)


def get_submesh_device_index(axis_names: str | Sequence[str]) -> jax.Array | int:
    """Returns the index of this device along one or several axes, inside `shard_map`.

    Device `i` holds shard `i` of a dim that `P(("a", "b"))` shards: the first axis is outermost.

    Args:
        axis_names: One axis or several. Without axes, the index is 0.

    Returns:
        An int32 array of shape `()` that differs between devices, or the int 0 without axes.

    Raises:
        TypeError, UnknownAxisError: As `get_mesh_axis_size`.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> f = lambda: get_submesh_device_index(("data", "fsdp"))[None]
        >>> jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P(("data", "fsdp")))()
        Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)

    Source:
        eformer's function of this name.
    """
    names = axis_tuple(axis_names, "get_submesh_device_index")
    instead = "`jax.process_index()` gives the index of the process"
    check_bound(names, "get_submesh_device_index", instead)
    # JAX counts several axes row-major, as it does the shards of `P(("a", "b"))`.
    return jax.lax.axis_index(tuple(names)) if names else 0


def check_bound(
    names: Sequence[str], where: str, instead: str = "`get_axes_size_in_mesh` gives sizes"
) -> None:
    """Raises `UnknownAxisError` for the first of `names` that is not a Manual axis here;
    `instead` says what to use outside `shard_map`."""
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError as error:
            manual = manual_axes()
            bound = f"The bound axes are {sorted(manual)}." if manual else "No axis is bound."
            raise UnknownAxisError(
                f"{where}: the axis {name!r} is not bound here. {bound}"
                f"{did_you_mean(name, manual)} Axes are bound inside `jax.shard_map`; outside,"
                f" {instead}."
            ) from error


def manual_axes() -> frozenset[str]:
    """The axes over which the code that is being traced runs once per device."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def still_differs(x: Any, axis: str) -> bool:
    """Whether the devices along `axis` may have different values of `x`."""
    # The index of a device always varies, unless JAX does not track varying axes.
    return axis in varying_axes(x) or axis not in varying_axes(jax.lax.axis_index(axis))


def vary_array(x: Any, axes: Sequence[str]) -> Any:
    """Casts an array to a type that varies along `axes`."""
    invariant = tuple(axis for axis in axes if not still_differs(x, axis))
    return jax.lax.pcast(x, invariant, to="varying") if invariant else x

"""What a mesh is, and which one is in force.

The only module that knows where a current mesh comes from: `jax.set_mesh`, the older
`with mesh:`, or the trace that is under way.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from treeshard._errors import NoMeshError, UnknownAxisError, did_you_mean

AnyMesh = Mesh | AbstractMesh
AxisTypeName = Literal["auto", "explicit"]

_SIMULATED = "--xla_force_host_platform_device_count"


# ------------------------------------------------------------------ asking a mesh


def axis_sizes(mesh: AnyMesh) -> Mapping[str, int]:
    """Axis name -> size, in the mesh's order."""
    return mesh.shape


def same_axes(a: AnyMesh, b: AnyMesh) -> bool:
    """Whether two meshes have the same axes and sizes; types and devices may differ."""
    return list(axis_sizes(a).items()) == list(axis_sizes(b).items())


def axes_of_type(mesh: AnyMesh, kind: AxisType) -> tuple[str, ...]:
    """The axes of one type, in the mesh's order."""
    return tuple(a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == kind)


def describe_mesh(mesh: AnyMesh | None) -> str:
    """`data=2, fsdp=4`, as messages show a mesh."""
    return "no mesh" if mesh is None else describe_sizes(axis_sizes(mesh))


def describe_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"


def unknown_axis(name: str, sizes: Mapping[str, int]) -> str:
    """The fact that the mesh lacks an axis, with what it has."""
    return (
        f"the mesh has no axis {name!r}. It has {describe_sizes(sizes)}.{did_you_mean(name, sizes)}"
    )


def check_axes(names: Sequence[str], sizes: Mapping[str, int], where: str) -> None:
    """Raises `UnknownAxisError` for the first of `names` that is not an axis."""
    for name in names:
        if name not in sizes:
            raise UnknownAxisError(f"{where}: {unknown_axis(name, sizes)}")


def get_incontext_mesh(*, raise_error: bool = True) -> AnyMesh | None:
    """Returns the mesh in force: by `jax.set_mesh`, `with mesh:`, or inside a trace.

    Where both contexts are set, `jax.set_mesh` wins, as in JAX. Inside a trace, and
    under `use_abstract_mesh`, the mesh is an `AbstractMesh`; inside `shard_map` its
    `manual_axes` say over which axes the code runs once per device.

    Args:
        raise_error: Whether having no mesh is an error.

    Returns:
        The mesh, or `None` if there is none and `raise_error` is false.

    Raises:
        NoMeshError: If no mesh is in force and `raise_error` is true.

    Examples:
        >>> with jax.set_mesh(make_mesh("fsdp=8")):
        ...     get_incontext_mesh().shape["fsdp"]
        8
    """
    mesh = _set_mesh() or _with_mesh()
    if mesh is None and raise_error:
        raise NoMeshError(
            "No mesh is in force. Pass one (`mesh=...`), run inside `with jax.set_mesh(mesh):`,"
            " or give `NamedSharding`s, which carry their own."
            ' `treeshard.make_mesh("data=2,fsdp=-1")` makes one.'
        )
    return mesh


def current_or_given(mesh: AnyMesh | None) -> AnyMesh:
    """The mesh given, else the one in force. Raises `NoMeshError` without either."""
    if mesh is not None:
        return mesh
    found = get_incontext_mesh()
    assert found is not None  # get_incontext_mesh raises; this is for the type checker
    return found


def _set_mesh() -> AnyMesh | None:
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    if is_tracing():
        return abstract
    concrete = jax.sharding.get_mesh()
    # Under `use_abstract_mesh` the concrete mesh is empty, or an outer one.
    return concrete if concrete.abstract_mesh == abstract else abstract


def _with_mesh() -> Mesh | None:
    # The public alias warns; both are gone one day, and then `with mesh:` is too.
    try:
        from jax._src.mesh import thread_resources
    except ImportError:
        return None
    mesh = thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def context_mesh() -> AnyMesh | None:
    """The mesh that types are checked against here, with its devices where they are known.

    Unlike `get_incontext_mesh` it does not look at `with mesh:`, which JAX's types do not
    see, and has the devices of `jax.set_mesh` inside traces too.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    # Inside a trace there is no public way to ask.
    try:
        from jax._src.mesh import get_concrete_mesh
    except ImportError:
        return abstract
    concrete = get_concrete_mesh()
    # Under `use_abstract_mesh` and `shard_map` it is empty, or an outer one.
    return concrete if concrete.abstract_mesh == abstract else abstract


def is_tracing() -> bool:
    """Whether a JAX transformation is under way in this thread."""
    try:
        jax.sharding.get_mesh()
    except ValueError:  # what it does inside any trace
        return True
    return False


def names_in_current_mesh(*names: str) -> bool:
    """Whether the mesh in force has all of `names` as axes; false without a mesh.

    Examples:
        >>> with jax.set_mesh(make_mesh("data=2,fsdp=4")):
        ...     names_in_current_mesh("data"), names_in_current_mesh("data", "tensor")
        (True, False)

    Source:
        EasyLM and EasyDeL's function of this name.
    """
    mesh = get_incontext_mesh(raise_error=False)
    return mesh is not None and set(names) <= set(axis_sizes(mesh))


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """Returns the axis names of `mesh`, or of the mesh in force, outermost first.

    Raises:
        NoMeshError: If `mesh` is `None` and no mesh is in force.

    Examples:
        >>> get_mesh_axis_names(make_mesh("data=2,fsdp=4"))
        ['data', 'fsdp']
    """
    return list(axis_sizes(current_or_given(mesh)))


def get_axes_size_in_mesh(axis_names: str | Sequence[str], mesh: AnyMesh | None = None) -> int:
    """Returns the product of the sizes of some axes: over how many parts they split.

    Args:
        axis_names: One axis, or several. Of none the product is 1.
        mesh: The mesh; the one in force by default.

    Raises:
        TypeError: If `axis_names` is neither a string nor a sequence of strings.
        UnknownAxisError: If the mesh lacks one of them.
        NoMeshError: If `mesh` is `None` and no mesh is in force.

    Examples:
        >>> get_axes_size_in_mesh(("data", "fsdp"), make_mesh("data=2,fsdp=4"))
        8
    """
    names = axis_tuple(axis_names, "get_axes_size_in_mesh")
    sizes = axis_sizes(current_or_given(mesh))
    check_axes(names, sizes, "get_axes_size_in_mesh")
    return math.prod(sizes[name] for name in names)


# ------------------------------------------------------------------ inside shard_map


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """Returns over how many devices some axes run, inside `shard_map`.

    Args:
        axis_names: One axis, or several. Of none the product is 1.

    Raises:
        TypeError: If `axis_names` is neither a string nor a sequence of strings.
        UnknownAxisError: If an axis is not bound here: outside `shard_map`, or an axis
            over which this `shard_map` is not manual.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> f = lambda x: x + get_mesh_axis_size(("data", "fsdp"))
        >>> jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(0)
        Array(8, dtype=int32, weak_type=True)
    """
    names = axis_tuple(axis_names, "get_mesh_axis_size")
    check_bound(names, "get_mesh_axis_size")
    return math.prod(jax.lax.axis_size(name) for name in names)


def get_submesh_device_index(axis_names: str | Sequence[str]) -> jax.Array | int:
    """Returns this device's row-major index along some axes, inside `shard_map`.

    The first name is the most major: the order in which `P(("a", "b"))` lays shards.

    Args:
        axis_names: One axis, or several. Of none the index is 0.

    Returns:
        A 0-d int32 array that differs per device, or the int 0 for no axes.

    Raises:
        TypeError: If `axis_names` is neither a string nor a sequence of strings.
        UnknownAxisError: If an axis is not bound here: outside `shard_map`, or an axis
            over which this `shard_map` is not manual.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> f = lambda: get_submesh_device_index(("data", "fsdp"))[None]
        >>> jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P(("data", "fsdp")))()
        Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    names = axis_tuple(axis_names, "get_submesh_device_index")
    check_bound(names, "get_submesh_device_index")
    return jax.lax.axis_index(tuple(names)) if names else 0


def axis_tuple(axis_names: str | Sequence[str], where: str) -> tuple[str, ...]:
    """Axis names as a tuple, whether one or several were given; `where` is for the message."""
    if isinstance(axis_names, str):
        return (axis_names,)
    if isinstance(axis_names, Sequence) and all(isinstance(name, str) for name in axis_names):
        return tuple(axis_names)
    raise TypeError(
        f"{where}: {axis_names!r} is {type(axis_names).__name__}; axis names are a string or a"
        " sequence of strings."
    )


def check_bound(
    names: Sequence[str], where: str, instead: str = "`get_axes_size_in_mesh` gives sizes"
) -> None:
    """Raises `UnknownAxisError` for the first of `names` over which the code does not run once
    per device; `instead` says what to use outside `shard_map`."""
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError as error:
            manual = manual_axes()
            raise UnknownAxisError(
                f"{where}: the axis {name!r} is not bound here."
                f" {f'Bound are {sorted(manual)}.' if manual else 'None is.'}"
                f"{did_you_mean(name, manual)} Axes are bound inside `jax.shard_map`; outside,"
                f" {instead}."
            ) from error


def manual_axes() -> frozenset[str]:
    """The axes over which the code runs once per device, here and now."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def vmapped_axes() -> frozenset[str]:
    """The axes that an enclosing `vmap` lays its mapped dim over, here and now.

    Those of its `spmd_axis_name`, and the Explicit ones that the mapped dim is sharded on.
    No spec inside may name them.
    """
    # No public way to ask; without this one, JAX itself refuses such specs.
    try:
        from jax._src.core import get_axis_env
    except ImportError:
        return frozenset()
    axes = get_axis_env()
    return frozenset(getattr(axes, "spmd_axis_names", ())) | frozenset(
        getattr(axes, "explicit_mesh_axis_names", ())
    )

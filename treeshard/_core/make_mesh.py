"""Makes meshes of real, simulated and absent devices.

`jax.make_mesh` arranges the devices of one fast network. It takes no size of -1, knows no slices,
raises where axes must share a dim of a torus, and makes all axes Explicit.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from treeshard._core.jax_private import backends_started
from treeshard._core.mesh import (
    MeshLike,
    check_axes,
    current_or_given,
    describe_mesh,
    describe_sizes,
    parse_axes,
)
from treeshard.errors import MeshError, NoDevicesError, warn

AxisTypeName = Literal["auto", "explicit"]

_OF_4X4 = 16

_SIMULATED = "--xla_force_host_platform_device_count"


def make_mesh(
    axes: Mapping[str, int] | str | Sequence[int],
    names: Sequence[str] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    topology: str | None = None,
    dcn_axes: Mapping[str, int] | str | None = None,
    axis_types: AxisTypeName | Mapping[str, AxisTypeName] = "auto",
) -> Mesh:
    """Makes a mesh, with its axes assigned to devices by how these are connected.

    Examples:
        >>> dict(make_mesh("data=2,fsdp=-1").shape)  # on 8 devices
        {'data': 2, 'fsdp': 4}
        >>> make_mesh((2, 4), ("data", "fsdp")) == make_mesh("data=2,fsdp=4")
        True

    Args:
        axes: Axis names and sizes, outermost first: `{"data": 2, "fsdp": -1}` or
            `"data=2,fsdp=-1"`; or sizes alone, with `names`. One size may be -1: it takes the
            remaining devices.
        names: Axis names, where `axes` has sizes alone, as in `jax.make_mesh`.
        devices: The devices to use; all of `jax.devices()` by default.
        topology: Devices that are not attached, for planning and compiling: `"v5e:16x16"` or
            `"v5e-256"`, `"v6e:16x16*2"` for two slices, `"h100:2x8"` for two nodes of eight
            GPUs. It needs the compiler of these devices, `treeshard[tpu]` or `treeshard[cuda]`;
            what needs the devices themselves raises `MeshError`.
        dcn_axes: The factor of each axis that runs over the slow network between
            slices (or processes), in the same notation. The size of an axis in the mesh
            is then the product of its two factors: `axes="data=1,fsdp=4"` with
            `dcn_axes="data=2"` makes `data=2, fsdp=4` of 8 devices. Without it, devices of
            several slices are split along the one axis whose size the number of slices divides.
        axis_types: `"auto"` (the compiler's partitioner decides what no spec says) or
            `"explicit"` (shardings are part of types), for all axes or per axis name.

    Returns:
        A `jax.sharding.Mesh` with every axis type set.

    Raises:
        MeshError: If `axes` cannot be parsed, has no name for each size, has two sizes of -1, or
            does not multiply to the number of devices; if `dcn_axes` does not match the slices; if
            `topology` names a slice that does not exist, or is given beside `devices`.
        ImportError: If the compiler for `topology` is not installed.
        UnknownAxisError: If `dcn_axes` or `axis_types` names an axis not in `axes`.

    Warns:
        ShardingWarning: If axes share a dim of the torus between TPUs, for which JAX has no mesh
            (except of v5e), or if one axis is split over slices without `dcn_axes`.

    Source:
        `jax.make_mesh` and `jax.experimental.mesh_utils`; the notation of EasyLM's
        mesh strings.
    """
    sizes = parse_axes(_named(axes, names))
    slow = {} if dcn_axes is None else parse_axes(dcn_axes)
    check_axes(list(slow), sizes, "make_mesh")
    types = _axis_types(axis_types, sizes)
    devices = _devices(devices, topology)
    sizes, slow = _fill(sizes, slow, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if dcn_axes is None and slices > 1:
        sizes, slow = _split_over_slices(sizes, slices)
    if not slow:
        return _on_one_network(sizes, types, devices)
    # Without slices, as on GPUs, the slow network is between processes.
    return _on_two_networks(sizes, slow, types, devices, process_is_granule=slices == 1)


def _named(
    axes: Mapping[str, int] | str | Sequence[int], names: Sequence[str] | None
) -> Mapping[str, int] | str:
    """Axes with their names, which may be given beside the sizes."""
    has_names = isinstance(axes, Mapping | str)
    if has_names and names is None:
        return axes
    if has_names or names is None or isinstance(names, str) or len({*names}) != len(axes):
        raise MeshError(
            f"make_mesh({axes!r}, {names!r}): give a name for each size, `make_mesh((2, 4),"
            ' ("data", "fsdp"))`, or names and sizes in one, `make_mesh("data=2,fsdp=4")`.'
        )
    return dict(zip(names, axes, strict=True))


def _axis_types(
    axis_types: AxisTypeName | Mapping[str, AxisTypeName], sizes: Mapping[str, int]
) -> tuple[AxisType, ...]:
    if not isinstance(axis_types, str | Mapping):
        raise MeshError(
            f"axis_types is {axis_types!r}. Pass 'auto' or 'explicit', or a dict of these by axis."
        )
    names = dict.fromkeys(sizes, axis_types) if isinstance(axis_types, str) else axis_types
    check_axes(list(names), sizes, "make_mesh")
    for name in names.values():
        if name not in _AXIS_TYPES:
            raise MeshError(f"axis_types: {name!r} is neither 'auto' nor 'explicit'.")
    return tuple(_AXIS_TYPES[names.get(axis, "auto")] for axis in sizes)


_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def _devices(devices: Sequence[Any] | None, topology: str | None) -> list[Any]:
    if topology is None:
        return jax.devices() if devices is None else list(devices)
    if devices is not None:
        raise MeshError("make_mesh: give either `devices` or `topology`.")
    # Its tables of chips and slices serve nothing else.
    from treeshard._core.topologies import topology_devices

    return topology_devices(topology)


def _on_one_network(
    sizes: Mapping[str, int], types: tuple[AxisType, ...], devices: Sequence[Any]
) -> Mesh:
    names, lengths = tuple(sizes), tuple(sizes.values())
    if max(lengths) == len(devices) == _OF_4X4 and hasattr(devices[0], "coords"):
        # Along one axis JAX puts the chips of v5e:4x4 into a ring. In the order of their
        # coordinates, gradients can be scattered over one dim of the torus after the other.
        devices = sorted(devices, key=lambda device: tuple(device.coords))
        return Mesh(np.array(devices).reshape(lengths), names, axis_types=types)
    try:
        return jax.make_mesh(lengths, names, types, devices=devices)
    except NotImplementedError:  # as where axes have to share a dim of the torus
        from jax.experimental import mesh_utils  # slow to import, and few meshes need it

        grid = _arranged(partial(mesh_utils.create_device_mesh, lengths, devices), sizes)
        return Mesh(grid, names, axis_types=types)


def _on_two_networks(
    sizes: Mapping[str, int],
    slow: Mapping[str, int],
    types: tuple[AxisType, ...],
    devices: Sequence[Any],
    *,
    process_is_granule: bool,
) -> Mesh:
    from jax.experimental import mesh_utils  # slow to import, and few meshes need it

    between = [slow.get(name, 1) for name in sizes]
    make = partial(
        mesh_utils.create_hybrid_device_mesh,
        list(sizes.values()),
        between,
        devices,
        process_is_granule=process_is_granule,
    )
    try:
        grid = _arranged(make, sizes)
    except ValueError as error:
        raise MeshError(
            f"dcn_axes {describe_sizes(slow)} does not match how the devices are connected:"
            f" {error}. Their product must be the number of slices, or of processes where"
            " there are no slices."
        ) from error
    return Mesh(grid, tuple(sizes), axis_types=types)


def _arranged(make: Callable[..., Any], sizes: Mapping[str, int]) -> Any:
    """The devices as `make` arranges them; if it cannot give each axis whole dims of the torus,
    with axes that share one."""
    try:
        return make()
    except NotImplementedError:
        grid = make(allow_split_physical_axes=True)
    warn(
        f"make_mesh: {describe_sizes(sizes)}: the axes cannot each have whole dims of the devices'"
        " torus, so some share a dim, and collectives along them use fewer links. Where that"
        " matters, take sizes that are products of dims, such as 4 x 16 on a torus of 4x4x4."
    )
    return grid


def with_devices(mesh: MeshLike | None, where: str, *, compile_only: bool = False) -> Mesh:
    """Returns a mesh that arrays can be placed on; by default the mesh in force.

    Raises an error in the name of `where` if the mesh is abstract, or its devices are not attached
    and it is not to `compile_only`.
    """
    mesh = make_mesh(mesh) if isinstance(mesh, str) else current_or_given(mesh)
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        if compile_only or is_attached(device):
            return mesh
        raise NoDevicesError(
            f"{where}: this mesh ({describe_mesh(mesh)}) is of devices that are not attached"
            f" ({device.device_kind}): it can plan and compile. Pass a mesh of attached devices;"
            " a plan is made again for it by `plan.on(mesh)`."
        )
    raise NoDevicesError(
        f"{where}: the mesh ({describe_mesh(mesh)}) is an AbstractMesh: it has sizes, but no"
        " devices to hold arrays. Pass a mesh with devices, as `treeshard.make_mesh` returns; a"
        " plan is made again for it by `plan.on(mesh)`."
    )


def is_attached(device: Any) -> bool:
    """Whether a device can hold arrays; those of a topology can only be compiled for."""
    return getattr(device.client, "runtime_type", "") != "compile_only_runtime"


def simulate_devices(n: int) -> None:
    """Makes the CPU platform show `n` devices, for laptops, tests and demos.

    It does not choose a platform: with accelerators present, `jax.devices()` still lists
    those. It takes precedence over a device count in `XLA_FLAGS`.

    Args:
        n: The number of CPU devices, at least 1.

    Raises:
        MeshError: If `n` is not a positive number, or a backend has already started with
            another number of CPU devices.

    Examples:
        >>> simulate_devices(8)
        >>> len(jax.devices("cpu"))
        8
    """
    if isinstance(n, bool) or n < 1:
        raise MeshError(f"simulate_devices({n!r}): the number of devices must be at least 1.")
    if backends_started():
        if len(jax.devices("cpu")) == n:
            return
        raise MeshError(
            f"simulate_devices({n}) was called too late: JAX has already started with"
            f" {len(jax.devices('cpu'))} CPU device(s), and cannot change their number. Call it"
            " right after the imports, before any code lists devices or makes an array."
        )
    flags = os.environ.get("XLA_FLAGS", "")
    if _SIMULATED in flags:
        os.environ["XLA_FLAGS"] = re.sub(rf"{_SIMULATED}=\S*\s*", "", flags).strip()
    jax.config.update("jax_num_cpu_devices", n)


def _split_over_slices(sizes: dict[str, int], slices: int) -> tuple[dict[str, int], dict[str, int]]:
    """The factors within a slice and between slices, if only one axis can take the slices."""
    able = [name for name, size in sizes.items() if size % slices == 0]
    if len(able) != 1:
        which = f"several axes can be split over them: {', '.join(able)}"
        if not able:
            which = "no axis can be split over them"
        name = next(iter(able or sizes))
        within = describe_sizes({**sizes, name: max(1, sizes[name] // slices)}).replace(" ", "")
        raise MeshError(
            f"{describe_sizes(sizes)}: the devices are in {slices} slices with a slow network"
            f" between them, and {which}. Say which axis runs over the slow network,"
            f' and give sizes within a slice: make_mesh("{within}", dcn_axes="{name}={slices}").'
        )
    [name] = able
    warn(
        f"make_mesh: {name!r} runs over the slow network between {slices} slices, since only its"
        f' size can be split over them. Pass dcn_axes="{name}={slices}", and its size within a'
        " slice in `axes`, to say so yourself."
    )
    return {**sizes, name: sizes[name] // slices}, {name: slices}


def _fill(
    sizes: dict[str, int], slow: dict[str, int], devices: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Both with the size that is -1 replaced, so that they multiply to the number of devices."""
    both = {**{f"{name} (dcn)": size for name, size in slow.items()}, **sizes}
    text = describe_sizes(both)
    unknown = [name for name, size in both.items() if size == -1]
    if len(unknown) > 1:
        raise MeshError(
            f"{text}: only one size may be -1, since it takes all remaining devices."
            f" Give {' or '.join(unknown)} a number."
        )
    known = math.prod(size for size in both.values() if size != -1)
    remaining = devices // known if unknown else 1
    if known * remaining != devices:
        problem, way_out = _WRONG_PRODUCT[bool(unknown)]
        raise MeshError(
            f"{text} multiplies to {known}, which {problem} the number of devices, {devices}."
            f" Change a size,{way_out} pass `devices=`, or simulate more with"
            " `treeshard.simulate_devices`."
        )

    def filled(factors: dict[str, int]) -> dict[str, int]:
        return {name: remaining if size == -1 else size for name, size in factors.items()}

    return filled(sizes), filled(slow)


# By whether a size is -1.
_WRONG_PRODUCT = {True: ("does not divide", ""), False: ("is not", " let one be -1,")}

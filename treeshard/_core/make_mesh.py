"""Makes meshes of real, simulated and absent devices.

`jax.make_mesh` arranges the devices of one fast network. This module adds axes as text, a size of
-1, several slices, axes that share a dim of a torus, and devices that are not attached.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from treeshard._core.jax_private import has_started_backends
from treeshard._core.mesh import (
    MeshLike,
    check_axes,
    current_or_given,
    describe_mesh,
    describe_sizes,
    parse_axes,
)
from treeshard.errors import MeshError, NoDevicesError

AxisTypeLike = AxisType | Literal["auto", "explicit"]

_AXIS_TYPES: Mapping[Any, AxisType] = {
    "auto": AxisType.Auto,
    "explicit": AxisType.Explicit,
    AxisType.Auto: AxisType.Auto,
    AxisType.Explicit: AxisType.Explicit,
}
_CHIPS_OF_4X4 = 16
_SIMULATED = "--xla_force_host_platform_device_count"


def make_mesh(
    axes: Mapping[str, SupportsIndex] | str | Sequence[SupportsIndex],
    names: Sequence[str] | None = None,
    axis_types: AxisTypeLike | Sequence[AxisTypeLike] = "auto",
    *,
    devices: Sequence[Any] | np.ndarray | None = None,
    topology: str | None = None,
    dcn_axes: Mapping[str, SupportsIndex] | str | None = None,
) -> Mesh:
    """Makes a mesh of attached, simulated or absent devices, from axes as text or as in JAX.

    If an axis does not fill full dims of a TPU torus, such as 8 on 4x4x4, `jax.make_mesh` raises.
    This function lets axes share a dim; collectives along them use fewer links.

    Examples:
        >>> dict(make_mesh("data=2,fsdp=-1").shape)  # on 8 devices
        {'data': 2, 'fsdp': 4}
        >>> make_mesh((2, 4), ("data", "fsdp")) == make_mesh("data=2,fsdp=4")
        True

    Args:
        axes: Axis names and sizes, outermost first: `"data=2,fsdp=-1"`, `{"data": 2, "fsdp": -1}`,
            or sizes alone with `names`. One size may be -1, and takes the remaining devices.
        names: Axis names, if `axes` has only sizes, as in `jax.make_mesh`.
        axis_types: `"auto"` (the compiler shards values), `"explicit"` (types include shardings),
            or a `jax.sharding.AxisType`; one for all axes, or one for each.
        devices: The devices to use, as a sequence or an array such as `mesh.devices`, whose shape
            has no effect; by default `jax.devices()`.
        topology: Devices that are not attached, for planning and compiling: `"v5e:16x16"` or
            `"v5e-256"`, `"v6e:16x16*2"` for two slices, `"h100:2x8"` for two nodes of eight
            GPUs. Install their compiler with `treeshard[tpu]` or `treeshard[cuda]`. Functions that
            need the devices themselves raise `MeshError`.
        dcn_axes: For each axis that crosses the slow network between slices (or processes), the
            factor that crosses it, in the same notation. The size of an axis is the product of
            both factors: `axes="data=1,fsdp=4"` with `dcn_axes="data=2"` makes `data=2, fsdp=4` of
            8 devices. Required for devices of several slices.

    Returns:
        A `jax.sharding.Mesh` with every axis type set.

    Raises:
        MeshError: If `axes` cannot be parsed, or the sizes do not multiply to the number of
            devices. If the numbers of names, types and sizes differ. If `dcn_axes` is missing or
            does not match the slices. If `topology` names a slice that does not exist, or is passed
            with `devices`.
        ImportError: If the compiler for `topology` is not installed.
        UnknownAxisError: If `dcn_axes` names an axis that is not in `axes`.

    Source:
        `jax.make_mesh` and `jax.experimental.mesh_utils`; the notation of EasyLM's
        mesh strings.
    """
    sizes = parse_axes(_named_sizes(axes, names))
    between = {} if dcn_axes is None else parse_axes(dcn_axes)
    check_axes(list(between), sizes, "make_mesh")
    types = _axis_types(axis_types, sizes)
    devices = _devices(devices, topology)
    sizes, between = _fill_sizes(sizes, between, len(devices))
    # GPUs and CPUs have no slices. `dcn_axes` says whether a slow network connects their processes.
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1 and not between:
        raise _missing_dcn_axes(sizes, slices)
    if between:
        grid = _grid_on_two_networks(sizes, between, devices, process_is_granule=slices == 1)
    else:
        grid = _grid_on_one_network(sizes, devices)
    return Mesh(grid, tuple(sizes), axis_types=types)


# ------------------------------------------------------------------ arguments


def _named_sizes(
    axes: Mapping[str, SupportsIndex] | str | Sequence[SupportsIndex],
    names: Sequence[str] | None,
) -> Mapping[str, SupportsIndex] | str:
    """Axes with their names, which may be passed beside the sizes."""
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
    axis_types: AxisTypeLike | Sequence[AxisTypeLike], sizes: Mapping[str, int]
) -> tuple[AxisType, ...]:
    is_one = isinstance(axis_types, str | AxisType)
    of_each = [axis_types] * len(sizes) if is_one else axis_types
    types = [_AXIS_TYPES[kind] for kind in of_each if kind in _AXIS_TYPES]
    if not len(types) == len(of_each) == len(sizes):
        raise MeshError(
            f"make_mesh: axis_types is {axis_types!r}. Pass 'auto' or 'explicit' (or"
            f" `jax.sharding.AxisType`s), for all axes or one for each of {', '.join(sizes)}."
        )
    return tuple(types)


def _devices(devices: Sequence[Any] | np.ndarray | None, topology: str | None) -> list[Any]:
    if topology is None:
        return jax.devices() if devices is None else np.ravel(devices).tolist()
    if devices is not None:
        raise MeshError("make_mesh: give either `devices` or `topology`.")
    # Imported here, because only topologies need its tables of chips and slices.
    from treeshard._core.topologies import topology_devices

    return topology_devices(topology)


def _fill_sizes(
    sizes: dict[str, int], between: dict[str, int], devices: int
) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes and factors with -1 replaced, so that they multiply to the number of devices."""
    # The size of an axis is the product of its two factors, so both count.
    factors = [*sizes.values(), *between.values()]
    known = math.prod(size for size in factors if size != -1)
    remaining = devices // known if -1 in factors else 1
    if factors.count(-1) > 1 or known * remaining != devices:
        text = describe_sizes(sizes) + (f", dcn_axes {describe_sizes(between)}" if between else "")
        raise MeshError(
            f"make_mesh: {text}: the sizes must multiply to the number of devices, {devices}, and"
            " only one may be -1. Change a size, pass `devices=`, or simulate devices with"
            " `treeshard.simulate_devices`."
        )
    filled = [
        {name: remaining if size == -1 else size for name, size in part.items()}
        for part in (sizes, between)
    ]
    return filled[0], filled[1]


def _missing_dcn_axes(sizes: Mapping[str, int], slices: int) -> MeshError:
    """The error for several slices without `dcn_axes`, with the line to write."""
    name = next((name for name, size in sizes.items() if size % slices == 0), None)
    way_out = f"No size can be divided by {slices}: change one."
    if name is not None:
        within = describe_sizes({**sizes, name: sizes[name] // slices}).replace(" ", "")
        way_out = (
            "Say which axis crosses it, and give sizes within a slice:"
            f' `make_mesh("{within}", dcn_axes="{name}={slices}")`.'
        )
    return MeshError(
        f"make_mesh: {describe_sizes(sizes)}: the devices are in {slices} slices with a slow"
        f" network between them. {way_out}"
    )


# ------------------------------------------------------------------ the order of devices


def _grid_on_one_network(sizes: Mapping[str, int], devices: Sequence[Any]) -> Any:
    names, lengths = tuple(sizes), tuple(sizes.values())
    # Only TPUs have coordinates.
    if max(lengths) == len(devices) == _CHIPS_OF_4X4 and hasattr(devices[0], "coords"):
        # For one axis, JAX orders the chips of v5e:4x4 as a ring. In the order of their
        # coordinates, gradients can be scattered dim by dim over the torus.
        ordered = sorted(devices, key=lambda device: tuple(device.coords))
        return np.array(ordered).reshape(lengths)
    try:
        return jax.make_mesh(lengths, names, devices=devices).devices
    except NotImplementedError:  # an axis cannot fill dims of the torus
        from jax.experimental import mesh_utils  # slow to import, and few meshes need it

        return mesh_utils.create_device_mesh(lengths, devices, allow_split_physical_axes=True)


def _grid_on_two_networks(
    sizes: Mapping[str, int],
    between: Mapping[str, int],
    devices: Sequence[Any],
    *,
    process_is_granule: bool,
) -> Any:
    from jax.experimental import mesh_utils  # slow to import, and few meshes need it

    try:
        return mesh_utils.create_hybrid_device_mesh(
            list(sizes.values()),
            [between.get(name, 1) for name in sizes],
            devices,
            process_is_granule=process_is_granule,
            allow_split_physical_axes=True,  # JAX prefers full dims of the torus
        )
    except ValueError as error:
        raise MeshError(
            f"make_mesh: dcn_axes {describe_sizes(between)} does not match how the devices are"
            f" connected: {error}. Their product must be the number of slices, or the"
            " number of processes if there are no slices."
        ) from error


# ------------------------------------------------------------------ devices


def with_devices(mesh: MeshLike | None, where: str, *, compile_only: bool = False) -> Mesh:
    """Returns a mesh that arrays can be placed on; by default the mesh in force.

    Raises an error in the name of `where` if the mesh is abstract, or its devices are not attached
    and it is not to `compile_only`.
    """
    if not isinstance(mesh, Mesh):
        mesh = make_mesh(mesh) if isinstance(mesh, str) else current_or_given(mesh, where)
    # A mesh has attached devices, devices only for compiling, or no devices.
    if not isinstance(mesh, Mesh):
        what = "an AbstractMesh: it has sizes, but no devices to hold arrays"
        use = "a mesh with devices, as `treeshard.make_mesh` returns"
    elif compile_only or _is_attached(mesh):
        return mesh
    else:
        kind = mesh.devices.flat[0].device_kind
        what = f"of devices that are not attached ({kind}): it can plan and compile"
        use = "a mesh of attached devices"
    raise NoDevicesError(
        f"{where}: the mesh ({describe_mesh(mesh)}) is {what}. Pass {use}; `plan.on(mesh)` makes a"
        " plan again for it."
    )


@lru_cache(1024)  # asking a device takes as long as all else that placing a leaf takes
def _is_attached(mesh: Mesh) -> bool:
    return is_attached(mesh.devices.flat[0])


def is_attached(device: Any) -> bool:
    """Whether a device can hold arrays. For the devices of a topology, one can only compile."""
    return getattr(device.client, "runtime_type", "") != "compile_only_runtime"


def simulate_devices(n: int) -> None:
    """Splits the CPU into `n` devices, for laptops, tests and demos.

    Call it before JAX starts, right after the imports. It does not select the CPU: if accelerators
    are attached, `jax.devices()` lists them. It overrides a device count in `XLA_FLAGS`.

    Args:
        n: The number of CPU devices, at least 1.

    Raises:
        MeshError: If `n` is not positive, or JAX has already started with another number of CPU
            devices.

    Examples:
        >>> simulate_devices(8)
        >>> len(jax.devices("cpu"))
        8
    """
    if isinstance(n, bool) or n < 1:
        raise MeshError(f"simulate_devices({n!r}): the number of devices must be at least 1.")
    if has_started_backends():
        if len(jax.devices("cpu")) == n:
            return
        raise MeshError(
            f"simulate_devices({n}) was called too late: JAX has already started with"
            f" {len(jax.devices('cpu'))} CPU device(s), and cannot change their number. Call it"
            " right after the imports, before any code lists devices or makes an array."
        )
    # JAX raises if both the flag and the option are set.
    flags = os.environ.get("XLA_FLAGS", "")
    if _SIMULATED in flags:
        os.environ["XLA_FLAGS"] = re.sub(rf"{_SIMULATED}=\S*\s*", "", flags).strip()
    jax.config.update("jax_num_cpu_devices", n)

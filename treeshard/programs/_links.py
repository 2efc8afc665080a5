"""How many links between chips carry a collective, and how long that takes.

The compiler for TPUs decides it: an all-reduce over 256 chips of v5e runs in rings along both dims
of the torus, an all-gather over the same chips in one ring. The text of a program says which; where
it does not, and before there is a program, the dims of the torus that the devices span do.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from treeshard._core.topologies import Chip, Topology
from treeshard.communication._device_groups import axes_that_change


class Span(NamedTuple):
    """How many chips of one dim of the torus a group of devices has, and whether links close them
    into a ring."""

    chips: int
    is_closed: bool

    @property
    def links(self) -> int:
        """The links of a chip along this dim; at the end of a line, one."""
        return 2 if self.is_closed else 1


class Torus(NamedTuple):
    """Where the axes of a mesh run in a slice.

    `extents` has for each axis the chips that it covers of each dim: `(16, 1)` is a whole dim of
    `(16, 16)`. `wrap` says which dims are closed into rings.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    extents: Mapping[str, tuple[int, ...]]

    def spans(self, axes: Iterable[str]) -> list[Span]:
        """The dims that some axes cover together."""
        chips = [1] * len(self.shape)
        for axis in axes:
            chips = [a * b for a, b in zip(chips, self.extents[axis], strict=True)]
        return [
            Span(count, wraps and count == size)
            for count, size, wraps in zip(chips, self.shape, self.wrap, strict=False)
            if count > 1
        ]


def torus_of(devices: np.ndarray, axes: Sequence[str], chip: Chip | None) -> Torus | None:
    """The torus that the devices of a mesh stand in; `None` if they have no coordinates."""
    if chip is None or not chip.dims or not hasattr(devices.flat[0], "coords"):
        return None
    coords = np.array([device.coords[: chip.dims] for device in devices.flat])
    shape = tuple(int(size) for size in coords.max(axis=0) - coords.min(axis=0) + 1)
    grid = coords.reshape(*devices.shape, chip.dims)
    extents = {}
    for i, axis in enumerate(axes):
        # The devices along this axis, at the start of all others.
        along = np.moveaxis(grid, i, 0).reshape(grid.shape[i], -1, chip.dims)[:, 0]
        extents[axis] = tuple(np.unique(along[:, dim]).size for dim in range(chip.dims))
    return Torus(shape, Topology(chip, shape).wrap, extents)


def arranged_torus(sizes: dict[str, int], topology: Topology | None) -> Torus | None:
    """Where `make_mesh` puts axes of these sizes within a slice, without its devices."""
    if topology is None or not topology.chip.dims:
        return None
    free = dict(enumerate(topology.shape))
    extents: dict[str, tuple[int, ...]] = {}
    # As JAX does it (`mesh_utils.create_device_mesh`): the innermost axis first, and whole dims, as
    # many as multiply to its size. What is left shares dims.
    for axis, size in reversed(sizes.items()):
        covered = _whole_dims(size, free)
        if covered is None:
            covered = _parts_of_dims(size, free)
        for dim, chips in covered.items():
            free[dim] //= chips
        extents[axis] = tuple(covered.get(dim, 1) for dim in free)
    return Torus(topology.shape, topology.wrap, extents)


def _whole_dims(size: int, free: Mapping[int, int]) -> dict[int, int] | None:
    for number in range(len(free), 0, -1):
        for dims in combinations(free, number):
            covered = {dim: free[dim] for dim in dims}
            if 1 not in covered.values() and math.prod(covered.values()) == size:
                return covered
    return None


def _parts_of_dims(size: int, free: Mapping[int, int]) -> dict[int, int]:
    covered: dict[int, int] = {}
    for dim, chips in free.items():
        covered[dim] = math.gcd(size, chips)
        size //= covered[dim]
    return covered


# ------------------------------------------------------------------ times


class Links(NamedTuple):
    """The links of the devices of a mesh; `between` are its axes over the network between slices of
    TPUs, or nodes of GPUs. Without a `torus`, rings are assumed."""

    chip: Chip | None
    between: set[str]
    torus: Torus | None = None

    def seconds(
        self, kind: str, sent: int | None, axes: Sequence[str] | None, used: int | None = None
    ) -> float | None:
        """The time to send bytes along mesh axes, as `kind` of collective does it.

        `used` are the links that the text of the program says it uses. `None` if something is not
        known.
        """
        if sent == 0:
            return 0.0
        if self.chip is None or sent is None or axes is None:
            return None
        if not self.between.isdisjoint(axes):
            return sent / self.chip.network_bandwidth
        # The links of a GPU are published together, since any of them reaches every other GPU of
        # the node.
        if not self.chip.dims:
            return sent / self.chip.link_bandwidth
        spans = [Span(2, True)] if self.torus is None else self.torus.spans(axes)
        # Several devices of a chip share its links.
        bandwidth = self.chip.link_bandwidth / self.chip.devices
        if kind == "collective-permute":
            return sent / bandwidth  # to one neighbour
        if kind == "all-to-all" and self.torus is not None and spans:
            devices = math.prod(span.chips for span in spans)
            payload = sent * devices / (devices - 1)  # of its parts, a device keeps one
            return payload * max(map(_carried, spans)) / bandwidth
        links = sum(span.links for span in spans) or 2 * self.chip.dims
        return sent / (min(links, used or links) * bandwidth)

    def least_seconds(self, sent: Iterable[tuple[int | None, Sequence[str] | None]]) -> float:
        """A time for bytes along axes that no algorithm can beat, as far as they are known.

        All links of a chip carry what stays in its slice, and meanwhile the network what does not.
        """
        within, beyond = 0, 0
        for size, axes in sent:
            if size is None or axes is None:
                continue
            if self.between.isdisjoint(axes):
                within += size
            elif self.between.issuperset(axes):
                beyond += size
        if self.chip is None:
            return 0.0
        links = max(1, 2 * self.chip.dims) / self.chip.devices
        return max(
            within / (links * self.chip.link_bandwidth), beyond / self.chip.network_bandwidth
        )


def _carried(span: Span) -> float:
    """What a link in the middle of a dim carries of an all-to-all, x what one chip has of it."""
    # Half of the chips send half of what they have to the other half, and two links cross the
    # middle of a ring in each direction, one that of a line.
    crossing = span.chips / 2 / 2
    return crossing / span.links


def network_axes(mesh: Mesh) -> set[str]:
    """The axes that run over the network: between slices of TPUs, or nodes of GPUs."""
    numbers = np.vectorize(_slice_or_node)(mesh.devices)
    return axes_that_change(numbers, mesh.axis_names)


def _slice_or_node(device: Any) -> int:
    # GPUs do not tell their node: a process stands for it. Where TPUs have one slice, JAX may leave
    # out `slice_index`.
    if device.platform == "gpu":
        return device.process_index
    return getattr(device, "slice_index", 0)

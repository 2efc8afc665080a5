"""Arrays with the place where they lie, or are to lie, and the bytes that this takes."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_leaves

from treeshard._errors import SpecError, listed
from treeshard._mesh import AnyMesh, axis_sizes
from treeshard._paths import leaf_paths
from treeshard._planned_tree import PlannedTree
from treeshard._specs import axes_of, entries, has_shape, shard_size, with_entries

Shape = tuple[int, ...]


class Placed(NamedTuple):
    """One array and its place.

    Attributes:
        path: Its name.
        shape: Its whole shape.
        dtype: Its dtype.
        sharding: Where it lies; `None` if that is on no device.
    """

    path: str
    shape: Shape
    dtype: Any
    sharding: Sharding | None

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def spec(self) -> PartitionSpec | None:
        """Its spec without trailing `None`s, if it lies on a mesh."""
        if not isinstance(self.sharding, NamedSharding):
            return None
        return with_entries(self.sharding.spec, entries(self.sharding))

    @property
    def is_split(self) -> bool:
        """Whether it is in more than one part."""
        if self.sharding is None:
            return False
        if not isinstance(self.sharding, NamedSharding):
            return not self.sharding.is_fully_replicated
        sizes = axis_sizes(self.sharding.mesh)
        return any(sizes[a] > 1 for entry in entries(self.sharding) for a in axes_of(entry))

    @property
    def takes_device_memory(self) -> bool:
        """Whether it lies on devices, and not in their host's memory."""
        return self.sharding is not None and self.sharding.memory_kind != "pinned_host"


def placed_leaves(x: Any) -> list[Placed]:
    """The arrays of a plan as they will lie, or of a live tree as they do.

    Raises `SpecError` naming all leaves that are traced, and so lie nowhere.
    """
    if isinstance(x, PlannedTree):
        on = {spec: NamedSharding(x.mesh, spec) for spec in {leaf.given for leaf in x.leaves}}
        return [Placed(leaf.path, leaf.shape, leaf.dtype, on[leaf.given]) for leaf in x.leaves]
    named = list(zip(leaf_paths(x), tree_leaves(x), strict=True))
    if traced := [path for path, leaf in named if isinstance(leaf, Tracer)]:
        facts = [f"{path or 'the array'}: it is traced, and lies nowhere yet." for path in traced]
        raise SpecError(listed(f"{len(facts)} leaves lie nowhere:", facts))
    return [
        Placed(path, tuple(leaf.shape), leaf.dtype, live_sharding(leaf))
        for path, leaf in named
        if has_shape(leaf)
    ]


def live_sharding(leaf: Any) -> Sharding | None:
    """Where a leaf lies; `None` for numpy arrays and structs that do not say."""
    return leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None


# ------------------------------------------------------------------ bytes


def bytes_by_device(leaves: Iterable[Placed]) -> dict[int, int]:
    """Bytes per device id; on an abstract mesh, per position in it, row-major.

    Devices of a mesh that hold nothing count, with 0; what lies in pinned host memory does not.
    """
    held: Counter[int] = Counter()
    on_meshes: dict[AnyMesh, np.ndarray] = {}
    alike = Counter((x.sharding, x.shape, x.dtype, x.takes_device_memory) for x in leaves)
    for (sharding, shape, dtype, counts), count in alike.items():
        if sharding is None:
            continue
        size = count * dtype.itemsize * counts
        if isinstance(sharding, NamedSharding):
            part = size * elements_by_device(shape, sharding.spec, sharding.mesh)
            on_meshes[sharding.mesh] = on_meshes.get(sharding.mesh, 0) + part
        else:
            part = size * math.prod(sharding.shard_shape(shape))
            held.update({device.id: part for device in sharding.device_set})
    for mesh, total in on_meshes.items():
        held.update(dict(zip(_ids(mesh), total.ravel().tolist(), strict=True)))
    return dict(sorted(held.items()))


def _ids(mesh: AnyMesh) -> list[int]:
    if isinstance(mesh, Mesh):
        return [device.id for device in mesh.devices.flat]
    return list(range(mesh.size))


def largest_part(leaf: Placed) -> int:
    """The bytes of a leaf on the device that holds most of it."""
    if leaf.sharding is None or not leaf.takes_device_memory:
        return 0
    if isinstance(leaf.sharding, NamedSharding):
        part = shard_size(leaf.shape, leaf.sharding.spec, leaf.sharding.mesh)
    else:
        part = math.prod(leaf.sharding.shard_shape(leaf.shape))
    return part * leaf.dtype.itemsize


def elements_by_device(shape: Shape, spec: PartitionSpec, mesh: AnyMesh) -> np.ndarray:
    """How many elements each device of a mesh holds, in the mesh's shape.

    A dim that its axes do not divide is cut as the compiler does: into parts of the rounded-up
    length, of which the last ones are shorter or empty.
    """
    sizes = axis_sizes(mesh)
    held = np.ones((1,) * len(sizes), np.int64)
    for length, entry in zip(shape, (*entries(spec), *(None,) * len(shape)), strict=False):
        axes = axes_of(entry)
        split = [sizes[axis] for axis in axes]
        part = -(-length // math.prod(split))
        starts = np.arange(math.prod(split)).reshape(split) * part
        along = np.clip(length - starts, 0, part)
        in_order = sorted(range(len(axes)), key=lambda i: list(sizes).index(axes[i]))
        shape_here = [size if axis in axes else 1 for axis, size in sizes.items()]
        held = held * along.transpose(in_order).reshape(shape_here)
    return np.broadcast_to(held, tuple(sizes.values()))

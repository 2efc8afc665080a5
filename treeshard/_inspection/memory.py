"""Arrays with their shardings, planned or live, and the bytes that each device holds.

The bytes are computed from shapes and specs. Devices cannot report them: a plan has no arrays yet,
a process sees only its own devices, and a buffer does not name its leaf.
"""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_leaves

from treeshard._core.arrays import has_shape
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.specs import axes_of, entries, items_per_device, with_entries
from treeshard._planning.plan import Plan
from treeshard.errors import SpecError, listed

Shape = tuple[int, ...]


class PlacedLeaf(NamedTuple):
    """One array and its sharding, which is `None` if it is on no device."""

    path: str
    shape: Shape
    dtype: Any
    sharding: Sharding | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def spec(self) -> PartitionSpec | None:
        """Its spec without trailing `None`s; `None` if it is not on a mesh."""
        if not isinstance(self.sharding, NamedSharding):
            return None
        return with_entries(self.sharding.spec, entries(self.sharding))

    @property
    def takes_device_memory(self) -> bool:
        """Whether it is in device memory, rather than in the host memory of its devices."""
        # `memory_kind` is `None` where a sharding on an abstract mesh leaves it open.
        return self.sharding is not None and self.sharding.memory_kind != "pinned_host"


def placed_leaves(x: Any) -> list[PlacedLeaf]:
    """Returns the arrays of a plan or a live tree, with their shardings.

    One array at two paths counts twice, as in a plan. The paths share its memory until the next
    step, which returns two arrays.
    """
    if isinstance(x, Plan):
        pairs = zip(x.leaves, x.sharding_of_each(), strict=True)
        return [PlacedLeaf(leaf.path, leaf.shape, leaf.dtype, place) for leaf, place in pairs]
    return [
        # Neither numpy arrays nor bare structs have a sharding.
        PlacedLeaf(path, tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None))
        for path, leaf in named_leaves(x)
        if has_shape(leaf)
    ]


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a live tree with their paths. Raises `SpecError` if leaves are traced."""
    named = list(zip(leaf_paths(tree), tree_leaves(tree), strict=True))
    if traced := [path for path, leaf in named if isinstance(leaf, Tracer)]:
        why = "it is traced, and has no sharding yet."
        facts = [f"{path or 'the array'}: {why}" for path in traced]
        raise SpecError(listed(f"{len(facts)} leaves have no sharding:", facts))
    return named


# ------------------------------------------------------------------ bytes


def bytes_by_device(leaves: Iterable[PlacedLeaf]) -> dict[int, int]:
    """Returns the bytes by device id; on an abstract mesh, by position in it (row-major).

    Empty devices are included. Pinned host memory does not count.
    """
    by_device: Counter[int] = Counter()
    by_mesh: dict[AnyMesh, np.ndarray] = {}  # added up at once: a mesh may have 65,536 devices
    counts = Counter((x.sharding, x.shape, x.dtype, x.takes_device_memory) for x in leaves)
    for (sharding, shape, dtype, takes_memory), count in counts.items():
        size = count * dtype.itemsize if takes_memory else 0
        if isinstance(sharding, NamedSharding):
            part = size * elements_by_device(shape, sharding.spec, sharding.mesh)
            by_mesh[sharding.mesh] = by_mesh.get(sharding.mesh, 0) + part
        elif sharding is not None:
            part = size * items_per_device(shape, sharding)
            by_device.update({device.id: part for device in sharding.device_set})
    for mesh, sizes in by_mesh.items():
        ids: Iterable[int] = range(mesh.size)
        if isinstance(mesh, Mesh):
            ids = (device.id for device in mesh.devices.flat)
        by_device.update(dict(zip(ids, sizes.ravel().tolist(), strict=True)))
    return dict(sorted(by_device.items()))


def largest_part(leaf: PlacedLeaf) -> int:
    """The bytes of a leaf's largest shard."""
    if leaf.sharding is None or not leaf.takes_device_memory:
        return 0
    return items_per_device(leaf.shape, leaf.sharding) * leaf.dtype.itemsize


def elements_by_device(shape: Shape, spec: PartitionSpec, mesh: AnyMesh) -> np.ndarray:
    """Returns how many elements each device of a mesh holds, in the mesh's shape.

    A dim that its axes do not divide is split as the compiler does: into shards of the rounded-up
    length. The last shards are shorter or empty.
    """
    sizes = axis_sizes(mesh)
    elements = np.ones((1,) * len(sizes), np.int64)
    for length, entry in zip_longest(shape, entries(spec)):
        # P(("b", "a")) on "a=2,b=4" numbers shards in 4 rows of 2. They are transposed to the 2 x 4
        # of the mesh, where an axis that does not split the dim has length 1.
        axes = axes_of(entry)
        counts = [sizes[axis] for axis in axes]
        shard_length = -(-length // math.prod(counts))
        starts = np.arange(math.prod(counts)).reshape(counts) * shard_length
        lengths = np.clip(length - starts, 0, shard_length)
        mesh_order = sorted(range(len(axes)), key=lambda i: list(sizes).index(axes[i]))
        broadcastable = [size if axis in axes else 1 for axis, size in sizes.items()]
        elements = elements * lengths.transpose(mesh_order).reshape(broadcastable)
    return np.broadcast_to(elements, tuple(sizes.values()))

"""Kinds of leaves, static leaves, regions of arrays, and reading arrays on the host.

`np.asarray` of a `jax.Array` caches its host copy on the array, so a tree that is read once would
stay in memory twice. This module reads shards, on accelerators through second handles.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

# ------------------------------------------------------------------ kinds of leaves


def array_text(x: Any) -> str:
    """`float32[8,4]`"""
    return _type_text(x.dtype, tuple(x.shape))


@lru_cache(4096)
def _type_text(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


# For checks that run for each leaf: `|` would make a new type in each call, and checking numpy's
# classes first is faster, because `jax.Array` is abstract.
OF_NUMPY = (np.ndarray, np.generic)


def is_array(x: Any) -> bool:
    """Whether `x` is an array of numbers or keys, which can be placed on devices.

    Functions, strings, Python scalars and numpy's object arrays are not arrays, and stay unchanged.
    """
    if isinstance(x, OF_NUMPY):
        return x.dtype.kind in "biufcV"
    return isinstance(x, jax.Array)


def has_shape(x: Any) -> bool:
    """Whether `x` is an array or a `ShapeDtypeStruct`."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def device_dtype(dtype: Any) -> Any:
    """The dtype on devices: in native byte order, and with 32 bits instead of 64 unless in x64
    mode."""
    if not isinstance(dtype, np.dtype) or (dtype.itemsize <= 4 and dtype.isnative):  # or of keys
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def has_gradient(x: Any) -> bool:
    """Whether `x` is an array of floating-point numbers, which have gradients."""
    return is_array(x) and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def is_key(x: Any) -> bool:
    """Whether `x` is, or describes, an array of typed PRNG keys."""
    if isinstance(getattr(x, "dtype", None), np.dtype):  # fast for most leaves
        return False
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return False
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_raw_key(x: Any) -> bool:
    """Whether an array has two uint32, as a key of `jax.random.PRNGKey` has, or typed keys."""
    return is_key(x) or (getattr(x, "shape", None) == (2,) and x.dtype == np.uint32)


def data_of(x: Any) -> Any:
    """The key data of typed keys; any other array unchanged."""
    return jax.random.key_data(x) if is_key(x) else x


def same_arrays(paths: Sequence[str], leaves: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """The arrays that are the same object as an earlier leaf: their path, and the earlier path.

    An array of one element does not count: programs share constants.
    """
    if len(set(map(id, leaves))) == len(leaves):  # nearly always, and fast
        return ()
    first: dict[int, int] = {}
    pairs: list[tuple[str, str]] = []
    for index, x in enumerate(leaves):
        if isinstance(x, jax.Array | np.ndarray) and x.size > 1:
            earlier = first.setdefault(id(x), index)
            if earlier != index:
                pairs.append((paths[index], paths[earlier]))
    return tuple(pairs)


@lru_cache(maxsize=1024)
def processes_of(sharding: Sharding) -> frozenset[int]:
    """The indices of the processes that own devices of a sharding."""
    return frozenset(device.process_index for device in sharding.device_set)


def owner_elsewhere(x: Any) -> int | None:
    """The single process that has an array, if it is another one.

    That process cannot tell such an array from a copy of its own, as each process may have.
    """
    owners = processes_of(x.sharding) if is_spread(x) else frozenset[int]()
    return min(owners) if len(owners) == 1 else None


def is_spread(x: Any) -> bool:
    """Whether `x` is an array with shards on devices of other processes."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable


# ------------------------------------------------------------------ static leaves


class StaticSplit:
    """Splits the leaves of trees of one structure into dynamic leaves (usually arrays) and static
    ones.

    `indices` has the indices of the dynamic leaves, and `static` the other leaves by index.
    """

    def __init__(
        self, leaves: Sequence[Any], treedef: Any, is_dynamic: Callable[[Any], bool] = is_array
    ) -> None:
        self.treedef = treedef
        kinds = [*map(is_dynamic, leaves)]
        self.indices = [i for i, dynamic in enumerate(kinds) if dynamic]
        self.static = {i: leaves[i] for i, dynamic in enumerate(kinds) if not dynamic}
        self._template = [self.static.get(i) for i in range(len(leaves))] if self.static else []

    def matches(self, leaves: Sequence[Any], treedef: Any) -> bool:
        """Whether a tree has the same structure and equal static leaves."""
        return treedef == self.treedef and not (self.static and self.find_changes(leaves))

    def find_changes(self, leaves: Sequence[Any]) -> list[int]:
        """The indices of the static leaves that differ in another tree of this structure."""
        return [
            i
            for i, x in self.static.items()
            if leaves[i] is not x and not _is_same_constant(leaves[i], x)
        ]

    def dynamic(self, leaves: list[Any]) -> list[Any]:
        return [leaves[i] for i in self.indices] if self.static else leaves

    def combine(self, dynamic: Sequence[Any]) -> Any:
        return self.treedef.unflatten(self._join(dynamic, self._template))

    def fill_static(self, dynamic: Sequence[Any], fill: Any = None) -> Any:
        """The tree with these dynamic leaves, and `fill` instead of the static ones."""
        return self.treedef.unflatten(self.fill_leaves(dynamic, fill))

    def fill_leaves(self, dynamic: Sequence[Any], fill: Any = None) -> Sequence[Any]:
        """These dynamic leaves, and `fill` instead of the static ones."""
        return self._join(dynamic, [fill] * self.treedef.num_leaves)

    def _join(self, dynamic: Sequence[Any], others: list[Any]) -> Sequence[Any]:
        if not self.static:
            return dynamic
        leaves = others.copy()
        for i, x in zip(self.indices, dynamic, strict=True):
            leaves[i] = x
        return leaves


def _is_same_constant(new: Any, old: Any) -> bool:
    """Whether a program with the constant `old` is also the program for `new`."""
    # Programs distinguish equal values of different types: `1 == 1.0`, and `True == 1`.
    if new is old or type(new) is not type(old):
        return new is old
    if type(new) in (float, complex):  # `0.0 == -0.0`, and nan differs from itself
        return repr(new) == repr(old)
    if not isinstance(new, OF_NUMPY):
        return are_equal(new, old)
    # Of strings, dates or objects.
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        return False
    if new.dtype.hasobject:
        return all(map(_is_same_constant, new.flat, old.flat))
    return new.tobytes() == old.tobytes()


def are_equal(x: Any, y: Any) -> bool:
    """Whether two objects are equal. The `==` of objects that have arrays may raise."""
    try:
        same = x == y
        return isinstance(same, bool | np.bool_ | jax.Array) and bool(same)
    except Exception:  # of any class, such as the user's
        return False


# ------------------------------------------------------------------ regions


Region = tuple[tuple[int, int], ...]  # a part of an array: (start, stop) per dim


def region_of(index: Iterable[slice], shape: Sequence[int]) -> Region:
    """The index of a shard, as a region."""
    return tuple(i.indices(length)[:2] for i, length in zip(index, shape, strict=True))


@lru_cache(4096)
def regions_here(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Region]:
    """The region of an array that each device of this process holds."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: region_of(index or (), shape) for device, index in indices.items()}


@lru_cache(4096)
def items_on_host(sharding: Sharding, shape: tuple[int, ...], region: Region) -> int:
    """The number of items of a region on its devices that use host memory."""
    return sum(
        math.prod(region_shape(held))
        for device, held in regions_here(sharding, shape).items()
        if device.platform == "cpu" and intersect(held, region) == held
    )


@lru_cache(4096)
def processes_by_shard(sharding: Sharding, shape: tuple[int, ...]) -> dict[Region, dict[int, None]]:
    """The distinct shards of an array, each with the processes that hold it."""
    held: dict[Region, dict[int, None]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        held.setdefault(region_of(index or (), shape), {})[device.process_index] = None
    return held


def region_shape(region: Region) -> tuple[int, ...]:
    """The shape of a region."""
    return tuple(stop - start for start, stop in region)


def intersect(part: Region, other: Region) -> Region | None:
    """The region that two regions share; `None` if they share none."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def relative_slices(part: Region, region: Region) -> tuple[slice, ...]:
    """The index of `part` relative to `region`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, region, strict=True))


@lru_cache(4096)
def slices_of(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


def runs(region: Region, shape: Sequence[int]) -> tuple[np.ndarray, int]:
    """The starts of the contiguous runs of a region in the C order of its array, and their length.

    Both count items; the starts have the shape of the region before its last split dim.

    Examples:
        >>> runs(((1, 3), (2, 4)), (4, 8))
        (array([10, 18]), 2)
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # From the last split dim on, the region is contiguous.
    lengths = region_shape(region)
    dim = max((i for i, length in enumerate(lengths) if length < shape[i]), default=0)
    begins = [np.arange(*span) * stride for span, stride in zip(region, strides, strict=True)]
    starts = reduce(np.add.outer, begins[:dim], np.zeros((), np.int64))
    first = region[dim][0] * strides[dim] if region else 0
    return np.asarray(starts + first), math.prod(lengths[dim:])


# ------------------------------------------------------------------ reading on the host


def to_host(leaf: Any) -> Any:
    """A copy of a leaf in host memory. Keys come on one local device; other leaves unchanged.

    All shards must be on devices of this process.
    """
    if not is_array(leaf):
        return leaf
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    if is_key(leaf):
        return keys_on_host(leaf, to_host(jax.random.key_data(leaf)))
    full = np.empty(leaf.shape, leaf.dtype)
    if full.size:  # shards of empty arrays may not have the shapes of their sharding
        for region, shard in primary_shards(leaf):
            full[slices_of(region)] = np.asarray(shard)
    return full


def keys_on_host(keys: jax.Array, data: np.ndarray) -> jax.Array:
    """Keys like `keys` from their key data, on one local device (numpy has no keys)."""
    on_device = jax.device_put(data, jax.local_devices()[0])
    return jax.random.wrap_key_data(on_device, impl=jax.random.key_impl(keys))


def is_on_host(x: jax.Array) -> bool:
    """Whether the devices of an array use host memory."""
    return _is_on_host(x.sharding)


@lru_cache(4096)
def _is_on_host(sharding: Sharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def to_numpy(x: Any) -> np.ndarray:
    """The numbers of a local array, or its key data. Not copied if one device or the host has the
    full array."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    data = data_of(x)
    return np.asarray(to_read(data)) if len(data.sharding.device_set) == 1 else to_host(data)


def to_read(x: jax.Array) -> jax.Array:
    """`x`, or on accelerators a second handle, so that reading it caches no host copy on `x`."""
    return x if is_on_host(x) else alias_array(x)


def alias_array(x: jax.Array) -> jax.Array:
    """Another array on the same memory; the host copy that JAX caches on it is freed with it."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def primary_shards(x: jax.Array) -> Iterator[tuple[Region, jax.Array]]:
    """The addressable shards that are first replicas, through handles for reading."""
    # `addressable_shards` takes twice as long, and keeps an object for each shard on the array.
    shards = to_read(x)
    for position, region in _primary_regions(x.sharding, x.shape):
        yield region, shards.addressable_data(position)


@lru_cache(4096)
def _primary_regions(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[int, Region]]:
    """The regions of the addressable shards that are first replicas, with their positions."""
    first: dict[Region, Any] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        first.setdefault(region_of(index or (), shape), device)
    here = enumerate(regions_here(sharding, shape).items())
    return [(position, region) for position, (device, region) in here if first[region] == device]


def bytes_to_read(x: Any) -> int:
    """The host memory for reading the primary shards of an array: a copy on accelerators."""
    if isinstance(x, np.ndarray) or not isinstance(x, jax.Array) or is_on_host(x):
        return 0
    return sum(shard.data.nbytes for shard in x.addressable_shards if shard.replica_id == 0)


@lru_cache
def used_bits(dtype: np.dtype) -> int:
    """A mask of the bits of each byte that hold data, for dtypes smaller than a byte."""
    if dtype.kind != "V":  # a dtype of numpy itself
        return 255
    about = jax.numpy.finfo if jax.numpy.issubdtype(dtype, np.floating) else jax.numpy.iinfo
    return 2 ** min(8, about(dtype).bits) - 1

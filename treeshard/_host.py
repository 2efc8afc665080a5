"""Arrays as the host sees them: read without a second copy, and without one left behind."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from treeshard._specs import is_array

# What leaves of one sharding and shape share.
Known = dict[Any, tuple[Any, ...]]


def to_host(leaf: Any, known: Known | None = None) -> Any:
    """A copy of a leaf in host memory, keys on one local device; what is no array as it is.

    All of it must lie on devices of this process.
    """
    if not is_array(leaf):
        return leaf
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    if is_key(leaf):
        return keys_on_host(leaf, to_host(jax.random.key_data(leaf)))
    return _assembled(leaf, {} if known is None else known)


def keys_on_host(keys: jax.Array, data: np.ndarray) -> jax.Array:
    """Keys like `keys` from their data, on one local device: they have no numbers of their own."""
    on_device = jax.device_put(data, jax.local_devices()[0])
    return jax.random.wrap_key_data(on_device, impl=jax.random.key_impl(keys))


def _assembled(x: jax.Array, known: Known) -> np.ndarray:
    """One array from its shards."""
    whole = np.empty(x.shape, x.dtype)
    key = (x.sharding, x.shape, whole.itemsize)
    if key not in known:
        known[key] = (_on_host(x), *_places(x, whole))
    on_host, places, run, runs, parts = known[key]
    pieces = (x if on_host else second_handle(x)).addressable_shards
    if run is None:
        for i, index in places:
            whole[index] = np.asarray(pieces[i].data)
        return whole
    into = whole.reshape(runs).view(run)
    for i, index in places:
        into[index] = np.ndarray(parts, run, np.asarray(pieces[i].data).view(np.uint8))
    return whole


def _places(x: jax.Array, whole: np.ndarray) -> tuple[Any, ...]:
    """Which shards to read, by position, and where each goes.

    From the last dim that is split on, a shard is runs of memory. numpy pays for every run that
    it copies, and less if a run is one opaque item: then the item comes too, and the shapes of
    the whole and of a shard in such items.
    """
    part = x.sharding.shard_shape(x.shape)
    read = [(i, one.index) for i, one in enumerate(x.addressable_shards) if one.replica_id == 0]
    split = [dim for dim, length in enumerate(part) if length < whole.shape[dim]]
    dim = split[-1] if split else 0
    if dim == 0 or not whole.size or any(whole.shape[d] % part[d] for d in split):
        return read, None, None, None
    run = np.dtype((np.void, whole.itemsize * math.prod(part[dim:])))
    places = [(i, (*index[:dim], index[dim].start // part[dim])) for i, index in read]
    return places, run, (*whole.shape[:dim], -1), part[:dim]


def _on_host(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "cpu"


def numbers(x: Any) -> np.ndarray:
    """The numbers of an array on the host or on devices of this process; of keys, their data.

    Without a copy where they lie in one piece.
    """
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    data = data_of(x)
    return np.asarray(to_read(data)) if len(data.sharding.device_set) == 1 else to_host(data)


def to_read(x: jax.Array) -> jax.Array:
    """`x`, or on accelerators another handle, so that reading it leaves no host copy on `x`.

    The CPU platform hands out views instead of copies.
    """
    return x if _on_host(x) else second_handle(x)


def second_handle(x: jax.Array) -> jax.Array:
    """Another array on the same memory.

    JAX keeps the host copy of an array on the object that was asked for it. One that goes
    away takes it along.
    """
    pieces = [piece.data for piece in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def own_shards(x: jax.Array) -> Iterator[Any]:
    """One copy of each shard, of those that lie here, to be read."""
    return (one for one in to_read(x).addressable_shards if one.replica_id == 0)


def data_of(x: Any) -> Any:
    """Of typed keys the numbers; any other array as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def is_key(x: Any) -> bool:
    """Whether `x` is, or stands for, an array of typed PRNG keys, which has no numbers."""
    if isinstance(getattr(x, "dtype", None), np.dtype):  # quick for most
        return False
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return False
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)

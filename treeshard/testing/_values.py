"""Reads the values of results from every device, shard by shard.

`np.asarray` reads one replica of each shard, and would miss replicas that differ although JAX
assumes that they are equal.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treeshard._core.arrays import data_of, is_key, is_spread, to_host
from treeshard._placement.gather import gather

# The values of a result: by device, the index of its shard and the shard.
Shards = dict[Any, tuple[tuple[slice, ...], np.ndarray]]
# The results of one device, in full.
Results = list[np.ndarray]

# Parameters are moved off their values by this part of their scale.
_MOVED = 1e-2


def values_of(result: Sequence[Shards]) -> Results:
    """The results of one device."""
    return [x for shards in result for _, x in shards.values()]


def apply_change(old: Any, result: np.ndarray) -> Any:
    """A leaf after a step, from its change. Integers and keys are results themselves."""
    if is_key(old):
        data = jnp.asarray(result.astype("uint32"))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    if jnp.issubdtype(old.dtype, jnp.floating):
        result = old.astype("float64") + result
    return np.asarray(result).astype(old.dtype)


def count_finite(arrays: Results) -> int:
    return sum(int(np.isfinite(x).sum()) for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))


def move_off_value(x: Any, typical: float, random: np.random.Generator) -> Any:
    """The array with each number changed by a part of its size, or, if all are 0, of `typical`."""
    wide = np.asarray(x).astype("complex128" if np.iscomplexobj(x) else "float64")
    steps = _MOVED * random.standard_normal(wide.shape)
    wide = wide * (1 + steps) if np.any(wide) else typical * steps
    return np.asarray(wide).astype(x.dtype)


def scale_of(x: Any) -> float:
    """The root of the mean square."""
    return float(np.linalg.norm(np.asarray(x).ravel().astype("complex128"))) / max(x.size, 1) ** 0.5


def on_host(x: Any) -> Any:
    x = gather(x) if is_spread(x) else to_host(x)
    return x if is_key(x) else np.asarray(x).astype(jax.dtypes.canonicalize_dtype(x.dtype))


def shards_of(arrays: Sequence[Any]) -> list[Shards]:
    """A copy of the shard of each device, also of devices of other processes."""
    arrays = [data_of(x) for x in arrays]
    spread = {i: _stack_shards(x) for i, x in enumerate(arrays) if is_spread(x)}
    everywhere = dict(zip(spread, gather(list(spread.values())), strict=True))
    shards: list[Shards] = []
    for i, x in enumerate(arrays):
        indices = x.sharding.devices_indices_map(x.shape)
        values = {s.device: np.array(s.data) for s in x.addressable_shards}
        if i in everywhere:
            values = dict(zip(indices, everywhere[i], strict=True))
        shards.append({device: (indices[device], _real(x)) for device, x in values.items()})
    return shards


def _real(x: np.ndarray) -> np.ndarray:
    """The numbers of an array as real numbers. A complex number becomes two, in a last dim."""
    return np.stack((np.real(x), np.imag(x)), -1) if np.iscomplexobj(x) else x


def _stack_shards(x: jax.Array) -> jax.Array:
    """The shards of an array, replicas included, stacked on dim 0."""
    # JAX assumes that the replicas of a shard are equal. To read all of them, each device must
    # have its own row.
    devices = list(x.sharding.devices_indices_map(x.shape))
    target = NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device"))
    shape = (len(devices), *x.sharding.shard_shape(x.shape))
    own = [jnp.expand_dims(s.data, 0) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, target, own)


def change_of(old: Shards, new: Shards) -> Shards:
    """The change of each number. Integers and keys are returned as they are now."""
    changes: Shards = {}
    for device, (index, x) in new.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = np.asarray(x.astype("float64") - old[device][1].astype("float64"))
        changes[device] = index, x
    return changes

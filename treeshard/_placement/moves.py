"""Strategies for moving arrays to their target shardings.

`jax.device_put` moves any array to any sharding, with four drawbacks. If the shards differ, it
copies through the host and caches the copy on the source. To move arrays off a single device, it
compiles a program for each shape. On CPUs, its result may share memory with a numpy array. It does
not move arrays between processes.

`choose_move` compares the current and the target sharding:

1. If each process has all values, on the host or on its own devices, it cuts out its shards.
2. If the array already has the target's shards, it stays, and a sharding on another mesh is only
   relabelled.
3. If the array is on one device, `shard` copies it through the host, and `reshard` copies it to all
   devices and splits it there.
4. If the devices and their order are the same, one compiled program moves all such leaves.
5. Between different devices of this process, arrays move shard by shard, without a full copy.
6. Between different devices of several processes, arrays move in packets: see `transport`.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from treeshard._core.arrays import (
    OF_NUMPY,
    Region,
    alias_array,
    array_text,
    data_of,
    device_dtype,
    intersect,
    is_key,
    processes_by_shard,
    processes_of,
    region_of,
    region_shape,
    regions_here,
    relative_slices,
    to_numpy,
    to_read,
)
from treeshard._core.facts import SMALL_BYTES
from treeshard._core.mesh import AnyMesh
from treeshard.errors import MismatchError

# A function that moves each array to the sharding at the same index.
Move = Callable[[list[Any], list[NamedSharding]], list[jax.Array]]
# A function that returns a shard, from a leaf's path and the shard's index.
Read = Callable[[str, tuple[slice, ...]], Any]


def choose_move(leaf: Any, target: NamedSharding, from_single_device: Move) -> Move | None:
    """Returns the function that moves a leaf to its target, or `None` if the leaf can stay."""
    # 1
    if isinstance(leaf, OF_NUMPY) or not isinstance(leaf, jax.Array):
        return through_host if target.is_fully_addressable else shard_from_full
    if leaf.is_fully_addressable and not target.is_fully_addressable:
        return shard_from_full
    # 2
    current = leaf.sharding
    if current.is_equivalent_to(target, leaf.ndim):
        # A compiled step distinguishes meshes, so an array with the same shards on another mesh
        # gets the new mesh, without a copy.
        if isinstance(current, NamedSharding) and current.mesh == target.mesh:
            return None
        return _put_by_jax if target.is_fully_addressable else _move_compiled
    if leaf.dtype.name in ("int2", "uint2"):
        # Compiled programs that move these dtypes crash, or return wrong values (JAX 0.10 to 0.12).
        return through_host if leaf.is_fully_addressable else transfer_across_processes
    # 3
    if len(current.device_set) == 1 and leaf.is_fully_addressable:
        return _put_by_jax if target.is_fully_replicated else from_single_device
    # 4
    if isinstance(current, NamedSharding) and _devices(current.mesh) == _devices(target.mesh):
        return _move_compiled
    # 5, 6
    return _shard_by_shard if leaf.is_fully_addressable else transfer_across_processes


def _devices(mesh: AnyMesh) -> list[Any]:
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


# ------------------------------------------------------------------ within one process


def _put_by_jax(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    # If shards differ, JAX copies through the host and caches the copy on its argument.
    return jax.device_put([x if is_key(x) else alias_array(x) for x in arrays], targets)


def _shard_by_shard(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    """Moves arrays to other devices of this process, without a full copy of any array.

    A device keeps the shards that it already has, and copies shards from other devices directly.
    Other shards are assembled on the host, once for all devices that need them.
    """
    pairs = zip(arrays, targets, strict=True)
    return [as_keys(_reassemble(data_of(x), target), x) for x, target in pairs]


def _reassemble(x: jax.Array, target: NamedSharding) -> jax.Array:
    before = {shard.device: shard.data for shard in to_read(x).addressable_shards}
    regions = regions_here(x.sharding, x.shape)
    device_of = {region: device for device, region in regions.items()}
    held = {region: before[device] for region, device in device_of.items()}
    shards: list[jax.Array] = []
    for device, region in regions_here(target, x.shape).items():
        if regions.get(device) == region:  # stays
            source: Any = before[device]
        elif region in held:  # goes from device to device
            source = held[region]
        else:
            source = np.empty(region_shape(region), x.dtype)
            for other, device_with in device_of.items():
                if (part := intersect(other, region)) is not None:
                    values = np.asarray(before[device_with])[relative_slices(part, other)]
                    source[relative_slices(part, region)] = values
        place = SingleDeviceSharding(device, memory_kind=target.memory_kind)
        shards.append(jax.block_until_ready(jax.device_put(source, place)))
        held[region] = shards[-1]
    return jax.make_array_from_single_device_arrays(x.shape, target, shards)


def _move_compiled(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    return jax.jit(return_unchanged, out_shardings=targets)(arrays)


def replicate_then_split(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    """Copies each array to all devices, and splits them there in one program."""
    # On a single device, splitting would compile one program for each shape.
    replicated = [target.update(spec=PartitionSpec()) for target in targets]
    return _move_compiled(jax.device_put(arrays, replicated), targets)


class _TrackedView(np.ndarray):
    """A view that stays alive as long as `self[...]` and all views of it.

    This object is the base of such views. For plain arrays, numpy would set the base to the owner
    of the memory.
    """


def through_host(arrays: list[Any], targets: list[NamedSharding]) -> list[jax.Array]:
    """Copies arrays from host memory in one batch, without compiling; never aliases them."""
    sources = [_source(x) for x in arrays]
    given: list[np.ndarray] = []
    in_use: dict[int, weakref.ref[np.ndarray]] = {}
    for i, source in enumerate(sources):
        # Copying a small array in advance takes less time than waiting until JAX has read it.
        if source.nbytes <= SMALL_BYTES:
            given.append(np.array(source))
            continue
        tracked = source.view(_TrackedView)
        in_use[i] = weakref.ref(tracked)
        given.append(np.asarray(tracked[...]))
        del tracked
    # JAX matches every list that it gets with the arrays, and the default of `may_alias` too.
    into: Any = targets[0] if len({*targets}) == 1 else targets
    placed = jax.device_put(given, into, may_alias=True)
    del given
    if in_use:
        jax.block_until_ready([placed[i] for i in in_use])  # until then JAX reads the sources
    for i, source_in_use in in_use.items():
        # The CPU platform adopts aligned memory, whatever `may_alias` says, and keeps it alive.
        # Detecting an adopted source afterwards is cheaper than copying every source in advance.
        if source_in_use() is not None:
            placed[i] = jax.device_put(np.array(sources[i]), targets[i])
    pairs = zip(placed, arrays, strict=True)
    return [x if isinstance(array, OF_NUMPY) else as_keys(x, array) for x, array in pairs]


def _source(x: Any) -> np.ndarray:
    """The values of an array on the host or on one device, in a dtype that JAX supports."""
    if not isinstance(x, OF_NUMPY):
        return to_numpy(x)
    if (dtype := device_dtype(x.dtype)) == x.dtype:
        return np.asarray(x)
    with np.errstate(all="ignore"):  # values beyond float32 become inf, as in jnp.asarray
        return np.asarray(x, dtype)


def host_copy(x: Any) -> np.ndarray:
    """The values of an array of this process in memory of their own, in a dtype of JAX."""
    return np.array(_source(x))


def return_unchanged(x: Any) -> Any:
    return x


# ------------------------------------------------------------------ shard by shard


def shard_from_full(arrays: Sequence[Any], targets: Sequence[Sharding]) -> list[jax.Array]:
    """Shards arrays that every process has in full, on the host or on its own devices."""
    placed = []
    for x, target in zip(arrays, targets, strict=True):
        full = to_numpy(x)
        placed.append(as_keys(assemble(full.shape, full.dtype, target, full.__getitem__), x))
    return placed


def transfer_across_processes(
    arrays: Sequence[jax.Array], targets: Sequence[NamedSharding]
) -> list[jax.Array]:
    """Moves arrays to other processes, through the host. Each process receives the shards that it
    needs once."""
    from treeshard._placement.transport import deliver

    data = list(map(data_of, arrays))
    wanted = [
        [
            (i, region)
            for region, among in processes_by_shard(target, x.shape).items()
            for i in among
        ]
        for x, target in zip(data, targets, strict=True)
    ]
    shardings = [*(x.sharding for x in data), *targets]
    among = sorted(frozenset[int]().union(*map(processes_of, shardings)))
    participates = jax.process_index() in among
    received = deliver(data, wanted, among) if participates else repeat(dict[Region, Any]())
    placed = []
    # A process outside of `among` also gets an array, without local shards.
    for x, keyless, target, parts in zip(arrays, data, targets, received, strict=participates):
        placed.append(as_keys(jax.block_until_ready(_assemble_parts(keyless, target, parts)), x))
        parts.clear()  # before the next parts arrive
    return placed


def _assemble_parts(
    x: jax.Array, target: NamedSharding, parts: Mapping[Region, np.ndarray]
) -> jax.Array:
    return assemble(x.shape, x.dtype, target, lambda index: parts[region_of(index, x.shape)])


def read_shards(
    read: Read, path: str, struct: jax.ShapeDtypeStruct, target: NamedSharding
) -> jax.Array:
    """Assembles an array from its local shards, and calls `read` once for each of them."""
    full = jax.eval_shape(jax.random.key_data, struct) if is_key(struct) else struct
    cache: dict[Region, np.ndarray] = {}

    def read_once(index: Any) -> np.ndarray:
        region = region_of(index[: struct.ndim], struct.shape)
        if region not in cache:
            cache[region] = _call_read(read, path, struct, tuple(slice(*ends) for ends in region))
        return cache[region]

    array = assemble(full.shape, full.dtype, target, read_once)
    return as_keys(jax.block_until_ready(array), struct)  # so that the host memory can be freed


def _call_read(
    read: Read, path: str, struct: jax.ShapeDtypeStruct, index: tuple[slice, ...]
) -> np.ndarray:
    region = f"{path or 'the array'}[{', '.join(f'{i.start}:{i.stop}' for i in index)}]"
    try:
        result = read(path, index)
    except Exception as error:
        error.add_note(f"`read` was called for {region}.")
        raise
    shard = result if isinstance(result, jax.Array) else np.asarray(result)
    expected = jax.ShapeDtypeStruct(tuple(i.stop - i.start for i in index), struct.dtype)
    if (shard.shape, shard.dtype) != (expected.shape, expected.dtype):
        raise MismatchError(
            f"`read` returned {array_text(shard)} for {region}; expected {array_text(expected)}."
            f" It must return only that part of {array_text(struct)}, in the same dtype."
        )
    return to_numpy(shard)


# ------------------------------------------------------------------ from shards


def assemble(
    shape: tuple[int, ...], dtype: Any, target: Sharding, read_shard: Callable[[Any], Any]
) -> jax.Array:
    """Assembles an array from its local shards, which `read_shard` returns by index.

    Each shard is copied into fresh memory, which JAX may adopt. 64-bit values become 32-bit
    ones unless JAX's x64 mode is on.
    """
    # JAX would narrow the shards to this dtype, with a warning.
    dtype = device_dtype(np.dtype(dtype))
    # Even without local devices, JAX would ask for the values of a replicated array.
    if not target.addressable_devices:
        return jax.make_array_from_single_device_arrays(shape, target, [], dtype=dtype)

    def fresh_shard(index: Any) -> np.ndarray:
        with np.errstate(all="ignore"):  # values beyond float32 become inf, as in jnp.asarray
            return np.array(read_shard(index), dtype, order="C")

    return jax.make_array_from_callback(shape, target, fresh_shard, dtype=dtype)


def as_keys(data: jax.Array, like: Any) -> jax.Array:
    """Wraps key data as typed keys if `like` has typed keys; otherwise returns the array."""
    if not is_key(like):
        return data
    impls: list[Any] = []
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(data, impl=impls[0])

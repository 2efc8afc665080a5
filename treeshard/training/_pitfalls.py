"""Pitfalls of a step: arrays that it cannot take as they are, and arrays put on one device.

JAX donates an array's buffers, and ends the process if a call on several devices gets one of them
twice, or one that is deleted. A `device_put` to one device has no effect in a program for several.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import tree_leaves

from treeshard._core.arrays import data_of, has_shape, is_array
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.specs import is_spec
from treeshard._core.text import fold_paths
from treeshard._placement.shard import shard
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard.errors import (
    ArgumentError,
    DeletedLeafError,
    SpecError,
    StateError,
    listed,
    warn,
)

# ------------------------------------------------------------------ the arguments of a step


def check_arguments(state: PyTree, batch: PyTree, plan: Plan, where: str) -> None:
    """Raises `ArgumentError` if the state is a pair (state, aux), or swapped with the batch."""
    planned = [(leaf.path, leaf.shape) for leaf in plan.leaves]
    if not planned or _arrays_of(state) == planned:
        return
    if isinstance(state, tuple) and len(state) == 2 and _arrays_of(state[0]) == planned:
        raise ArgumentError(
            f"{where}: the state is a pair (state, aux), as the step returns it. Write"
            " `state, aux = step(state, batch)`."
        )
    if _arrays_of(batch) == planned:
        raise ArgumentError(
            f"{where}: the state and the batch are swapped. Call `step(state, batch)`."
        )


def check_are_arrays(state: PyTree, batch: PyTree, where: str, *, structs: bool = False) -> None:
    """Raises `ArgumentError` if the state or the batch has specs instead of arrays, or shapes,
    unless `structs` allows them."""
    for name, tree in {"state": state, "batch": batch}.items():
        leaves = tree_leaves(tree)
        is_struct = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
        has_specs = any(is_spec(x) or isinstance(x, Plan) for x in leaves)
        has_structs = any(is_struct) and not structs
        if (has_specs or has_structs) and not any(map(is_array, leaves)):
            raise ArgumentError(
                f"{where}: the {name} has {'specs' if has_specs else 'shapes'} and no arrays. Call"
                " `step(state, batch)` with arrays, as `treeshard.shard(tree, plan)` returns them."
            )


def _arrays_of(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    """The path and the shape of each array."""
    pairs = zip(leaf_paths(tree), tree_leaves(tree), strict=True)
    return [(path, tuple(x.shape)) for path, x in pairs if has_shape(x)]


# ------------------------------------------------------------------ the arrays of a state


def has_deleted(arrays: Sequence[Any]) -> bool:
    """Whether any array is deleted."""
    kinds = set(map(type, arrays))
    if len(kinds) == 1 and issubclass(kind := kinds.pop(), jax.Array):
        return any(map(kind.is_deleted, arrays))  # half the time of `x.is_deleted()` for each
    return any([_is_live(x) and x.is_deleted() for x in arrays])


def check_not_deleted(arrays: Sequence[Any], leaves: Sequence[PlannedLeaf]) -> None:
    """Raises `DeletedLeafError` if arrays of a state are deleted."""
    if not has_deleted(arrays):
        return
    paths = [
        leaf.path or "the state"
        for x, leaf in zip(arrays, leaves, strict=True)
        if _is_live(x) and x.is_deleted()
    ]
    headline = (
        "The step got a state with leaves that were deleted, or donated to an earlier step."
        " Continue with the state that the step returned, `state, aux = step(state, batch)`, or"
        " make the step with `donate=False`. The leaves:"
    )
    raise DeletedLeafError(listed(headline, fold_paths(paths), headed=True))


def check_sharded(
    arrays: Sequence[Any],
    leaves: Sequence[PlannedLeaf],
    shardings: Sequence[NamedSharding],
    cause: Exception,
) -> None:
    """Raises `SpecError` if a call failed for arrays that are not sharded as planned."""
    facts = []
    for x, leaf, sharding in zip(arrays, leaves, shardings, strict=True):
        # JAX places uncommitted arrays.
        is_misplaced = _is_live(x) and x.committed
        if is_misplaced and not x.sharding.is_equivalent_to(sharding, x.ndim):
            memory = "" if leaf.memory is None else f" in {leaf.memory}"
            facts.append(
                f"{leaf.path}: sharded as {x.sharding}, planned as {leaf.given}{memory}. Place the"
                " state with `treeshard.shard(state, plan)`."
            )
    if facts:
        raise SpecError(
            listed(f"{len(facts)} leaves are not sharded as planned:", facts)
        ) from cause


def _is_live(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def reshard_to_planned_types(arrays: list[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Places the arrays for which JAX would trace another program than for the planned types.

    Arrays on another mesh of the same devices, with other axis names or types, are not copied.
    """
    # Arrays of `shard` and of steps match. Comparing two lists takes a tenth of the time of a loop.
    if [getattr(x, "sharding", None) for x in arrays] == shardings:
        return arrays
    pairs = enumerate(zip(arrays, shardings, strict=True))
    others = {i: planned for i, (x, planned) in pairs if _is_typed_otherwise(x, planned)}
    if not others:
        return arrays
    placed = shard([arrays[i] for i in others], [*others.values()])
    return _with(arrays, dict(zip(others, placed, strict=True)))


def _is_typed_otherwise(x: Any, planned: NamedSharding) -> bool:
    if not getattr(x, "committed", False):  # its type has no sharding
        return AxisType.Explicit in planned.mesh.axis_types
    if not isinstance(x.sharding, NamedSharding) or x.sharding.mesh == planned.mesh:
        return False
    # JAX rejects arrays with other shards, which this function does not move.
    return x.sharding.is_equivalent_to(planned, x.ndim)


def _with(arrays: list[Any], new: dict[int, Any]) -> list[Any]:
    return [new.get(i, x) for i, x in enumerate(arrays)]


# ------------------------------------------------------------------ arrays of earlier steps

# Marks arrays that a step returned with the step's mesh. Each has its own memory, unless the same
# object is in a tree twice, and has the axis types of the mesh. Reading the types and buffers of
# 1000 arrays takes longer than calling a step.
_MARK = "_treeshard_returned_on"


def mark_as_from_step(arrays: Sequence[Any], mesh: Mesh) -> None:
    """Marks arrays that a compiled step has just returned, which share no memory."""
    for x in arrays:
        setattr(x, _MARK, mesh)


def come_from_steps(arrays: Sequence[Any], batch: Sequence[Any], mesh: Mesh) -> bool:
    """Whether steps on this mesh returned all arrays of a state, and no array of the batch."""
    are_marked = [getattr(x, _MARK, None) for x in arrays].count(mesh) == len(arrays)
    is_batch_free = not any([hasattr(x, _MARK) for x in batch])
    return are_marked and is_batch_free and are_distinct(arrays)


def are_distinct(arrays: Sequence[Any]) -> bool:
    """Whether all arrays are different objects."""
    return len(set(map(id, arrays))) == len(arrays)


# ------------------------------------------------------------------ arrays that share memory


def copy_shared_buffers(
    arrays: list[Any], batch: Sequence[Any], leaves: Sequence[PlannedLeaf], where: str
) -> list[Any]:
    """Copies the arrays of a state that share memory with other arrays or with the batch.

    Warns:
        ShardingWarning: If arrays share memory; it names the paths of both arrays.
    """
    shared = _find_shared(arrays, batch, leaves)
    if not shared:
        return arrays
    warn(f"{where}: {_describe_shared(shared, leaves, ', so it was copied')}")
    originals = [arrays[i] for i in shared]
    copy = jax.jit(
        lambda arrays: [jnp.copy(x) for x in arrays], out_shardings=[x.sharding for x in originals]
    )
    return _with(arrays, dict(zip(shared, copy(originals), strict=True)))


def check_separate(
    arrays: Sequence[Any], batch: Sequence[Any], leaves: Sequence[PlannedLeaf], cause: Exception
) -> None:
    """Raises `StateError` if a call failed for arrays that share memory."""
    if shared := _find_shared(arrays, batch, leaves):
        raise StateError(_describe_shared(shared, leaves)) from cause


def _describe_shared(shared: Mapping[int, str], leaves: Sequence[PlannedLeaf], so: str = "") -> str:
    facts = [
        f"{leaves[i].path}: it shares memory with {other}, and a step that donates its state can"
        f" use that memory only once{so}. Copy the array with `jnp.copy`, or make the step with"
        " `donate=False`."
        for i, other in shared.items()
    ]
    return listed(f"{len(facts)} arrays of the state share memory:", facts)


def _find_shared(
    arrays: Sequence[Any], batch: Sequence[Any], leaves: Sequence[PlannedLeaf]
) -> dict[int, str]:
    """The arrays that share memory, by index, with the batch or the path of an earlier array."""
    owners: dict[Any, str] = {}
    for x in batch:
        owners.update(dict.fromkeys(_buffers(x), "the batch"))
    shared: dict[int, str] = {}
    for i, x in enumerate(arrays):
        buffers = _buffers(x)
        used = [owners[buffer] for buffer in buffers if buffer in owners]
        if used:
            shared[i] = used[0]
        else:
            owners.update(dict.fromkeys(buffers, leaves[i].path))
    return shared


def _buffers(x: Any) -> list[Any]:
    """The memory of an array: the device and address of each shard on this process."""
    if not _is_live(x):
        return []
    try:
        # An address is unique on one device. Empty shards have no memory to share.
        return [
            (shard.device, shard.data.unsafe_buffer_pointer())
            for shard in data_of(x).addressable_shards
            if shard.data.size
        ] or [id(x)]
    except jax.errors.JaxRuntimeError:  # a platform without addresses
        return [id(x)]

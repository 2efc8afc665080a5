"""Assembles arrays over all processes from the part of each process, such as a batch.

`jax.make_array_from_process_local_data` does the same without comparing the processes, which then
hang in the next step if their parts differ. Its errors do not name the leaf or the fix.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_structure

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import (
    array_text,
    device_dtype,
    has_shape,
    is_spread,
    regions_here,
)
from treeshard._core.facts import SMALL_BYTES
from treeshard._core.make_mesh import make_mesh
from treeshard._core.meetings import (
    agreed_forms,
    breaking_if_left,
    check_not_broken,
    count_batch,
    exclusive,
    is_main_thread,
    record_batch,
    set_checksum,
    set_origin,
)
from treeshard._core.mesh import AnyMesh, MeshLike, as_mesh
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.processes import TIMEOUT, participating_processes, require_agreement
from treeshard._core.replicas import checksum_text, shared_parts
from treeshard._core.spec_trees import ResolvedSpec, SpecTree, call_functions
from treeshard._core.specs import project
from treeshard._placement.moves import as_keys, host_copy, through_host
from treeshard._placement.shard import Call, place_by
from treeshard._placement.targets import (
    UNPLACEABLE,
    meshes_of,
    raise_unmovable,
    resolve_on_devices,
    unmovable,
)
from treeshard._planning.wrong_arguments import check_specs
from treeshard.errors import LeafError, SpecError, TreeShardError

WHERE = "from_process_local"


@breaking_if_left()
def from_process_local(
    tree: PyTree, specs: SpecTree, mesh: MeshLike | None = None, *, timeout: float = TIMEOUT
) -> PyTree:
    """Assembles a global tree, usually a batch, from the rows that each process has loaded.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> part = {"x": np.ones((16, 3), "float32")}
        >>> batch = from_process_local(part, P(("data", "fsdp")), mesh)
        >>> batch["x"].shape, batch["x"].addressable_shards[0].data.shape
        ((16, 3), (2, 3))

        Get the shapes and shardings before there are data:

        >>> struct = jax.ShapeDtypeStruct((16, 3), "float32")
        >>> from_process_local(struct, P(("data", "fsdp")), mesh).sharding.spec
        P(('data', 'fsdp'),)

    Along a dim that is sharded over processes, the parts are concatenated in the order of the mesh.
    If two processes pass `(4, d1)` each with `P("data")`, the result has the shape `(8, d1)`. Along
    other dims each process passes the full length, with the same values.

    The call is cheap enough for every step. Processes compare the first tree of each structure,
    with its shapes and dtypes. Later trees are compared by the next call that exchanges a message,
    such as `gather`, or a step whose batch changes its shapes. A later tree with an error raises on
    its process only.

    If several processes pass the same rows or the full array, their values must be equal. In the
    first tree of each structure, checksums of all such values are compared. In later trees, only
    leaves of at most 64 KiB are compared that every process passes in full, as under `P()`. A tree
    from a thread that prepares batches is compared when a step receives it.

    Args:
        tree: Any pytree of numpy arrays, or of JAX arrays on devices of this process. Other leaves
            pass through. If all arrays are `jax.ShapeDtypeStruct`s, processes do not compare.
        specs: As in `shard`.
        mesh: As in `shard`.
        timeout: Seconds to wait for other processes, the first time.

    Returns:
        The tree with global `jax.Array`s, which share no memory with `tree`. A single process gets
        what `shard` returns. Structs become structs of the global arrays, with their shardings.

    Raises:
        UnknownAxisError, DeletedLeafError, NoMeshError, MeshError, ArgumentError: As `shard`.
        ShardingRuleError: As `shard`, whose warnings apply too.
        SpecError: As `shard`. Also if processes hold overlapping parts of a dim, which makes it
            undefined which part each process passes.
        LeafError: As `shard`. Also if a leaf is already on devices of several processes.
        ProcessError: If processes pass parts with other shapes, dtypes, specs or meshes, or
            different values for the same part of an array. If a process does not arrive within
            `timeout`. If an earlier call left the processes out of step.

    Source:
        `jax.make_array_from_process_local_data`.
    """
    check_specs(specs, f"{WHERE}(tree, {{}})", tree)
    specs = call_functions(specs, tree)
    mesh = as_mesh(mesh, make_mesh)
    leaves, treedef = tree_flatten(tree)
    arrays = [x for x in leaves if has_shape(x)]
    if arrays and all(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        for i, joint in _joint_structs(tree, leaves, specs, mesh, may_lack_values=True).items():
            leaves[i] = joint
        return treedef.unflatten(leaves)
    if jax.process_count() == 1:
        return place_by(tree, specs, mesh, Call(WHERE, through_host))
    processes = tuple(participating_processes((), meshes_of(specs, mesh)))
    check_not_broken(WHERE, processes)
    batch = count_batch(processes) if processes else 0  # before anything can fail on one process
    joints = _joint_structs(tree, leaves, specs, mesh)
    made = {i: _join(leaves[i], joint) for i, joint in joints.items()}
    if processes:
        _agree(tree, leaves, made, processes, batch, timeout)
    set_origin(made.values(), processes, f"batch {batch} of {WHERE}")
    for i, array in made.items():
        leaves[i] = array
    return treedef.unflatten(leaves)


# ------------------------------------------------------------------ what processes compare


def _agree(
    tree: PyTree,
    parts: list[Any],
    made: dict[int, jax.Array],
    processes: tuple[int, ...],
    batch: int,
    timeout: float,
) -> None:
    """Compares the first tree of each form with what other processes pass, and records later ones.

    `made` has the joint array of each part that is an array, by its index in `parts`.
    """
    # Processes that have made the same calls have agreed on the same forms, so either all skip the
    # comparison or none does. The main thread compares its own first tree: whether another thread
    # comes before it may differ.
    in_order = is_main_thread()
    rows = [(i, parts[i].shape, parts[i].dtype, x.sharding) for i, x in made.items()]
    agreed, key = agreed_forms(processes), (in_order, tree_structure(tree), *rows)
    form = agreed.get(key) or _form(tree, made, parts)
    # Threads of loaders come in any order, so each form has its own channel there. If several
    # threads make their first trees of the same form, one thread on each process compares.
    channel = "" if in_order else f"the first tree of {form}"
    with exclusive(() if in_order else processes, channel):
        if key not in agreed:
            with require_agreement(
                WHERE, among=processes, timeout=timeout, moves=False, channel=channel
            ) as facts:
                paths = leaf_paths(tree)
                facts.describe((paths[i], parts[i], [x.sharding]) for i, x in made.items())
                for i, x in made.items():
                    facts.share(paths[i] or "the array", shared_parts(x, processes))
            agreed[key] = form
    # In later trees, a message compares the small leaves that every process passes in full.
    full = [i for i, x in made.items() if x.shape == parts[i].shape]
    small = [i for i in full if 0 < parts[i].nbytes <= SMALL_BYTES]
    checksums = [checksum_text(parts[i]) for i in small]
    record_batch(processes, ", ".join([f"batch {batch} of {WHERE}: {form}", *checksums]))
    for i, text in zip(small, checksums, strict=True):
        set_checksum(made[i], text)  # which saves a second read of the array


def _form(tree: PyTree, made: Iterable[int], parts: list[Any]) -> str:
    """`x: float32[8,4], y: int32[8]`"""
    paths = leaf_paths(tree)
    return ", ".join(f"{paths[i] or 'the array'}: {array_text(parts[i])}" for i in made)


# ------------------------------------------------------------------ parts joined


def _join(part: Any, joint: jax.ShapeDtypeStruct) -> jax.Array:
    """Assembles the full array from the part of this process, without communication."""
    data = host_copy(part)  # JAX may keep the memory that it is given
    shape = (*joint.shape, *data.shape[part.ndim :])  # the data of keys have more dims
    places = _places_in_part(joint.sharding, shape)

    def read_shard(index: Any) -> np.ndarray:
        return data[places[tuple([dim.start or 0 for dim in index])]]

    if places:
        array = jax.make_array_from_callback(shape, joint.sharding, read_shard)
    else:  # even then JAX would read the values of a replicated array
        array = jax.make_array_from_single_device_arrays(
            shape, joint.sharding, [], dtype=data.dtype
        )
    return as_keys(array, part)


@lru_cache(maxsize=1024)  # finding them takes as long as moving a small array
def _places_in_part(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> dict[tuple[int, ...], tuple[slice, ...]]:
    """Where the part of this process has its shards, by the start of each shard in the array.

    In each dim, the part has the shards of this process in order and without gaps.
    """
    regions = {*regions_here(sharding, shape).values()}
    starts = [sorted({start for start, _ in of_dim}) for of_dim in zip(*regions, strict=True)]

    def place(ends: tuple[int, int], starts: list[int]) -> slice:
        length = ends[1] - ends[0]  # equal for all shards
        first = starts.index(ends[0]) * length
        return slice(first, first + length)

    return {
        tuple(start for start, _ in region): tuple(map(place, region, starts)) for region in regions
    }


def _joint_structs(
    tree: PyTree,
    leaves: list[Any],
    specs: SpecTree,
    mesh: AnyMesh | None,
    *,
    may_lack_values: bool = False,
) -> dict[int, Any]:
    """The structs of the joint arrays; raises one error for all leaves that cannot be joined."""
    check_no_refs(tree, WHERE)
    joints: dict[int, jax.ShapeDtypeStruct] = {}
    misfits: dict[int, TreeShardError | None] = {}
    for i, resolved in resolve_on_devices(tree, specs, mesh, WHERE).items():
        misfit = None if may_lack_values else unmovable(leaves[i])
        try:
            joints[i] = _joint_struct(leaves[i], resolved)
        except TreeShardError as error:
            misfit = misfit or error
        misfits[i] = misfit
    raise_unmovable(tree, misfits, WHERE)
    return joints


def _joint_struct(part: Any, resolved: ResolvedSpec) -> jax.ShapeDtypeStruct:
    """The struct of the joint array of parts like this one. Raises as `raise_misfits` reads it."""
    # The others would pass shards of the same array, and not parts of a larger one.
    if is_spread(part):
        raise LeafError("it is already on devices of several processes. `reshard` moves it.")
    return _joint_struct_of(tuple(part.shape), device_dtype(part.dtype), resolved)


@lru_cache(maxsize=1024)  # every batch has leaves of the same kinds
def _joint_struct_of(
    of_part: tuple[int, ...], dtype: Any, resolved: ResolvedSpec
) -> jax.ShapeDtypeStruct:
    # Axes must divide the length of the joint array, and not the length of a part.
    if misfit := resolved.misfit(UNPLACEABLE - {"indivisible"}):
        raise misfit
    shape = _joint_shape(of_part, cast(Mesh, resolved.mesh), resolved.requested)
    if None in shape:
        why = (
            f"the processes hold overlapping parts of dim {shape.index(None)}, so it is undefined"
            " which part each of them passes. Order the devices of the mesh so that each process"
            " has parts of its own, or pass the full array on each, to `shard`."
        )
        raise SpecError(resolved.requested_text(), why)
    spec, adjustments = project(resolved.requested, resolved.mesh, shape)
    joint = replace(resolved, spec=spec, adjustments=adjustments)
    misfit = joint.misfit()
    if misfit is None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=joint.sharding)
    if shape == of_part:
        raise misfit
    requested, why = misfit.args
    raise type(misfit)(requested, f"joined, the parts have shape {shape}. {why}")


@lru_cache(maxsize=1024)
def _joint_shape(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[Any, ...]:
    """The shape of the joint array of parts of `shape`; `None` for dims whose parts overlap.

    In each dim, the processes must hold the same part, or parts without a common index, of one
    length. Devices of a process may be apart: if the devices of two processes alternate, one
    process has the even shards.
    """
    placeholder = (mesh.size,) * len(shape)  # all axes together divide it
    indices = NamedSharding(mesh, spec).devices_indices_map(placeholder)
    joint: list[int | None] = []
    for dim, length in enumerate(shape):
        starts: dict[int, set[int]] = defaultdict(set)
        for device, index in indices.items():
            starts[device.process_index].add(index[dim].start or 0)
        parts = set(map(frozenset, starts.values()))
        # As many starts as this, only parts of one length without a common index have.
        most = len(parts) * max(map(len, parts))
        joint.append(length * len(parts) if len(frozenset().union(*parts)) == most else None)
    return tuple(joint)

"""Builds arrays over all processes from the part that each process has, such as a batch.

`jax.make_array_from_process_local_data` builds them. It neither compares the processes, which then
hang in the next step, nor names the leaf and the way out in its errors.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_structure

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import array_text, device_dtype, has_shape, is_spread, to_numpy
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
from treeshard._core.replicas import Part, checksum_text, region_name, shared_regions
from treeshard._core.spec_trees import Misfit, ResolvedSpec, SpecTree
from treeshard._core.specs import project
from treeshard._placement.moves import as_keys, host_copy, through_host
from treeshard._placement.shard import Call, place
from treeshard._placement.targets import (
    UNPLACEABLE,
    meshes_of,
    raise_unmovable,
    resolve_on_devices,
    unmovable,
)
from treeshard.errors import LeafError, SpecError

WHERE = "from_process_local"


@breaking_if_left()
def from_process_local(
    tree: PyTree, specs: SpecTree, mesh: MeshLike | None = None, *, timeout: float = TIMEOUT
) -> PyTree:
    """Builds arrays over all processes from the part that each process has: usually a batch.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> part = {"x": np.ones((16, 3), "float32")}
        >>> batch = from_process_local(part, P(("data", "fsdp")), mesh)
        >>> batch["x"].shape, batch["x"].addressable_shards[0].data.shape
        ((16, 3), (2, 3))

        Before there are data:

        >>> struct = jax.ShapeDtypeStruct((16, 3), "float32")
        >>> from_process_local(struct, P(("data", "fsdp")), mesh).sharding.spec
        P(('data', 'fsdp'),)

    Along a dim that is sharded over processes, their parts are concatenated in the order of the
    mesh: two processes that pass `(4, d1)` each, with `P("data")`, get an array of shape
    `(8, d1)`. Along other dims each process passes the full length, with the same values.

    The call is cheap enough for every step: only the first tree of each structure, shapes and
    dtypes is compared between processes at once; later shapes in the next that exchanges a
    message: `gather`, or a step whose batch changes shape. A later tree with an error
    raises on its process only.

    Where several processes pass the same rows or the full array, their values must be equal. They
    are compared by checksums: in the first tree of each structure all of them, in later trees those
    of leaves of at most 64 KiB that every process passes in full, as under `P()`. The following
    are not compared, after the first tree: larger leaves; rows that some processes share; and trees
    made in a thread that makes batches in advance, until a step receives them.

    Args:
        tree: Any pytree of numpy arrays, or of JAX arrays on devices of this process. Other
            leaves pass through untouched. Or of `jax.ShapeDtypeStruct`s instead of all arrays:
            nothing is compared between processes then.
        specs: As in `shard`.
        mesh: As in `shard`.
        timeout: Seconds to wait for other processes, the first time.

    Returns:
        The tree with a `jax.Array` instead of each array, which share no memory with it. With a
        single process, whose part is the full array, what `shard` returns. Of structs, the
        structs of these arrays, with their shardings.

    Raises:
        UnknownAxisError, SpecError, DeletedLeafError, NoMeshError, MeshError: As `shard`.
        ShardingRuleError: As `shard`, whose warnings apply too.
        SpecError: Also if processes hold overlapping parts of a dim, so that it is undefined
            which part each of them passes.
        LeafError: As `shard`; and if a leaf is already on devices of several processes.
        ProcessError: If processes do not pass parts of the same shapes and dtypes with the same
            specs and mesh, or one of them does not make the call within `timeout`; if they pass
            different values for the same part of an array; if an earlier call left the processes
            out of step.

    Source:
        `jax.make_array_from_process_local_data`.
    """
    mesh = as_mesh(mesh, make_mesh)
    leaves, treedef = tree_flatten(tree)
    arrays = [x for x in leaves if has_shape(x)]
    if arrays and all(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        for i, target in _joint_shardings(tree, leaves, specs, mesh, structs=True).items():
            leaves[i] = _joint_struct(leaves[i], target)
        return treedef.unflatten(leaves)
    if jax.process_count() == 1:
        return place(tree, specs, mesh, Call(WHERE, through_host))
    processes = tuple(participating_processes((), meshes_of(specs, mesh)))
    check_not_broken(WHERE, processes)
    batch = count_batch(processes) if processes else 0  # before anything can fail on one process
    shardings = _joint_shardings(tree, leaves, specs, mesh)
    checksums = _agree(tree, leaves, shardings, processes, batch, timeout) if processes else {}
    for i, target in shardings.items():
        leaves[i] = _joint_array(leaves[i], target)
    # What later calls compare of these arrays, without reading them.
    for i, checksum in checksums.items():
        set_checksum(leaves[i], checksum)
    set_origin((leaves[i] for i in shardings), processes, f"batch {batch} of {WHERE}")
    return treedef.unflatten(leaves)


# ------------------------------------------------------------------ what processes compare


def _agree(
    tree: PyTree,
    leaves: list[Any],
    shardings: dict[int, NamedSharding],
    processes: tuple[int, ...],
    batch: int,
    timeout: float,
) -> dict[int, str]:
    """Compares the first tree of each form with what other processes pass, and records later ones.

    Returns checksums of the small leaves that every process passes in full.
    """
    rows = [(i, leaves[i].shape, leaves[i].dtype, target) for i, target in shardings.items()]
    # Processes that have made the same calls have agreed on the same forms, so either all skip the
    # comparison or none does. The main thread compares its own first tree: whether another thread
    # comes before it may differ.
    in_order = is_main_thread()
    agreed, key = agreed_forms(processes), (in_order, tree_structure(tree), *rows)
    form = agreed.get(key) or _form(tree, leaves, shardings)
    checksums = _checksums_of_full(leaves, shardings)
    # Threads of loaders come in any order, so each form has a channel of its own there. Of several
    # that make their first trees of one form, one compares: on each process.
    channel = "" if in_order else f"the first tree of {form}"
    with exclusive(() if in_order else processes, channel):
        if key not in agreed:
            with require_agreement(
                WHERE, among=processes, timeout=timeout, moves=False, channel=channel
            ) as facts:
                paths = leaf_paths(tree)
                facts.describe((paths[i], leaves[i], [x]) for i, x in shardings.items())
                for i, target in shardings.items():
                    facts.share(paths[i] or "the array", _shared_parts(leaves[i], target))
            agreed[key] = form
    record_batch(processes, ", ".join([f"batch {batch} of {WHERE}: {form}", *checksums.values()]))
    return checksums


def _form(tree: PyTree, leaves: list[Any], shardings: Iterable[int]) -> str:
    """`x: float32[8,4], y: int32[8]`"""
    paths = leaf_paths(tree)
    return ", ".join(f"{paths[i] or 'the array'}: {array_text(leaves[i])}" for i in shardings)


def _checksums_of_full(leaves: list[Any], shardings: dict[int, NamedSharding]) -> dict[int, str]:
    """Checksums of the small leaves that every process passes in full, by index."""
    return {
        i: checksum_text(leaves[i])
        for i, target in shardings.items()
        if 0 < leaves[i].nbytes <= SMALL_BYTES
        and _joint_shape(leaves[i].shape, target.mesh, target.spec) == tuple(leaves[i].shape)
    }


def _shared_parts(leaf: Any, target: NamedSharding) -> Iterator[Part]:
    """The parts of the joint array that this process and others pass."""
    shape = _joint_shape(leaf.shape, target.mesh, target.spec)
    regions = shared_regions(target, shape)
    if not leaf.size or all(len(processes) == 1 for processes in regions.values()):
        return
    values = to_numpy(leaf)
    # The shards of this process follow each other in what it passes, in each dim.
    spans = [sorted(set(spans)) for spans in zip(*regions, strict=True)]
    for region, processes in regions.items():
        starts = [
            dim.index(span) * (span[1] - span[0]) for dim, span in zip(spans, region, strict=True)
        ]
        ends = [start + stop - first for start, (first, stop) in zip(starts, region, strict=True)]
        if len(processes) > 1:
            index = tuple(map(slice, starts, ends))
            yield Part(region_name(region, shape), processes, [values[index]])


# ------------------------------------------------------------------ parts joined


def _joint_struct(part: jax.ShapeDtypeStruct, target: NamedSharding) -> jax.ShapeDtypeStruct:
    shape = _joint_shape(part.shape, target.mesh, target.spec)
    return jax.ShapeDtypeStruct(shape, device_dtype(part.dtype), sharding=target)


def _joint_array(part: Any, target: NamedSharding) -> jax.Array:
    data = host_copy(part)  # JAX may keep the memory that it is given
    shape = _joint_shape(part.shape, target.mesh, target.spec)
    shape = (*shape, *data.shape[part.ndim :])  # the data of keys have more dims
    # JAX's function raises on a process that has no device of the mesh.
    if target.addressable_devices:
        joint = jax.make_array_from_process_local_data(target, data, shape)
    else:
        joint = jax.make_array_from_single_device_arrays(shape, target, [], dtype=data.dtype)
    return as_keys(joint, part)


def _joint_shardings(
    tree: PyTree,
    leaves: list[Any],
    specs: SpecTree,
    mesh: AnyMesh | None,
    *,
    structs: bool = False,
) -> dict[int, NamedSharding]:
    """The shardings of the joint arrays; raises one error for all leaves that cannot be joined."""
    check_no_refs(tree, WHERE)
    resolved = resolve_on_devices(tree, specs, mesh, WHERE)
    joint = {i: _joint_spec(leaves[i], spec, structs=structs) for i, spec in resolved.items()}
    raise_unmovable(tree, {i: x for i, x in joint.items() if isinstance(x, Misfit)}, WHERE)
    return {i: x.sharding for i, x in joint.items() if isinstance(x, ResolvedSpec)}


def _joint_spec(leaf: Any, resolved: ResolvedSpec, *, structs: bool) -> ResolvedSpec | Misfit:
    """The spec of the joint array of parts like `leaf`, or why it cannot be had."""
    # The others would pass shards of the same array, and not parts of a larger one.
    if is_spread(leaf):
        why = "it is already on devices of several processes. `reshard` moves it."
        return Misfit(LeafError, why)
    # Whether axes divide a dim, the length of the joint array decides.
    misfit = None if structs else unmovable(leaf)
    misfit = misfit or resolved.misfit(UNPLACEABLE - {"indivisible"})
    if misfit is not None:
        return misfit
    shape = tuple(leaf.shape)
    joint_shape = _joint_shape(shape, resolved.mesh, resolved.requested)
    if None in joint_shape:
        why = (
            f"the processes hold overlapping parts of dim {joint_shape.index(None)}, so it is"
            " undefined which part each of them passes. Order the devices of the mesh so that each"
            " process has parts of its own, or pass the full array on each, to `shard`."
        )
        return Misfit(SpecError, why, resolved.requested_text())
    spec, adjustments = project(resolved.requested, resolved.mesh, joint_shape)
    joint = replace(resolved, spec=spec, adjustments=adjustments)
    misfit = joint.misfit()
    if misfit is None:
        return joint
    if joint_shape != shape:
        misfit = misfit._replace(why=f"joined, the parts have shape {joint_shape}. {misfit.why}")
    return misfit


@lru_cache(maxsize=1024)
def _joint_shape(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[Any, ...]:
    """The shape of the joint array of parts of `shape`; `None` for dims whose parts overlap.

    In each dim, the processes must hold the same part, or parts without a common index, of one
    length. Devices of a process need not be neighbours: with devices of two processes in turn, one
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

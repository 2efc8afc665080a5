"""Builds arrays over all processes from the part that each process has, such as a batch."""

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._core.arrays import numbers, region_of
from treeshard._core.make_mesh import make_mesh
from treeshard._core.meetings import set_origin
from treeshard._core.mesh import AnyMesh, MeshLike, as_mesh
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.processes import (
    TIMEOUT,
    agreeing,
    facts_of,
    is_spread,
    participating_processes,
)
from treeshard._core.spec_trees import LaidSpec, Misfit, SpecTree
from treeshard._core.specs import axes_of, entries, project
from treeshard._placement.moves import as_keys, assemble, through_host
from treeshard._placement.shard import Call, place
from treeshard._placement.targets import (
    UNPLACEABLE,
    lay_on_devices,
    meshes_of,
    raise_unmovable,
    unmovable,
)
from treeshard.errors import LeafError, SpecError

WHERE = "from_process_local"

_agreed: set[Any] = set()
_calls: defaultdict[tuple[int, ...], "count[int]"] = defaultdict(count)


def from_process_local(
    tree: PyTree, specs: SpecTree, mesh: MeshLike | None = None, *, timeout: float = TIMEOUT
) -> PyTree:
    """Builds arrays over all processes from the part that each process has: usually a batch.

    Along a dim that is sharded over processes, their parts are concatenated in the order of the
    mesh: two processes that pass `(4, d1)` each, with `P("data")`, get an array of shape
    `(8, d1)`. Along other dims each process passes the full length, with the same values.
    Nothing goes over the network.

    The call is cheap enough for every step: only the first tree of each structure, shapes and
    dtypes is compared between processes. A later tree with an error raises on its process only.

    Args:
        tree: Any pytree of numpy arrays, or of JAX arrays on devices of this process. Other
            leaves pass through untouched.
        specs: As in `shard`.
        mesh: As in `shard`.
        timeout: Seconds to wait for other processes, the first time.

    Returns:
        The tree with a `jax.Array` in place of each array. They share no memory with the tree.
        With a single process, whose part is the full array, what `shard` returns.

    Raises:
        UnknownAxisError, SpecError, DeletedLeafError, NoMeshError, MeshError: As `shard`.
        SpecError: Also if processes hold overlapping parts of a dim, so that it is undefined
            which part each of them passes.
        LeafError: As `shard`; and if a leaf is already on devices of several processes.
        ProcessError: If processes do not pass parts of the same shapes and dtypes with the same
            specs and mesh, or one of them does not make the call within `timeout`.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> part = {"x": np.ones((16, 3), "float32")}
        >>> batch = from_process_local(part, P(("data", "fsdp")), mesh)
        >>> batch["x"].shape, batch["x"].addressable_shards[0].data.shape
        ((16, 3), (2, 3))

    Source:
        `jax.make_array_from_process_local_data`.
    """
    mesh = as_mesh(mesh, make_mesh)
    if jax.process_count() == 1:
        return place(tree, specs, mesh, Call(WHERE, through_host))
    leaves, treedef = tree_flatten(tree)
    group = tuple(participating_processes((), meshes_of(specs, mesh)))
    call = next(_calls[group])  # counted before anything can fail on one process
    shardings = _joint_targets(tree, leaves, specs, mesh)
    among = participating_processes((), {target.mesh for target in shardings.values()})
    rows = [(i, leaves[i].shape, leaves[i].dtype, target) for i, target in shardings.items()]
    signature = (*among, treedef, *rows)
    # Processes that have made the same calls have agreed on the same signatures, so either all
    # skip the comparison or none does.
    if among and signature not in _agreed:
        paths = leaf_paths(tree)
        with agreeing(WHERE, among=among, timeout=timeout, moves=False) as facts:
            facts |= facts_of((paths[i], leaves[i], [target]) for i, target in shardings.items())
        _agreed.add(signature)
    for i, target in shardings.items():
        leaves[i] = _join(leaves[i], target)
    set_origin((leaves[i] for i in shardings), group, f"call {call} of {WHERE}")
    return treedef.unflatten(leaves)


def _join(leaf: Any, target: NamedSharding) -> jax.Array:
    """Builds the joint array of the processes, from this process's part."""
    part = numbers(leaf)
    counts = _part_counts(target.mesh, target.spec, part.ndim)
    shape = tuple(length * count for length, count in zip(part.shape, counts, strict=True))
    indices = target.addressable_devices_indices_map(shape).values()
    regions = [region_of(index, shape) for index in indices if index is not None]
    # Along each dim, the shards of this process follow one another in its part without gaps.
    starts = [sorted({start for start, _ in ends}) for ends in zip(*regions, strict=True)]

    def read_shard(index: Any) -> np.ndarray:
        slices = []
        for (start, stop), known in zip(region_of(index, shape), starts, strict=True):
            position, length = known.index(start), stop - start
            slices.append(slice(position * length, (position + 1) * length))
        return part[tuple(slices)]

    return as_keys(assemble(shape, part.dtype, target, read_shard), leaf)


def _joint_targets(
    tree: PyTree, leaves: list[Any], specs: SpecTree, mesh: AnyMesh | None
) -> dict[int, NamedSharding]:
    """The shardings of the joint arrays that the processes would build from parts like these."""
    shardings: dict[int, NamedSharding] = {}
    misfits: dict[int, Misfit] = {}
    for i, (leaf, laid) in enumerate(
        zip(leaves, lay_on_devices(tree, specs, mesh, WHERE), strict=True)
    ):
        if laid is None:
            continue
        if is_spread(leaf):
            why = "it is already on devices of several processes. `reshard` moves it."
            misfits[i] = Misfit(LeafError, why)
        elif misfit := unmovable(leaf) or laid.misfit(UNPLACEABLE - {"indivisible"}):
            misfits[i] = misfit
        else:
            laid, misfit = _of_joint_array(tuple(leaf.shape), laid)
            if misfit is None:
                shardings[i] = laid.sharding
            else:
                misfits[i] = misfit
    raise_unmovable(tree, misfits, WHERE)
    return shardings


def _of_joint_array(shape: tuple[int, ...], laid: LaidSpec) -> tuple[LaidSpec, Misfit | None]:
    """The spec of the joint array of parts of `shape`, and why it cannot be had, if so."""
    counts = _part_counts(laid.mesh, laid.requested, len(shape))
    if 0 in counts:
        why = (
            f"the processes hold overlapping parts of dim {counts.index(0)}, so it is undefined"
            " which part each of them passes. Order the devices of the mesh so that each process"
            " has parts of its own, or pass the full array on each, to `shard`."
        )
        return laid, Misfit(SpecError, why, laid.requested_text())
    joint_shape = tuple(length * count for length, count in zip(shape, counts, strict=True))
    spec, adjustments = project(laid.requested, laid.mesh, joint_shape)
    laid = replace(laid, spec=spec, adjustments=adjustments)
    misfit = laid.misfit()
    if misfit is not None and joint_shape != shape:
        misfit = misfit._replace(why=f"joined, the parts have shape {joint_shape}. {misfit.why}")
    return laid, misfit


@lru_cache(maxsize=1024)
def _part_counts(mesh: Mesh, spec: PartitionSpec, rank: int) -> tuple[int, ...]:
    """How many different parts the processes have along each dim; 0 if these overlap."""
    processes = [device.process_index for device in mesh.devices.flat]
    coordinates = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))
    counts = []
    for entry in (*entries(spec), *(None,) * rank)[:rank]:
        shard_index = np.zeros(mesh.devices.shape, int)
        for axis in axes_of(entry):
            shard_index = shard_index * mesh.shape[axis] + coordinates[axis]
        by_process: dict[int, set[int]] = {}
        for process, index in zip(processes, shard_index.flat, strict=True):
            by_process.setdefault(process, set()).add(int(index))
        different = {frozenset(part) for part in by_process.values()}
        overlap = sum(map(len, different)) > len(frozenset().union(*different))
        uneven = len(set(map(len, different))) > 1
        counts.append(0 if overlap or uneven else len(different))
    return tuple(counts)

"""Batches of which each process has a part."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._across import company, facts_of, is_spread
from treeshard._agreement import agreeing
from treeshard._errors import LeafError, SpecError
from treeshard._host import numbers
from treeshard._mesh import AnyMesh
from treeshard._own_shards import as_keys, made
from treeshard._parcels import box_of
from treeshard._paths import leaf_paths
from treeshard._processes import TIMEOUT
from treeshard._specs import UNCONSTRAINED, entries, project
from treeshard._targets import Misfit, asked_text, fit_shape, misfit_of, targets, unmovable
from treeshard._transfer import place
from treeshard._ways import through_host

WHERE = "from_process_local"

_agreed: set[Any] = set()


def from_process_local(
    tree: Any, specs: Any, mesh: AnyMesh | None = None, *, timeout: float = TIMEOUT
) -> Any:
    """Makes arrays over all processes of parts that each of them has: a batch, as a rule.

    Along a dim that is sharded over processes their parts are joined, in the order in which
    the mesh lays them: of two processes that give `(4, d1)` each with `P("data")`, an array of
    shape `(8, d1)`. Along others all give the whole, the same on each. Nothing goes over the
    network.

    It may stand in every step: only the first tree of each structure, shapes and dtypes is
    compared between processes, and a later one that is bad raises on its process alone.

    Args:
        tree: Any pytree of numpy arrays, or of JAX arrays on devices of this process. Other
            leaves pass through untouched.
        specs: A tree of `PartitionSpec`s or `NamedSharding`s, a prefix of one, or a `Plan`.
            Leaves whose spec is `None` stay as they are. A tuple of logical names is resolved
            by the rules of `logical_axis_rules`.
        mesh: The mesh; by default that of the `NamedSharding`, of the `Plan`, or the one in
            force.
        timeout: Seconds that other processes are waited for, the first time.

    Returns:
        The tree with `jax.Array`s in place of its arrays. They share no memory with them. With
        one process, whose part is the whole, what `shard` returns.

    Raises:
        UnknownAxisError, SpecError, DeletedLeafError, NoMeshError: As `shard`.
        SpecError: Also if processes hold parts of a dim that overlap, so that nothing says which
            part each is to give.
        LeafError: As `shard`; and if a leaf lies on devices of several processes already.
        ProcessError: If processes do not give parts of the same shapes and dtypes with the same
            specs and mesh, or one does not come within `timeout`.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> part = {"x": np.ones((16, 3), "float32")}
        >>> batch = from_process_local(part, P(("data", "fsdp")), mesh)
        >>> batch["x"].shape, batch["x"].addressable_shards[0].data.shape
        ((16, 3), (2, 3))

    Source:
        `jax.make_array_from_process_local_data`.
    """
    if jax.process_count() == 1:
        return place(tree, specs, mesh, WHERE, through_host)
    leaves, treedef = tree_flatten(tree)
    goals = targets(tree, leaves, specs, mesh, WHERE, fits=_fit)
    among = company((), {target.mesh for target in goals.values()})
    rows = [(i, leaves[i].shape, leaves[i].dtype, target) for i, target in goals.items()]
    form = (*among, treedef, *rows)
    # All have seen the same forms if all have made the same calls; so all skip this, or none.
    if among and form not in _agreed:
        paths = leaf_paths(tree)
        with agreeing(WHERE, among=among, timeout=timeout) as facts:
            facts |= facts_of((paths[i], leaves[i], [target]) for i, target in goals.items())
        _agreed.add(form)
    for i, target in goals.items():
        leaves[i] = _joined(leaves[i], target)
    return treedef.unflatten(leaves)


def _joined(leaf: Any, target: NamedSharding) -> jax.Array:
    local = numbers(leaf)
    grid = _grid(target, local.ndim)
    shape = tuple(length * parts for length, parts in zip(local.shape, grid, strict=True))
    places = target.addressable_devices_indices_map(shape).values()
    mine = [box_of(index, shape) for index in places if index is not None]
    # What this process has along a dim is laid out without gaps.
    starts = [sorted({start for start, _ in ends}) for ends in zip(*mine, strict=True)]

    def part(index: Any) -> np.ndarray:
        box = zip(box_of(index, shape), starts, strict=True)
        places = [(known.index(start), stop - start) for (start, stop), known in box]
        return local[tuple(slice(i * length, (i + 1) * length) for i, length in places)]

    return as_keys(made(shape, local.dtype, target, part), leaf)


def _fit(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> tuple[PartitionSpec, Misfit | None]:
    """The spec of what the processes make together of parts like this one."""
    if misfit := unmovable(leaf):
        return spec, misfit
    if is_spread(leaf):
        why = "it lies on devices of several processes already. `reshard` moves it."
        return spec, Misfit(LeafError, why)
    shape = tuple(leaf.shape)
    wrong = [lost for lost in project(spec, mesh, shape)[1] if lost.kind != "indivisible"]
    if wrong or UNCONSTRAINED in entries(spec):
        return spec, misfit_of(wrong, spec, mesh) or fit_shape(shape, spec, mesh)[1]
    known = project(spec, mesh, (mesh.size,) * len(shape))[0]
    grid = _grid(NamedSharding(mesh, known), len(shape))
    if 0 in grid:
        why = (
            f"the parts of dim {grid.index(0)} that processes hold overlap, and nothing says which"
            " each is to give. Lay the mesh so that each has parts of its own, or give all of them"
            " the whole, with `shard`."
        )
        return spec, Misfit(SpecError, why, asked_text(spec, mesh))
    whole = tuple(length * parts for length, parts in zip(shape, grid, strict=True))
    given, misfit = fit_shape(whole, spec, mesh)
    if misfit is not None and whole != shape:
        misfit = misfit._replace(why=f"joined, the parts have shape {whole}. {misfit.why}")
    return given, misfit


@lru_cache(maxsize=1024)
def _grid(sharding: NamedSharding, rank: int) -> tuple[int, ...]:
    """How many different parts the processes have along each dim; 0 if some of these overlap."""
    shape = (sharding.num_devices,) * rank  # which every spec divides
    parts: list[dict[int, set[int]]] = [{} for _ in shape]
    for device, index in sharding.devices_indices_map(shape).items():
        for dim, (start, _) in enumerate(box_of(index, shape)):
            parts[dim].setdefault(device.process_index, set()).add(start)
    counts = []
    for by_process in parts:
        different = {frozenset(starts) for starts in by_process.values()}
        overlap = sum(map(len, different)) > len(frozenset().union(*different))
        uneven = len(set(map(len, different))) > 1
        counts.append(0 if overlap or uneven else len(different))
    return tuple(counts)

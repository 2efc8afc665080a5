"""Resolves the target sharding of each leaf, and checks that every leaf can be placed there.

JAX checks each leaf while it places it, and its errors name neither the leaf nor the fix.

Specs come from four sources: a plan, shardings with their own mesh, plain specs for the mesh of the
call or the current mesh, and logical names, which the current rules resolve.
"""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import tree_leaves, tree_map

from treeshard._core.arguments import check_no_refs
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import AnyMesh, get_incontext_mesh
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import (
    ResolvedSpec,
    SpecCarrier,
    SpecTree,
    is_spec_entry,
    raise_misfits,
    resolve_specs,
)
from treeshard._core.specs import MISFITS, is_logical, is_spec, with_types
from treeshard._planning.logical import resolve_names
from treeshard.errors import DeletedLeafError, LeafError, SpecError, TreeShardError

# The kinds of adjustments that prevent placing an array.
UNPLACEABLE = MISFITS | {"unconstrained"}


def targets(
    tree: PyTree,
    specs: SpecTree,
    mesh: AnyMesh | None,
    where: str,
    prefix: str = "",
    *,
    accept_structs: bool = False,
) -> dict[int, NamedSharding]:
    """Returns the target sharding of each leaf to place, by index. Raises the errors of `shard`.

    With `accept_structs`, leaves may be `ShapeDtypeStruct`s, whose values are read later, and the
    mesh may have devices that are not attached.
    """
    # Functions for single leaves are called once for each leaf of a tree.
    if type(tree) is np.ndarray and is_spec(specs) and mesh is not None:
        target = _target_of_numpy(tree.shape, tree.dtype, specs, mesh)
        if target is not None:
            return {0: target}
    leaves = tree_leaves(tree)
    resolved = resolve_on_devices(tree, specs, mesh, where, compile_only=accept_structs)
    if len(resolved) < len(leaves):  # references are not arrays, and not resolved
        check_no_refs(tree, where, prefix)
    misfits: dict[int, TreeShardError] = {}
    for i, spec in resolved.items():
        is_read_later = accept_structs and isinstance(leaves[i], jax.ShapeDtypeStruct)
        # Report missing values first: they explain more than a spec that does not fit.
        missing = None if is_read_later else unmovable(leaves[i])
        if misfit := missing or spec.misfit(UNPLACEABLE):
            misfits[i] = misfit
    if misfits:
        raise_unmovable(tree, misfits, where, prefix)
    return {i: spec.sharding for i, spec in resolved.items()}


@lru_cache(4096)
def _target_of_numpy(
    shape: tuple[int, ...], dtype: np.dtype, spec: PartitionSpec | NamedSharding, mesh: AnyMesh
) -> NamedSharding | None:
    """The target of a numpy array of this form; `None` if it cannot be placed, or is not of JAX."""
    like = np.broadcast_to(np.empty((), dtype), shape)
    try:
        return targets([like], [spec], mesh, "").get(0)
    except TreeShardError:
        return None


def resolve_on_devices(
    tree: PyTree,
    specs: SpecTree,
    mesh: AnyMesh | None,
    where: str,
    *,
    compile_only: bool = False,
) -> dict[int, ResolvedSpec]:
    """The spec of each leaf to place, by index, resolved on a mesh with devices.

    If `compile_only`, the devices may be absent.
    """
    if isinstance(specs, SpecCarrier):
        specs.check_before_use()
        mesh = mesh or specs.mesh
        # Placements also name the memory.
        each = specs.specs_by_leaf(tree, placements=True)
        if each is None:
            specs = specs.placements
        else:
            tree, specs = tree_leaves(tree), each
    else:
        # A `SingleDeviceSharding` lacks the spec and the mesh that the following code needs.
        specs = _name_single_devices(specs, mesh, where)

    resolved = resolve_specs(tree, specs, mesh, where=where, resolve=resolver(mesh))
    placed = {i: spec for i, spec in enumerate(resolved) if spec is not None}
    for each_mesh in {spec.mesh for spec in placed.values()}:
        with_devices(each_mesh, where, compile_only=compile_only)  # raises
    return placed


def _name_single_devices(specs: SpecTree, mesh: AnyMesh | None, where: str) -> SpecTree:
    """Replaces each `SingleDeviceSharding` by a `NamedSharding` on a mesh of its device.

    Raises `SpecError` if `mesh` is given for all leaves, too.
    """

    if SingleDeviceSharding not in map(type, tree_leaves(specs)):  # nearly always, and fast
        return specs

    def name(spec: Any) -> Any:
        if not isinstance(spec, SingleDeviceSharding):
            return spec
        if mesh is not None:
            raise SpecError(
                f"{where}: a SingleDeviceSharding has its own device, and `mesh` is for all leaves."
                " Leave `mesh` out, and give the other leaves `NamedSharding(mesh, spec)`."
            )
        return NamedSharding(_mesh_of(spec), PartitionSpec(), memory_kind=spec.memory_kind)

    return tree_map(name, specs, is_leaf=is_spec_entry)


def _mesh_of(spec: SingleDeviceSharding) -> Mesh:
    return Mesh([*spec.device_set], ("device",))


def meshes_of(specs: SpecTree, mesh: AnyMesh | None) -> list[AnyMesh]:
    """The meshes on which `targets` may place leaves by these specs."""
    if mesh is not None:
        return [mesh]
    if isinstance(specs, SpecCarrier):
        return [specs.mesh]
    meshes: dict[AnyMesh, None] = {}  # an ordered set, equal on all processes
    current = get_incontext_mesh(raise_error=False)
    for spec in tree_leaves(specs, is_leaf=is_spec_entry):
        if isinstance(spec, NamedSharding):
            meshes[spec.mesh] = None
        elif isinstance(spec, SingleDeviceSharding):
            meshes[_mesh_of(spec)] = None
        elif spec is not None and current is not None:
            meshes[current] = None
    return list(meshes)


def raise_unmovable(
    tree: PyTree, misfits: Mapping[int, TreeShardError | None], where: str, prefix: str = ""
) -> None:
    """Raises one error for all leaves that cannot be moved; see `raise_misfits`."""
    raise_misfits(tree, misfits, where, "leaves cannot be moved:", prefix=prefix)


def resolver(mesh: AnyMesh | None) -> Callable[[Any], PartitionSpec]:
    """Returns a function that resolves logical names to a spec on `mesh`, or the current mesh."""
    # Look up the mesh now, because functions of a leaf are called later, outside of its context.
    resolving_mesh = get_incontext_mesh(raise_error=False) if mesh is None else mesh
    return lambda names: resolve_names(names, resolving_mesh)


def replace_names(specs: SpecTree, mesh: AnyMesh | None) -> Any:
    """Replaces each tuple of logical names in a tree of specs by the spec that it resolves to."""
    resolve = resolver(mesh)
    return tree_map(lambda x: resolve(x) if is_logical(x) else x, specs, is_leaf=is_logical)


def unmovable(leaf: Any) -> TreeShardError | None:
    """Returns an error that says why a leaf cannot be moved, or `None` if it can."""
    if type(leaf) is np.ndarray and _is_jax_dtype(leaf.dtype):  # a fast path for most leaves
        return None
    if isinstance(leaf, Tracer):  # tested first, because tracers are `jax.Array`s, too
        return LeafError(
            "a tracer has no values. Inside `jit`, call `treeshard.with_sharding_constraint`, or"
            " shard the arguments and results of the jitted function."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return LeafError(
            "a ShapeDtypeStruct describes an array and has no values. Make the array first."
        )
    if isinstance(leaf, jax.Array):  # of any dtype
        if not leaf.is_deleted():
            return None
        return DeletedLeafError(
            "the array was deleted, or donated to a compiled function. A step that donates its"
            " state also deletes the arrays that `shard` reused without a copy. Use the result of"
            " that function, or do not donate the array."
        )
    # Shards are read with `np.asarray`, which silently drops the mask.
    if np.ma.isMaskedArray(leaf):
        return LeafError("JAX does not support masked arrays. Call `.filled()` first.")
    if not _is_jax_dtype(leaf.dtype):
        return LeafError("JAX does not support this dtype. Convert it with `.astype` first.")
    return None


def unreadable(leaf: Any) -> TreeShardError | None:
    """As `unmovable`, for calls that copy shards to the host. They cannot copy unreduced arrays,
    whose devices hold summands."""
    misfit = unmovable(leaf)
    if misfit is not None or isinstance(leaf, np.ndarray) or not isinstance(leaf, jax.Array):
        return misfit
    sharding = leaf.sharding
    # JAX would let us read the summands as if they were shards.
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return None
    axes = ", ".join(map(repr, sorted(sharding.spec.unreduced)))
    plain = with_types(sharding.spec, (), ())
    return LeafError(
        f"the array is unreduced along {axes}, so each device has a summand and not a shard."
        f" Return `jax.sharding.reshard(x, {plain})` from the jitted function."
    )


@cache
def _is_jax_dtype(dtype: np.dtype) -> bool:
    # JAX has no list of its dtypes. It supports numpy's, and some of `ml_dtypes` in each version.
    try:
        jax.typeof(np.empty((), dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True

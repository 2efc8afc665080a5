"""Resolves the target sharding of each leaf, and checks that every leaf can be placed there."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves, tree_map

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.mesh import AnyMesh, current_or_given, describe_mesh, get_incontext_mesh
from treeshard._core.paths import leaf_paths, path_under
from treeshard._core.spec_trees import SpecCarrier, specs_of_leaves
from treeshard._core.specs import UNCONSTRAINED, Adjustment, entries, is_logical, is_spec, project
from treeshard._planning.logical import resolve_names
from treeshard.errors import (
    DeletedLeafError,
    LeafError,
    NoMeshError,
    SpecError,
    TreeShardError,
    UnknownAxisInSpecError,
    listed,
)


class Misfit(NamedTuple):
    """Why a leaf cannot be placed.

    Attributes:
        error: The class to raise.
        why: The fact and the fix, in words.
        requested: The requested placement, in words; empty if only the leaf is at fault.
    """

    error: type[TreeShardError]
    why: str
    requested: str = ""


# Takes a leaf, its requested spec and the mesh; returns the spec to apply, or a misfit.
Check = Callable[[Any, PartitionSpec, Mesh], tuple[PartitionSpec, Misfit | None]]


def targets(
    tree: Any,
    leaves: list[Any],
    specs: Any,
    mesh: AnyMesh | None,
    where: str,
    prefix: str = "",
    check: Check | None = None,
) -> dict[int, NamedSharding]:
    """Returns the target sharding of each leaf that is to be placed, by leaf index.

    Args:
        tree: Any pytree.
        leaves: Its flattened leaves.
        specs: A tree of specs (or tuples of logical names), a prefix of one, or a `Plan`.
        mesh: Takes precedence over meshes that the specs carry, and over the current mesh.
        where: The public function, for messages.
        prefix: The path of `tree` in a larger tree, for messages.
        check: Checks a leaf against its spec; `check_leaf` by default.

    Raises:
        As `shard` does; one error names all leaves.
    """
    if mesh is None and isinstance(specs, SpecCarrier):
        mesh = specs.mesh
    shardings: dict[int, NamedSharding] = {}
    misfits: dict[int, Misfit] = {}
    cache: dict[Any, NamedSharding] = {}
    leaf_specs = specs_of_leaves(specs, tree, resolve=resolver(mesh))
    for i, (leaf, requested) in enumerate(zip(leaves, leaf_specs, strict=True)):
        if requested is None or not has_shape(leaf):
            continue
        leaf_mesh = mesh_for(requested, mesh, where)
        spec, memory_kind = requested, None
        if isinstance(requested, NamedSharding):
            spec, memory_kind = requested.spec, requested.memory_kind
        spec, misfit = (check or check_leaf)(leaf, spec, leaf_mesh)
        if misfit is not None:
            misfits[i] = misfit
            continue
        key = (leaf_mesh, spec, memory_kind)
        if key not in cache:
            cache[key] = NamedSharding(leaf_mesh, spec, memory_kind=memory_kind)
        shardings[i] = cache[key]
    raise_misfits(tree, leaves, misfits, where, prefix)
    return shardings


def meshes_of(specs: Any, mesh: AnyMesh | None) -> list[AnyMesh]:
    """Returns every mesh on which `targets` may place leaves."""
    if isinstance(specs, SpecCarrier):
        specs, mesh = specs.specs, mesh or specs.mesh
    if mesh is not None:
        return [mesh]
    leaf_specs = tree_leaves(specs, is_leaf=lambda x: is_spec(x) or is_logical(x))
    current = None
    if any(not isinstance(spec, NamedSharding) for spec in leaf_specs):
        current = get_incontext_mesh(raise_error=False)
    carried = [spec.mesh for spec in leaf_specs if isinstance(spec, NamedSharding)]
    return [*dict.fromkeys(carried), *([] if current is None else [current])]


def resolver(mesh: AnyMesh | None) -> Callable[[Any], PartitionSpec]:
    """Returns a function that resolves logical names to a spec on `mesh`, or the current mesh."""
    resolving_mesh = get_incontext_mesh(raise_error=False) if mesh is None else mesh
    return lambda names: resolve_names(names, resolving_mesh)


def without_names(specs: Any, mesh: AnyMesh | None) -> Any:
    """Replaces the tuples of logical names in a tree of specs by the specs they resolve to."""
    resolve = resolver(mesh)
    return tree_map(lambda x: resolve(x) if is_logical(x) else x, specs, is_leaf=is_logical)


def mesh_for(spec: PartitionSpec | NamedSharding, mesh: AnyMesh | None, where: str) -> Mesh:
    """Returns the given mesh, else the sharding's own, else the current one.

    Raises `NoMeshError` if there is none, or if it has no devices.
    """
    if mesh is None and isinstance(spec, NamedSharding):
        mesh = spec.mesh
    mesh = current_or_given(mesh)
    if isinstance(mesh, Mesh):
        return mesh
    raise NoMeshError(
        f"{where}: the mesh ({describe_mesh(mesh)}) is an AbstractMesh, which has sizes but no"
        " devices to hold arrays. Pass a mesh with devices (`mesh=...`), as `treeshard.make_mesh`"
        " returns."
    )


def check_leaf(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> tuple[PartitionSpec, Misfit | None]:
    """Returns the spec without trailing `None`s, and a misfit if the leaf cannot have it."""
    misfit = unmovable(leaf)
    return (spec, misfit) if misfit else check_shape(tuple(leaf.shape), spec, mesh)


def check_leaf_or_struct(
    leaf: Any, spec: PartitionSpec, mesh: Mesh
) -> tuple[PartitionSpec, Misfit | None]:
    """Like `check_leaf`, but also accepts a `ShapeDtypeStruct`, whose values are read later."""
    is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
    return check_shape(leaf.shape, spec, mesh) if is_struct else check_leaf(leaf, spec, mesh)


def check_shape(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> tuple[PartitionSpec, Misfit | None]:
    """Like `check_leaf`, for an array of which only the shape matters."""
    if UNCONSTRAINED in entries(spec):
        why = (
            "a dim is UNCONSTRAINED, which has a meaning only inside jit. Write an axis, or"
            " None to replicate the dim."
        )
        return spec, Misfit(SpecError, why, requested_text(spec, mesh))
    projected, adjustments = project(spec, mesh, shape)
    return projected, misfit_of(adjustments, spec, mesh)


def misfit_of(adjustments: Sequence[Adjustment], spec: PartitionSpec, mesh: Mesh) -> Misfit | None:
    """Returns the misfit of a spec that would have to be adjusted; `None` without adjustments."""
    if not adjustments:
        return None
    unknown = any(adjustment.kind == "axis-not-in-mesh" for adjustment in adjustments)
    error = UnknownAxisInSpecError if unknown else SpecError
    why = " ".join(adjustment.why for adjustment in adjustments)
    return Misfit(error, why, requested_text(spec, mesh))


def requested_text(spec: PartitionSpec, mesh: Mesh) -> str:
    """`P('fsdp',) on the mesh (fsdp=8)`, as messages show a requested placement."""
    return f"{spec} on the mesh ({describe_mesh(mesh)})"


def unmovable(leaf: Any) -> Misfit | None:
    """Returns a misfit if the values of a leaf cannot be read; else `None`."""
    if isinstance(leaf, Tracer):
        return Misfit(
            LeafError,
            "it is being traced and has no values yet. Inside jit, use"
            " `treeshard.with_sharding_constraint`; or move the arguments and results of the"
            " jitted function.",
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return Misfit(
            LeafError,
            "it is a ShapeDtypeStruct, which describes an array but holds no values. Make the"
            " array first. (`Plan.structs` describes how arrays would be sharded.)",
        )
    if isinstance(leaf, jax.Array):
        if not leaf.is_deleted():
            return None
        return Misfit(
            DeletedLeafError,
            "its memory is gone: it was deleted, or donated to a compiled function. Use the"
            " result of that function, or do not donate the array.",
        )
    if np.ma.isMaskedArray(leaf):
        return Misfit(
            LeafError, "it is a masked array, which JAX does not support. Call `.filled()` first."
        )
    if not _is_jax_dtype(leaf.dtype):
        return Misfit(
            LeafError, "JAX does not support this dtype. Convert it with `.astype` first."
        )
    return None


@cache
def _is_jax_dtype(dtype: np.dtype) -> bool:
    try:
        jax.typeof(np.empty((), dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def raise_misfits(
    tree: Any, leaves: list[Any], misfits: Mapping[int, Misfit], where: str, prefix: str = ""
) -> None:
    """Raises one error that names every misfit with its leaf's path; does nothing without any."""
    if not misfits:
        return
    paths = leaf_paths(tree)
    facts = []
    for i, (_, why, requested) in misfits.items():
        path = path_under(prefix, paths[i]) or "the array"
        facts.append(f"{path}: {array_text(leaves[i])}{requested and f' as {requested}'}: {why}")
    errors = [misfit.error for misfit in misfits.values()]
    # One class has to stand for all: callers most likely catch an unknown axis.
    error = UnknownAxisInSpecError if UnknownAxisInSpecError in errors else errors[0]
    raise error(listed(f"{where}: {len(facts)} leaves cannot be moved, and none was:", facts))

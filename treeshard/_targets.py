"""What of a tree can be moved, and where each leaf goes: all that is checked first."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves, tree_map

from treeshard._errors import (
    DeletedLeafError,
    LeafError,
    NoMeshError,
    SpecError,
    TreeShardError,
    UnknownAxisInSpecError,
    listed,
)
from treeshard._logical import resolve_names
from treeshard._mesh import AnyMesh, current_or_given, describe_mesh, get_incontext_mesh
from treeshard._paths import leaf_paths, path_under
from treeshard._spec_trees import SpecCarrier, specs_of_leaves
from treeshard._specs import (
    UNCONSTRAINED,
    Adjustment,
    array_text,
    entries,
    has_shape,
    is_logical,
    is_spec,
    project,
)


class Misfit(NamedTuple):
    """Why a leaf cannot be moved.

    Attributes:
        error: What to raise.
        why: The fact, in words, with the way out.
        asked: Where the leaf was to go, in words; nothing if only the leaf is at fault.
    """

    error: type[TreeShardError]
    why: str
    asked: str = ""


# Takes a leaf, the spec it was given and the mesh; returns the spec it gets, or why it gets none.
Fits = Callable[[Any, PartitionSpec, Mesh], tuple[PartitionSpec, Misfit | None]]


def targets(
    tree: Any,
    leaves: list[Any],
    specs: Any,
    mesh: AnyMesh | None,
    where: str,
    prefix: str = "",
    fits: Fits | None = None,
) -> dict[int, NamedSharding]:
    """The sharding of each leaf that is to be placed, by its position among the leaves.

    Args:
        tree: Any pytree.
        leaves: Its leaves, flattened.
        specs: A tree of specs (or tuples of logical names), a prefix of one, or a `Plan`.
        mesh: Goes before the meshes that the specs carry, and the one in force.
        where: The public function, for messages.
        prefix: The path of `tree` in a larger one, for messages.
        fits: What finds the spec that a leaf gets; by default for arrays that hold numbers.

    Raises:
        As `shard` does, for all leaves at once.
    """
    if mesh is None and isinstance(specs, SpecCarrier):
        mesh = specs.mesh
    found: dict[int, NamedSharding] = {}
    misfits: dict[int, Misfit] = {}
    known: dict[Any, NamedSharding] = {}
    beside = specs_of_leaves(specs, tree, resolve=resolver(mesh))
    for i, (leaf, asked) in enumerate(zip(leaves, beside, strict=True)):
        if asked is None or not has_shape(leaf):
            continue
        on = mesh_for(asked, mesh, where)
        spec, kind = (
            (asked.spec, asked.memory_kind) if isinstance(asked, NamedSharding) else (asked, None)
        )
        given, misfit = (fits or fit)(leaf, spec, on)
        if misfit is not None:
            misfits[i] = misfit
        elif (found_before := known.get((on, given, kind))) is not None:
            found[i] = found_before
        else:
            found[i] = known[on, given, kind] = NamedSharding(on, given, memory_kind=kind)
    raise_misfits(tree, leaves, misfits, where, prefix)
    return found


def meshes_of(specs: Any, mesh: AnyMesh | None) -> list[AnyMesh]:
    """Every mesh that `targets` may place leaves on."""
    if isinstance(specs, SpecCarrier):
        specs, mesh = specs.specs, mesh or specs.mesh
    if mesh is not None:
        return [mesh]
    found = tree_leaves(specs, is_leaf=lambda x: is_spec(x) or is_logical(x))
    current = None
    if any(not isinstance(spec, NamedSharding) for spec in found):
        current = get_incontext_mesh(raise_error=False)
    own = [spec.mesh for spec in found if isinstance(spec, NamedSharding)]
    return [*dict.fromkeys(own), *([] if current is None else [current])]


def resolver(mesh: AnyMesh | None) -> Callable[[Any], PartitionSpec]:
    """What makes specs of tuples of logical names, for a mesh or the one in force."""
    on = get_incontext_mesh(raise_error=False) if mesh is None else mesh
    return lambda names: resolve_names(names, on)


def without_names(specs: Any, mesh: AnyMesh | None) -> Any:
    """A tree of specs, with specs in the place of tuples of logical names."""
    resolve = resolver(mesh)
    return tree_map(lambda x: resolve(x) if is_logical(x) else x, specs, is_leaf=is_logical)


def mesh_for(spec: PartitionSpec | NamedSharding, mesh: AnyMesh | None, where: str) -> Mesh:
    """The mesh given, else the sharding's own, else the one in force; with devices."""
    if mesh is None and isinstance(spec, NamedSharding):
        mesh = spec.mesh
    mesh = current_or_given(mesh)
    if isinstance(mesh, Mesh):
        return mesh
    raise NoMeshError(
        f"{where}: the mesh ({describe_mesh(mesh)}) is an AbstractMesh: it has sizes, but no"
        " devices that could hold arrays. Pass one with devices (`mesh=...`);"
        " `treeshard.make_mesh` makes it."
    )


def fit(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> tuple[PartitionSpec, Misfit | None]:
    """The spec without what says nothing (trailing `None`s), or why the leaf cannot have it."""
    misfit = unmovable(leaf)
    return (spec, misfit) if misfit else fit_shape(tuple(leaf.shape), spec, mesh)


def fit_struct(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> tuple[PartitionSpec, Misfit | None]:
    """As `fit`; but a `ShapeDtypeStruct` will do, whose numbers come later."""
    is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
    return fit_shape(leaf.shape, spec, mesh) if is_struct else fit(leaf, spec, mesh)


def fit_shape(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> tuple[PartitionSpec, Misfit | None]:
    """As `fit`, for an array of which only the shape matters."""
    if UNCONSTRAINED in entries(spec):
        why = (
            "a dim is UNCONSTRAINED, which means something only inside jit. Write an axis, or"
            " None to keep the dim whole."
        )
        return spec, Misfit(SpecError, why, asked_text(spec, mesh))
    given, lost = project(spec, mesh, shape)
    return given, misfit_of(lost, spec, mesh)


def misfit_of(lost: Sequence[Adjustment], spec: PartitionSpec, mesh: Mesh) -> Misfit | None:
    """Why a spec cannot be had, if something of it would be lost."""
    if not lost:
        return None
    unknown = any(adjustment.kind == "axis-not-in-mesh" for adjustment in lost)
    error = UnknownAxisInSpecError if unknown else SpecError
    return Misfit(error, " ".join(adjustment.why for adjustment in lost), asked_text(spec, mesh))


def asked_text(spec: PartitionSpec, mesh: Mesh) -> str:
    """What was asked for, as messages say it."""
    return f"{spec} on the mesh ({describe_mesh(mesh)})"


def unmovable(leaf: Any) -> Misfit | None:
    """Why the numbers of a leaf cannot be had, if they cannot."""
    if isinstance(leaf, Tracer):
        return Misfit(
            LeafError,
            "it is being traced and has no numbers yet. Inside jit use"
            " `treeshard.with_sharding_constraint`; here, move what goes in and what comes out.",
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return Misfit(
            LeafError,
            "it is a ShapeDtypeStruct, which describes an array and holds none. `Plan.structs`"
            " describes where one would lie; to move it, make the array first.",
        )
    if isinstance(leaf, jax.Array):
        if not leaf.is_deleted():
            return None
        return Misfit(
            DeletedLeafError,
            "its memory is gone: it was deleted, or donated to a compiled function. Use what"
            " that function returned, or do not donate it.",
        )
    if np.ma.isMaskedArray(leaf):
        return Misfit(LeafError, "JAX has no masked arrays. Use `.filled()` first.")
    if not _known_to_jax(leaf.dtype):
        return Misfit(LeafError, "JAX has no such dtype. Use `.astype` first.")
    return None


@cache
def _known_to_jax(dtype: np.dtype) -> bool:
    try:
        jax.typeof(np.empty((), dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def raise_misfits(
    tree: Any, leaves: list[Any], misfits: Mapping[int, Misfit], where: str, prefix: str = ""
) -> None:
    """Raises one error for all misfits, if there are any, each with its leaf's path."""
    if not misfits:
        return
    paths = leaf_paths(tree)
    facts = []
    for i, (_, why, asked) in misfits.items():
        path = path_under(prefix, paths[i]) or "the array"
        facts.append(f"{path}: {array_text(leaves[i])}{asked and f' as {asked}'}: {why}")
    errors = [misfit.error for misfit in misfits.values()]
    # One class for all: an unknown axis is what callers most likely wait for.
    error = UnknownAxisInSpecError if UnknownAxisInSpecError in errors else errors[0]
    raise error(listed(f"{where}: {len(facts)} leaves cannot be moved, and none was:", facts))

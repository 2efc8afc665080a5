"""Sharding constraints that are safe with and without a mesh, in and out of traces."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._core.arrays import has_shape
from treeshard._core.jax_private import is_tracing, vmapped_axes
from treeshard._core.make_mesh import make_mesh
from treeshard._core.mesh import (
    AnyMesh,
    MeshLike,
    as_mesh,
    axes_of_type,
    axis_sizes,
    axis_tuple,
    context_mesh,
    describe_mesh,
    get_incontext_mesh,
    manual_axes,
    same_axes,
)
from treeshard._core.paths import leaf_paths
from treeshard._core.spec_trees import SpecCarrier, get_names_from_partition_spec, specs_of_leaves
from treeshard._core.specs import Adjustment, project, settled, without_axes
from treeshard._placement.shard import shard
from treeshard._planning.logical import resolve_names
from treeshard.errors import SpecError, did_you_mean, listed, warn

Uneven = Literal["warn", "error", "drop", "keep"]

# "dp" is another name than "fsdp" (similarity 0.67); "fdsp" (0.75) is a misspelling.
_NEAR_MISS = 0.75


def with_sharding_constraint(
    tree: Any, shardings: Any, mesh: MeshLike | None = None, *, uneven: Uneven = "warn"
) -> Any:
    """Like `jax.lax.with_sharding_constraint`, but safe without a mesh, outside `jit`, and for
    specs that do not fit.

        >>> x = jnp.ones((8, 6))
        >>> with_sharding_constraint(x, P("fsdp", "tensor"), make_mesh("fsdp=8")).sharding.spec
        P('fsdp',)
        >>> with_sharding_constraint(x, P("fsdp")) is x  # no mesh
        True

    Values never change. Specs are projected on the mesh first: axes that the mesh does not have
    are dropped (one model, many meshes), and so are those over which `shard_map` or
    `vmap(spmd_axis_name=...)` already runs this code; in each dim, the longest prefix of axes
    that divides it stays. Then:

    - in a trace, Auto axes are constrained as by `jax.lax.with_sharding_constraint`, and
      Explicit axes, where they differ, as by `jax.sharding.reshard`;
    - elsewhere, arrays (numpy's too) are placed as by `shard`;
    - a `jax.ShapeDtypeStruct` gets the sharding.

    A leaf is returned unchanged if its spec is `None`, it is not an array, there is no mesh,
    every axis is Manual, or the context has Manual or Explicit axes of another mesh. An
    `AbstractMesh` has no devices, so arrays outside a trace, and arrays on a single device, are
    returned unchanged.

    Args:
        tree: Any pytree. Leaves that are not arrays pass through.
        shardings: A tree of `PartitionSpec`s or `NamedSharding`s with the structure of
            `tree`, a prefix of one, or a `Plan`. `UNCONSTRAINED` leaves a dim as it is. Tuples
            of logical names are resolved by the rules of `logical_axis_rules`.
        mesh: The mesh, or its axes as text; by default the sharding's or the plan's, else the
            current mesh.
        uneven: What to do where axes do not divide a dim: `"warn"` drops them and warns once
            per call site, `"drop"` drops them silently, `"error"` raises, `"keep"` lets the
            partitioner pad the intermediate (in a trace, on Auto axes; else it raises).

    Returns:
        A tree of the same structure.

    Raises:
        SpecError: If a spec names axes beyond its leaf's rank, `shardings` does not fit
            the tree, logical names do not resolve, or `uneven` is unknown; with `"error"`
            and `"keep"`, also for uneven dims.

    Warns:
        ShardingWarning: If axes were dropped because they do not divide a dim
            (`uneven="warn"`), a spec names an axis twice (only the first dim is sharded over
            it), or an unknown axis looks like a misspelling of one that the mesh has.

    Source:
        EasyLM and EasyDeL's function of this name; the guards are new.
    """
    if uneven not in get_args(Uneven):
        known, hint = get_args(Uneven), did_you_mean(str(uneven), get_args(Uneven))
        raise SpecError(f"uneven={uneven!r} is none of {', '.join(map(repr, known))}.{hint}")
    mesh = as_mesh(mesh, make_mesh)
    specs = specs_of_leaves(shardings, tree, "shardings", resolve_names)
    if mesh is None and isinstance(shardings, SpecCarrier):
        mesh = shardings.mesh
    return _constrain_tree(tree, specs, mesh, uneven)


def unshard(tree: Any, specs: Any, axis: str | Sequence[str]) -> Any:
    """Gathers a tree over an axis: constrains it to its specs without that axis.

    Call it on a layer's weights just before they are used, above all inside a scan over layers:
    the partitioner then gathers the weights instead of moving activations. Without
    `jax.checkpoint` around the layer, a scan keeps every gathered layer for its gradient.

    Args:
        tree: Any pytree, such as the parameters of one layer.
        specs: How `tree` is sharded now: a tree of specs, a prefix of one, or a `Plan`. For a
            slice of stacked layers use `layer_specs`.
        axis: The mesh axis to gather over, or several.

    Returns:
        A tree of the same structure. Leaves whose specs do not name `axis` are unchanged.

    Raises:
        SpecError: As `with_sharding_constraint`, whose warnings apply too.
        TypeError: If `axis` is neither a string nor a sequence of strings.

    Warns:
        ShardingWarning: If `axis` looks like a misspelling of one that the specs name.

    Examples:
        >>> split = NamedSharding(make_mesh("data=2,fsdp=4"), P("data", "fsdp"))
        >>> x = jax.device_put(jnp.ones((8, 4)), split)
        >>> unshard(x, split, "fsdp").sharding.spec
        P('data',)

    Source:
        MaxText gathers a layer's weights this way; the name is PyTorch FSDP2's.
    """
    axes = axis_tuple(axis, "unshard")
    leaf_specs = specs_of_leaves(specs, tree, resolve=resolve_names)
    named = get_names_from_partition_spec(leaf_specs)
    for name in axes:
        if name not in named and (hint := did_you_mean(name, named, _NEAR_MISS)):
            warn(f"unshard: no spec names the axis {name!r}, so nothing is gathered.{hint}")
    gathered = [_gathered(spec, axes) for spec in leaf_specs]
    return _constrain_tree(tree, gathered, specs.mesh if isinstance(specs, SpecCarrier) else None)


def _gathered(spec: Any, axes: tuple[str, ...]) -> Any:
    """A leaf's spec without `axes`; `None` if it names none of them."""
    if spec is None or not set(axes) & set(get_names_from_partition_spec(spec)):
        return None
    if isinstance(spec, NamedSharding):
        return spec.update(spec=without_axes(spec.spec, axes))
    return without_axes(spec, axes)


# ------------------------------------------------------------------ the target of each leaf


class _Target(NamedTuple):
    """The sharding that one leaf gets, and the parts of the requested spec that were dropped."""

    mesh: AnyMesh
    spec: PartitionSpec
    memory_kind: str | None
    adjustments: tuple[Adjustment, ...]
    padded: bool = False  # whether `spec` is uneven

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=self.memory_kind)


def _target(leaf: Any, requested: Any, mesh: AnyMesh | None, keep: bool) -> _Target | None:
    """Returns the target of a leaf; `None` if the leaf is returned unchanged."""
    if requested is None or not has_shape(leaf):
        return None
    memory_kind = None
    if isinstance(requested, NamedSharding):
        mesh = requested.mesh if mesh is None else mesh
        requested, memory_kind = requested.spec, requested.memory_kind
    struct = isinstance(leaf, jax.ShapeDtypeStruct)
    traced = is_tracing() and not struct
    mesh = _mesh_for(mesh, leaf if traced else None)
    if mesh is None or not (traced or struct or isinstance(mesh, Mesh)):
        return None
    taken = manual_axes() | vmapped_axes()
    spec, adjustments = project(requested, mesh, leaf.shape, manual=taken)
    if not traced:
        spec = settled(spec, _current_spec(mesh, leaf))
    uneven = {axis for note in adjustments if note.kind == "indivisible" for axis in note.axes}
    if not (keep and traced and uneven) or uneven - {*axes_of_type(mesh, AxisType.Auto)}:
        return _Target(mesh, spec, memory_kind, adjustments)
    spec, _ = project(requested, mesh, leaf.shape, manual=taken, divisible=False)
    adjustments = tuple(note for note in adjustments if note.kind != "indivisible")
    return _Target(mesh, spec, memory_kind, adjustments, padded=True)


def _mesh_for(requested: AnyMesh | None, value: Any) -> AnyMesh | None:
    """Returns the mesh that shardings must name here.

    `None` if there is no mesh, or if the requested one conflicts with the context.
    """
    context = context_mesh() or _mesh_of_type(value)
    mesh = get_incontext_mesh(raise_error=False) if requested is None else requested
    if mesh is None:
        return None
    if context is None or not same_axes(mesh, context):
        if context is not None and not context.are_all_axes_auto:
            return None
        # In a trace, JAX refuses Explicit axes unless the types of values name them.
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        return mesh.update(axis_types=auto) if is_tracing() else mesh
    if manual_axes():
        return context
    # Both are the same mesh: the context knows the axis types and, in a trace, the devices.
    if isinstance(context, Mesh) and (is_tracing() or not isinstance(mesh, Mesh)):
        return context
    return mesh.update(axis_types=context.axis_types)


def _mesh_of_type(value: Any) -> AnyMesh | None:
    """The mesh in the type of a traced value, if it has Explicit axes."""
    mesh = None if value is None else jax.typeof(value).sharding.mesh
    return mesh if mesh is not None and axes_of_type(mesh, AxisType.Explicit) else None


def _current_spec(mesh: AnyMesh, leaf: Any) -> PartitionSpec:
    """The current spec of a leaf on `mesh`; `P()` if it is not on that mesh."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and same_axes(sharding.mesh, mesh):
        return sharding.spec
    return PartitionSpec()


# ------------------------------------------------------------------ errors and warnings


def _report(tree: Any, targets: Sequence[_Target | None], uneven: Uneven) -> None:
    """Raises one error for all misfits; else warns once about all dropped axes."""
    notes = [(i, t, note) for i, t in enumerate(targets) if t is not None for note in t.adjustments]
    paths = leaf_paths(tree) if notes else []
    errors: list[str] = []
    warnings: list[str] = []
    for i, target, note in notes:
        fact = f"{paths[i] or 'the array'}: {note.why}"
        mesh = f"The mesh: {describe_mesh(target.mesh)}."
        if note.kind == "rank":
            errors.append(f"{fact} {mesh}")
        elif note.kind == "indivisible" and uneven in ("error", "keep"):
            errors.append(f"{fact} {mesh}{_KEEP if uneven == 'keep' else ''}")
        elif note.kind == "indivisible" and uneven == "warn":
            warnings.append(f"{fact} {mesh} It is constrained to {target.spec} instead.")
        elif note.kind == "axis-already-used" or _is_misspelled(note, target):
            warnings.append(fact)
    if errors:
        raise SpecError(listed(f"{len(errors)} constraints do not fit:", errors))
    if warnings:
        warn(listed(f"{len(warnings)} constraints were only applied in part:", warnings))


_KEEP = ' `uneven="keep"` works inside jit, on Auto axes: arrays are stored in equal shards.'


def _is_misspelled(note: Adjustment, target: _Target) -> bool:
    """Whether an unknown axis is likely misspelled, rather than an axis of another mesh."""
    if note.kind != "axis-not-in-mesh":
        return False
    others = set(axis_sizes(target.mesh)) - set(get_names_from_partition_spec(target.spec))
    return any(did_you_mean(axis, others, _NEAR_MISS) for axis in note.axes)


# ------------------------------------------------------------------ applying it


def _constrain_tree(
    tree: Any, specs: list[Any], mesh: AnyMesh | None, uneven: Uneven = "warn"
) -> Any:
    leaves, treedef = tree_flatten(tree)
    pairs = zip(leaves, specs, strict=True)
    targets = [_target(leaf, spec, mesh, uneven == "keep") for leaf, spec in pairs]
    _report(tree, targets, uneven)
    tracing, to_place = is_tracing(), []
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if target is None:
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaves[i] = leaf.update(sharding=target.sharding(target.spec))
        elif tracing:
            leaves[i] = _constrain(leaf, target)
        else:
            to_place.append(i)
    # In one call: `shard` checks every leaf before it moves one.
    shardings = [targets[i].sharding(targets[i].spec) for i in to_place]
    for i, placed in zip(to_place, shard([leaves[i] for i in to_place], shardings), strict=True):
        leaves[i] = placed
    return treedef.unflatten(leaves)


def _constrain(x: Any, target: _Target) -> Any:
    """Reshards on the Explicit axes and constrains the Auto ones; Manual ones were dropped."""
    auto = axes_of_type(target.mesh, AxisType.Auto)
    explicit = axes_of_type(target.mesh, AxisType.Explicit)
    if explicit:
        x = _reshard(x, target.mesh.abstract_mesh, without_axes(target.spec, auto))
    if not auto:
        return x
    sharding = target.sharding(without_axes(target.spec, explicit))
    if explicit or target.padded:
        # Un-jitted grad and vmap execute a constraint at once: it would then undo the
        # Explicit part, and refuse an uneven spec.
        return _jitted_constraint(x, sharding)
    try:
        return jax.lax.with_sharding_constraint(x, sharding)
    except TypeError:
        # Executed at once with an AbstractMesh, on a value that is on no mesh: there are no
        # devices to move it to.
        if isinstance(target.mesh, Mesh):
            raise
        return x


_jitted_constraint = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def _reshard(x: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    current = without_axes(jax.typeof(x).sharding.spec, ())
    spec = without_axes(settled(spec, current), ())
    return x if spec == current else jax.sharding.reshard(x, NamedSharding(mesh, spec))

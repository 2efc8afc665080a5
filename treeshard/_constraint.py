"""Constraints on where values lie, safe with and without a mesh, in and out of traces."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._errors import SpecError, did_you_mean, listed, warn
from treeshard._logical import resolve_names
from treeshard._mesh import (
    AnyMesh,
    axes_of_type,
    axis_sizes,
    axis_tuple,
    context_mesh,
    describe_mesh,
    get_incontext_mesh,
    is_tracing,
    manual_axes,
    same_axes,
    vmapped_axes,
)
from treeshard._paths import leaf_paths
from treeshard._spec_trees import SpecCarrier, get_names_from_partition_spec, specs_of_leaves
from treeshard._specs import Adjustment, has_shape, project, settled, without_axes
from treeshard._transfer import shard

Uneven = Literal["warn", "error", "drop", "keep"]

# "dp" is a name of its own beside "fsdp" (0.67); "fdsp" (0.75) is a slip.
_NEAR_MISS = 0.75


def with_sharding_constraint(
    tree: Any, shardings: Any, mesh: AnyMesh | None = None, *, uneven: Uneven = "warn"
) -> Any:
    """Constrains where the leaves of a tree lie; safe to call in every context.

    Values never change. What is asked for is projected on the mesh: axes that the mesh
    lacks drop out (one model, many meshes), and so do those over which `shard_map` or
    `vmap(spmd_axis_name=...)` already runs this code; per dim, the longest prefix of axes
    that divides it stays. In a trace, Auto axes are then constrained as by
    `jax.lax.with_sharding_constraint` and Explicit ones, where they differ, as by
    `jax.sharding.reshard`; elsewhere arrays (numpy's too) are placed as by `shard`; a
    `jax.ShapeDtypeStruct` gets the sharding.

    Leaves stay as they are if the spec is `None`, the leaf is no array, there is no mesh,
    every axis is Manual, or the mesh is foreign to a context with Manual or Explicit axes.
    An `AbstractMesh` has no devices: arrays outside of a trace, and those on a single
    device, stay where they are.

    Args:
        tree: Any pytree. Leaves that are no arrays pass through.
        shardings: A tree of `PartitionSpec`s or `NamedSharding`s with the structure of
            `tree`, a prefix of one, or a `Plan`. `UNCONSTRAINED` leaves a dim as it is. A
            tuple of logical names is resolved by the rules of `logical_axis_rules`.
        mesh: The mesh; by default the sharding's or the plan's own, else the one in force.
        uneven: What to do where axes do not divide a dim: `"warn"` drops them and says so
            once per place, `"drop"` is silent, `"error"` raises, `"keep"` lets the
            partitioner pad the intermediate (in a trace, on Auto axes; else it raises).

    Returns:
        A tree of the same structure.

    Raises:
        SpecError: If a spec names axes beyond its leaf's rank, `shardings` does not fit
            the tree, logical names do not resolve, or `uneven` is unknown; with `"error"`
            and `"keep"`, for uneven dims.

    Warns:
        ShardingWarning: If axes were dropped because they do not divide a dim
            (`uneven="warn"`), an axis stands in a spec twice (the first dim has it), or an
            unknown axis looks like a slip for one that the mesh has.

    Examples:
        >>> x = jnp.ones((8, 6))
        >>> with_sharding_constraint(x, P("fsdp", "tensor"), make_mesh("fsdp=8")).sharding.spec
        P('fsdp',)
        >>> with_sharding_constraint(x, P("fsdp")) is x  # no mesh
        True

    Source:
        EasyLM and EasyDeL's function of this name; the guards are new.
    """
    if uneven not in get_args(Uneven):
        known, hint = get_args(Uneven), did_you_mean(str(uneven), get_args(Uneven))
        raise SpecError(f"uneven={uneven!r} is none of {', '.join(map(repr, known))}.{hint}")
    specs = specs_of_leaves(shardings, tree, "shardings", resolve_names)
    if mesh is None and isinstance(shardings, SpecCarrier):
        mesh = shardings.mesh
    return _constrain_tree(tree, specs, mesh, uneven)


def unshard(tree: Any, specs: Any, axis: str | Sequence[str]) -> Any:
    """Gathers a tree over an axis: constrains it to its specs without that axis.

    Called on a layer's weights where they are used, most of all inside a scan over layers:
    the partitioner then gathers weights, and does not move activations instead. Without
    `jax.checkpoint` around the layer, a scan keeps every gathered layer for its gradient.

    Args:
        tree: Any pytree, such as the parameters of one layer.
        specs: How `tree` lies now: a tree of specs, a prefix of one, or a `Plan`. For a
            slice of stacked layers use `layer_specs`.
        axis: The mesh axis to gather over, or several.

    Returns:
        A tree of the same structure. Leaves whose specs do not name `axis` stay as they are.

    Raises:
        SpecError: As `with_sharding_constraint`, whose warnings apply too.
        TypeError: If `axis` is neither a string nor a sequence of strings.

    Warns:
        ShardingWarning: If `axis` looks like a slip for one that the specs name.

    Examples:
        >>> split = NamedSharding(make_mesh("data=2,fsdp=4"), P("data", "fsdp"))
        >>> x = jax.device_put(jnp.ones((8, 4)), split)
        >>> unshard(x, split, "fsdp").sharding.spec
        P('data',)

    Source:
        MaxText gathers a layer's weights so; the name is PyTorch FSDP2's.
    """
    axes = axis_tuple(axis, "unshard")
    beside = specs_of_leaves(specs, tree, resolve=resolve_names)
    named = get_names_from_partition_spec(beside)
    for name in axes:
        if name not in named and (hint := did_you_mean(name, named, _NEAR_MISS)):
            warn(f"unshard: no spec names the axis {name!r}, so nothing is gathered.{hint}")
    less = [_gathered(spec, axes) for spec in beside]
    return _constrain_tree(tree, less, specs.mesh if isinstance(specs, SpecCarrier) else None)


def _gathered(spec: Any, axes: tuple[str, ...]) -> Any:
    if spec is None or not set(axes) & set(get_names_from_partition_spec(spec)):
        return None
    if isinstance(spec, NamedSharding):
        return spec.update(spec=without_axes(spec.spec, axes))
    return without_axes(spec, axes)


# ------------------------------------------------------------------ what each leaf is to get


class _Target(NamedTuple):
    """Where one leaf shall lie, and what of the asked spec that leaves out."""

    mesh: AnyMesh
    spec: PartitionSpec
    memory_kind: str | None
    lost: tuple[Adjustment, ...]
    padded: bool = False  # whether `spec` is uneven

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=self.memory_kind)


def _target(leaf: Any, asked: Any, mesh: AnyMesh | None, keep: bool) -> _Target | None:
    """What a leaf is to get; `None` if it is to stay as it is."""
    if asked is None or not has_shape(leaf):
        return None
    memory_kind = None
    if isinstance(asked, NamedSharding):
        mesh = asked.mesh if mesh is None else mesh
        asked, memory_kind = asked.spec, asked.memory_kind
    struct = isinstance(leaf, jax.ShapeDtypeStruct)
    staged = is_tracing() and not struct
    here = _mesh_here(mesh, leaf if staged else None)
    if here is None or not (staged or struct or isinstance(here, Mesh)):
        return None
    taken = manual_axes() | vmapped_axes()
    spec, lost = project(asked, here, leaf.shape, manual=taken)
    if not staged:
        spec = settled(spec, _placed_on(here, leaf))
    uneven = {axis for loss in lost if loss.kind == "indivisible" for axis in loss.axes}
    if not (keep and staged and uneven) or uneven - {*axes_of_type(here, AxisType.Auto)}:
        return _Target(here, spec, memory_kind, lost)
    # Every axis divides 0, so nothing is taken out for being uneven.
    spec, _ = project(asked, here, (0,) * len(leaf.shape), manual=taken)
    lost = tuple(loss for loss in lost if loss.kind != "indivisible")
    return _Target(here, spec, memory_kind, lost, padded=True)


def _mesh_here(asked: AnyMesh | None, value: Any) -> AnyMesh | None:
    """The mesh to name in shardings here; `None` if there is none, or it is foreign."""
    context = context_mesh() or _mesh_in_type(value)
    mesh = get_incontext_mesh(raise_error=False) if asked is None else asked
    if mesh is None:
        return None
    if context is None or not same_axes(mesh, context):
        if context is not None and not context.are_all_axes_auto:
            return None
        # JAX refuses Explicit axes in a trace whose types do not speak of them.
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        return mesh.update(axis_types=auto) if is_tracing() else mesh
    if manual_axes():
        return context
    # One mesh, seen twice: the context knows the types and, in a trace, the devices.
    if isinstance(context, Mesh) and (is_tracing() or not isinstance(mesh, Mesh)):
        return context
    return mesh.update(axis_types=context.axis_types)


def _mesh_in_type(value: Any) -> AnyMesh | None:
    """The Explicit mesh that a traced value brings with it, where no context names one."""
    mesh = None if value is None else jax.typeof(value).sharding.mesh
    return mesh if mesh is not None and axes_of_type(mesh, AxisType.Explicit) else None


def _placed_on(mesh: AnyMesh, leaf: Any) -> PartitionSpec:
    """How a leaf lies on the mesh now; `P()` if it lies elsewhere."""
    now = getattr(leaf, "sharding", None)
    if isinstance(now, NamedSharding) and same_axes(now.mesh, mesh):
        return now.spec
    return PartitionSpec()


# ------------------------------------------------------------------ what is said of it


def _report(tree: Any, targets: Sequence[_Target | None], uneven: Uneven) -> None:
    """Raises for all bad leaves at once, else warns once for all that was lost."""
    lost = [(i, t, loss) for i, t in enumerate(targets) if t is not None for loss in t.lost]
    paths = leaf_paths(tree) if lost else []
    errors: list[str] = []
    warnings: list[str] = []
    for i, target, loss in lost:
        fact = f"{paths[i] or 'the array'}: {loss.why}"
        mesh = f"The mesh: {describe_mesh(target.mesh)}."
        if loss.kind == "rank":
            errors.append(f"{fact} {mesh}")
        elif loss.kind == "indivisible" and uneven in ("error", "keep"):
            errors.append(f"{fact} {mesh}{_KEEP if uneven == 'keep' else ''}")
        elif loss.kind == "indivisible" and uneven == "warn":
            warnings.append(f"{fact} {mesh} It is constrained to {target.spec} instead.")
        elif loss.kind == "axis-already-used" or _is_slip(loss, target):
            warnings.append(fact)
    if errors:
        raise SpecError(listed(f"{len(errors)} constraints do not fit:", errors))
    if warnings:
        warn(listed(f"{len(warnings)} constraints were not applied in full:", warnings))


_KEEP = ' `uneven="keep"` works inside jit, on Auto axes: arrays are stored in even parts.'


def _is_slip(loss: Adjustment, target: _Target) -> bool:
    """Whether an unknown axis is likely a misspelt one, and not one of another mesh."""
    if loss.kind != "axis-not-in-mesh":
        return False
    others = set(axis_sizes(target.mesh)) - set(get_names_from_partition_spec(target.spec))
    return any(did_you_mean(axis, others, _NEAR_MISS) for axis in loss.axes)


# ------------------------------------------------------------------ how it gets it


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
    # All at once: `shard` checks every leaf before it moves one.
    where = [targets[i].sharding(targets[i].spec) for i in to_place]
    for i, placed in zip(to_place, shard([leaves[i] for i in to_place], where), strict=True):
        leaves[i] = placed
    return treedef.unflatten(leaves)


def _constrain(x: Any, target: _Target) -> Any:
    """Reshards the Explicit axes and constrains the Auto ones; Manual ones are out already."""
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
        # There too, with an AbstractMesh, of a value that lies on no mesh: no devices are
        # known to move it to.
        if isinstance(target.mesh, Mesh):
            raise
        return x


_jitted_constraint = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def _reshard(x: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    now = without_axes(jax.typeof(x).sharding.spec, ())
    spec = without_axes(settled(spec, now), ())
    return x if spec == now else jax.sharding.reshard(x, NamedSharding(mesh, spec))

"""Sharding constraints that work with and without a mesh, inside and outside traces.

JAX has several functions for this, and each raises where another one is needed: a constraint raises
without a mesh, and on Explicit axes if it would move data; `reshard` raises on Auto axes. A model
that calls one of them runs in one setting only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import is_array
from treeshard._core.contexts import deferred_axes, full_over, plan_in_force
from treeshard._core.jax_private import is_in_jit, is_tracing, vmapped_axes
from treeshard._core.make_mesh import make_mesh
from treeshard._core.mean_gather import explain_not_innermost, gather_shard
from treeshard._core.mesh import (
    AnyMesh,
    MeshLike,
    as_mesh,
    auto_and_explicit,
    axes_of_type,
    axis_sizes,
    axis_tuple,
    can_wait,
    context_mesh,
    describe_mesh,
    get_incontext_mesh,
    is_all_explicit,
    manual_axes,
    same_axes,
)
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.spec_trees import (
    ResolvedSpec,
    SpecCarrier,
    SpecTree,
    call_functions,
    get_names_from_partition_spec,
    raise_misfits,
    resolve_specs,
    specs_of_leaves,
)
from treeshard._core.specs import (
    UNCONSTRAINED,
    Adjustment,
    all_axes,
    dim_entries,
    drop_axes,
    entries,
    fill_unconstrained,
    project,
    trim_spec,
)
from treeshard._placement.moves import through_host
from treeshard._placement.shard import Call, place_by
from treeshard._placement.targets import meshes_of, resolver
from treeshard._planning.axis_names import name_on_mesh, splits_rows
from treeshard._planning.logical import NamedAxes, current_logical_rules, resolve_names
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import (
    INITIALISING,
    PlanInForce,
    current_plan,
    default_batch,
    mesh_in_force,
    row_axes,
)
from treeshard._planning.wrong_arguments import check_specs
from treeshard.errors import SpecError, did_you_mean, listed, warn

Uneven = Literal["warn", "error", "drop", "keep"]
_UNEVEN = get_args(Uneven)

# "dp" is another name than "fsdp" (similarity 0.67); "fdsp" (0.75) is a misspelling.
_NEAR_MISS = 0.75


def with_sharding_constraint(
    arr: PyTree, sharding: SpecTree, mesh: MeshLike | None = None, *, uneven: Uneven = "warn"
) -> PyTree:
    """Constrains the sharding of a tree, on any mesh or none, inside and outside `jit`.

        >>> x = jnp.ones((8, 6))
        >>> with_sharding_constraint(x, P("fsdp", "tensor"), make_mesh("fsdp=8")).sharding.spec
        P('fsdp',)
        >>> with_sharding_constraint(x, P("fsdp")) is x  # no mesh
        True

    The values never change. First, axes are dropped that the mesh lacks, so that one model serves
    many meshes. Axes are also dropped over which `shard_map` or `vmap(spmd_axis_name=...)` already
    runs this code. In each dim, the longest prefix of axes that divides its size stays. Then:

    - in a trace, Auto axes are constrained as by `jax.lax.with_sharding_constraint`, and Explicit
      axes are resharded as by `jax.sharding.reshard` if they differ;
    - outside a trace, numpy and JAX arrays are placed as by `shard`, on all processes;
    - a `jax.ShapeDtypeStruct` gets the sharding.

    A leaf is returned unchanged if its spec is `None`, if it is not an array, if there is no mesh,
    if every axis is Manual, or if the context has Manual or Explicit axes of another mesh. With an
    `AbstractMesh`, arrays outside a trace or on a single device are returned unchanged too.

    Args:
        arr: An array, or any pytree.
        sharding: A spec, a tree of `PartitionSpec`s or `NamedSharding`s with the structure of
            `arr`, a prefix of such a tree, or a `Plan`. A spec for the full tree is cut to the rank
            of each leaf. `P()` replicates, and `UNCONSTRAINED` leaves a dim unchanged.
            `logical_axis_rules` resolves tuples of logical names. In a trace with only Explicit
            axes, specs may be `unreduced` or `reduced`.
        mesh: The mesh, or its axes as text. The default is the mesh of `sharding`, or else the
            current mesh.
        uneven: What to do if axes do not divide a dim. `"warn"` drops the axes and warns once per
            call site. `"drop"` drops them silently. `"error"` raises. `"keep"` lets the partitioner
            pad the dim in a trace on Auto axes, drops the axes in `grad` and `vmap` without `jit`,
            and raises elsewhere.

    Returns:
        A tree of the same structure and shapes.

    Raises:
        SpecError: If a spec names axes beyond the rank of its array, or is `unreduced` or `reduced`
            outside a trace with only Explicit axes. If `sharding` does not match the structure of
            `arr`, logical names cannot be resolved, or `uneven` is an unknown word. With `"error"`
            and `"keep"`, also if axes do not divide a dim.
        ShardingRuleError: If `sharding` is a `Plan` with errors, as `Plan.check_before_use`, whose
            warnings apply too.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).
        ArgumentError: If `sharding` is a mesh, a list of rules or text.

    Warns:
        ShardingWarning: If axes were dropped because they do not divide a dim, with
            `uneven="warn"`. If a spec names an axis twice: only the first dim is sharded over it.
            If the mesh lacks an axis whose name resembles one of its own.

    Source:
        The function of this name in EasyLM and EasyDeL, without the guards.
    """
    if uneven not in _UNEVEN:
        known, hint = _UNEVEN, did_you_mean(str(uneven), _UNEVEN)
        raise SpecError(f"uneven={uneven!r} is not one of {', '.join(map(repr, known))}.{hint}")
    check_specs(sharding, "with_sharding_constraint(arr, {})", arr)
    mesh = as_mesh(mesh, make_mesh)
    sharding = call_functions(sharding, arr, "sharding")
    if isinstance(sharding, SpecCarrier):
        sharding.check_before_use()
    return _constrain_tree("with_sharding_constraint", arr, sharding, mesh, uneven)


def unshard(
    tree: PyTree,
    specs: SpecTree = None,
    axis: str | Sequence[str] | None = None,
    mesh: MeshLike | None = None,
) -> PyTree:
    """Gathers the weights of a layer just before the layer uses them.

    Examples:
        >>> split = NamedSharding(make_mesh("data=2,fsdp=4"), P("data", "fsdp"))
        >>> x = jax.device_put(jnp.ones((8, 4)), split)
        >>> unshard(x, split, "fsdp").sharding.spec
        P('data',)

    It constrains the weights to their specs without the axes of FSDP, so that the partitioner
    gathers weights and does not communicate activations. In a scan over layers, call it in the
    body, and wrap the body in `jax.checkpoint`: otherwise the scan keeps every gathered layer for
    the gradient.

    In code that `jit_step`, `shard_map_step` or `training.value_and_grad` traces, call
    `unshard(tree)`. In any other `jit` or `shard_map`, call `unshard(tree, plan)`. The specs come
    from the plan. Arrays that the step has received are found by identity, also inside `jax.grad`.
    Other trees are found by their structure and shapes, and a single layer inside a scan by the
    shapes of the stacked layers without dim 0. On a mesh of Explicit axes, the specs come from the
    types of the arrays.

    Inside `shard_map`, shards are gathered over the Manual axes as by `manual.gather_params`, and
    full arrays are returned unchanged. While `init_sharded` makes a state, and without a mesh,
    `tree` is returned unchanged.

    Args:
        tree: Any pytree, such as the parameters of one layer.
        specs: How `tree` is sharded now. A `Plan` that contains `tree` or its stacked layers, such
            as `plan["layers"][0]` or `plan["layers"]`, or a tree of specs, or a prefix of such a
            tree. (`layer_specs` returns the specs of a layer.) The default is the plan of the
            enclosing step.
        axis: The mesh axis to gather over, or several axes. By default, the axes over which the
            step shards the rows of the batch or `fsdp` shards the parameters. The axes of tensor
            parallelism stay.
        mesh: The mesh, or its axes as text. The default is the mesh of `specs`, or else the
            current mesh.

    Returns:
        A tree of the same structure, with the shapes of the full arrays. Leaves whose specs do not
        name `axis` are unchanged.

    Raises:
        SpecError: As `with_sharding_constraint`, whose warnings apply too. If the plan has no
            subtree of this structure and these shapes, or several with different specs. If the plan
            shards no leaf over `axis`. If `axis` is missing, `specs` is not a plan, and no step has
            a plan. Inside `shard_map`, if a dim cannot be gathered over an axis because an axis
            further in still shards it.
        TypeError: If `axis` is neither a string nor a sequence of strings.
        ArgumentError: If `specs` is a mesh, a list of rules or text.
        ShardingRuleError: If `specs` is a `Plan` with errors, as `Plan.check_before_use`, whose
            warnings apply too.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Warns:
        ShardingWarning: If `axis` resembles the name of an axis in the specs. If `specs` is
            missing, and there is a mesh but no plan: then the weights are not gathered.

    Source:
        MaxText gathers the weights of a layer this way. PyTorch's FSDP2 has the name.
    """
    check_no_refs(tree, "unshard")
    check_specs(specs, _CALL[0], tree, axis=', "fsdp"')
    specs = call_functions(specs, tree)
    if isinstance(specs, SpecCarrier):
        specs.check_before_use()
        mesh = specs.mesh if mesh is None else mesh
    step = current_plan()
    # 1. How the tree is sharded now, and the axes to gather over.
    found = _find_specs(tree, specs, axis, step)
    if found is None:
        return tree
    specs, axes = found
    # The `in_specs` of a `shard_map` have cut these shards, and it rejects specs that are too long.
    is_by_hand = bool(manual_axes())
    leaf_specs = specs_of_leaves(specs, tree, resolve=resolve_names, cut=not is_by_hand)
    if axis is not None:
        _warn_of_misspelled(axes, leaf_specs)
    # 2. Manual axes, along which the partitioner sees only shards.
    tree = _gather_manual_axes(tree, leaf_specs, axes, step)
    # 3. The others, by constraints.
    gathered = [_spec_without(spec, axes) for spec in leaf_specs]
    mesh, treedef = as_mesh(mesh, make_mesh), tree_structure(tree)
    if is_tracing():
        # The user has named axes over which gradients wait for one sum. Not every operation takes
        # weights of that type, so only this request gets it.
        if deferred_axes.value and can_wait(context_mesh()):
            tree = _gather_for_products(tree, gathered, axes, deferred_axes.value)
        # The gradient of a leaf that is constrained to its own spec is constrained to it too.
        # Compilers may otherwise all-reduce full gradients, where a reduce-scatter is enough.
        pairs = zip(leaf_specs, gathered, strict=True)
        of_gradients = [None if after is None else spec for spec, after in pairs]
        tree = _constrain_tree("unshard", tree, treedef.unflatten(of_gradients), mesh)
    return _constrain_tree("unshard", tree, treedef.unflatten(gathered), mesh)


# How to pass a plan, or specs.
_CALL = "unshard(tree, {})", "specs, axis"
_NO_PLAN = (
    "`unshard(tree, plan)`, or call `unshard` inside a function that `jit_step`,"
    " `shard_map_step` or `training.value_and_grad` traces"
)


def _find_specs(
    tree: PyTree, specs: SpecTree, axis: str | Sequence[str] | None, step: PlanInForce | None
) -> tuple[SpecTree, tuple[str, ...]] | None:
    """The specs of a tree, and the axes to gather over; `None` if no leaf is gathered.

    1. The passed specs; from a plan, the specs of its subtree that matches the tree.
    2. The types of its arrays. They name Explicit axes only, a plan names Auto axes too.
    3. The plan in force.
    """
    over = None if axis is None else axis_tuple(axis, "unshard(tree, specs, axis, mesh)")
    source = step
    if isinstance(specs, Plan):  # 1
        source = PlanInForce(specs, row_axes(default_batch(specs)))
        specs = source.specs_of(tree, *_CALL)
    elif specs is None:
        # A function that makes a state also runs the model, before anything is sharded.
        if plan_in_force.value is INITIALISING:
            return None
        mesh = context_mesh()
        explicit = () if mesh is None else axes_of_type(mesh, AxisType.Explicit)
        if is_all_explicit(mesh) or (step is None and over and {*over} <= {*explicit}):  # 2
            specs = tree_map(_spec_of_type, tree)
        elif step is not None:  # 3
            specs = step.specs_of(tree, *_CALL)
        else:
            is_missing = _misses_a_mesh(tree) if mesh is None else mesh.size > 1
            if is_missing:
                warn(f"unshard has no effect: no plan is in force here. Pass the plan, {_NO_PLAN}.")
            return None
    if over is not None:
        if source is not None:
            _check_shards(over, source.plan)
        return specs, over
    if source is None:
        raise SpecError(_ask_for_axis(specs))
    return specs, tuple(source.gathered_axes)


def _ask_for_axis(specs: SpecTree) -> str:
    named = get_names_from_partition_spec(specs)
    axes = [name for name in named if splits_rows(name)] or named or ["fsdp"]
    return (
        "unshard: the second argument has specs, and no axis to gather over follows. Pass the"
        f" plan, `unshard(tree, plan)`, or specs and the axis,"
        f" `unshard(tree, specs, {axes[0]!r})`."
    )


def _check_shards(axes: Sequence[str], plan: Plan) -> None:
    """Raises `SpecError` if none of some axes shards a leaf of the plan, and one should.

    Another mesh may have one device along an axis, and a small model no leaf that is sharded.
    """
    # The plan of a part, such as a norm, may have no leaf that is sharded over an axis in use.
    plan, sizes = plan.whole, axis_sizes(plan.mesh)
    used = get_names_from_partition_spec(plan)
    is_full = {*axes} <= sizes.keys() and all(sizes[name] == 1 for name in used)
    if is_full or any(axis in used or sizes.get(axis) == 1 for axis in axes):
        return
    names = ", ".join(map(repr, axes))
    raise SpecError(
        f"unshard: the plan shards no leaf over {names}, on the mesh"
        f" ({describe_mesh(plan.mesh)}).{did_you_mean(axes[0], used)} To gather over the plan's"
        " axes, leave the axis out: `unshard(tree, plan)`."
    )


def _warn_of_misspelled(axes: Sequence[str], specs: Sequence[Any]) -> None:
    """Warns of axes that no spec names, and that resemble one that is named."""
    named = get_names_from_partition_spec(specs)
    for name in axes:
        hint = did_you_mean(name, named, _NEAR_MISS)
        if hint and name not in named:
            warn(f"unshard has no effect over {name!r}: no spec names this axis.{hint}")


def _gather_manual_axes(
    tree: PyTree, specs: Sequence[Any], axes: Sequence[str], step: PlanInForce | None
) -> PyTree:
    """The tree gathered over those axes that are Manual here, unless its arrays are full already.

    Outside a step by hand, specs that do not name such an axis are of full arrays.
    """
    by_hand = [name for name in axes if name in manual_axes() and name not in full_over.value]
    is_split = not {*by_hand}.isdisjoint(get_names_from_partition_spec(specs))
    if not by_hand or not (is_split or (step is not None and step.is_by_hand)):
        return tree
    leaves, treedef = tree_flatten(tree)
    shards = {
        i: spec.spec if isinstance(spec, NamedSharding) else spec
        for i, (x, spec) in enumerate(zip(leaves, specs, strict=True))
        if spec is not None and is_array(x)
    }
    misfits = {i: _gather_error(leaves[i], spec, by_hand) for i, spec in shards.items()}
    raise_misfits(tree, misfits, "unshard", "leaves cannot be gathered:")
    for i, spec in shards.items():
        leaves[i] = gather_shard(leaves[i], spec, by_hand, mesh_in_force())
    return treedef.unflatten(leaves)


def _gather_error(x: Any, spec: PartitionSpec, axes: Sequence[str]) -> SpecError | None:
    _, notes = project(spec, None, x.shape)
    why = " ".join(note.why for note in notes) or explain_not_innermost(spec, axes)
    return SpecError(why) if why else None


def _spec_of_type(x: Any) -> PartitionSpec | None:
    """The spec of an array by its type, which leaves its Auto axes as they are."""
    if not is_array(x):
        return None
    sharding = jax.typeof(x).sharding
    if is_all_explicit(sharding.mesh):
        return sharding.spec
    dims = dim_entries(sharding.spec, x.ndim)
    return sharding.spec.update(partitions=tuple(UNCONSTRAINED if d is None else d for d in dims))


def _gather_for_products(
    tree: PyTree, gathered: list[Any], axes: Sequence[str], rows: Sequence[str]
) -> PyTree:
    """The tree with those leaves gathered for use in products; takes them out of `gathered`."""
    from treeshard._placement.reduced import PRODUCTS, gathered_for_scatter, waiting_over

    leaves, treedef = tree_flatten(tree)
    elsewhere = manual_axes() | vmapped_axes()
    for i, x in enumerate(leaves):
        # Biases and scales are added and multiplied: JAX has no types for that.
        if gathered[i] is None or elsewhere or x.ndim not in PRODUCTS:
            continue
        split = get_names_from_partition_spec(jax.typeof(x).sharding.spec)
        x = waiting_over(x, [axis for axis in rows if axis not in split])
        leaves[i], gathered[i] = gathered_for_scatter(x, axes), None
    return treedef.unflatten(leaves)


def _spec_without(spec: Any, axes: tuple[str, ...]) -> Any:
    """A leaf's spec without `axes`; `None` if it names none of them."""
    if spec is None or not set(axes) & {*all_axes(entries(spec))}:
        return None
    if isinstance(spec, NamedSharding):
        return spec.update(spec=drop_axes(spec.spec, axes))
    return drop_axes(spec, axes)


def _misses_a_mesh(tree: PyTree) -> bool:
    """Whether arrays on several devices are traced without a mesh or a plan in force.

    The type of a traced array has the mesh of its argument, also if all axes are Auto. On one
    device, arrays are never gathered, so models do not need a mesh.
    """
    if not is_tracing() or plan_in_force.value is not None:
        return False
    if get_incontext_mesh(raise_error=False) is not None:
        return False
    arrays = [x for x in tree_leaves(tree) if is_array(x)]
    return any(jax.typeof(x).sharding.mesh.size > 1 for x in arrays)


# ------------------------------------------------------------------ the target of each leaf


def _targets(
    tree: PyTree,
    leaves: Sequence[Any],
    shardings: SpecTree,
    mesh: AnyMesh | None,
    *,
    tracing: bool,
    keep_uneven: bool,
) -> list[ResolvedSpec | None]:
    """Returns the spec that each leaf gets; `None` for leaves that are returned unchanged."""

    def choose_mesh(mesh: AnyMesh | None, leaf: Any) -> AnyMesh | None:
        is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
        chosen = _mesh_for(mesh, leaf if tracing and not is_struct else None)
        # Arrays outside a trace need devices to be placed on.
        return chosen if tracing or is_struct or isinstance(chosen, Mesh) else None

    def resolve(names: Any) -> PartitionSpec:
        # A `PartitionAxis` warns if the mesh has axes that it does not name. Axes of a list that
        # the mesh lacks stay, for `_report`: they may be misspelled.
        is_by_dim = isinstance(current_logical_rules(), NamedAxes)
        return trim_spec(resolver(mesh)(names)) if is_by_dim else resolve_names(names)

    targets = resolve_specs(
        tree,
        shardings,
        mesh,
        choose_mesh=choose_mesh,
        manual=manual_axes() | vmapped_axes(),
        name="sharding",
        resolve=resolve,
        keep_uneven=keep_uneven and tracing,
        typed=tracing,
    )
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if target is None or target.mesh is None:
            targets[i] = None
        # Outside of a trace nobody fills in the dims that are `UNCONSTRAINED`.
        elif not tracing or isinstance(leaf, jax.ShapeDtypeStruct):
            spec = fill_unconstrained(target.spec, _current_spec(target.mesh, leaf))
            targets[i] = replace(target, spec=spec)
    return targets


def _mesh_for(requested: AnyMesh | None, value: Any) -> AnyMesh | None:
    """Returns the mesh that shardings must name here; `None` if there is none, or several
    conflict.

    1. Outside of a mesh: the one that is requested, with Auto axes in a trace.
    2. Inside of another mesh: the same, if all axes of the context are Auto. Else none.
    3. In a `shard_map`: the context.
    4. Inside of the same mesh: the one of the two that knows the devices, and the axis types of the
       context.
    """
    context = context_mesh() or _mesh_of_type(value)
    mesh = get_incontext_mesh(raise_error=False) if requested is None else requested
    mesh = context if mesh is None else mesh
    if mesh is None:
        return None
    if context is None:  # 1
        return _on_auto_axes(mesh)
    if not same_axes(mesh, context):
        # 2: JAX accepts shardings of another mesh than the context's on Auto axes only.
        return _on_auto_axes(mesh) if context.are_all_axes_auto else None
    if manual_axes():  # 3
        return context  # JAX compares the axis types too, and Manual is one
    # 4: the context knows the axis types and, in a trace, the devices.
    if isinstance(context, Mesh) and (is_tracing() or not isinstance(mesh, Mesh)):
        return context
    return mesh.update(axis_types=context.axis_types)


def _on_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """`mesh`, in a trace with Auto axes: JAX refuses Explicit ones that no type there names."""
    if mesh.are_all_axes_auto or not is_tracing():
        return mesh
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _mesh_of_type(value: Any) -> AnyMesh | None:
    """The mesh in the type of a traced value, if it has Explicit axes."""
    mesh = None if value is None else jax.typeof(value).sharding.mesh
    return mesh if mesh is not None and auto_and_explicit(mesh)[1] else None


def _current_spec(mesh: AnyMesh, leaf: Any) -> PartitionSpec:
    """The current spec of a leaf on `mesh`; `P()` if it is not on that mesh."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and same_axes(sharding.mesh, mesh):
        return sharding.spec
    return PartitionSpec()


# ------------------------------------------------------------------ errors and warnings


def _report(
    tree: PyTree, targets: Sequence[ResolvedSpec | None], uneven: Uneven, where: str
) -> None:
    """Raises one error for all misfits; else warns once about all dropped axes."""
    adjusted = {i: t for i, t in enumerate(targets) if t is not None and t.adjustments}
    if not adjusted:
        return
    kinds = {"rank", "reduced-type"}  # which no other spec stands in for
    if uneven in ("error", "keep"):
        kinds.add("indivisible")
    misfits = {i: target.misfit(kinds) for i, target in adjusted.items()}
    is_uneven = any(target.misfit({"indivisible"}) for target in adjusted.values())
    advice = _KEEP if uneven == "keep" and is_uneven else ""
    raise_misfits(tree, misfits, where, "constraints do not fit:", advice=advice)
    # An axis that another mesh has is dropped in silence: a model is written for many meshes.
    paths = leaf_paths(tree)
    warnings = [
        f"{paths[i] or 'the array'}: {why}"
        for i, target in adjusted.items()
        for note in target.adjustments
        if (why := _explain_applied_in_part(note, target, uneven))
    ]
    if warnings:
        headline = f"{len(warnings)} constraints were applied in part:"
        warn(f"{where}: {listed(headline, warnings)}")


def _explain_applied_in_part(note: Adjustment, target: ResolvedSpec, uneven: Uneven) -> str:
    """What to warn of, if anything."""
    if note.kind == "indivisible" and uneven == "warn":
        mesh = describe_mesh(target.mesh)
        return f"{note.why} The mesh: {mesh}. It is constrained to {target.spec} instead."
    if note.kind == "axis-already-used":
        return note.why
    return _explain_absent(note, target) if note.kind == "axis-not-in-mesh" else ""


_KEEP = '`uneven="keep"` works inside jit, on Auto axes: arrays are stored in equal shards.'


def _explain_absent(note: Adjustment, target: ResolvedSpec) -> str:
    """What to warn of, if axes that the mesh lacks are likely no axes of another mesh.

    They are misspelled, or defaults of `PartitionAxis`: the mesh has an axis for the same use under
    another name. In both cases the spec does not use that axis.
    """
    sizes = axis_sizes(cast(AnyMesh, target.mesh))
    unused = [name for name in sizes if name not in get_names_from_partition_spec(target.spec)]
    if any(did_you_mean(axis, unused, _NEAR_MISS) for axis in note.axes):
        return note.why
    called = [name_on_mesh(axis, sizes) for axis in note.axes]
    idle = [name for name in called if name in unused and sizes[name] > 1]
    if not idle:
        return ""
    return (
        f"{note.why} It has {idle[0]!r} instead. `PartitionAxis.for_mesh(mesh)` takes the names of"
        " a mesh."
    )


# ------------------------------------------------------------------ applying it


def _constrain_tree(
    where: str, tree: PyTree, shardings: SpecTree, mesh: AnyMesh | None, uneven: Uneven = "warn"
) -> Any:
    leaves, treedef = tree_flatten(tree)
    tracing, keep_uneven = is_tracing(), uneven == "keep"
    targets = _targets(tree, leaves, shardings, mesh, tracing=tracing, keep_uneven=keep_uneven)
    if not all(targets):  # references are not arrays, and have no target
        check_no_refs(tree, where)
    # Where neither the call nor the context has a mesh, JAX would raise; a model should run there,
    # but not in silence if its arrays are on several devices.
    is_missing = not any(targets) and _misses_a_mesh(tree) and not meshes_of(shardings, mesh)
    if is_missing and get_names_from_partition_spec(shardings):
        warn(
            f"{where} has no effect: there is no mesh here. Pass the plan or the mesh, or call"
            f" {where} inside `with jax.set_mesh(mesh):`."
        )
    _report(tree, targets, uneven, where)
    to_place: dict[int, NamedSharding] = {}
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if target is None:
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaves[i] = leaf.update(sharding=target.sharding)
        elif tracing:
            leaves[i] = _constrain(leaf, target)
        else:
            to_place[i] = target.sharding
    if not to_place:
        return treedef.unflatten(leaves)
    # In one call, which checks every leaf before it moves one.
    call = Call(where, through_host, timeout=None)
    placed = place_by([leaves[i] for i in to_place], [*to_place.values()], None, call)
    for i, array in zip(to_place, placed, strict=True):
        leaves[i] = array
    return treedef.unflatten(leaves)


def _constrain(x: Any, target: ResolvedSpec) -> Any:
    """Reshards on the Explicit axes and constrains the Auto ones; Manual ones were dropped."""
    mesh: Any = target.mesh
    auto, explicit = auto_and_explicit(mesh)
    if explicit:
        x = _reshard(x, mesh.abstract_mesh, drop_axes(target.spec, auto))
        if _is_left_to_types(x, drop_axes(target.spec, explicit)):
            return x
    if not auto:
        return x
    # A constraint that is executed at once, in un-jitted grad and vmap, would undo the Explicit
    # part: it runs in a jit of its own. Inside `jit(vmap(..., spmd_axis_name=...))`, that jit
    # would lose the axes of the mapped dim (JAX 0.11 and 0.12).
    alone = explicit and not (vmapped_axes() and is_in_jit())
    constrain = _jitted_constraint if alone else jax.lax.with_sharding_constraint

    def on_auto(spec: PartitionSpec) -> NamedSharding:
        spec = drop_axes(spec, explicit)
        return NamedSharding(mesh, spec, memory_kind=target.memory_kind)

    try:
        return constrain(x, on_auto(target.spec) if explicit else target.sharding)
    except TypeError:
        # Executed at once with an AbstractMesh, on a value that is on no mesh: there are no
        # devices to move it to.
        if isinstance(mesh, Mesh):
            raise
        return x
    except ValueError:
        # Executed at once, an uneven constraint has no partitioner that would pad.
        even, _ = project(target.spec, mesh, x.shape)
        if even == target.spec:
            raise
        return constrain(x, on_auto(even))


def _is_left_to_types(x: Any, spec: PartitionSpec) -> bool:
    """Whether a constraint of Auto axes names no axes and leaves a dim unconstrained. If another
    dim is split over Explicit axes, JAX would gather the unconstrained dim."""
    of_dims = entries(spec)
    split = all_axes(entries(jax.typeof(x).sharding.spec))
    return bool(split) and UNCONSTRAINED in of_dims and not all_axes(of_dims)


_jitted_constraint = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def _reshard(x: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    current = drop_axes(jax.typeof(x).sharding.spec, ())
    spec = drop_axes(fill_unconstrained(spec, current), ())
    return x if spec == current else jax.sharding.reshard(x, NamedSharding(mesh, spec))

"""How an optimizer's state is sharded, from the specs of the parameters."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from treeshard._errors import SpecError, UnknownAxisInSpecError, listed
from treeshard._following import Original, follow
from treeshard._mesh import (
    AnyMesh,
    axis_sizes,
    axis_tuple,
    check_axes,
    current_or_given,
    describe_mesh,
)
from treeshard._paths import leaf_paths
from treeshard._spec_trees import SpecCarrier, specs_of_leaves
from treeshard._specs import MISFITS, axes_of, entries, has_shape, project
from treeshard._tactics import fsdp, min_size_in_force


def optimizer_state_specs(
    opt_state: Any,
    params: Any,
    param_specs: Any,
    *,
    extra_axis: str | Sequence[str] | None = None,
    mesh: AnyMesh | None = None,
) -> Any:
    """Decides how an optimizer's state is sharded, from the specs of the parameters.

    A leaf of the state goes with the parameter whose path its own ends in. With the
    parameter's shape it gets its spec; a factored moment, of shape `(d0,)` or `(d1,)` for a
    parameter `(d0, d1)`, keeps the axes of the dims that it keeps; a history
    `(n, d0, d1)` leaves its first dim whole. Where dims of equal length cannot be told
    apart, the field does that holds the moment (`v_row`, `v_col`). Nothing is moved and no
    values are read.

    Args:
        opt_state: The state of any optax optimizer, masked, partitioned or wrapped, or any
            other tree that holds trees like `params`: arrays or `jax.ShapeDtypeStruct`s.
        params: The parameters that it was made for; its arrays may be structs too.
        param_specs: Their specs: a tree, a prefix of one, or a `Plan`. A parameter without
            a spec (`None`) counts as replicated.
        extra_axis: A mesh axis, or several whose sizes multiply, to shard the state further
            than the parameters: on the largest free dim that they divide evenly. Leaves of
            fewer elements than `MIN_SHARDING_SIZE` from the environment (else 16384)
            keep their spec, and axes that a leaf's spec has already are not added to it.
        mesh: The mesh to check against, needed for `extra_axis`. Then it is by default
            the `Plan`'s, else the one in force.

    Returns:
        A tree of `PartitionSpec`s with the structure of `opt_state`: `P()` at scalars, at
        leaves that go with no parameter, and at leaves that are no arrays.

    Raises:
        SpecError: If `param_specs` do not have the structure of `params` or do not fit
            their shapes: all such parameters are listed. If `extra_axis` holds a name
            twice.
        UnknownAxisError: If the mesh lacks `extra_axis`, or, where `mesh` is given, an axis
            of `param_specs`.
        TypeError: If `extra_axis` is neither a string nor a sequence of strings.
        NoMeshError: If there is an `extra_axis`, and no mesh.

    Examples:
        >>> params = {"w": jax.numpy.zeros((512, 64))}
        >>> optimizer_state_specs(optax.sgd(0.1, momentum=0.9).init(params), params, P("fsdp"))
        (TraceState(trace={'w': P('fsdp',)}), EmptyState())

    Source:
        `optax.tree_map_params`, for states that hold whole copies; `extra_axis` is ZeRO
        stage 1: Rajbhandari et al. 2020, arXiv:1910.02054.
    """
    leaves, treedef = tree_flatten(params)
    original = Original(
        treedef,
        [tuple(leaf.shape) if has_shape(leaf) else None for leaf in leaves],
        specs_of_leaves(param_specs, params, "param_specs"),
        lambda: leaf_paths(params),
    )
    _check_fit(original, mesh)
    found = [followed.spec for followed in follow(opt_state, original)]
    if extra_axis is not None:
        mesh = param_specs.mesh if mesh is None and isinstance(param_specs, SpecCarrier) else mesh
        found = _further(found, tree_leaves(opt_state), extra_axis, current_or_given(mesh))
    return tree_structure(opt_state).unflatten(found)


def _check_fit(original: Original, mesh: AnyMesh | None) -> None:
    """Raises for parameters whose specs do not fit, since what follows them would not either."""
    fits: set[Any] = set()
    facts: list[str] = []
    kinds: set[str] = set()
    for index, (spec, shape) in enumerate(zip(original.specs, original.shapes, strict=True)):
        if shape is None or (id(spec), shape) in fits:
            continue
        if bad := [note for note in project(spec, mesh, shape)[1] if note.kind in MISFITS]:
            why = " ".join(note.why for note in bad)
            facts.append(f"{original.paths[index]}: shape {shape}, {spec}: {why}")
            kinds.update(note.kind for note in bad)
        else:
            fits.add((id(spec), shape))
    if facts:
        where = "No mesh was given." if mesh is None else f"The mesh has {describe_mesh(mesh)}."
        message = listed(f"{len(facts)} parameters do not fit their param_specs:", facts)
        error = UnknownAxisInSpecError if "axis-not-in-mesh" in kinds else SpecError
        raise error(f"{message}\n{where}")


def _further(
    specs: list[PartitionSpec],
    leaves: list[Any],
    extra_axis: str | Sequence[str],
    mesh: AnyMesh,
) -> list[PartitionSpec]:
    """The specs with `extra_axis` added, as the tactic of fully sharded parameters would."""
    where = "optimizer_state_specs(extra_axis=...)"
    axes = axis_tuple(extra_axis, where)
    check_axes(axes, axis_sizes(mesh), where)
    if len(set(axes)) < len(axes):
        raise SpecError(f"{where}: {extra_axis!r} holds a name twice. An axis splits one dim only.")
    floor = min_size_in_force(None)
    known: dict[Any, PartitionSpec] = {}
    further: list[PartitionSpec] = []
    for spec, leaf in zip(specs, leaves, strict=True):
        key = (id(spec), leaf.shape) if has_shape(leaf) else None
        if key is not None and key not in known:
            used = {axis for entry in entries(spec) for axis in axes_of(entry)}
            free = [axis for axis in axes if axis not in used]
            # The tactic looks at nothing of a leaf but its shape.
            known[key] = fsdp(free).refine(spec, mesh, "", leaf, floor)[0] if free else spec
        further.append(spec if key is None else known[key])
    return further

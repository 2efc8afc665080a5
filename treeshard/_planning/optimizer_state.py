"""The specs of an optimizer's state, from the specs of the parameters."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from treeshard._core.arrays import has_shape
from treeshard._core.mesh import (
    AnyMesh,
    MeshLike,
    as_mesh,
    axis_sizes,
    axis_tuple,
    check_axes,
    current_or_given,
)
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecCarrier, SpecTree, lay, raise_misfits
from treeshard._core.specs import axes_of, entries
from treeshard._planning.mirrors import Original, follow
from treeshard._planning.tactics import fsdp, min_size_in_force
from treeshard._planning.tree_walk import shape_of_each
from treeshard.errors import SpecError


def optimizer_state_specs(
    opt_state: PyTree,
    params: PyTree,
    param_specs: SpecTree,
    *,
    extra_axis: str | Sequence[str] | None = None,
    mesh: MeshLike | None = None,
) -> SpecTree:
    """Derives the specs of an optimizer's state from the specs of the parameters.

    Each leaf of the state is matched to the parameter whose path is the end of its own:

    - With the parameter's shape, it gets the parameter's spec.
    - A factored moment, of shape `(d0,)` or `(d1,)` for a parameter `(d0, d1)`, gets the
      axes of the dims that it keeps. If dims of equal length leave this open, the name of
      the field decides (`v_row`, `v_col`).
    - A history `(n, d0, d1)` is not sharded on its first dim.

    Nothing is moved and no values are read.

    Args:
        opt_state: The state of any optax optimizer, masked, partitioned or wrapped, or any
            other tree that contains trees like `params`: arrays or
            `jax.ShapeDtypeStruct`s.
        params: The parameters of the optimizer: arrays or `jax.ShapeDtypeStruct`s.
        param_specs: Their specs: a tree, a prefix of one, or a `Plan`. A parameter without
            a spec (`None`) counts as replicated.
        extra_axis: A mesh axis, or several whose sizes multiply, that shards the state
            further than the parameters: the largest free dim that is divisible. Leaves with
            fewer elements than `MIN_SHARDING_SIZE` from the environment (else 16384) keep
            their spec, and axes that a leaf's spec already has are not added.
        mesh: The mesh that the specs must fit. `extra_axis` needs a mesh, by default that
            of the `Plan`, else the current one.

    Returns:
        A tree of `PartitionSpec`s with the structure of `opt_state`: `P()` at scalars, at
        leaves without a parameter, and at non-array leaves.

    Raises:
        SpecError: If `param_specs` do not have the structure of `params`, or do not fit
            their shapes; the message lists all such parameters. If `extra_axis` has a name
            twice.
        UnknownAxisError: If the mesh does not have `extra_axis`, or, if `mesh` is given, an axis
            of `param_specs`.
        TypeError: If `extra_axis` is neither a string nor a sequence of strings.
        NoMeshError: If `extra_axis` is given and there is no mesh.

    Examples:
        >>> params = {"w": jax.numpy.zeros((512, 64))}
        >>> optimizer_state_specs(optax.sgd(0.1, momentum=0.9).init(params), params, P("fsdp"))
        (TraceState(trace={'w': P('fsdp',)}), EmptyState())

    Source:
        `optax.tree_map_params`, for states that hold copies of the parameters; `extra_axis`
        is ZeRO stage 1: Rajbhandari et al. 2020, arXiv:1910.02054.
    """
    checked_on = mesh = as_mesh(mesh)
    leaves, treedef = tree_flatten(params)
    # Without the argument `mesh`, only ranks are checked.
    laid = lay(params, param_specs, choose_mesh=lambda *_: checked_on, name="param_specs")
    adjusted = [(i, spec) for i, spec in enumerate(laid) if spec is not None and spec.adjustments]
    misfits = {i: misfit for i, spec in adjusted if (misfit := spec.misfit())}
    what = "parameters do not fit their param_specs:"
    raise_misfits(params, misfits, "optimizer_state_specs", what)
    original = Original(
        treedef,
        shape_of_each(leaves),
        [None if spec is None else spec.requested for spec in laid],
    )
    specs = [followed.spec for followed in follow(opt_state, original)]
    if extra_axis is not None:
        mesh = param_specs.mesh if mesh is None and isinstance(param_specs, SpecCarrier) else mesh
        specs = _sharded_further(specs, tree_leaves(opt_state), extra_axis, current_or_given(mesh))
    return tree_structure(opt_state).unflatten(specs)


def _sharded_further(
    specs: list[PartitionSpec],
    leaves: list[Any],
    extra_axis: str | Sequence[str],
    mesh: AnyMesh,
) -> list[PartitionSpec]:
    """The specs with `extra_axis` added where the tactic `fsdp` would add it."""
    where = "optimizer_state_specs(extra_axis=...)"
    axes = axis_tuple(extra_axis, where)
    check_axes(axes, axis_sizes(mesh), where)
    if len(set(axes)) < len(axes):
        raise SpecError(f"{where}: {extra_axis!r} has a name twice. An axis can split one dim.")
    floor = min_size_in_force(None)
    refined: dict[Any, PartitionSpec] = {}
    new: list[PartitionSpec] = []
    for spec, leaf in zip(specs, leaves, strict=True):
        key = (id(spec), leaf.shape) if has_shape(leaf) else None
        if key is not None and key not in refined:
            used = {axis for entry in entries(spec) for axis in axes_of(entry)}
            free = [axis for axis in axes if axis not in used]
            # `fsdp` looks only at the leaf's shape.
            refined[key] = fsdp(free).refine(spec, mesh, "", leaf, floor)[0] if free else spec
        new.append(spec if key is None else refined[key])
    return new

"""Reads the shardings of live trees back.

`None` stands in the place of a leaf without a sharding: without it the result would have another
structure than the tree, and could not be passed back with it.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import is_array
from treeshard._core.make_mesh import make_mesh
from treeshard._core.mesh import MeshLike, as_mesh
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.spec_trees import SpecTree, raise_misfits, resolve_specs
from treeshard.errors import SpecError, listed


def extract_shardings(tree: PyTree, mesh: MeshLike | None = None) -> SpecTree:
    """Reads the sharding of every leaf of a live tree.

    Args:
        tree: Any pytree of arrays, tracers and `ShapeDtypeStruct`s; other leaves are fine.
        mesh: If given, the shardings are on this mesh instead, with the same specs.

    Returns:
        The same containers with a `NamedSharding` per leaf, and `None` for a leaf without
        one: numpy arrays, arrays on a single device, non-arrays. Every function that takes a
        tree of specs accepts the result. A traced leaf has a sharding on Explicit axes only;
        on Auto axes the compiler chooses it later.

    Raises:
        SpecError: If specs do not fit `mesh`. All such leaves are listed. It is an
            `UnknownAxisError` too if the mesh lacks an axis.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> tree = shard({"w": np.ones(8)}, P("fsdp"), make_mesh("fsdp=8"))
        >>> extract_shardings(tree | {"name": "mlp"})["w"].spec
        P('fsdp',)

    Source:
        EasyDeL's functions of this name, `extract_sharding_structure` and
        `get_shardings_with_structure`.
    """
    check_no_refs(tree, "extract_shardings")
    leaves, treedef = tree_flatten(tree)
    shardings = treedef.unflatten([_named_sharding(leaf) for leaf in leaves])
    if mesh is None:
        return shardings
    resolved = resolve_specs(tree, shardings, as_mesh(mesh, make_mesh))
    misfits = {i: spec and spec.misfit() for i, spec in enumerate(resolved)}
    raise_misfits(tree, misfits, "extract_shardings")
    return treedef.unflatten([spec and spec.sharding for spec in resolved])


def get_partition_spec(tree: PyTree) -> SpecTree:
    """Reads the `PartitionSpec` of every leaf of a live tree.

    Args:
        tree: Any pytree of arrays, tracers, `ShapeDtypeStruct`s and Python scalars.

    Returns:
        The same containers with a spec per leaf: that of its `NamedSharding`; `P()` for arrays
        on a single device, numpy arrays and Python scalars.

    Raises:
        SpecError: If a leaf has no spec, because it is neither an array nor a number, has
            another kind of sharding, or is a tracer or `ShapeDtypeStruct` without one. All
            such leaves are listed with their types.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> tree = shard({"w": np.ones(8)}, P("fsdp"), make_mesh("fsdp=8"))
        >>> get_partition_spec(tree | {"step": 3})
        {'step': P(), 'w': P('fsdp',)}

    Source:
        EasyDeL's function of this name.
    """
    check_no_refs(tree, "get_partition_spec")
    leaves, treedef = tree_flatten(tree)
    specs = [_spec(leaf) for leaf in leaves]
    if any(spec is None for spec in specs):
        rows = zip(leaf_paths(tree), leaves, specs, strict=True)
        facts = [
            f"{path or 'the tree'}: {_explain_missing_spec(leaf)}"
            for path, leaf, spec in rows
            if spec is None
        ]
        raise SpecError(listed(f"{len(facts)} leaves have no PartitionSpec:", facts))
    return treedef.unflatten(specs)


def _named_sharding(leaf: Any) -> NamedSharding | None:
    # On Auto axes, the type of a tracer has a sharding too, which says nothing: the compiler
    # chooses after the trace.
    if isinstance(leaf, Tracer):
        sharding = jax.typeof(leaf).sharding
        return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None


def _spec(leaf: Any) -> PartitionSpec | None:
    sharding = _named_sharding(leaf)
    if sharding is not None:
        return sharding.spec
    # Python's numbers have no sharding: in a step, JAX replicates them.
    if isinstance(leaf, bool | int | float | complex):
        return PartitionSpec()
    if isinstance(leaf, Tracer) or not is_array(leaf):
        return None
    # An array on one device has a `SingleDeviceSharding`, which has no spec.
    on_one_device = not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1
    return PartitionSpec() if on_one_device else None


def _explain_missing_spec(leaf: Any) -> str:
    if isinstance(leaf, Tracer):
        return (
            "it is traced, and on Auto axes the compiler chooses its sharding. Read the inputs or"
            " the outputs of the traced function instead."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "it is a ShapeDtypeStruct without a sharding. `Plan.structs` have one."
    if isinstance(leaf, jax.Array):
        return f"its sharding is a {type(leaf.sharding).__name__}, which has no spec."
    return f"{type(leaf).__name__} is neither an array nor a number. Remove it from the tree first."

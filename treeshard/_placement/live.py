"""Reads the shardings of live trees.

A leaf without a sharding becomes `None`, so that the result has the structure of the tree and can
be passed along with it.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import has_shape, is_array
from treeshard._core.make_mesh import make_mesh
from treeshard._core.mesh import MeshLike, as_mesh
from treeshard._core.paths import PyTree, is_named_array, leaf_paths
from treeshard._core.spec_trees import SpecTree, raise_misfits, resolve_specs
from treeshard.errors import SpecError, listed


def extract_shardings(tree: PyTree, mesh: MeshLike | None = None) -> SpecTree:
    """Reads the sharding of every leaf of a live tree.

    Args:
        tree: Any pytree of arrays, tracers, `ShapeDtypeStruct`s and other leaves.
        mesh: The mesh of the result, with the same specs. By default, each leaf keeps its own mesh,
            and leaves whose `sharding` is a `PartitionSpec` get the current mesh.

    Returns:
        The same containers with a `NamedSharding` per leaf. Numpy arrays, arrays on a single device
        and leaves that are not arrays become `None`. A `NamedArray` of haliax is a leaf, as in
        haliax's own functions. Every function that takes a tree of specs accepts the result. A
        traced leaf has a sharding on Explicit axes only. On Auto axes, the compiler chooses its
        sharding later.

    Raises:
        SpecError: If specs do not fit `mesh`. All such leaves are listed. If the mesh lacks an
            axis, it is an `UnknownAxisError`.
        NoMeshError: If a leaf has a `PartitionSpec`, and there is no mesh.
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
    leaves, treedef = _flatten(tree)
    placements = [_placement(leaf) for leaf in leaves]
    if mesh is None and not any(isinstance(x, PartitionSpec) for x in placements):
        return treedef.unflatten(placements)
    # As lists: a class that flattens what it is rebuilt from would lose the `None`s of a tree.
    arrays = [_struct_of(leaf, x) for leaf, x in zip(leaves, placements, strict=True)]
    where = "extract_shardings"
    resolved = resolve_specs(arrays, placements, as_mesh(mesh, make_mesh), where=where)
    misfits = {i: spec and spec.misfit() for i, spec in enumerate(resolved)}
    raise_misfits(treedef.unflatten(arrays), misfits, where)
    return treedef.unflatten([spec and spec.sharding for spec in resolved])


def get_partition_spec(tree: PyTree) -> SpecTree:
    """Reads the `PartitionSpec` of every leaf of a live tree.

    Args:
        tree: Any pytree of arrays, tracers, `ShapeDtypeStruct`s and Python scalars.

    Returns:
        The same containers with a `PartitionSpec` per leaf. Arrays on a single device, numpy arrays
        and Python scalars get `P()`. A `NamedArray` of haliax is a leaf, as in haliax's own
        functions.

    Raises:
        SpecError: If a leaf is neither an array nor a number, has a sharding of another class, or
            is a tracer or `ShapeDtypeStruct` without a sharding. All such leaves are listed with
            their types.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> tree = shard({"w": np.ones(8)}, P("fsdp"), make_mesh("fsdp=8"))
        >>> get_partition_spec(tree | {"step": 3})
        {'step': P(), 'w': P('fsdp',)}

    Source:
        EasyDeL's function of this name.
    """
    check_no_refs(tree, "get_partition_spec")
    leaves, treedef = _flatten(tree)
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


def _flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """The arrays and other leaves, and a structure in which a `NamedArray` is a leaf.

    Arrays of haliax compare their values, so `named == P()` would raise for a `NamedArray` with a
    spec inside.
    """
    nodes, treedef = tree_flatten(tree, is_leaf=_is_named_leaf)
    return [tree_leaves(x)[0] if _is_named_leaf(x) else x for x in nodes], treedef


def _is_named_leaf(x: Any) -> bool:
    return is_named_array(x) and len(tree_leaves(x)) == 1


def _placement(leaf: Any) -> NamedSharding | PartitionSpec | None:
    # On Auto axes, the type of a tracer has a sharding too, which says nothing: the compiler
    # chooses after the trace.
    if isinstance(leaf, Tracer):
        sharding = jax.typeof(leaf).sharding
        return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
    # Classes of other libraries describe arrays too, some of them by a spec.
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding | PartitionSpec) else None


def _struct_of(leaf: Any, placement: NamedSharding | PartitionSpec | None) -> Any:
    """A leaf, or the `ShapeDtypeStruct` of one that only describes an array."""
    if placement is None or has_shape(leaf):
        return leaf
    spec = placement if isinstance(placement, PartitionSpec) else placement.spec
    # If the shape is unknown, only the axes are checked: any number divides 0.
    shape = getattr(leaf, "shape", (0,) * len(spec))
    return jax.ShapeDtypeStruct(shape, getattr(leaf, "dtype", "float32"))


def _spec(leaf: Any) -> PartitionSpec | None:
    placement = _placement(leaf)
    if placement is not None:
        return placement.spec if isinstance(placement, NamedSharding) else placement
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
            "it is a tracer, and on Auto axes the compiler chooses its sharding. Read the inputs or"
            " the outputs of the traced function instead."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "it is a ShapeDtypeStruct without a sharding. `Plan.structs` have one."
    if isinstance(leaf, jax.Array):
        return f"its sharding is a {type(leaf.sharding).__name__}, which has no spec."
    return f"{type(leaf).__name__} is neither an array nor a number. Remove it from the tree first."

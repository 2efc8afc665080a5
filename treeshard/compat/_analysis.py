"""Memory and balance of a tree of specs, by EasyDeL's name."""

from typing import Any, cast

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import has_shape
from treeshard._core.mesh import AnyMesh, MeshLike
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.spec_trees import SpecTree, raise_misfits, resolve_specs
from treeshard._core.specs import MISFITS
from treeshard._inspection.memory import PlacedLeaf, bytes_by_device


def analyze_sharding_strategy(
    pytree: PyTree, partition_specs: SpecTree, mesh: MeshLike | None = None
) -> dict[str, Any]:
    """Computes the memory per device and the balance of a sharding.

    Values are neither read nor moved. `step.communication` reports what a step communicates. A dim
    that its axes do not divide counts as the compiler splits it: in parts of the rounded-up length,
    the last parts shorter or empty.

    Args:
        pytree: Arrays, or their `jax.ShapeDtypeStruct`s; other leaves are ignored.
        partition_specs: A `Plan`, specs or `NamedSharding`s for them, or a prefix of such a tree.
            A leaf without a spec is counted by its current sharding.
        mesh: The mesh, also an `AbstractMesh`. By default the mesh of the plan or of the
            `NamedSharding`s, or the mesh in force.

    Returns:
        A dict of

        - `"total_parameters"`, `"sharded_parameters"`, `"replicated_parameters"`: elements of
          all arrays, of arrays in more than one part, and of the other arrays;
        - `"memory_per_device"`: bytes by device id (on an `AbstractMesh`, by the position in
          it, row-major), without arrays in pinned host memory;
        - `"balance_score"`: the mean of these over the largest; 1.0 if they are equal;
        - `"partition_stats"`: for each spec, without trailing `None`s, a dict of its
          `"leaves"`, `"parameters"`, `"bytes"` (of the full arrays) and `"bytes_per_device"`
          (on the fullest device). Leaves without a mesh are under `None`.

    Raises:
        SpecError: If specs are not a prefix of the tree or do not fit it: an axis is repeated
            or not in the mesh (then also an `UnknownAxisError`), there are entries beyond the
            rank, or a dim is `UNCONSTRAINED`. All such leaves are listed.
        NoMeshError: If specs are given without a mesh.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> tree = {"w": np.ones((8, 8), "float32"), "b": np.ones(8, "float32")}
        >>> analysis = analyze_sharding_strategy(tree, {"w": P("fsdp"), "b": P()}, mesh)
        >>> analysis["total_parameters"], analysis["sharded_parameters"]
        (72, 64)
        >>> analysis["memory_per_device"][0], analysis["balance_score"]
        (96, 1.0)

    Source:
        EasyDeL's function of this name.
    """
    leaves = _find_placed_leaves(pytree, partition_specs, mesh)
    memory = bytes_by_device(leaves)
    total = sum(leaf.size for leaf in leaves)
    sharded = sum(x.size for x in leaves if x.sharding and not x.sharding.is_fully_replicated)
    return {
        "total_parameters": total,
        "sharded_parameters": sharded,
        "replicated_parameters": total - sharded,
        "memory_per_device": memory,
        "balance_score": _compute_balance(list(memory.values())),
        "partition_stats": _group_by_spec(leaves),
    }


# EasyDeL's function documents these keys and computes the first two. Its memory per device and its
# statistics stay empty, and its balance is 0.0.
def _compute_balance(sizes: list[int]) -> float:
    return sum(sizes) / len(sizes) / max(sizes) if any(sizes) else 1.0


def _group_by_spec(leaves: list[PlacedLeaf]) -> dict[PartitionSpec | None, dict[str, int]]:
    leaves_of: dict[PartitionSpec | None, list[PlacedLeaf]] = {}
    for leaf in leaves:
        leaves_of.setdefault(leaf.spec, []).append(leaf)
    return {
        spec: {
            "leaves": len(same_spec),
            "parameters": sum(leaf.size for leaf in same_spec),
            "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in same_spec),
            "bytes_per_device": max(bytes_by_device(same_spec).values(), default=0),
        }
        for spec, same_spec in leaves_of.items()
    }


def _find_placed_leaves(tree: Any, specs: Any, mesh: MeshLike | None) -> list[PlacedLeaf]:
    """Every array with its sharding. Raises for all leaves whose spec does not fit."""
    where = "analyze_sharding_strategy"
    check_no_refs(tree, where)
    laid = resolve_specs(tree, specs, mesh, where=where)
    # An uneven dim counts as the compiler splits it. `UNCONSTRAINED` has no size to count.
    kinds = MISFITS - {"indivisible"} | {"unconstrained"}
    misfits = {i: spec and spec.misfit(kinds) for i, spec in enumerate(laid)}
    raise_misfits(tree, misfits, where)
    placed: list[PlacedLeaf] = []
    for path, leaf, spec in zip(leaf_paths(tree), tree_leaves(tree), laid, strict=True):
        if not has_shape(leaf):
            continue
        sharding = getattr(leaf, "sharding", None)
        if spec is not None:  # as requested: the compiler can split uneven dims
            mesh_of_spec = cast(AnyMesh, spec.mesh)
            sharding = NamedSharding(mesh_of_spec, spec.requested, memory_kind=spec.memory_kind)
        placed.append(PlacedLeaf(path, tuple(leaf.shape), leaf.dtype, sharding))
    return placed

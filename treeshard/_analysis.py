"""What a tree of specs amounts to: memory, balance, and what a step will move."""

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves, tree_structure

from treeshard._communication import predict_communication
from treeshard._decision import Decision, PlannedLeaf
from treeshard._errors import SpecError, UnknownAxisInSpecError, listed
from treeshard._mesh import AnyMesh, current_or_given
from treeshard._paths import leaf_paths
from treeshard._placed import Placed, bytes_by_device, live_sharding
from treeshard._plan import Plan
from treeshard._spec_trees import SpecCarrier, specs_of_leaves
from treeshard._specs import UNCONSTRAINED, Adjustment, entries, has_shape, project


def analyze_sharding_strategy(
    tree: Any, specs: Any, mesh: AnyMesh | None = None, *, batch: Any = None
) -> dict[str, Any]:
    """Computes what a sharding costs per device, how even it is, and what a step will move.

    No values are read, and nothing is moved. A dim that its axes do not divide counts as the
    compiler cuts it: into parts of the rounded-up length, the last ones shorter or empty.

    Args:
        tree: Arrays, or their `jax.ShapeDtypeStruct`s; other leaves do not count.
        specs: A `Plan`, specs or `NamedSharding`s for them, or a prefix of such a tree. Where
            it is `None`, a leaf counts as it lies.
        mesh: The mesh; by default the plan's, the one that `NamedSharding`s carry, or the one
            in force. An `AbstractMesh` will do.
        batch: The specs of the batch that a step takes, for `"communication"`. By default it is
            split over all axes of the mesh, as in data parallel and FSDP.

    Returns:
        A dict of

        - `"total_parameters"`, `"sharded_parameters"`, `"replicated_parameters"`: elements of
          all arrays, of those that are in more than one part, and of the others;
        - `"memory_per_device"`: bytes by device id (on an `AbstractMesh`, by the position in
          it, row-major), without what lies in pinned host memory;
        - `"balance_score"`: the mean of these over the largest; 1.0 if they are equal;
        - `"partition_stats"`: for each spec, without trailing `None`s, a dict of its
          `"leaves"`, `"parameters"`, `"bytes"` (of the whole arrays) and `"bytes_per_device"`
          (on the fullest). Leaves on no mesh stand under `None`.
        - `"communication"`: what a training step has to move by `predict_communication`, for the
          leaves that lie on the mesh: for each `(kind, axes)` the `"count"` of transfers and
          their `"bytes"` (of whole payloads). `None` if leaves lie on several meshes.

    Raises:
        SpecError: If specs are no prefix of the tree or do not fit it: an axis repeated or not
            in the mesh (`UnknownAxisError` too), entries beyond the rank, a dim that is
            `UNCONSTRAINED`. All such leaves are named.
        UnknownAxisError: If `batch` names an axis that the mesh lacks.
        NoMeshError: If there are specs, and no mesh.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> tree = {"w": np.ones((8, 8), "float32"), "b": np.ones(8, "float32")}
        >>> found = analyze_sharding_strategy(tree, {"w": P("fsdp"), "b": P()}, mesh)
        >>> found["total_parameters"], found["sharded_parameters"]
        (72, 64)
        >>> found["memory_per_device"][0], found["balance_score"]
        (96, 1.0)

    Source:
        EasyDeL's function of this name.
    """
    leaves = _laid(tree, specs, mesh)
    memory = bytes_by_device(leaves)
    total = sum(leaf.size for leaf in leaves)
    sharded = sum(leaf.size for leaf in leaves if leaf.is_split)
    return {
        "total_parameters": total,
        "sharded_parameters": sharded,
        "replicated_parameters": total - sharded,
        "memory_per_device": memory,
        "balance_score": _balance(list(memory.values())),
        "partition_stats": _by_spec(leaves),
        "communication": _communication(leaves, batch),
    }


def _balance(held: list[int]) -> float:
    return sum(held) / len(held) / max(held) if any(held) else 1.0


def _by_spec(leaves: list[Placed]) -> dict[PartitionSpec | None, dict[str, int]]:
    members: dict[PartitionSpec | None, list[Placed]] = {}
    for leaf in leaves:
        members.setdefault(leaf.spec, []).append(leaf)
    return {
        spec: {
            "leaves": len(alike),
            "parameters": sum(leaf.size for leaf in alike),
            "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in alike),
            "bytes_per_device": max(bytes_by_device(alike).values(), default=0),
        }
        for spec, alike in members.items()
    }


def _communication(
    leaves: list[Placed], batch: Any
) -> dict[tuple[str, tuple[str, ...]], dict[str, int]] | None:
    on = [(leaf, leaf.sharding) for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    meshes = {sharding.mesh for _, sharding in on}
    if len(meshes) > 1:
        return None
    found: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
    for mesh in meshes:
        planned = tuple(
            PlannedLeaf(leaf.path, leaf.shape, leaf.dtype, Decision(placed.spec, placed.spec))
            for leaf, placed in on
        )
        plan = Plan(mesh, (), 0, planned, tree_structure([0] * len(planned)))
        split = PartitionSpec(mesh.axis_names) if batch is None else batch
        for transfer in predict_communication(plan, batch=split):
            total = found.setdefault((transfer.kind, transfer.axes), {"count": 0, "bytes": 0})
            total["count"] += transfer.count
            total["bytes"] += transfer.total_bytes
    return found


# ------------------------------------------------------------------ laying specs


def _laid(tree: Any, specs: Any, mesh: AnyMesh | None) -> list[Placed]:
    """Every array with its place. Raises for all leaves whose spec does not fit."""
    if mesh is None and isinstance(specs, SpecCarrier):
        mesh = specs.mesh
    beside = specs_of_leaves(specs, tree)
    found: list[Placed] = []
    facts: list[str] = []
    error = SpecError
    for path, leaf, spec in zip(leaf_paths(tree), tree_leaves(tree), beside, strict=True):
        if not has_shape(leaf):
            continue
        shape = tuple(leaf.shape)
        if spec is None:
            found.append(Placed(path, shape, leaf.dtype, live_sharding(leaf)))
            continue
        own, plain, memory = None, spec, None
        if isinstance(spec, NamedSharding):
            own, plain, memory = spec.mesh, spec.spec, spec.memory_kind
        on = current_or_given(own if mesh is None else mesh)
        if wrong := _misfits(plain, on, shape):
            facts.append(f"{path or 'the array'}: {wrong[0].why}")
            if any(note.kind == "axis-not-in-mesh" for note in wrong):
                error = UnknownAxisInSpecError
        else:
            placed = NamedSharding(on, plain, memory_kind=memory)
            found.append(Placed(path, shape, leaf.dtype, placed))
    if facts:
        raise error(listed(f"{len(facts)} leaves do not fit their specs:", facts))
    return found


def _misfits(spec: PartitionSpec, mesh: AnyMesh, shape: tuple[int, ...]) -> list[Adjustment]:
    if UNCONSTRAINED in entries(spec):
        dim = entries(spec).index(UNCONSTRAINED)
        why = (
            f"{spec} leaves dim {dim} to the compiler, so what it costs is unknown. Say which axis."
        )
        return [Adjustment("unconstrained", why, dim=dim)]
    return [note for note in project(spec, mesh, shape)[1] if note.kind != "indivisible"]

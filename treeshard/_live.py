"""A live tree read back: where each leaf lies."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._errors import SpecError, UnknownAxisInSpecError, listed
from treeshard._mesh import AnyMesh, describe_mesh
from treeshard._paths import leaf_paths
from treeshard._specs import is_array, project


def extract_shardings(tree: Any, mesh: AnyMesh | None = None) -> Any:
    """Reads the sharding of every leaf of a live tree.

    Args:
        tree: Any pytree of arrays, tracers and `ShapeDtypeStruct`s; other leaves are fine.
        mesh: Another mesh, to lay the specs found on.

    Returns:
        The same containers with a `NamedSharding` per leaf, and `None` in the place of a leaf
        that has none: numpy arrays, arrays on a single device, non-arrays. What takes a tree of
        specs takes it as it is. A traced leaf has one where its type says so, on Explicit axes;
        on Auto axes the compiler decides later, and it has none.

    Raises:
        SpecError: If specs do not fit `mesh`: all such leaves (`UnknownAxisError` if it lacks
            an axis).

    Examples:
        >>> tree = shard({"w": np.ones(8)}, P("fsdp"), make_mesh("fsdp=8"))
        >>> extract_shardings(tree | {"name": "mlp"})["w"].spec
        P('fsdp',)

    Source:
        EasyDeL's function of this name.
    """
    leaves, treedef = tree_flatten(tree)
    found = [_named_sharding(leaf) for leaf in leaves]
    if mesh is not None:
        found = _on(mesh, tree, leaves, found)
    return treedef.unflatten(found)


def extract_sharding_structure(tree: Any) -> Any:
    """Reads a live tree back as `NamedSharding` or `None` per leaf: `extract_shardings`.

    Args:
        tree: Any pytree.

    Examples:
        >>> extract_sharding_structure({"w": np.ones(8)})
        {'w': None}

    Source:
        EasyDeL's function of this name.
    """
    return extract_shardings(tree)


get_shardings_with_structure = extract_sharding_structure


def get_partition_spec(tree: Any) -> Any:
    """Reads the `PartitionSpec` of every leaf of a live tree.

    Args:
        tree: Any pytree of arrays, tracers, `ShapeDtypeStruct`s and Python scalars.

    Returns:
        The same containers with a spec per leaf: that of its `NamedSharding`; `P()` for arrays
        on a single device, numpy arrays and Python scalars.

    Raises:
        SpecError: If a leaf has no spec: it is no array and no number, its sharding is of
            another kind, or it is traced or described without one. All such leaves are named,
            with their types.

    Examples:
        >>> tree = shard({"w": np.ones(8)}, P("fsdp"), make_mesh("fsdp=8"))
        >>> get_partition_spec(tree | {"step": 3})
        {'step': P(), 'w': P('fsdp',)}

    Source:
        EasyDeL's function of this name.
    """
    leaves, treedef = tree_flatten(tree)
    found = [_spec(leaf) for leaf in leaves]
    if any(spec is None for spec in found):
        named = zip(leaf_paths(tree), leaves, found, strict=True)
        facts = [
            f"{path or 'the tree'}: {_why_none(leaf)}" for path, leaf, spec in named if spec is None
        ]
        raise SpecError(listed(f"{len(facts)} leaves have no PartitionSpec:", facts))
    return treedef.unflatten(found)


def _named_sharding(leaf: Any) -> NamedSharding | None:
    if isinstance(leaf, Tracer):
        sharding = jax.typeof(leaf).sharding
        return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None


def _on(
    mesh: AnyMesh, tree: Any, leaves: list[Any], found: list[NamedSharding | None]
) -> list[NamedSharding | None]:
    laid: list[NamedSharding | None] = []
    facts: list[str] = []
    error = SpecError
    for i, (leaf, sharding) in enumerate(zip(leaves, found, strict=True)):
        if sharding is None:
            laid.append(None)
            continue
        spec, lost = project(sharding.spec, mesh, tuple(leaf.shape))
        if lost:
            facts.append(f"{leaf_paths(tree)[i] or 'the tree'}: {lost[0].why}")
            if any(adjustment.kind == "axis-not-in-mesh" for adjustment in lost):
                error = UnknownAxisInSpecError
        laid.append(NamedSharding(mesh, spec, memory_kind=sharding.memory_kind))
    if facts:
        headline = f"{len(facts)} leaves do not fit the mesh ({describe_mesh(mesh)}) as they lie:"
        raise error(listed(headline, facts))
    return laid


def _spec(leaf: Any) -> PartitionSpec | None:
    sharding = _named_sharding(leaf)
    if sharding is not None:
        return sharding.spec
    if isinstance(leaf, bool | int | float | complex):
        return PartitionSpec()
    if isinstance(leaf, Tracer) or not is_array(leaf):
        return None
    whole = not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1
    return PartitionSpec() if whole else None


def _why_none(leaf: Any) -> str:
    if isinstance(leaf, Tracer):
        return (
            "it is traced, and on Auto axes the compiler decides where it lies. Read the arrays"
            " that go in or come out."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "a ShapeDtypeStruct without a sharding. `Plan.structs` have one."
    if isinstance(leaf, jax.Array):
        return f"its sharding is a {type(leaf.sharding).__name__}, which has no spec."
    return f"{type(leaf).__name__} is neither an array nor a number. Take it out of the tree first."

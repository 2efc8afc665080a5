"""What a like-tree asks for: of what type each array is to be, and where it is to lie."""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_flatten

from treeshard._asked_for import LeafType, leaf_type
from treeshard._mesh import AnyMesh
from treeshard._plan import Plan, plan
from treeshard._rules import Rules
from treeshard._specs import has_shape
from treeshard._targets import mesh_for


class Placing(NamedTuple):
    """How arrays are to lie, by rules: as `plan` takes them. Without rules, as they say."""

    rules: Rules | None = None
    mesh: AnyMesh | None = None
    min_size: int | None = None


class Asked(NamedTuple):
    """An array that is asked for.

    Attributes:
        type: Its type.
        sharding: How it is to lie on devices; `None` for the default device, or for numpy.
    """

    type: LeafType
    sharding: Sharding | None


def arrays_asked_for(
    like: Any, placing: Placing, where: str
) -> tuple[list[Any], Any, dict[int, Asked]]:
    """The leaves and structure of a like-tree, and what it asks for at each of its arrays.

    With rules they lie as these decide; else as the like-tree's own do. numpy's arrays and
    `ShapeDtypeStruct`s without a sharding have none.

    Raises:
        ShardingRuleError: If the rules do not decide every leaf, or decide what does not fit.
        NoMeshError: If there is no mesh for the rules, or only one without devices.
        ValueError: If a mesh is given without rules.
    """
    rules, mesh, min_size = placing
    if rules is None and (mesh is not None or min_size is not None):
        given = "a mesh" if mesh is not None else "min_size"
        raise ValueError(
            f"{where}: {given} is given and no rules that say how arrays lie. Pass them too:"
            " `rules=[('.*', None)]` replicates."
        )
    tree = like.structs if isinstance(like, Plan) else like
    leaves, treedef = tree_flatten(tree)
    types = {i: asked for i, leaf in enumerate(leaves) if (asked := _array_type(leaf)) is not None}
    if rules is None:
        return leaves, treedef, {i: Asked(x, _own(leaves[i], where)) for i, x in types.items()}
    decided = plan(tree, rules, mesh_for(PartitionSpec(), mesh, where), min_size=min_size)
    decided.check()
    places = tree_flatten(decided.shardings)[0]
    placed = {i: Asked(x._replace(on_devices=True), places[i]) for i, x in types.items()}
    return leaves, treedef, placed


def _array_type(leaf: Any) -> LeafType | None:
    return leaf_type(leaf) if has_shape(leaf) else None


def _own(leaf: Any, where: str) -> Sharding | None:
    if isinstance(leaf, np.ndarray | np.generic) or not getattr(leaf, "committed", True):
        return None
    if isinstance(leaf.sharding, NamedSharding):
        mesh_for(leaf.sharding, None, where)  # which has devices, or this raises
    return leaf.sharding

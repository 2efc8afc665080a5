"""What a like-tree requests: the type and the sharding of each array."""

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
    """How to shard arrays: by rules, as in `plan`; without rules, as the like-tree's own arrays."""

    rules: Rules | None = None
    mesh: AnyMesh | None = None
    min_size: int | None = None


class Asked(NamedTuple):
    """A requested array.

    Attributes:
        type: Its type.
        sharding: Its sharding; `None` for the default device, or for numpy.
    """

    type: LeafType
    sharding: Sharding | None


def arrays_asked_for(
    like: Any, placing: Placing, where: str
) -> tuple[list[Any], Any, dict[int, Asked]]:
    """The leaves and structure of a like-tree, and the request at each of its arrays.

    With rules, these decide the shardings; otherwise the like-tree's own arrays do. numpy arrays
    and `ShapeDtypeStruct`s without a sharding have none.

    Raises:
        ShardingRuleError: If the rules leave a leaf undecided, or decide a spec that does not fit.
        NoMeshError: If there is no mesh for the rules, or only one without devices.
        ValueError: If a mesh is given without rules.
    """
    rules, mesh, min_size = placing
    if rules is None and (mesh is not None or min_size is not None):
        given = "a mesh" if mesh is not None else "min_size"
        raise ValueError(
            f"{where}: {given} was given without rules. Pass `rules=` as well, such as"
            " `rules=[('.*', None)]`, which replicates."
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
        mesh_for(leaf.sharding, None, where)  # raises unless the mesh has devices
    return leaf.sharding

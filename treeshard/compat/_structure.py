"""EasyDeL's two other names of `extract_shardings`."""

from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecTree
from treeshard._placement.live import extract_shardings


def extract_sharding_structure(pytree: PyTree) -> SpecTree:
    """Reads the sharding of every leaf of a live tree: `extract_shardings`.

    Args:
        pytree: Any pytree.

    Returns:
        The same containers with a `NamedSharding` per leaf, or `None` for a leaf without one.

    Raises:
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> extract_sharding_structure({"w": np.ones(8), "name": "mlp"})
        {'name': None, 'w': None}

    Source:
        EasyDeL's function of this name.
    """
    return extract_shardings(pytree)


def get_shardings_with_structure(pytree: PyTree) -> SpecTree:
    """Reads the sharding of every leaf of a live tree: `extract_shardings`.

    Args:
        pytree: Any pytree.

    Returns:
        The same containers with a `NamedSharding` per leaf, or `None` for a leaf without one.

    Raises:
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> tree = shard({"w": np.ones(8)}, P("fsdp"), make_mesh("fsdp=8"))
        >>> get_shardings_with_structure(tree)["w"].spec
        P('fsdp',)

    Source:
        EasyDeL's function of this name.
    """
    return extract_shardings(pytree)

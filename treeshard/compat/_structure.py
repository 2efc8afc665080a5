"""EasyDeL's two other names of `extract_shardings`, with EasyDeL's parameter `pytree`."""

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
        >>> tree = shard({"w": np.ones(8)}, P("fsdp"), make_mesh("fsdp=8"))
        >>> extract_sharding_structure(tree | {"name": "mlp"})["w"].spec
        P('fsdp',)

    Source:
        EasyDeL's function of this name, and `get_shardings_with_structure`.
    """
    return extract_shardings(pytree)

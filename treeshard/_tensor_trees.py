"""The arrays of a tree as named tensors, and which process writes what of them."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path

from treeshard._across import is_spread
from treeshard._byte_ranges import Piece
from treeshard._errors import CheckpointError, LeafError, did_you_mean, listed
from treeshard._host import is_key, own_shards
from treeshard._parcels import box_of
from treeshard._paths import leaf_paths
from treeshard._processes import exchange
from treeshard._safetensors import METADATA, code_of
from treeshard._specs import has_shape
from treeshard._targets import Misfit, raise_misfits, unmovable

Names = Callable[[str], str] | Mapping[str, str]


def tensors_of(tree: Any, rename: Names | None, where: str) -> dict[str, Any]:
    """The arrays of a tree by the names of their tensors. All of them can be written.

    Raises:
        LeafError, DeletedLeafError: If leaves cannot be written.
        CheckpointError: As `tensor_names`.
    """
    leaves = tree_flatten(tree)[0]
    shaped = [(i, leaf) for i, leaf in enumerate(leaves) if has_shape(leaf)]
    misfits = {i: misfit for i, leaf in shaped if (misfit := _unwritable(leaf)) is not None}
    raise_misfits(tree, leaves, misfits, where)
    names = tensor_names(tree, rename, where)
    return {name: leaves[i] for i, name in names.items()}


def tensor_names(tree: Any, rename: Names | None, where: str) -> dict[int, str]:
    """The names of the tensors of a tree's arrays, by their positions among the leaves.

    Raises:
        CheckpointError: If leaves would share a name; if the format does not allow a name; if a
            mapping has paths that are not in the tree.
    """
    keyed = tree_flatten_with_path(tree)[0]
    paths = {
        i: path
        for i, (path, (_, leaf)) in enumerate(zip(leaf_paths(tree), keyed, strict=True))
        if has_shape(leaf)
    }
    facts: list[str] = []
    if isinstance(rename, Mapping):
        for path in rename.keys() - set(paths.values()):
            near = did_you_mean(str(path), paths.values())
            facts.append(f"{path}: `rename` has it, but the tree has no such array.{near}")
    names: dict[int, str] = {}
    sharing: defaultdict[str, list[str]] = defaultdict(list)
    for i, path in paths.items():
        name = names[i] = _renamed(path, rename)
        if why := _why_invalid(name):
            facts.append(f"{path}: its name would be {name!a}, {why}")
        else:
            sharing[name].append(keystr(keyed[i][0]))
    facts += [
        f"{name}: the name of {' and '.join(keys)}. Give them different names with `rename`."
        for name, keys in sharing.items()
        if len(keys) > 1
    ]
    if facts:
        raise CheckpointError(f"{where}: {listed(f'{len(facts)} names are invalid:', facts)}")
    return names


def _renamed(path: str, rename: Names | None) -> Any:
    if rename is None:
        return path
    return rename.get(path, path) if isinstance(rename, Mapping) else rename(path)


def _why_invalid(name: Any) -> str:
    if not isinstance(name, str):
        return f"which is a {type(name).__name__}, not a str."
    if name == METADATA:
        return "which the format reserves."
    try:
        name.encode()
    except UnicodeEncodeError:
        return "which is not valid Unicode."
    return ""


def _unwritable(leaf: Any) -> Misfit | None:
    if misfit := unmovable(leaf):
        return misfit
    if is_key(leaf):
        why = (
            "safetensors has no PRNG keys. Save `jax.random.key_data(key)`, and turn it back into"
            " keys with `jax.random.wrap_key_data`."
        )
        return Misfit(LeafError, why)
    if code_of(leaf.dtype) is None:
        why = (
            "safetensors does not have this dtype, or packs it. Use `.astype`, or `.view('uint8')`"
            " for the bytes."
        )
        return Misfit(LeafError, why)
    return None


# ------------------------------------------------------------------ processes


def writers(leaves: Sequence[Any], what: str, timeout: float) -> list[int | None]:
    """The process that writes each leaf; `None` where every process writes its own shards.

    The first process that holds a full leaf writes it. All processes hold numpy arrays in full.
    """
    is_full = [not is_spread(leaf) for leaf in leaves]
    answers = exchange(what, bytes(is_full), timeout=timeout)
    holders = zip(*answers, strict=True)
    return [next((i for i, full in enumerate(row) if full), None) for row in holders]


def pieces_of(leaf: Any) -> list[Piece]:
    """The shards of a leaf that this process writes: the first copy of each that it holds."""
    if not isinstance(leaf, jax.Array):
        return [Piece(box_of([slice(None)] * leaf.ndim, leaf.shape), np.asarray(leaf))]
    shards = own_shards(leaf)
    return [Piece(box_of(shard.index, leaf.shape), np.asarray(shard.data)) for shard in shards]

"""The arrays of a tree as tensors with names: what of them is written, and by whom."""

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
    """The arrays of a tree by the names of their tensors, all fit to be written.

    Raises:
        LeafError, DeletedLeafError: For leaves that cannot be written.
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
        CheckpointError: If leaves would share a name, or a name is none that the format can
            have; if a mapping has paths that the tree does not.
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
            facts.append(f"{path}: `rename` has it, and the tree has no such array.{near}")
    names: dict[int, str] = {}
    sharing: defaultdict[str, list[str]] = defaultdict(list)
    for i, path in paths.items():
        name = names[i] = _renamed(path, rename)
        if why := _no_name(name):
            facts.append(f"{path}: its name would be {name!a}, {why}")
        else:
            sharing[name].append(keystr(keyed[i][0]))
    facts += [
        f"{name}: the name of {' and '.join(keys)}. Give each another one with `rename`."
        for name, keys in sharing.items()
        if len(keys) > 1
    ]
    if facts:
        raise CheckpointError(f"{where}: {listed(f'{len(facts)} names are wrong:', facts)}")
    return names


def _renamed(path: str, rename: Names | None) -> Any:
    if rename is None:
        return path
    return rename.get(path, path) if isinstance(rename, Mapping) else rename(path)


def _no_name(name: Any) -> str:
    if not isinstance(name, str):
        return f"which is a {type(name).__name__}, not a str."
    if name == METADATA:
        return "which the format keeps for itself."
    try:
        name.encode()
    except UnicodeEncodeError:
        return "which is no Unicode."
    return ""


def _unwritable(leaf: Any) -> Misfit | None:
    if misfit := unmovable(leaf):
        return misfit
    if is_key(leaf):
        why = (
            "safetensors has no PRNG keys. Save `jax.random.key_data(key)`, and make keys of it"
            " with `jax.random.wrap_key_data`."
        )
        return Misfit(LeafError, why)
    if code_of(leaf.dtype) is None:
        why = (
            "safetensors has no such dtype, or packs it. Use `.astype`, or `.view('uint8')` for"
            " the bytes."
        )
        return Misfit(LeafError, why)
    return None


# ------------------------------------------------------------------ whose bytes


def writers(leaves: Sequence[Any], what: str, timeout: float) -> list[int | None]:
    """The process that writes each leaf; `None` where each writes the shards that it holds.

    A leaf that lies whole in one process, as numpy arrays do in all, is written by the first.
    """
    whole = [not is_spread(leaf) for leaf in leaves]
    said = exchange(what, bytes(whole), timeout=timeout)
    return [next((i for i, has in enumerate(row) if has), None) for row in zip(*said, strict=True)]


def pieces_of(leaf: Any) -> list[Piece]:
    """The shards of a leaf that this process holds, the first copy of each."""
    if not isinstance(leaf, jax.Array):
        return [Piece(box_of([slice(None)] * leaf.ndim, leaf.shape), np.asarray(leaf))]
    return [Piece(box_of(one.index, leaf.shape), np.asarray(one.data)) for one in own_shards(leaf)]

"""From devices to host memory, without a second copy and without one left behind."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.tree_util import tree_flatten

from treeshard._errors import LeafError
from treeshard._paths import leaf_paths
from treeshard._specs import has_shape, is_array
from treeshard._targets import Misfit, raise_misfits, unmovable

Known = dict[Any, tuple[Any, ...]]


def gather(tree: Any, *, to: Literal["all"] | int = "all", progress: bool = False) -> Any:
    """Copies a tree from its devices to host memory.

    Each shard is copied once, straight to its place in the result: host memory peaks at the
    size of the result, and nothing stays cached on the arrays. Nothing is compiled.

    Args:
        tree: Any pytree. Leaves that are no arrays pass through untouched.
        to: Which processes receive the tree: `"all"`, or the index of one.
        progress: Whether to show a bar, a step a leaf (needs `tqdm`).

    Returns:
        The tree with numpy arrays, in the dtypes of `ml_dtypes` where numpy has none. Typed
        PRNG keys stay key arrays, on one local device. Numpy leaves are copied, so the result
        never shares memory with the tree.

    Raises:
        DeletedLeafError: If a leaf was deleted or donated. Nothing is copied.
        LeafError: If a leaf is a tracer or a `ShapeDtypeStruct`, or lies partly on devices of
            other processes. Nothing is copied.
        ValueError: If `to` is neither `"all"` nor the index of a process.
        ImportError: If `progress` is asked for and `tqdm` is not installed.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> gather(shard({"w": np.arange(8)}, P("fsdp"), mesh))
        {'w': array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)}
    """
    if to != "all" and not (type(to) is int and 0 <= to < jax.process_count()):
        raise ValueError(
            f"gather(to={to!r}): give 'all', or the index of the process that receives the tree,"
            f" from 0 to {jax.process_count() - 1}."
        )
    return gather_at("", tree, progress)


def gather_at(prefix: str, tree: Any, progress: bool = False) -> Any:
    """`gather` of what stands at `prefix` in a larger tree, which messages then name."""
    leaves, treedef = tree_flatten(tree)
    _check_readable(tree, leaves, "gather", prefix)
    shown = _with_bar(leaves) if progress else leaves
    known: Known = {}
    return treedef.unflatten([_to_host(leaf, known) for leaf in shown])


def iter_gather(tree: Any) -> Iterator[tuple[str, Any]]:
    """Copies a tree to host memory leaf by leaf, so that one leaf is there at a time.

    Args:
        tree: Any pytree. Leaves that are no arrays are left out.

    Returns:
        An iterator of `(path, array)`, with arrays as `gather` returns them. It keeps none that
        it has given out.

    Raises:
        DeletedLeafError: If a leaf was deleted or donated; at the call, before the first leaf.
        LeafError: If a leaf is a tracer or a `ShapeDtypeStruct`, or lies partly on devices of
            other processes; at the call.

    Examples:
        >>> tree = shard({"w": np.arange(8), "name": "mlp"}, P("fsdp"), make_mesh("fsdp=8"))
        >>> [(path, x.shape) for path, x in iter_gather(tree)]
        [('w', (8,))]
    """
    leaves = tree_flatten(tree)[0]
    _check_readable(tree, leaves, "iter_gather")
    named = zip(leaf_paths(tree), leaves, strict=True)
    return ((path, _to_host(leaf)) for path, leaf in named if is_array(leaf))


def _check_readable(tree: Any, leaves: list[Any], where: str, prefix: str = "") -> None:
    shaped = [(i, leaf) for i, leaf in enumerate(leaves) if has_shape(leaf)]
    misfits = {i: misfit for i, leaf in shaped if (misfit := _unreadable(leaf)) is not None}
    raise_misfits(tree, leaves, misfits, where, prefix)


def _unreadable(leaf: Any) -> Misfit | None:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None  # numpy's own are copied whatever they are
    if misfit := unmovable(leaf):
        return misfit
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return Misfit(LeafError, "a part of it lies on devices of other processes.")
    return None


def _with_bar(leaves: list[Any]) -> Iterable[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            "gather(progress=True) needs tqdm. Install it with `pip install 'treeshard[show]'`."
        ) from None
    return tqdm(leaves, desc="gather", unit="leaf")


def _to_host(leaf: Any, known: Known | None = None) -> Any:
    if not is_array(leaf):
        return leaf
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    if is_key(leaf):
        data = jax.device_put(_to_host(jax.random.key_data(leaf)), jax.local_devices()[0])
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return _assembled(leaf, {} if known is None else known)


def _assembled(x: jax.Array, known: Known) -> np.ndarray:
    """One array from its shards. `known` keeps what leaves of one sharding and shape share."""
    whole = np.empty(x.shape, x.dtype)
    key = (x.sharding, x.shape, whole.itemsize)
    if key not in known:
        known[key] = (_on_host(x), *_places(x, whole))
    on_host, places, run, runs, parts = known[key]
    pieces = (x if on_host else second_handle(x)).addressable_shards
    if run is None:
        for i, index in places:
            whole[index] = np.asarray(pieces[i].data)
        return whole
    into = whole.reshape(runs).view(run)
    for i, index in places:
        into[index] = np.ndarray(parts, run, np.asarray(pieces[i].data).view(np.uint8))
    return whole


def _places(x: jax.Array, whole: np.ndarray) -> tuple[Any, ...]:
    """Which shards to read, by position, and where each goes.

    From the last dim that is split on, a shard is runs of memory. numpy pays for every run that
    it copies, and less if a run is one opaque item: then the item comes too, and the shapes of
    the whole and of a shard in such items.
    """
    part = x.sharding.shard_shape(x.shape)
    read = [(i, one.index) for i, one in enumerate(x.addressable_shards) if one.replica_id == 0]
    split = [dim for dim, length in enumerate(part) if length < whole.shape[dim]]
    dim = split[-1] if split else 0
    if dim == 0 or not whole.size or any(whole.shape[d] % part[d] for d in split):
        return read, None, None, None
    run = np.dtype((np.void, whole.itemsize * math.prod(part[dim:])))
    places = [(i, (*index[:dim], index[dim].start // part[dim])) for i, index in read]
    return places, run, (*whole.shape[:dim], -1), part[:dim]


def _on_host(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "cpu"


def to_read(x: jax.Array) -> jax.Array:
    """`x`, or on accelerators another handle, so that reading it leaves no host copy on `x`.

    The CPU platform hands out views instead of copies.
    """
    return x if _on_host(x) else second_handle(x)


def second_handle(x: jax.Array) -> jax.Array:
    """Another array on the same memory.

    JAX keeps the host copy of an array on the object that was asked for it. One that goes
    away takes it along.
    """
    pieces = [piece.data for piece in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys, which has no numbers of its own."""
    if not isinstance(x, jax.Array) or isinstance(x.dtype, np.dtype):  # quick for most
        return False
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)

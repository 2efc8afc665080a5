"""Copies trees from devices to host memory, each shard once.

`jax.device_get` caches a copy on each array, so the host holds the tree twice. It cannot read
arrays on devices of several processes. `multihost_utils.process_allgather` can, but first puts a
full copy on every device.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, repeat
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten

from treeshard._core.arguments import check_no_refs, check_tree
from treeshard._core.arrays import (
    bytes_to_read,
    data_of,
    is_array,
    is_key,
    is_spread,
    keys_on_host,
    owner_elsewhere,
    to_host,
)
from treeshard._core.facts import SMALL_BYTES
from treeshard._core.hosts import check_memory_of_hosts
from treeshard._core.make_mesh import make_mesh, with_devices
from treeshard._core.meetings import breaking_if_left, exclusive, last_meeting
from treeshard._core.memory import NOT_WORTH_A_LOOK
from treeshard._core.mesh import MeshLike, as_mesh
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.processes import (
    TIMEOUT,
    all_or_none,
    participating_processes,
    require_agreement,
    show_progress,
)
from treeshard._core.spec_trees import SpecCarrier, SpecTree, flatten_specs, is_spec_entry
from treeshard._placement.moves import return_unchanged, through_host
from treeshard._placement.shard import Call, place_by
from treeshard._placement.targets import raise_unmovable, resolver, unreadable
from treeshard._placement.transport import collect
from treeshard._planning.wrong_arguments import check_specs
from treeshard.errors import DoesNotFitError, LeafError

To = Literal["all"] | int


def gather(
    tree: PyTree, *, to: To = "all", progress: bool = False, timeout: float = TIMEOUT
) -> PyTree:
    """Copies a tree from its devices to numpy arrays on the host.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> gather(shard({"w": np.arange(8)}, P("fsdp"), mesh))
        {'w': array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)}

    Each shard is copied once, directly into the result. Host memory peaks at the size of the
    result, and JAX caches no copy on the arrays. All errors are raised before the first copy.

    If a tree is spread over several processes, the receiver and all processes that hold a part must
    make the call. One process sends each part to the receivers, leaf by leaf. Receivers need memory
    for the tree, and other processes need a few MiB. If a process dies during
    the call, the others raise a `ProcessError` on CPUs. On GPUs and TPUs, JAX aborts them after its
    heartbeat timeout. A tree on devices of this process is copied without communication or
    compilation.

    Args:
        tree: Any pytree. Leaves that are not arrays pass through.
        to: Which processes receive the tree. `"all"` stands for all processes that hold a part of
            it, and an index for a single process.
        progress: Whether to show a progress bar with a step per leaf (needs `tqdm`).
        timeout: Seconds to wait for other processes.

    Returns:
        The tree with numpy arrays of the same shapes. `ml_dtypes` provides dtypes that
        numpy lacks. Typed PRNG keys stay key arrays, on one local device. Numpy leaves are copied.
        The result never shares memory with the tree, and no two of its arrays share memory. On
        processes that do not receive the tree, each array is replaced by its
        `jax.ShapeDtypeStruct`.

    Raises:
        ArgumentError: If `tree` itself is a plan, a class, a function or an optimizer.
        DeletedLeafError: If a leaf was deleted or donated.
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct`, a mutable reference (`jax.Ref`), or
            unreduced. Also if another process has a leaf alone, and this process has other leaves.
        ProcessError: If processes call it with different trees, or if a process fails or does not
            arrive within `timeout`. Also if an array of at most 64 KiB from your own `jax.jit` has
            replicas that differ.
        DoesNotFitError: If the tree exceeds the host memory of this process.
        ValueError: If `to` is neither `"all"` nor the index of a process.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Source:
        `jax.device_get`, and `multihost_utils.process_allgather`.
    """
    _check_receiver(to, "gather")
    return gather_at("", tree, to, progress, timeout)


def gather_at(
    prefix: str, tree: PyTree, to: To = "all", progress: bool = False, timeout: float = TIMEOUT
) -> PyTree:
    """`gather` of a subtree; messages name its `prefix` in the larger tree."""
    leaves, treedef = tree_flatten(tree)
    call = _Call("gather", tree, leaves, to, _processes(leaves, to), timeout, prefix)
    with breaking_if_left(), exclusive(call.processes):
        read = _reader(call)
        gathered = [next(read) for _ in show_progress(leaves, "gather", show=progress)]
    return treedef.unflatten(gathered)


@breaking_if_left()
def iter_gather(
    tree: PyTree, *, to: To = "all", timeout: float = TIMEOUT
) -> Iterator[tuple[str, Any]]:
    """Copies a tree to the host leaf by leaf, so that no process holds the full tree.

    A `for` loop holds two leaves for a moment, because its variable keeps one leaf until the next
    has arrived. The call checks that the host has memory for two leaves. To hold one leaf at a
    time, `del` it at the end of the body.

    Args:
        tree: Any pytree. Leaves that are not arrays are skipped.
        to: As in `gather`.
        timeout: Seconds to wait for other processes, at the call and at each leaf.

    Returns:
        An iterator of `(path, array)`, with arrays as `gather` returns them. It keeps no
        reference to arrays that it has yielded. With several processes, each must exhaust it. If
        one stops early, the others raise a `ProcessError` that names it, at the next leaf that
        they need from it.

    Raises:
        ArgumentError, DeletedLeafError, LeafError, ProcessError, DoesNotFitError, ValueError: As
            `gather`, at the call, before the first leaf is copied.

    Examples:
        >>> tree = shard({"w": np.arange(8), "name": "mlp"}, P("fsdp"), make_mesh("fsdp=8"))
        >>> [(path, x.shape) for path, x in iter_gather(tree)]
        [('w', (8,))]

    Source:
        EasyLM streams checkpoints leaf by leaf.
    """
    _check_receiver(to, "iter_gather")
    leaves = tree_flatten(tree)[0]
    processes = _processes(leaves, to)
    call = _Call("iter_gather", tree, leaves, to, processes, timeout, leaf_by_leaf=True)
    read = _reader(call)
    named = list(zip(leaf_paths(tree), leaves, strict=True))
    return _arrays(named, read)


def _arrays(named: Iterable[tuple[str, Any]], read: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    for path, leaf in named:
        if is_array(leaf):
            yield path, next(read)  # keeps no reference
        else:
            next(read)


class _Call(NamedTuple):
    """One call of `gather` or `iter_gather`."""

    where: str  # the function, for messages
    tree: PyTree
    leaves: list[Any]  # of the tree
    to: To
    # The processes that hold parts of the leaves, and the receiver. Empty if this process holds
    # all parts, or none.
    processes: list[int]
    timeout: float
    prefix: str = ""  # the path of the tree in a larger one
    # Whether leaves are gathered one at a time. If so, the processes wait for each other at each
    # leaf that is sent.
    leaf_by_leaf: bool = False


def _processes(leaves: list[Any], to: To) -> list[int]:
    more = [] if to == "all" else [to]
    # A leaf on a mesh of this process is a part of the tree too, if others have other leaves.
    if any(isinstance(x, jax.Array) and _is_on_own_mesh(x) for x in leaves):
        more.append(jax.process_index())
    return participating_processes(filter(is_spread, leaves), more=more)


def _is_on_own_mesh(x: jax.Array) -> bool:
    return not is_spread(x) and isinstance(getattr(x, "sharding", None), NamedSharding)


def _reader(call: _Call) -> Iterator[Any]:
    """Checks all leaves at the call; returns an iterator over the leaves that this process
    receives."""
    paths = _agreed_paths(call)
    me = jax.process_index()
    spread = [leaf for leaf in call.leaves if is_spread(leaf)]
    if not call.processes:
        receives = call.to in ("all", me) and not spread
        return _receive(call.leaves, repeat([]), receives)
    receivers = call.processes if call.to == "all" else [call.to]
    data = list(map(data_of, spread))
    collected = collect(data, receivers, call.processes, _turns(call, paths))
    return _receive(call.leaves, collected, me in receivers)


def _agreed_paths(call: _Call) -> list[str]:
    """The paths of the leaves, after all processes have checked their leaves and agreed on them."""
    paths = leaf_paths(call.tree) if call.processes else []
    paths = [path_under(call.prefix, path) for path in paths]
    with require_agreement(call.where, among=call.processes, timeout=call.timeout) as facts:
        if call.prefix:  # a part of a tree may be anything
            check_no_refs(call.tree, call.where, call.prefix)
        else:
            check_tree(call.tree, call.where, f"{call.where}(tree)")
        # numpy arrays can always be copied, whatever their dtype.
        of_jax = jax.Array | jax.ShapeDtypeStruct
        misfits = {
            i: unreadable(x) or _misplaced(x, call)
            for i, x in enumerate(call.leaves)
            if isinstance(x, of_jax)
        }
        raise_unmovable(call.tree, misfits, call.where, call.prefix)
        if call.processes:
            rows = (
                (path, x, [x.sharding] if is_spread(x) else [])
                for path, x in zip(paths, call.leaves, strict=True)
                if is_array(x)
            )
            facts["the argument `to`"] = repr(call.to)
            facts.describe(rows, call.processes, SMALL_BYTES)
    _check_memory(call)
    return paths


def _misplaced(x: Any, call: _Call) -> LeafError | None:
    """The error of an array that another process has alone, if this process takes part."""
    owner = owner_elsewhere(x) if call.processes else None
    if owner is None:
        return None
    return LeafError(
        f"it is on devices of process {owner} alone, which cannot tell it from a copy of its own,"
        " and does not send it. Move it to devices of several processes before:"
        " `treeshard.reshard(tree, specs, mesh)`."
    )


def _turns(call: _Call, paths: list[str]) -> Callable[[int], AbstractContextManager[Any]]:
    """A function that returns the context in which a spread leaf travels, by its index."""
    if not call.leaf_by_leaf:  # one context for all leaves
        return nullcontext
    named = [path for path, leaf in zip(paths, call.leaves, strict=True) if is_spread(leaf)]
    met = last_meeting()  # the same on all processes, which have agreed on the call

    @contextmanager
    def turn(i: int) -> Iterator[None]:
        at = f"{call.where}, at {named[i]} (call of {met})"
        with breaking_if_left(), exclusive(call.processes):
            with all_or_none(at, among=call.processes, timeout=call.timeout):
                pass
            yield

    return turn


def _receive(
    leaves: list[Any], collected: Iterator[list[np.ndarray]], receives: bool
) -> Iterator[Any]:
    for leaf in leaves:
        # Processes that receive no data also take part, because others wait for their data.
        received = next(collected) if is_spread(leaf) else []
        if not receives:
            yield jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf
        elif not received:
            yield to_host(leaf)
        elif is_key(leaf):
            yield keys_on_host(leaf, received.pop())
        else:
            yield received.pop()


def _check_receiver(to: To, where: str) -> None:
    if to != "all" and not (type(to) is int and 0 <= to < jax.process_count()):
        raise ValueError(
            f"{where}(to={to!r}): pass 'all', or the index of the receiving process, from 0 to"
            f" {jax.process_count() - 1}."
        )


def _check_memory(call: _Call) -> None:
    arrays = [x for x in call.leaves if is_array(x)]
    sizes = [x.size * x.dtype.itemsize for x in arrays]
    needed = sum(sizes)
    way_out = "Gather leaf by leaf (`iter_gather`), or save the tree, which does not gather."
    if call.leaf_by_leaf:
        needed = max(map(sum, pairwise([0, *sizes])), default=0)
        way_out = (
            "A loop keeps two leaves in memory, the last and the next. Save the tree, which does"
            " not gather."
        )
    if needed < NOT_WORTH_A_LOOK:  # on every process
        return
    if call.to not in ("all", jax.process_index()):
        needed = 0
    # This process reads a shard into host memory before it sends it.
    needed += max(map(bytes_to_read, arrays), default=0)

    def error(fact: str, free: int) -> DoesNotFitError:
        return DoesNotFitError(f"{call.where}: the arrays need {fact} {way_out}", needed, free)

    check_memory_of_hosts(call.where, needed, error, among=call.processes, timeout=call.timeout)


# ------------------------------------------------------------------ leaf by leaf


def make_shard_and_gather_fns(
    partition_specs: SpecTree, mesh: MeshLike | None = None
) -> tuple[PyTree, PyTree]:
    """Makes two functions for each spec: one shards a leaf, the other gathers it.

    Use them in a loop that has one leaf at a time, for example while it reads a file. For a full
    tree, `jax.tree.map(lambda f, x: f(x), shard_fns, tree)` does what `shard` does.

    Args:
        partition_specs: A tree of `PartitionSpec`s or `NamedSharding`s, or a `Plan`.
        mesh: The mesh, or its axes as text. The default is the mesh of each `NamedSharding` or of
            the `Plan`, or else the mesh that is current during this call.

    Returns:
        `(shard_fns, gather_fns)`, two trees of functions with the structure of `partition_specs`.
        A spec that stands for a subtree becomes a function of this subtree. `None` becomes a
        function that returns its argument. The functions raise as `shard` and `gather` do, and
        their errors name the path of the spec.

    Raises:
        SpecError: If a leaf of `partition_specs` is not a spec.
        NoMeshError: If a spec needs a mesh, and there is no mesh.
        MeshError: If the mesh is an `AbstractMesh`, which has no devices.
        ArgumentError: If `partition_specs` is a mesh or text.
        ShardingRuleError: If `partition_specs` is a `Plan` with errors, as
            `Plan.check_before_use`, whose warnings apply too.

    Examples:
        >>> shard_fns, gather_fns = make_shard_and_gather_fns({"w": P("fsdp")}, make_mesh("fsdp=8"))
        >>> tree = jax.tree.map(lambda f, x: f(x), shard_fns, {"w": np.ones(8)})
        >>> jax.tree.map(lambda f, x: f(x), gather_fns, tree)["w"].shape
        (8,)

    Source:
        EasyLM and EasyDeL's function of this name.
    """
    check_specs(partition_specs, "make_shard_and_gather_fns({})")
    mesh = as_mesh(mesh, make_mesh)
    specs = partition_specs
    if isinstance(specs, SpecCarrier):
        specs.check_before_use()
        specs, mesh = specs.specs, mesh or specs.mesh
    leaf_specs, treedef = flatten_specs(specs, resolve=resolver(mesh))
    shard_fns: list[Callable[[Any], Any]] = []
    gather_fns: list[Callable[[Any], Any]] = []
    for path, spec in zip(leaf_paths(specs, is_leaf=is_spec_entry), leaf_specs, strict=True):
        if spec is None:
            shard_fns.append(return_unchanged)
            gather_fns.append(return_unchanged)
        else:
            own = spec.mesh if isinstance(spec, NamedSharding) else None
            spec_mesh = with_devices(own if mesh is None else mesh, "make_shard_and_gather_fns")
            call = Call("shard", through_host, prefix=path)
            shard_fns.append(partial(place_by, specs=spec, mesh=spec_mesh, call=call))
            gather_fns.append(partial(gather_at, path))
    return treedef.unflatten(shard_fns), treedef.unflatten(gather_fns)

"""Places trees on the devices of a mesh, and moves them from one layout to another.

`jax.device_put` places one leaf after another. It raises at the first leaf that does not fit, when
others have already moved. It compiles a program for each shape that comes from a single device, and
hangs if processes differ. `place` works in stages instead:

1. resolve: the target of each leaf, or one error for all that cannot be placed;
2. agree: several processes compare what each is about to do;
3. read: what `read=` returns takes the place of structs;
4. move: the leaves that move in the same way do so together.
"""

import math
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import tree_flatten

from treeshard._core.arguments import check_tree
from treeshard._core.arrays import (
    is_spread,
    items_on_host,
    processes_of,
    region_shape,
    regions_here,
)
from treeshard._core.facts import SMALL_BYTES, Facts
from treeshard._core.make_mesh import make_mesh
from treeshard._core.meetings import (
    MeetingOptions,
    breaking_if_left,
    exclusive,
    last_meeting,
    set_origin,
)
from treeshard._core.memory import Meter, lacking_memory
from treeshard._core.mesh import AnyMesh, MeshLike, as_mesh
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.processes import (
    TIMEOUT,
    all_or_none,
    participating_processes,
    require_agreement,
    show_progress,
)
from treeshard._core.replicas import shared_parts
from treeshard._core.spec_trees import SpecCarrier, SpecTree, call_functions
from treeshard._placement.moves import (
    Move,
    Read,
    choose_move,
    read_shards,
    replicate_then_split,
    through_host,
    transfer_across_processes,
)
from treeshard._placement.targets import meshes_of, targets
from treeshard._planning.wrong_arguments import check_specs
from treeshard.errors import DoesNotFitError

Check = Literal["form", "small", "values"]
_COMPARED_BYTES = {"form": 0, "small": SMALL_BYTES, "values": sys.maxsize}


def shard(
    tree: PyTree,
    specs: SpecTree,
    mesh: MeshLike | None = None,
    *,
    read: Read | None = None,
    check: Check = "small",
    progress: bool = False,
    timeout: float = TIMEOUT,
) -> PyTree:
    """Places every array of a tree on the devices of a mesh, sharded as its spec says.

    Examples:
        >>> tree = shard({"w": np.ones((16, 4)), "name": "mlp"}, P("fsdp"), make_mesh("fsdp=8"))
        >>> tree["w"].sharding.spec, tree["w"].addressable_shards[0].data.shape
        (P('fsdp',), (2, 4))

        Read an array that is too large for the host shard by shard:

        >>> rows = lambda path, index: np.arange(index[0].start, index[0].stop, dtype="int32")
        >>> struct = jax.ShapeDtypeStruct((16,), "int32")
        >>> shard(struct, P("fsdp"), make_mesh("fsdp=8"), read=rows).addressable_shards[1].data
        Array([2, 3], dtype=int32)

    Each device receives only its shard. With `P("fsdp")`, the shard of a leaf of shape `(d0, d1)`
    has the shape `(d0 / fsdp, d1)`. All leaves are checked before the first one moves. With several
    processes, all processes make the same call with the same tree, and each takes its own shards.

    Args:
        tree: Any pytree of numpy and JAX arrays. Other leaves pass through.
        specs: A tree of `PartitionSpec`s or JAX shardings, a prefix of such a tree, or a `Plan`.
            A spec for the full tree is cut to the rank of each leaf, so scalars are replicated.
            `None` leaves a leaf where it is. `logical_axis_rules` resolves tuples of logical names.
            A function gets the subtree at its place, and returns a spec or a tree of specs.
        mesh: The mesh, or its axes as text. The default is the mesh of `specs`, or else the
            current mesh.
        read: Reads the leaves that are `jax.ShapeDtypeStruct`s. It gets the path of a leaf and the
            index of a shard, a slice for each dim, and returns this part in the dtype of the leaf.
        check: What several processes compare. `"form"` compares paths, shapes, dtypes, specs and
            mesh. `"small"` also compares checksums of leaves of at most 64 KiB, and `"values"`
            checksums of all leaves.
        progress: Whether to show a progress bar with a step per leaf (needs `tqdm`).
        timeout: Seconds to wait for other processes.

    Returns:
        The tree with `jax.Array`s. Unless JAX's x64 mode is on, 64-bit values become 32-bit
        values. The result never shares memory with numpy arrays. It may share memory with
        `jax.Array`s of `tree`, which a step that donates its state then deletes too.

    Raises:
        UnknownAxisError: If a spec names an axis that the mesh lacks.
        SpecError: If a spec has more entries than its array has dims, names axes that do not divide
            a dim, names an axis twice, or has `UNCONSTRAINED`, `unreduced` or `reduced` parts. Also
            if `specs` does not match the structure of the tree.
        DeletedLeafError: If a leaf was deleted or donated.
        LeafError: If a leaf has no values, is a mutable reference (`jax.Ref`), is a masked array,
            or has a dtype that JAX lacks.
        ShardingRuleError: If `specs` is a `Plan` with errors.
        ArgumentError: If `specs` is a mesh, a list of rules or text.
        NoMeshError: If there is no mesh.
        MeshError: If the mesh is abstract.
        MismatchError: If `read` returns another shape or dtype.
        DoesNotFitError: If the host has too little memory for the arrays that `read` returns.
        ProcessError: If the calls of the processes differ, if a process fails or does not arrive
            within `timeout`, or if values differ that `check` compares.
        ValueError: If `check` is another word.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Warns:
        ShardingWarning: If `specs` is a `Plan` with warnings, as `Plan.check_before_use`. A rule
            that matches no leaf is an example.

    Source:
        `jax.device_put`.
    """
    if not isinstance(tree, SpecCarrier):  # arguments swapped: `resolve_specs` says so
        check_tree(tree, "shard", "shard(tree, specs)")
    call = Call("shard", through_host, read=read, check=check, progress=progress, timeout=timeout)
    return place(tree, specs, mesh, call)


def reshard(
    tree: PyTree,
    specs: SpecTree,
    mesh: MeshLike | None = None,
    *,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> PyTree:
    """Changes how a tree is sharded, or moves it to another mesh, from device to device.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> tree = shard({"w": np.ones((8, 8))}, P("fsdp"), mesh)
        >>> reshard(tree, P(None, ("fsdp", "data")), mesh)["w"].sharding.spec
        P(None, ('fsdp', 'data'))

    Leaves that are already sharded this way stay where they are. One compiled program moves all
    leaves that stay on the same devices. Leaves on a single device are first copied to all devices,
    so for a moment each device holds a full copy of these leaves. (`shard` copies them through the
    host instead.) Between different devices of one process, shards that exist in both shardings are
    copied directly, and others through the host, one at a time. Leaves of dtype int2 and uint2
    always move through the host, because programs that XLA compiles for them return wrong values.

    With several processes, all processes with devices of the old or the new mesh must make the
    call. If both meshes have the same devices in the same order, one program moves the leaves.
    Otherwise each process sends the parts that others need, leaf by leaf through the host. A leaf
    that each process holds on its own devices moves as by `shard`: it must be equal on all
    processes, and its values are compared if it has at most 64 KiB.

    Args:
        tree: Any pytree. Numpy leaves are placed as by `shard`.
        specs: As in `shard`. A leaf with a `SingleDeviceSharding` gets `P()` on a mesh of its
            device.
        mesh: As in `shard`.
        timeout: As in `shard`.
        progress: As in `shard`.

    Returns:
        The tree with its new shardings. It may share memory with the old tree, so donating the
        result may delete the source.

    Raises:
        UnknownAxisError, SpecError, NoMeshError, MeshError: As `shard`, for specs and meshes.
        ArgumentError: As `shard`.
        DeletedLeafError, LeafError, ProcessError: As `shard`, for leaves and processes.
        ShardingRuleError: As `shard`, whose warnings apply too.
        ImportError: If `progress` is set and `tqdm` is not installed.

    Source:
        `jax.device_put` and `jax.sharding.reshard`.
    """
    call = Call(
        "reshard", replicate_then_split, sends_local=True, progress=progress, timeout=timeout
    )
    return place(tree, specs, mesh, call)


# ------------------------------------------------------------------ one call


class Call(NamedTuple):
    """What a public function asks of `place`, besides the tree and its specs."""

    name: str  # of the function, for messages
    from_single_device: Move  # moves leaves that are on a single device
    # Whether a leaf that one process alone has goes to the others. If not, each process takes its
    # shards from its own.
    sends_local: bool = False
    prefix: str = ""  # the path of the tree in a larger one, for messages
    # The others as in `shard`.
    read: Read | None = None
    check: Check = "small"
    progress: bool = False
    timeout: float | None = TIMEOUT


class _Group(NamedTuple):
    """The processes that make a call together."""

    processes: list[int]  # ascending; none if this process acts alone
    has_local: bool  # whether there are leaves on devices of one process alone, perhaps to be sent
    moves: bool  # whether data may travel between processes


def place(tree: PyTree, specs: SpecTree, mesh: MeshLike | None, call: Call) -> PyTree:
    """Checks every leaf, on all processes, and only then moves the first."""
    check_specs(specs, f"{call.name}(tree, {{}})", tree)
    specs = call_functions(specs, tree)
    mesh = as_mesh(mesh, make_mesh)
    if call.check not in _COMPARED_BYTES:
        words = ", ".join(map(repr, _COMPARED_BYTES))
        raise ValueError(f"{call.name}(check={call.check!r}): one of {words}.")
    return place_by(tree, specs, mesh, call)


def place_by(tree: PyTree, specs: SpecTree, mesh: AnyMesh | None, call: Call) -> PyTree:
    """The same for specs and a mesh that were checked before."""
    leaves, treedef = tree_flatten(tree)
    group = _ALONE
    if jax.process_count() > 1:
        group = _group_of(leaves, meshes_of(specs, mesh), call)
    if not (group.processes or call.read):  # the moves alone: all else takes longer than small ones
        shardings = targets(tree, specs, mesh, call.name, call.prefix)
        move_leaves(leaves, shardings, call.name, call.from_single_device, progress=call.progress)
        return treedef.unflatten(leaves)
    paths = leaf_paths(tree)
    # From the first meeting to the last byte: what leaves it in the middle leaves others waiting.
    with breaking_if_left(), exclusive(group.processes if group.moves else ()):
        sent = _sent_by_one(leaves, group, call) if group.has_local else set[int]()
        agreement = require_agreement(
            call.name, among=group.processes, timeout=call.timeout, moves=group.moves
        )
        # Alone there is nobody to agree with, and to say so takes as long as the rest of the call.
        with agreement if group.processes else nullcontext(Facts()) as facts:
            # 1 and 2. An error of one process is an error on all.
            reads = call.read is not None
            shardings = targets(tree, specs, mesh, call.name, call.prefix, accept_structs=reads)
            if reads:
                _check_memory(call.name, leaves, shardings)
            if group.processes:
                rows = _rows(leaves, paths, shardings, sent, call.prefix)
                facts.describe(rows, group.processes, _COMPARED_BYTES[call.check])
        if call.read is not None:  # 3
            _fill_structs(leaves, paths, shardings, group, call, call.read)
        move_leaves(  # 4
            leaves, shardings, call.name, call.from_single_device, sent, progress=call.progress
        )
        if group.processes:
            made, names = [leaves[i] for i in shardings], [paths[i] for i in shardings]
            set_origin(made, group.processes, last_meeting(), names)
    return treedef.unflatten(leaves)


_ALONE = _Group([], has_local=False, moves=False)


def _group_of(leaves: Sequence[Any], meshes: Sequence[AnyMesh], call: Call) -> _Group:
    local = [x for x in leaves if call.sends_local and _is_at_one_process(x)]
    # A process that has a part of the tree makes the call, even with no device of the new mesh.
    has_part = any(isinstance(x.sharding, NamedSharding) and not is_spread(x) for x in local)
    senders = [jax.process_index()] if has_part else []
    processes = participating_processes(leaves, meshes, senders)
    if not processes:
        return _ALONE
    moves = bool(local) or any(map(is_spread, leaves))
    return _Group(processes, has_local=bool(local), moves=moves)


def _rows(
    leaves: Sequence[Any],
    paths: Sequence[str],
    shardings: Mapping[int, NamedSharding],
    sent: Container[int],
    prefix: str,
) -> Iterator[tuple[str, Any, list[Sharding]]]:
    """What processes compare of each leaf that is placed; see `Facts.describe`."""
    for i, target in shardings.items():
        leaf = leaves[i]
        compared = shardings_to_compare(leaf, target, i in sent)
        if i in sent:  # has no values on the other processes
            leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        yield path_under(prefix, paths[i]), leaf, compared


def _check_memory(
    where: str, leaves: Sequence[Any], shardings: Mapping[int, NamedSharding]
) -> None:
    """Raises `DoesNotFitError` unless there is host memory for what `read` returns, leaf by leaf.

    JAX gets a copy of each shard. On devices that use host memory it may make another, to keep.
    """
    # A shard is read once, copied for each device that holds it, and freed before the next leaf.
    meter = Meter()
    for i, target in shardings.items():
        struct = leaves[i]
        if not isinstance(struct, jax.ShapeDtypeStruct) or not target.addressable_devices:
            continue
        shards = regions_here(target, struct.shape).values()
        returned = sum(math.prod(region_shape(region)) for region in set(shards))
        copied = sum(math.prod(region_shape(region)) for region in shards)
        full = tuple((0, length) for length in struct.shape)
        kept = items_on_host(target, struct.shape, full)
        meter.add((returned + copied + kept) * struct.dtype.itemsize)
        meter.add(-(returned + copied) * struct.dtype.itemsize)
    if lacking := lacking_memory(meter.peak):
        why, free = lacking
        raise DoesNotFitError(
            f"{where}: the arrays that `read` returns, and their copies, need {why} Shard them over"
            " more processes.",
            meter.peak,
            free,
        )


def _fill_structs(
    leaves: list[Any],
    paths: Sequence[str],
    shardings: Mapping[int, NamedSharding],
    group: _Group,
    call: Call,
    read: Read,
) -> None:
    """Replaces each struct by an array of what `read` returns, sharded as it will be."""
    structs = [i for i in shardings if isinstance(leaves[i], jax.ShapeDtypeStruct)]
    # If `read` fails on one process, all stop before any other leaf moves.
    with require_agreement(
        call.name,
        phase="read",
        among=group.processes,
        timeout=call.timeout,
        works=True,
        moves=group.moves,
    ) as facts:
        for i in show_progress(structs, call.name, show=call.progress):
            leaves[i] = read_shards(read, paths[i], leaves[i], shardings[i])
            if group.processes and leaves[i].nbytes <= _COMPARED_BYTES[call.check]:
                name = path_under(call.prefix, paths[i]) or "the array"
                facts.share(name, shared_parts(leaves[i], group.processes))


def move_leaves(
    leaves: list[Any],
    targets: Mapping[int, NamedSharding],
    where: str,
    from_single_device: Move,
    sent: Container[int] = (),
    *,
    progress: bool = False,
) -> None:
    """Moves leaves to their targets, by index, and replaces them in `leaves`, without checks.

    One process has the leaves `sent`, and sends them to others.
    """
    # Leaves that move in one way on one mesh do so in one call, and where that compiles a program,
    # in one program. A progress bar needs a call for each leaf.
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, target in targets.items():
        move = transfer_across_processes
        if i not in sent:
            move = choose_move(leaves[i], target, from_single_device)
        if move is not None:
            key = (move, target.mesh, i if progress else None)
            groups.setdefault(key, []).append(i)
    for (move, *_), group in show_progress([*groups.items()], where, show=progress):
        moved = move([leaves[i] for i in group], [targets[i] for i in group])
        for i, array in zip(group, moved, strict=True):
            leaves[i] = array


# ------------------------------------------------------------------ leaves of one process


def _is_at_one_process(x: Any) -> bool:
    is_live = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return is_live and len(processes_of(x.sharding)) == 1


def _sent_by_one(leaves: Sequence[Any], group: _Group, call: Call) -> set[int]:
    """The leaves that are local to one process, and to the others an array on its devices.

    A leaf that is local to every process belongs to each, and is not sent.
    """

    def combine(messages: list[bytes]) -> bytes:
        return bytes(any(flags) and not all(flags) for flags in zip(*messages, strict=False))

    options: MeetingOptions = {"among": group.processes, "timeout": call.timeout}
    options["phase"] = "local leaves"
    with all_or_none(call.name, combine, **options) as messages:
        messages.own = bytes(map(is_spread, leaves))
    return {i for i, is_sent in enumerate(messages.answer) if is_sent}


def shardings_to_compare(leaf: Any, target: NamedSharding, sent: bool = False) -> list[Sharding]:
    """The target of a leaf, and its current sharding if other processes know the leaf too."""
    return [target, leaf.sharding] if sent or is_spread(leaf) else [target]

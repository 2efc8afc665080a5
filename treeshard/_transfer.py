"""Moving trees to the devices of a mesh, and from one layout to another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import tree_flatten

from treeshard._across import company, facts_of, is_spread
from treeshard._agreement import agreeing
from treeshard._gather import gather_at
from treeshard._mesh import AnyMesh
from treeshard._own_shards import Read, filled
from treeshard._paths import leaf_paths, path_under
from treeshard._processes import AS_LONG_AS_IT_TAKES, TIMEOUT, together
from treeshard._progress import with_bar
from treeshard._spec_trees import SpecCarrier, specs_of_leaves
from treeshard._specs import is_logical, is_spec
from treeshard._targets import fit, fit_struct, mesh_for, meshes_of, resolver, targets
from treeshard._ways import Way, from_one_device, through_host, unchanged, way


def shard(
    tree: Any,
    specs: Any,
    mesh: AnyMesh | None = None,
    *,
    read: Read | None = None,
    progress: bool = False,
    timeout: float = TIMEOUT,
) -> Any:
    """Places every array of a tree on the devices of a mesh, as its spec says.

    To each device goes its own part only: of a leaf of shape `(d0, d1)` with `P("fsdp")`,
    `(d0 / fsdp, d1)`. All leaves are checked before the first one moves. Nothing is compiled
    for arrays on the host or on a single device (these pass through the host); arrays that lie
    on several devices move as by `reshard`.

    On a mesh of several processes all of them make the call, each with the whole tree, and each
    takes its own shards out of it: nothing goes over the network, so nobody compares the numbers,
    which must be the same everywhere. Nor need the tree be anywhere: leaves that are
    `jax.ShapeDtypeStruct`s are filled by `read`, shard by shard.

    Args:
        tree: Any pytree of numpy and JAX arrays. Other leaves, Python scalars among them,
            pass through untouched.
        specs: A tree of `PartitionSpec`s or `NamedSharding`s, a prefix of one, or a `Plan`.
            Leaves whose spec is `None` stay as they are. A tuple of logical names is resolved
            by the rules of `logical_axis_rules`.
        mesh: The mesh; by default that of the `NamedSharding`, of the `Plan`, or the one in
            force.
        read: What fills leaves that are `jax.ShapeDtypeStruct`s: takes a leaf's path and the
            index of a shard, a slice a dim with its start and stop, and returns that part, in
            the leaf's dtype. Asked once for each shard of which this process has a copy, leaf by
            leaf.
        progress: Whether to show a bar, a step a leaf (needs `tqdm`); leaves are then placed one
            by one.
        timeout: Seconds that other processes are waited for.

    Returns:
        The tree with `jax.Array`s in place of its arrays. It never shares memory with numpy
        arrays it came from. 64-bit numbers become 32-bit ones unless JAX's x64 mode is on, as
        with `jnp.asarray`. A `jax.Array` that lies right already comes back as the same object,
        and others may share memory with the result: donating it may delete the source.

    Raises:
        UnknownAxisError: If a spec names an axis that the mesh does not have.
        SpecError: If a spec names an axis twice, is longer than the leaf's rank, does not
            divide a dim, or leaves one `UNCONSTRAINED`; or if `specs` does not fit the tree.
        DeletedLeafError: If a leaf was deleted or donated.
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct` (without `read`), masked, or of a
            dtype that JAX does not have.
        NoMeshError: If there is no mesh, or only an `AbstractMesh`, which has no devices.
        MismatchError: If `read` returns another shape or dtype than was asked for.
        ProcessError: If processes do not make the same call, with the same leaves, specs and
            mesh, or one does not make it within `timeout`, or fails. No leaf is placed.
        ImportError: If `progress` is asked for and `tqdm` is not installed.

    Examples:
        >>> tree = shard({"w": np.ones((16, 4)), "name": "mlp"}, P("fsdp"), make_mesh("fsdp=8"))
        >>> tree["w"].sharding.spec, tree["w"].addressable_shards[0].data.shape
        (P('fsdp',), (2, 4))

        Of an array too large for the host, part by part:

        >>> rows = lambda path, index: np.arange(index[0].start, index[0].stop, dtype="int32")
        >>> struct = jax.ShapeDtypeStruct((16,), "int32")
        >>> shard(struct, P("fsdp"), make_mesh("fsdp=8"), read=rows).addressable_shards[1].data
        Array([2, 3], dtype=int32)
    """
    return place(
        tree, specs, mesh, "shard", through_host, read=read, progress=progress, timeout=timeout
    )


def reshard(tree: Any, specs: Any, mesh: AnyMesh | None = None, *, timeout: float = TIMEOUT) -> Any:
    """Moves a tree that lies on devices to other specs or another mesh, device to device.

    What lies right already stays. What moves between the same devices does so in one compiled
    program for the whole tree. Leaves on a single device are copied to all others first, so for
    a moment each device holds these whole (`shard` takes them through the host instead).

    Across processes, all that hold devices of the one mesh or the other make the call. Between
    meshes of the same devices in the same order it is again one program; else parts go from
    those that hold them to those that need them, leaf by leaf through the host. Leaves that lie
    on devices of this process alone go to a mesh of several as by `shard`: they must be the same
    on each.

    Args:
        tree: Any pytree. Numpy leaves are placed as `shard` does.
        specs: A tree of `PartitionSpec`s or `NamedSharding`s, a prefix of one, or a `Plan`.
            Leaves whose spec is `None` stay as they are.
        mesh: The mesh; by default that of the `NamedSharding`, of the `Plan`, or the one in
            force.
        timeout: Seconds that other processes are waited for.

    Returns:
        The tree, placed anew. It may share memory with the tree it came from: donating it
        may delete the source. Between meshes of different devices of one process it is JAX that
        chooses the way: shards that both sides have go directly, others through the host.

    Raises:
        UnknownAxisError, SpecError, DeletedLeafError, LeafError, NoMeshError, ProcessError: As
            `shard`.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> tree = shard({"w": np.ones((8, 8))}, P("fsdp"), mesh)
        >>> reshard(tree, P(None, ("fsdp", "data")), mesh)["w"].sharding.spec
        P(None, ('fsdp', 'data'))
    """
    return place(tree, specs, mesh, "reshard", from_one_device, timeout=timeout)


def place(
    tree: Any,
    specs: Any,
    mesh: AnyMesh | None,
    where: str,
    spread: Way,
    *,
    prefix: str = "",
    read: Read | None = None,
    progress: bool = False,
    timeout: float = TIMEOUT,
) -> Any:
    """Checks everything, then moves group by group; `spread` is for single-device arrays."""
    leaves, treedef = tree_flatten(tree)
    among = company(leaves, meshes_of(specs, mesh)) if jax.process_count() > 1 else []
    fits = fit if read is None else fit_struct
    paths = leaf_paths(tree) if among or read else []
    with agreeing(where, among=among, timeout=timeout) as facts:
        goals = targets(tree, leaves, specs, mesh, where, prefix, fits)
        if among:
            facts |= facts_of(
                (path_under(prefix, paths[i]), leaves[i], _ends(leaves[i], target))
                for i, target in goals.items()
            )
    if read is not None:
        structs = [i for i in goals if isinstance(leaves[i], jax.ShapeDtypeStruct)]
        # First of all, since it may fail on one process, and then must on all.
        with together(where, among=among, timeout=AS_LONG_AS_IT_TAKES):
            for i in with_bar(structs, where, show=progress):
                leaves[i] = filled(read, paths[i], leaves[i], goals.pop(i))
    groups: dict[tuple[Any, ...], list[tuple[int, NamedSharding]]] = {}
    for i, target in goals.items():
        chosen = way(leaves[i], target, spread)
        if chosen is not None:
            groups.setdefault((chosen, target.mesh, i if progress else None), []).append(
                (i, target)
            )
    for (move, *_), group in with_bar([*groups.items()], where, show=progress):
        moved = move([leaves[i] for i, _ in group], [target for _, target in group])
        for (i, _), array in zip(group, moved, strict=True):
            leaves[i] = array
    return treedef.unflatten(leaves)


def _ends(leaf: Any, target: NamedSharding) -> list[Sharding]:
    """Where a leaf goes, and where it comes from if not from each process's own memory."""
    return [target, leaf.sharding] if is_spread(leaf) else [target]


# ------------------------------------------------------------------ leaf by leaf


def make_shard_and_gather_fns(specs: Any, mesh: AnyMesh | None = None) -> tuple[Any, Any]:
    """Makes a function per spec that places a leaf, and one that brings it back to the host.

    `jax.tree.map(lambda f, x: f(x), shard_fns, tree)` does what `shard(tree, specs, mesh)`
    does, for loops that see one leaf at a time, as when a file is read.

    Args:
        specs: A tree of `PartitionSpec`s or `NamedSharding`s, or a `Plan`.
        mesh: The mesh; by default that of each `NamedSharding`, of the `Plan`, or the one in
            force now.

    Returns:
        Two trees of functions with the structure of `specs`. Where a spec stands for a subtree
        the function takes that subtree. Where `specs` has `None` there is a function too, which
        returns its argument.

        They raise as `shard` and `gather` do, and name the path that the spec has in `specs`.

    Raises:
        SpecError: If `specs` holds something that is no spec.
        NoMeshError: If a spec needs a mesh and there is none, or only an `AbstractMesh`.

    Examples:
        >>> shard_fns, gather_fns = make_shard_and_gather_fns({"w": P("fsdp")}, make_mesh("fsdp=8"))
        >>> tree = jax.tree.map(lambda f, x: f(x), shard_fns, {"w": np.ones(8)})
        >>> jax.tree.map(lambda f, x: f(x), gather_fns, tree)["w"].shape
        (8,)

    Source:
        EasyLM and EasyDeL's function of this name.
    """
    if isinstance(specs, SpecCarrier):
        specs, mesh = specs.specs, mesh or specs.mesh

    def stop(x: Any) -> bool:
        return x is None or is_spec(x) or is_logical(x)

    found, treedef = tree_flatten(specs, is_leaf=stop)
    found = specs_of_leaves(specs, treedef.unflatten(range(len(found))), resolve=resolver(mesh))
    shard_fns: list[Callable[[Any], Any]] = []
    gather_fns: list[Callable[[Any], Any]] = []
    for path, spec in zip(leaf_paths(specs, is_leaf=stop), found, strict=True):
        if spec is None:
            shard_fns.append(unchanged)
            gather_fns.append(unchanged)
        else:
            on = mesh_for(spec, mesh, "make_shard_and_gather_fns")
            shard_fns.append(partial(_shard_at, path, spec, on))
            gather_fns.append(partial(gather_at, path))
    return treedef.unflatten(shard_fns), treedef.unflatten(gather_fns)


def _shard_at(path: str, spec: Any, mesh: Mesh, x: Any) -> Any:
    return place(x, spec, mesh, "shard", through_host, prefix=path)

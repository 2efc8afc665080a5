"""Moving trees to the devices of a mesh, and from one layout to another."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._gather import gather_at, is_key, second_handle, to_read
from treeshard._mesh import AnyMesh
from treeshard._paths import leaf_paths
from treeshard._spec_trees import SpecCarrier, specs_of_leaves
from treeshard._specs import is_logical, is_spec
from treeshard._targets import mesh_for, resolver, targets

# Moves arrays to their targets, one to one.
_Way = Callable[[list[Any], list[NamedSharding]], list[jax.Array]]


def shard(tree: Any, specs: Any, mesh: AnyMesh | None = None) -> Any:
    """Places every array of a tree on the devices of a mesh, as its spec says.

    To each device goes its own part only: of a leaf of shape `(d0, d1)` with `P("fsdp")`,
    `(d0 / fsdp, d1)`. All leaves are checked before the first one moves. Nothing is compiled
    for arrays on the host or on a single device (these pass through the host); arrays that lie
    on several devices move as by `reshard`.

    Args:
        tree: Any pytree of numpy and JAX arrays. Other leaves, Python scalars among them,
            pass through untouched.
        specs: A tree of `PartitionSpec`s or `NamedSharding`s, a prefix of one, or a `Plan`.
            Leaves whose spec is `None` stay as they are. A tuple of logical names is resolved
            by the rules of `logical_axis_rules`.
        mesh: The mesh; by default that of the `NamedSharding`, of the `Plan`, or the one in
            force.

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
        LeafError: If a leaf is a tracer, a `ShapeDtypeStruct`, masked, or of a dtype that JAX
            does not have.
        NoMeshError: If there is no mesh, or only an `AbstractMesh`, which has no devices.

    Examples:
        >>> tree = shard({"w": np.ones((16, 4)), "name": "mlp"}, P("fsdp"), make_mesh("fsdp=8"))
        >>> tree["w"].sharding.spec, tree["w"].addressable_shards[0].data.shape
        (P('fsdp',), (2, 4))
    """
    return _place(tree, specs, mesh, "shard", _through_host)


def reshard(tree: Any, specs: Any, mesh: AnyMesh | None = None) -> Any:
    """Moves a tree that lies on devices to other specs or another mesh, device to device.

    What lies right already stays. What moves between the same devices does so in one compiled
    program for the whole tree. Leaves on a single device are copied to all others first, so for
    a moment each device holds these whole (`shard` takes them through the host instead).

    Args:
        tree: Any pytree. Numpy leaves are placed as `shard` does.
        specs: A tree of `PartitionSpec`s or `NamedSharding`s, a prefix of one, or a `Plan`.
            Leaves whose spec is `None` stay as they are.
        mesh: The mesh; by default that of the `NamedSharding`, of the `Plan`, or the one in
            force.

    Returns:
        The tree, placed anew. It may share memory with the tree it came from: donating it
        may delete the source. Between meshes of different devices it is JAX that chooses the
        way: shards that both sides have go directly, others through the host.

    Raises:
        UnknownAxisError, SpecError, DeletedLeafError, LeafError, NoMeshError: As `shard`.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> tree = shard({"w": np.ones((8, 8))}, P("fsdp"), mesh)
        >>> reshard(tree, P(None, ("fsdp", "data")), mesh)["w"].sharding.spec
        P(None, ('fsdp', 'data'))
    """
    return _place(tree, specs, mesh, "reshard", _from_one_device)


def _place(
    tree: Any, specs: Any, mesh: AnyMesh | None, where: str, spread: _Way, prefix: str = ""
) -> Any:
    """Checks everything, then moves group by group; `spread` is for single-device arrays."""
    leaves, treedef = tree_flatten(tree)
    groups: dict[tuple[_Way, AnyMesh], list[tuple[int, NamedSharding]]] = {}
    for i, target in targets(tree, leaves, specs, mesh, where, prefix).items():
        way = _way(leaves[i], target, spread)
        if way is not None:
            groups.setdefault((way, target.mesh), []).append((i, target))
    for (way, _), group in groups.items():
        moved = way([leaves[i] for i, _ in group], [target for _, target in group])
        for (i, _), array in zip(group, moved, strict=True):
            leaves[i] = array
    return treedef.unflatten(leaves)


def _way(leaf: Any, target: NamedSharding, spread: _Way) -> _Way | None:
    if not isinstance(leaf, jax.Array):
        return _through_host
    here = leaf.sharding
    if here.is_equivalent_to(target, leaf.ndim):
        # The same placement on another mesh gets its new name without a copy: a compiled step
        # tells them apart.
        same_mesh = isinstance(here, NamedSharding) and here.mesh == target.mesh
        return None if same_mesh else _by_jax
    if len(here.device_set) == 1:
        return _by_jax if target.is_fully_replicated else spread
    if isinstance(here, NamedSharding) and _devices(here.mesh) == _devices(target.mesh):
        return _compiled
    return _by_jax


def _devices(mesh: AnyMesh) -> list[Any]:
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def _by_jax(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    # Where shards differ JAX goes through the host, and keeps that copy on what it was given.
    return jax.device_put([x if is_key(x) else second_handle(x) for x in arrays], into)


def _compiled(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    return jax.jit(_unchanged, out_shardings=into)(arrays)


def _from_one_device(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    # Cut up on its one device, each shape would need a program of its own.
    return _compiled(jax.device_put(arrays, [x.update(spec=PartitionSpec()) for x in into]), into)


class _Lent(np.ndarray):
    """A view that lives as long as `self[...]` or a view of that: numpy keeps each of them on
    the next, where among plain arrays it would keep the owner of the memory alone."""


def _through_host(arrays: list[Any], into: list[NamedSharding]) -> list[jax.Array]:
    sources = [_source(x) for x in arrays]
    lent = [x.view(_Lent) for x in sources]
    in_use = [weakref.ref(x) for x in lent]
    placed = jax.device_put([np.asarray(x[...]) for x in lent], into)
    del lent
    jax.block_until_ready(placed)  # until then the sources are still being read
    for i, array in enumerate(arrays):
        # On the CPU platform JAX takes over memory that happens to be aligned, whatever it is
        # told, and keeps it alive. To see that afterwards is cheaper than to copy in advance.
        if in_use[i]() is not None:
            placed[i] = jax.device_put(np.array(sources[i]), into[i])
        if is_key(array):
            placed[i] = jax.random.wrap_key_data(placed[i], impl=jax.random.key_impl(array))
    return placed


def _source(x: Any) -> np.ndarray:
    """The numbers of an array on the host or on one device, in a dtype that JAX has."""
    if isinstance(x, jax.Array):
        return np.asarray(to_read(jax.random.key_data(x) if is_key(x) else x))
    with np.errstate(all="ignore"):  # beyond float32 comes inf, as in jnp.asarray
        return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))


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
            shard_fns.append(_unchanged)
            gather_fns.append(_unchanged)
        else:
            on = mesh_for(spec, mesh, "make_shard_and_gather_fns")
            shard_fns.append(partial(_shard_at, path, spec, on))
            gather_fns.append(partial(gather_at, path))
    return treedef.unflatten(shard_fns), treedef.unflatten(gather_fns)


def _shard_at(path: str, spec: Any, mesh: Mesh, x: Any) -> Any:
    return _place(x, spec, mesh, "shard", _through_host, path)


def _unchanged(x: Any) -> Any:
    return x

"""Keeping this device's part of a tree, and gathering it whole, inside `shard_map`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import DTypeLike

from treeshard._boxes import Leaf, Partitioned, box_up, dims_over, leaves_with_specs
from treeshard._errors import SpecError, UnknownAxisError, listed, warn
from treeshard._mean_grads import (
    INSTEAD_OF_GATHER,
    Gathering,
    gather_by,
    still_differs,
    vary_array,
    varying,
)
from treeshard._mesh import axis_tuple, check_bound, manual_axes
from treeshard._specs import axes_of, entries, is_array, project, without_axes
from treeshard._tactics import fsdp

AxisNames = str | Sequence[str]


def fold_rng_over_axis(rng: jax.Array, axis_names: AxisNames) -> jax.Array:
    """Makes a key that differs on every device along an axis, such as for dropout.

    Args:
        rng: A key, the same on these devices.
        axis_names: The axes along which it shall differ: those that shard the batch.

    Returns:
        `rng` with this device's row-major index along the axes folded in.

    Raises:
        UnknownAxisError: If an axis is not bound here.

    Examples:
        >>> def draw(key):
        ...     return jax.random.uniform(fold_rng_over_axis(key, "data"), (1,))
        >>> mesh = make_mesh("data=8")
        >>> noise = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P("data"))
        >>> len(set(noise(jax.random.key(0)).tolist()))
        8

    Source:
        The function of this name in the UvA deep-learning tutorials.
    """
    axes = axis_tuple(axis_names, "fold_rng_over_axis")
    check_bound(axes, "fold_rng_over_axis", "one key serves the whole batch")
    return jax.random.fold_in(rng, lax.axis_index(axes)) if axes else rng


# ------------------------------------------------------------------ keep


def shard_params(
    params: Any, axis_names: AxisNames, specs: Any = None, *, min_size: int = 2**18
) -> Any:
    """Keeps this device's part of parameters that every device holds whole.

    Axes that shard a leaf already stay, so trees can be sharded on one axis after another.

    Args:
        params: Any pytree. Leaves that are no arrays pass through.
        axis_names: The axis to shard over, or several, whose sizes multiply.
        specs: How each leaf shall be sharded: a tree of specs, a prefix of one, or a `Plan`.
            Their axes outside of `axis_names` are taken to shard the leaf already. Without
            specs, the largest dim that is free and divisible is sharded (among equals the
            last), and the leaf put into a `Partitioned` box that says so.
        min_size: Without specs, leaves of fewer elements stay whole.

    Returns:
        The same tree, with a box around each leaf that was sharded without specs.

    Raises:
        SpecError: If `specs` does not fit the tree or a leaf, or does not divide a leaf.
        UnknownAxisError: If an axis is not bound here, or the mesh lacks one of the specs'.

    Warns:
        ShardingWarning: If leaves are sharded on the axis already, or no dim of them is free
            and divisible. They stay as they are. With specs, the former is only known under
            `check_vma=True`, where such leaves vary over the axis.

    Examples:
        >>> def init(key):
        ...     return shard_params(jax.random.normal(key, (16, 8)), "fsdp", P("fsdp"))
        >>> mesh = make_mesh("fsdp=8")
        >>> init = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P("fsdp"))
        >>> init(jax.random.key(0)).shape
        (16, 8)

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP.
    """
    return shard_tree(params, axis_names, specs, min_size, Partitioned)


@jax.named_scope("shard_params")
def shard_tree(params: Any, axis_names: AxisNames, specs: Any, min_size: int, kind: Any) -> Any:
    """`shard_params`, with the kind of box for leaves that have none."""
    axes = axis_tuple(axis_names, "shard_params")
    check_bound(axes, "shard_params", "`treeshard.shard` places whole trees")
    leaves, treedef = leaves_with_specs(params, specs, "shard_params")
    mesh, kept, bad = _mesh_here(axes), Facts(), Facts()
    if specs is None:
        targets = [_chosen(leaf, axes, mesh, min_size, kept) for leaf in leaves]
    else:
        targets = [_asked(leaf, axes, mesh, kept, bad) for leaf in leaves]
    if bad:
        raise SpecError(f"shard_params: {listed('these leaves cannot be sharded:', bad)}")
    if kept:
        warn(f"shard_params: {listed('these leaves stay as they are:', kept)}")
    out: list[Any] = []
    for leaf, spec in zip(leaves, targets, strict=True):
        if spec is None:
            out.append(leaf.unchanged())
            continue
        part = _part(leaf.value, dims_over(spec, axes))
        is_new = specs is None and leaf.box is None
        out.append(box_up(kind, part, spec) if is_new else leaf.resharded(part, spec))
    return treedef.unflatten(out)


class Facts(list[str]):
    """What there is to say of leaves."""

    def add(self, leaf: Leaf, fact: str) -> None:
        self.append(f"{leaf.path or 'the array'}: {fact}")


def _mesh_here(axes: Sequence[str]) -> AbstractMesh:
    sizes = {**jax.sharding.get_abstract_mesh().shape, **{a: lax.axis_size(a) for a in axes}}
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def _chosen(
    leaf: Leaf, axes: tuple[str, ...], mesh: AbstractMesh, min_size: int, kept: Facts
) -> PartitionSpec | None:
    """The spec of a leaf once its largest free dim is sharded; `None` if it stays."""
    if not axes or not is_array(leaf.value) or leaf.value.ndim == 0:
        return None
    if set(axes) & set(leaf.axes):
        kept.add(leaf, f"it is sharded as {leaf.spec} already.")
        return None
    now, shape = leaf.spec or PartitionSpec(), list(leaf.value.shape)
    for dim, others in dims_over(now, mesh.axis_names):
        shape[dim] *= lax.axis_size(others)
    whole = jax.ShapeDtypeStruct(shape, leaf.value.dtype)
    spec, notes = fsdp(axes).refine(now, mesh, leaf.path, whole, min_size)
    for note in notes:
        if note.kind == "no-dim":
            kept.add(leaf, note.why)
    return None if spec == now else spec


def _asked(
    leaf: Leaf, axes: tuple[str, ...], mesh: AbstractMesh, kept: Facts, bad: Facts
) -> PartitionSpec | None:
    """The spec of a leaf if `axes` are to shard it; `None` if it stays."""
    if leaf.spec is None or not is_array(leaf.value) or not set(axes) & set(leaf.axes):
        return None
    if varying(leaf.value) & set(axes) & set(leaf.axes):
        kept.add(leaf, f"it varies over the axes of {leaf.spec}, so it is sharded already.")
        return None
    if fact := _out_of_order(leaf.spec, axes):
        bad.add(leaf, fact)
    others = [axis for axis in leaf.axes if axis not in axes]
    for loss in project(without_axes(leaf.spec, others), mesh, leaf.value.shape)[1]:
        bad.add(leaf, loss.why)
    return leaf.spec


def _out_of_order(spec: PartitionSpec, axes: Sequence[str]) -> str | None:
    """Why a dim that several axes shard cannot be split, or gathered, over some of them."""
    for dim, here in dims_over(spec, axes):
        known = axes_of(entries(spec)[dim])
        if known[-len(here) :] != here:
            return (
                f"{spec} splits dim {dim} by {known}, the outermost first, and only the innermost"
                f" can come or go alone: name all of them, or write {here} last."
            )
    return None


def _part(x: Any, dims: Sequence[tuple[int, tuple[str, ...]]]) -> Any:
    for dim, axes in dims:
        length = x.shape[dim] // lax.axis_size(axes)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * length, length, dim)
    return x


# ------------------------------------------------------------------ gather


def gather_params(
    params: Any,
    axis_names: AxisNames | None = None,
    specs: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> Any:
    """Gathers parameters of which every device has a part; their gradients are means.

    Forwards, each leaf is all-gathered over those of `axis_names` that shard it. Backwards,
    its gradient is reduce-scattered and divided by the number of devices.

    The gradients of `gather_params` and `sync_gradients` together are those of the mean
    over all devices if the loss is the mean over *this device's* batch, and if both are
    given the same axes: all that shard the batch, and all that shard parameters for memory.
    Where JAX keeps track of what varies (`check_vma=True`), the gradient of a loss that was
    reduced already, by `jax.lax.pmean`, would be divided once more: return `vary(loss,
    axis_names)` then, or use `value_and_grad`, which is right for every loss. The gradient
    must be taken inside `shard_map`, and in reverse mode: there is no `jax.jvp`.

    Inside a scan over layers, with `jax.checkpoint` around the layer, no more than a layer
    or two are whole at a time; without it the gathered weights are kept for the backward
    pass. The leaves of a slice have the specs that `layer_specs` gives. Call it on `vary`ed
    parameters: the gradients of leaves that no axis shards are then averaged once, by
    `sync_gradients`, and not in every layer.

    Args:
        params: Any pytree. Leaves that are no arrays pass through.
        axis_names: The axes to gather over, and to average gradients over; by default all
            over which the code runs once per device here.
        specs: How `params` lies: a tree of specs, a prefix of one, or a `Plan`; `None` in it
            leaves a subtree as it is. By default boxes are read (`Partitioned`, Flax's),
            and what is in no box is whole.
        dtype: What floating leaves are converted to before they are sent, such as
            `jnp.bfloat16`, for half the bytes. Gradients come back in it, and are converted
            to the dtype of their parameters where each device has its part.

    Returns:
        The same tree. Leaves that some other axis still shards stay in their boxes; nnx
        variables stay variables; other boxes are gone.

    Raises:
        SpecError: If `specs` does not fit the tree or a leaf, or a dim cannot be gathered
            over an axis because one further in stays.
        UnknownAxisError: If an axis is not bound here, or the mesh lacks one of the specs'.

    Examples:
        >>> def loss(params, x):
        ...     return jnp.mean(x @ gather_params(params, "fsdp", P("fsdp")))
        >>> def step(params, x):
        ...     return sync_gradients(jax.grad(loss)(params, x), "fsdp", P("fsdp"))
        >>> mesh, w, x = make_mesh("fsdp=8"), jnp.ones((8, 2)), jnp.ones((16, 8))
        >>> f = jax.shard_map(step, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
        >>> f(w, x)[0]
        Array([0.5, 0.5], dtype=float32)

    Source:
        The function of this name in the UvA deep-learning tutorials on FSDP; ZeRO stage 3,
        Rajbhandari et al. 2020, arXiv:1910.02054.
    """
    axes = _axes_or_all(axis_names, "gather_params")
    check_bound(axes, "gather_params", INSTEAD_OF_GATHER)
    leaves, treedef = leaves_with_specs(params, specs, "gather_params")
    bad = Facts()
    for leaf in leaves:
        if leaf.spec is not None and (fact := _out_of_order(leaf.spec, axes)):
            bad.add(leaf, fact)
    if bad:
        raise SpecError(f"gather_params: {listed('these leaves cannot be gathered:', bad)}")
    return treedef.unflatten([_gathered(leaf, axes, dtype) for leaf in leaves])


def _axes_or_all(axis_names: AxisNames | None, where: str) -> tuple[str, ...]:
    if axis_names is not None:
        return axis_tuple(axis_names, where)
    here = manual_axes()
    if not here:
        raise UnknownAxisError(
            f"{where}: no axis is bound here. Axes are bound inside `jax.shard_map`; outside,"
            f" {INSTEAD_OF_GATHER}."
        )
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in here)


def _gathered(leaf: Leaf, axes: tuple[str, ...], dtype: DTypeLike | None) -> Any:
    x = leaf.value
    if leaf.spec is None or not is_array(x):
        return leaf.unchanged()
    alike = tuple(a for a in axes if a not in leaf.axes and not still_differs(x, a))
    own = x.dtype
    wire = own if dtype is None or not jnp.issubdtype(own, jnp.floating) else jnp.dtype(dtype)
    how = Gathering(dims_over(leaf.spec, axes), alike, wire, own)
    whole = gather_by(vary_array(x, [a for a in leaf.axes if a in axes]), how)
    return leaf.resharded(whole, without_axes(leaf.spec, axes))

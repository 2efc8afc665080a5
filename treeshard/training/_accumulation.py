"""Gradients of a batch in several passes, reduced once after them.

`jax.shard_map` takes the parts of a batch along the axes of a mesh. If JAX cannot trace `grad_fn`
in `shard_map`, `jax.vmap` does: `grad_fn` closes over the parameters, and inside `shard_map` JAX
cannot differentiate a loop with respect to values from outside.
"""

import math
import operator
import re
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from treeshard._core.arguments import check_function, check_no_refs, describe_argument
from treeshard._core.arrays import StaticSplit, array_text, is_array, is_raw_key
from treeshard._core.contexts import full_over, in_one_pass
from treeshard._core.jax_private import (
    is_in_jit,
    is_tracing,
    show_as,
    varying_axes,
    varying_axes_of_type,
)
from treeshard._core.mean_gather import Reduced
from treeshard._core.mesh import (
    AnyMesh,
    axes_of_type,
    axis_sizes,
    axis_tuple,
    can_wait,
    context_mesh,
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_size,
    manual_axes,
    vary_array,
)
from treeshard._core.origins import origin_of
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._core.specs import UNCONSTRAINED, dims_over, drop_axes, entry_of
from treeshard._core.text import fold_paths
from treeshard._placement.constraint import with_sharding_constraint
from treeshard._planning.plan_in_force import (
    AVERAGES_PARTS,
    IN_MINIBATCHES,
    current_plan,
)
from treeshard.errors import ArgumentError, NoMeshError, SpecError, listed
from treeshard.training._metrics import check_metrics, map_metrics, widen

GradFn = Callable[[Any, Any], tuple[PyTree, PyTree]]
Rows = list[Any]  # the leaves of a batch that are cut; their dim 0 has its rows


def accumulate_gradients(
    grad_fn: GradFn,
    batch: PyTree,
    num_minibatches: int,
    key: jax.Array | None = None,
    *,
    axis_names: str | Sequence[str] | None = None,
) -> tuple[PyTree, PyTree]:
    """Averages gradients over minibatches that run one after another, to save memory.

    The loss must be a mean over rows: not `(losses * mask).sum() / mask.sum()`, nor contrastive.

    Examples:
        >>> def grad_fn(minibatch, key):
        ...     value, grad = jax.value_and_grad(lambda w: (minibatch * w).mean())(2.0)
        ...     return grad, {"value": value, "largest": (minibatch.max(), 1)}
        >>> grad, metrics = accumulate_gradients(grad_fn, jnp.arange(8.0), 4)
        >>> float(grad), float(metrics["value"])  # means
        (3.5, 7.0)
        >>> total, count = metrics["largest"]
        >>> float(total), int(count)
        (22.0, 4)

    The masked mean over-weights rows of minibatches with few unmasked rows: divide by
    `len(losses)`. A contrastive loss and batch norm see only their own minibatch.
    `testing.check_step` reports all three.

    Floating-point metrics are averaged too. `Metrics`, and dicts of pairs (sum, count), are added
    up. Metrics are added in at least 32 bits: of bfloat16, means are bfloat16 and sums are float32.
    Gradients are added in the dtype that `grad_fn` returns. No row is moved: each minibatch takes
    as many rows from each device.

    Without `axis_names`, `grad_fn` communicates once per minibatch. With them, there is one
    reduction after the loop, and each device needs memory for one full gradient:

    - on Explicit axes, gradients of weights in products wait for one sum, after the loop;
    - on Auto axes under `jit_step`, `grad_fn` is called for each device's rows of a minibatch, as
      by `jax.vmap` with these `axis_name`s, and the result is the mean of these means;
    - inside `shard_map`, `grad_fn` returns this device's gradients of full parameters, not reduced,
      and they are averaged at the end.

    Args:
        grad_fn: Called as `grad_fn(minibatch, key)`; returns `(grads, metrics)`, two pytrees of
            arrays.
        batch: A pytree of arrays with a common first dim, of `num_minibatches * n` rows. `grad_fn`
            closes over other arrays, such as weights of classes or a mask of positions: each array
            here is cut. Scalars and keys go to each minibatch as they are, also a raw key of two
            uint32 unless the batch has two rows.
        num_minibatches: The number of minibatches.
        key: Split into one key for each call of `grad_fn`; without it `grad_fn` gets `None`.
        axis_names: The axes that shard the batch.

    Returns:
        The means of the gradients, and the means or sums of the metrics: over the minibatches,
        and with `axis_names` over the devices along these axes too.

    Raises:
        SpecError: If arrays of the batch differ in their first dim; lists all of them. If the
            number of rows is not divisible by the number of minibatches, or the rows of a minibatch
            not by the size of the axes; lists all such leaves, and the nearest sizes that are.
            If `num_minibatches` is less than 1. Inside `shard_map`, if gradients are not of this
            device's rows alone: JAX has summed them along `axis_names`, or each device has its
            shard of them. Lists all of them.
        LeafError: If metrics that are not in `Metrics` or in a pair are integers, booleans or
            keys, which have no mean; lists all of them. If a leaf of the batch is a mutable
            reference (`jax.Ref`).
        ArgumentError: If `grad_fn` is not a function, or `num_minibatches` not an integer.
        UnknownAxisError: If the mesh lacks one of `axis_names`.
        NoMeshError: If `axis_names` is given, no mesh is in force, and the batch is not sharded.

    Source:
        The function of this name in the UvA deep-learning tutorials.
    """
    check_function(grad_fn, "accumulate_gradients(grad_fn, batch, num_minibatches, key)")
    try:
        num_minibatches = operator.index(num_minibatches)
    except TypeError:
        raise ArgumentError(
            f"accumulate_gradients: num_minibatches is {describe_argument(num_minibatches)}, not an"
            " integer. Call `accumulate_gradients(grad_fn, batch, num_minibatches=4)`."
        ) from None
    if num_minibatches < 1:
        raise SpecError(f"accumulate_gradients: num_minibatches is {num_minibatches}, not >= 1.")
    check_no_refs(batch, "accumulate_gradients", "batch")
    names = () if axis_names is None else axis_tuple(axis_names, "accumulate_gradients")
    split, leaves = _rows_in(batch), tree_leaves(batch)
    rows = split.dynamic(leaves)
    _check_lengths(batch, split, num_minibatches)

    dtype_of_each: list[PyTree] = []

    def grads_of_rows(rows: list[Any], key: Any) -> tuple[PyTree, PyTree]:
        grads, metrics = grad_fn(split.combine(rows), key)
        check_metrics(metrics, "accumulate_gradients")
        of_sum = lambda x: jnp.result_type(widen(x))  # noqa: E731
        dtype_of_each[:] = [map_metrics(of_sum, jnp.result_type, metrics)]
        return grads, jax.tree.map(widen, metrics)

    # In a plain `jit`, no mesh is in force.
    mesh = _mesh_of_types(leaves) if is_in_jit() and context_mesh() is None else None
    with nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        # Along axes of a `shard_map` around this call, each device has its part of the batch.
        by_hand = tuple(axis for axis in names if axis in manual_axes())
        mapped = tuple(axis for axis in names if axis not in by_hand)
        parts = _size_of(mapped)
        _check_divides(split.dynamic(leaf_paths(batch)), rows, num_minibatches, parts)
        # A check compares the step with its results in one pass.
        count = 1 if in_one_pass.value else num_minibatches
        keys = None if key is None else jax.random.split(key, count)
        grads_of_minibatch = _checking_gradients(show_as(grads_of_rows, grad_fn), by_hand)
        # On Explicit axes, the types of gradients show which sums wait.
        here = context_mesh()
        has_explicit = here is not None and axes_of_type(here, AxisType.Explicit)
        if parts > 1 and not has_explicit:
            grads, metrics = _accumulate_parts(grads_of_minibatch, rows, count, keys, mapped)
        else:
            step = current_plan()
            rows_of_step = () if step is None else step.rows
            # In JAX, all axes of a product wait together.
            deferred = tuple(dict.fromkeys([*mapped, *rows_of_step])) if parts > 1 else ()
            grads, metrics = _accumulate_passes(grads_of_minibatch, rows, count, keys, deferred)
        if by_hand:
            grads, metrics = _mean_of_devices(grads, metrics, by_hand)
        return grads, jax.tree.map(lambda x, dtype: x.astype(dtype), metrics, dtype_of_each[0])


def _accumulate_passes(
    grad_fn: GradFn, batch: Rows, count: int, keys: Any, deferred: tuple[str, ...]
) -> tuple[PyTree, PyTree]:
    """The means of the gradients, and the means or sums of the metrics, of minibatches."""
    in_passes = partial(_summed_up, grad_fn, count, batch, keys)
    if deferred and is_tracing() and can_wait(context_mesh()):
        from treeshard.training._waiting import accumulate_with_deferred_sum

        grads, metrics = accumulate_with_deferred_sum(in_passes, deferred)
    else:
        grads, metrics = in_passes()
    mean = lambda x: x / count  # noqa: E731
    return jax.tree.map(mean, grads), map_metrics(lambda x: x, mean, metrics)


def _summed_up(
    grad_fn: GradFn,
    count: int,
    batch: Rows,
    keys: Any,
    pinned: Callable[[Any], Any] = lambda total: total,
) -> tuple[PyTree, PyTree]:
    """The sums of the gradients and of the metrics of minibatches.

    `pinned` is applied to each sum in each pass.
    """
    minibatches = [_split(x, count) for x in batch]

    def add(total: Any, minibatch_and_key: tuple[Any, Any]) -> tuple[Any, None]:
        new = jax.tree.map(jnp.add, total, grad_fn(*minibatch_and_key))
        return jax.tree.map(pinned, new), None

    # A scan needs the types of its sums before its first pass.
    types: list[Any] = []

    def typed(minibatch_and_key: tuple[Any, Any]) -> None:
        types.append(jax.tree.map(jax.typeof, grad_fn(*minibatch_and_key)))

    # On a mesh with some Auto axes, the structs that `eval_shape` returns have no sharding.
    jax.eval_shape(show_as(typed, grad_fn), jax.tree.map(lambda x: x[0], (minibatches, keys)))
    zeros = jax.tree.map(_zeros, types[0])
    # `check_step` looks for this name, to run such steps in one pass too.
    with jax.named_scope(IN_MINIBATCHES) if count > 1 else nullcontext():
        return jax.lax.scan(show_as(add, grad_fn), zeros, (minibatches, keys), length=count)[0]


# ------------------------------------------------------------------ the mesh


def _mesh_of_types(leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh in the types of traced arrays, which have it even if no mesh is in force."""
    meshes = [jax.typeof(x).sharding.mesh.abstract_mesh for x in leaves if is_array(x)]
    return next((mesh for mesh in meshes if not mesh.empty), None)


def _size_of(axes: tuple[str, ...]) -> int:
    """The number of parts that some axes split the batch into."""
    if axes and get_incontext_mesh(raise_error=False) is None:
        raise NoMeshError(
            f"accumulate_gradients: no mesh with the axes {axes} was found: none is in force,"
            " and no array of the batch is sharded. Pass it sharded, `shard(batch, specs, mesh)`,"
            " or call it in `with jax.set_mesh(mesh):`."
        )
    return get_axes_size_in_mesh(axes) if axes else 1


# ------------------------------------------------------------------ inside shard_map


def _mean_of_devices(
    grads: PyTree, metrics: PyTree, axes: tuple[str, ...]
) -> tuple[PyTree, PyTree]:
    """The means of the devices' gradients, and the means or sums of their metrics."""
    over_devices = lambda x: jax.lax.pmean(x, axes)  # noqa: E731
    with jax.named_scope(AVERAGES_PARTS):
        grads = jax.tree.map(over_devices, grads)
    return grads, map_metrics(lambda x: jax.lax.psum(x, axes), over_devices, metrics)


def _checking_gradients(grad_fn: GradFn, axes: tuple[str, ...]) -> GradFn:
    """Wraps `grad_fn`. Raises if its gradients are not of this device's rows alone."""

    def run(rows: Rows, key: Any) -> tuple[PyTree, PyTree]:
        grads, metrics = grad_fn(rows, key)
        split = frozenset().union(*map(varying_axes, rows)) if axes else ()
        whys = [_explain_not_own(x, axes, split) for x in tree_leaves(grads)]
        if any(whys):
            # A gradient that does not depend on rows, such as zeros, is its own mean.
            of_rows = _depend_on_rows(grad_fn, rows, key)
            facts = [
                f"{path or 'the gradient'}: {why}"
                for path, why, is_of_rows in zip(leaf_paths(grads), whys, of_rows, strict=True)
                if why and is_of_rows
            ]
            if facts:
                headline = "these are not the gradients of this device's rows alone:"
                raise SpecError(f"accumulate_gradients: {listed(headline, facts, headed=True)}")
        return grads, metrics

    return show_as(run, grad_fn)


def _explain_not_own(grad: Any, axes: Sequence[str], split: Container[str]) -> str:
    """Why the mean of a gradient over `axes` would be wrong; `split` are the axes of the rows."""
    origin = origin_of(grad)
    scattered, averaged = origin if isinstance(origin, Reduced) else ((), ())
    if of_shards := [axis for axis in axes if axis in scattered]:
        return (
            f"each device has its shard of it along {of_shards}. Leave these axes out of"
            " `axis_names`, or gather the parameters before `accumulate_gradients`."
        )
    # Without `check_vma`, types do not show what varies, and JAX does not sum.
    varying = varying_axes(grad)
    summed = [axis for axis in axes if axis in split and axis not in {*varying, *averaged}]
    if summed:
        named = repr(entry_of(summed))
        return (
            f"JAX has summed it over {named}, and its mean would be {get_mesh_axis_size(summed)}"
            f" times too large. Differentiate `treeshard.manual.vary(params, {named})`. If"
            " `grad_fn` averages it, leave out `axis_names`."
        )
    return ""


def _depend_on_rows(grad_fn: GradFn, rows: Rows, key: Any) -> list[bool]:
    """Whether gradients depend on the rows of a batch, leaf by leaf."""
    jaxpr = jax.make_jaxpr(lambda rows: grad_fn(rows, key)[0])(rows).jaxpr
    made = {*jaxpr.invars}
    for eqn in jaxpr.eqns:
        if any(isinstance(x, Var) and x in made for x in eqn.invars):
            made |= {*eqn.outvars}
    return [isinstance(x, Var) and x in made for x in jaxpr.outvars]


# ------------------------------------------------------------------ parts of the batch


def _accumulate_parts(
    grad_fn: GradFn, batch: Rows, count: int, keys: Any, names: tuple[str, ...]
) -> tuple[PyTree, PyTree]:
    """Accumulates for each part of the batch along some axes, then reduces once over the parts.

    Along other axes, the rows of a part stay split, and the compiler partitions `grad_fn`.
    """
    sizes = [get_axes_size_in_mesh(name) for name in names]
    parts, dims = math.prod(sizes), tuple(range(len(names)))

    def part_by_part(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        x = x.reshape(*sizes, len(x) // parts, *x.shape[1:])
        # The rows of a part may be split over other axes.
        rest = [UNCONSTRAINED] * (x.ndim - len(names))
        return with_sharding_constraint(x, PartitionSpec(*names, *rest))

    def key_of_each_part(keys: Any) -> Any:
        keys = jnp.moveaxis(jax.vmap(partial(jax.random.split, num=parts))(keys), 1, 0)
        return keys.reshape(*sizes, *keys.shape[1:])

    def pinned(total: Any) -> Any:
        # Inside `vmap`, the constraint keeps the sums of each part on its devices. Otherwise the
        # compiler might reduce them in each pass.
        return with_sharding_constraint(total, PartitionSpec(*[UNCONSTRAINED] * total.ndim))

    def with_vmap(batch: Rows, keys: Any) -> tuple[PyTree, PyTree]:
        run = partial(_summed_up, grad_fn, count, pinned=pinned)
        for name in reversed(names):
            run = jax.vmap(run, axis_name=name, spmd_axis_name=name)
        return run(batch, keys)

    def with_shard_map(batch: Rows, keys: Any) -> tuple[PyTree, PyTree]:
        def part(batch: Rows, keys: Any) -> tuple[PyTree, PyTree]:
            own = jax.tree.map(lambda x: x.reshape(x.shape[len(names) :]), (batch, keys))
            with full_over((*full_over.value, *names)):
                sums = _summed_up(grad_fn, count, *own)
            return jax.tree.map(lambda x: jnp.expand_dims(x, dims), sums)

        each = PartitionSpec(*names)
        run = jax.shard_map(
            show_as(part, grad_fn),
            in_specs=each,
            out_specs=each,
            axis_names=set(names),
            check_vma=False,
        )
        return run(batch, keys)

    def in_parts(batch: Rows, keys: Any) -> tuple[PyTree, PyTree]:
        each = [*map(part_by_part, batch)], None if keys is None else key_of_each_part(keys)
        # The compiler for TPUs scatters sums inside `shard_map`; inside `vmap` it may all-reduce.
        try:
            return with_shard_map(*each)
        except ValueError as error:
            if not _is_about_meshes(error):  # an error of the user's function
                raise
        return with_vmap(*each)

    grads, metrics = jax.jit(show_as(in_parts, grad_fn))(batch, keys)
    metrics = map_metrics(lambda x: x.sum(dims), lambda x: x.sum(dims) / (count * parts), metrics)
    with jax.named_scope(AVERAGES_PARTS):
        grads = jax.tree.map(lambda x: x / count, grads)
    return _mean_of_parts(grads, names), metrics


def _is_about_meshes(error: ValueError) -> bool:
    """Whether JAX could not differentiate a loop with respect to values from outside `shard_map`.

    Outside, the axes are Auto, and inside they are Manual. JAX has no class for this error.
    """
    return re.match("Context mesh .* should match the mesh of", str(error)) is not None


def _mean_of_parts(grads: PyTree, names: tuple[str, ...]) -> PyTree:
    """The mean over the first dims, along `names`. A plan in force decides how it is sharded."""
    step, dims, specs = current_plan(), len(names), None
    if step is not None:
        with suppress(SpecError):  # gradients of no part of the state, or of several
            specs = step.specs_of(
                jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[dims:], x.dtype), grads)
            )
    if step is None or specs is None:
        return jax.tree.map(lambda x: x.mean(tuple(range(dims))), grads)
    mean = partial(_scattered_mean, names=names, mesh=step.plan.mesh)
    others = [axis for axis in axis_sizes(step.plan.mesh) if axis not in names]

    def of_this_device(grads: PyTree) -> PyTree:
        return jax.tree.map(lambda x, spec: mean(x.reshape(x.shape[dims:]), spec), grads, specs)

    scatter = jax.shard_map(
        of_this_device,
        # `shard_map` accepts only the mesh in force.
        mesh=None if context_mesh() is not None else get_incontext_mesh(),
        in_specs=PartitionSpec(*names),
        out_specs=jax.tree.map(lambda spec: drop_axes(spec, others), specs),
        axis_names=set(names),
        check_vma=False,
    )
    return jax.jit(scatter)(grads)


def _scattered_mean(x: Any, spec: PartitionSpec, names: tuple[str, ...], mesh: AnyMesh) -> Any:
    """The mean over `names`. This device keeps the shard that `spec` gives it."""
    from treeshard._core.torus import scatter_along

    total = x.astype(_wire_dtype(x, mesh))
    for dim, over in dims_over(spec, names):
        total = scatter_along(total, over, dim, mesh)
    used = get_names_from_partition_spec(spec)
    if rest := tuple(axis for axis in names if axis not in used):
        total = jax.lax.psum(total, rest)
    return (total / get_axes_size_in_mesh(names, mesh)).astype(x.dtype)


def _wire_dtype(x: Any, mesh: AnyMesh) -> Any:
    """The dtype in which an array is reduced. XLA for CPUs aborts if code by hand reduces 16-bit
    floats over some axes, and the compiler over others."""
    on_cpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return "float32" if on_cpus and x.dtype.itemsize < 4 else x.dtype


# ------------------------------------------------------------------ rows


def _rows_in(batch: PyTree) -> StaticSplit:
    """Splits a batch into arrays that are cut into minibatches, and leaves for all minibatches.

    An array of keys is cut if it has as many keys as the batch has rows.
    """
    leaves, treedef = tree_flatten(batch)
    arrays = [x for x in leaves if getattr(x, "shape", ())]
    lengths = {len(x) for x in arrays if not is_raw_key(x)}
    cut = {id(x) for x in arrays if not is_raw_key(x) or lengths <= {len(x)}}
    return StaticSplit(leaves, treedef, lambda x: id(x) in cut)


def _check_lengths(batch: PyTree, split: StaticSplit, count: int) -> None:
    """Raises `SpecError` unless all arrays that would be cut have as many rows."""
    rows = split.dynamic(tree_leaves(batch))
    lengths = [len(x) for x in rows]
    if len({*lengths}) < 2:
        return
    paths = split.dynamic(leaf_paths(batch))
    # The most frequent length is the number of rows; of several, the longest.
    usual = max(lengths, key=lambda length: (lengths.count(length), length))
    odd = [i for i, length in enumerate(lengths) if length != usual]
    headline = (
        f"accumulate_gradients: cuts each array of the batch into {count} minibatches, and they"
        " differ in the number of their rows:"
    )
    facts = [f"{path}: {array_text(x)}" for path, x in zip(paths, rows, strict=True)]
    some = ", ".join(f"`{path}`" for path in fold_paths([paths[i] for i in odd]))
    places = [keystr(place) for place, _ in tree_flatten_with_path(batch)[0]]
    one = split.dynamic(places)[odd[0]]
    raise SpecError(
        f"{listed(headline, facts, headed=True)}\nPass rows only. If {some} should not be cut,"
        f" leave it out of the batch, and let `grad_fn` close over `batch{one}`."
    )


def _check_divides(paths: Sequence[str], rows: Rows, count: int, parts: int) -> None:
    facts = [
        f"{path or 'the batch'}: {len(x)} rows are not divisible by {count} minibatches"
        f"{f' on {parts} devices' if parts > 1 else ''}. Use {_nearest(len(x), count * parts)}."
        for path, x in zip(paths, rows, strict=True)
        if len(x) % (count * parts)
    ]
    if facts:
        raise SpecError(listed("accumulate_gradients: the batch is not divisible:", facts))


def _nearest(rows: int, unit: int) -> str:
    below, above = rows // unit * unit, -(-rows // unit) * unit
    return f"{below} or {above}" if below else str(above)


def _split(x: Any, count: int) -> jax.Array:
    """Reshapes `(rows, ...)` to `(count, rows / count, ...)`.

    Minibatch `i` gets the rows `i`, `i + count`, ..., so no row has to move to another device.
    """
    x = jnp.asarray(x)
    return jnp.moveaxis(x.reshape(len(x) // count, count, *x.shape[1:]), 1, 0)


def _zeros(type_: Any) -> jax.Array:
    # The carry of a scan must keep its type: its sharding, the axes over which its sum waits, and
    # the axes along which it varies.
    zeros = jnp.zeros(type_.shape, type_.dtype)
    if not type_.sharding.mesh.empty and jax.typeof(zeros).sharding != type_.sharding:
        zeros = jax.sharding.reshard(zeros, type_.sharding)
    return vary_array(zeros, sorted(varying_axes_of_type(type_)))

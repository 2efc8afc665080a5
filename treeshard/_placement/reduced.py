"""Gathers weights so that their gradients are reduce-scattered, on meshes with Explicit axes.

On Explicit axes, the type of a value determines the type of its gradient. The gradient of a
replicated weight is replicated too, so each product with the weight ends in an all-reduce of the
full gradient. If the weight is `reduced` over some axes, as `float32[512,64]{R:fsdp}`, its gradient
is an unreduced sum, `{U:fsdp}`, until it is scattered. The compilers of JAX 0.10 to 0.12 still
all-reduce it after a `jax.sharding.reshard`. Only a gather inside `shard_map` is reduce-scattered.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.numpy import inexact, issubdtype
from jax.sharding import AxisType, PartitionSpec

from treeshard._core.mesh import AnyMesh, axes_of_type, context_mesh
from treeshard._core.specs import all_axes, axes_of, dims_over, drop_axes, entries, with_types
from treeshard._core.torus import covers_torus, gather_along, scatter_along

# The ranks of weights that are used in products: matrices, and stacks with a matrix per expert. JAX
# has no types for convolutions or sums with such weights.
PRODUCTS = (2, 3)


def waiting_over(x: Any, axes: Collection[str]) -> Any:
    """Types `x` so that its gradient is summed later over axes that do not shard it.

    The gradient is summed at this call, and not at each use of `x`.
    """
    spec = jax.typeof(x).sharding.spec
    over = spec.reduced | set(axes)
    return x if over == spec.reduced else jax.sharding.reshard(x, spec.update(reduced=over))


def drop_reduced(x: Any) -> Any:
    """`x`, typed so that its gradient is summed where it is used."""
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, spec.update(reduced=frozenset())) if spec.reduced else x


def reduce_unreduced(x: Any) -> Any:
    """`x`, whose sum over some axes waits, after the sum."""
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, with_types(spec, (), spec.reduced)) if spec.unreduced else x


# What may be done with values that are `reduced`, and with gradients that wait. For most other
# operations JAX has no rule, and raises. For some it has a wrong one, and gradients come out 2 or 8
# times too large: in JAX 0.10 to 0.12 in `auto_axes`, and so in `x.at[i].get(out_sharding=)` and
# `jnp.repeat`; in JAX 0.12 inside `jax.checkpoint`.
_BODIES = {"cond", "custom_jvp_call", "custom_vjp_call", "jit", "remat2", "scan", "shard_map"}
_MOVES = {"copy", "reshape", "reshard", "slice", "dynamic_slice", "squeeze", "transpose"}
_OF_REDUCED = {*_BODIES, *_MOVES, "convert_element_type", "dot_general"}
_OF_WAITING = {
    *(*_BODIES, *_MOVES),
    *("add", "add_any", "broadcast_in_dim", "dynamic_update_slice", "neg", "pad"),
}


def loses_sums(equations: Iterable[Any]) -> bool:
    """Whether a trace does more with `reduced` values, or with sums that wait, than what is right.

    Args:
        equations: All equations of the trace, including inner programs.
    """
    return any(map(_loses_sums, equations))


def _loses_sums(eqn: Any) -> bool:
    name = eqn.primitive.name
    specs = [_spec(x) for x in eqn.invars]
    is_reduced = any(spec.reduced for spec in specs)
    waits = any(spec.unreduced for spec in specs)
    if not (is_reduced or waits):
        return False
    if name == "convert_element_type" and waits:
        return not issubdtype(eqn.outvars[0].aval.dtype, inexact)
    if (is_reduced and name not in _OF_REDUCED) or (waits and name not in _OF_WAITING):
        return True
    return name == "reshard" and _changes_more_than_sums(*eqn.invars, *eqn.outvars)


def _changes_more_than_sums(before: Any, after: Any) -> bool:
    """Whether a reshard splits a value otherwise, or takes it to Auto axes."""
    to_auto = axes_of_type(after.aval.sharding.mesh, AxisType.Auto)
    return bool(to_auto) or entries(_spec(before)) != entries(_spec(after))


def _spec(variable: Any) -> PartitionSpec:
    sharding = getattr(variable.aval, "sharding", None)
    return PartitionSpec() if sharding is None else sharding.spec


def gathered_for_scatter(x: Any, axes: Collection[str]) -> Any:
    """`x`, gathered over some axes that split it. Its gradient is scattered over them.

    Over axes that `x` is `reduced` over, its gradient waits further.
    """
    spec = jax.typeof(x).sharding.spec
    gathered = {*all_axes(entries(spec))} & {*axes}
    result = drop_axes(spec, gathered).update(reduced=spec.reduced | gathered)
    if not all(_is_minor(entry, gathered) for entry in entries(spec)):
        return jax.sharding.reshard(x, result)

    over = dims_over(spec, tuple(gathered))
    mesh = context_mesh()
    if covers_torus(mesh, gathered):
        return _gathered_by_torus(x, over, spec, result, mesh)

    def gather(x: Any) -> Any:
        for dim, axes in over:
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True, to="reduced")
        return x

    return jax.shard_map(gather, in_specs=spec, out_specs=result)(x)


def _gathered_by_torus(
    x: Any,
    over: Sequence[tuple[int, tuple[str, ...]]],
    spec: PartitionSpec,
    result: PartitionSpec,
    mesh: AnyMesh | None,
) -> Any:
    """`x`, gathered over the axes of some dims. JAX 0.10 to 0.12 cannot gather to `reduced` over
    groups of devices, so that the derivative is written here, and types are not checked inside."""

    def gather(x: Any) -> Any:
        for dim, axes in over:
            x = gather_along(x, axes, dim, mesh)
        return x

    def scatter(x: Any) -> Any:
        for dim, axes in over:
            x = scatter_along(x, axes, dim, mesh)
        return x

    @jax.custom_vjp
    def gathered(x: Any) -> Any:
        return jax.shard_map(gather, in_specs=spec, out_specs=result, check_vma=False)(x)

    def scattered(_: None, g: Any) -> tuple[Any]:
        before, after = (with_types(each, each.reduced, ()) for each in (result, spec))
        return (jax.shard_map(scatter, in_specs=before, out_specs=after, check_vma=False)(g),)

    gathered.defvjp(lambda x: (gathered(x), None), scattered)
    return gathered(x)


def _is_minor(entry: Any, axes: Collection[str]) -> bool:
    """Whether the gathered parts of a dim lie side by side: its other axes split it first."""
    kept = [axis not in axes for axis in axes_of(entry)]
    return kept == sorted(kept, reverse=True)

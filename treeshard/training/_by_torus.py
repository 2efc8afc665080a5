"""Gradients on Auto axes, where an axis of the batch covers all dims of a TPU's torus.

The partitioner has reduced a gradient by the time that a function of ours could scatter it, and it
reduces over all dims of the torus at once. So the loss runs once per device, inside `shard_map`:
`unshard` gathers there as `manual.gather_params` does, which scatters dim after dim. That is right
only for a loss that is a mean over the rows of its arguments, and that uses weights through
`unshard` alone. Both are read from traces of the loss; any other is left to the partitioner.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import StaticSplit, is_array
from treeshard._core.mesh import get_axes_size_in_mesh, manual_axes
from treeshard._core.specs import dim_entries, without_axes
from treeshard._planning.plan_in_force import PlanInForce
from treeshard.training._mean_loss import NotAMean, check_mean, check_shards
from treeshard.training._metrics import Metrics

Loss = Callable[[list[Any], Any], tuple[Any, Any]]

# Arrays with more elements, closed over by the loss, would be gathered before it.
_MOST_CLOSED_OVER = 2**14


def by_torus(
    loss: Loss,
    arrays: list[Any],
    specs: Sequence[Any],
    args: Any,
    step: PlanInForce,
    over_parts: Callable[..., Callable[..., Any]],
) -> tuple[Any, Any, list[Any]] | None:
    """The value, `aux` and gradients of a loss; `None` if it cannot run once per device.

    Args:
        loss: `(arrays, args) -> (value, aux)`.
        arrays: The parameters.
        specs: Their specs; those of leaves that are not sharded may be `None`.
        args: What is split by rows.
        step: The step that is being traced.
        over_parts: Calls a function for each part of the rows.
    """
    mesh = step.plan.mesh
    done = manual_axes()  # as `accumulate_gradients` takes parts of the batch
    axes = tuple(axis for axis in step.rows if mesh.shape[axis] > 1 and axis not in done)
    others = [axis for axis in mesh.axis_names if axis not in axes]
    # The compiler gathers along axes of tensor parallelism what runs once per device along others.
    is_split_further = any(mesh.shape[axis] > 1 and axis not in done for axis in others)
    if is_split_further or not _have_equal_rows(args, axes, mesh):
        return None
    inside = _by_hand(step)
    own = [without_axes(PartitionSpec() if spec is None else spec, others) for spec in specs]

    def local(arrays: list[Any], args: Any) -> tuple[Any, Any, list[Any]]:
        _check(inside.inside(loss), arrays, own, args)
        # The backward pass gathers too, where a derivative is written by hand.
        differentiate = inside.inside(jax.value_and_grad(loss, has_aux=True))
        (value, aux), grads = differentiate(arrays, args)
        return value, aux, grads

    # The error of a loss that is wrong comes from the plain way too, with its own words.
    with suppress(Exception):
        return over_parts(axes, local, mesh, own)(arrays, args)
    return None


@lru_cache(maxsize=16)  # what is in force is a key of jit's caches
def _by_hand(step: PlanInForce) -> PlanInForce:
    from treeshard.manual import gather_params

    return replace(step, gather=gather_params)


def _have_equal_rows(args: Any, axes: tuple[str, ...], mesh: Any) -> bool:
    """Whether all arrays have as many rows, of which each device gets a part."""
    rows = {x.shape[0] for x in tree_leaves(args) if is_array(x) and x.ndim}
    parts = get_axes_size_in_mesh(axes, mesh)
    return len(rows) == 1 and not rows.pop() % parts


def _check(loss: Loss, arrays: list[Any], specs: Sequence[PartitionSpec], args: Any) -> None:
    """Raises `NotAMean` if a loss is not a mean over rows, or uses weights as they are."""
    leaves, treedef = tree_flatten(args)
    split = StaticSplit(leaves, treedef)
    is_sum: list[bool] = []

    def run(arrays: list[Any], data: list[Any]) -> tuple[Any, list[Any]]:
        value, aux = loss(arrays, split.combine(data))
        nodes = tree_leaves(aux, is_leaf=lambda x: isinstance(x, Metrics))
        results = [(x, isinstance(node, Metrics)) for node in nodes for x in tree_leaves(node)]
        is_sum[:] = [each for x, each in results if is_array(x)]
        return value, [x for x, _ in results if is_array(x)]

    # With 2 and 3 times the rows: the dims that differ are those of rows.
    traces = []
    for times in (2, 3):
        data = [_with_rows(x, times) for x in split.dynamic(leaves)]
        # A function of its own for each trace: JAX keeps what it has traced of one.
        traces.append(jax.jit(lambda *given: run(*given)).trace(arrays, data).jaxpr.jaxpr)
    first, second = traces
    closed_over = len(first.invars) - len(arrays) - len(split.dynamic(leaves))
    if any(x.aval.size > _MOST_CLOSED_OVER for x in first.invars[:closed_over]):
        raise NotAMean("it closes over large arrays")
    dims = [dim_entries(spec, x.ndim) for spec, x in zip(specs, arrays, strict=True)]
    check_shards(first, dims, closed_over)
    check_mean(first, second, closed_over + len(arrays), is_sum)


def _with_rows(x: Any, times: int) -> Any:
    if not x.ndim:
        return x
    return jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), x.dtype)

"""Gradients on Explicit axes: one sum per gradient, after all loops.

If a weight is typed as `reduced` over the axes of the batch, its gradient is a sum that waits
(`{U:data}`), through scans and additions, until `jax.sharding.reshard` ends the wait: one
all-reduce of shards in each step. JAX has no such types for biases, convolutions and a few more
operations. A first trace of the loss with plain types shows which weights have these uses. It fails
only if the loss itself is wrong. Errors are not caught, because the user has named the axes.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.tree_util import tree_flatten

from treeshard._core.arrays import StaticSplit
from treeshard._core.contexts import deferred_axes, summed_later
from treeshard._core.jaxprs import equations, inner_jaxprs, interpret
from treeshard._core.mesh import context_mesh
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._placement.reduced import loses_sums, reduce_unreduced, waiting_over
from treeshard._planning.plan_in_force import current_plan
from treeshard.training._type_errors import sharding_type_errors


def grads_with_deferred_sum(
    differentiate: Callable[..., Any], arrays: list[Any], axes: tuple[str, ...]
) -> tuple[Any, Any, list[Any]]:
    """The value, `aux` and gradients of a loss. The gradients wait for their sum over `axes`.

    Args:
        differentiate: `arrays -> ((value, aux), grads)`.
        arrays: The parameters.
        axes: The axes that split the rows of the batch.
    """
    structure: list[StaticSplit] = []

    def run(arrays: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        (value, aux), grads = differentiate(arrays)
        leaves, treedef = tree_flatten(aux)
        structure.append(StaticSplit(leaves, treedef))
        return value, structure[-1].dynamic(leaves), grads

    with deferred_axes(axes):
        typed = _type_as_waiting(run, arrays, axes)
        result = _call_unless_wrong(run, typed)
    if result is None:
        with deferred_axes(()):
            result = run(arrays)
    value, aux, grads = result
    if not summed_later.value:
        grads = [reduce_unreduced(x) for x in grads]
    return value, structure[-1].combine(aux), grads


def accumulate_with_deferred_sum(
    accumulate: Callable[[], tuple[Any, Any]], axes: tuple[str, ...]
) -> tuple[Any, Any]:
    """Sums of gradients and metrics over minibatches, summed over devices after all of them."""
    mesh, step = context_mesh(), current_plan()
    gathered = () if step is None else step.gathered_axes
    types = nullcontext() if mesh is None else sharding_type_errors(mesh, gathered, is_waiting=True)
    with deferred_axes(axes), summed_later(True), types:
        result = _call_unless_wrong(accumulate)
    if result is None:
        return accumulate()
    grads, metrics = result
    return jax.tree.map(reduce_unreduced, grads), metrics


def _call_unless_wrong(run: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of `reduced` values. Returns `None` if JAX has a wrong rule for an operation
    on them: the user's code is right, also without such types."""
    # Not inlined, because JAX would then give all its equations the line of this call.
    traceable = jax.jit(run)
    traced = traceable.trace(*arguments)  # kept alive, so that the call uses JAX's cache
    if loses_sums(equations(traced.jaxpr.jaxpr)):
        return None
    return traceable(*arguments)


# ------------------------------------------------------------------ which weights can wait

# Ops that keep the type of a weight: its gradient passes back through them unchanged.
_KEEPS = (
    *("all_gather", "all_gather_reduced", "convert_element_type", "copy", "dynamic_slice"),
    *("reshape", "reshard", "sharding_constraint", "slice", "squeeze", "transpose"),
)


def _type_as_waiting(
    run: Callable[..., Any], arrays: list[Any], axes: tuple[str, ...]
) -> list[Any]:
    """The arrays, as `reduced` if they have two dims or more and are used only in products."""
    over = [_select_unsplit(axes, x) if x.ndim > 1 else [] for x in arrays]
    if not any(over):
        return arrays
    in_sums = _find_in_sums(run, arrays)
    return [
        waiting_over(x, names) if names and i not in in_sums else x
        for i, (x, names) in enumerate(zip(arrays, over, strict=True))
    ]


def _select_unsplit(axes: Sequence[str], x: Any) -> list[str]:
    split = get_names_from_partition_spec(jax.typeof(x).sharding.spec)
    return [axis for axis in axes if axis not in split]


def _find_in_sums(run: Callable[..., Any], arrays: list[Any]) -> set[int]:
    """The arrays that are used outside of products, by a trace."""
    jaxpr = jax.jit(run).trace(arrays).jaxpr.jaxpr
    # The values that the loss closes over come first.
    closed_over = len(jaxpr.invars) - len(arrays)
    found: set[int] = set()
    _follow(jaxpr, [*[set[int]()] * closed_over, *({i} for i in range(len(arrays)))], found)
    return found


def _follow(jaxpr: Any, given: Sequence[set[int]], found: set[int]) -> list[set[int]]:
    """Adds to `found` the weights that are used outside of products.

    Takes the weights of each argument of the program, and returns the weights of each result.
    """
    empty = set[int]()

    def apply(eqn: Any, used: list[set[int]]) -> list[set[int]]:
        here = empty.union(*used)
        results = [empty] * len(eqn.outvars)
        if not here or eqn.primitive.name == "dot_general":
            return results
        inner = inner_jaxprs(eqn)
        sizes = [(len(x.invars), len(x.outvars)) for x in inner]
        if sizes == [(len(eqn.invars), len(eqn.outvars))]:
            return _follow(inner[0], used, found)
        if eqn.primitive.name in _KEEPS and not _is_gathered(eqn):
            return [here]
        found.update(here)
        return results

    constants = [empty] * len(jaxpr.constvars)
    return interpret(jaxpr, [*constants, *given], lambda _: empty, apply)


def _is_gathered(eqn: Any) -> bool:
    """Whether an op fully gathers a weight without the type `reduced`. Products then sum its
    gradient over the axes that split it, and in JAX all axes of a product wait together."""
    before, after = (x[0].aval.sharding.spec for x in (eqn.invars, eqn.outvars))
    kept = {*get_names_from_partition_spec(after), *after.reduced}
    return not kept.issuperset(get_names_from_partition_spec(before))

"""Gradients on Explicit axes: one sum of each over the axes that do not split it, after all loops.

A gradient of a weight that is typed as `reduced` over the axes of the batch is a sum that waits
(`{U:data}`), through scans and additions, until `jax.sharding.reshard` ends it: one all-reduce of
shards in each step. JAX has no such types for biases, convolutions and a few more operations; the
leaves that are used so are found by tracing, and reduced where they are used.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten

from treeshard._core.arrays import StaticSplit
from treeshard._core.contexts import summed_later
from treeshard._core.jaxprs import equations, inner_jaxprs, interpret
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._placement.reduced import loses_sums, reduce_unreduced, waiting_over


def grads_with_deferred_sum(
    differentiate: Callable[..., Any],
    arrays: list[Any],
    paths: Sequence[str],
    rows: Sequence[str],
) -> tuple[Any, Any, list[Any]]:
    """The value, `aux` and gradients of a loss; these wait for their sum over `rows`.

    The loss is traced once if all weights can wait, at most four times if some cannot, and three
    times if it raises an error of its own.

    Args:
        differentiate: `arrays -> ((value, aux), grads)`.
        arrays: The parameters.
        paths: Their paths. Layers of one kind are used alike.
        rows: The axes that split the rows of the batch.
    """
    structure: list[StaticSplit] = []

    def run(arrays: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        (value, aux), grads = differentiate(arrays)
        leaves, treedef = tree_flatten(aux)
        structure.append(StaticSplit(leaves, treedef))
        return value, structure[-1].dynamic(leaves), grads

    def with_waiting(chosen: Collection[int]) -> tuple[Any, list[Any], list[Any]] | None:
        typed = list(arrays)
        for i in chosen:
            typed[i] = waiting_over(arrays[i], _not_splitting(rows, arrays[i]))
        # What was traced before an error is dropped with this `jit`. It is not inlined: JAX would
        # give all its equations the line of this call.
        traceable = jax.jit(run)
        # JAX keeps the trace for the call, while this is alive.
        traced = trace_if_supported(traceable, typed)
        return None if traced is None else traceable(typed)

    can_wait = {i for i, x in enumerate(arrays) if x.ndim > 1 and _not_splitting(rows, x)}
    result = with_waiting(can_wait) if can_wait else None
    if can_wait and result is None:
        likely = can_wait - _in_sums(run, arrays, paths)
        result = with_waiting(likely) if likely else None
    value, aux, grads = run(arrays) if result is None else result
    if not summed_later.value:
        grads = [reduce_unreduced(x) for x in grads]
    return value, structure[-1].combine(aux), grads


def _not_splitting(rows: Sequence[str], x: Any) -> list[str]:
    split = get_names_from_partition_spec(jax.typeof(x).sharding.spec)
    return [axis for axis in rows if axis not in split]


def trace_if_supported(traceable: Any, *arguments: Any) -> jax.stages.Traced | None:
    """Traces a function of values that are `reduced`; `None` if JAX has no rules for its types.

    The caller then computes the same without such types. If the function itself is wrong, that
    raises its error, and not in the handler of another one: Python would show both.
    """
    try:
        traced = traceable.trace(*arguments)
    except Exception:  # of many classes, NotImplementedError and AssertionError among them
        return None
    return None if loses_sums(equations(traced.jaxpr.jaxpr)) else traced


# ------------------------------------------------------------------ which weights can wait

# What keeps the type of a weight: its gradient goes back through them as it is.
_KEEPS = (
    *("all_gather", "all_gather_reduced", "convert_element_type", "copy", "dynamic_slice"),
    *("reshape", "reshard", "sharding_constraint", "slice", "squeeze", "transpose"),
)


def _in_sums(run: Callable[..., Any], arrays: list[Any], paths: Sequence[str]) -> set[int]:
    """The arrays that are used elsewhere than in products, and those of their kind, by a trace.

    JAX has rules for weights in products whose gradients wait, and few others.
    """
    jaxpr = jax.jit(run).trace(arrays).jaxpr.jaxpr
    # What the loss closes over comes first.
    closed_over = len(jaxpr.invars) - len(arrays)
    found: set[int] = set()
    _follow(jaxpr, [*[set[int]()] * closed_over, *({i} for i in range(len(arrays)))], found)
    kinds = [re.sub(r"\d+", "*", path) for path in paths]
    alike = {kinds[i] for i in found}
    return {i for i, kind in enumerate(kinds) if kind in alike}


def _follow(jaxpr: Any, given: Sequence[set[int]], found: set[int]) -> list[set[int]]:
    """Adds to `found` the weights that are used elsewhere than in products.

    Takes the weights that each argument of the program is, and returns those that each result is.
    """
    nothing = set[int]()

    def apply(eqn: Any, used: list[set[int]]) -> list[set[int]]:
        here = nothing.union(*used)
        results = [nothing] * len(eqn.outvars)
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

    constants = [nothing] * len(jaxpr.constvars)
    return interpret(jaxpr, [*constants, *given], lambda _: nothing, apply)


def _is_gathered(eqn: Any) -> bool:
    """Whether a weight is whole afterwards, and not `reduced`: products then sum its gradient over
    the axes that split it, and JAX lets no axis of a product wait alone."""
    before, after = (x[0].aval.sharding.spec for x in (eqn.invars, eqn.outvars))
    kept = {*get_names_from_partition_spec(after), *after.reduced}
    return not kept.issuperset(get_names_from_partition_spec(before))


def accumulate_with_deferred_sum(accumulate: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Sums of gradients and metrics over minibatches, summed over devices after all of them.

    An error of the trace is raised as it is: the user has asked for the deferred sum by name.
    """
    with summed_later(True):
        traceable = jax.jit(accumulate)
        traced = traceable.trace()  # JAX keeps it for the call, while this is alive
        if not loses_sums(equations(traced.jaxpr.jaxpr)):
            grads, metrics = traceable()
            return jax.tree.map(reduce_unreduced, grads), metrics
    return accumulate()  # JAX has wrong rules for what is done with the gradients in each pass

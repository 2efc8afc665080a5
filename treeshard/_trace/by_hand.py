"""Finds code inside `shard_map` that uses shards of weights as if they were full weights.

Shapes often fit: a shard of a layer's columns gives fewer features, and their mean is a number. The
trace shows the mistake: the weight is used while it is split, and is never gathered.
"""

from collections.abc import Mapping
from typing import Any

from treeshard._core.jax_private import without_unused
from treeshard._planning.plan import Plan
from treeshard._trace.roles import TRAINED, roles_of, run_walk


def find_ungathered(jaxpr: Any, plan: Plan, axes: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The trained leaves that a step by hand uses split and never gathers, and over which axes.

    Args:
        jaxpr: The trace of the step, as for `roles_of`.
        plan: The plan of the state.
        axes: The axes over which a leaf has to be gathered, by its path.
    """
    along = set().union(*axes.values())
    roles = roles_of(jaxpr, plan, along)
    split = {
        path: of_leaf.intersection(roles[path].split).difference(
            *(gather.axes for gather in roles[path].gathers)
        )
        for path, of_leaf in axes.items()
        if roles[path].name == TRAINED
    }
    # The second walk is needed only if something looks wrong.
    if not any(split.values()):
        return {}
    # As experts do, activations may go to the devices that have the weights.
    sent = run_walk(without_unused(jaxpr), plan.leaves, along).sent
    return {path: sorted(left - sent) for path, left in split.items() if left - sent}

"""Finds code inside `shard_map` that uses shards of weights as if they were full weights.

Shapes often fit: a shard of a layer's columns gives fewer features, and a mean over them still
runs. The trace shows the mistake: the step uses the weight while it is split, and never gathers it.
"""

from collections.abc import Mapping
from typing import Any

from treeshard._core.jax_private import drop_unused
from treeshard._planning.plan import Plan
from treeshard._trace.roles import TRAINED, roles_of, run_walk


def find_ungathered(jaxpr: Any, plan: Plan, axes: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The trained leaves that a step uses as shards and never gathers, with the axes.

    Args:
        jaxpr: The trace of the step, as for `roles_of`.
        plan: The plan of the state.
        axes: By a leaf's path, the axes over which the step must gather the leaf.
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
    # The step may send activations to the devices that have the weights, as for experts.
    sent = run_walk(drop_unused(jaxpr), plan.leaves, along).sent
    return {path: sorted(left - sent) for path, left in split.items() if left - sent}
